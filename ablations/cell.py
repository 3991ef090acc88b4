"""One cell in its own process: from claim to ``result.json``, whatever happens in between. Source: ours.

States: ``done``; ``oom``, ``diverged`` and ``unsupported`` are results; ``error``, ``timeout`` and ``preempted`` run again on the
next call. SIGTERM checkpoints and ends ``preempted``; a SIGKILL loses at most what came after the last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cells import Cell
from .folder import RunFolder
from .locks import locked
from .record import Log, RecordError, read_json, write_json

__all__ = ["Options", "run_cell"]

WAIT = 60.0
"""Seconds to wait for a former process of the same cell to be gone."""


@dataclass(frozen=True, slots=True)
class Options:
    """How cells run; none of it decides a result.

    Attributes:
        device: torch device string.
        root: folder of data sets.
        threads: CPU threads of the cell; ``None``: torch's default.
        download: whether data sets may be fetched.
        force_unsupported: run formats that the device does not accelerate.
        checkpoint_seconds: seconds between checkpoints; 0 writes none but on SIGTERM.
        timeout: seconds after which a cell ends as ``timeout``; ``None``: never.
        shared_machine: whether other cells run at the same time: their times are flagged.
        allow_mixed_code: whether a checkpoint of other sources may be gone on from.
    """

    device: str = "cpu"
    root: str = "data"
    threads: int | None = None
    download: bool = False
    force_unsupported: bool = False
    checkpoint_seconds: float = 60.0
    timeout: float | None = None
    shared_machine: bool = False
    allow_mixed_code: bool = False


def run_cell(out: str, cell_id: str, options: Options) -> str:
    """Run one declared and claimed cell to its end and write its result.

    Returns:
        The state.
    """
    folder = RunFolder(out)
    home = folder.cell_folder(cell_id)
    # A former owner that was told to die may need a moment; the kernel drops its lock when it has.
    with locked(home / ".running", wait=WAIT):
        return _run(folder, home, Cell.from_json(read_json(home / "cell.json")), options)


def _run(folder: RunFolder, home: Path, cell: Cell, options: Options) -> str:
    stop = _Stop()
    owner = folder.owner(cell.id)
    provenance: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    try:
        import torch

        if options.threads is not None:
            torch.set_num_threads(options.threads)
        from .provenance import describe

        provenance = describe(options.device)
        parts = _train(folder, cell, options, stop)
        state, reason = "done", None
    except BaseException as error:
        state, reason = _state_of(error, stop)
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        if isinstance(error, SystemExit | KeyboardInterrupt) and not stop.asked:
            raise
    parts = {"metrics": {}, "report": {}, **parts}
    if folder.owner(cell.id) != owner:
        print("the claim went to another runner while this one was away: its result counts", file=sys.stderr)
        return state
    disturbed = bool(parts.pop("shared_machine", False))
    folder.write_result(
        cell,
        state=state,
        reason=reason,
        provenance=provenance,
        options=asdict(options),
        shared_machine=options.shared_machine or disturbed,
        **parts,
    )
    if state == "done":
        for path in home.glob("checkpoint-*.pt"):
            path.unlink(missing_ok=True)
    return state


class _Stop:
    """SIGTERM and SIGINT ask the trainer to stop at the end of its step."""

    def __init__(self) -> None:
        self.asked = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask)
            signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True


class _TimedOut(RuntimeError):
    pass


def _state_of(error: BaseException, stop: _Stop) -> tuple[str, str]:
    from baselines import Unsupported
    from triaccel.recovery import is_out_of_memory

    from .train import Diverged, Preempted

    reason = str(error).strip() or type(error).__name__
    if isinstance(error, Unsupported):
        return "unsupported", reason
    if isinstance(error, Diverged):
        return "diverged", reason
    if isinstance(error, Preempted):
        return "preempted", reason
    if isinstance(error, _TimedOut):
        return "timeout", reason
    if is_out_of_memory(error) or "out of memory" in reason:
        return "oom", reason
    if stop.asked:
        return "preempted", reason
    return "error", f"{type(error).__name__}: {reason}"


def _train(folder: RunFolder, cell: Cell, options: Options, stop: _Stop) -> dict[str, Any]:
    import torch

    from .checkpoint import load_checkpoint, save_checkpoint
    from .provenance import sources_hash
    from .train import Run, train

    home = folder.cell_folder(cell.id)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"--device {options.device}: torch sees no CUDA device; use --device cpu")
    checkpoint = load_checkpoint(home, cell, sources=None if options.allow_mixed_code else sources_hash())
    log = Log(home / "log.jsonl", size=checkpoint["log_bytes"] if checkpoint else 0)
    key = _calibration_key(cell, options)
    clock = {"saved": time.monotonic(), "began": time.monotonic()}

    def due() -> bool:
        if options.timeout is not None and time.monotonic() - clock["began"] > options.timeout:
            raise _TimedOut(f"the cell took more than {options.timeout:g} s (--timeout)")
        return (
            options.checkpoint_seconds > 0 and time.monotonic() - clock["saved"] > options.checkpoint_seconds
        )

    def save(state: dict[str, Any]) -> None:
        save_checkpoint(home, {**state, "sources": sources_hash()})
        clock["saved"] = time.monotonic()

    def progress(share: float, samples: int, loss: float) -> None:
        folder.touch(cell.id)
        with suppress(RecordError):  # for the table alone; the log itself raises when the disk is full
            write_json(
                home / "progress.json", {"share": share, "samples_seen": samples, "loss": loss}, durable=False
            )

    run = Run(
        cell=cell,
        device=device,
        log=log,
        root=Path(options.root),
        download=options.download,
        calibration=_load_calibration(folder, key),
        trace=_load_trace(folder, cell),
        force_unsupported=options.force_unsupported,
        checkpoint=checkpoint,
        save=save,
        due=due,
        stopping=lambda: stop.asked,
        progress=progress,
    )
    had = run.calibration is not None
    try:
        with log:
            found = train(run)
    finally:
        if run.measured is not None and not had:
            _save_calibration(folder, key, run.measured)
    found.pop("trace").save(home / "trace.jsonl")
    (home / "progress.json").unlink(missing_ok=True)
    return found


# ---------------------------------------------------------------- what cells share


def _calibration_key(cell: Cell, options: Options) -> str:
    """Same key, same measurements: model, data set, batches, what is asked for, and the machine."""
    from .provenance import machine_key, sources_hash

    config = cell.settings["config"]
    asked = {
        "precision": {
            k: config["precision"][k] for k in ("rule", "gate", "ladder", "pin", "cost_budget_seconds")
        },
        "curvature": config["curvature"],
        "batch": {
            k: config["batch"][k] for k in ("rule", "initial", "minimum", "maximum", "ladder", "noise_cap")
        },
    }
    text = json.dumps(
        [
            cell.model,
            cell.dataset,
            cell.batch,
            asked,
            machine_key(options.device),
            options.threads,
            sources_hash(),
        ],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _load_calibration(folder: RunFolder, key: str) -> Any:
    from triaccel.calibration import Calibration

    path = folder.path / "calibration" / f"{key}.json"
    return Calibration.from_json(read_json(path)) if path.is_file() else None


def _save_calibration(folder: RunFolder, key: str, calibration: Any) -> None:
    write_json(folder.path / "calibration" / f"{key}.json", calibration.to_json())


def _load_trace(folder: RunFolder, cell: Cell) -> Any:
    if cell.needs is None:
        return None
    from triaccel.trace import Trace

    return Trace.load(folder.cell_folder(cell.needs) / "trace.jsonl")
