"""Policy: curvature per layer to a scale on its learning rate.

    s_l = 1 / (1 + α·λ̂_l),      λ̂_l = running λ_l / the median layer's running λ,

then, with ``normalise="geomean"``, the common factor c that makes the geometric mean of clip(c·s_l, s_min, s_max) over layers 1
(clipping included: c is found by bisection); with ``"none"`` only the clip. A flat layer gets a larger step, a curved one a
smaller. λ_l is averaged once a probe, with the start-up bias of the average taken out; negative values (an indefinite Hessian)
count as 0. Layers without λ keep scale 1 and do not enter the mean. Pure: no torch, no clock. Source: ours, after the words of
arXiv 2508.16905.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .config import CurvatureConfig
from .types import Change, LayerInfo, Observation, Policy, RateDecision

__all__ = ["CurvatureRate", "RateState", "UnitRate", "make_rate_policy", "rate_scales"]

REPORT_ABOVE = 0.05
"""Relative change of a scale since it was last reported from which it is reported again."""


@dataclass(frozen=True, slots=True)
class RateState:
    """State of ``CurvatureRate``.

    Attributes:
        layers: names of the layers that have a rate.
        curvature: running λ per layer measured.
        probes: probes averaged per layer.
        probe_id: last probe averaged per layer.
        scales: scale in force per layer; absent: 1.
        reported: scale last reported per layer; absent: 1.
    """

    layers: tuple[str, ...] = ()
    curvature: dict[str, float] = field(default_factory=dict)
    probes: dict[str, int] = field(default_factory=dict)
    probe_id: dict[str, int] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict)


def rate_scales(curvature: Mapping[str, float], config: CurvatureConfig) -> dict[str, float]:
    """Scales from the running λ of each layer.

    Args:
        curvature: running λ per layer, ≥ 0.
        config: α, normalisation and clip.

    Returns:
        Scale per layer of ``curvature``; all 1 when the median is 0 (nothing to compare with).
    """
    median = statistics.median(curvature.values()) if curvature else 0.0
    if not median > 0.0:
        return dict.fromkeys(curvature, 1.0)
    logs = {name: -math.log1p(config.alpha * value / median) for name, value in curvature.items()}
    low, high = math.log(config.scale_min), math.log(config.scale_max)
    shift = _centre(tuple(logs.values()), low, high) if config.normalise == "geomean" else 0.0
    return {name: math.exp(min(high, max(low, value + shift))) for name, value in logs.items()}


def _centre(logs: tuple[float, ...], low: float, high: float) -> float:
    """The shift after which the clipped logarithms have mean 0; it exists since low ≤ 0 ≤ high."""

    def mean(shift: float) -> float:
        return math.fsum(min(high, max(low, value + shift)) for value in logs)

    below, above = low - max(logs), high - min(logs)
    for _ in range(100):
        middle = (below + above) / 2
        if mean(middle) < 0.0:
            below = middle
        else:
            above = middle
    return (below + above) / 2


@dataclass(frozen=True, slots=True)
class UnitRate:
    """The trivial policy: every layer trains at the base rate."""

    def init(self, layers: tuple[LayerInfo, ...]) -> RateState:
        """Empty state."""
        return RateState()

    def initial(self, state: RateState) -> RateDecision:
        """No scale."""
        return RateDecision(scales={})

    def step(self, state: RateState, observation: Observation) -> tuple[RateState, RateDecision]:
        """No scale."""
        return state, RateDecision(scales={})


@dataclass(frozen=True, slots=True)
class CurvatureRate:
    """Scales follow the running curvature; they move only at ticks that bring a new probe."""

    config: CurvatureConfig

    def init(self, layers: tuple[LayerInfo, ...]) -> RateState:
        """State before the first probe: compute layers have a rate; where there are none, all that train have."""
        names = tuple(layer.name for layer in layers if layer.numel > 0 and layer.role == "compute")
        return RateState(layers=names or tuple(layer.name for layer in layers if layer.numel > 0))

    def initial(self, state: RateState) -> RateDecision:
        """Nothing measured yet: every layer has scale 1."""
        return RateDecision(scales={})

    def step(self, state: RateState, observation: Observation) -> tuple[RateState, RateDecision]:
        """Average what is new, and rescale if anything is."""
        running, probes, seen = dict(state.curvature), dict(state.probes), dict(state.probe_id)
        fresh = False
        for name in state.layers:
            stats = observation.layers.get(name)
            if stats is None or stats.curvature is None or stats.probe_id < 0:
                continue
            if stats.probe_id == seen.get(name, -1) or not math.isfinite(stats.curvature):
                continue
            count = probes.get(name, 0)
            weight = _weight(self.config.decay, count)
            value = max(0.0, stats.curvature)
            running[name] = running.get(name, 0.0) + weight * (value - running.get(name, 0.0))
            probes[name], seen[name], fresh = count + 1, stats.probe_id, True
        if not fresh:
            return state, RateDecision(scales=state.scales)
        scales = rate_scales(running, self.config)
        median = statistics.median(running.values())
        changes: list[Change] = []
        reported = dict(state.reported)
        for name, scale in scales.items():
            before = reported.get(name, 1.0)
            if abs(scale - before) > REPORT_ABOVE * before:
                ratio = running[name] / median if median > 0 else 0.0
                why = f"curvature {ratio:.2g} x the median layer's"
                changes.append(Change("curvature", name, before, scale, why))
                reported[name] = scale
        after = replace(
            state, curvature=running, probes=probes, probe_id=seen, scales=scales, reported=reported
        )
        return after, RateDecision(scales=scales, changes=tuple(changes))


def _weight(decay: float, count: int) -> float:
    """Weight of the newest of ``count + 1`` values in a debiased exponential mean: (1 − d) / (1 − d^(count + 1))."""
    return (1.0 - decay) / (1.0 - decay ** (count + 1))


def make_rate_policy(config: CurvatureConfig) -> Policy[RateState, RateDecision]:
    """The rate policy of a configuration: ``UnitRate`` when curvature is off or α is 0, ``CurvatureRate`` otherwise."""
    if config.estimator == "off" or config.alpha == 0.0:
        return UnitRate()
    return CurvatureRate(config)
