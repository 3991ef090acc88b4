"""Bytes of a step as a function of its batch, fitted on observed peaks: bytes(B | map) = a + b·B.

``a`` is what does not depend on the batch (parameters, optimizer state, gradients: FP32 in every precision map), ``b`` the
bytes per sample under the map. Least squares on relative errors over the sizes observed under the map; with one size there,
``a`` is taken from another map's fit, else from the resident bytes that the probe saw, else it is 0, which can only
overestimate a larger batch. A fit with b ≤ 0, a < 0 or a residual above ``TOLERANCE`` is no fit: it answers for sizes that ran and for no others.
Cost: a few operations per observation. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TOLERANCE", "MemoryFit", "fit_memory"]

TOLERANCE = 0.05
"""Largest relative residual of a fit that may be extrapolated."""


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """A fit for one precision map.

    Attributes:
        base_bytes: a.
        sample_bytes: b, bytes per sample.
        observed: peak bytes by batch size under this map.
        usable: whether sizes that never ran may be predicted.
        grounded: whether ``a`` was measured (two sizes, or another map's fit), so that smaller sizes may be predicted too.
        why: in words, for the trace.
    """

    base_bytes: float
    sample_bytes: float
    observed: dict[int, int]
    usable: bool
    grounded: bool
    why: str

    @property
    def largest(self) -> int:
        """Largest size that ran under this map, samples."""
        return max(self.observed)

    def predict(self, batch_size: int) -> float | None:
        """Bytes of a step of ``batch_size``: as observed, else by the fit; ``None`` where nothing can be said."""
        if batch_size in self.observed:
            return float(self.observed[batch_size])
        if not self.usable or (batch_size < min(self.observed) and not self.grounded):
            return None
        return self.base_bytes + self.sample_bytes * batch_size


def _line(points: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """(a, b, largest relative residual) of the line that minimises squared relative errors."""
    weights = [1.0 / (peak * peak) for _, peak in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    sxx = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    sxy = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    b = sxy / sxx
    a = mean_y - b * mean_x
    return a, b, max(abs(a + b * x - y) / y for x, y in points)


def fit_memory(
    peaks: Sequence[tuple[int, int, int]], *, map_version: int, resident_bytes: int | None = None
) -> MemoryFit | None:
    """Fit for ``map_version``, or ``None`` where no size has been observed under it.

    Args:
        peaks: (batch_size, map_version, peak_bytes), oldest first; a later peak replaces an earlier one of the same pair.
        map_version: the precision map asked about.
        resident_bytes: bytes that do not depend on the batch, if known.

    Source: ours.
    """
    by_map: dict[int, dict[int, int]] = {}
    for batch, version, peak in peaks:
        by_map.setdefault(version, {})[batch] = peak
    mine = by_map.get(map_version)
    if not mine:
        return None
    points = sorted(mine.items())
    if len(points) >= 2:
        a, b, residual = _line(points)
        sound = b > 0 and a >= 0 and residual <= TOLERANCE
        why = f"fit {a:.4g} + {b:.4g} B over {len(points)} sizes"
        return MemoryFit(
            a, b, mine, sound, sound, why if sound else f"{why} is no fit (residual {residual:.1%})"
        )
    batch, peak = points[0]
    for version in sorted(by_map, reverse=True):
        others = sorted(by_map[version].items())
        if version != map_version and len(others) >= 2:
            a, b, residual = _line(others)
            if b > 0 and 0 <= a < peak and residual <= TOLERANCE:
                return MemoryFit(
                    a, (peak - a) / batch, mine, True, True, f"one size, base {a:.4g} of map {version}"
                )
    a = float(resident_bytes) if resident_bytes is not None and resident_bytes < peak else 0.0
    return MemoryFit(a, (peak - a) / batch, mine, True, False, f"one size, resident {a:.4g}")
