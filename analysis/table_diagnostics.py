"""The tables around the results: states of cells, memory with the engine off and on, what the controller did. Source: ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .compare import Comparer, peak_bytes
from .groups import Group
from .record import STATES, Record
from .table import Column, Number, Section, Table, Value
from .tables import MIB, REFERENCE, as_ratio, fields, mean, memory_label, title

__all__ = ["controller", "memory", "states"]


def states(groups: Sequence[Group]) -> Table:
    """Cells by state, with the reason of every failure."""
    present = [s for s in STATES if s == "done" or any(r.state == s for g in groups for r in g.records)]
    columns = [
        Column("arm", "Arm", number=False),
        Column("cells", "Cells"),
        *(Column(state, state) for state in present),
    ]
    sections = []
    for group in groups:
        rows: list[list[Value]] = []
        for label, records in group.arms.items():
            count = Counter(record.state for record in records)
            rows.append(
                [label, Number(len(records), digits=0), *(Number(count[s], digits=0) for s in present)]
            )
        reasons: dict[tuple[str, str, str], list[int]] = {}
        for label, records in group.arms.items():
            for record in records:
                if record.state not in ("done", "missing"):
                    reasons.setdefault(
                        (label, record.state, record.reason or "no reason recorded"), []
                    ).append(record.seed)
        notes = [
            f"{label}: {state} at seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}: {_short(reason)}"
            for (label, state, reason), seeds in reasons.items()
        ]
        if group.donors:
            notes.append(
                f"{group.donors} further cells, of seeds that the grid does not report, recorded traces for replay."
            )
        sections.append(Section(title(group), fields(group), rows, notes))
    return Table(
        "states",
        "Cells by state",
        columns,
        sections,
        ["Failed cells are kept and counted; missing ones have not run yet."],
    )


def _short(reason: str, most: int = 240) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def memory(groups: Sequence[Group], comparer: Comparer) -> Table:
    """Peak bytes of every arm, the engine (gradient release, fused update) off and on where both ran."""
    columns = [
        Column("arm", "Arm", number=False),
        Column("engine", "Engine", number=False),
        Column("peak_mib", "Peak MiB", interval=True),
        Column("bytes_ratio_plain", "/ fp32, engine off", interval=True),
        Column("bytes_ratio_engine", "/ fp32, engine on", interval=True),
        Column("rss_mib", "Peak RSS MiB", interval=True),
        Column("allocated_mib", "Peak allocated MiB (CUDA)"),
    ]
    sections = []
    for group in groups:
        rows: list[list[Value]] = []
        for label in group.arms:
            done = group.done(label)
            if not done:
                continue
            engine = any(record.engine for record in done)
            plain = comparer.get(group, label, "fp32", "bytes")
            same = comparer.get(group, label, "fp32 + engine", "bytes")
            rows.append(
                [
                    label,
                    "on" if engine else "off",
                    mean((peak_bytes(r) for r in done), digits=1, scale=1 / MIB),
                    REFERENCE if label == "fp32" else as_ratio(plain),
                    REFERENCE if label == "fp32 + engine" else as_ratio(same) if engine else Number(None),
                    mean((r.metric("peak_rss_bytes") for r in done), digits=0, scale=1 / MIB),
                    mean(
                        (r.metric("peak_cuda_allocated_bytes") for r in done),
                        digits=1,
                        scale=1 / MIB,
                        interval=False,
                    ),
                ]
            )
        if rows:
            sections.append(Section(title(group), fields(group), rows, [f"Peak MiB: {memory_label(group)}."]))
    return Table("memory", "Memory, engine off and on", columns, sections)


def controller(groups: Sequence[Group]) -> Table:
    """What the controller cost and decided."""
    columns = [
        Column("arm", "Arm", number=False),
        Column("controller_percent", "Controller, % of time", interval=True),
        Column("calibration_seconds", "Calibration s", interval=True),
        Column("skipped_steps", "Skipped steps"),
        Column("maps", "Precision maps"),
        Column("batch", "Batch", number=False),
        Column("rate_ratio", "Largest rate ratio"),
        Column("decided_by", "Layer-ticks decided by", number=False),
        Column("rank_correlation", "Rank corr. Fisher, Hessian"),
    ]
    sections = []
    for group in groups:
        rows: list[list[Value]] = []
        for label in group.arms:
            done = group.done(label)
            if not done or not any(r.metrics.get("controller_seconds") or r.series.decided_by for r in done):
                continue
            share = [(r.metrics.get("controller_seconds") or 0.0) / r.metrics["train_seconds"] for r in done]
            rows.append(
                [
                    label,
                    mean(share, digits=2, scale=100),
                    mean((r.metric("calibration_seconds") for r in done), digits=2),
                    mean((r.metric("skipped_steps") for r in done), digits=1, interval=False),
                    mean(
                        (float(len(r.series.maps)) for r in done if r.series.maps), digits=1, interval=False
                    ),
                    _batches(done),
                    mean((_rate_ratio(r) for r in done), digits=2, interval=False),
                    _decided(done),
                    mean((_rank_correlation(r) for r in done), digits=2, interval=False),
                ]
            )
        if rows:
            sections.append(Section(title(group), fields(group), rows))
    notes = ["Both costs are inside every training time. Shares are of layer-ticks over all seeds."]
    return Table("controller", "What the controller cost and decided", columns, sections, notes)


def _batches(done: Sequence[Record]) -> str:
    sizes = [size for r in done for size in (r.series.steps.get("batch_size") or [])[:-1] if size]
    starts = sorted({int(r.cell["batch"]) for r in done if r.cell.get("batch")})
    if not sizes:
        return "–"
    least, most = int(min(sizes)), int(max(sizes))
    start = "/".join(map(str, starts)) or str(least)
    return (
        start
        if most == least
        else f"{start} → {most}"
        if most > max(starts, default=0)
        else f"{start} → {least}"
    )


def _rate_ratio(record: Record) -> float | None:
    ratios = []
    for row in record.series.curvature.get("scale", ()):
        scales = [scale for scale in row if scale]
        if scales:
            ratios.append(max(scales) / min(scales))
    return max(ratios, default=None)


def _decided(done: Sequence[Record]) -> str:
    total: Counter[str] = Counter()
    for record in done:
        shares: Mapping[str, Any] = record.report.get("decided_by") or record.series.decided_by
        whole = sum(shares.values())
        for key, value in shares.items():
            total[key] += value / whole / len(done) if whole else 0
    shown = sorted(total.items(), key=lambda item: (-round(item[1], 6), item[0]))
    return ", ".join(f"{key} {100 * value:.0f} %" for key, value in shown if value >= 0.005) or "–"


def _rank_correlation(record: Record) -> float | None:
    """Mean over the probes that were audited, each ``[samples_seen, layers, rho]``."""
    found = (record.report.get("probes") or {}).get("rank_correlations") or []
    rhos = [float(row[2]) for row in found if isinstance(row[2], int | float)]
    return sum(rhos) / len(rhos) if rhos else None
