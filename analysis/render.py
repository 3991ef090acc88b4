"""A table, and its four forms: Markdown, CSV, LaTeX (booktabs) and rich.

A table has columns and sections (one a group of comparable cells). A value is text or a ``Number`` with an optional interval;
people read ``0.81 [0.79, 0.83]``, programs read three columns of the CSV at 10 significant digits. Nothing measured is a dash,
never 0. Forms depend on the values alone: no dates, no widths of a terminal. Source: ours.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = [
    "Column",
    "Number",
    "Section",
    "Table",
    "Value",
    "probability",
    "show",
    "to_csv",
    "to_latex",
    "to_markdown",
    "to_rich",
]


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


def to_markdown(table: Table, *, level: int = 2) -> str:
    """Markdown with a heading, one table a section, and notes."""
    out = [f"{'#' * level} {table.title}", ""]
    for section in table.sections:
        if section.title:
            out += [f"{'#' * (level + 1)} {section.title}", ""]
        out.append("| " + " | ".join(column.title for column in table.columns) + " |")
        out.append("|" + "|".join("---:" if column.number else "---" for column in table.columns) + "|")
        out += ["| " + " | ".join(show(v).replace("|", "\\|") for v in row) + " |" for row in section.rows]
        out.append("")
        out += [f"- {note}" for note in section.notes] + ([""] if section.notes else [])
    out += [f"- {note}" for note in table.notes] + ([""] if table.notes else [])
    return "\n".join(out).rstrip("\n") + "\n"


def to_csv(table: Table) -> str:
    """CSV with the section's fields in front and three columns for each interval."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    fields = list(table.sections[0].fields) if table.sections else []
    head = list(fields)
    for column in table.columns:
        head += [column.key, f"{column.key}_low", f"{column.key}_high"] if column.interval else [column.key]
    writer.writerow(head)
    for section in table.sections:
        for row in section.rows:
            line = [section.fields[name] for name in fields]
            for column, value in zip(table.columns, row, strict=True):
                if isinstance(value, str):
                    line += ([""] if column.number else [value]) + (["", ""] if column.interval else [])
                else:
                    ends = (value.value, value.low, value.high) if column.interval else (value.value,)
                    line += ["" if end is None else f"{end:.10g}" for end in ends]
            writer.writerow(line)
    return out.getvalue()


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "×": r"$\times$",
    "−": r"$-$",
    "–": "--",
    "±": r"$\pm$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "²": r"$^2$",
    "³": r"$^3$",
    "Δ": r"$\Delta$",
    "λ": r"$\lambda$",
    "●": r"$\bullet$",
    "†": r"$\dagger$",
    "→": r"$\rightarrow$",
    "…": r"\dots{}",
}


def latex_text(text: str) -> str:
    """Text with LaTeX's special characters escaped; any other character outside ASCII becomes ``?``."""
    return "".join(_LATEX.get(char, char if char.isascii() else "?") for char in text)


def to_latex(table: Table) -> str:
    """A ``table`` environment for the packages booktabs and graphicx; scaled down to the line where it is wide."""
    spec = "".join("r" if column.number else "l" for column in table.columns)
    width = len(table.columns)
    out = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{latex_text(table.title)}}}",
        rf"\label{{tab:{table.name.replace('_', '-')}}}",
        r"\footnotesize",
    ]
    wide = width > 7
    if wide:
        out.append(r"\resizebox{\linewidth}{!}{%")
    out += [rf"\begin{{tabular}}{{@{{}}{spec}@{{}}}}", r"\toprule"]
    out.append(" & ".join(latex_text(column.title) for column in table.columns) + r" \\")
    for section in table.sections:
        out.append(r"\midrule")
        if section.title:
            out.append(rf"\multicolumn{{{width}}}{{@{{}}l}}{{\emph{{{latex_text(section.title)}}}}} \\")
        out += [" & ".join(latex_text(show(value)) for value in row) + r" \\" for row in section.rows]
    out += [r"\bottomrule", r"\end{tabular}" + ("}" if wide else "")]
    notes = list(
        dict.fromkeys([note for section in table.sections for note in section.notes] + list(table.notes))
    )
    if notes:
        out.append(
            r"\par\smallskip\raggedright\scriptsize "
            + " ".join(latex_text(_sentence(note)) for note in notes)
        )
    out.append(r"\end{table}")
    return "\n".join(out) + "\n"


def _sentence(note: str) -> str:
    return note if note.endswith((".", "?", "!")) else note + "."


def to_rich(table: Table) -> list[RichTable]:
    """One rich table a section, for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table as RichTable

    found = []
    for section in table.sections:
        rich = RichTable(
            title=escape(section.title or table.title), box=SIMPLE_HEAD, title_justify="left", pad_edge=False
        )
        for column in table.columns:
            rich.add_column(
                escape(column.title), justify="right" if column.number else "left", overflow="fold"
            )
        for row in section.rows:
            rich.add_row(*(escape(show(value)) for value in row))
        found.append(rich)
    return found
