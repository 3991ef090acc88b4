"""Cells: one training run each, identified by the hash of all that decides its result. Needs no torch.

A block is all arms of one model, data set and seed: ratios are taken within it, and its arms run in an order drawn from the seed.
``replay`` runs the trace of another seed's ``tri-accel`` cell, a declared dependency: where the grid lacks that cell it is added.
Source: ours.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baselines.arms import arm_config, parse_arm
from triaccel.config import TriAccelConfig
from triaccel.types import TriAccelError

if TYPE_CHECKING:
    from .grid import Grid

__all__ = ["Cell", "CellError", "digest", "expand"]


class CellError(TriAccelError):
    """A cell's file does not hold what its id says."""


def digest(value: Any, digits: int) -> str:
    """First hex digits of the SHA-256 of the canonical JSON of ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


@dataclass(frozen=True, slots=True)
class Cell:
    """One training run.

    Attributes:
        arm: arm, with ``@batch`` where given.
        model: model name.
        dataset: data set name.
        seed: seed of weights, data order and augmentation.
        batch: first batch size, samples.
        settings: all else that decides the result (epochs, recipe, subset, resolved configuration).
        needs: id of the cell whose trace this one replays, or ``None``.
    """

    arm: str
    model: str
    dataset: str
    seed: int
    batch: int
    settings: dict[str, Any]
    needs: str | None = None

    @property
    def id(self) -> str:
        """First 12 hex digits of the hash of the canonical JSON."""
        return digest(
            [self.arm, self.model, self.dataset, self.seed, self.batch, self.settings, self.needs], 12
        )

    @property
    def block(self) -> str:
        """Cells whose times may be compared."""
        return f"{self.model}/{self.dataset}/{self.seed}"

    @property
    def config(self) -> TriAccelConfig:
        """The configuration that the arm runs."""
        return TriAccelConfig.model_validate(self.settings["config"])

    def to_json(self) -> dict[str, Any]:
        """The content of ``cell.json``."""
        return {
            "schema": 1,
            "id": self.id,
            "arm": self.arm,
            "model": self.model,
            "dataset": self.dataset,
            "seed": self.seed,
            "batch": self.batch,
            "block": self.block,
            "needs": self.needs,
            "epochs": self.settings["epochs"],
            "config": self.settings["config"],
            "settings": self.settings,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cell:
        """Inverse of ``to_json``.

        Raises:
            CellError: the content is incomplete or does not match its id.
        """
        try:
            cell = cls(
                arm=data["arm"],
                model=data["model"],
                dataset=data["dataset"],
                seed=data["seed"],
                batch=data["batch"],
                settings=data["settings"],
                needs=data["needs"],
            )
        except (KeyError, TypeError) as error:
            raise CellError(f"not a cell ({error!r}): delete its folder, and it is made anew") from error
        if cell.id != data["id"]:
            raise CellError(
                f"cell {data['id']} holds the content of {cell.id}: it was edited; delete its folder, and it is made anew"
            )
        return cell


def expand(grid: Grid) -> list[Cell]:
    """Cells of ``grid``, block by block; within a block in an order drawn from the seed. No id twice.

    A ``replay`` cell replays the seed before its own in the grid's list (the first one the second), so that nobody replays
    themselves; where there is one seed only, the cell of seed + 1 is added at the end.
    """
    cells: dict[str, Cell] = {}
    donors: dict[str, Cell] = {}
    for model in grid.models:
        for dataset in grid.datasets:
            for seed in (*grid.seeds, *grid.more_seeds):
                more = seed in grid.more_seeds
                arms = [arm for arm in grid.arms_for(model) if not more or arm in grid.primary]
                random.Random(f"{grid.name}/{model}/{dataset}/{seed}").shuffle(arms)
                for arm in arms:
                    donor = None
                    if parse_arm(arm)[0].kind == "replay":
                        donor = _donor(grid, arm, model, dataset, seed)
                        donors[donor.id] = donor
                    cell = _cell(grid, arm, model, dataset, seed, needs=donor)
                    cells[cell.id] = cell
    return list((cells | {key: donor for key, donor in donors.items() if key not in cells}).values())


def _donor(grid: Grid, arm: str, model: str, dataset: str, seed: int) -> Cell:
    at = arm.partition("@")[2]
    adaptive = f"tri-accel@{at}" if at else "tri-accel"
    seeds = list(grid.seeds)
    if adaptive in grid.primary and adaptive in grid.arms_for(model):
        seeds += grid.more_seeds
    if seed in seeds and len(seeds) > 1:
        place = seeds.index(seed)
        other = seeds[place - 1] if place else seeds[1]
    else:
        other = seed + 1
    return _cell(grid, adaptive, model, dataset, other)


def _cell(grid: Grid, arm: str, model: str, dataset: str, seed: int, *, needs: Cell | None = None) -> Cell:
    config = arm_config(arm, grid.config).model_copy(update={"seed": seed})
    settings = {
        "epochs": grid.epochs,
        "train_samples": grid.train_samples,
        "test_samples": grid.test_samples,
        "split": grid.split,
        "evaluate": grid.evaluate,
        "recipe": grid.recipe.model_dump(mode="json"),
        "base_batch": grid.config.batch.initial,
        "compile": grid.compile,
        "deterministic": grid.deterministic,
        "config": config.model_dump(mode="json"),
    }
    return Cell(arm, model, dataset, seed, config.batch.initial, settings, needs.id if needs else None)
