"""``python -m ablations.run --grid quick``: run a grid, cell by cell, and go on where an earlier call stopped."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import ValidationError

from triaccel.types import TriAccelError

from .cell import Options
from .cells import digest
from .estimate import estimate_seconds
from .folder import RunFolder
from .grid import Cell, Grid, expand, load_grid
from .record import RecordError
from .schedule import Queue, in_shard

__all__ = ["Arguments", "main"]


@dataclass
class Arguments:
    """Run a grid of arm × model × data set × seed. A second call runs only what is missing."""

    grid: str = "quick"
    """Built-in grid (quick, cpu, full, gpu-check) or the path of a TOML file."""
    out: Path | None = None
    """Folder of the results; by default runs/GRID, or runs/GRID-HASH where options change the grid."""
    arms: str | None = None
    """Arms instead of the grid's, separated by commas; each may end in @BATCH."""
    seeds: str | None = None
    """Seeds instead of the grid's: 0,1,2 or 0-5."""
    model: str | None = None
    """Models instead of the grid's, separated by commas."""
    dataset: str | None = None
    """Data sets instead of the grid's, separated by commas; folder:PATH takes images of your own."""
    epochs: int | None = None
    """Epochs instead of the grid's."""
    set: Annotated[list[str], tyro.conf.UseAppendAction] = field(default_factory=list)
    """Configuration override component.field=value; may be given several times."""
    config: Path | None = None
    """TOML file with configuration fields (as ablations.search writes); --set comes after it."""
    device: str = "cpu"
    """torch device; several, separated by commas, are dealt out to the workers."""
    workers: int = 1
    """Cells at the same time. With more than one, times are flagged and not reported as times."""
    executor: Literal["local", "ray"] = "local"
    """local: processes on this machine. ray: an existing or new Ray cluster (install tri-accel[ray])."""
    address: str | None = None
    """Address of a Ray cluster; none: a cluster on this machine."""
    data: Path = Path("data")
    """Folder of data sets."""
    download: bool = False
    """Let torchvision fetch missing data sets."""
    dry_run: bool = False
    """List the cells with ids and an estimate of time, and stop."""
    force_unsupported: bool = False
    """Run formats that the device does not accelerate."""
    timeout: float | None = None
    """Seconds after which a cell ends as timeout."""
    checkpoint_seconds: float = 60.0
    """Seconds between checkpoints of a running cell; 0: none but when stopped."""
    allow_mixed_code: bool = False
    """Go on in a folder whose results other versions of the training code made."""
    fail_fast: bool = False
    """Stop at the first cell that ends in error or timeout."""
    shard: str | None = None
    """Run part i of n (i/n) of the blocks; merge the folders with --merge."""
    merge: Annotated[list[Path], tyro.conf.UseAppendAction] = field(default_factory=list)
    """Folder of another shard to take finished cells from, before running; may be given several times."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Publish finished cells to Weights & Biases at the end."""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 all cells have a result, 1 some have not, 2 bad input."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m ablations.run")
    try:
        return _run(arguments)
    except (TriAccelError, RecordError, ValidationError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(arguments: Arguments) -> int:
    grid = _grid(arguments)
    cells = expand(grid)
    if arguments.shard:
        cells = in_shard(cells, arguments.shard)
    _check_names(grid)
    if arguments.dry_run:
        _list(grid, cells, arguments.device)
        return 0
    folder = RunFolder(arguments.out or Path("runs") / _name(arguments.grid, grid))
    folder.open(grid)
    if not arguments.allow_mixed_code:
        _refuse_other_code(folder)
    if arguments.merge:
        from .merge import merge

        for source in arguments.merge:
            print(f"merged {merge(source, folder)} finished cells from {source}")
    for cell in cells:
        folder.declare(cell)
    if arguments.force_unsupported:
        for cell in cells:
            if folder.state(cell.id) == "unsupported" and not folder.claimed(cell.id):
                (folder.cell_folder(cell.id) / "result.json").unlink(missing_ok=True)
    finished = _execute(arguments, folder, cells)
    if arguments.wandb != "disabled":
        from .publish import publish

        publish(folder.path, mode=arguments.wandb)
    return _summary(folder, cells, finished)


def _grid(arguments: Arguments) -> Grid:
    changes: dict[str, Any] = {
        "arms": _split(arguments.arms),
        "seeds": _seeds(arguments.seeds),
        "models": _split(arguments.model),
        "datasets": _datasets(arguments.dataset),
        "epochs": arguments.epochs,
    }
    if changes["seeds"] is not None:
        changes["more_seeds"] = []
    if arguments.config is not None:
        from .grid import read_config

        changes["config"] = read_config(arguments.config, base=arguments.grid)
    return load_grid(arguments.grid, sets=arguments.set or [], changes=changes)


def _refuse_other_code(folder: RunFolder) -> None:
    from .provenance import sources_hash

    for path in (folder.path / "cells").glob("*/result.json"):
        made = (folder.result(path.parent.name) or {}).get("provenance", {}).get("sources_hash")
        if made not in (None, sources_hash()):
            raise TriAccelError(
                f"{folder.path} has results of other training code ({made}, now {sources_hash()}): choose another --out, or mix "
                "them with --allow-mixed-code; the analysis will say so"
            )


def _name(asked: str, grid: Grid) -> str:
    """Folder under ``runs``: the grid's name; a grid changed by options gets one of its own, the same at every call."""
    plain = load_grid(asked)
    same = (grid.digest, grid.models, grid.datasets) == (plain.digest, plain.models, plain.datasets)
    return grid.name if same else f"{grid.name}-{digest([grid.digest, grid.models, grid.datasets], 8)}"


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _datasets(text: str | None) -> list[str] | None:
    """Names; the path of ``folder:PATH`` made absolute, so that a cell means the same from everywhere."""
    return _split(text) and [
        f"folder:{Path(name.removeprefix('folder:')).expanduser().absolute()}"
        if name.startswith("folder:")
        else name
        for name in _split(text) or []
    ]


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"--seeds {text!r}: write 0,1,2 or 0-5")
        seeds.extend(range(int(first), int(last or first) + 1))
    return seeds


