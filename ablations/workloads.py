"""Models and data sets by name. Data is decoded once to uint8, kept on the training device and augmented there in batches.

Augmentation (crop after padding by 4, horizontal flip) is keyed by (seed, epoch, sample index) through an integer hash, never by
batch shape, so that paired arms see the same images whatever their batches. Nothing is downloaded unless asked for. Source: ours.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triaccel.types import TriAccelError

__all__ = ["DATASETS", "MODELS", "Images", "ResidentImages", "WorkloadError", "build_model", "load_images"]

PAD = 4


class WorkloadError(TriAccelError):
    """Unknown model or data set, or images that are not there; the message says which, where they go, and what works without."""


# ---------------------------------------------------------------- models


class _Block(nn.Module):
    """Two 3×3 convolutions with a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, inside, H, W) -> (B, outside, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet8(nn.Module):
    """Stem, three blocks, one linear layer (arXiv 1512.03385, section 4.2, with n = 1); for quick runs."""

    def __init__(self, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.block1 = _Block(width, width, 1)
        self.block2 = _Block(width, 2 * width, 2)
        self.block3 = _Block(2 * width, 4 * width, 2)
        self.fc = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, num_classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.block3(self.block2(self.block1(x)))
        return self.fc(x.mean((2, 3)))


def _torchvision(name: str) -> Callable[[int], nn.Module]:
    def build(num_classes: int) -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)(weights=None, num_classes=num_classes)
        return model

    return build


def _resnet18_cifar(num_classes: int) -> nn.Module:
    model = _torchvision("resnet18")(num_classes)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "resnet18": _torchvision("resnet18"),
    "efficientnet_b0": _torchvision("efficientnet_b0"),
    "resnet18-cifar": _resnet18_cifar,
    "resnet8": ResNet8,
}
"""Number of classes -> model. The torchvision models are unchanged, with the ImageNet stem, as the paper seems to have them."""


def build_model(name: str, *, num_classes: int, seed: int, device: torch.device) -> nn.Module:
    """Model ``name`` with weights drawn from ``seed``, channels_last, on ``device``.

    Raises:
        WorkloadError: no such model.
    """
    if name not in MODELS:
        raise WorkloadError(f"unknown model {name!r}; the models are {', '.join(MODELS)}")
    torch.manual_seed(seed)
    return MODELS[name](num_classes).to(device, memory_format=torch.channels_last)


# ---------------------------------------------------------------- data


@dataclass(frozen=True, slots=True)
class Images:
    """Decoded images.

    Attributes:
        images: uint8 (N, 3, H, W).
        labels: int64 (N,).
        classes: number of classes.
        flip: whether a mirrored image is still of its class.
    """

    images: Tensor
    labels: Tensor
    classes: int
    flip: bool = True

    def subset(self, count: int | None, *, seed: int = 0) -> Images:
        """``count`` images drawn once, the same for every run; all where ``count`` is ``None``.

        Raises:
            WorkloadError: there are fewer.
        """
        if count is None or count == len(self.labels):
            return self
        if count > len(self.labels):
            raise WorkloadError(
                f"{count} images asked for, the data set has {len(self.labels)}; lower the number"
            )
        chosen = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))[:count]
        return Images(self.images[chosen], self.labels[chosen], self.classes, self.flip)


