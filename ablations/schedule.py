"""Which cell comes next. Needs no torch.

Several runners may share one folder: each takes the first cell that is not finished, that nobody alive has claimed, and whose
need (the run that a ``replay`` replays) is done. A cell is tried once per call, and again after an infrastructure failure.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .cells import Cell
from .folder import RunFolder

__all__ = ["Queue", "in_shard"]

RETRIES = 2
"""Times that a cell whose process died is tried again in one call."""


def in_shard(cells: Sequence[Cell], shard: str) -> list[Cell]:
    """The cells of shard ``i/n`` (1 ≤ i ≤ n): whole blocks, dealt in turn, so that ratios stay on one host.

    Raises:
        ValueError: ``shard`` is not ``i/n``.
    """
    index, slash, count = shard.partition("/")
    if not slash or not index.isdigit() or not count.isdigit() or not 1 <= int(index) <= int(count):
        raise ValueError(f"--shard {shard!r}: write i/n with 1 <= i <= n, for example 1/4")
    blocks = list(dict.fromkeys(cell.block for cell in cells))
    mine = set(blocks[int(index) - 1 :: int(count)])
    return [cell for cell in cells if cell.block in mine]


@dataclass
class Queue:
    """Cells still to run.

    Attributes:
        folder: where they run.
        cells: all of them, in order.
    """

    folder: RunFolder
    cells: Sequence[Cell]
    _pending: list[Cell] = field(init=False)
    _tries: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._pending = [cell for cell in self.cells if not self.folder.finished(cell.id)]
        self._known = {cell.id for cell in self.cells}

    @property
    def remaining(self) -> int:
        """Cells not yet taken by us and not known to be finished."""
        return len(self._pending)

    @property
    def ready(self) -> bool:
        """Whether some cell left could be claimed now."""
        return any(
            not self.folder.claimed(cell.id)
            and (cell.needs is None or self.folder.state(cell.needs) == "done")
            for cell in self._pending
        )

    def take(self) -> Cell | None:
        """Claim the next cell that can run; ``None`` if there is none right now."""
        for cell in list(self._pending):
            if self.folder.finished(cell.id):
                self._pending.remove(cell)
                continue
            if cell.needs is not None and self.folder.state(cell.needs) != "done":
                if not self._may_come(cell.needs):
                    self._give_up(cell)
                continue
            if not self.folder.claim(cell.id):
                continue
            if self.folder.finished(cell.id):  # its former owner ended between the look and the claim
                self.folder.release(cell.id)
                self._pending.remove(cell)
                continue
            self._pending.remove(cell)
            self._tries[cell.id] = self._tries.get(cell.id, 0) + 1
            return cell
        return None

    def again(self, cell: Cell) -> bool:
        """Put back a cell whose process died; ``False`` when it was tried often enough."""
        if self._tries.get(cell.id, 0) > RETRIES:
            return False
        self._pending.append(cell)
        return True

    def _may_come(self, needed: str) -> bool:
        """Whether the needed run can still become ``done`` in this call."""
        if any(cell.id == needed for cell in self._pending) or self.folder.claimed(needed):
            return True
        return needed in self._tries and self.folder.state(needed) is None

    def _give_up(self, cell: Cell) -> None:
        self._pending.remove(cell)
        state = self.folder.state(cell.needs or "")
        where = (
            "is not in this grid or shard"
            if cell.needs not in self._known and state is None
            else f"ended {state!r}"
        )
        if self.folder.claim(cell.id):
            reason = (
                f"replay needs the trace of cell {cell.needs}, which {where}: run that first (arm tri-accel)"
            )
            self.folder.write_result(
                cell, state="error", reason=reason, metrics={}, report={}, provenance={}, shared_machine=False
            )
            self.folder.release(cell.id)
