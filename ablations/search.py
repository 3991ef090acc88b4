"""``python -m ablations.search``: thresholds by Optuna, on the validation split, with seeds that no reported cell uses.

Objectives: validation accuracy (up), training time and peak bytes (down). Trial 0 is the default configuration. Each cell of a
trial has a process of its own; trials with the same configuration share cells. A search that was killed goes on: trials
whose worker is dead are closed and tried again with the same values. The best of the Pareto front is compared with the default on
held-out seeds and written as TOML for ``ablations.run --config``. Source: ours; samplers are Optuna's.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from triaccel.config import TriAccelConfig
from triaccel.types import TriAccelError

from .cells import Cell, digest, expand
from .grid import Grid, load_grid, override
from .record import RecordError
from .space import Space, load_space

__all__ = ["Arguments", "Objective", "SearchError", "SearchPlan", "main", "trial_cells"]

Objective = Literal["accuracy", "time", "bytes"]
DIRECTIONS: dict[str, Literal["maximize", "minimize"]] = {
    "accuracy": "maximize",
    "time": "minimize",
    "bytes": "minimize",
}


class SearchError(TriAccelError):
    """A search cannot start; the message says why and what to do."""


@dataclass
class Arguments:
    """Search thresholds. Call it again, or at the same time elsewhere with the same --storage, to go on."""

    grid: str = "quick"
    """Grid that gives model, data set, epochs, recipe and base configuration."""
    trials: int = 20
    """Finished trials that the study shall have in all."""
    rule: Literal["auto", "paper"] = "auto"
    """Which rules are tuned: arm tri-accel, or tri-accel-paper."""
    space: str | None = None
    """TOML file of the fields to vary and their ranges; none: that of the rule."""
    objectives: str = "accuracy,time,bytes"
    """What to optimise, separated by commas; a single one prunes trials that fall behind."""
    seeds: str = "1000"
    """Seeds of the trials; none may be among the grid's."""
    final_seeds: str = "2000,2001"
    """Seeds on which best and default are compared at the end; empty: no comparison."""
    model: str | None = None
    """Model instead of the grid's first."""
    dataset: str | None = None
    """Data set instead of the grid's first."""
    epochs: int | None = None
    """Epochs instead of the grid's."""
    set: Annotated[list[str], tyro.conf.UseAppendAction] = field(default_factory=list)
    """Configuration override component.field=value for every trial; may be given several times."""
    workers: int = 1
    """Trials at the same time. With more than one on a device the time objective is dropped."""
    device: str = "cpu"
    """torch device; several, separated by commas, are dealt out to the workers."""
    storage: str | None = None
    """Database URL for many machines; none: a journal file in --out."""
    out: Path | None = None
    """Folder of the study; runs/search-GRID-RULE by default."""
    data: Path = Path("data")
    """Folder of data sets."""
    sampler_seed: int = 0
    """Seed of the sampler."""
    timeout: float | None = None
    """Seconds after which a cell is given up."""


