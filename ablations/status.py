"""``python -m ablations.status OUT``: which cells are done, failed, running or missing, by arm. Needs no torch."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from triaccel.types import TriAccelError

from .cells import Cell
from .folder import FINAL, RunFolder
from .grid import Grid, expand
from .record import RecordError, read_json

__all__ = ["CellStatus", "cells_of", "main", "status"]

_COLUMNS = ("done", "running", "missing", "oom", "diverged", "unsupported", "error", "timeout", "preempted")


@dataclass(frozen=True, slots=True)
class CellStatus:
    """How one cell stands.

    Attributes:
        id: cell id.
        arm: arm.
        model: model.
        dataset: data set.
        seed: seed.
        state: ``running``, ``missing``, or the state of its result.
        reason: why it failed, or ``None``.
        log: what it printed, if there is such a file.
        sources: hash of the sources that made the result.
    """

    id: str
    arm: str
    model: str
    dataset: str
    seed: int
    state: str
    reason: str | None = None
    log: str | None = None
    sources: str | None = None


def cells_of(folder: Path) -> list[Cell]:
    """Cells of the grid in ``folder/grid.json``, and what else was declared there, in the grid's order.

    Raises:
        RecordError: there is no grid, or a record is corrupt.
    """
    if not folder.is_dir():
        raise RecordError(f"no folder {folder}: give the --out of a run (runs/quick, for example)")
    grid = Grid.model_validate(read_json(folder / "grid.json")["spec"])
    cells = {cell.id: cell for cell in expand(grid)}
    for path in sorted((folder / "cells").glob("*/cell.json")):
        if path.parent.name not in cells:
            cell = Cell.from_json(read_json(path))
            cells[cell.id] = cell
    return list(cells.values())


def status(folder: Path) -> list[CellStatus]:
    """Every cell of the run in ``folder``.

    Raises:
        RecordError: there is no run, or a record is corrupt.
    """
    run = RunFolder(folder)
    found: list[CellStatus] = []
    for cell in cells_of(folder):
        result: dict[str, Any] | None = run.result(cell.id)
        state, reason, sources = "missing", None, None
        if result is not None:
            state, reason = str(result["state"]), result.get("reason")
            sources = result.get("provenance", {}).get("sources_hash")
        if state not in FINAL and run.claimed(cell.id):
            state, reason = "running", None
        log = run.cell_folder(cell.id) / "stdout.log"
        found.append(
            CellStatus(
                id=cell.id,
                arm=cell.arm,
                model=cell.model,
                dataset=cell.dataset,
                seed=cell.seed,
                state=state,
                reason=reason,
                log=str(log) if log.is_file() and state in ("error", "timeout", "oom", "diverged") else None,
                sources=sources,
            )
        )
    return found


@dataclass
class Arguments:
    """Which cells of a run are done, failed, running or missing, by arm."""

    out: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    json: bool = False
    """Print JSON lines, one per cell, instead of a table."""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 every cell has a result, 1 some have not, 2 bad input."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m ablations.status")
    try:
        found = status(arguments.out)
    except (TriAccelError, RecordError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        for cell in found:
            print(json.dumps(asdict(cell)))
    else:
        _print(found)
    return 0 if all(cell.state in FINAL for cell in found) else 1


def _print(found: list[CellStatus]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    shown = [column for column in _COLUMNS if column == "done" or any(cell.state == column for cell in found)]
    table = Table()
    table.add_column("arm")
    for column in (*shown, "of"):
        table.add_column(column, justify="right")
    for arm in dict.fromkeys(cell.arm for cell in found):
        mine = Counter(cell.state for cell in found if cell.arm == arm)
        table.add_row(arm, *(str(mine[column] or "") for column in shown), str(mine.total()))
    total = Counter(cell.state for cell in found)
    table.add_section()
    table.add_row("all", *(str(total[column] or "") for column in shown), str(total.total()))
    console.print(table)
    for cell in found:
        if cell.state not in ("done", "missing", "running"):
            where = f"; log: {cell.log}" if cell.log else ""
            console.print(
                Text(
                    f"{cell.state}: {cell.id} {cell.arm} {cell.model} {cell.dataset} seed {cell.seed}: {cell.reason}{where}"
                )
            )
    if len(codes := sorted({cell.sources for cell in found if cell.sources})) > 1:
        console.print(Text(f"results of {len(codes)} versions of the code: {', '.join(codes)}"))


if __name__ == "__main__":
    sys.exit(main())