def _digits(root: Path, download: bool) -> tuple[Images, Images]:
    del root, download
    table = _digits_table()
    small = torch.from_numpy(table[:, :-1].reshape(-1, 1, 8, 8).astype(np.float32)) / 16.0
    large = F.interpolate(small, size=(32, 32), mode="bilinear", align_corners=False)
    images = (large * 255.0).round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    labels = torch.from_numpy(table[:, -1].astype(np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return tuple(Images(images[part], labels[part], 10, flip=False) for part in (train, test))  # type: ignore[return-value]


def _digits_table() -> np.ndarray:
    """scikit-learn's digits, (1797, 65): pixels in [0, 16] and the label.

    Read from the package's own file where it lies where it did so far: importing scikit-learn takes a second.
    """
    found = importlib.util.find_spec("sklearn")
    places = found.submodule_search_locations if found else None
    path = Path(places[0]) / "datasets" / "data" / "digits.csv.gz" if places else None
    if path is not None and path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


def _torchvision_set(name: str, files: str) -> Callable[[Path, bool], tuple[Images, Images]]:
    def load(root: Path, download: bool) -> tuple[Images, Images]:
        import torchvision

        kind = getattr(torchvision.datasets, name)
        try:
            sets = [kind(root, train=train, download=download) for train in (True, False)]
        except (RuntimeError, OSError) as error:
            raise WorkloadError(
                f"{name} is not in {root} ({error}): put {files} there, or pass --download with a network; "
                "'digits' works without any file, and folder:PATH takes images of your own"
            ) from error
        return tuple(  # type: ignore[return-value]
            Images(
                _three(np.asarray(s.data)),
                torch.as_tensor(np.asarray(s.targets), dtype=torch.int64),
                len(s.classes),
            )
            for s in sets
        )

    return load


def _three(data: np.ndarray) -> Tensor:
    """(N, H, W) or (N, H, W, 3) uint8 -> (N, 3, 32, 32)-like; 28-pixel images are padded to 32."""
    images = torch.from_numpy(data)
    images = images[:, None].expand(-1, 3, -1, -1) if images.dim() == 3 else images.permute(0, 3, 1, 2)
    if images.shape[-1] == 28:
        images = F.pad(images, (2, 2, 2, 2))
    return images.contiguous()


def _cifar_jpeg(root: Path, download: bool) -> tuple[Images, Images]:
    """CIFAR-10 re-encoded as JPEG: from an unpacked folder or the archive ``cifar10-jpeg.tar.xz``."""
    del download
    named = os.environ.get("TRIACCEL_CIFAR_JPEG")
    places = [Path(named)] if named else []
    places += [root / "cifar10-jpeg", root / "cifar10-jpeg.tar.xz"]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise WorkloadError(
            f"cifar10-jpeg is not in {root}: put the folder cifar10-jpeg (train/<class>/*.jpg, test/<class>/*.jpg) or the "
            "archive cifar10-jpeg.tar.xz there, or name either in TRIACCEL_CIFAR_JPEG; 'digits' works without any file"
        )
    if found.is_dir():
        return _folder(found)
    unpacked = root / "cifar10-jpeg"
    unpacked.parent.mkdir(parents=True, exist_ok=True)
    partial = unpacked.with_name(f".{unpacked.name}.{os.getpid()}")
    with tarfile.open(found) as tar:
        tar.extractall(partial, filter="data")
    inner = partial if (partial / "train").is_dir() else next(partial.iterdir())
    try:
        inner.rename(unpacked)
    except OSError:
        if not (unpacked / "train").is_dir():  # else another process was first
            raise
    return _folder(unpacked)


def _folder(root: Path) -> tuple[Images, Images]:
    """``root/train/<class>/*`` and ``root/test/<class>/*`` (or ``val``), or ``root/<class>/*`` split 5:1 by a hash of names."""
    if not root.is_dir():
        raise WorkloadError(
            f"no folder {root}: give folder:PATH with PATH/train/<class>/IMAGE and PATH/test/<class>/IMAGE"
        )
    test = next((root / name for name in ("test", "val", "validation") if (root / name).is_dir()), None)
    if (root / "train").is_dir() and test is not None:
        classes = sorted(p.name for p in (root / "train").iterdir() if p.is_dir())
        parts = [_decode(root / "train", classes), _decode(test, classes)]
    elif (root / "train").is_dir() or test is not None:
        raise WorkloadError(
            f"{root} has {'train' if test is None else test.name}/ but no {'test' if test is None else 'train'}/: give both, or "
            "class folders alone, which are then split"
        )
    else:
        classes = sorted(p.name for p in root.iterdir() if p.is_dir())
        images, labels, names = _decode(root, classes)
        split = [hashlib.sha256(name.encode()).digest()[0] % 6 == 0 for name in names]
        held = torch.tensor(split, dtype=torch.bool)
        parts = [(images[~held], labels[~held], []), (images[held], labels[held], [])]
    for part, label in zip(parts, ("training", "test"), strict=True):
        if len(part[1]) == 0:
            raise WorkloadError(
                f"{root} has no {label} images: expected <class>/IMAGE files (jpg, png, bmp, webp) in class folders"
            )
    return tuple(Images(images, labels, len(classes)) for images, labels, _ in parts)  # type: ignore[return-value]


def _decode(root: Path, classes: list[str]) -> tuple[Tensor, Tensor, list[str]]:
    from PIL import Image, UnidentifiedImageError

    files = [
        (path, index)
        for index, name in enumerate(classes)
        if (root / name).is_dir()
        for path in sorted((root / name).iterdir())
        if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".bmp", ".webp")
    ]
    if not files:
        return torch.empty(0, 3, 32, 32, dtype=torch.uint8), torch.empty(0, dtype=torch.int64), []
    digest = hashlib.sha256(
        "\n".join(f"{p}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p, _ in files).encode()
    ).hexdigest()
    cache = _cache_folder() / f"images-{digest[:24]}.npy"
    labels = torch.tensor([index for _, index in files])
    names = [f"{classes[index]}/{path.name}" for path, index in files]
    if cache.is_file():
        try:
            data = np.load(cache, allow_pickle=False)
            if len(data) == len(files):
                return torch.from_numpy(data), labels, names
        except (ValueError, OSError):
            cache.unlink(missing_ok=True)  # cut short by a crash: decode again
    first: tuple[int, int] | None = None
    decoded = []
    for path, _ in files:
        try:
            with Image.open(path) as image:
                array = np.asarray(image.convert("RGB"))
        except (UnidentifiedImageError, OSError) as error:
            raise WorkloadError(f"{path} is not a readable image ({error}): replace or remove it") from error
        first = first or array.shape[:2]
        if array.shape[:2] != first:
            raise WorkloadError(
                f"{path} has size {array.shape[:2]}, {files[0][0]} has {first}: resize the images to one size"
            )
        decoded.append(array)
    data = np.ascontiguousarray(np.stack(decoded).transpose(0, 3, 1, 2))
    partial = cache.with_name(f".{cache.stem}.{os.getpid()}.npy")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.save(partial, data, allow_pickle=False)
        os.replace(partial, cache)
    except OSError:
        partial.unlink(missing_ok=True)  # a cache that cannot be kept costs time, not the run
    return torch.from_numpy(data), labels, names


def _cache_folder() -> Path:
    base = os.environ.get("TRIACCEL_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "tri-accel" if base else Path.home() / ".cache" / "tri-accel"


DATASETS: dict[str, Callable[[Path, bool], tuple[Images, Images]]] = {
    "digits": _digits,
    "cifar10": _torchvision_set("CIFAR10", "cifar-10-python.tar.gz, unpacked to cifar-10-batches-py/,"),
    "cifar100": _torchvision_set("CIFAR100", "cifar-100-python.tar.gz, unpacked to cifar-100-python/,"),
    "fashion-mnist": _torchvision_set("FashionMNIST", "FashionMNIST/raw/*-ubyte"),
    "cifar10-jpeg": _cifar_jpeg,
}
"""Name -> loader of (train, test)."""


def load_images(name: str, *, root: Path | str = "data", download: bool = False) -> tuple[Images, Images]:
    """Training and test images of data set ``name``.

    Args:
        name: a name of ``DATASETS``, or ``folder:PATH`` in ImageFolder layout.
        root: where data sets lie.
        download: let torchvision fetch what is missing.

    Raises:
        WorkloadError: no such data set, or its files are missing or unreadable.
    """
    if name.startswith("folder:"):
        return _folder(Path(name.removeprefix("folder:")))
    if name not in DATASETS:
        raise WorkloadError(
            f"unknown data set {name!r}; the data sets are {', '.join(DATASETS)}, folder:PATH"
        )
    return DATASETS[name](Path(root), download)


def held_out(train: Images, *, seed: int = 0) -> tuple[Images, Images]:
    """Training images without a tenth, and that tenth: the validation split, the same for every run."""
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(1_000_003 + seed))
    count = max(1, len(order) // 10)
    parts = order[count:], order[:count]
    return tuple(Images(train.images[p], train.labels[p], train.classes, train.flip) for p in parts)  # type: ignore[return-value]


class ResidentImages:
    """Images on the training device, augmented there by index.

    Args:
        data: decoded images.
        mean: per channel, (3,), of pixel values in [0, 1].
        std: per channel, (3,).
        device: the training device.
        augment: crop and flip.
        seed: of the augmentation.
    """

    def __init__(
        self, data: Images, *, mean: Tensor, std: Tensor, device: torch.device, augment: bool, seed: int
    ) -> None:
        self._flip = augment and data.flip
        self._augment = augment
        self._seed = seed
        images = F.pad(data.images, (PAD,) * 4) if augment else data.images
        # NHWC in memory: a gathered batch is channels_last without a copy
        self._images = images.permute(0, 2, 3, 1).contiguous().to(device)
        self._labels = data.labels.to(device)
        self._scale = (1.0 / (255.0 * std)).to(device)
        self._shift = (mean / std).to(device)

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Batch of samples ``indices`` (B,) in ``epoch``: float32 (B, 3, H, W) channels_last, and labels (B,)."""
        device = self._labels.device
        indices = indices.to(device)
        if self._augment:
            images = self._crop(indices, epoch)
        else:
            images = self._images[indices]
        pixels = images.float().mul_(self._scale).sub_(self._shift)
        return pixels.permute(0, 3, 1, 2), self._labels[indices]

    def _crop(self, indices: Tensor, epoch: int) -> Tensor:
        draws = _hash(indices, seed=self._seed, epoch=epoch)
        span = 2 * PAD + 1
        side = self._images.shape[1] - 2 * PAD
        top, left = draws % span, (draws // span) % span
        window = torch.arange(side, device=indices.device)
        rows = top[:, None] + window
        columns = left[:, None] + window
        if self._flip:
            mirrored = ((draws // span**2) % 2).bool()
            columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        return self._images[indices[:, None, None], rows[:, :, None], columns[:, None, :]]


def _hash(indices: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Uniform integers in [0, 2³¹) from (seed, epoch, index), the same on every device (splitmix-like, 31 bits a round)."""
    value = indices * 0x9E3779B1 + (seed * 0x85EBCA77 + epoch * 0xC2B2AE3D + 0x27D4EB2F) % (1 << 31)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 0x1B56C4E9)):
        value = value & 0x7FFFFFFF
        value = (value ^ (value >> shift)) * factor
    value = value & 0x7FFFFFFF
    return value ^ (value >> 14)


def statistics(train: Images) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel of pixels in [0, 1], (3,) each."""
    pixels = train.images.permute(1, 0, 2, 3).reshape(3, -1)
    sums = torch.stack([channel.double().sum() for channel in pixels])
    squares = torch.stack([channel.double().square().sum() for channel in pixels])
    mean = sums / pixels.shape[1]
    variance = (squares / pixels.shape[1] - mean.square()).clamp_min(1e-12)
    return (mean / 255.0).float(), (variance.sqrt() / 255.0).float()
