"""The figures that the paper's public text reports, each with its words and source, to stand beside ours.

We hold the paper's abstract and a published summary, no table: "up to" figures are the best over its settings, and which model
gave which is known only where the text says so. Ours are means over all paired seeds of each model, never a best of.
Source: arXiv 2508.16905.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .compare import Comparison, compare
from .groups import Group

__all__ = ["PAPER", "SETTING", "PaperFigure", "ours"]

ABSTRACT = "arXiv 2508.16905, abstract"
SUMMARY = "published summary of arXiv 2508.16905"
SETTING = "CIFAR-10 and CIFAR-100, ResNet-18 and EfficientNet-B0, one NVIDIA T4 or P100 with 16 GB"


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """One reported figure.

    Attributes:
        key: short name.
        label: what it is, for tables.
        value: as reported.
        unit: ``"%"`` change, ``"points"``, ``"% accuracy"`` or ``"GB"``.
        words: the passage that it comes from.
        source: where the passage stands.
        outcome: what of ours stands beside it, or ``None``.
        reference: arm that it is measured against, ``""`` for an absolute figure.
    """

    key: str
    label: str
    value: float
    unit: str
    words: str
    source: str
    outcome: Literal["time", "bytes", "accuracy"] | None
    reference: str


PAPER: tuple[PaperFigure, ...] = (
    PaperFigure(
        "time",
        "training time against FP32",
        -9.9,
        "%",
        "up to 9.9% reduction in training time",
        ABSTRACT,
        "time",
        "fp32",
    ),
    PaperFigure(
        "memory",
        "memory against FP32",
        -13.3,
        "%",
        "13.3% lower memory usage; memory savings reaching up to 13.3% for EfficientNet-B0",
        f"{ABSTRACT}; {SUMMARY}",
        "bytes",
        "fp32",
    ),
    PaperFigure(
        "accuracy",
        "accuracy against FP32",
        1.1,
        "points",
        "improving accuracy by +1.1 percentage points over FP32 baselines",
        ABSTRACT,
        "accuracy",
        "fp32",
    ),
    PaperFigure(
        "memory-amp",
        "memory against static mixed precision",
        round(100 * (0.31 / 0.35 - 1), 1),
        "%",
        "reducing memory footprint from 0.35GB to 0.31GB (the ratio is ours)",
        ABSTRACT,
        "bytes",
        "amp",
    ),
    PaperFigure(
        "accuracy-absolute", "accuracy", 78.1, "% accuracy", "maintains 78.1% accuracy", ABSTRACT, None, ""
    ),
    PaperFigure(
        "memory-absolute",
        "memory",
        0.31,
        "GB",
        "reducing memory footprint from 0.35GB to 0.31GB",
        ABSTRACT,
        None,
        "",
    ),
)
"""In the order of the table."""


def ours(
    figure: PaperFigure, group: Group, *, arm: str = "tri-accel"
) -> tuple[Comparison, tuple[float, float | None, float | None]] | None:
    """Our comparison that answers one of the paper's, in its unit.

    Args:
        figure: one that is measured against a reference.
        group: our cells.
        arm: which of our arms.

    Returns:
        The comparison and ``(value, low, high)`` in the paper's unit, or ``None`` where the cells are not there.
    """
    if figure.outcome is None:
        return None
    reference = figure.reference
    if reference == "amp":
        static: Sequence[str] = [label for label in ("amp-bf16", "amp-fp16") if group.done(label)]
        if not static:
            return None
        reference = static[0]
    comparison = compare(group, arm, reference, figure.outcome)
    estimate = comparison.estimate
    if estimate is None:
        return None
    ends = (estimate.value, estimate.low, estimate.high)
    if figure.unit == "points":
        return comparison, ends
    value, low, high = (None if end is None else 100 * (math.exp(end) - 1) for end in ends)
    assert value is not None
    return comparison, (value, low, high)
