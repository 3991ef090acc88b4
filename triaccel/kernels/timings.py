"""Times of the Triton kernels on parameters of the sizes of ResNet-50, beside a device copy and ``torch.optim``'s fused step.

Bytes moved per second as a share of what a device copy moves; ratios to the fused step plus a separate statistics pass, from
alternating runs: median and 5 % to 95 % of the ratios within rounds. Device time and host time are told apart. A few block sizes
are timed beside the defaults.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import AdamWRule, SgdRule, UpdateRule, grad_stats, gram

__all__ = ["alternate", "ratio", "run_timings"]

Result = dict[str, Any]
QUEUE_CYCLES = 60_000_000
"""About 30 ms at 2 GHz: the host queues 20 steps of ResNet-50 meanwhile."""


def _generator(device: torch.device, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=generator.device)


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Shapes of the 161 parameters of torchvision's ResNet-50, 25.6 million entries."""
    from torchvision.models import resnet50

    with torch.device("meta"):
        return [tuple(p.shape) for p in resnet50().parameters()]


def _seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds per call, by device events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    # The device is kept busy while the host queues everything: what is timed is the device's work, not the host's.
    torch.cuda._sleep(QUEUE_CYCLES)  # type: ignore[no-untyped-call]
    before.record()
    for _ in range(repeats):
        run()
    after.record()
    torch.cuda.synchronize(device)
    return float(before.elapsed_time(after)) * 1e-3 / repeats


