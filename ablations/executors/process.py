"""One cell in one process, forked from a server that has imported torch and nothing more. Source: ours.

The process dies with its runner, so that a killed runner leaves nobody behind who writes into a folder that another has claimed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..cell import Options, run_cell

__all__ = ["CellProcess", "Work", "death", "run_cell"]

Work = Callable[[str, str, Options], object]
"""What a cell's process runs: (folder, cell id, options); a function at the top level of a module."""


class CellProcess:
    """A running cell.

    Args:
        out: the run's folder.
        cell_id: the cell, declared and claimed.
        options: how it runs.
        work: what runs there.
    """

    def __init__(
        self,
        out: Path,
        cell_id: str,
        options: Options,
        *,
        work: Work = run_cell,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ablations.executors.preload"])
        self._process: Any = context.Process(
            target=_child, args=(str(out), cell_id, options, os.getpid(), work), daemon=True
        )
        self.began = time.monotonic()
        self.ended: float | None = None
        self._process.start()

    @property
    def sentinel(self) -> int:
        """To wait on with ``multiprocessing.connection.wait``."""
        return int(self._process.sentinel)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return bool(self._process.is_alive())

    @property
    def exit_code(self) -> int | None:
        """As ``multiprocessing.Process.exitcode``."""
        code: int | None = self._process.exitcode
        return code

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._process.join(timeout)

    def stop(self, *, grace: float) -> None:
        """Ask it to checkpoint and end; kill it at a call more than ``grace`` seconds after the first."""
        now = time.monotonic()
        if self.ended is None:
            self.ended = now
            self._process.terminate()
        elif now - self.ended > grace:
            self._process.kill()


def death(code: int | None) -> str:
    """What an exit code means, for a person."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return name + (", perhaps by the kernel for want of memory" if code == -signal.SIGKILL else "")
    return f"exit code {code}"


def _child(out: str, cell_id: str, options: Options, runner: int, work: Work) -> None:
    _die_with(runner)
    log = os.open(
        os.path.join(out, "cells", cell_id, "stdout.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    work(out, cell_id, options)


def _die_with(runner: int) -> None:
    """End at once when the runner is gone; by the kernel too, should the fork server go first."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while True:
            try:
                os.kill(runner, 0)
            except OSError:
                os._exit(1)
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()
