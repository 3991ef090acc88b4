"""What ran: one ``Record`` a cell, read from a run folder or from a committed compact file.

A run folder has ``grid.json`` and ``cells/<id>/{cell.json,result.json,log.jsonl}``; a compact folder has ``*.jsonl`` or
``*.jsonl.gz`` files with one record a line (``analysis.compact``). Both give equal records, so both draw the same bytes.
Failed cells are records like any other: failure is a state, kept and counted, never a missing row. A cell that has not
run (or has not finished) has the state ``missing``. Cost: one pass over the files, a few kB of memory a record.
Source: ours (record format of the harness, schema 1).
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .logs import EMPTY, read_log
from .record import STATES, Record, RecordError, make_record, plain

__all__ = ["STATES", "Record", "RecordError", "Run", "load", "make_record", "read_json"]


@dataclass(frozen=True, slots=True)
class Run:
    """Records in a fixed order (grid, model, data set, arm, seed, id), and what was dropped while reading."""

    records: tuple[Record, ...]
    half_written_lines: int = 0


def load(folder: Path) -> Run:
    """Read a run folder or a folder of compact records.

    Args:
        folder: a run folder (with ``grid.json``), a folder with ``*.jsonl`` or ``*.jsonl.gz``, or one such file.

    Raises:
        RecordError: nothing to read there, or a corrupt file (named with its line).
    """
    if not folder.exists():
        raise RecordError(
            f"{folder}: no such folder; run `python -m ablations.run --out {folder}` first, or name another --records"
        )
    if (folder / "grid.json").is_file():
        collecting = gc.isenabled()
        gc.disable()  # nothing here is garbage; looking for it among many records takes a quarter of the time
        try:
            records, half = _run_folder(folder)
        finally:
            if collecting:
                gc.enable()
    else:
        from .compact import compact_files, read_compact

        files = compact_files(folder)
        if not files:
            raise RecordError(
                f"{folder}: neither a run folder (no grid.json) nor compact records (no *.jsonl, *.jsonl.gz); "
                "name the --out of a run"
            )
        records, half = read_compact(files), 0
    unique: dict[tuple[str, str], Record] = {}
    for record in records:
        known = unique.setdefault((record.grid, record.id), record)
        if known is not record and known != record:
            raise RecordError(
                f"{folder}: two different results for cell {record.id} ({record.arm}, {record.model}, seed {record.seed}); "
                "keep one of them, or run the cell again in a fresh folder"
            )
    ordered = sorted(unique.values(), key=lambda r: (r.grid, r.model, r.dataset, r.arm, r.seed, r.id))
    return Run(tuple(ordered), half)


def _run_folder(folder: Path) -> tuple[list[Record], int]:
    grid = read_json(folder / "grid.json")
    spec = plain(grid.get("spec") or {})
    spec.pop("config", None)  # each cell has the one that it ran
    records, half = [], 0
    for cell_file in sorted((folder / "cells").glob("[!.]*/cell.json")):
        result_file = cell_file.with_name("result.json")
        if result_file.is_file():
            data, source = read_json(result_file), result_file
        else:
            data, source = {"cell": read_json(cell_file), "state": "missing"}, cell_file
        log = cell_file.with_name("log.jsonl")
        series, dropped = read_log(log) if log.is_file() else (EMPTY, 0)
        half += dropped
        records.append(
            make_record(data, grid=str(grid.get("grid")), spec=spec, series=series, source=str(source))
        )
    if not records:
        raise RecordError(
            f"{folder}: no cells in {folder / 'cells'}; run `python -m ablations.run --out {folder}` first"
        )
    return records, half


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RecordError: unreadable, not JSON (with the line), or not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{file}:{error.lineno}: not valid JSON ({error.msg}); remove the file and run the cell again"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(
            f"{file}:1: cannot be read ({error}); remove the file and run the cell again"
        ) from None
    if not isinstance(value, dict):
        raise RecordError(
            f"{file}:1: a {type(value).__name__} where an object was expected; remove the file and run the cell again"
        )
    return value
