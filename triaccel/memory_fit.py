"""Bytes of a step as a function of its batch, from observed peaks: bytes(B | map), locally a + b·B.

A peak is the largest over the instants of a step of a_t + b_t·B, so it is convex in B: at small batches the update (weights,
gradients, optimizer state) is the peak, at large ones the start of backward. One line over all sizes misses by up to 12 % for
EfficientNet-B0; so between two observed sizes the chord is taken (never too low), past the largest the line through the
largest and one at most 0.8 × as large, below the smallest the line of the two smallest. With one size under the map, the base
``a`` is that of another map's line (weights, gradients and state are FP32 in every map), else the resident bytes that the
probe saw, else 0: the latter two can only overestimate a larger batch, and say nothing of a smaller one. Peaks that fall with
B, or rise faster than B, by more than ``TOLERANCE`` are no fit: it then answers for sizes that ran and for no others.
Cost: a few operations per observation. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["TOLERANCE", "MemoryFit", "fit_memory"]

TOLERANCE = 0.05
"""Relative deviation from a rising, at most proportional course that observed peaks may show."""
_APART = 0.8
"""Two sizes give a slope when the smaller is at most this share of the larger."""

Line = tuple[float, float]


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """A fit for one precision map.

    Attributes:
        points: (batch_size, peak_bytes) observed under this map, ascending, one or more.
        upper: (a, b) of the line past the largest size; ``None``: no fit.
        lower: (a, b) of the line below the smallest size; ``None``: nothing can be said there.
        resident_bytes: bytes that no batch can go below.
        why: in words, for the trace.
    """

    points: tuple[tuple[int, int], ...]
    upper: Line | None
    lower: Line | None
    resident_bytes: int
    why: str

    @property
    def usable(self) -> bool:
        """Whether sizes that never ran may be predicted."""
        return self.upper is not None

    @property
    def largest(self) -> int:
        """Largest size that ran under this map, samples."""
        return self.points[-1][0]

    def predict(self, batch_size: int) -> float | None:
        """Bytes of a step of ``batch_size``: as observed, else by the fit; ``None`` where nothing can be said."""
        for batch, peak in self.points:
            if batch == batch_size:
                return float(peak)
        if self.upper is None:
            return None
        if batch_size > self.largest:
            return self.upper[0] + self.upper[1] * batch_size
        if batch_size < self.points[0][0]:
            if self.lower is None:
                return None
            return max(float(self.resident_bytes), self.lower[0] + self.lower[1] * batch_size)
        above = next(i for i, (batch, _) in enumerate(self.points) if batch > batch_size)
        a, b = _line(self.points[above - 1], self.points[above])
        return a + b * batch_size


def _line(first: tuple[int, int], second: tuple[int, int]) -> Line:
    b = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] - b * first[0], b


def _sound(points: Sequence[tuple[int, int]]) -> bool:
    return all(
        f1 >= f0 * (1 - TOLERANCE) and f1 / b1 <= f0 / b0 * (1 + TOLERANCE)
        for (b0, f0), (b1, f1) in pairwise(points)
    )


def _upper(points: Sequence[tuple[int, int]]) -> Line | None:
    """Line through the largest size and the next one well apart, where it rises."""
    largest = points[-1]
    apart = [point for point in points[:-1] if point[0] <= _APART * largest[0]]
    if not apart or not _sound(points):
        return None
    a, b = _line(apart[-1], largest)
    return (a, b) if a >= 0 and b * largest[0] > 0.01 * largest[1] else None


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
    if map_version not in by_map:
        return None
    points = tuple(sorted(by_map[map_version].items()))
    resident = resident_bytes if resident_bytes is not None and resident_bytes < points[0][1] else 0
    if not _sound(points):
        return MemoryFit(
            points,
            None,
            None,
            resident,
            f"the peaks of {len(points)} sizes do not rise with the batch as bytes do",
        )
    apart = next((point for point in points[1:] if points[0][0] <= _APART * point[0]), None)
    lower = _line(points[0], apart) if apart else None
    upper = _upper(points)
    if upper is not None:
        return MemoryFit(
            points, upper, lower, resident, f"{upper[0]:.4g} + {upper[1]:.4g} B from {len(points)} sizes"
        )
    batch, peak = points[-1]
    for version in sorted(by_map, reverse=True):
        other = _upper(sorted(by_map[version].items())) if version != map_version else None
        if other is not None and resident <= other[0] < peak:
            line = other[0], (peak - other[0]) / batch
            return MemoryFit(
                points, line, lower or line, resident, f"{line[0]:.4g} of map {version} + {line[1]:.4g} B"
            )
    line = float(resident), (peak - resident) / batch
    return MemoryFit(points, line, lower, resident, f"at most {line[0]:.4g} + {line[1]:.4g} B")
