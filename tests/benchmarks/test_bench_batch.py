"""What elastic batches cost and what they gain, on CPU, ResNet-18 at 32×32.

    make bench ARGS="-k batch"

Arms take turns; printed: the median of the ratios within rounds, and the 96 % interval of that median (order statistics).
"""

import io
import os
import tarfile
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn

from triaccel.batch import make_batch_policy
from triaccel.config import BatchConfig
from triaccel.memory import live_tensor_bytes, make_memory_probe
from triaccel.recovery import StepGuard, run_step_with_recovery
from triaccel.sampler import ElasticBatches, micro_batch_sizes, split_batch
from triaccel.types import NoiseScale, Observation

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
LAYOUT = {"memory_format": torch.channels_last}
ROUNDS = 9  # the 2nd and 8th of 9 enclose the median with 96 %
MIB = 2**20


def compare(base, other, *, rounds=ROUNDS):
    """(median ratio, low, high) of seconds of ``other`` over ``base``, taking turns, warm-up left out."""
    base(), other()
    ratios = []
    for index in range(rounds):
        seconds = {}
        for run in (base, other) if index % 2 == 0 else (other, base):
            start = time.perf_counter()
            run()
            seconds[run] = time.perf_counter() - start
        ratios.append(seconds[other] / seconds[base])
    ratios.sort()
    return median(ratios), ratios[1], ratios[-2]


def shown(what, ratio, wanted):
    middle, low, high = ratio
    print(f"\n{what}: {middle:.3f} x ({low:.3f} to {high:.3f}); wanted {wanted}")


class Training:
    """A plain loop: model, SGD with momentum, cross-entropy."""

    def __init__(self, *, bf16=False):
        torch.manual_seed(0)
        self.bf16 = bf16
        self.model = torchvision.models.resnet18(num_classes=10).to(**LAYOUT)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    def gradients(self, inputs, targets, micro=None):
        self.optimizer.zero_grad()
        sizes = micro_batch_sizes(len(targets), micro or len(targets), minimum=2)
        for x, y in split_batch((inputs, targets), sizes):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                outputs = self.model(x)
            (nn.functional.cross_entropy(outputs.float(), y) * (len(y) / len(targets))).backward()

    def step(self, inputs, targets):
        self.gradients(inputs, targets)
        self.optimizer.step()


def random_batch(size):
    return torch.randn(size, 3, 32, 32).contiguous(**LAYOUT), torch.randint(10, (size,))


def cifar(count):
    """``count`` training images of the JPEG archive, decoded; skips by name if it is not there."""
    from PIL import Image

    named = os.environ.get("TRIACCEL_CIFAR_JPEG")
    archive = (
        Path(named) if named else Path(__file__).resolve().parents[3] / "shared/data/cifar10-jpeg.tar.xz"
    )
    if not archive.is_file():
        pytest.skip(
            "cifar10-jpeg.tar.xz is not beside the checkout (shared/data) nor named by TRIACCEL_CIFAR_JPEG"
        )
    images, labels, classes = [], [], {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.startswith("train/"):
                name = member.name.split("/")[1]
                label = classes.setdefault(name, len(classes))
                pixels = Image.open(io.BytesIO(tar.extractfile(member).read())).convert("RGB")
                images.append(
                    torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8).view(32, 32, 3)
                )
                labels.append(label)
                if len(images) == count:
                    break
    pixels = torch.stack(images).permute(0, 3, 1, 2).float().div_(255).sub_(0.5).div_(0.25)
    return pixels.contiguous(**LAYOUT), torch.tensor(labels)


def test_tracked_step(benchmark):
    training = Training()
    batch = random_batch(96)

    def tracked():
        with live_tensor_bytes():
            training.step(*batch)

    ratio = benchmark.pedantic(lambda: compare(lambda: training.step(*batch), tracked), rounds=1)
    shown(
        "batch: a tracked CPU step over a plain one, ResNet-18 at 96", ratio, "one for each new (batch, map)"
    )


