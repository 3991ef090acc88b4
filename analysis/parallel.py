"""Independent tasks on two cores, where that is safe and worth a process.

A fork shares the records without copying them, but must not happen in a process with threads: so it is done on Linux, with
one thread, a second core and many tasks, and everywhere else the tasks run one after the other with the same results.
Source: ours.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

__all__ = ["WORTH_IT", "in_two"]

WORTH_IT = 8
"""Tasks from which a second process pays."""

T = TypeVar("T")
R = TypeVar("R")


def in_two(work: Callable[[Sequence[T]], list[R]], tasks: Sequence[T]) -> list[R]:
    """``work(tasks)``, half of it in a forked process where possible; the results in any order.

    Args:
        work: of some tasks; its results can be pickled.
        tasks: independent of each other.

    Raises:
        RuntimeError: the second process died; its own error is on stderr.
    """
    if len(tasks) < WORTH_IT or not _may_fork():
        return work(tasks)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(work(tasks[1::2])))
    child.start()
    sender.close()
    mine = work(tasks[::2])
    try:
        theirs = receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(
            f"the second process ended with exit code {child.exitcode}; see its error above"
        ) from None
    child.join()
    return [*mine, *theirs]


def _may_fork() -> bool:
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        return False
    return len(list(Path("/proc/self/task").iterdir())) == 1
