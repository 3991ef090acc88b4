"""Search spaces: which fields of the configuration a search varies, and how. TOML files; the built-in ones are in ``spaces/``.

A dimension is drawn from an interval, or as a factor on another field (``times``), so that ordered thresholds stay ordered and
no trial is lost to a configuration that validation refuses. The defaults map into the space, so they can be the first
trial. Source: ours.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from triaccel.config import TriAccelConfig
from triaccel.types import TriAccelError

__all__ = ["SPACES", "Dimension", "Space", "SpaceError", "load_space"]

_HERE = Path(__file__).parent / "spaces"
SPACES = tuple(sorted(path.stem for path in _HERE.glob("*.toml")))


class SpaceError(TriAccelError):
    """A search space is wrong; the message names file and field."""


class Dimension(BaseModel):
    """One field: ``low`` to ``high``, both reached."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: float
    high: float
    log: bool = False
    step: Annotated[int, Field(ge=1)] | None = None
    times: str | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high or (self.log and self.low <= 0):
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}, and positive with log")
        if self.step and (self.log or self.low % 1 or self.high % 1):
            raise ValueError("step is for integers without log")
        return self


class Space:
    """Dimensions by field, those that others refer to first."""

    def __init__(self, dimensions: Mapping[str, Dimension]) -> None:
        self.dimensions = dict(dimensions)

    def __len__(self) -> int:
        return len(self.dimensions)

    def draw(self, trial: Any) -> dict[str, float | int]:
        """Values by field, asked of an Optuna ``trial`` (anything with ``suggest_float`` and ``suggest_int``)."""
        values: dict[str, float | int] = {}
        for name, dimension in self.dimensions.items():
            if dimension.step is not None:
                drawn: float | int = trial.suggest_int(
                    name, int(dimension.low), int(dimension.high), step=dimension.step
                )
            else:
                drawn = trial.suggest_float(name, dimension.low, dimension.high, log=dimension.log)
            if dimension.times is not None:
                drawn = values[dimension.times] * drawn
            values[name] = drawn
        return values

    def values_of(self, config: TriAccelConfig) -> dict[str, float | int]:
        """Values of the fields in ``config``, inside the space or not."""
        return {name: _field(config, name) for name in self.dimensions}

    def defaults(self, config: TriAccelConfig) -> dict[str, float | int]:
        """What ``draw`` must be given to reproduce ``config``, moved to the nearest value inside the space."""
        found: dict[str, float | int] = {}
        for name, dimension in self.dimensions.items():
            value = _field(config, name)
            if dimension.times is not None:
                value /= _field(config, dimension.times)
            value = min(max(value, dimension.low), dimension.high)
            if dimension.step is not None:
                value = int(dimension.low + round((value - dimension.low) / dimension.step) * dimension.step)
            found[name] = value
        return found


def _field(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config


def load_space(name: str) -> Space:
    """The space called ``name``: ``auto``, ``paper``, or a TOML file.

    Raises:
        SpaceError: no such space; a field is unknown or not a number; a reference does not come before; names file and field.
    """
    path = _HERE / f"{name}.toml" if name in SPACES else Path(name)
    if not path.is_file():
        raise SpaceError(
            f"no search space {name!r}: the built-in ones are {', '.join(SPACES)}; anything else is a TOML file"
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        dimensions = TypeAdapter(dict[str, Dimension]).validate_python(data)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpaceError(f"{path}: not TOML ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpaceError(f"{path}: {where}: {first['msg']}") from error
    if not dimensions:
        raise SpaceError(f"{path}: no field to vary")
    default, seen = TriAccelConfig(), set()
    for field, dimension in dimensions.items():
        try:
            value = _field(default, field)
        except AttributeError as error:
            raise SpaceError(
                f"{path}: {field!r} is no field of the configuration (component.field)"
            ) from error
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpaceError(f"{path}: {field!r} is not a number with a default; name it with --set instead")
        if dimension.times is not None and dimension.times not in seen:
            raise SpaceError(f"{path}: {field!r} refers to {dimension.times!r}, which must stand before it")
        seen.add(field)
    return Space(dimensions)
