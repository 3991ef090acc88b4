"""The clock of a cell: training time alone, evaluation and checkpoints outside, synchronised with the device. Source: ours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Stopwatch"]


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
