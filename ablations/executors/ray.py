"""Runs cells as Ray tasks: on a cluster that is there (``address``) or on one started on this machine. Source: ours.

A cell takes whole resources (one GPU, or the CPUs of a node unless told otherwise), runs in a worker process of its own, and
runs again elsewhere when its node is lost. Where the run folder is not shared between nodes, what the cell needs is
sent along and what it wrote comes back. Ray itself retries nothing: the queue does, and counts. Ray is an optional extra.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from triaccel.types import TriAccelError

from ..cell import Options, run_cell
from ..cells import Cell
from ..folder import RunFolder
from ..record import read_json
from ..schedule import Queue
from .interrupt import GRACE, Interrupt

__all__ = ["run_ray"]

_KEPT = ("result.json", "log.jsonl", "trace.jsonl", "stdout.log")


def run_ray(
    queue: Queue,
    folder: RunFolder,
    options: Options,
    *,
    address: str | None = None,
    cpus: float | None = None,
    fail_fast: bool = False,
    started: Callable[[Cell], None],
    done: Callable[[Cell, str, str | None], None],
    tick: Callable[[], None] = lambda: None,
) -> bool:
    """Run the queue on a Ray cluster.

    Args:
        queue: cells.
        folder: their folder, on this machine.
        options: for every cell.
        address: of an existing cluster (``"auto"`` finds one); ``None`` uses the one connected to, or starts one here.
        cpus: CPUs that one cell takes; ``None``: all of the smallest node, so that times are not shared (one beside a GPU).
        fail_fast: stop at the first ``error`` or ``timeout``.
        started: called with each cell that is handed to Ray.
        done: called with each cell, its state and its reason.
        tick: called a few times a second.

    Returns:
        Whether the queue was run to its end.

    Raises:
        TriAccelError: Ray is not installed, or the cluster cannot be reached.
    """
    ray = _connect(address)
    try:
        return _Runner(ray, queue, folder, options, cpus, started, done).run(fail_fast=fail_fast, tick=tick)
    finally:
        if not ray.tri_accel_found:
            ray.shutdown()


class _Connected:
    """The ``ray`` module, and whether somebody else had connected it."""

    def __init__(self, module: Any, found: bool) -> None:
        self._module = module
        self.tri_accel_found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _connect(address: str | None) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:  # a cluster of this machine alone listens on the loopback address, nowhere else
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError as error:
        raise TriAccelError(
            "Ray is not installed: pip install 'tri-accel[ray]', or use --executor local"
        ) from error
    if ray.is_initialized():
        return _Connected(ray, True)
    here: dict[str, Any] = {} if address else {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", configure_logging=False, **here)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise TriAccelError(f"no Ray cluster at {address or 'this machine'}: {error}") from error
    return _Connected(ray, False)


class _Runner:
    def __init__(
        self,
        ray: Any,
        queue: Queue,
        folder: RunFolder,
        options: Options,
        cpus: float | None,
        started: Callable[[Cell], None],
        done: Callable[[Cell, str, str | None], None],
    ) -> None:
        self._ray, self._queue, self._folder, self._options = ray, queue, folder, options
        self._started, self._done = started, done
        self._gpu = options.device.startswith("cuda")
        smallest = min((node.get("CPU", 0.0) for node in self._nodes()), default=1.0)
        self._cpus = cpus or (1.0 if self._gpu else max(1.0, smallest))
        self._running: dict[Any, Cell] = {}
        self._remote = ray.remote(max_calls=1, max_retries=0)(_task)

    def _nodes(self) -> list[dict[str, float]]:
        return [
            node["Resources"] for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")
        ]

    def _room(self) -> int:
        """Cells that the cluster takes at once, as it is now."""
        per_node = [
            min(int(node.get("CPU", 0) // self._cpus), int(node.get("GPU", 0)) if self._gpu else 1 << 30)
            for node in self._nodes()
        ]
        return sum(per_node)

    def _shared(self) -> bool:
        return any(int(node.get("CPU", 0) // self._cpus) > 1 for node in self._nodes())

    def run(self, *, fail_fast: bool, tick: Callable[[], None]) -> bool:
        stop = Interrupt()
        failed, ending = False, None
        with stop:
            while True:
                closing = stop.asked or failed
                if not closing:
                    self._fill()
                elif ending is None:
                    ending = time.monotonic()
                    for reference in self._running:
                        self._ray.cancel(reference, force=False)
                elif time.monotonic() - ending > GRACE:
                    for reference in self._running:
                        self._ray.cancel(reference, force=True)
                if not self._running:
                    if closing or self._queue.remaining == 0:
                        return not closing
                    if not any(True for _ in self._folder.claims()) and self._room():
                        return True  # what is left needs a cell that will not come
                    time.sleep(0.2)
                    tick()
                    continue
                ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=0.25)
                for cell in self._running.values():
                    self._folder.touch(cell.id)
                for reference in ready:
                    failed |= self._conclude(reference, stopping=stop.asked) and fail_fast
                tick()

    def _fill(self) -> None:
        while len(self._running) < self._room():
            cell = self._queue.take()
            if cell is None:
                return
            options = replace(
                self._options,
                root=str(Path(self._options.root).absolute()),
                threads=self._options.threads or max(1, int(self._cpus)),
                shared_machine=self._options.shared_machine or self._shared(),
            )
            task = self._remote.options(num_cpus=self._cpus, num_gpus=1 if self._gpu else 0)
            out = str(self._folder.path.absolute())
            reference = task.remote(out, cell.id, options, _sent(self._folder, cell))
            self._running[reference] = cell
            self._started(cell)

    def _conclude(self, reference: Any, *, stopping: bool) -> bool:
        """Take in how a task ended; returns whether the cell failed."""
        cell = self._running.pop(reference)
        lost = None
        try:
            written = self._ray.get(reference)
        except (self._ray.exceptions.RayError, KeyboardInterrupt) as error:
            lost = f"its node or worker was lost ({type(error).__name__})"
            written = None
        if written is not None:
            for name, data in written.items():
                target = self._folder.cell_folder(cell.id) / name
                partial = target.with_name(f".{name}.{os.getpid()}")
                partial.write_bytes(data)
                os.replace(partial, target)
        result = None if lost else self._folder.result(cell.id)
        if result is not None:
            self._folder.release(cell.id)
            self._done(cell, str(result["state"]), result["reason"])
            return result["state"] in ("error", "timeout")
        if stopping:
            self._folder.release(cell.id)
            self._done(cell, "preempted", "stopped before its first checkpoint")
            return False
        reason = lost or "its task ended without a result"
        if self._queue.again(cell):
            self._folder.release(cell.id)
            self._done(cell, "retry", reason)
            return False
        self._folder.write_result(
            cell, state="error", reason=reason, metrics={}, report={}, provenance={}, shared_machine=False
        )
        self._folder.release(cell.id)
        self._done(cell, "error", reason)
        return True


def _sent(folder: RunFolder, cell: Cell) -> dict[str, bytes]:
    """Files that the cell needs where the run folder is not to be seen: name in the folder -> content."""
    names = [f"cells/{cell.id}/cell.json"]
    if cell.needs is not None:
        names.append(f"cells/{cell.needs}/trace.jsonl")
    names += [f"calibration/{path.name}" for path in (folder.path / "calibration").glob("*.json")]
    return {name: (folder.path / name).read_bytes() for name in names if (folder.path / name).is_file()}


def _task(out: str, cell_id: str, options: Options, sent: dict[str, bytes]) -> dict[str, bytes] | None:
    """In a Ray worker: run the cell in ``out`` where that is the same folder, else in one of its own, and return its files."""
    declared = Path(out) / "cells" / cell_id / "cell.json"
    if declared.is_file() and declared.read_bytes() == sent[f"cells/{cell_id}/cell.json"]:
        _captured(out, cell_id, options)
        return None
    with tempfile.TemporaryDirectory(prefix="tri-accel-") as own:
        for name, data in sent.items():
            path = Path(own) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        _captured(own, cell_id, options)
        home = Path(own) / "cells" / cell_id
        read_json(home / "result.json")
        return {name: (home / name).read_bytes() for name in _KEPT if (home / name).is_file()}


def _captured(out: str, cell_id: str, options: Options) -> None:
    """Run the cell with what it prints in its ``stdout.log``, as the local executor does."""
    log = os.open(Path(out) / "cells" / cell_id / "stdout.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    kept = [os.dup(number) for number in (1, 2)]
    try:
        for number in (1, 2):
            os.dup2(log, number)
        run_cell(out, cell_id, options)
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(log)
