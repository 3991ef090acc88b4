"""Runs each cell in a process of its own on this machine: memory and times apart, a crash that stays a cell's. Source: ours."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection

from ..cell import Options
from ..cells import Cell
from ..folder import RunFolder
from ..schedule import Queue
from .interrupt import GRACE, Interrupt
from .process import CellProcess, Work, death, run_cell

__all__ = ["run_local"]


@dataclass
class _Slot:
    cell: Cell
    process: CellProcess
    device: str


def run_local(
    queue: Queue,
    folder: RunFolder,
    options: Options,
    *,
    workers: int = 1,
    devices: Sequence[str] = (),
    fail_fast: bool = False,
    started: Callable[[Cell], None] = lambda _: None,
    done: Callable[[Cell, str, str | None], None] = lambda *_: None,
    tick: Callable[[], None] = lambda: None,
    work: Work = run_cell,
) -> bool:
    """Run the queue.

    Args:
        queue: cells.
        folder: their folder.
        options: for every cell; with several workers threads are divided and times flagged as shared.
        workers: cells at the same time.
        devices: devices to deal out to the workers; none: ``options.device`` for all.
        fail_fast: stop at the first ``error`` or ``timeout``.
        started: called with each cell that begins.
        done: called with each cell, its state and its reason.
        tick: called a few times a second.
        work: what a cell's process runs.

    Returns:
        Whether the queue was run to its end (``False``: interrupted, or stopped by ``fail_fast``).
    """
    own = list(devices) or [options.device]
    if workers > 1:
        threads = options.threads or max(1, (os.cpu_count() or 1) // workers)
        options = replace(options, threads=threads, shared_machine=True)
    slots: list[_Slot] = []
    failed = False
    with Interrupt() as stop:
        while True:
            closing = stop.asked or failed
            while not closing and len(slots) < workers and (cell := queue.take()) is not None:
                device = _free(own, slots)
                process = CellProcess(folder.path, cell.id, replace(options, device=device), work=work)
                slots.append(_Slot(cell, process, device))
                started(cell)
            if closing:
                for slot in slots:
                    slot.process.stop(grace=GRACE)
            if not slots:
                if closing or queue.remaining == 0:
                    return not closing
                if not any(True for _ in folder.claims()) and not queue.ready:
                    return True  # what is left needs a cell that will not come
                time.sleep(0.1)  # another runner has what is left, or what it needs
                tick()
                continue
            connection.wait([slot.process.sentinel for slot in slots], timeout=0.25)
            for slot in list(slots):
                folder.touch(slot.cell.id)
                late = (
                    options.timeout is not None
                    and time.monotonic() - slot.process.began > options.timeout + GRACE
                )
                if late:
                    slot.process.stop(grace=GRACE)
                if not slot.process.alive:
                    slot.process.join()
                    slots.remove(slot)
                    failed |= _conclude(queue, folder, slot, done, stopping=stop.asked) and fail_fast
            tick()


def _free(devices: Sequence[str], slots: Sequence[_Slot]) -> str:
    """The device with the fewest cells."""
    return min(devices, key=lambda device: sum(slot.device == device for slot in slots))


def _conclude(
    queue: Queue,
    folder: RunFolder,
    slot: _Slot,
    done: Callable[[Cell, str, str | None], None],
    *,
    stopping: bool,
) -> bool:
    """Record how a process ended; returns whether the cell failed."""
    cell, code = slot.cell, slot.process.exit_code
    result = folder.result(cell.id)
    if result is not None and code == 0:
        folder.release(cell.id)
        done(cell, str(result["state"]), result["reason"])
        return result["state"] in ("error", "timeout")
    if stopping:
        folder.release(cell.id)
        done(cell, "preempted", "stopped before its first checkpoint")
        return False
    died = f"its process died ({death(code)}); see {folder.cell_folder(cell.id) / 'stdout.log'}"
    if queue.again(cell):
        folder.release(cell.id)
        done(cell, "retry", died)
        return False
    folder.write_result(
        cell, state="error", reason=died, metrics={}, report={}, provenance={}, shared_machine=False
    )
    folder.release(cell.id)
    done(cell, "error", died)
    return True