_MODELS = ("resnet18", "efficientnet_b0", "resnet18-cifar", "resnet8")
_DATASETS = ("digits", "cifar10", "cifar100", "fashion-mnist", "cifar10-jpeg")


def _check_names(grid: Grid) -> None:
    """Unknown models and data sets are told before anything starts (the names are those of workloads.py; a test says so)."""
    for model in grid.models:
        if model not in _MODELS:
            raise TriAccelError(f"unknown model {model!r}; the models are {', '.join(_MODELS)}")
    for dataset in grid.datasets:
        if dataset.startswith("folder:"):
            if not Path(dataset.removeprefix("folder:")).is_dir():
                raise TriAccelError(f"no folder {dataset.removeprefix('folder:')!r} for data set {dataset!r}")
        elif dataset not in _DATASETS:
            raise TriAccelError(
                f"unknown data set {dataset!r}; the data sets are {', '.join(_DATASETS)}, folder:PATH"
            )


def _list(grid: Grid, cells: list[Cell], device: str) -> None:
    total = 0.0
    for cell in cells:
        seconds = estimate_seconds(cell, device=device)
        total += seconds
        print(
            f"{cell.id}  {cell.model:16} {cell.dataset:13} {cell.arm:22} seed {cell.seed:<3} about {seconds:7.0f} s"
        )
    blocks = len({cell.block for cell in cells})
    print(
        f"grid {grid.name} ({grid.digest}): {len(cells)} cells in {blocks} blocks, {grid.epochs} epochs each; "
        f"about {total / 3600:.1f} h on one {device} device, within a factor of two"
    )


def _execute(arguments: Arguments, folder: RunFolder, cells: list[Cell]) -> bool:
    from rich.console import Console

    from .table import Progress

    devices = _split(arguments.device) or ["cpu"]
    options = Options(
        device=devices[0],
        root=str(arguments.data),
        download=arguments.download,
        force_unsupported=arguments.force_unsupported,
        checkpoint_seconds=arguments.checkpoint_seconds,
        timeout=arguments.timeout,
        allow_mixed_code=arguments.allow_mixed_code,
    )
    queue = Queue(folder, cells)
    console = Console(highlight=False)
    done = len(cells) - queue.remaining
    if done:
        console.print(f"{done} of {len(cells)} cells have a result already; {queue.remaining} to run")
    with Progress(cells, folder, device=devices[0], console=console) as progress:
        if arguments.executor == "ray":
            from .executors.ray import run_ray

            return run_ray(
                queue,
                folder,
                options,
                address=arguments.address,
                fail_fast=arguments.fail_fast,
                started=progress.started,
                done=progress.done,
                tick=progress.tick,
            )
        from .executors.local import run_local

        return run_local(
            queue,
            folder,
            options,
            workers=max(1, arguments.workers),
            devices=devices,
            fail_fast=arguments.fail_fast,
            started=progress.started,
            done=progress.done,
            tick=progress.tick,
        )


def _summary(folder: RunFolder, cells: list[Cell], finished: bool) -> int:
    states: dict[str, int] = {}
    for cell in cells:
        state = folder.state(cell.id) or "missing"
        states[state] = states.get(state, 0) + 1
    print(", ".join(f"{count} {state}" for state, count in sorted(states.items())) + f" in {folder.path}")
    good = all(folder.finished(cell.id) for cell in cells)
    if not good:
        print(
            "call the same command again to run what is missing"
            + ("" if finished else " (stopped before the end)")
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
