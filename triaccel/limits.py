"""What the machine lets this process use: system memory, control groups, the address-space limit. ``None`` is "no such limit".

Control groups: the tightest ``memory.max`` (v2) or ``memory.limit_in_bytes`` (v1) from the process's own group up to the root
of what is mounted, with the working set (usage less inactive file pages) at that level, other processes of the group
included. A kill by the control group cannot be caught. Cost: a few small reads under ``/proc`` and ``/sys``. Source: ours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import psutil  # type: ignore[import-untyped]

__all__ = [
    "Limit",
    "address_space",
    "cgroup",
    "headroom_bytes",
    "resident_set_bytes",
    "system_memory",
]

_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit and what counts against it now, both in bytes."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """Bytes left, at least 0."""
        return max(0, self.limit_bytes - self.used_bytes)


def resident_set_bytes() -> int:
    """RSS of this process, bytes."""
    return int(psutil.Process().memory_info().rss)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return cast("Callable[[int], int]", ctypes.CDLL(None).malloc_trim)
    except (AttributeError, OSError, TypeError):  # not glibc
        return None


def trim_heap() -> None:
    """Give freed pages that the C heap keeps back to the system: they count against every limit. About 10 ms; glibc only."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def system_memory() -> Limit:
    """The machine's memory; what counts as used is what could not be had without swapping."""
    memory = psutil.virtual_memory()
    return Limit(int(memory.total), int(memory.total - memory.available))


def address_space() -> Limit | None:
    """``RLIMIT_AS`` and the process's mapped address space; ``None`` where there is no limit or no such call."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or soft >= _UNLIMITED:
        return None
    return Limit(int(soft), int(psutil.Process().memory_info().vms))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split()[:2] for line in lines if len(line.split()) >= 2)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def cgroup(*, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Limit | None:
    """The tightest memory limit of the control groups that hold this process, with the working set at its level."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    tightest: Limit | None = None
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, limit_name, usage_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        # inside a container the path may be the host's: then only the mounted root exists
        for level in [group, *group.parents]:
            limit, usage = _number(level / limit_name), _number(level / usage_name)
            if limit is not None and limit < _UNLIMITED and usage is not None:
                found = Limit(limit, max(0, usage - _inactive_file(level / "memory.stat")))
                if tightest is None or found.free_bytes < tightest.free_bytes:
                    tightest = found
            if level == base:
                break
    return tightest


def headroom_bytes() -> int | None:
    """Bytes that this process could still take under the tightest limit; ``None`` where nothing is known."""
    limits = [system_memory(), cgroup(), address_space()]
    return min((limit.free_bytes for limit in limits if limit is not None), default=None)
