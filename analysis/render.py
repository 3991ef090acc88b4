"""The four forms of a table: Markdown, CSV, LaTeX (booktabs) and rich.

Forms depend on the values alone: no dates, no widths of a terminal (rich apart). The CSV has the section's fields in front,
10 significant digits, and nothing where a number is not measured. Source: ours.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .table import Number, Table, show

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["latex_text", "to_csv", "to_latex", "to_markdown", "to_rich"]


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


def to_rich(table: Table, *, without_interval: Sequence[str] = ()) -> list[RichTable]:
    """One rich table a section, for the terminal; an interval stands under its value.

    Args:
        table: it.
        without_interval: keys of columns that show their value alone.
    """
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
                escape(column.title),
                justify="right" if column.number else "left",
                no_wrap=column.key == "arm" or (column.interval and column.key not in without_interval),
                overflow="fold",
            )
        for row in section.rows:
            shown = []
            for column, value in zip(table.columns, row, strict=True):
                head, bracket, ends = show(value).partition(" [")
                if isinstance(value, Number) and bracket:
                    if column.key in without_interval:
                        head += value.mark
                    else:
                        head += "\n[" + ends.replace(", ", ",")  # no space, so that it is not broken there
                else:
                    head += bracket + ends
                shown.append(escape(head))
            rich.add_row(*shown)
        found.append(rich)
    return found