def alternate(
    arms: dict[str, Callable[[], object]], device: torch.device, *, rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds per call of each arm in each round, arms taking turns, first round dropped."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 1):
        for name, run in arms.items():
            times[name].append(_seconds(run, device, repeats))
    return {name: values[1:] for name, values in times.items()}


def ratio(times: dict[str, list[float]], name: str, base: str) -> dict[str, float]:
    """Median and 5 % to 95 % of the ratios within rounds."""
    ratios = sorted(a / b for a, b in zip(times[name], times[base], strict=True))
    last = len(ratios) - 1
    return {
        "median": statistics.median(ratios),
        "low": ratios[round(0.05 * last)],
        "high": ratios[round(0.95 * last)],
    }


def run_timings(
    device: torch.device,
    *,
    shapes: Sequence[tuple[int, ...]] | None = None,
    rounds: int = 20,
    repeats: int = 20,
) -> Result:
    """Bandwidth and ratios of every kernel; see the module."""
    shapes = list(shapes or resnet50_shapes())
    generator = _generator(device)
    parameters = [_normal(shape, generator).mul_(0.01) for shape in shapes]
    grads = [_normal(shape, generator).mul_(1e-3) for shape in shapes]
    segments = list(range(len(shapes)))
    entries = sum(p.numel() for p in parameters)
    arms: dict[str, Callable[[], object]] = {}
    moved: dict[str, int] = {}
    # A copy reads and writes 4 bytes per entry; twice the size, so that it leaves the cache as the update does.
    source, target = torch.empty(2 * entries, device=device), torch.empty(2 * entries, device=device)
    arms["copy"], moved["copy"] = lambda: target.copy_(source), 16 * entries

    def stats(extremes: bool) -> Callable[[], object]:
        return lambda: grad_stats(
            grads, segments, segment_count=len(shapes), extremes=extremes, backend="triton"
        )

    arms["grad_stats"], moved["grad_stats"] = stats(False), 4 * entries
    arms["grad_stats extremes"], moved["grad_stats extremes"] = stats(True), 4 * entries

    def separate() -> object:
        return torch._foreach_norm(grads), [g.sum() for g in grads]

    for kind, width in (("sgd", 20), ("adamw", 28)):
        rule: UpdateRule = AdamWRule() if kind == "adamw" else SgdRule(momentum=0.9)
        for low in (False, True):
            for with_stats in (False, True):
                name = f"fused_update {kind}{' bf16' if low else ''}{' stats' if with_stats else ''}"
                arms[name] = _update_arm(parameters, grads, rule, low=low, stats=with_stats)
                moved[name] = (width - (4 if low else 0)) * entries
        leaves = [p.clone().requires_grad_() for p in parameters]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(leaves, lr=1e-6, fused=True)
            if kind == "adamw"
            else torch.optim.SGD(leaves, lr=1e-6, momentum=0.9, weight_decay=1e-4, fused=True)
        )
        arms[f"torch fused {kind}"] = optimizer.step
        arms[f"torch fused {kind} + statistics"] = _both(optimizer.step, separate)
        moved[f"torch fused {kind}"] = width * entries
    times = alternate(arms, device, rounds=rounds, repeats=repeats)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rate = {name: moved[name] / medians[name] for name in moved}
    report: Result = {
        "entries": entries,
        "tensors": len(shapes),
        "median_seconds": medians,
        "bytes_per_second": rate,
        "share_of_copy_bandwidth": {name: rate[name] / rate["copy"] for name in rate if name != "copy"},
        "ratio_to_torch_fused_plus_statistics": {
            kind: ratio(times, f"fused_update {kind} stats", f"torch fused {kind} + statistics")
            for kind in ("sgd", "adamw")
        },
        "ratio_to_torch_fused": {
            kind: ratio(times, f"fused_update {kind}", f"torch fused {kind}") for kind in ("sgd", "adamw")
        },
    }
    report["host_seconds"] = _host_seconds(arms, device)
    report["must_reach"] = {
        name: report["share_of_copy_bandwidth"][name] >= 0.8
        for name in ("grad_stats", "fused_update sgd", "fused_update adamw")
    } | {
        f"fused_update {kind} stats faster than torch": report["ratio_to_torch_fused_plus_statistics"][kind][
            "median"
        ]
        < 1.0
        for kind in ("sgd", "adamw")
    }
    report["blocks"] = _time_blocks(parameters, grads, device, rounds=max(2, rounds // 4), repeats=repeats)
    report["gram"] = _time_gram(device, rounds=max(2, rounds // 4), repeats=max(1, repeats // 4))
    return report


def _host_seconds(arms: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """What one call costs the host, the device having nothing else to do."""
    found = {}
    for name, run in arms.items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        found[name] = time.perf_counter() - start
    return found


def _update_arm(
    parameters: list[Tensor], grads: list[Tensor], rule: UpdateRule, *, low: bool, stats: bool, **config: int
) -> Callable[[], object]:
    from . import triton_update

    first = [torch.zeros_like(p, dtype=torch.bfloat16 if low else torch.float32) for p in parameters]
    second = [torch.zeros_like(p) for p in parameters] if isinstance(rule, AdamWRule) else []
    count = len(parameters)
    copies = [p.clone() for p in parameters]

    def run() -> object:
        return triton_update.fused_update_(
            copies,
            grads,
            first,
            second,
            rule=rule,
            rates=[1e-6] * count,
            weight_decays=[1e-4] * count,
            steps=[2] * count,
            segments=list(range(count)) if stats else None,
            segment_count=count,
            **config,  # type: ignore[arg-type]
        )

    return run


def _both(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        first()
        second()

    return run


def _time_blocks(
    parameters: list[Tensor], grads: list[Tensor], device: torch.device, *, rounds: int, repeats: int
) -> Result:
    """Median seconds of other block sizes and warps, so that the defaults can be set from a measurement."""
    from . import triton_stats

    arms: dict[str, Callable[[], object]] = {}
    segments = list(range(len(grads)))
    for block, warps in ((1024, 4), (1024, 8), (2048, 8), (4096, 8)):

        def stats(block: int = block, warps: int = warps) -> object:
            return triton_stats.grad_stats(
                grads, segments, segment_count=len(grads), block=block, warps=warps
            )

        arms[f"grad_stats {block}/{warps}"] = stats
        for kind in ("sgd", "adamw"):
            rule: UpdateRule = AdamWRule() if kind == "adamw" else SgdRule(momentum=0.9)
            arms[f"fused_update {kind} {block}/{warps}"] = _update_arm(
                parameters, grads, rule, low=False, stats=False, block=block, warps=warps
            )
    times = alternate(arms, device, rounds=rounds, repeats=repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def _time_gram(device: torch.device, *, rounds: int, repeats: int) -> Result:
    """Both routes, Triton and reference, on three layers of ResNet-18 at 32 x 32: (N, B, T, I, O)."""
    generator = _generator(device)
    report: Result = {}
    for shape in ((1, 32, 256, 147, 64), (1, 32, 64, 576, 64), (1, 32, 1, 4608, 512)):
        n, b, t, i, o = shape if device.type == "cuda" else (1, 4, 4, 8, 8)
        a, g = _normal((n, b, t, i), generator), _normal((n, b, t, o), generator)
        arms: dict[str, Callable[[], object]] = {}
        for route in ("outer", "pairs"):
            for backend in ("triton", "reference"):

                def run(route: str = route, backend: str = backend, a: Tensor = a, g: Tensor = g) -> object:
                    return gram(a, g, route=route, backend=backend)  # type: ignore[arg-type]

                arms[f"{route} {backend}"] = run
        times = alternate(arms, device, rounds=rounds, repeats=repeats)
        report[str(shape)] = {name: statistics.median(values) for name, values in times.items()}
    return report
