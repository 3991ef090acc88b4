"""The end of a search: Pareto front printed and drawn, the best against the default on held-out seeds, the best as TOML.

Best: of the front, trials whose accuracy is within ``WITHIN`` of the best one's, the fastest; where time was not an objective the
one with the fewest bytes, else the most accurate. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from .cells import Cell
from .search import DIRECTIONS, SearchPlan, trial_cells
from .study import objectives_of

__all__ = ["WITHIN", "best_trial", "conclude", "front", "to_toml"]

WITHIN = 0.005
"""Accuracy, as a fraction, that a faster setting may give away."""


def front(trials: Sequence[FrozenTrial], objectives: Sequence[str]) -> list[FrozenTrial]:
    """Trials that no other one beats or equals in every objective and beats in one, most accurate first."""

    def losses(trial: FrozenTrial) -> tuple[float, ...]:
        signs = (-1.0 if DIRECTIONS[name] == "maximize" else 1.0 for name in objectives)
        return tuple(sign * value for sign, value in zip(signs, trial.values, strict=True))

    points = [(losses(trial), trial) for trial in trials if trial.state is TrialState.COMPLETE]

    def beaten(point: tuple[float, ...]) -> bool:
        return any(
            all(a <= b for a, b in zip(other, point, strict=True)) and other != point for other, _ in points
        )

    kept = [(point, trial) for point, trial in points if not beaten(point)]
    return [trial for _, trial in sorted(kept, key=lambda item: (item[0], item[1].number))]


def best_trial(trials: Sequence[FrozenTrial], objectives: Sequence[str]) -> FrozenTrial | None:
    """The one of the front that is worth writing down; ``None`` where no trial is complete."""
    kept = front(trials, objectives)
    if not kept:
        return None
    if "accuracy" not in objectives:
        return kept[0]
    accuracy = {trial.number: trial.values[list(objectives).index("accuracy")] for trial in kept}
    close = [trial for trial in kept if accuracy[trial.number] >= max(accuracy.values()) - WITHIN]
    for name in ("time", "bytes"):
        if name in objectives:
            return min(close, key=lambda trial: trial.values[list(objectives).index(name)])
    return kept[0]


def conclude(
    study: optuna.Study, plan: SearchPlan, *, out: Path, run: Callable[[Cell], Mapping[str, Any]]
) -> int:
    """Print, draw, compare and write; returns 0, or 1 where no trial is complete."""
    kept = front(study.trials, plan.objectives)
    best = best_trial(study.trials, plan.objectives)
    if best is None:
        reasons = {str(t.user_attrs.get("reason")) for t in study.trials if t.user_attrs.get("reason")}
        print("no trial has a result: " + ("; ".join(sorted(reasons)) or "all were pruned"))
        return 1
    _print(study.trials, kept, best, plan)
    _draw(study.trials, kept, plan, out / "pareto.png")
    values = best.user_attrs["values"]
    lines = [f"# Best of {len(study.trials)} trials of study {study.study_name}: trial {best.number}."]
    lines += [
        f"# {name}: {best.user_attrs['measured'][name]:.6g} (validation split)" for name in plan.objectives
    ]
    if plan.final_seeds:
        lines += _compare(plan, values, run)
    path = out / "best.toml"
    path.write_text(to_toml(values, comments=lines), encoding="utf-8")
    print(
        f"best setting: {path}; use it with: python -m ablations.run --grid {plan.grid.name} --config {path}"
    )
    return 0


def _compare(
    plan: SearchPlan, values: Mapping[str, Any], run: Callable[[Cell], Mapping[str, Any]]
) -> list[str]:
    """Best against default on seeds that chose neither; lines for people."""
    found: dict[str, dict[str, float]] = {}
    for name, given in (("default", {}), ("best", values)):
        results = [run(cell) for cell in trial_cells(plan, dict(given), seeds=plan.final_seeds)]
        failed = [r for r in results if r["state"] != "done"]
        if failed:
            return [f"# held-out seeds: {name} ended {failed[0]['state']}: {failed[0]['reason']}"]
        found[name] = objectives_of(results)
    seeds = ", ".join(map(str, plan.final_seeds))
    best, default = found["best"], found["default"]
    line = f"held-out seeds {seeds}: accuracy {best['accuracy']:.4f}, with the defaults {default['accuracy']:.4f}"
    for name in ("time", "bytes"):
        if name in plan.objectives:
            line += f", {name} x {best[name] / default[name]:.3f}"
    print(line)
    return [f"# {line}"]


def _print(
    trials: Sequence[FrozenTrial], kept: Sequence[FrozenTrial], best: FrozenTrial, plan: SearchPlan
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"Pareto front of {sum(t.state is TrialState.COMPLETE for t in trials)} complete trials"
    )
    table.add_column("trial", justify="right")
    for name in plan.objectives:
        table.add_column(name, justify="right")
    for field in plan.space.dimensions:
        table.add_column(field, justify="right")
    for trial in kept:
        mark = "*" if trial.number == best.number else ""
        numbers = [f"{value:.5g}" for value in trial.values]
        settings = [f"{trial.user_attrs['values'][field]:.4g}" for field in plan.space.dimensions]
        table.add_row(f"{trial.number}{mark}", *numbers, *settings)
    Console(highlight=False, width=max(100, 14 * table.row_count)).print(table)


def _draw(trials: Sequence[FrozenTrial], kept: Sequence[FrozenTrial], plan: SearchPlan, path: Path) -> None:
    """Accuracy against each cost, the front marked; one objective: its value by trial."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    chosen = {trial.number for trial in kept}
    base = plan.objectives[0]
    others = plan.objectives[1:] or ("trial",)
    figure = Figure(figsize=(4.5 * len(others), 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, name in zip(figure.subplots(1, len(others), squeeze=False)[0], others, strict=True):
        for on_front in (False, True):
            points = [trial for trial in done if (trial.number in chosen) is on_front]
            x = [t.number if name == "trial" else t.values[plan.objectives.index(name)] for t in points]
            y = [t.values[0] for t in points]
            axis.scatter(
                x,
                y,
                marker="o" if on_front else "x",
                color="C0" if on_front else "0.6",
                label="front" if on_front else "other trials",
            )
        axis.set_xlabel(name)
        axis.set_ylabel(base)
        axis.legend()
    figure.savefig(path, dpi=150)


def to_toml(values: Mapping[str, float | int], *, comments: Sequence[str] = ()) -> str:
    """Numbers by dotted field as a TOML document that ``ablations.run --config`` takes."""
    components: dict[str, list[str]] = {}
    for name, value in values.items():
        component, _, field = name.rpartition(".")
        components.setdefault(component, []).append(f"{field} = {value!r}")
    lines = list(comments)
    for component, fields in sorted(components.items()):
        lines += [*([""] if lines else []), *([f"[{component}]"] if component else []), *fields]
    return "\n".join(lines) + "\n"
