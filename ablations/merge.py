"""Union of run folders: finished cells of one shard copied into another folder of the same grid. Needs no torch."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from .folder import RunFolder
from .grid import GridError
from .record import read_json

__all__ = ["merge"]


def merge(source: Path, into: RunFolder) -> int:
    """Copy the finished cells of ``source`` that ``into`` lacks; each appears whole or not at all.

    Returns:
        How many were copied.

    Raises:
        GridError: ``source`` holds another grid.
        RecordError: ``source`` is no run, or a record is corrupt.
    """
    if read_json(source / "grid.json")["hash"] != read_json(into.path / "grid.json")["hash"]:
        raise GridError(
            f"{source} holds another grid than {into.path}: only shards of one grid can be merged"
        )
    other = RunFolder(source)
    copied = 0
    for home in sorted((source / "cells").glob("*/result.json")):
        cell_id = home.parent.name
        if not other.finished(cell_id) or into.finished(cell_id):
            continue
        target = into.cell_folder(cell_id)
        partial = target.with_name(f".{cell_id}.{uuid.uuid4().hex}")
        shutil.copytree(
            home.parent,
            partial,
            ignore=shutil.ignore_patterns("claim", ".*", "checkpoint*.pt", "progress.json"),
        )
        if target.exists():
            if into.claimed(cell_id):
                shutil.rmtree(partial)
                continue
            shutil.rmtree(target)
        os.replace(partial, target)
        copied += 1
    return copied
