"""The main table and the ablation table, and what all tables share (headings, means, ratios, notes).

Intervals are paired-t 95 % over seeds; a single seed has none. Ratios are of geometric means within blocks. Failed cells
stay in every table. What each table holds is in its builder; how it looks is ``analysis.render``'s. Source: ours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from .compare import Comparer, Comparison, peak_bytes, response
from .groups import Group, timed
from .labels import COMPONENTS, FACTORIAL_ARMS
from .record import Record
from .stats import non_inferiority, paired_t, smallest_sign_flip_p
from .table import Column, Number, Section, Table, Value

__all__ = [
    "MIB",
    "ablation",
    "as_points",
    "as_ratio",
    "cells",
    "fields",
    "main",
    "mean",
    "memory_label",
    "title",
]

MIB = 2**20
REFERENCE = "reference"
"""Where an arm would be compared with itself."""
_NO_INTERVAL = "one seed: no intervals"


def title(group: Group) -> str:
    """Heading of a group's section."""
    return f"{group.name}, {group.epochs:g} epochs, grid {group.grid} ({group.hardware})"


def fields(group: Group) -> dict[str, str]:
    """Constant CSV columns of a group."""
    return {
        "grid": group.grid,
        "model": group.model,
        "dataset": group.dataset,
        "epochs": f"{group.epochs:g}",
        "hardware": group.hardware,
    }


def memory_label(group: Group) -> str:
    """What the memory columns hold."""
    return "peak reserved CUDA bytes" if group.on_cuda else "peak live tensor bytes (without oneDNN scratch)"


def mean(
    values: Iterable[float | None], *, digits: int, scale: float = 1.0, mark: str = "", interval: bool = True
) -> Number:
    """Mean with its t interval, of those measured."""
    found = [value * scale for value in values if value is not None]
    if not found:
        return Number(None)
    estimate = paired_t(found)
    if not interval:
        return Number(estimate.value, digits=digits, mark=mark)
    return Number(estimate.value, estimate.low, estimate.high, digits=digits, mark=mark)


def as_points(comparison: Comparison, *, digits: int = 2) -> Number:
    """Difference in points."""
    e = comparison.estimate
    return Number(None) if e is None else Number(e.value, e.low, e.high, digits=digits, signed=True)


def as_ratio(comparison: Comparison, *, digits: int = 3) -> Number:
    """Ratio of geometric means."""
    e = comparison.estimate
    if e is None:
        return Number(None)
    low, high = (None if end is None else math.exp(end) for end in (e.low, e.high))
    return Number(math.exp(e.value), low, high, digits=digits)


def cells(records: Sequence[Record]) -> str:
    """``"9/10, 1 oom"``: finished of all, and what became of the others."""
    count = Counter(record.state for record in records)
    failed = [f"{n} {state}" for state, n in sorted(count.items()) if state != "done"]
    return ", ".join([f"{count['done']}/{len(records)}", *failed])


def verdict(comparison: Comparison, margin: float) -> str:
    """Non-inferiority in a word; a dash with fewer than two pairs."""
    if len(comparison.values) < 2:
        return "–"
    return non_inferiority(comparison.values, margin=margin).verdict


def _notes(group: Group, refused: Sequence[str]) -> list[str]:
    notes = [f"Memory is {memory_label(group)}, peak RSS beside it."]
    if group.best_static:
        notes.append(f"Best static setting: {group.best_static}, {group.best_static_why}.")
    most = max((len(group.done(label)) for label in group.arms), default=0)
    if most == 1:
        notes.append(f"{_NO_INTERVAL.capitalize()}.")
    elif most <= 6:
        least = smallest_sign_flip_p(most)
        notes.append(
            f"{most} paired seeds: a two-sided sign-flip p is at least {least:.3g}"
            + (
                ", so it cannot reach 0.05 after Holm over two hypotheses; read as description."
                if 2 * least >= 0.05
                else "."
            )
        )
    if any(r.done and r.metrics.get("test_accuracy") is None for r in group.records):
        notes.append("Accuracy is that of the validation split.")
    if any(record.shared_machine for record in group.records):
        notes.append(
            "† cells timed while other work ran on the machine: left out of times and their comparisons; "
            "where all were, their mean is shown."
        )
    if group.mixed_code:
        notes.append(
            f"Cells ran {len(group.mixed_code)} versions of the training sources: {', '.join(h[:12] for h in group.mixed_code)}."
        )
    other = [why for why in dict.fromkeys(refused) if "other work" not in why]
    if other:
        notes.append(f"{len(other)} pairs refused: {'; '.join(other[:3])}{'; …' if len(other) > 3 else ''}.")
    return notes


