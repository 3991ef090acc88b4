"""Shared set-up: Triton's interpreter where there is no GPU, one seed, and the real images where they are at hand."""

import os
import tarfile
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The networks of the tests are too small to gain from threads, and two spinning threads stall whatever else runs on two cores.
torch.set_num_threads(1)

ARCHIVE = "cifar10-jpeg.tar.xz"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def _archive() -> Path | None:
    root = Path(__file__).resolve().parents[1]
    named = os.environ.get("TRIACCEL_CIFAR_JPEG")
    places = (
        [Path(named)]
        if named
        else [root.parent / "shared" / "data" / ARCHIVE, root / "shared" / "data" / ARCHIVE]
    )
    return next((place for place in places if place.is_file()), None)


@pytest.fixture(scope="session")
def cifar_jpeg(tmp_path_factory) -> Path:
    """Folder `train/<class>/*.jpg`, `test/<class>/*.jpg` with real CIFAR-10 images: 200 train and 40 test images a class."""
    archive = _archive()
    if archive is None:
        pytest.skip(f"no {ARCHIVE}: put it in ../shared/data or name it in TRIACCEL_CIFAR_JPEG")
    folder = tmp_path_factory.mktemp("cifar")
    keep = {"train": 200, "test": 40}
    count: dict[str, int] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if not member.isfile() or len(parts) < 3 or parts[-3] not in keep:
                continue
            key = "/".join(parts[-3:-1])
            if count.get(key, 0) >= keep[parts[-3]]:
                continue
            count[key] = count.get(key, 0) + 1
            tar.extract(member, folder, filter="data")
    return folder
