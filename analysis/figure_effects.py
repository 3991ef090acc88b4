"""Factorial effects, and ours beside the paper's reported figures. Every seed's point is drawn. Source: ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .factorial import factorial_effects
from .figures import new_figure, subtitle
from .groups import Group
from .paper import PAPER, ours
from .table_tests import responses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["factorial_figure", "paper_figure"]

_PANELS = (("accuracy", "accuracy, points"), ("time", "training time, %"), ("bytes", "peak bytes, %"))


def _interval(
    axes: Axes,
    place: float,
    value: float | None,
    low: float | None,
    high: float | None,
    *,
    colour: str = "#000000",
) -> None:
    if low is not None and high is not None:
        axes.plot([low, high], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt", zorder=3)
    axes.plot([value], [place], marker="o", markersize=5, color=colour, zorder=4)


def _seeds(axes: Axes, place: float, points: NDArray[np.float64], fill: str, edge: str) -> None:
    """Every seed's own value, where there are several."""
    if len(points) > 1:
        axes.scatter(
            points, np.full(len(points), place), s=7, color=fill, edgecolors=edge, linewidths=0.4, zorder=2
        )


def factorial_figure(group: Group) -> Figure | None:
    """Main effects and interactions on accuracy, time and bytes, with 95 % intervals."""
    effects = {outcome: factorial_effects(responses(group, outcome)) for outcome, _ in _PANELS}  # type: ignore[arg-type]
    shown = [(outcome, label) for outcome, label in _PANELS if effects[outcome]]
    if not shown:
        return None
    names = [effect.name.replace(" x ", " × ") for effect in effects[shown[0][0]]]
    figure, grid = new_figure(2.2 + 2.1 * len(shown), 3.5, 1, len(shown), sharey=True)
    for axes, (outcome, label) in zip(grid[0], shown, strict=True):
        for place, effect in enumerate(effects[outcome]):
            points = effect.per_seed if outcome == "accuracy" else 100 * np.expm1(effect.per_seed)
            value, low, high = (
                end if end is None or outcome == "accuracy" else 100 * math.expm1(end)
                for end in (effect.estimate.value, effect.estimate.low, effect.estimate.high)
            )
            _seeds(axes, place + 0.22, points, "#56b4e9", "#0173b2")
            _interval(axes, place - 0.08, value, low, high)
        axes.axvline(0.0, color="#000000", linewidth=0.8)
        axes.axhline(2.5, color="#aaaaaa", linewidth=0.6, linestyle=(0, (3, 3)))
        axes.set_xlabel(label)
        axes.grid(False, axis="y")
    grid[0, 0].set_yticks(range(len(names)), names)
    grid[0, 0].set_ylim(len(names) - 0.4, -0.6)
    seeds = len(effects[shown[0][0]][0].seeds)
    text = f"Effects of the 2³ design ({seeds} seed{'s' if seeds > 1 else ''}"
    text += "; 95 % intervals, small: seeds): " if seeds > 1 else "; no interval): "
    figure.suptitle(text + subtitle(group), x=0.01, ha="left", fontsize=9.5)
    return figure


def paper_figure(groups: Sequence[Group]) -> Figure | None:
    """The paper's reported changes, and ours on the same axes."""
    compared = [figure for figure in PAPER if figure.outcome is not None]
    panels = [[f for f in compared if f.unit == "%"], [f for f in compared if f.unit == "points"]]
    rows = {
        f.key: [(group, beside) for group in groups if (beside := ours(f, group)) is not None]
        for f in compared
    }
    if not any(rows.values()):
        return None
    several = len({group.hardware for group in groups}) > 1
    heights = [sum(2 + len(rows[f.key]) for f in panel) for panel in panels]
    figure, grid = new_figure(6.8, 1.8 + 0.23 * sum(heights), 2, 1, height_ratios=heights)
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        place, ticks, labels = 0, [], []
        for reported in panel:
            axes.annotate(
                reported.label, (0.0, place), xycoords=("axes fraction", "data"), fontsize=8, fontweight="bold", va="center",
                xytext=(3, 0), textcoords="offset points", zorder=5,
            )  # fmt: skip
            place += 1
            axes.barh(
                place,
                reported.value,
                height=0.6,
                facecolor="#d9d9d9",
                edgecolor="#555555",
                hatch="///",
                linewidth=0.6,
                zorder=1,
            )
            at = (f"{reported.value:+g}".replace("-", "−"), (reported.value, place))
            axes.annotate(
                *at,
                xytext=(4 if reported.value > 0 else -4, 0),
                textcoords="offset points",
                ha="left" if reported.value > 0 else "right",
                va="center",
                fontsize=7.5,
            )
            ticks.append(place)
            labels.append("paper, as reported")
            for group, (comparison, (value, low, high)) in rows[reported.key]:
                place += 1
                points = np.array(comparison.values)
                points = points if reported.unit == "points" else 100 * np.expm1(points)
                _seeds(axes, place + 0.2, points, "#f0b48c", "#d55e00")
                _interval(axes, place - 0.1, value, low, high, colour="#d55e00")
                ticks.append(place)
                labels.append(f"ours: {group.name}" + (f", {_short(group.hardware)}" if several else ""))
            place += 1
        axes.axvline(0.0, color="#000000", linewidth=0.8)
        axes.set_yticks(ticks, labels)
        axes.set_ylim(place - 0.3, -0.7)
        axes.margins(x=0.15)
        axes.grid(False, axis="y")
        axes.set_xlabel("change, %" if panel[0].unit == "%" else "difference, points")
    hardware = "; ".join(sorted({group.hardware for group in groups}))
    figure.suptitle(
        'Beside the paper (one T4 or P100; its "up to" figures are its best setting)\n'
        f"Ours: means of paired seeds, 95 % intervals; {hardware}",
        x=0.01, ha="left", fontsize=9,
    )  # fmt: skip
    return figure


def _short(hardware: str) -> str:
    return hardware if len(hardware) <= 28 else hardware[:27] + "…"
