"""The results block of the README, between two HTML comments, held equal to what the records say.

    <!-- results:begin -->
    (generated)
    <!-- results:end -->

Source: ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from .record import RecordError
from .render import to_markdown
from .table import Table

__all__ = ["BEGIN", "COLUMNS", "END", "block", "check", "write"]

BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"
COLUMNS = (
    "arm",
    "cells",
    "accuracy",
    "accuracy_difference",
    "seconds",
    "time_ratio",
    "time_ratio_best_static",
    "peak_mib",
    "bytes_ratio",
)
"""Columns of the main table that the README shows."""


def block(main: Table, primary: Table) -> str:
    """The generated text, without its markers."""
    parts: Sequence[str] = [to_markdown(main.select(COLUMNS, name="readme"), level=3)]
    if primary.sections:
        parts = [*parts, to_markdown(primary, level=3)]
    return "\n".join(parts).strip("\n") + "\n"


def _split(readme: Path) -> tuple[str, str, str]:
    if not readme.is_file():
        raise RecordError(f"{readme}: no such file; name the README with --readme")
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise RecordError(
            f"{readme}: the lines {BEGIN} and {END} must stand in it once each, in this order; add them where the results belong"
        )
    before, rest = text.split(BEGIN)
    inside, after = rest.split(END)
    return before, inside.strip("\n") + "\n", after


def check(readme: Path, expected: str) -> list[str]:
    """Differences between the README's block and the records, as a unified diff; empty when equal.

    Raises:
        RecordError: no README, or its markers are not there once each.
    """
    _, inside, _ = _split(readme)
    diff = difflib.unified_diff(
        inside.splitlines(), expected.splitlines(), str(readme), "records", lineterm="", n=0
    )
    return list(diff)


def write(readme: Path, text: str) -> bool:
    """Put the block into the README; whether it changed.

    Raises:
        RecordError: as ``check``.
    """
    before, inside, after = _split(readme)
    if inside == text:
        return False
    readme.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
    return True
