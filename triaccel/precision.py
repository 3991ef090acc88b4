"""Policies: variance, curvature, overflow, bytes and measured cost -> compute format per layer. Pure: no tensor, no clock.

``off``     FP32.
``static``  the cost table's best map, fixed at step 0.
``paper``   v < τ_low → FP16, v < τ_high → BF16, else FP32; λ > τ_curv → FP32 for ``promotion_hold`` ticks (arXiv 2508.16905, in
            words; the numbers are ours).
``auto``    the same with thresholds taken from an FP32 warm-up: quantiles of log v and log λ over layers and ticks, then fixed,
            so that more layers go down as variance falls, with nothing to tune (ours).

Statistics set how low each layer *may* go (its bound). A bound falls when v is below a threshold, rises when v is above
``hysteresis`` times it, and stays ``min_dwell`` ticks in between. Overflow first backs the loss scale off (``loss_scale``);
after ``overflow_patience`` skips in a row, or at the scale's floor, the layer nearest the loss with a non-finite gradient is
promoted by name, for a hold that doubles each time. Within the bounds the map is the cheapest on this device
(``cost.best_map``): in seconds, or in bytes under memory pressure; without a gate it is the bound itself, moved up to the
ladder. A pin always wins.
Cost: some µs per layer a tick, and a min-cut when a bound changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .config import PrecisionConfig
from .cost import CostTable, Ladder, best_map
from .precision_fixed import FixedPrecision, pinned_formats
from .precision_rules import Bound, Thresholds, Track, promote_overflow, step_track
from .precision_warmup import Warmup
from .types import (
    Change,
    LayerInfo,
    LayerStats,
    Observation,
    Policy,
    Precision,
    PrecisionDecision,
    TriAccelError,
)

__all__ = ["AdaptivePrecision", "PrecisionState", "make_precision_policy"]

_PRESSURE_RELEASE = 0.1


def make_precision_policy(
    config: PrecisionConfig,
    *,
    ladder: Ladder,
    costs: CostTable | None,
    initial_batch: int,
    total_samples: int | None,
) -> Policy[Any, PrecisionDecision]:
    """The policy that ``config.rule`` names.

    Args:
        config: rule, thresholds, gate.
        ladder: formats of the device.
        costs: measured table; needed by ``static`` and wherever the gate is on.
        initial_batch: first batch size, samples.
        total_samples: samples of the whole run, if known.

    Raises:
        TriAccelError: a rule that rests on measured costs has none.
    """
    gated = config.rule == "static" or (config.rule in ("paper", "auto") and config.cost_gate)
    if gated and costs is None:
        raise TriAccelError(
            f"precision.rule={config.rule!r} lowers a layer only where a measurement says it gains, and nothing was measured: "
            "calibrate first, or set precision.gate='off' (rule 'paper' or 'auto')"
        )
    if config.rule in ("off", "static"):
        return FixedPrecision(
            config, ladder=ladder, costs=costs if config.rule == "static" else None, batch=initial_batch
        )
    return AdaptivePrecision(
        config,
        ladder=ladder,
        costs=costs if gated else None,
        initial_batch=initial_batch,
        total_samples=total_samples,
    )


@dataclass(frozen=True, slots=True)
class PrecisionState:
    """All that the adaptive rules remember.

    Attributes:
        layers: what the model has.
        pins: pinned format per layer.
        tracks: per group of tied layers (by the first one's name): bound by variance, dwell, holds.
        thresholds: in force; ``None`` during the warm-up of ``auto``.
        warmup: what the warm-up gathered so far.
        precision_map: map decided last.
        decided_by: what decided each layer.
        pressure_ticks: ticks since memory pressure began, 0 without.
    """

    layers: tuple[LayerInfo, ...]
    pins: dict[str, Precision]
    tracks: dict[str, Track]
    thresholds: Thresholds | None
    warmup: Warmup
    precision_map: dict[str, Precision]
    decided_by: dict[str, str] = field(default_factory=dict)
    pressure_ticks: int = 0


class AdaptivePrecision:
    """Rules ``paper`` and ``auto``."""

    def __init__(
        self,
        config: PrecisionConfig,
        *,
        ladder: Ladder,
        costs: CostTable | None,
        initial_batch: int,
        total_samples: int | None,
    ) -> None:
        self._config = config
        self._ladder = ladder
        self._costs = costs
        self._initial_batch = initial_batch
        self._total_samples = total_samples
        self._solved: dict[Any, tuple[dict[str, Precision], dict[str, str]]] = {}  # a memo, no state

    def init(self, layers: tuple[LayerInfo, ...]) -> PrecisionState:
        """Everything in FP32 but the pins."""
        pins = pinned_formats(layers, self._ladder)
        compute = [info for info in layers if info.role == "compute"]
        config = self._config
        fixed = (
            Thresholds(config.tau_low, config.tau_high, config.tau_curvature)
            if config.rule == "paper"
            else None
        )
        precision_map = {info.name: Precision.FP32 for info in compute} | pins
        return PrecisionState(
            layers=layers,
            pins=pins,
            tracks={
                info.tied_to or info.name: Track(dwell=config.min_dwell)
                for info in sorted(compute, key=lambda info: info.tied_to is not None)
            },
            thresholds=fixed,
            warmup=Warmup(),
            precision_map=precision_map,
            decided_by={name: "pin" if name in pins else "warmup" for name in precision_map},
        )

    def initial(self, state: PrecisionState) -> PrecisionDecision:
        """FP32 but for pins."""
        return PrecisionDecision(state.precision_map, (), state.decided_by)

    def step(
        self, state: PrecisionState, observation: Observation
    ) -> tuple[PrecisionState, PrecisionDecision]:
        """Bounds from statistics, then the map within them."""
        config = self._config
        groups = self._group_stats(state, observation)
        warmup, thresholds = state.warmup, state.thresholds
        if config.rule == "auto":
            warmup, thresholds = warmup.step(
                config,
                groups.values(),
                observation,
                thresholds=thresholds,
                initial_batch=self._initial_batch,
                total_samples=observation.total_samples or self._total_samples,
            )
        frozen = {
            info.name
            for info in state.layers
            if info.role == "compute" and info.tied_to is None and not info.numel
        }
        tracks: dict[str, Track] = {}
        bounds: dict[str, Bound] = {}
        for group, track in state.tracks.items():
            tracks[group], bounds[group] = step_track(
                track,
                groups[group],
                thresholds,
                config=config,
                frozen=group in frozen,
            )
        overflowing = bool(observation.found_inf) and (
            observation.consecutive_skips >= config.overflow_patience or observation.loss_scale_at_floor
        )
        if overflowing:
            promote_overflow(
                tracks,
                bounds,
                state.layers,
                observation,
                pins=state.pins,
                ladder=self._ladder,
                hold=config.promotion_hold,
            )
        pressure = self._pressure(state, observation)
        precision_map, decided_by, reasons = self._resolve(state, bounds, observation, pressure > 0)
        changes = tuple(
            Change("precision", name, state.precision_map.get(name), precision, reasons[name])
            for name, precision in precision_map.items()
            if state.precision_map.get(name) != precision
        )
        after = replace(
            state,
            tracks=tracks,
            thresholds=thresholds,
            warmup=warmup,
            precision_map=precision_map,
            decided_by=decided_by,
            pressure_ticks=pressure,
        )
        return after, PrecisionDecision(precision_map, changes, decided_by)

    # ---------------------------------------------------------------- inside

    def _group_stats(self, state: PrecisionState, observation: Observation) -> dict[str, LayerStats]:
        """Largest variance and curvature among layers that share a parameter."""
        stats: dict[str, LayerStats] = {}
        for info in state.layers:
            if info.role != "compute":
                continue
            group = info.tied_to if info.tied_to in state.tracks else info.name
            seen = observation.layers.get(info.name, LayerStats())
            if group in stats:
                known = stats[group]
                seen = replace(
                    seen,
                    variance=_largest(known.variance, seen.variance),
                    curvature=_largest(known.curvature, seen.curvature),
                    probe_id=max(known.probe_id, seen.probe_id),
                )
            stats[group] = seen
        return stats

    def _pressure(self, state: PrecisionState, observation: Observation) -> int:
        """Ticks of memory pressure, this one included; 0 without."""
        memory, config = observation.memory, self._config
        if memory is None or self._costs is None:
            return 0
        if memory.utilisation >= config.memory_pressure:
            return state.pressure_ticks + 1
        if not state.pressure_ticks:
            return 0
        bounds = dict.fromkeys((n for n in state.precision_map if n not in state.pins), self._ladder.lowest)
        back, _ = self._cheapest(state, bounds | state.pins, observation.batch_size, "time")
        more = self._costs.kept_bytes(back, batch_size=observation.batch_size) - self._costs.kept_bytes(
            state.precision_map, batch_size=observation.batch_size
        )
        after = (memory.used_bytes + max(0.0, more)) / memory.budget_bytes
        fits = after < config.memory_pressure - _PRESSURE_RELEASE
        return 0 if fits and state.pressure_ticks >= config.promotion_hold else state.pressure_ticks + 1

    def _resolve(
        self,
        state: PrecisionState,
        bounds: dict[str, Bound],
        observation: Observation,
        pressure: bool,
    ) -> tuple[dict[str, Precision], dict[str, str], dict[str, str]]:
        ladder, pins = self._ladder, state.pins
        lowest: dict[str, Precision] = {}
        causes: dict[str, str] = {}
        reasons: dict[str, str] = {}
        for info in state.layers:
            if info.name in pins:
                lowest[info.name] = pins[info.name]
                causes[info.name], reasons[info.name] = "pin", f"pinned to {pins[info.name]}"
            elif info.role == "compute":
                bound = bounds[info.tied_to if info.tied_to in bounds else info.name]
                rung = ladder.up(bound.precision, kind=info.kind)
                lowest[info.name] = rung
                causes[info.name], reasons[info.name] = bound.cause, bound.why
                if rung != bound.precision:
                    missing = (
                        f"{info.kind} does not follow {bound.precision} here"
                        if bound.precision in ladder.precisions
                        else f"{bound.precision} is not on this device's ladder"
                    )
                    causes[info.name] = "ladder"
                    reasons[info.name] = f"{bound.why}; {missing}"
        if self._costs is None or all(p is Precision.FP32 for p in lowest.values()):
            return lowest, causes, reasons
        prefer = "memory" if pressure or self._config.prefer == "memory" else "time"
        cheapest, why = self._cheapest(state, lowest, observation.batch_size, prefer)
        for name, precision in cheapest.items():
            if precision != lowest[name]:
                causes[name] = "memory" if pressure else "cost"
                reasons[name] = why[name]
            elif precision != state.precision_map.get(name) and causes[name] not in ("overflow", "curvature"):
                # Within unchanged bounds it is the cost that moves a layer back down.
                reasons[name] = f"{reasons[name]}; {why[name]}"
        return cheapest, causes, reasons

    def _cheapest(
        self, state: PrecisionState, allowed: dict[str, Precision], batch_size: int, prefer: str
    ) -> tuple[dict[str, Precision], dict[str, str]]:
        assert self._costs is not None
        key = (self._costs.bucket(batch_size), prefer, tuple(allowed.items()))
        if key not in self._solved:
            if len(self._solved) > 256:
                self._solved.clear()
            self._solved[key] = best_map(
                self._costs,
                state.layers,
                batch_size=batch_size,
                prefer="memory" if prefer == "memory" else "time",
                allowed=allowed,
                pinned=state.pins,
            )
        return self._solved[key]


def _largest(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)
