"""Runs each cell in a process of its own on this machine: isolated memory, isolated timings, a crash that stays a cell's. Source: ours.

Processes are forked from a server that has imported torch and nothing more, so a cell starts in milliseconds. A cell dies with its runner
(parent-death signal on Linux, and a look at the parent otherwise), so a killed runner leaves no orphan that another would repeat.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

from ..cell import Options, run_cell
from ..folder import RunFolder
from ..grid import Cell
from ..schedule import Queue

__all__ = ["run_local"]

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL for a cell that must end."""


@dataclass
class _Slot:
    cell: Cell
    process: Any
    began: float
    device: str
    ended: float | None = None


def run_local(
    queue: Queue,
    folder: RunFolder,
    options: Options,
    *,
    workers: int = 1,
    devices: Sequence[str] = (),
    fail_fast: bool = False,
    started: Callable[[Cell], None],
    done: Callable[[Cell, str, str | None], None],
    tick: Callable[[], None] = lambda: None,
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

    Returns:
        Whether the queue was run to its end (``False``: interrupted, or stopped by ``fail_fast``).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ablations.executors.preload"])
    own = list(devices) or [options.device]
    if workers > 1:
        threads = options.threads or max(1, (os.cpu_count() or 1) // workers)
        options = replace(options, threads=threads, shared_machine=True)
    slots: list[_Slot] = []
    stop = _Interrupt()
    failed = False
    with stop:
        while True:
            closing = stop.asked or failed
            while not closing and len(slots) < workers:
                cell = queue.take()
                if cell is None:
                    break
                device = next((d for d in own if all(s.device != d for s in slots)), own[len(slots) % len(own)])
                slots.append(_start(context, folder, cell, replace(options, device=device), device))
                started(cell)
            if closing:
                _end(slots)
            if not slots:
                if closing or queue.remaining == 0:
                    return not closing
                time.sleep(0.2)  # another runner has what is left, or what it needs
                tick()
                if not _others_work(folder, queue):
                    if (cell := queue.take()) is None:
                        return True
                    slots.append(_start(context, folder, cell, options, own[0]))
                    started(cell)
                continue
            connection.wait([slot.process.sentinel for slot in slots], timeout=0.25)
            for slot in list(slots):
                folder.touch(slot.cell.id)
                if options.timeout is not None and time.monotonic() - slot.began > options.timeout + GRACE:
                    _end([slot])
                if slot.process.is_alive():
                    continue
                slot.process.join()
                slots.remove(slot)
                failed |= _conclude(queue, folder, slot, done, stopping=stop.asked) and fail_fast
            tick()


class _Interrupt:
    """SIGINT and SIGTERM end the run in order: cells checkpoint first."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, *_: object) -> None:
        self.asked = True


def _start(context: Any, folder: RunFolder, cell: Cell, options: Options, device: str) -> _Slot:
    process = context.Process(target=_child, args=(str(folder.path), cell.id, options, os.getpid()), daemon=True)
    process.start()
    return _Slot(cell, process, time.monotonic(), device)


def _end(slots: Sequence[_Slot]) -> None:
    now = time.monotonic()
    for slot in slots:
        if slot.ended is None:
            slot.ended = now
            slot.process.terminate()
        elif now - slot.ended > GRACE:
            slot.process.kill()


def _others_work(folder: RunFolder, queue: Queue) -> bool:
    del queue
    return any(True for _ in folder.claims())


def _conclude(
    queue: Queue,
    folder: RunFolder,
    slot: _Slot,
    done: Callable[[Cell, str, str | None], None],
    *,
    stopping: bool,
) -> bool:
    """Record how a process ended; returns whether it failed."""
    cell, code = slot.cell, slot.process.exitcode
    result = folder.result(cell.id)
    fresh = result is not None and code == 0
    if fresh and result is not None:
        state, reason = str(result["state"]), result["reason"]
        folder.release(cell.id)
        done(cell, state, reason)
        return state in ("error", "timeout")
    folder.release(cell.id)
    if stopping:
        done(cell, "preempted", "stopped before its first checkpoint")
        return False
    died = f"its process died ({_name(code)}); see {folder.cell_folder(cell.id) / 'stdout.log'}"
    if queue.again(cell):
        done(cell, "retry", died)
        return False
    if folder.claim(cell.id):
        folder.write_result(
            cell, state="error", reason=died, metrics={}, report={}, provenance={}, shared_machine=False
        )
        folder.release(cell.id)
    done(cell, "error", died)
    return True


def _name(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name + (", perhaps by the kernel for want of memory" if code == -signal.SIGKILL else "")
    return f"exit code {code}"


def _child(out: str, cell_id: str, options: Options, runner: int) -> None:
    _die_with(runner)
    log = os.open(
        os.path.join(out, "cells", cell_id, "stdout.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    run_cell(out, cell_id, options)


def _die_with(runner: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while True:
            try:
                os.kill(runner, 0)
            except OSError:
                os._exit(1)
            time.sleep(0.5)

    threading.Thread(target=watch, daemon=True).start()
