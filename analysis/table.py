"""A table as data: columns, sections (one a group of comparable cells) and values with their intervals.

A value is text or a ``Number``; people read ``0.81 [0.79, 0.83]``, programs read three columns of the CSV. Nothing measured is a
dash, never 0. Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Column", "Number", "Section", "Table", "Value", "probability", "show"]


@dataclass(frozen=True, slots=True)
class Number:
    """A number to show.

    Attributes:
        value: ``None`` shows a dash.
        low, high: ends of its interval, or ``None``.
        digits: decimals.
        signed: show ``+``.
        mark: footnote mark behind it.
        least: smaller values are shown as "<least" (p-values).
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    digits: int = 2
    signed: bool = False
    mark: str = ""
    least: float | None = None


Value = Number | str


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        key: name in CSV.
        title: heading with unit.
        number: whether values are numbers (right-aligned).
        interval: whether the CSV has ``key_low`` and ``key_high``.
    """

    key: str
    title: str
    number: bool = True
    interval: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of one group.

    Attributes:
        title: heading.
        fields: constant CSV columns (grid, model, data set, hardware).
        rows: one value a column.
        notes: footnotes.
    """

    title: str
    fields: Mapping[str, str]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        name: file name without suffix.
        title: caption.
        columns, sections: content.
        notes: footnotes of the whole table.
    """

    name: str
    title: str
    columns: Sequence[Column]
    sections: Sequence[Section]
    notes: Sequence[str] = field(default_factory=tuple)

    def select(self, keys: Sequence[str], *, name: str) -> Table:
        """The same table with some of the columns, in the order of ``keys``."""
        index = [next(i for i, column in enumerate(self.columns) if column.key == key) for key in keys]
        sections = [
            Section(s.title, s.fields, [[row[i] for i in index] for row in s.rows], s.notes)
            for s in self.sections
        ]
        return Table(name, self.title, [self.columns[i] for i in index], sections, self.notes)


def probability(p: float | None) -> Number:
    """A p-value."""
    return Number(p, digits=4, least=0.0001)


def _number(value: float, digits: int, signed: bool) -> str:
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    if float(text) == 0:
        text = f"{0:.{digits}f}"
    return text.replace("-", "−")


def show(value: Value) -> str:
    """The form that people read."""
    if isinstance(value, str):
        return value
    if value.value is None:
        return "–"
    if value.least is not None and value.value < value.least:
        return f"<{value.least:g}"
    text = _number(value.value, value.digits, value.signed)
    if value.low is not None and value.high is not None:
        ends = (_number(end, value.digits, value.signed) for end in (value.low, value.high))
        text += " [" + ", ".join(ends) + "]"
    return text + value.mark
