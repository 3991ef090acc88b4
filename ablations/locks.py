"""Who is alive, and one at a time: advisory file locks that the kernel drops with their process, and names of processes.

A process is named by its host (machine, boot and process namespace) and its start time, so that a recycled process id is not
taken for a living owner. Source: ours.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TextIO

__all__ = ["locked", "me", "started"]


@contextmanager
def locked(path: Path, *, wait: float | None = None) -> Iterator[TextIO]:
    """Hold ``path`` alone; the kernel lets go when the process dies, however it dies.

    Args:
        path: a file, made if missing.
        wait: seconds to wait for it; ``None``: as long as it takes.

    Raises:
        TimeoutError: somebody else still holds it.
    """
    with open(path, "a", encoding="utf-8") as file:
        if wait is None:
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            until = time.monotonic() + wait
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise TimeoutError(f"{path} is held by another process") from None
                    time.sleep(0.05)
        yield file


@cache
def _host() -> str:
    parts = [socket.gethostname()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        try:
            parts.append(read())
        except OSError:
            parts.append("?")  # no /proc: the name alone has to do
    return "|".join(parts)


def started(pid: int) -> str | None:
    """When process ``pid`` started, as the kernel counts; ``None`` where it is dead; ``"?"`` where that cannot be told."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it lives, and is somebody else's
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "?"
    return None if fields[0] in ("Z", "X") else fields[19]


def me() -> dict[str, Any]:
    """This process: host, id and start."""
    pid = os.getpid()
    return {"host": _host(), "pid": pid, "started": started(pid)}
