"""Runs cells one after another in this process: for tests and for functions that are not training. Source: ours."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..cells import Cell
from ..folder import RunFolder
from ..schedule import Queue

__all__ = ["run_inline"]


def run_inline(
    queue: Queue,
    folder: RunFolder,
    work: Callable[[Cell], str],
    *,
    done: Callable[[Cell, str], None] = lambda *_: None,
) -> None:
    """Take cells until none is left; waits for those that other runners have.

    Args:
        queue: cells.
        folder: their folder.
        work: runs a claimed cell, writes its result, and returns its state.
        done: called with each cell and its state.
    """
    while True:
        cell = queue.take()
        if cell is not None:
            try:
                state = work(cell)
            finally:
                folder.release(cell.id)
            done(cell, state)
        elif queue.remaining == 0 or not (queue.ready or any(True for _ in folder.claims())):
            return
        else:
            time.sleep(0.05)
