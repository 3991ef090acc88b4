"""Accuracy against time, time to target, and efficiency through training.

Lines are means over seeds; every seed's own point is drawn beside them. Cells that were timed while other work ran are
left out and counted; an arm that has no others is shown with hollow points, and said so. Source: ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .figures import MAX_LINES, arm_style, featured, legend_below, new_figure, subtitle
from .groups import Group, timed
from .record import Record
from .stats import paired_t
from .target import target_accuracy, time_to_target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["accuracy_against_time", "efficiency", "low_share", "relative_throughput", "time_to_target_figure"]

BINS = 12
"""Equal parts of training in which throughput is taken."""


def _evals(record: Record) -> NDArray[np.float64]:
    """(evaluations, 2): training seconds and test accuracy in percent."""
    evals = record.series.evals
    pairs = zip(evals.get("train_seconds", ()), evals.get("accuracy", ()), strict=False)
    before = record.logged_seconds_lack
    rows = [(before + s, 100 * a) for s, a in pairs if s is not None and a is not None]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def accuracy_against_time(group: Group) -> Figure | None:
    """Test accuracy over training seconds: mean curves, and each seed's last evaluation."""
    arms = [label for label in featured(group) if any(len(_evals(r)) for r in group.done(label))]
    if not arms:
        return None
    figure, grid = new_figure(6.4, 4.4)
    axes = grid[0, 0]
    for label in arms:
        look = arm_style(label)
        curves = [(record, _evals(record)) for record in group.done(label)]
        curves = [(record, curve) for record, curve in curves if len(curve)]
        shown = {id(record) for record in timed([record for record, _ in curves])}
        used = [curve for record, curve in curves if id(record) in shown]
        hollow = all(record.shared_machine for record, _ in curves)
        length = min(len(curve) for curve in used)
        mean = np.mean([curve[:length] for curve in used], axis=0)
        name = label + (" (best static)" if label == group.best_static else "")
        if hollow:
            name += " (shared machine)"
        elif len(used) < len(curves):
            name += f" ({len(curves) - len(used)} shared left out)"
        axes.plot(
            mean[:, 0], mean[:, 1], color=look.colour, linestyle=look.line, marker=look.marker, linewidth=look.width,
            markersize=7 if look.marker == "*" else 4.5, label=name, zorder=3,
        )  # fmt: skip
        ends = np.array([curve[-1] for curve in used])
        axes.scatter(
            ends[:, 0], ends[:, 1], s=14, marker=look.marker, facecolors="none" if hollow else look.colour,
            edgecolors=look.colour, linewidths=0.7, alpha=0.45, zorder=2,
        )  # fmt: skip
    axes.set_xlabel("training time, s (controller and calibration included, evaluation excluded)")
    axes.set_ylabel("test accuracy, %")
    axes.set_xlim(left=0)
    axes.set_title(f"Accuracy against time: {subtitle(group)}", loc="left")
    legend_below(figure, axes)
    return figure


def time_to_target_figure(group: Group, *, margin: float | None = None) -> Figure | None:
    """Seconds to the target accuracy, one row an arm, one point a seed."""
    target = target_accuracy(group, margin=margin)
    if target is None:
        return None
    rows = []
    for label in group.arms:
        done = [record for record in group.done(label) if not record.shared_machine and record.series.evals]
        times = [t for t in (time_to_target(record, target) for record in done) if t is not None]
        if done:
            rows.append((label, times, len(done)))
    if not any(times for _, times, _ in rows):
        return None
    figure, grid = new_figure(6.4, 1.3 + 0.27 * len(rows))
    axes = grid[0, 0]
    for place, (label, times, cells) in enumerate(rows):
        look = arm_style(label)
        if times:
            axes.scatter(
                times,
                [place] * len(times),
                s=16,
                marker=look.marker,
                color=look.colour,
                alpha=0.5 if len(times) > 1 else 1.0,
                linewidths=0.8,
            )
            estimate = paired_t(times)
            if estimate.low is not None and estimate.high is not None:
                axes.plot(
                    [estimate.value], [place], marker="|", markersize=13, markeredgewidth=2, color="#000000"
                )
                axes.plot([estimate.low, estimate.high], [place, place], color="#000000", linewidth=1.0)
        text = f"{len(times)}/{cells}"
        axes.annotate(
            text,
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=7.5,
            annotation_clip=False,
        )
    axes.annotate(
        "reached",
        (1.01, -0.9),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=7.5,
        annotation_clip=False,
    )
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel(
        "training time to target, s (points: seeds; bars: mean and 95 % interval of those that reached it)"
    )
    axes.set_title(f"Time to {100 * target:.1f} % test accuracy: {subtitle(group)}", loc="left", x=0)
    return figure


