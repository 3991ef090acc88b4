"""Small grids and fake cells for the tests of the harness."""

from pathlib import Path

from ablations.cells import Cell, expand
from ablations.folder import RunFolder
from ablations.grid import Grid

CONFIG = {
    "batch": {
        "initial": 16,
        "minimum": 8,
        "maximum": 64,
        "noise_cap": 0,
        "min_updates": 0.25,
        "cooldown": 1,
    },
    "tick_samples": 64,
    "precision": {"warmup_skip_steps": 2, "stats_every": 2, "cost_budget_seconds": 1.0},
    "curvature": {"interval_samples": 128, "probe_batch": 8},
}


def tiny_grid(*arms: str, **changes) -> Grid:
    values = {
        "name": "tiny",
        "models": ("resnet8",),
        "datasets": ("digits",),
        "arms": arms or ("fp32",),
        "epochs": 2,
        "train_samples": 200,
        "test_samples": 64,
        "config": CONFIG,
    }
    return Grid.model_validate(values | changes)


def tiny_cell(arm: str, **changes) -> Cell:
    return next(cell for cell in expand(tiny_grid(arm, **changes)) if cell.arm == arm)


def fake_result(folder: RunFolder, cell: Cell, *, state: str = "done", accuracy: float = 0.9) -> None:
    """A result as a training cell writes it, with nothing trained."""
    metrics = {
        "test_accuracy": accuracy,
        "validation_accuracy": None,
        "test_loss": 0.3,
        "train_seconds": 2.0,
        "peak_live_tensor_bytes": 1000,
        "peak_cuda_reserved_bytes": None,
    }
    folder.write_result(
        cell,
        state=state,
        reason=None if state == "done" else f"it is {state}",
        metrics=metrics if state == "done" else {},
        report={},
        provenance={"sources_hash": "aaaa"},
        shared_machine=False,
    )


def declared(path: Path, grid: Grid) -> tuple[RunFolder, list[Cell]]:
    folder = RunFolder(path)
    folder.open(grid)
    cells = expand(grid)
    for cell in cells:
        folder.declare(cell)
    return folder, cells
