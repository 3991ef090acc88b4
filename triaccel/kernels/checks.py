"""Triton kernels against float64, as data: each check has a name, the deviation found and the limit from ``TOLERANCE``.

Non-finite counts must be exact, stochastic rounding unbiased and reproducible. They run on a GPU, or interpreted on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import AdamWRule, SgdRule, UpdateRule, fused_update_, grad_stats, gram
from .tolerance import TOLERANCE, deviation

__all__ = ["check_gram", "check_rounding", "check_stats", "check_update", "run_checks"]

Result = dict[str, Any]
SHAPES = ((1,), (0,), (3,), (17, 5), (64, 3, 7, 7), (1000,), (16384,), (16385,), (257, 1031))


def _result(name: str, found: float, limit: float) -> Result:
    return {"name": name, "deviation": found, "limit": limit, "ok": bool(found <= limit)}


def _generator(device: torch.device, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=generator.device)


def check_stats(
    device: torch.device, *, shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[Result]:
    """Gradient statistics against float64, with infinities, NaN, zeros and entries that FP16 loses among them."""
    generator = _generator(device)
    grads = [_normal(shape, generator).mul_(1e-3).to(dtype) for shape in shapes]
    for grad in grads:
        entries = grad.view(-1)
        if entries.numel() > 10:
            entries[1], entries[3], entries[5], entries[6] = math.inf, -math.inf, math.nan, 0.0
            entries[7:9] = 1e-9
    segments = [i % 4 for i in range(len(grads))]
    found = grad_stats(grads, segments, segment_count=5, extremes=True, backend="triton").values.cpu()
    exact = torch.zeros(5, 7, dtype=torch.float64)
    magnitude = torch.zeros(5, dtype=torch.float64)
    for grad, s in zip(grads, segments, strict=True):
        entries = grad.cpu().double().view(-1)
        kept = entries[entries.isfinite()]
        exact[s, 0] += entries.numel()
        exact[s, 1] += kept.sum()
        exact[s, 2] += kept.square().sum()
        exact[s, 3] += entries.numel() - kept.numel()
        exact[s, 4] = max(exact[s, 4], kept.abs().max()) if kept.numel() else exact[s, 4]
        exact[s, 5] += (entries != 0).sum()
        exact[s, 6] += ((kept != 0) & (kept.abs() < 2.0**-24)).sum()
        magnitude[s] += kept.abs().sum()
    name = f"grad_stats {str(dtype).removeprefix('torch.')}"
    exactly = [0, 3, 4, 5, 6]
    return [
        _result(
            f"{name} sum",
            deviation(found[:, 1], exact[:, 1], magnitude.clamp_min(1e-30)),
            TOLERANCE["total", dtype].value,
        ),
        _result(
            f"{name} squares",
            deviation(found[:, 2], exact[:, 2], exact[:, 2].clamp_min(1e-30)),
            TOLERANCE["square", dtype].value,
        ),
        _result(f"{name} counts", float((found[:, exactly] - exact[:, exactly]).abs().max()), 0.0),
    ]


def check_update(
    device: torch.device, rule: UpdateRule, *, steps: int = 3, shapes: Sequence[Sequence[int]] = SHAPES
) -> list[Result]:
    """Fused update against the same rule in float64, and statistics of the same gradients against ``grad_stats``."""
    generator = _generator(device)
    parameters = [_normal(shape, generator) for shape in shapes]
    exact = [p.cpu().double() for p in parameters]
    momentum = isinstance(rule, AdamWRule) or rule.momentum != 0
    first = [torch.zeros_like(p) for p in parameters] if momentum else []
    second = [torch.zeros_like(p) for p in parameters] if isinstance(rule, AdamWRule) else []
    moments = [(torch.zeros_like(e), torch.zeros_like(e)) for e in exact]
    rates = [0.01 * (1 + i % 3) for i in range(len(parameters))]
    worst = 0.0
    stats = 0.0
    for step in range(1, steps + 1):
        grads = [_normal(shape, generator) for shape in shapes]
        got = fused_update_(
            parameters,
            grads,
            first,
            second,
            rule=rule,
            rates=rates,
            weight_decays=[0.01] * len(parameters),
            steps=[step] * len(parameters),
            segments=[0] * len(parameters),
            segment_count=1,
            backend="triton",
        )
        alone = grad_stats(grads, [0] * len(grads), segment_count=1, backend="triton")
        assert got is not None
        stats = max(stats, deviation(got.values[:, :4], alone.values[:, :4]))
        for e, g, (m, v), rate in zip(exact, grads, moments, rates, strict=True):
            _exact_step(e, g.cpu().double(), m, v, rule=rule, rate=rate, decay=0.01, step=step)
    for p, e in zip(parameters, exact, strict=True):
        worst = max(worst, deviation(p.cpu(), e))
    return [
        _result(f"fused_update {rule}", worst, steps * TOLERANCE["update", torch.float32].value),
        _result(f"fused_update {rule} statistics", stats, 2 * TOLERANCE["square", torch.float32].value),
    ]


def _exact_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, *, rule: UpdateRule, rate: float, decay: float, step: int
) -> None:
    """The textbook rule, in the dtype of its arguments."""
    g = -g if rule.maximize else g
    if isinstance(rule, AdamWRule):
        p.mul_(1 - rate * decay)
        m.lerp_(g, 1 - rule.beta1)
        v.mul_(rule.beta2).addcmul_(g, g, value=1 - rule.beta2)
        root = v.sqrt() / math.sqrt(1 - rule.beta2**step) + rule.eps
        p.addcdiv_(m, root, value=-rate / (1 - rule.beta1**step))
        return
    g = g + decay * p
    if rule.momentum:
        if step == 1:
            m.copy_(g)
        else:
            m.mul_(rule.momentum).add_(g, alpha=1 - rule.dampening)
        g = g + rule.momentum * m if rule.nesterov else m
    p.sub_(rate * g)


def check_rounding(device: torch.device, *, entries: int = 1 << 20) -> list[Result]:
    """BF16 momentum: only the two neighbours occur, the mean is exact within 5 standard errors, equal seeds give equal bits."""

    def momentum(seed: int, fraction: float) -> Tensor:
        value = 1.0 + fraction * 2.0**-7
        first = [torch.zeros(entries, dtype=torch.bfloat16, device=device)]
        fused_update_(
            [torch.zeros(entries, device=device)],
            [torch.full((entries,), value, device=device)],
            first,
            [],
            rule=SgdRule(momentum=0.9),
            rates=[0.1],
            weight_decays=[0.0],
            steps=[1],
            seed=seed,
            sequence=3,
            backend="triton",
        )
        return first[0].double()

    results = []
    for fraction in (0.1, 0.5, 0.75):
        up = (momentum(7, fraction) - 1.0) * 2.0**7
        results.append(
            _result(f"rounding to neighbours, {fraction}", float(((up != 0) & (up != 1)).sum()), 0.0)
        )
        limit = 5 * math.sqrt(fraction * (1 - fraction) / entries)
        results.append(_result(f"rounding mean, {fraction}", abs(float(up.mean()) - fraction), limit))
    same = float((momentum(7, 0.5) != momentum(7, 0.5)).sum())
    other = float((momentum(7, 0.5) == momentum(8, 0.5)).double().mean())
    results.append(_result("rounding reproducible", same, 0.0))
    results.append(_result("rounding follows the seed", abs(other - 0.5), 5 * math.sqrt(0.25 / entries)))
    return results


def check_gram(
    device: torch.device, *, shapes: Sequence[tuple[int, int, int, int, int]] | None = None
) -> list[Result]:
    """Both Gram routes against float64; shapes are (N, B, T, I, O)."""
    generator = _generator(device)
    results = []
    for shape in shapes or ((1, 32, 49, 64, 48), (3, 20, 16, 9, 1), (1, 5, 1, 100, 10), (1, 70, 17, 18, 7)):
        n, b, t, i, o = shape
        a, g = _normal((n, b, t, i), generator), _normal((n, b, t, o), generator)
        gradients = torch.einsum("nbti,nbto->bnoi", a.cpu().double(), g.cpu().double()).flatten(1)
        exact = gradients @ gradients.T
        for route in ("outer", "pairs"):
            found = gram(a, g, route=route, backend="triton")
            limit = TOLERANCE["gram", torch.float32].value
            results.append(
                _result(f"gram {route} {shape}", deviation(found.cpu(), exact, exact.diagonal().max()), limit)
            )
    return results


def run_checks(device: torch.device) -> list[Result]:
    """Every check, in order."""
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        results += check_stats(device, dtype=dtype)
    for rule in (
        SgdRule(),
        SgdRule(momentum=0.9),
        SgdRule(momentum=0.9, nesterov=True),
        SgdRule(momentum=0.9, dampening=0.1, maximize=True),
        AdamWRule(),
    ):
        results += check_update(device, rule)
    return results + check_rounding(device) + check_gram(device)
