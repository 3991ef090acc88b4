"""The folder of a run: which cells are there, claimed, done. Needs no torch.

    OUT/grid.json                 the grid
    OUT/cells/<id>/cell.json      what the cell is
    OUT/cells/<id>/claim          who runs it now (atomic; its age is the lease)
    OUT/cells/<id>/result.json    how it ended (written by rename)
    OUT/cells/<id>/log.jsonl trace.jsonl checkpoint*.pt stdout.log
    OUT/calibration/<key>.json    measured once, shared by arms and seeds

A claim is a file written under the cell's lock and touched while its owner lives. One whose owner is dead (same host), or that
was not touched for ``LEASE`` seconds by the file system's clock (another host), is stale and may be replaced. Source: ours.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .cells import Cell
from .grid import _LISTS, Grid, GridError
from .locks import locked, me, started
from .record import RecordError, read_json, write_json

__all__ = ["FINAL", "LEASE", "RunFolder"]

LEASE = 60.0
"""Seconds after which a claim that nobody touches is stale."""
FINAL = ("done", "oom", "diverged", "unsupported")
"""States that stand: the cell does not run again. ``error``, ``timeout`` and ``preempted`` run again on the next call."""


class RunFolder:
    """Access to one run's folder.

    Args:
        path: OUT.
        lease: seconds after which an untouched claim is stale.
    """

    def __init__(self, path: Path | str, *, lease: float = LEASE) -> None:
        self.path = Path(path)
        self._lease = lease
        self._token = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"

    # ---------------------------------------------------------------- grid

    def open(self, grid: Grid) -> None:
        """Make the folder for ``grid``, or check that it is this grid's.

        Raises:
            GridError: the folder holds another grid, or something that is no run.
            RecordError: it cannot be written.
        """
        record = self.path / "grid.json"
        wanted = {"schema": 1, "grid": grid.name, "spec": grid.model_dump(mode="json"), "hash": grid.digest}
        if record.is_file():
            there = read_json(record)
            if there.get("hash") != grid.digest:
                changed = _difference(there.get("spec", {}), wanted["spec"])
                raise GridError(
                    f"{self.path} holds the results of another grid ({there.get('grid')!r} {there.get('hash')}, now "
                    f"{grid.name!r} {grid.digest}: {changed}). Finished cells are kept: choose another --out"
                )
            self._widen(record, there, wanted)
            return
        if self.path.exists() and any(self.path.iterdir()):
            raise GridError(f"{self.path} is not empty and holds no grid.json: choose another --out")
        write_json(record, wanted)

    def _widen(self, record: Path, there: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Keep in ``grid.json`` every arm, model, data set and seed that was ever asked for."""
        with locked(self.path / ".lock"):
            spec = dict(there["spec"])
            for key, value in wanted["spec"].items():
                if isinstance(value, list):
                    spec[key] = [
                        *spec.get(key, []),
                        *(item for item in value if item not in spec.get(key, [])),
                    ]
                elif isinstance(value, dict) and key in ("arms_of_model", "best_static"):
                    spec[key] = {**spec.get(key, {}), **value}
            spec["more_seeds"] = [seed for seed in spec["more_seeds"] if seed not in spec["seeds"]]
            if spec != there["spec"]:
                write_json(record, {**there, "spec": spec})

    def cell_folder(self, cell_id: str) -> Path:
        """``OUT/cells/<id>``; never outside OUT.

        Raises:
            GridError: ``cell_id`` is no id.
        """
        if not cell_id.isalnum():
            raise GridError(f"{cell_id!r} is not a cell id")
        return self.path / "cells" / cell_id

    def declare(self, cell: Cell) -> None:
        """Write ``cell.json`` unless it is there."""
        path = self.cell_folder(cell.id) / "cell.json"
        if not path.is_file():
            write_json(path, cell.to_json(), durable=False)

    # ---------------------------------------------------------------- results

    def result(self, cell_id: str) -> dict[str, Any] | None:
        """The cell's ``result.json``, or ``None``.

        Raises:
            RecordError: it is corrupt.
        """
        path = self.cell_folder(cell_id) / "result.json"
        return read_json(path) if path.is_file() else None

    def state(self, cell_id: str) -> str | None:
        """State of the cell's result, or ``None``."""
        result = self.result(cell_id)
        return None if result is None else str(result["state"])

    def finished(self, cell_id: str) -> bool:
        """Whether the cell need not run again."""
        return self.state(cell_id) in FINAL

    def write_result(self, cell: Cell, *, state: str, reason: str | None, **parts: Any) -> None:
        """Write ``result.json`` by rename."""
        record = {"schema": 1, "cell": cell.to_json(), "state": state, "reason": reason, **parts}
        write_json(self.cell_folder(cell.id) / "result.json", record)

    # ---------------------------------------------------------------- claims

    def _claim_path(self, cell_id: str) -> Path:
        return self.cell_folder(cell_id) / "claim"

    def claim(self, cell_id: str) -> bool:
        """Take the cell unless somebody alive has it.

        Raises:
            RecordError: the folder cannot be written.
        """
        path = self._claim_path(cell_id)
        try:
            with locked(path.with_name(".lock")) as lock:
                if path.exists() and not self._stale(path, now=_touched(lock)):
                    return False
                draft = path.with_name(f".claim.{uuid.uuid4().hex}")
                draft.write_text(json.dumps({"token": self._token, **me()}), encoding="utf-8")
                os.replace(draft, path)
        except OSError as error:
            raise RecordError(f"cannot claim {path}: {error.strerror}; check --out") from error
        return True

    def _stale(self, path: Path, *, now: float | None = None) -> bool:
        """Whether the owner of a claim is dead: known on its own host, by age elsewhere."""
        try:
            age = (time.time() if now is None else now) - path.stat().st_mtime
            owner = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return True
        except (json.JSONDecodeError, OSError):
            return age > self._lease
        here = me()
        if owner["host"] == here["host"]:
            return started(int(owner["pid"])) != owner["started"]
        return age > self._lease

    def holds(self, cell_id: str) -> bool:
        """Whether the claim is ours."""
        return self.owner(cell_id) == self._token

    def owner(self, cell_id: str) -> str | None:
        """Token of whoever has the cell, alive or not."""
        try:
            return str(json.loads(self._claim_path(cell_id).read_text(encoding="utf-8"))["token"])
        except (FileNotFoundError, json.JSONDecodeError, KeyError):
            return None

    def touch(self, cell_id: str) -> None:
        """Renew the lease."""
        with suppress(FileNotFoundError):
            os.utime(self._claim_path(cell_id))

    def release(self, cell_id: str) -> None:
        """Give the cell back."""
        with suppress(FileNotFoundError), locked(self.cell_folder(cell_id) / ".lock"):
            if self.holds(cell_id):
                self._claim_path(cell_id).unlink(missing_ok=True)

    def claimed(self, cell_id: str) -> bool:
        """Whether somebody alive has the cell."""
        path = self._claim_path(cell_id)
        return path.exists() and not self._stale(path)

    def claims(self) -> Iterator[str]:
        """Ids of the cells that somebody alive has."""
        for path in (self.path / "cells").glob("*/claim"):
            if not self._stale(path):
                yield path.parent.name


def _difference(before: Any, after: Any, path: str = "") -> str:
    """First field in which two grids differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted((set(before) | set(after)) - (set(_LISTS) if not path else set())):
            if before.get(key) != after.get(key):
                return _difference(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
    return f"{path} was {before!r}, is {after!r}"


def _touched(lock: Any) -> float:
    """Now, by the clock of the file system that holds ``lock``."""
    os.utime(lock.name)
    return Path(lock.name).stat().st_mtime
