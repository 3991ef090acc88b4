"""Runs cells one after another in this process: for tests and for functions that are not training."""

from __future__ import annotations

from collections.abc import Callable

from ..folder import RunFolder
from ..grid import Cell
from ..schedule import Queue

__all__ = ["run_inline"]


def run_inline(queue: Queue, folder: RunFolder, work: Callable[[Cell], str], *, done: Callable[[Cell, str], None]) -> None:
    """Take cells from ``queue`` until none can run.

    Args:
        queue: cells.
        folder: their folder.
        work: runs a claimed cell, writes its result, and returns its state.
        done: called with each cell and its state.
    """
    while (cell := queue.take()) is not None:
        try:
            state = work(cell)
        finally:
            folder.release(cell.id)
        done(cell, state)
