"""Thresholds of the ``auto`` rule: quantiles of log variance and log curvature over layers and ticks of an FP32 warm-up.

The first ``warmup_skip_steps`` steps are left out (variances fall 100-fold there), never more than half of the warm-up, which
ends at the last tick within ``warmup_fraction`` of the samples. Probes may be rarer than that: curvature has its threshold from
the first probe seen, by the end of the warm-up or later. Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .config import PrecisionConfig
from .precision_rules import Thresholds
from .types import LayerStats, Observation

__all__ = ["Warmup"]

_TINY = 1e-45
_STEPS_IF_UNKNOWN = 200


@dataclass(frozen=True, slots=True)
class Warmup:
    """What was gathered: log v, log λ, the last probe that was counted, and the clock at the last tick."""

    log_variance: tuple[float, ...] = ()
    log_curvature: tuple[float, ...] = ()
    probe_id: int = -1
    samples_seen: int = 0

    def step(
        self,
        config: PrecisionConfig,
        stats: Iterable[LayerStats],
        observation: Observation,
        *,
        thresholds: Thresholds | None,
        initial_batch: int,
        total_samples: int | None,
    ) -> tuple[Warmup, Thresholds | None]:
        """One tick.

        Args:
            config: quantiles, length and skip.
            stats: of each group of tied layers.
            observation: the clock.
            thresholds: those in force, ``None`` before the end of the warm-up.
            initial_batch: samples per step.
            total_samples: samples of the run; unknown: the warm-up takes 200 steps.

        Returns:
            What is gathered now, and the thresholds from now on.
        """
        if thresholds is not None and thresholds.curvature is not None:
            return self, thresholds
        stats = list(stats)
        now = observation.samples_seen
        length = (
            config.warmup_fraction * total_samples
            if total_samples
            else float(_STEPS_IF_UNKNOWN * initial_batch)
        )
        skip = min(config.warmup_skip_steps * initial_batch, length / 2)
        last = now + (now - self.samples_seen) > length
        variances, curvatures, probe = self.log_variance, self.log_curvature, self.probe_id
        if thresholds is None and (now >= skip or (last and not variances)):
            variances += _logs(s.variance for s in stats)
        newest = max((s.probe_id for s in stats if s.curvature is not None), default=-1)
        if newest > probe and (now >= skip or last):
            curvatures += _logs(s.curvature for s in stats if s.probe_id == newest)
            probe = newest
        after = replace(
            self,
            log_variance=variances,
            log_curvature=curvatures,
            probe_id=probe,
            samples_seen=now,
        )
        if thresholds is None and (not last or not variances):
            return after, None
        curvature = math.exp(_quantile(curvatures, config.curvature_quantile)) if curvatures else None
        if thresholds is None:
            thresholds = Thresholds(
                low=math.exp(_quantile(variances, config.low_quantile)),
                high=math.exp(_quantile(variances, config.high_quantile)),
            )
        return replace(after, log_variance=(), log_curvature=()), replace(thresholds, curvature=curvature)


def _logs(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(math.log(max(v, _TINY)) for v in values if v is not None and math.isfinite(v))


def _quantile(values: Iterable[float], q: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
