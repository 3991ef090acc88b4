"""What ran: one ``Record`` a cell, read from a run folder or from a committed compact file.

A run folder has ``grid.json`` and ``cells/<id>/{cell.json,result.json,log.jsonl}``; a compact folder has ``*.jsonl`` or
``*.jsonl.gz`` files with one record a line (``analysis.compact``). Both give equal records, so both draw the same bytes.
Failed cells are records like any other: failure is a state, kept and counted, never a missing row. A cell that has not
run (or has not finished) has the state ``missing``. Cost: one pass over the files, a few kB of memory a record.
Source: ours (record format of the harness, schema 1).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .logs import EMPTY, Series, read_log

__all__ = ["STATES", "Record", "RecordError", "Run", "load", "make_record"]

SCHEMA = 1
STATES = ("done", "oom", "diverged", "unsupported", "error", "timeout", "preempted", "missing")
"""Every state of a cell, in the order of the tables; ``missing`` has no result yet."""

_CELL = {"id": str, "arm": str, "model": str, "dataset": str, "seed": int}
_NEEDED_WHEN_DONE = ("test_accuracy", "train_seconds")


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
        device = str(self.cell.get("device") or self.config.get("device") or "")
        if device and device != "auto":
            return device.startswith("cuda")
        if self.metrics.get("peak_cuda_reserved_bytes") is not None:
            return True
        return bool(self.provenance.get("gpu")) and self.metrics.get("peak_live_tensor_bytes") is None

    def metric(self, name: str) -> float | None:
        """A finite metric of a finished cell, or ``None``."""
        value = self.metrics.get(name)
        return float(value) if self.done and value is not None else None


@dataclass(frozen=True, slots=True)
class Run:
    """Records in a fixed order (grid, model, data set, arm, seed, id), and what was dropped while reading."""

    records: tuple[Record, ...]
    half_written_lines: int = 0


def load(folder: Path) -> Run:
    """Read a run folder or a folder of compact records.

    Args:
        folder: a run folder (with ``grid.json``), a folder with ``*.jsonl`` or ``*.jsonl.gz``, or one such file.

    Raises:
        RecordError: nothing to read there, or a corrupt file (named with its line).
    """
    if not folder.exists():
        raise RecordError(
            f"{folder}: no such folder; run `python -m ablations.run --out {folder}` first, or name another --records"
        )
    if (folder / "grid.json").is_file():
        records, half = _run_folder(folder)
    else:
        from .compact import compact_files, read_compact

        files = compact_files(folder)
        if not files:
            raise RecordError(
                f"{folder}: neither a run folder (no grid.json) nor compact records (no *.jsonl, *.jsonl.gz); name the --out of a run"
            )
        records, half = read_compact(files), 0
    unique: dict[tuple[str, str], Record] = {}
    for record in records:
        known = unique.setdefault((record.grid, record.id), record)
        if known is not record and known != record:
            raise RecordError(
                f"{folder}: two different results for cell {record.id} ({record.arm}, {record.model}, seed {record.seed}); "
                "keep one of them, or run the cell again in a fresh folder"
            )
    ordered = sorted(unique.values(), key=lambda r: (r.grid, r.model, r.dataset, r.arm, r.seed, r.id))
    return Run(tuple(ordered), half)


def _run_folder(folder: Path) -> tuple[list[Record], int]:
    grid = read_json(folder / "grid.json")
    spec = _plain(grid.get("spec") or {})
    records, half = [], 0
    for cell_file in sorted((folder / "cells").glob("*/cell.json")):
        result_file = cell_file.with_name("result.json")
        if result_file.is_file():
            data, source = read_json(result_file), result_file
        else:
            data, source = {"cell": read_json(cell_file), "state": "missing"}, cell_file
        log = cell_file.with_name("log.jsonl")
        series, dropped = read_log(log) if log.is_file() else (EMPTY, 0)
        half += dropped
        records.append(
            make_record(data, grid=str(grid.get("grid")), spec=spec, series=series, source=str(source))
        )
    if not records:
        raise RecordError(
            f"{folder}: no cells in {folder / 'cells'}; run `python -m ablations.run --out {folder}` first"
        )
    return records, half


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RecordError: unreadable, not JSON (with the line), or not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{file}:{error.lineno}: not valid JSON ({error.msg}); remove the file and run the cell again"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(
            f"{file}:1: cannot be read ({error}); remove the file and run the cell again"
        ) from None
    if not isinstance(value, dict):
        raise RecordError(
            f"{file}:1: a {type(value).__name__} where an object was expected; remove the file and run the cell again"
        )
    return value


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
        for name in _NEEDED_WHEN_DONE:
            value = metrics.get(name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise bad(f"state done, but metrics.{name} is {value!r}")
        if not 0 <= metrics["test_accuracy"] <= 1:
            raise bad(f"metrics.test_accuracy is {metrics['test_accuracy']}, not a fraction in [0, 1]")
        if metrics["train_seconds"] <= 0:
            raise bad(f"metrics.train_seconds is {metrics['train_seconds']}, not positive")
    reason = data.get("reason")
    return Record(
        grid=grid,
        cell=_plain(cell),
        state=str(state),
        reason=str(reason) if reason else None,
        metrics={name: _finite(value) for name, value in metrics.items()},
        report=_plain(data.get("report") or {}),
        provenance=_provenance(data.get("provenance") or {}),
        shared_machine=bool(data.get("shared_machine")),
        series=series,
        spec=spec,
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """The value without folders of the machine that it ran on: ``/a/b/c`` becomes ``c``, ``folder:/a/b/c`` ``folder:c``."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        scheme, colon, path = value.rpartition(":")
        if path.startswith(("/", "~")) and " " not in path:
            return scheme + colon + (path.rstrip("/").rsplit("/", 1)[-1] or "root")
    return value


def _provenance(value: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(_plain(value))
    for key in ("host", "hostname"):
        if plain.get(key):
            name = str(plain.pop(key))
            digest = (
                name.removeprefix("host-")
                if name.startswith("host-")
                else hashlib.sha256(name.encode()).hexdigest()[:8]
            )
            plain["host"] = f"host-{digest}"
    return plain