def main(groups: Sequence[Group], comparer: Comparer, *, margin: float | None = None) -> Table:
    """Every arm: accuracy, time and bytes from the same cells, against fp32 and the best static setting."""
    columns = [
        Column("arm", "Arm", number=False),
        Column("cells", "Done", number=False),
        Column("accuracy", "Accuracy %", interval=True),
        Column("accuracy_difference", "Δ fp32, points", interval=True),
        Column("verdict", "Within margin", number=False),
        Column("seconds", "Time s", interval=True),
        Column("time_ratio", "Time / fp32", interval=True),
        Column("time_ratio_best_static", "Time / best static", interval=True),
        Column("peak_mib", "Peak MiB", interval=False),
        Column("bytes_ratio", "Bytes / fp32", interval=True),
        Column("rss_mib", "RSS MiB", interval=False),
        Column("controller_percent", "Controller %", interval=False),
        Column("calibration_seconds", "Calibration s", interval=False),
    ]
    sections = []
    for group in groups:
        rows: list[list[Value]] = []
        refused: list[str] = []
        for label, records in group.arms.items():
            done = group.done(label)
            against = {o: comparer.get(group, label, "fp32", o) for o in ("accuracy", "time", "bytes")}
            best = comparer.get(group, label, group.best_static or "", "time")
            for one in (*against.values(), best):
                refused += one.refused
            is_reference = label == "fp32"
            mark = "†" if any(record.shared_machine for record in done) else ""
            share = [(r.metrics.get("controller_seconds") or 0.0) / r.metrics["train_seconds"] for r in done]
            rows.append(
                [
                    label,
                    cells(records),
                    mean((response(r, "accuracy") for r in done), digits=2),
                    REFERENCE if is_reference else as_points(against["accuracy"]),
                    "–" if is_reference else verdict(against["accuracy"], margin or group.margin),
                    mean((r.metric("train_seconds") for r in timed(done)), digits=1, mark=mark),
                    REFERENCE if is_reference else as_ratio(against["time"]),
                    REFERENCE if label == group.best_static else as_ratio(best),
                    mean((peak_bytes(r) for r in done), digits=1, scale=1 / MIB, interval=False),
                    REFERENCE if is_reference else as_ratio(against["bytes"]),
                    mean((r.metric("peak_rss_bytes") for r in done), digits=0, scale=1 / MIB, interval=False),
                    mean(share, digits=1, scale=100, interval=False),
                    mean((r.metric("calibration_seconds") for r in done), digits=1, interval=False),
                ]
            )
        sections.append(Section(title(group), fields(group), rows, _notes(group, refused)))
    words = sorted({f"{margin or group.margin:g}" for group in groups})
    notes = [
        "Intervals: paired-t 95 % over seeds. Ratios: geometric means within blocks (same host, model and seed).",
        f"Within margin: one-sided 95 % non-inferiority to fp32, margin {' or '.join(words)} points; "
        "only tri-accel's is a stated hypothesis.",
        "Time is all training time, controller and calibration included, evaluation excluded.",
    ]
    return Table("main", "Accuracy, training time and memory", columns, sections, notes)


def ablation(groups: Sequence[Group], comparer: Comparer) -> Table:
    """The eight arms of the 2³ design against all three components off."""
    columns = [
        Column("arm", "Arm", number=False),
        *(Column(name, name.capitalize(), number=False) for name in COMPONENTS),
        Column("cells", "Done", number=False),
        Column("accuracy", "Accuracy %", interval=True),
        Column("accuracy_difference", "Δ off, points", interval=True),
        Column("time_ratio", "Time / off", interval=True),
        Column("bytes_ratio", "Bytes / off", interval=True),
    ]
    sections = []
    for group in groups:
        rows: list[list[Value]] = []
        for arm in FACTORIAL_ARMS:
            if arm not in group.arms:
                continue
            on = set(COMPONENTS) if arm == "tri-accel" else set(arm.split("+"))
            against = {o: comparer.get(group, arm, "off", o) for o in ("accuracy", "time", "bytes")}
            rows.append(
                [
                    arm,
                    *("●" if name in on else "–" for name in COMPONENTS),
                    cells(group.arms[arm]),
                    mean((response(r, "accuracy") for r in group.done(arm)), digits=2),
                    REFERENCE if arm == "off" else as_points(against["accuracy"]),
                    REFERENCE if arm == "off" else as_ratio(against["time"]),
                    REFERENCE if arm == "off" else as_ratio(against["bytes"]),
                ]
            )
        if rows:
            sections.append(Section(title(group), fields(group), rows))
    return Table("ablation", "The 2³ ablation: every combination of the components", columns, sections)
