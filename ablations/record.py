"""Records on disk: JSON and JSON lines that survive a crash. Needs no torch.

A JSON file is written beside its target and renamed, so it is there whole or not at all. A JSON-lines file is only appended to,
one flushed write per line; after a kill its last line may be torn: readers leave a torn last line out, writers cut it before
they go on. A line that is corrupt anywhere else is an error that names file and line. Source: ours.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

__all__ = ["SCHEMA", "Log", "RecordError", "read_json", "read_lines", "write_json"]

SCHEMA = 1


class RecordError(RuntimeError):
    """A record cannot be read or written; the message names the file, the line and what to do."""


def _plain(value: Any) -> Any:
    """Non-finite floats as strings: JSON has none, and a NaN must not become a number again unseen."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"nonfinite": "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _revive(value: dict[str, Any]) -> Any:
    return float(value["nonfinite"]) if value.keys() == {"nonfinite"} else value


def _dumps(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write ``value`` to ``path`` whole or not at all.

    Args:
        path: the file.
        value: a JSON value.
        durable: on disk before this returns; ``False`` for what can be made again.

    Raises:
        RecordError: the disk is full or the folder read-only; what stood at ``path`` still does.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "w", encoding="utf-8") as file:
            file.write(_dumps(value) + "\n")
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):  # the same full or read-only disk: the error below says so
            beside.unlink(missing_ok=True)
        raise RecordError(
            f"cannot write {path}: {error.strerror}; free space or choose another --out, then run again"
        ) from error


def read_json(path: Path) -> Any:
    """The JSON value in ``path``.

    Raises:
        RecordError: the file is missing, or is not whole JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_hook=_revive)
    except FileNotFoundError as error:
        raise RecordError(f"no record at {path}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} is corrupt ({error}): delete it, and the cell runs again") from error


def read_lines(path: Path) -> Iterator[Any]:
    """Values of a JSON-lines file; a torn last line is left out.

    Raises:
        RecordError: a line that is not the torn last one is corrupt.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise RecordError(f"no record at {path}") from error
    lines = data.split(b"\n")
    lines.pop()  # what follows the last newline: nothing, or a torn line
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line, object_hook=_revive)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RecordError(
                f"{path}, line {number} is corrupt ({error}): delete the cell's folder, and the cell runs again"
            ) from error


class Log:
    """Appends JSON lines to one file.

    Args:
        path: the file; made if missing.
        size: bytes to keep of what is there (a checkpoint's position): later lines are cut, so none is repeated on resume.
            ``None`` keeps all whole lines.

    Raises:
        RecordError: the file cannot be opened, or is shorter than ``size``.
    """

    def __init__(self, path: Path, *, size: int | None = None) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(exist_ok=True)
            if size is None:
                data = path.read_bytes()
                size = data.rfind(b"\n") + 1
            if path.stat().st_size < size:
                raise RecordError(
                    f"{path} has {path.stat().st_size} bytes, the checkpoint says {size}: it was cut from outside; "
                    "delete the cell's checkpoints, and the cell starts anew"
                )
            self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 (closed by close)
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise RecordError(f"cannot write {path}: {error.strerror}; check --out") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def append(self, event: str, **fields: Any) -> None:
        """Append one line ``{"event": event, ...}``.

        Raises:
            RecordError: the disk is full; the file ends with the last whole line.
        """
        line = (_dumps({"event": event, **fields}) + "\n").encode()
        start = self._file.tell()
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(28, "only part of the line could be written (disk full)")
        except OSError as error:
            with suppress(OSError):  # readers leave a torn last line out
                self._file.truncate(start)
                self._file.seek(start)
            raise RecordError(
                f"cannot write {self.path}: {error.strerror}; free space, then run again to resume"
            ) from error

    def close(self) -> None:
        """Flush to disk and close."""
        if not self._file.closed:
            with suppress(OSError):  # what could not be written was told by append
                os.fsync(self._file.fileno())
            self._file.close()