def _throughput(record: Record, edges: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """(bins,) samples per second in each part of training, from the step log."""
    steps = record.series.steps
    pairs = zip(steps.get("samples_seen", ()), steps.get("train_seconds", ()), strict=False)
    rows = [(0.0, 0.0)] + [(n, s) for n, s in pairs if n is not None and s is not None]
    if len(rows) < 4:
        return None
    seen, seconds = np.array(rows, dtype=np.float64).T
    spent = np.diff(np.interp(edges * seen[-1], seen, seconds))
    return np.asarray(np.diff(edges) * seen[-1] / np.where(spent > 0, spent, np.nan))


def relative_throughput(group: Group, label: str, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """(pairs, bins) samples per second over those of fp32 in the same block; shared machines and other hosts left out."""
    base = {record.seed: record for record in group.done("fp32") if not record.shared_machine}
    rows = []
    for record in group.done(label):
        other = base.get(record.seed)
        if other is None or record.shared_machine or record.block != other.block:
            continue
        mine, theirs = _throughput(record, edges), _throughput(other, edges)
        if mine is not None and theirs is not None:
            rows.append(mine / theirs)
    return np.array(rows, dtype=np.float64).reshape(-1, len(edges) - 1)


def low_share(record: Record, fractions: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Share of compute layers below FP32 at each fraction of training, ``(n,)``; ``None`` without maps."""
    maps = record.series.maps
    if not maps:
        return None
    starts = np.array([0.0, *(float(change["samples_seen"]) for change in maps[1:])])
    total = record.metrics.get("samples_seen") or starts[-1] or 1.0
    shares: list[float] = []
    now: dict[str, str] = {}
    for change in maps:
        now |= change["map"]
        shares.append(sum(fmt != "fp32" for fmt in now.values()) / max(1, len(now)))
    return np.array(shares)[np.searchsorted(starts, fractions * total, side="right") - 1]


def efficiency(group: Group) -> Figure | None:
    """Throughput relative to fp32 in the same block through training, and the share of layers below FP32."""
    edges = np.linspace(0.0, 1.0, BINS + 1)
    middle = 100 * (edges[1:] + edges[:-1]) / 2
    arms = [label for label in featured(group) if label != "fp32"]
    curves = {label: relative_throughput(group, label, edges) for label in arms}
    curves = {label: rows for label, rows in curves.items() if len(rows)}
    if not curves:
        return None
    figure, grid = new_figure(6.4, 5.4, 2, 1, sharex=True, height_ratios=(3, 2))
    top, bottom = grid[0, 0], grid[1, 0]
    fractions = np.linspace(0, 1, 101)
    for label, rows in curves.items():
        look = arm_style(label)
        if label == "tri-accel" and len(rows) > 1:
            for row in rows[:MAX_LINES]:
                top.plot(middle, row, color=look.colour, linewidth=0.6, alpha=0.35)
        mean = np.exp(np.nanmean(np.log(rows), axis=0))
        top.plot(
            middle, mean, color=look.colour, linestyle=look.line, marker=look.marker, linewidth=look.width, markersize=4.5,
            label=label,
        )  # fmt: skip
        shares = [
            share
            for share in (low_share(record, fractions) for record in group.done(label))
            if share is not None
        ]
        if shares:
            mean_share = 100 * np.mean(shares, axis=0)
            bottom.step(
                100 * fractions, mean_share, where="post", color=look.colour, linestyle=look.line,
                linewidth=look.width,
            )  # fmt: skip
    top.axhline(1.0, color="#000000", linewidth=1.0)
    top.annotate(
        "fp32",
        (1.005, 1.0),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=7.5,
        annotation_clip=False,
    )
    top.set_ylabel("images/s over fp32's\n(same block, without\ncalibration; thin: seeds)")
    bottom.set_ylabel("layers below FP32, %")
    bottom.set_ylim(-4, 104)
    bottom.set_xlim(0, 100)
    bottom.set_xlabel("share of training samples seen, %")
    top.set_title(f"Efficiency through training: {subtitle(group)}", loc="left")
    legend_below(figure, top)
    return figure
