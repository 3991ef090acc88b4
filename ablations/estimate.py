"""A rough estimate of a cell's time, for ``--dry-run`` and before the first cell has ended. Needs no torch."""

from __future__ import annotations

from .grid import Cell

__all__ = ["estimate_seconds"]

# Images per second in FP32 training at 32×32, measured on 2 x86-64 cores with AVX512-BF16; for CUDA a guess from public figures
# of an A100-class card, to be read as an order of magnitude.
_RATE = {
    "cpu": {"resnet18": 700.0, "efficientnet_b0": 700.0, "resnet18-cifar": 60.0, "resnet8": 4000.0},
    "cuda": {"resnet18": 12000.0, "efficientnet_b0": 9000.0, "resnet18-cifar": 9000.0, "resnet8": 30000.0},
}
_SAMPLES = {
    "digits": 1437,
    "cifar10": 50000,
    "cifar100": 50000,
    "cifar10-jpeg": 50000,
    "fashion-mnist": 60000,
}
_START = 3.0


def estimate_seconds(cell: Cell, *, device: str) -> float:
    """Seconds that ``cell`` may take on ``device``, evaluation and start included; within a factor of about two.

    A data set of unknown size counts as 10,000 images.
    """
    kind = "cuda" if device.startswith("cuda") else "cpu"
    samples = cell.settings["train_samples"] or _SAMPLES.get(cell.dataset, 10000)
    rate = _RATE[kind].get(cell.model, 500.0)
    if cell.arm.startswith("amp-bf16") and kind == "cpu" and cell.model == "efficientnet_b0":
        rate /= 2.0
    tests = (
        0.2 * samples / (3 * rate) * (cell.settings["epochs"] if cell.settings["evaluate"] == "epoch" else 1)
    )
    return _START + samples * cell.settings["epochs"] / rate + tests
