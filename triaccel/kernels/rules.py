"""What the kernels take and give: update rules and per-layer gradient statistics.

Free of Triton, so that kernels and eager references share one vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["COLUMNS", "FP16_SMALLEST", "AdamWRule", "GradStats", "SgdRule", "UpdateRule"]

FP16_SMALLEST = 2.0**-24
"""Smallest positive FP16 number (a subnormal); what is smaller in magnitude becomes 0 or rounds up to it."""

COLUMNS = ("count", "total", "square", "nonfinite", "maximum", "nonzero", "underflow")


@dataclass(frozen=True, slots=True)
class SgdRule:
    """``torch.optim.SGD``: b <- momentum b + (1 - dampening)(g + wd p), p <- p - lr b (Nesterov: lr (g + wd p + momentum b)).

    Attributes:
        momentum: 0 keeps no buffer.
        dampening: applied from a parameter's second step on, as PyTorch does.
        nesterov: look ahead by one momentum step.
        maximize: ascend.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class AdamWRule:
    """``torch.optim.AdamW`` (arXiv 1711.05101) without AMSGrad.

    Attributes:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        maximize: ascend.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    maximize: bool = False


UpdateRule = SgdRule | AdamWRule


@dataclass(frozen=True, slots=True)
class GradStats:
    """Statistics of gradients per segment (a layer), on their device: reading them is the only host sync.

    Attributes:
        values: (S, 7) float64, columns ``COLUMNS``: entries; sum and sum of squares of the finite ones; infinite or NaN
            entries; largest finite magnitude; entries that are not 0; those of them below ``FP16_SMALLEST``.
            The last three are NaN unless asked for. Accumulated in FP32 within 16,384 entries, so squares hold for
            magnitudes from 1e-22 to 1e18.
    """

    values: Tensor

    @property
    def count(self) -> Tensor:
        """Entries, (S,)."""
        return self.values[:, 0]

    @property
    def total(self) -> Tensor:
        """Sum of the finite entries, (S,)."""
        return self.values[:, 1]

    @property
    def square(self) -> Tensor:
        """Sum of squares of the finite entries, (S,)."""
        return self.values[:, 2]

    @property
    def nonfinite(self) -> Tensor:
        """Infinite or NaN entries, (S,)."""
        return self.values[:, 3]

    @property
    def maximum(self) -> Tensor:
        """Largest finite magnitude, (S,); NaN unless asked for."""
        return self.values[:, 4]

    @property
    def nonzero(self) -> Tensor:
        """Entries that are not 0, (S,); NaN unless asked for."""
        return self.values[:, 5]

    @property
    def underflow(self) -> Tensor:
        """Entries that are not 0 and below the smallest FP16 number, (S,); NaN unless asked for."""
        return self.values[:, 6]

    def merged(self, other: GradStats) -> GradStats:
        """Statistics of both sets of gradients, segment by segment."""
        values = self.values + other.values
        values[:, 4] = torch.maximum(self.values[:, 4], other.values[:, 4])
        return GradStats(values)