def test_control_cost(benchmark):
    """Seconds of everything that every step and every tick adds, over the seconds of a step."""
    training = Training()
    batch = random_batch(96)
    config = BatchConfig()
    policy = make_batch_policy(config, total_samples=10**6)
    probe = make_memory_probe("cpu", budget_bytes=512 * MIB, margin=config.margin)
    guard = StepGuard(training.model)
    for size in (96, 96, 128, 192, 256):
        with probe.observe(batch_size=size, map_version=0):
            training.step(*random_batch(16))

    def seconds(run, times):
        found = []
        for _ in range(times):
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
        return median(found)

    def every_step():
        with probe.observe(batch_size=96, map_version=0):
            run_step_with_recovery(
                lambda size: size, guard=guard, micro_batch_size=96, minimum=2, on_floor=lambda: None
            )

    def every_tick():
        state = policy.init(())
        seen = Observation(
            100, 100, 9600, 10**6, 96, memory=probe.reading(), noise=NoiseScale(300.0, 1.0, 1.0, 4)
        )
        policy.step(state, seen)

    def measure():
        step, tick = seconds(every_step, 300), seconds(every_tick, 100)
        plain = seconds(lambda: training.step(*batch), 9)
        tracked, _low, _high = compare(lambda: training.step(*batch), tracked_step)
        return plain, step, tick, tracked

    def tracked_step():
        with live_tensor_bytes():
            training.step(*batch)

    plain, step, tick, tracked = benchmark.pedantic(measure, rounds=1)
    # a tick is ten steps; a run of 30 epochs of 50,000 at 96 has 15,600 steps, of which some 40 meet a new (batch, map)
    share = (step + tick / 10 + 40 / 15_600 * (tracked - 1) * plain) / plain
    print(
        f"\nbatch: control {1e6 * step:.0f} us a step and {1e6 * tick:.0f} us a tick, of a step of {1e3 * plain:.0f} ms; "
        f"tracked step {tracked:.3f} x, 40 of them a run: {share:.2%} in all; wanted 0.5 %"
    )


def test_throughput_of_batch_and_bf16(benchmark):
    """Images per second at a 512 MiB budget: BF16 with the batch that memory allows, over FP32 at 96."""
    inputs, targets = cifar(2048)
    plain, elastic = Training(), Training(bf16=True)
    config = BatchConfig(noise_cap=0, min_updates=0, budget_bytes=512 * MIB)
    policy = make_batch_policy(config, total_samples=10**6)
    probe = make_memory_probe("cpu", budget_bytes=config.budget_bytes, margin=config.margin)
    guard = StepGuard(elastic.model)
    control = {"state": policy.init(()), "step": 0, "seen": 0, "tick": 960}
    control["decision"] = policy.initial(control["state"])
    batches = {
        "fp32": iter(
            ElasticBatches((inputs, targets), epochs=1000, batch_size=lambda: 96, seed=0, tail="drop")
        ),
        "bf16": iter(
            ElasticBatches(
                (inputs, targets),
                epochs=1000,
                batch_size=lambda: control["decision"].batch_size,
                seed=0,
                tail="drop",
                minimum_micro=2,
            )
        ),
    }

    def fixed():
        seen = 0
        while seen < 960:
            x, y = next(batches["fp32"])
            plain.step(x.contiguous(**LAYOUT), y)
            seen += len(y)
        return seen

    def adapted():
        seen = 0
        while seen < 960:
            x, y = next(batches["bf16"])
            with probe.observe(batch_size=len(y), map_version=0):
                run_step_with_recovery(
                    lambda micro, x=x, y=y: elastic.gradients(x.contiguous(**LAYOUT), y, micro),
                    guard=guard,
                    micro_batch_size=len(y),
                    minimum=2,
                    on_floor=lambda: None,
                )
                elastic.optimizer.step()
            seen += len(y)
            control["step"] += 1
            control["seen"] += len(y)
            if control["seen"] >= control["tick"]:
                control["tick"] = control["seen"] + 960
                seen_now = Observation(
                    control["step"], control["step"], control["seen"], 10**6, len(y), memory=probe.reading()
                )
                control["state"], control["decision"] = policy.step(control["state"], seen_now)
        return seen

    def measure():
        while control["decision"].batch_size < 512:
            adapted()
        adapted()
        fixed()
        ratios = []
        for index in range(ROUNDS):
            rates = {}
            for run in (fixed, adapted) if index % 2 == 0 else (adapted, fixed):
                start = time.perf_counter()
                seen = run()
                rates[run] = seen / (time.perf_counter() - start)
            ratios.append((rates[adapted] / rates[fixed], rates[adapted], rates[fixed]))
        return sorted(ratios)

    ratios = benchmark.pedantic(measure, rounds=1)
    values = [ratio for ratio, *_ in ratios]
    shown(
        "batch: images/s of batch + BF16 at 512 MiB over FP32 at 96",
        (median(values), values[1], values[-2]),
        ">= 1.5 x",
    )
    print(
        f"  {median(r for _, r, _ in ratios):.0f} against {median(r for *_, r in ratios):.0f} images/s; batch "
        f"{control['decision'].batch_size}, peak {probe.reading().used_bytes / MIB:.0f} MiB of {512}"
    )
