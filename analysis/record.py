"""``Record``: one cell, and what a result must say to count as one.

Failed cells are records like any other: failure is a state, kept and counted, never a missing row. A ``done`` record
without a finite accuracy and time is an error, not a number; folders and host names of the machine are left out, so that
records can be committed.
Source: ours (record format of the harness, schema 1).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .logs import EMPTY, Series

__all__ = ["STATES", "Record", "RecordError", "make_record", "plain"]

SCHEMA = 1


STATES = ("done", "oom", "diverged", "unsupported", "error", "timeout", "preempted", "missing")
"""Every state of a cell, in the order of the tables; ``missing`` has no result yet."""


_CELL = {"id": str, "arm": str, "model": str, "dataset": str, "seed": int}


class RecordError(ValueError):
    """A record cannot be read; the message names the file, the line, what is wrong and how to go on."""


@dataclass(frozen=True, slots=True)
class Record:
    """One cell: arm x model x data set x seed.

    Attributes:
        grid: name of the grid that it belongs to (``"quick"``, ``"cpu"``, ``"full"``).
        cell: canonical cell (arm, model, dataset, seed, batch, epochs, block, config).
        state: one of ``STATES``.
        reason: why a failed cell failed, or ``None``.
        metrics: accuracy as a fraction in [0, 1], seconds, bytes, counts; empty unless measured.
        report: the controller's own report (shares of decisions, probes, seconds).
        provenance: code, packages and hardware.
        shared_machine: others ran beside it, so its times are refused in comparisons.
        series: the log, thinned (see ``analysis.logs``).
        spec: the grid's specification, as far as the analysis reads it.
    """

    grid: str
    cell: Mapping[str, Any]
    state: str
    reason: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    shared_machine: bool = False
    series: Series = EMPTY
    spec: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Content hash of the cell."""
        return str(self.cell["id"])

    @property
    def arm(self) -> str:
        """Name of the arm, with ``@batch`` if the grid wrote one."""
        return str(self.cell["arm"])

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.cell["model"])

    @property
    def dataset(self) -> str:
        """Name of the data set."""
        return str(self.cell["dataset"])

    @property
    def seed(self) -> int:
        """Seed of weights and data order."""
        return int(self.cell["seed"])

    @property
    def epochs(self) -> float:
        """Passes over the training set."""
        return self.cell.get("epochs") or 0

    @property
    def block(self) -> str:
        """Block in which ratios may be taken: all arms of one model and seed on one host."""
        return str(self.cell.get("block", ""))

    @property
    def engine(self) -> bool:
        """Whether gradient release, the fused update or BF16 momentum were on."""
        engine = self.config.get("engine", self.cell.get("engine"))
        return any(engine.values()) if isinstance(engine, Mapping) else bool(engine)

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the method that this cell ran."""
        return self.cell.get("config") or {}

    @property
    def done(self) -> bool:
        """Whether it finished with a result."""
        return self.state == "done"

    @property
    def on_cuda(self) -> bool:
        """Whether it trained on a CUDA device."""
        device = str(self.provenance.get("device") or self.cell.get("device") or "")
        if device and device != "auto":
            return device.startswith("cuda")
        if self.metrics.get("peak_cuda_reserved_bytes") is not None:
            return True
        return bool(self.provenance.get("gpu")) and self.metrics.get("peak_live_tensor_bytes") is None

    @property
    def accuracy(self) -> float | None:
        """Final accuracy of a finished cell, a fraction: of the test split, or of the validation split in a search."""
        test = self.metric("test_accuracy")
        return self.metric("validation_accuracy") if test is None else test

    @property
    def logged_seconds_lack(self) -> float:
        """Seconds of calibration that are in the training time of the result but came before the clock of the log."""
        logged = self.series.steps.get("train_seconds") or self.series.evals.get("train_seconds") or [None]
        total, last = self.metric("train_seconds"), logged[-1]
        if total is None or last is None:
            return 0.0
        return min(max(0.0, total - last), self.metric("calibration_seconds") or 0.0)

    def metric(self, name: str) -> float | None:
        """A finite metric of a finished cell, or ``None``."""
        value = self.metrics.get(name)
        return float(value) if self.done and value is not None else None


def make_record(
    data: Mapping[str, Any], *, grid: str, spec: Mapping[str, Any], series: Series, source: str
) -> Record:
    """Validated record of the content of a ``result.json``.

    Args:
        data: the JSON object.
        grid: name of the grid.
        spec: specification of the grid.
        series: the thinned log.
        source: file (and line) for error messages.

    Raises:
        RecordError: a field is missing or has a value that no finished cell can have.
    """
    where = source if source.rsplit(":", 1)[-1].isdigit() else f"{source}:1"

    def bad(what: str) -> RecordError:
        return RecordError(f"{where}: {what}; remove the file and run the cell again")

    cell = data.get("cell")
    if not isinstance(cell, Mapping):
        raise bad("no object 'cell'")
    if cell.get("schema", SCHEMA) != SCHEMA or data.get("schema", SCHEMA) != SCHEMA:
        raise bad(f"schema {data.get('schema', cell.get('schema'))!r} where this version reads {SCHEMA}")
    for name, kind in _CELL.items():
        if not isinstance(cell.get(name), kind):
            raise bad(f"cell.{name} is {cell.get(name)!r}, not {kind.__name__}")
    state = data.get("state")
    if state not in STATES:
        raise bad(f"state {state!r} is none of {', '.join(STATES)}")
    metrics = data.get("metrics") or {}
    for name, value in metrics.items():
        if value is not None and not isinstance(value, int | float | str | bool | list | dict):
            raise bad(f"metrics.{name} is {value!r}, not a number")
    if state == "done":
        split = "test_accuracy" if metrics.get("test_accuracy") is not None else "validation_accuracy"
        for name in (split, "train_seconds"):
            value = metrics.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise bad(f"state done, but metrics.{name} is {value!r}")
        if not 0 <= metrics[split] <= 1:
            raise bad(f"metrics.{split} is {metrics[split]}, not a fraction in [0, 1]")
        if metrics["train_seconds"] <= 0:
            raise bad(f"metrics.train_seconds is {metrics['train_seconds']}, not positive")
    reason = data.get("reason")
    return Record(
        grid=grid,
        cell=_slim(plain(cell)),
        state=str(state),
        reason=str(reason) if reason else None,
        metrics={name: _finite(value) for name, value in metrics.items()},
        report=plain(data.get("report") or {}),
        provenance=_provenance(data.get("provenance") or {}),
        shared_machine=bool(data.get("shared_machine")),
        series=series,
        spec=spec,
    )


def _finite(value: Any) -> Any:
    """The value, or ``None`` for a number that is not finite (in the harness's JSON: ``{"nonfinite": "nan"}``)."""
    if isinstance(value, Mapping) and value.keys() == {"nonfinite"}:
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(value: Any) -> Any:
    """The value without folders of the machine that it ran on: ``/a/b/c`` becomes ``c``, ``folder:/a/b/c`` ``folder:c``."""
    if isinstance(value, Mapping):
        if value.keys() == {"nonfinite"}:
            return None
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str):
        scheme, colon, path = value.rpartition(":")
        if path.startswith(("/", "~")) and " " not in path:
            return scheme + colon + (path.rstrip("/").rsplit("/", 1)[-1] or "root")
    return value


def _slim(cell: dict[str, Any]) -> dict[str, Any]:
    """The cell without the second copy of its configuration."""
    settings = cell.get("settings")
    if isinstance(settings, dict) and "config" in settings and "config" in cell:
        cell["settings"] = {key: value for key, value in settings.items() if key != "config"}
    return cell


def _provenance(value: Mapping[str, Any]) -> dict[str, Any]:
    seen = dict(plain(value))
    for key in ("host", "hostname"):
        if seen.get(key):
            name = str(seen.pop(key))
            digest = (
                name.removeprefix("host-")
                if name.startswith("host-")
                else hashlib.sha256(name.encode()).hexdigest()[:8]
            )
            seen["host"] = f"host-{digest}"
    return seen
