"""SIGINT and SIGTERM end a run in order: running cells checkpoint first. Source: ours."""

from __future__ import annotations

import signal
import threading
from typing import Any

__all__ = ["GRACE", "Interrupt"]

GRACE = 30.0
"""Seconds between asking a cell to stop and killing it."""


class Interrupt:
    """Context manager; ``asked`` becomes true at the first SIGINT or SIGTERM. Outside the main thread it does nothing."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, *_: object) -> None:
        self.asked = True
