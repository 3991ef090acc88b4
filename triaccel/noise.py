"""Running noise scale B_simple = tr Σ / |G|² from probes and training gradients (arXiv 1812.06162).

Numerator and denominator are averaged apart over recent windows:

    tr Σ     mean over the last probes (``ProbeResult.typical_trace``, which one outlying sample cannot decide);
    |G|²     mean over recent training batches of |g_B|² − tr Σ / B, weighted by B, each |g_B|² clipped at three times the
             median one; before there are enough of them, the mean of the probes' own unbiased |G|², far noisier.

The scale has a value only while the interval of |G|² (two standard errors, that of tr Σ counted) lies above 0.
Windows instead of exponential means, since an interval needs a spread. Source: the estimator is the paper's named above; ours is
the mixing of the two sources.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from .types import NoiseScale

__all__ = ["NoiseEstimator"]

PROBES = 8
GRADIENTS = 16
ENOUGH = 3
"""Values from which a spread is believed."""
OUTLIER = 3.0
"""Times the median |g_B|² beyond which a training batch counts no further."""
WIDTH = 2.0
"""Standard errors on either side."""


class NoiseEstimator:
    """Windows of recent figures; plain floats only."""

    def __init__(self) -> None:
        self._traces: deque[float] = deque(maxlen=PROBES)
        self._norms: deque[float] = deque(maxlen=PROBES)
        self._gradients: deque[tuple[float, int]] = deque(maxlen=GRADIENTS)
        self._probes = 0

    def add_probe(self, *, trace: float, square_norm: float) -> None:
        """Figures of one finite probe: Σ_l tr Σ_l and the unbiased Σ_l |G_l|²."""
        self._traces.append(trace)
        self._norms.append(square_norm)
        self._probes += 1

    def add_gradient(self, *, square_norm: float, batch_size: int) -> None:
        """|g_B|² of a training batch of ``batch_size`` samples; non-finite ones are passed over."""
        if math.isfinite(square_norm) and batch_size > 0:
            self._gradients.append((square_norm, batch_size))

    def read(self) -> NoiseScale | None:
        """The scale now; ``None`` before the first probe."""
        if not self._traces:
            return None
        trace, trace_error = _mean_and_error(list(self._traces), [1.0] * len(self._traces))
        if len(self._gradients) >= ENOUGH:
            limit = OUTLIER * statistics.median(norm for norm, _ in self._gradients)
            values = [min(norm, limit) - trace / size for norm, size in self._gradients]
            weights = [float(size) for _, size in self._gradients]
            mean, error = _mean_and_error(values, weights)
            shared = trace_error * sum(
                w / size for w, (_, size) in zip(weights, self._gradients, strict=True)
            )
            error = math.hypot(error, shared / sum(weights))
        else:
            mean, error = _mean_and_error(list(self._norms), [1.0] * len(self._norms))
        known = mean - WIDTH * error > 0.0
        return NoiseScale(trace / mean if known else None, trace, mean, self._probes)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "traces": list(self._traces),
            "norms": list(self._norms),
            "gradients": [list(pair) for pair in self._gradients],
            "probes": self._probes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of ``state_dict``."""
        self._traces = deque(state["traces"], maxlen=PROBES)
        self._norms = deque(state["norms"], maxlen=PROBES)
        self._gradients = deque(((float(s), int(b)) for s, b in state["gradients"]), maxlen=GRADIENTS)
        self._probes = int(state["probes"])


def _mean_and_error(values: list[float], weights: list[float]) -> tuple[float, float]:
    """Weighted mean and its standard error; the error is infinite below ``ENOUGH`` values."""
    total = sum(weights)
    mean = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total
    if len(values) < ENOUGH:
        return mean, math.inf
    spread = math.fsum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / total
    effective = total**2 / math.fsum(w * w for w in weights)
    return mean, math.sqrt(spread / (effective - 1.0))
