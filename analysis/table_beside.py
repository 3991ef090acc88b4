"""Two tables beside the results: time to target accuracy, and the paper's reported figures with ours. Source: ours."""

from __future__ import annotations

from collections.abc import Sequence

from .compare import peak_bytes
from .groups import Group
from .paper import PAPER, SETTING, ours
from .table import Column, Number, Section, Table, Value
from .tables import fields, mean, memory_label, title
from .target import target_accuracy, time_to_target

__all__ = ["paper", "targets"]


def targets(groups: Sequence[Group], *, margin: float | None = None) -> Table:
    """Training seconds until the test accuracy first reaches fp32's mean final accuracy less the margin."""
    columns = [
        Column("arm", "Arm", number=False),
        Column("reached", "Reached", number=False),
        Column("seconds", "Time to target s (of those that reached it)", interval=True),
    ]
    sections = []
    for group in groups:
        target = target_accuracy(group, margin=margin)
        if target is None:
            continue
        rows: list[list[Value]] = []
        for label in group.arms:
            done = [record for record in group.done(label) if not record.shared_machine]
            if not done:
                continue
            times = [time_to_target(record, target) for record in done]
            reached = [t for t in times if t is not None]
            rows.append([label, f"{len(reached)}/{len(done)}", mean(reached, digits=1)])
        if rows:
            note = f"Target: {100 * target:.2f} %, the mean final accuracy of fp32 less {margin or group.margin:g} points."
            sections.append(Section(title(group), fields(group), rows, [note]))
    notes = [
        "First evaluation at or above the target, not interpolated: as coarse as the evaluations. "
        "Cells of shared machines are left out."
    ]
    return Table("time_to_target", "Time to target accuracy", columns, sections, notes)


def paper(groups: Sequence[Group]) -> Table:
    """The paper's reported figures beside ours."""
    columns = [
        Column("figure", "What", number=False),
        Column("paper", "Paper"),
        Column("unit", "Unit", number=False),
        Column("ours", "Ours (tri-accel)", interval=True),
        Column("pairs", "Pairs"),
        Column("source", "The paper's words, and where", number=False),
    ]
    sections = []
    for group in groups:
        rows: list[list[Value]] = []
        done = group.done("tri-accel")
        for figure in PAPER:
            beside = ours(figure, group)
            if beside is not None:
                (value, low, high), pairs = beside[1], len(beside[0].values)
                mine = Number(value, low, high, digits=1, signed=True)
            elif figure.key == "accuracy-absolute":
                mine, pairs = mean((100 * (r.accuracy or 0.0) for r in done), digits=1), len(done)
            elif figure.key == "memory-absolute":
                mine, pairs = mean(((peak_bytes(r) or 0) / 1e9 or None for r in done), digits=2), len(done)
            else:
                mine, pairs = Number(None), 0
            reported = Number(
                figure.value,
                digits=2 if figure.unit == "GB" else 1,
                signed=not figure.key.endswith("absolute"),
            )
            words = f"“{figure.words}” ({figure.source})".replace("“", '"').replace("”", '"')
            rows.append([figure.label, reported, figure.unit, mine, Number(pairs, digits=0), words])
        sections.append(Section(title(group), fields(group), rows))
    notes = [
        f'The paper: {SETTING}; the figures with "up to" are the best of its settings. Ours: the means of all paired seeds, '
        f"on the hardware named; memory is {' / '.join(sorted({memory_label(g) for g in groups}))}. "
        "Hardware, data and schedule differ: the changes may be set beside each other, the absolute figures may not.",
    ]
    return Table("paper", "The paper's reported figures beside ours", columns, sections, notes)
