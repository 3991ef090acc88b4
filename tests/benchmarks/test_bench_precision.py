"""Settled map against FP32 and static BF16, against exhaustive search, and what the controller itself costs.

Steps alternate in blocks of three (the first, which pays for the change of map, is dropped) in one process; printed are
the median ratio over blocks with a 95 % bootstrap interval. Run with `make bench ARGS="-k precision"` on an idle machine.
"""

import itertools
import os
import statistics
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import efficientnet_b0, resnet18

from triaccel.casting import Caster
from triaccel.config import PrecisionConfig
from triaccel.cost import best_map, device_ladder, measure_costs
from triaccel.layers import find_layers
from triaccel.precision import make_precision_policy
from triaccel.statistics import GradientStatistics
from triaccel.types import LayerStats, Observation, Precision

BF16, FP32 = Precision.BF16, Precision.FP32

pytestmark = pytest.mark.skipif(
    BF16 not in device_ladder("cpu").precisions, reason="this CPU has no BF16 instructions: nothing to gain"
)


@pytest.fixture(autouse=True)
def _all_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


class Setting:
    """One model, one batch, and steps of it under any map."""

    def __init__(self, model, batch):
        torch.manual_seed(0)
        self.model = model.to(memory_format=torch.channels_last)
        self.inputs = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        self.targets = torch.randint(10, (batch,))
        self.layers = find_layers(self.model)
        self.infos = [layer.info for layer in self.layers]
        self.names = [info.name for info in self.infos if info.role == "compute"]
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9, weight_decay=5e-4)
        self.caster = Caster(self.model, self.layers, device_type="cpu")
        self.batch = batch

    def settled(self, budget=5.0):
        table = measure_costs(
            self.model,
            self.layers,
            self.inputs,
            batch_sizes=[self.batch],
            ladder=device_ladder("cpu"),
            budget_seconds=budget,
        )
        chosen, _ = best_map(
            table, self.infos, batch_size=self.batch, prefer="time", allowed=dict.fromkeys(self.names, BF16)
        )
        return chosen, table

    def step(self, kind):
        start = time.perf_counter()
        self.optimizer.zero_grad()
        if kind == "static":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = self.model(self.inputs)
        else:
            with self.caster.forward():
                outputs = self.model(self.inputs)
        F.cross_entropy(outputs.float(), self.targets).backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def block(self, kind, formats):
        if formats is None:
            self.caster.remove()
        else:
            self.caster.apply(formats, version=hash(tuple(formats.items())) & 0xFFFF)
        times = [self.step(kind) for _ in range(3)]
        return statistics.median(times[1:])

    def alternate(self, arms, rounds):
        seconds = {name: [] for name in arms}
        for i in range(rounds):
            for name in list(arms)[:: 1 if i % 2 else -1]:
                kind, formats = arms[name]
                seconds[name].append(self.block(kind, formats))
        return seconds


def ratio(a, b):
    """Median ratio over blocks with a 95 % bootstrap interval."""
    values = np.asarray(a) / np.asarray(b)
    resampled = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    return float(np.median(values)), f"{np.median(values):.3f} [{low:.3f}, {high:.3f}]"


@pytest.mark.parametrize(
    ("make", "batch", "against_fp32", "against_static"),
    [(efficientnet_b0, 256, 0.90, 0.50), (resnet18, 256, 0.75, 1.02), (resnet18, 96, None, 1.03)],
)
def test_bench_precision_settled_map(benchmark, make, batch, against_fp32, against_static):
    setting = Setting(make(num_classes=10), batch)
    chosen, table = setting.settled()
    arms = {
        "fp32": ("ours", dict.fromkeys(setting.names, FP32)),
        "static": ("static", None),
        "ours": ("ours", chosen),
    }
    seconds = benchmark.pedantic(setting.alternate, args=(arms, 8), rounds=1)
    low = sum(p is BF16 for p in chosen.values())
    to_fp32, to_static = ratio(seconds["ours"], seconds["fp32"]), ratio(seconds["ours"], seconds["static"])
    print(
        f"\n{make.__name__} batch {batch}: {low} of {len(chosen)} layers in BF16, table {table.measured_seconds:.1f} s; "
        f"step {1e3 * statistics.median(seconds['ours']):.1f} ms; ours / fp32 {to_fp32[1]} (target {against_fp32}), "
        f"ours / static bf16 {to_static[1]} (target {against_static})"
    )
    benchmark.extra_info.update(to_fp32=to_fp32[0], to_static=to_static[0])


