"""Checkpoints of a cell: the two newest, each whole or not at all, with its own checksum in its name.

``checkpoint-NNNNNN-<sha>.pt``. One that is damaged, torn, of another cell or of other sources is passed over for the one before,
and that is said. They load with ``weights_only=True``: nothing in a file is ever executed. Source: ours.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from .cells import Cell
from .record import RecordError

__all__ = ["load_checkpoint", "save_checkpoint"]

KEPT = 2


def _newest_first(home: Path) -> list[Path]:
    return sorted(home.glob("checkpoint-*.pt"), reverse=True)


def save_checkpoint(home: Path, state: dict[str, Any]) -> Path:
    """Write ``state`` beside the one before.

    Raises:
        RecordError: the disk is full or read-only; older checkpoints still stand.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    before = _newest_first(home)
    number = int(before[0].name.split("-")[1]) + 1 if before else 0
    path = home / f"checkpoint-{number:06d}-{hashlib.sha256(data).hexdigest()[:16]}.pt"
    partial = home / f".checkpoint.{os.getpid()}"
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RecordError(
            f"cannot write {path}: {error.strerror}; free space, then run again to resume"
        ) from error
    for old in before[KEPT - 1 :]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(home: Path, cell: Cell, *, sources: str | None) -> dict[str, Any] | None:
    """The newest checkpoint that can be gone on from, or ``None``.

    Args:
        home: the cell's folder.
        cell: whose checkpoint it must be.
        sources: hash of the sources it must come from; ``None``: any.
    """
    for path in _newest_first(home):
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest()[:16] != path.stem.split("-")[2]:
                raise ValueError("its content does not match its checksum")
            saved: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
            if saved["cell"] != cell.id:
                raise ValueError(f"it belongs to cell {saved['cell']}")
            if sources is not None and saved["sources"] != sources:
                raise ValueError("other sources wrote it; --allow-mixed-code goes on all the same")
            if (home / "log.jsonl").stat().st_size < saved["log_bytes"]:
                raise ValueError("log.jsonl is shorter than it says")
            return saved
        except (RuntimeError, ValueError, KeyError, IndexError, EOFError, OSError, UnpicklingError) as error:
            print(
                f"{path.name} cannot be used ({error}): falling back to the one before",
                file=sys.stderr,
                flush=True,
            )
    return None
