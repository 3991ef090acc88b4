"""The live table of a run: per arm what is done, running, failed, with accuracy and an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .cells import Cell
from .estimate import estimate_seconds
from .folder import FINAL, RunFolder
from .record import RecordError, read_json

__all__ = ["Progress"]


class Progress:
    """Shows the cells of a run; on a terminal a live table, elsewhere one line per event.

    Args:
        cells: all cells of this call.
        folder: their folder.
        device: for the estimate before the first cell has ended.
        console: where to write.
    """

    def __init__(self, cells: Sequence[Cell], folder: RunFolder, *, device: str, console: Console) -> None:
        self._cells = list(cells)
        self._folder = folder
        self._device = device
        self._console = console
        self._running: dict[str, tuple[Cell, float]] = {}
        self._state: dict[str, str] = {}
        self._took: dict[str, float] = {}
        self._last = 0.0
        for cell in cells:
            result = folder.result(cell.id)
            if result is not None and result["state"] in FINAL:
                self._state[cell.id] = result["state"]
        self._live = Live(console=console, refresh_per_second=2, transient=True, get_renderable=self._render)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            self._live.stop()

    def started(self, cell: Cell) -> None:
        """A cell begins."""
        self._running[cell.id] = (cell, time.monotonic())

    def done(self, cell: Cell, state: str, reason: str | None) -> None:
        """A cell has ended; failures are told at once, with the path of the log."""
        began = self._running.pop(cell.id, (cell, time.monotonic()))[1]
        took = time.monotonic() - began
        if state in FINAL:
            self._took[cell.id] = took
            self._state[cell.id] = state
        text = (
            f"{len(self._state)}/{len(self._cells)}  {cell.arm:22} {cell.model} {cell.dataset} seed {cell.seed}  "
            f"{state:11} {took:6.1f} s"
        )
        if state == "done":
            result = self._folder.result(cell.id)
            metrics = result["metrics"] if result else {}
            accuracy = metrics.get("test_accuracy")
            accuracy = metrics.get("validation_accuracy") if accuracy is None else accuracy
            text += f"  accuracy {accuracy:.2%}" if accuracy is not None else ""
            self._console.print(Text(text), soft_wrap=True)
        else:
            log = self._folder.cell_folder(cell.id) / "stdout.log"
            more = f"\n    {reason}" + (f"\n    log: {log}" if state in ("error", "timeout", "retry") else "")
            self._console.print(Text(text + more, style="" if state in FINAL else "bold red"), soft_wrap=True)

    def tick(self) -> None:
        """Called now and then."""
        if not self._console.is_terminal and self._running and time.monotonic() - self._last > 60.0:
            self._last = time.monotonic()
            names = ", ".join(f"{cell.arm} seed {cell.seed}" for cell, _ in self._running.values())
            self._console.print(Text(f"running: {names}; about {_span(self._left())} left"))

    def _left(self) -> float:
        """Seconds left: estimates, corrected by what cells took against theirs."""
        known = {cell.id: cell for cell in self._cells}
        planned = sum(estimate_seconds(known[i], device=self._device) for i in self._took)
        ratio = sum(self._took.values()) / planned if planned else 1.0
        rest = [cell for cell in self._cells if cell.id not in self._state]
        return ratio * sum(estimate_seconds(cell, device=self._device) for cell in rest)

    def _render(self) -> Any:
        table = Table(title=None, expand=False)
        for name in ("arm", "done", "running", "other", "of"):
            table.add_column(name, justify="left" if name == "arm" else "right")
        for arm in dict.fromkeys(cell.arm for cell in self._cells):
            mine = [cell for cell in self._cells if cell.arm == arm]
            states = [self._state.get(cell.id) for cell in mine]
            table.add_row(
                arm,
                str(states.count("done")),
                str(sum(cell.id in self._running for cell in mine)),
                str(sum(state is not None and state != "done" for state in states)),
                str(len(mine)),
            )
        lines = [self._running_line(cell) for cell, _ in self._running.values()]
        lines.append(f"{len(self._state)} of {len(self._cells)} cells, about {_span(self._left())} left")
        return Group(table, *(Text(line) for line in lines))

    def _running_line(self, cell: Cell) -> str:
        try:
            now = read_json(self._folder.cell_folder(cell.id) / "progress.json")
        except RecordError:
            return f"{cell.arm} {cell.model} seed {cell.seed}: starting"
        return f"{cell.arm} {cell.model} seed {cell.seed}: {now['share']:.0%}, loss {now['loss']:.3f}"


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
