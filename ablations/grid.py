"""Grids: what runs. A grid expands to cells; a cell's id is the hash of all that decides its result. Needs no torch.

A cell is arm × model × data set × seed. A block is all arms of one model, data set and seed: ratios are taken within it, and
its arms run in an order drawn from the seed. Grids are built in, or TOML files of the same fields. Source: ours.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from baselines.arms import UnknownArm, parse_arm
from triaccel.config import TriAccelConfig
from triaccel.types import TriAccelError

from .cells import Cell, digest, expand

__all__ = [
    "BUILT_IN",
    "Cell",
    "Grid",
    "GridError",
    "Recipe",
    "expand",
    "load_grid",
    "override",
    "read_config",
]

_HERE = Path(__file__).parent / "grids"
BUILT_IN: tuple[str, ...] = tuple(sorted(path.stem for path in _HERE.glob("*.toml")))
"""Names of the grids that come with the package: ``ablations/grids/*.toml``."""

Seeds = tuple[int, ...]


_LISTS = ("models", "datasets", "arms", "arms_of_model", "seeds", "primary", "more_seeds", "best_static")
"""Fields that say which cells there are, not what a cell is."""


class GridError(TriAccelError):
    """A grid, or an option that changes it, is wrong; the message names file and key."""


class Recipe(BaseModel):
    """How every arm trains: tuned for FP32 and the same for all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: Literal["sgd"] = "sgd"
    rate_per_256: Annotated[float, Field(gt=0)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    batch_rule: Literal["linear", "sqrt"] = "sqrt"
    """How a static arm's rate follows ``@batch``, from the grid's own batch."""
    augment: bool = True


class Grid(BaseModel):
    """All that a run of the harness needs to know.

    ``arms`` run with ``seeds``; those in ``primary`` also with ``more_seeds``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = "grid"
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    datasets: Annotated[tuple[str, ...], Field(min_length=1)]
    arms: Annotated[tuple[str, ...], Field(min_length=1)]
    arms_of_model: dict[str, tuple[str, ...]] = {}
    """Other arms for single models."""
    seeds: Annotated[Seeds, Field(min_length=1)] = (0,)
    primary: tuple[str, ...] = ()
    more_seeds: Seeds = ()
    epochs: Annotated[int, Field(ge=1)] = 1
    train_samples: Annotated[int, Field(ge=2)] | None = None
    """A fixed subset of the training images, the same for every seed; ``None``: all."""
    test_samples: Annotated[int, Field(ge=1)] | None = None
    split: Literal["test", "validation"] = "test"
    """``validation`` holds out a tenth of the training images and never looks at the test set."""
    evaluate: Literal["epoch", "final"] = "epoch"
    recipe: Recipe = Recipe()
    config: TriAccelConfig = TriAccelConfig()
    compile: bool = False
    """``torch.compile`` for every arm alike."""
    deterministic: bool = False
    """Deterministic algorithms on CUDA, for every arm alike; a CPU is deterministic anyway."""
    best_static: dict[str, str] = {}
    """Best static arm of each model, chosen on other seeds (``ablations.select``)."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        for arm in (*self.arms, *self.primary, *(a for arms in self.arms_of_model.values() for a in arms)):
            try:
                parse_arm(arm)
            except UnknownArm as error:
                raise ValueError(str(error)) from error
        if any(seed < 0 for seed in (*self.seeds, *self.more_seeds)):
            raise ValueError("seeds are integers >= 0")
        if len(set(self.seeds)) != len(self.seeds) or set(self.seeds) & set(self.more_seeds):
            raise ValueError("a seed is listed twice")
        if unknown := set(self.arms_of_model) - set(self.models):
            raise ValueError(f"arms_of_model names {sorted(unknown)}, which are not in models")
        return self

    @property
    def digest(self) -> str:
        """First 16 hex digits of the hash of what all cells share; a folder may gain arms, models, data sets and seeds only."""
        return digest(self.model_dump(mode="json", exclude=set(_LISTS)), 16)

    def arms_for(self, model: str) -> tuple[str, ...]:
        """Arms that run on ``model``, in the grid's order."""
        return self.arms_of_model.get(model, self.arms)


def load_grid(name: str, *, sets: Sequence[str] = (), changes: dict[str, Any] | None = None) -> Grid:
    """The grid called ``name``, with overrides.

    Args:
        name: a built-in grid, or the path of a TOML file with the fields of ``Grid``.
        sets: ``component.field=value`` strings for the configuration, values in TOML.
        changes: fields of ``Grid`` to replace (``None`` values are left out).

    Raises:
        GridError: no such grid, or a field is wrong; names the file and the key.
    """
    if name in BUILT_IN:
        data, source = _read_toml(_HERE / f"{name}.toml")
    else:
        data, source = _read_toml(Path(name))
    data = {**data, **{k: v for k, v in (changes or {}).items() if v is not None}}
    data = override(data, sets)
    if changes and (changes.get("arms") or changes.get("models")):
        models = data.get("models", [])
        kept = {} if changes.get("arms") else data.get("arms_of_model", {})
        data["arms_of_model"] = {m: a for m, a in kept.items() if m in models}
    try:
        return Grid.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'grid'}: {item['msg']}"
            for item in error.errors()
        )
        raise GridError(f"{source}: {problems}") from error


def read_config(path: Path, *, base: str) -> dict[str, Any]:
    """Configuration fields of a TOML file laid over those of grid ``base``.

    Raises:
        GridError: the file is missing or is not TOML.
    """
    if not path.is_file():
        raise GridError(f"no configuration file {str(path)!r}; ablations.search writes one")
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise GridError(f"{path}: not TOML ({error})") from error
    below = _read_toml(_HERE / f"{base}.toml" if base in BUILT_IN else Path(base))[0]
    return _merged(json.loads(json.dumps(below.get("config", {}))), read.get("config", read))


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merged(below[key], value)
        else:
            below[key] = value
    return below


def _read_toml(path: Path) -> tuple[dict[str, Any], str]:
    if not path.is_file():
        raise GridError(
            f"no grid {str(path)!r}: the built-in grids are {', '.join(BUILT_IN)}; anything else is the path of a TOML file"
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise GridError(f"{path}: not TOML ({error})") from error
    return {"name": path.stem, **data}, str(path)


def override(data: dict[str, Any], sets: Iterable[str]) -> dict[str, Any]:
    """``data`` with ``component.field=value`` strings applied to its ``config``.

    Raises:
        GridError: a string has no ``=``, or its value is not TOML.
    """
    data = json.loads(json.dumps(data))
    for item in sets:
        path, equals, text = item.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise GridError(f"--set {item!r}: write component.field=value, for example batch.initial=128")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            try:
                value = tomllib.loads(f"value = {json.dumps(text)}")["value"]  # a bare word is a string
            except tomllib.TOMLDecodeError as error:
                raise GridError(f"--set {item!r}: the value is not TOML ({error})") from error
        target = data.setdefault("config", {})
        for key in keys[:-1]:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                raise GridError(f"--set {item!r}: {key} is a value, not a component")
        target[keys[-1]] = value
    return data
