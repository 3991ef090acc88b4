"""The folder of a run: which cells are there, claimed, done. Needs no torch.

    OUT/grid.json                 the grid
    OUT/cells/<id>/cell.json      what the cell is
    OUT/cells/<id>/claim          who runs it now (atomic; its age is the lease)
    OUT/cells/<id>/result.json    how it ended (written by rename)
    OUT/cells/<id>/log.jsonl trace.jsonl checkpoint*.pt stdout.log
    OUT/calibration/<key>.json    measured once, shared by arms and seeds

A claim is a file made with O_EXCL and touched while its owner lives. One whose owner is dead (same host), or that was not touched
for ``LEASE`` seconds, is stale: it is renamed away by one taker only, and claimed anew. Source: ours.
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

from .grid import Cell, Grid, GridError
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
                raise GridError(
                    f"{self.path} holds the results of another grid ({there.get('grid')!r}, {there.get('hash')}; now {grid.name!r}, "
                    f"{grid.digest}: {_difference(there.get('spec', {}), wanted['spec'])}). Finished cells are kept: choose another --out"
                )
            return
        if self.path.exists() and any(self.path.iterdir()):
            raise GridError(f"{self.path} is not empty and holds no grid.json: choose another --out")
        write_json(record, wanted)

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
            write_json(path, cell.to_json())

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
        """Take the cell unless somebody alive has it."""
        path = self._claim_path(cell_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            # Whole content appears at once: a link to a finished file, which fails if the name is taken.
            draft = path.with_name(f".claim.{uuid.uuid4().hex}")
            draft.write_text(json.dumps({"token": self._token, "host": socket.gethostname(), "pid": os.getpid()}))
            try:
                os.link(draft, path)
                return True
            except FileExistsError:
                if not self._stale(path):
                    return False
                self._evict(path)
            except OSError as error:
                raise RecordError(f"cannot claim {path}: {error.strerror}; check --out") from error
            finally:
                draft.unlink(missing_ok=True)
        return False

    def _stale(self, path: Path) -> bool:
        try:
            age = time.time() - path.stat().st_mtime
            owner = json.loads(path.read_text())
        except FileNotFoundError:
            return True
        except (json.JSONDecodeError, OSError):
            return age > self._lease
        if owner["host"] == socket.gethostname():
            return not _alive(int(owner["pid"]))
        return abs(age) > self._lease

    def _evict(self, path: Path) -> None:
        """Move a stale claim away; of several takers the one whose rename finds it stale still wins."""
        away = path.with_name(f".stale.{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):
            os.rename(path, away)
            if self._stale(away):
                away.unlink(missing_ok=True)
            else:  # somebody claimed it in between: give it back
                with suppress(FileExistsError):
                    os.link(away, path)
                away.unlink(missing_ok=True)

    def holds(self, cell_id: str) -> bool:
        """Whether the claim is ours."""
        try:
            return json.loads(self._claim_path(cell_id).read_text())["token"] == self._token
        except (FileNotFoundError, json.JSONDecodeError, KeyError):
            return False

    def touch(self, cell_id: str) -> None:
        """Renew the lease."""
        with suppress(FileNotFoundError):
            os.utime(self._claim_path(cell_id))

    def release(self, cell_id: str) -> None:
        """Give the cell back."""
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


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # a zombie is dead
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True


def _difference(before: Any, after: Any, path: str = "") -> str:
    """First field in which two grids differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(set(before) | set(after)):
            if before.get(key) != after.get(key):
                return _difference(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
    return f"{path} was {before!r}, is {after!r}"
