"""Time to a target accuracy: fp32's mean final test accuracy less the margin, reached at an evaluation.

It stands beside the final accuracies because an arm can lose a point at the end and still be the first to any useful accuracy.
Descriptive; as coarse as the evaluations. Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping

from .groups import Group
from .record import Record

__all__ = ["target_accuracy", "time_to_target"]


def target_accuracy(group: Group, *, margin: float | None = None) -> float | None:
    """Fraction that counts as reached: the mean final test accuracy of fp32 less the margin; ``None`` without fp32."""
    finals = [record.accuracy for record in group.done("fp32") if record.accuracy is not None]
    return sum(finals) / len(finals) - (margin or group.margin) / 100 if finals else None


def time_to_target(record: Record, target: float) -> float | None:
    """Training seconds at the first evaluation with at least ``target`` test accuracy; ``None`` if never.

    Calibration counts. No interpolation: the answer is as coarse as the evaluations. ``None`` too on a shared machine.
    """
    if not record.done or record.shared_machine:
        return None
    evals: Mapping[str, list[float | None]] = record.series.evals
    for seconds, accuracy in zip(evals.get("train_seconds", ()), evals.get("accuracy", ()), strict=False):
        if seconds is not None and accuracy is not None and accuracy >= target:
            return float(seconds) + record.logged_seconds_lack
    return None
