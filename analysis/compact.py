"""Compact records: one JSON line a cell, small enough to commit, from which every table and figure is drawn again.

    python -m analysis.make --compact runs/cpu paper_figs/reference

A record is already thinned when it is read (``analysis.logs``), so a compact file holds exactly what the run folder gave.
Keys keep their order (that of layers is meant) and gzip carries no date: the same records give the same bytes. Source: ours.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .logs import Series
from .record import Record, RecordError, make_record
from .records import Run

__all__ = ["compact_files", "read_compact", "slug", "write_compact"]


def slug(*parts: object) -> str:
    """File-name form of some labels: lower case, words joined by ``-``, parts by ``--``."""
    return "--".join(
        re.sub(r"[^a-z0-9.+]+", "-", str(part).lower()).strip("-") for part in parts if str(part)
    )


def compact_files(path: Path) -> list[Path]:
    """Compact files at ``path`` (a file, or a folder of them), in name order."""
    if path.is_file():
        return [path] if path.name.endswith((".jsonl", ".jsonl.gz")) else []
    return sorted(file for file in path.iterdir() if file.name.endswith((".jsonl", ".jsonl.gz")))


def write_compact(run: Run, destination: Path) -> list[Path]:
    """Write the finished and failed cells of a run; cells that have not run yet are left out.

    Args:
        run: records.
        destination: a file (``*.jsonl``, ``*.jsonl.gz``), or a folder that gets one file a grid, model and data set.

    Returns:
        The files written, in name order.

    Raises:
        RecordError: no cell has a result, or a file there holds cells that this run lacks.
    """
    records = [record for record in run.records if record.state != "missing"]
    if not records:
        raise RecordError(f"no cell has a result yet: nothing to write to {destination}; run the grid first")
    parts: dict[Path, list[str]] = {}
    for record in records:
        single = destination.name.endswith((".jsonl", ".jsonl.gz"))
        file = (
            destination
            if single
            else destination / f"{slug(record.grid, record.model, record.dataset)}.jsonl"
        )
        parts.setdefault(file, []).append(_line(record))
    for file in parts:
        _refuse_loss(file, {record.id for record in records})
    for file, lines in parts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        data = "".join(lines).encode()
        temporary = file.with_name(file.name + ".part")
        temporary.write_bytes(gzip.compress(data, mtime=0) if file.suffix == ".gz" else data)
        temporary.replace(file)
    return sorted(parts)


def _refuse_loss(file: Path, ids: set[str]) -> None:
    if not file.is_file():
        return
    lost = sorted({record.id for record in _read(file)} - ids)
    if lost:
        raise RecordError(
            f"{file} holds {len(lost)} cells that this run lacks ({', '.join(lost[:3])}…): it is another run's; "
            "name another file (*.jsonl), or remove it"
        )


def _line(record: Record) -> str:
    value = {
        "schema": 1,
        "grid": record.grid,
        "spec": record.spec,
        "cell": record.cell,
        "state": record.state,
        "reason": record.reason,
        "metrics": record.metrics,
        "report": record.report,
        "provenance": record.provenance,
        "shared_machine": record.shared_machine,
        "series": record.series.to_json(),
    }
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n"


def read_compact(files: Sequence[Path]) -> list[Record]:
    """Records of compact files.

    Raises:
        RecordError: a line is not a record (file and line named); a half-written last line is an error here, since a
            committed file is written whole.
    """
    return [record for file in files for record in _read(file)]


def _read(file: Path) -> Iterable[Record]:
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError) as error:
        raise RecordError(f"{file}:1: cannot be read ({error}); write it again with --compact") from None
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            value: Any = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RecordError(
                f"{where}: not a JSON line ({error}); write the file again with --compact"
            ) from None
        if not isinstance(value, dict):
            raise RecordError(
                f"{where}: a {type(value).__name__} where a record was expected; write the file again with --compact"
            )
        yield make_record(
            value,
            grid=str(value.get("grid")),
            spec=value.get("spec") or {},
            series=Series.from_json(value.get("series") or {}),
            source=where,
        )
