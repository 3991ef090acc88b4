"""The Triton kernels on a real GPU. Without one, every test here is skipped by name.

``python -m triaccel.kernels.check --out result.json`` runs the same checks and the timings, and writes them down.
"""

import math

import pytest
import torch
from torch import nn

from triaccel.config import EngineConfig
from triaccel.kernels import AdamWRule, SgdRule, checks, dispatch, fused_update_, grad_stats
from triaccel.layers import find_layers
from triaccel.optim import Updater

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]
CUDA = torch.device("cuda")


def all_hold(results):
    assert results
    assert all(result["ok"] for result in results), [r for r in results if not r["ok"]]


def test_triton_is_what_runs():
    assert dispatch("cuda") == "triton"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics(dtype):
    all_hold(checks.check_stats(CUDA, dtype=dtype))


@pytest.mark.parametrize(
    "rule",
    [
        SgdRule(),
        SgdRule(momentum=0.9),
        SgdRule(momentum=0.9, nesterov=True),
        SgdRule(momentum=0.9, dampening=0.1, maximize=True),
        AdamWRule(),
    ],
    ids=str,
)
def test_update(rule):
    all_hold(checks.check_update(CUDA, rule))


def test_rounding():
    all_hold(checks.check_rounding(CUDA))


def test_gram():
    all_hold(checks.check_gram(CUDA))


@pytest.mark.parametrize("rule", [SgdRule(momentum=0.9), AdamWRule()], ids=str)
def test_unaligned_tensors(rule):
    """Views that start 4 bytes after an allocation take the narrow loads."""

    def views(seed):
        generator = torch.Generator(CUDA).manual_seed(seed)
        return [torch.randn(n + 1, generator=generator, device=CUDA)[1:] for n in (1, 1000, 20000)]

    results = []
    for backend in ("triton", "reference"):
        parameters, grads, first, second = (views(seed) for seed in (1, 2, 3, 4))
        second = [s.abs() for s in second]
        fused_update_(
            parameters,
            grads,
            first,
            second if isinstance(rule, AdamWRule) else [],
            rule=rule,
            rates=[0.1] * 3,
            weight_decays=[0.01] * 3,
            steps=[2] * 3,
            backend=backend,
        )
        results.append(parameters)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_nothing_waits_for_the_device():
    parameters = [torch.randn(1000, device=CUDA) for _ in range(4)]
    grads = [torch.randn(1000, device=CUDA) for _ in range(4)]
    first = [torch.zeros_like(p) for p in parameters]

    def step(rate):
        grad_stats(grads, [0, 0, 1, 1], segment_count=2)
        fused_update_(
            parameters,
            grads,
            first,
            [],
            rule=SgdRule(momentum=0.9),
            rates=[rate] * 4,
            weight_decays=[0.0] * 4,
            steps=[2] * 4,
            segments=[0, 0, 1, 1],
            segment_count=2,
        )

    step(0.1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(0.2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "build",
    [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4)],
)
@pytest.mark.parametrize("release", [False, True])
def test_training_equals_torch(build, release):
    results = []
    for engine in (None, EngineConfig(fused_update=True, gradient_release=release)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 5)).to(CUDA)
        optimizer = build(model.parameters())
        updater = Updater(optimizer, find_layers(model), engine=engine)
        for step in range(20):
            generator = torch.Generator(CUDA).manual_seed(step)
            inputs = torch.randn(8, 20, generator=generator, device=CUDA)
            optimizer.zero_grad()
            updater.begin_step(scales={"0": 0.5})
            model(inputs).square().mean().backward()
            updater.step(scales={"0": 0.5})
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_a_nonfinite_gradient_skips_one_parameter_without_a_sync_in_backward():
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 5)).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = EngineConfig(fused_update=True, gradient_release=True)
    updater = Updater(optimizer, find_layers(model), engine=engine)
    model[0].weight.register_hook(lambda g: g * math.nan)
    before = [p.detach().clone() for p in model.parameters()]
    updater.begin_step(scales={})
    model(torch.randn(8, 20, device=CUDA)).square().mean().backward()
    updater.step(scales={})
    assert updater.skipped_parameters == ("0.weight",)
    moved = [not p.detach().equal(b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [False, True, True, True]
    assert model[0].weight not in optimizer.state