@dataclass(frozen=True)
class SearchPlan:
    """What a study is: fixed when it is made, checked when it is joined.

    Attributes:
        grid: base grid with one model, one data set, the tuned arm, the search's seeds and the validation split.
        space: what varies.
        objectives: what is optimised.
        final_seeds: seeds of the comparison at the end.
    """

    grid: Grid
    space: Space
    objectives: tuple[Objective, ...]
    final_seeds: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Identifies the study: other values would not be comparable."""
        dimensions = {name: d.model_dump(mode="json") for name, d in self.space.dimensions.items()}
        return digest([self.grid.model_dump(mode="json"), dimensions, list(self.objectives)], 16)


def make_plan(arguments: Arguments) -> SearchPlan:
    """The study that ``arguments`` describe.

    Raises:
        TriAccelError: something is unknown or out of range, or a seed is among the reported ones.
    """
    base = load_grid(arguments.grid, sets=arguments.set)
    objectives = _objectives(arguments)
    seeds, final = _seeds(arguments.seeds, "--seeds"), _seeds(arguments.final_seeds, "--final-seeds")
    if not seeds:
        raise SearchError("--seeds is empty: a trial needs at least one")
    reported = {*base.seeds, *base.more_seeds}
    for option, given, others in (
        ("--seeds", seeds, reported),
        ("--final-seeds", final, reported | set(seeds)),
    ):
        if shared := sorted(set(given) & others):
            raise SearchError(
                f"{option} {shared} are used elsewhere (reported: {sorted(reported)}): a search that sees reported seeds would "
                "flatter its result; choose others"
            )
    if arguments.trials < 1 or arguments.workers < 1:
        raise SearchError("--trials and --workers must be at least 1")
    grid = load_grid(
        arguments.grid,
        sets=arguments.set,
        changes={
            "models": [arguments.model or base.models[0]],
            "datasets": [arguments.dataset or base.datasets[0]],
            "arms": ["tri-accel" if arguments.rule == "auto" else "tri-accel-paper"],
            "arms_of_model": {},
            "seeds": seeds,
            "primary": [],
            "more_seeds": [],
            "epochs": arguments.epochs,
            "split": "validation",
            "evaluate": "epoch",
        },
    )
    return SearchPlan(grid, load_space(arguments.space or arguments.rule), objectives, tuple(final))


def _objectives(arguments: Arguments) -> tuple[Objective, ...]:
    names = [name.strip() for name in arguments.objectives.split(",") if name.strip()]
    unknown = sorted(set(names) - set(DIRECTIONS))
    if not names or len(set(names)) != len(names) or unknown:
        what = f"unknown {', '.join(unknown)}" if unknown else "none, or one twice"
        raise SearchError(f"--objectives {arguments.objectives!r}: {what}; choose of {', '.join(DIRECTIONS)}")
    devices = {part.strip() for part in arguments.device.split(",")}
    if "time" in names and arguments.workers > len(devices):
        warnings.warn(
            f"{arguments.workers} workers share {len(devices)} device(s): their times say nothing, so that objective is dropped",
            stacklevel=2,
        )
        names.remove("time")
        if not names:
            raise SearchError(
                "time is the only objective and cannot be measured with several workers on one device; use --workers 1"
            )
    return tuple(name for name in DIRECTIONS if name in names)  # type: ignore[misc]


def _seeds(text: str, option: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise SearchError(f"{option} {text!r}: write whole numbers separated by commas") from error
    if any(seed < 0 for seed in seeds) or len(set(seeds)) != len(seeds):
        raise SearchError(f"{option} {text!r}: seeds are distinct and not negative")
    return seeds


def trial_cells(
    plan: SearchPlan, values: dict[str, float | int], *, seeds: tuple[int, ...] | None = None
) -> list[Cell]:
    """Cells of one trial: the base configuration with ``values`` (field -> number) laid over it.

    Raises:
        ValidationError: the configuration refuses the values.
    """
    sets = [f"{name}={value!r}" for name, value in values.items()]
    config = override({"config": plan.grid.config.model_dump(mode="json")}, sets)["config"]
    grid = plan.grid.model_copy(
        update={"config": TriAccelConfig.model_validate(config), "seeds": seeds or plan.grid.seeds}
    )
    return expand(grid)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 searched, 1 stopped before the end, 2 bad input."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m ablations.search")
    try:
        plan = make_plan(arguments)
        out = arguments.out or Path("runs") / f"search-{plan.grid.name}-{arguments.rule}"
        from .study import search

        return search(
            plan,
            out=out,
            trials=arguments.trials,
            workers=arguments.workers,
            devices=[part.strip() for part in arguments.device.split(",") if part.strip()],
            storage=arguments.storage,
            root=arguments.data,
            sampler_seed=arguments.sampler_seed,
            timeout=arguments.timeout,
        )
    except (TriAccelError, RecordError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
