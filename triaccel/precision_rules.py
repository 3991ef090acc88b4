"""How low one layer may go: thresholds with hysteresis and dwell, curvature holds, promotion after overflow. Pure.

The bound by variance moves only outside a dead band: with level(v) the format that the thresholds give, it is held within
[level(v / hysteresis), level(v)], which is monotone in v and cannot flap while v stays in the band. Source: ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .config import PrecisionConfig
from .ladder import Ladder
from .types import LayerInfo, LayerStats, Observation, Precision

__all__ = ["Bound", "Thresholds", "Track", "promote_overflow", "step_track"]

_ORDER = (Precision.FP16, Precision.BF16, Precision.FP32)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Variance below which a layer may run in FP16 and in BF16, and curvature above which it is held in FP32."""

    low: float
    high: float
    curvature: float | None = None

    def level(self, variance: float) -> Precision:
        """Format for ``variance``, without history."""
        if variance < self.low:
            return Precision.FP16
        return Precision.BF16 if variance < self.high else Precision.FP32


@dataclass(frozen=True, slots=True)
class Track:
    """Memory of one group of tied layers.

    Attributes:
        level: bound by variance.
        dwell: ticks since it last changed.
        curvature_hold: ticks that a promotion by curvature still holds.
        overflow_hold: ticks that a promotion by overflow still holds.
        overflow_bound: format that the layer is promoted to meanwhile.
        overflows: promotions by overflow so far.
    """

    level: Precision = Precision.FP32
    dwell: int = 0
    curvature_hold: int = 0
    overflow_hold: int = 0
    overflow_bound: Precision = Precision.FP16
    overflows: int = 0


@dataclass(frozen=True, slots=True)
class Bound:
    """Lowest format that a layer may run in, and what set it."""

    precision: Precision
    cause: str
    why: str


def step_track(
    track: Track,
    stats: LayerStats,
    thresholds: Thresholds | None,
    *,
    config: PrecisionConfig,
    frozen: bool,
) -> tuple[Track, Bound]:
    """One tick of one layer.

    Args:
        track: memory before.
        stats: what was measured.
        thresholds: ``None`` during warm-up.
        config: hysteresis, dwell and hold.
        frozen: the layer trains no parameter, so it has no gradient to protect: BF16, whose range is FP32's.

    Returns:
        Memory after, and the bound.
    """
    hold = max(0, track.overflow_hold - 1)
    if thresholds is None:
        return replace(track, overflow_hold=hold), Bound(Precision.FP32, "warmup", "warm-up")
    level, dwell, why = track.level, track.dwell + 1, "variance not measured yet"
    variance = stats.variance
    if frozen:
        level, why = Precision.BF16, "no trainable parameter"
    elif variance is not None and math.isfinite(variance):
        floor, ceiling = thresholds.level(variance / config.hysteresis), thresholds.level(variance)
        target = min(max(level, floor, key=_rank), ceiling, key=_rank)
        if target != level and dwell >= config.min_dwell:
            level, dwell = target, 0
        why = _because(variance, level, thresholds)
    curvature_hold = max(0, track.curvature_hold - 1)
    if (
        thresholds.curvature is not None
        and stats.curvature is not None
        and math.isfinite(stats.curvature)
        and stats.curvature > thresholds.curvature
    ):
        curvature_hold = config.promotion_hold
    bound = Bound(level, "variance", why)
    if hold and track.overflow_bound.rank > level.rank:
        bound = Bound(track.overflow_bound, "overflow", f"overflow held for {hold} more ticks")
    if curvature_hold and bound.precision is not Precision.FP32:
        seen = "" if stats.curvature is None else f"{stats.curvature:.2g} "
        above = curvature_hold == config.promotion_hold
        bound = Bound(
            Precision.FP32,
            "curvature",
            f"curvature {seen}above {thresholds.curvature:.2g}"
            if above
            else f"curvature was above {thresholds.curvature:.2g}, held for {curvature_hold} more ticks",
        )
    after = replace(track, level=level, dwell=dwell, curvature_hold=curvature_hold, overflow_hold=hold)
    return after, bound


def _rank(precision: Precision) -> int:
    return precision.rank


def _because(variance: float, level: Precision, thresholds: Thresholds) -> str:
    edge = {Precision.FP16: thresholds.low, Precision.BF16: thresholds.high}.get(level)
    if edge is not None and variance < edge:
        return f"variance {variance:.2g} below {edge:.2g}"
    below = (
        thresholds.high if level is Precision.FP32 else thresholds.low if level is Precision.BF16 else None
    )
    if below is not None and variance >= below:
        return f"variance {variance:.2g} not below {below:.2g}"
    return f"variance {variance:.2g} within the dead band, {level} kept"


def promote_overflow(
    tracks: dict[str, Track],
    bounds: dict[str, Bound],
    layers: tuple[LayerInfo, ...],
    observation: Observation,
    *,
    pins: dict[str, Precision],
    ladder: Ladder,
    hold: int,
) -> None:
    """Promote one layer by one rung, in place: the culprit behind repeated overflow.

    Non-finite gradients spread upstream, so the one nearest the loss is first. If that is no longer in FP16, an input gradient of
    the next layer downstream may have overflowed (its own gradient being finite), or the forward of one upstream: these follow.

    Args:
        tracks: memory per group; the promoted one changes.
        bounds: bounds per group; the promoted one changes.
        layers: the model's layers.
        observation: names with non-finite gradients, map in force.
        pins: layers that never move.
        ladder: formats to move to.
        hold: ticks that a first promotion holds; each further one of the same layer doubles it.
    """
    compute = [info for info in layers if info.role == "compute"]
    position = {info.name: i for i, info in enumerate(compute)}
    found = [name for name in observation.found_inf if name in position]
    suspects = found[:1]
    if observation.found_inf:
        indices = {info.name: info.index for info in layers}
        nearest = indices.get(observation.found_inf[0], -1)
        suspects += [info.name for info in compute if info.index > nearest][:1]
    suspects += found[1:]
    for rank in (Precision.FP16, Precision.BF16):
        for name in suspects:
            if name in pins or observation.precision_map.get(name) is not rank:
                continue
            info = compute[position[name]]
            group = info.tied_to if info.tied_to in tracks else name
            promoted = ladder.up(_ORDER[rank.rank + 1], kind=info.kind)
            track = tracks[group]
            times = track.overflows + 1
            ticks = hold * 2 ** min(times - 1, 16)
            tracks[group] = replace(track, overflow_hold=ticks, overflow_bound=promoted, overflows=times)
            reason = (
                "with the loss scale at its floor"
                if observation.loss_scale_at_floor
                else f"in {observation.consecutive_skips} steps in a row"
            )
            if promoted.rank >= bounds[group].precision.rank:
                bounds[group] = Bound(
                    promoted,
                    "overflow",
                    f"found inf in {observation.found_inf[0]} {reason}; {rank} -> {promoted} for {ticks} ticks",
                )
            return
