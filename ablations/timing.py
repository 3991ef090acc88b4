"""The clock of a cell: training time alone, evaluation and checkpoints outside, synchronised with the device; and whether others
were at work on the machine meanwhile. Source: ours."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["ForeignLoad", "Stopwatch"]


class Stopwatch:
    """Adds up the time between ``start`` and ``stop``.

    Args:
        device: synchronised at both ends where it is a GPU.
        seconds: what an earlier part of the same run took.
    """

    def __init__(self, device: torch.device, *, seconds: float = 0.0) -> None:
        self._device = device
        self._seconds = seconds
        self._since: float | None = None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def start(self) -> None:
        """Run."""
        self._since = self._now()

    def stop(self) -> None:
        """Hold."""
        if self._since is not None:
            self._seconds += self._now() - self._since
            self._since = None

    @property
    def seconds(self) -> float:
        """Seconds so far; while running, without synchronising."""
        running = time.perf_counter() - self._since if self._since is not None else 0.0
        return self._seconds + running

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold inside."""
        running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if running:
                self.start()


class ForeignLoad:
    """CPU time that other processes took since it was made; ``None`` where the system does not tell.

    They disturb a time when they take more than a quarter of a core and, with us, most of the machine's cores: on a large host a
    neighbour on other cores does not.
    """

    _BUSY = 0.25
    _FULL = 0.85

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self._busy, self._own, self._since = _busy_seconds(), _own_seconds(), time.monotonic()

    def _shares(self) -> tuple[float, float] | None:
        """Cores taken by others and by this process, on average."""
        busy, span = _busy_seconds(), time.monotonic() - self._since
        if busy is None or self._busy is None or span <= 0:
            return None
        own = (_own_seconds() - self._own) / span
        return max(0.0, (busy - self._busy) / span - own), own

    @property
    def cores(self) -> float | None:
        """Cores that others took, on average."""
        shares = self._shares()
        return None if shares is None else round(shares[0], 3)

    @property
    def disturbs(self) -> bool:
        """Whether times of this stretch are to be refused."""
        shares = self._shares()
        return shares is not None and shares[0] > self._BUSY and sum(shares) > self._FULL * self._cores


def _busy_seconds() -> float | None:
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, interrupt, soft, *_ = map(int, fields)
    return (user + nice + system + interrupt + soft) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system
