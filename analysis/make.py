"""Records to tables and figures: ``python -m analysis.make --records runs/quick --out paper_figs/quick``.

Reads a run folder or committed compact records, prints the main table, and writes every table as Markdown, CSV and LaTeX
and every figure as PNG and PDF. The same records give the same bytes. ``--readme README.md`` puts the results between that
file's markers, ``--check`` only compares them and exits 1 if they differ. ``--compact OUT DEST`` writes a run folder's
records in the small form that is committed. Heavy libraries are loaded when needed, so ``--help`` is quick. Source: ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from .groups import Group
    from .records import Run
    from .table import Table

__all__ = ["Options", "all_tables", "main", "run"]


@dataclass(frozen=True)
class Options:
    """Tables and figures from records."""

    records: Path = Path("runs/quick")
    """Run folder, or folder (or file) of compact records."""
    out: Path = Path("paper_figs/quick")
    """Where tables and figures go."""
    readme: Path | None = None
    """Put the results between this file's markers; with --check only compare (default then: README.md)."""
    check: bool = False
    """Exit 0 only if the README's results equal the records; write nothing."""
    formats: tuple[Literal["png", "pdf"], ...] = ("png", "pdf")
    """Formats of the figures; give none (--formats alone) for tables only."""
    compact: tuple[Path, Path] | None = None
    """RUN DEST: write RUN's records in compact form to DEST (a folder, *.jsonl or *.jsonl.gz), and stop."""
    allow_mixed_code: bool = False
    """Compare cells that ran different versions of the training sources, and say so in the tables."""
    margin: float | None = None
    """Non-inferiority margin in accuracy points; default 1.5 for the grids quick, cpu and gpu-check, else 0.5."""
    best_static: tuple[str, ...] = field(default_factory=tuple)
    """MODEL=ARM: the best static setting of a model, where the grid does not name it."""


def main(arguments: Annotated[Sequence[str] | None, "as on the command line"] = None) -> int:
    """Parse the command line and run; the exit status."""
    import tyro

    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the same sums on any machine, and no idle threads
    options = tyro.cli(Options, args=arguments, prog="python -m analysis.make", description=__doc__)
    from .record import RecordError

    try:
        return run(options)
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: Options) -> int:
    """Do what the options say.

    Returns:
        0, or 1 if ``--check`` found a difference.

    Raises:
        RecordError: unreadable records, mixed code, or a README without markers.
    """
    from .groups import make_groups
    from .records import RecordError, load

    if options.margin is not None and not options.margin > 0:
        raise RecordError(f"--margin {options.margin}: a positive number of accuracy points was expected")
    if options.compact is not None:
        from .compact import write_compact

        source, destination = options.compact
        for file in write_compact(load(source), destination):
            print(f"wrote {file}")
        return 0
    records = load(options.records)
    groups = make_groups(
        records.records,
        allow_mixed_code=options.allow_mixed_code,
        best_static=_best_static(options.best_static),
    )
    tables = all_tables(groups, margin=options.margin)
    if options.check:
        return _check(options.readme or Path("README.md"), tables)
    written = _write_tables(tables, options.out)
    if options.formats:
        from .figures import draw_all

        written += draw_all(groups, options.out, formats=options.formats, margin=options.margin)
    _print(tables, records, groups)
    if options.readme is not None:
        from . import readme

        changed = readme.write(options.readme, readme.block(tables["main"], tables["primary"]))
        print(f"{options.readme}: results {'replaced' if changed else 'unchanged'}")
    print(f"wrote {len(written)} files to {options.out}")
    return 0


def _best_static(pairs: Sequence[str]) -> Mapping[str, str]:
    from .record import RecordError

    for pair in pairs:
        if "=" not in pair:
            raise RecordError(
                f"--best-static {pair}: MODEL=ARM was expected, for example resnet18=amp-bf16@256"
            )
    return dict(pair.split("=", 1) for pair in pairs)


def all_tables(groups: Sequence[Group], *, margin: float | None = None) -> dict[str, Table]:
    """Every table, by name, in order.

    Args:
        groups: as ``make_groups`` gives them.
        margin: accuracy points; ``None``: each grid's own.
    """
    from . import table_beside, table_diagnostics, table_tests, tables
    from .compare import Comparer

    comparer = Comparer()
    found = (
        tables.main(groups, comparer, margin=margin),
        table_tests.primary(groups, margin=margin),
        tables.ablation(groups, comparer),
        table_tests.factorial(groups),
        table_tests.comparisons(groups, comparer),
        table_beside.targets(groups, margin=margin),
        table_diagnostics.memory(groups, comparer),
        table_diagnostics.controller(groups),
        table_diagnostics.states(groups),
        table_beside.paper(groups),
    )
    return {table.name: table for table in found}


def _write_tables(tables: Mapping[str, Table], out: Path) -> list[Path]:
    from .render import to_csv, to_latex, to_markdown

    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in tables.items():
        if not table.sections:
            continue
        for suffix, text in (("md", to_markdown(table)), ("csv", to_csv(table)), ("tex", to_latex(table))):
            file = out / f"{name}.{suffix}"
            file.write_text(text, encoding="utf-8")
            written.append(file)
    return written


def _check(readme_file: Path, tables: Mapping[str, Table]) -> int:
    from . import readme

    difference = readme.check(readme_file, readme.block(tables["main"], tables["primary"]))
    if not difference:
        print(f"{readme_file}: equals the records")
        return 0
    print("\n".join(difference))
    print(
        f"error: {readme_file}: its results differ from the records; run again with --readme {readme_file} and without --check",
        file=sys.stderr,
    )
    return 1


def _print(tables: Mapping[str, Table], records: Run, groups: Sequence[Group]) -> None:
    from rich.console import Console

    from .readme import COLUMNS
    from .render import to_rich

    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    shown = [tables["main"].select(COLUMNS, name="main"), tables["primary"]]
    bare: Sequence[str] = ("accuracy", "seconds")
    if console.width < 132:  # fewer columns, without most intervals: the files have them all
        bare = ("arm", "cells", "accuracy", "seconds", "time_ratio", "bytes_ratio")
        narrow = tables["primary"].select(
            ("hypothesis", "pairs", "estimate", "p_holm", "verdict"), name="primary"
        )
        shown = [tables["main"].select(bare, name="main"), narrow]
    for table in shown:
        for one in to_rich(table, without_interval=bare):
            console.print(one)
    for note in dict.fromkeys(note for section in tables["main"].sections for note in section.notes):
        console.print(f"- {note}", highlight=False, markup=False)
    for section in tables["states"].sections:
        for note in section.notes:
            console.print(f"! {note}", highlight=False, markup=False)
    missing = sum(record.state == "missing" for group in groups for record in group.records)
    if missing:
        console.print(f"! {missing} cells have not run yet", highlight=False)
    if records.half_written_lines:
        console.print(f"! {records.half_written_lines} half-written last log lines left out", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
