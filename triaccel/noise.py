"""Running noise scale B_simple = tr Σ / |G|² from probes and training gradients (arXiv 1812.06162).

Numerator and denominator are averaged apart over recent windows, each squared norm clipped at three times the median one.

Two batch sizes (used as soon as both are there): with S the mean of |g_b|² over small batches of b samples and L that of |g_B|²
over training batches, both of the network as it trains (normalisation by batch statistics),

    tr Σ = (S − L) / (1/b − 1/B),     |G|² = L − tr Σ / B.

Before that: tr Σ from the probes' Gram matrices (``ProbeResult.typical_trace``, which one outlying sample cannot decide) and
|G|² = |g_B|² − tr Σ / B, or the probes' own unbiased |G|². On ResNet-18 the Gram figure, for a network with constant statistics,
is up to twice that of training, and then |g_B|² − tr Σ / B is below 0 in most steps: so it only starts the run.

``value`` is known while the interval of |G|² (two standard errors) lies above 0; ``lower``, the ratio of the interval's
unfavourable ends, is known sooner, and is what a batch may grow to while the gradient is too noisy to tell more.
Windows instead of exponential means, since an interval needs a spread. Source: the estimators are those of the paper named
above; ours is how they are mixed, clipped and bounded.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
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
        self._small: deque[tuple[float, int]] = deque(maxlen=PROBES)
        self._probes = 0

    def add_small(self, *, square_norm: float, batch_size: int) -> None:
        """Mean |g_b|² over batches of ``batch_size`` samples smaller than the training batch."""
        if math.isfinite(square_norm) and batch_size > 0:
            self._small.append((square_norm, batch_size))

    @property
    def last_batch(self) -> int | None:
        """Size of the last training batch observed."""
        return self._gradients[-1][1] if self._gradients else None

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
        if (found := self._two_sizes()) is None:
            found = self._gram()
        trace, trace_error, mean, error = found
        low, high = mean - WIDTH * error, mean + WIDTH * error
        value = trace / mean if low > 0.0 and trace > 0.0 else None
        lower = max(0.0, trace - WIDTH * trace_error) / high if 0.0 < high < math.inf else None
        return NoiseScale(value, trace, mean, self._probes, lower)

    def _two_sizes(self) -> tuple[float, float, float, float] | None:
        """tr Σ, its error, |G|², its error; ``None`` before there are enough norms of two sizes that are apart."""
        if len(self._small) < ENOUGH or len(self._gradients) < ENOUGH:
            return None
        small, small_error, small_inverse = _clipped(self._small)
        large, large_error, large_inverse = _clipped(self._gradients)
        apart = small_inverse - large_inverse
        if apart < 0.5 * large_inverse:  # sizes less than 1.5 apart tell nothing
            return None
        ratio = large_inverse / apart
        return (
            (small - large) / apart,
            math.hypot(small_error, large_error) / apart,
            large - (small - large) * ratio,
            math.hypot(large_error * (1.0 + ratio), small_error * ratio),
        )

    def _gram(self) -> tuple[float, float, float, float]:
        """The same from the probes' Gram matrices."""
        trace, trace_error = _mean_and_error(list(self._traces), [1.0] * len(self._traces))
        if len(self._gradients) < ENOUGH:
            return trace, trace_error, *_mean_and_error(list(self._norms), [1.0] * len(self._norms))
        large, large_error, inverse = _clipped(self._gradients)
        return trace, trace_error, large - trace * inverse, math.hypot(large_error, trace_error * inverse)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "traces": list(self._traces),
            "norms": list(self._norms),
            "gradients": [list(pair) for pair in self._gradients],
            "small": [list(pair) for pair in self._small],
            "probes": self._probes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of ``state_dict``."""
        self._traces = deque(state["traces"], maxlen=PROBES)
        self._norms = deque(state["norms"], maxlen=PROBES)
        self._gradients = deque(((float(s), int(b)) for s, b in state["gradients"]), maxlen=GRADIENTS)
        self._small = deque(((float(s), int(b)) for s, b in state["small"]), maxlen=PROBES)
        self._probes = int(state["probes"])


def _clipped(norms: Sequence[tuple[float, int]]) -> tuple[float, float, float]:
    """Mean of the clipped norms weighted by size, its standard error, and the mean of 1 / size under the same weights."""
    limit = OUTLIER * statistics.median(norm for norm, _ in norms)
    weights = [float(size) for _, size in norms]
    mean, error = _mean_and_error([min(norm, limit) for norm, _ in norms], weights)
    return mean, error, len(norms) / sum(weights)


def _mean_and_error(values: list[float], weights: list[float]) -> tuple[float, float]:
    """Weighted mean and its standard error; the error is infinite below ``ENOUGH`` values."""
    total = sum(weights)
    mean = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total
    if len(values) < ENOUGH:
        return mean, math.inf
    spread = math.fsum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / total
    effective = total**2 / math.fsum(w * w for w in weights)
    return mean, math.sqrt(spread / (effective - 1.0))
