"""The update on CPU against the fastest of ``torch.optim``'s own steps, and what the engine saves in peak live tensor bytes.

    make bench ARGS="-k kernels -s"

Ratios are within rounds, arms taking turns; printed: median and 5 % to 95 %.
"""

import pytest
import torch
from torch import nn

from triaccel.config import EngineConfig
from triaccel.kernels import grad_stats
from triaccel.kernels.timings import alternate, ratio
from triaccel.layers import find_layers
from triaccel.live_tensors import live_tensor_bytes
from triaccel.optim import Updater

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
CPU = torch.device("cpu")
MIB = 2**20


def resnet18():
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).to(memory_format=torch.channels_last)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    return model


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=5e-4, **options)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def torch_steps(build):
    models = {"foreach": resnet18(), "fused": resnet18()}
    return {f"torch {name}": build(model, **{name: True}).step for name, model in models.items()}


def ours(build, engine=None, *, check=False, statistics=False, scales=None):
    model = resnet18()
    layers = find_layers(model)
    updater = Updater(build(model), layers, engine=engine)
    parameters = [p for layer in layers for p in layer.parameters]
    segments = [i for i, layer in enumerate(layers) for _ in layer.parameters]

    def run():
        grads = [p.grad for p in parameters]
        if check:
            assert bool(torch.isfinite(torch.stack(torch._foreach_norm(grads)).sum()))
        if statistics:
            grad_stats(grads, segments, segment_count=len(layers))
        updater.step(scales=scales or {})

    return run


def show(times, base):
    print()
    for name, values in times.items():
        median = sorted(values)[len(values) // 2]
        found = ratio(times, name, base)
        print(
            f"  {name:28} {1e3 * median:7.2f} ms   {found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}] x {base}"
        )


@pytest.mark.parametrize("build", [sgd, adamw])
def test_bench_kernels_update(benchmark, build):
    fused = EngineConfig(fused_update=True)
    scales = {
        layer.name: 0.5 + 0.05 * i for i, layer in enumerate(find_layers(resnet18())) if layer.parameters
    }
    arms = torch_steps(build) | {
        "updater, own step": ours(build),
        "updater, own step, 41 rates": ours(build, scales=scales),
        "fused": ours(build, fused),
        "fused, 41 rates": ours(build, fused, scales=scales),
        "fused, check": ours(build, fused, check=True),
        "fused, check, statistics": ours(build, fused, check=True, statistics=True),
        "fused, BF16 momentum": ours(build, EngineConfig(fused_update=True, momentum_bf16=True)),
    }
    times = benchmark.pedantic(
        alternate, args=(arms, CPU), kwargs={"rounds": 15, "repeats": 2}, rounds=1, iterations=1
    )
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    base = min(("torch foreach", "torch fused"), key=medians.__getitem__)
    show(times, base)
    amortised = (9 * medians["fused, check"] + medians["fused, check, statistics"]) / (
        10 * medians["fused, check"]
    )
    print(f"  statistics every 10 steps: {amortised:.3f} x the step with the check, amortised")
    assert ratio(times, "fused", base)["median"] <= 1.05
    assert ratio(times, "fused, check", base)["median"] <= 1.30
    assert amortised <= 1.10


def peak_bytes(build_model, *, engine=None, precision=torch.float32, batch=96):
    """Peak live tensor bytes of the second step at 32 x 32, the first having made the optimizer's state."""
    torch.manual_seed(0)
    model = build_model(num_classes=10).to(memory_format=torch.channels_last)
    optimizer = sgd(model)
    updater = Updater(optimizer, find_layers(model), engine=engine)
    inputs = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
    targets = torch.randint(10, (batch,))
    resident = [*model.parameters(), *model.buffers(), inputs, targets]

    def step():
        optimizer.zero_grad(set_to_none=True)
        updater.begin_step(scales={})
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            outputs = model(inputs)
        nn.functional.cross_entropy(outputs.float(), targets).backward()
        updater.step(scales={})

    step()
    resident += [
        t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)
    ]
    with live_tensor_bytes(resident) as tracker:
        step()
    return tracker.peak_bytes


@pytest.mark.parametrize(("name", "target"), [("resnet18", -0.20), ("efficientnet_b0", -0.35)])
def test_bench_kernels_memory(benchmark, name, target):
    release = EngineConfig(gradient_release=True)
    low = EngineConfig(fused_update=True, momentum_bf16=True)
    everything = EngineConfig(fused_update=True, momentum_bf16=True, gradient_release=True)
    arms = {
        "fp32": {},
        "bf16 compute": {"precision": torch.bfloat16},
        "release": {"engine": release},
        "release + fused": {"engine": EngineConfig(gradient_release=True, fused_update=True)},
        "bf16 momentum": {"engine": low},
        "release + bf16 momentum": {"engine": everything},
        "bf16 compute + release": {"engine": release, "precision": torch.bfloat16},
        "all three": {"engine": everything, "precision": torch.bfloat16},
    }

    def measure():
        return {
            arm: peak_bytes(getattr(torchvision.models, name), **options) for arm, options in arms.items()
        }

    peaks = benchmark.pedantic(measure, rounds=1, iterations=1)
    print(f"\n  {name}, batch 96, peak live tensor bytes (without oneDNN scratch)")
    for arm, peak in peaks.items():
        print(f"  {arm:28} {peak / MIB:7.1f} MiB   {100 * (peak / peaks['fp32'] - 1):+.1f} %")
    assert peaks["all three"] / peaks["fp32"] - 1 <= target