def six_groups():
    """Six layer signatures, dense and depthwise, wide and narrow."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, groups=64),
        nn.ReLU(),
        nn.Conv2d(64, 128, 1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.Conv2d(128, 128, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(128, 128, 5, padding=2, groups=128),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(2048, 10),
    )


def test_bench_precision_exhaustive_search(benchmark):
    setting = Setting(six_groups(), 64)
    chosen, _ = setting.settled()

    def search():
        maps = [
            dict(zip(setting.names, formats, strict=True))
            for formats in itertools.product([FP32, BF16], repeat=len(setting.names))
        ]
        times = [statistics.median(setting.block("ours", formats) for _ in range(2)) for formats in maps]
        winner = maps[times.index(min(times))]
        return winner, setting.alternate({"winner": ("ours", winner), "ours": ("ours", chosen)}, 10)

    winner, seconds = benchmark.pedantic(search, rounds=1)
    value = ratio(seconds["ours"], seconds["winner"])
    print(
        f"\nsix groups, 64 maps: ours {[chosen[n].value for n in setting.names]}, "
        f"winner {[winner[n].value for n in setting.names]}; ours / winner {value[1]} (target 1.05)"
    )
    benchmark.extra_info["to_winner"] = value[0]


def controller_seconds(setting, formats, *, steps=72):
    """Seconds a step of check, statistics, policy and map at the defaults, with one control tick in ten steps.

    What the check reads is then in cache for the update, so both are timed together and the plain update is taken off.
    """
    config = PrecisionConfig(gate="off")
    statistic = GradientStatistics(setting.layers, decay=0.8, reference_batch=96, count_underflow=False)
    policy = make_precision_policy(
        config, ladder=device_ladder("cpu"), costs=None, initial_batch=96, total_samples=100_000
    )
    state = policy.init(tuple(setting.infos))
    seconds = {"plain": [], "check": [], "read": [], "tick": []}
    setting.caster.apply(formats, version=0)
    for index in range(steps):
        setting.optimizer.zero_grad()
        with setting.caster.forward():
            outputs = setting.model(setting.inputs)
        F.cross_entropy(outputs, setting.targets).backward()
        kind = ("plain", "check", "read")[index % 3]
        start = time.perf_counter()
        if kind != "plain":
            statistic.nonfinite_layers()
        if kind == "read":
            statistic.read(batch_size=96)
        setting.optimizer.step()
        seconds[kind].append(time.perf_counter() - start)
        start = time.perf_counter()
        layers = {n: LayerStats(variance=s.variance, curvature=1.0) for n, s in statistic.snapshot().items()}
        seen = Observation(index, index, 6_000 * (index + 1), 100_000, 96, layers, formats)
        state, _ = policy.step(state, seen)
        setting.caster.apply(formats, version=0)
        seconds["tick"].append(time.perf_counter() - start)
    plain, check, read, tick = (statistics.median(seconds[k]) for k in ("plain", "check", "read", "tick"))
    return check - plain + (read - check) / config.stats_every + tick / 10


def test_bench_precision_controller_share(benchmark):
    setting = Setting(resnet18(num_classes=10), 96)
    chosen, _ = setting.settled(3.0)
    fp32_map = dict.fromkeys(setting.names, FP32)
    seconds = setting.alternate({"fp32": ("ours", fp32_map), "ours": ("ours", chosen)}, 5)
    fp32, ours = (statistics.median(seconds[name]) for name in ("fp32", "ours"))
    controller = benchmark.pedantic(controller_seconds, args=(setting, chosen), rounds=1)
    print(
        f"\ncontroller {1e3 * controller:.2f} ms a step: {100 * controller / fp32:.2f} % of an FP32 step ({1e3 * fp32:.0f} ms), "
        f"{100 * controller / ours:.2f} % of a settled one ({1e3 * ours:.0f} ms) (target 1.5 %)"
    )


def test_bench_precision_controller_grows_linearly(benchmark):
    def seconds(count):
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(count)])
        layers = find_layers(model)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        statistic = GradientStatistics(layers, decay=0.8, reference_batch=96, count_underflow=False)
        policy = make_precision_policy(
            PrecisionConfig(rule="paper"),
            ladder=device_ladder("cpu"),
            costs=None,
            initial_batch=96,
            total_samples=100_000,
        )
        state = policy.init(tuple(layer.info for layer in layers))
        caster = Caster(model, layers, device_type="cpu")
        times = []
        for version in range(7):
            start = time.perf_counter()
            statistic.nonfinite_layers()
            statistic.read(batch_size=96)
            state, decision = policy.step(state, Observation(1, 1, 100, 1000, 96, statistic.snapshot()))
            caster.apply(decision.precision_map, version=version)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    sizes = (250, 500, 1000)
    measured = benchmark.pedantic(lambda: [seconds(n) for n in sizes], rounds=1)
    slope = np.polyfit(np.log(sizes), np.log(measured), 1)[0]
    print("\n" + ", ".join(f"{n} layers {1e3 * t:.1f} ms" for n, t in zip(sizes, measured, strict=True)))
    print(f"exponent {slope:.2f} (target 1: linear)")
    assert slope < 1.3
