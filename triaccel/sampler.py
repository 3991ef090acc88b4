"""Batches of a size that may change at any time, cut from one permutation per epoch.

Epoch e visits ``randperm(n)`` drawn from (seed, e); a batch is the next B entries of it, where B is asked for when the batch is
formed. Whatever the sequence of sizes, each sample is seen exactly once per epoch, and the number of samples handed
out is the whole position: a run resumes bit-exactly in mid-epoch from (epoch, position, sizes already formed). Cost: one
``randperm`` per epoch; resident tensors are indexed directly, other data sets go through ``DataLoader`` workers.

Random transforms of a map-style data set draw from generators keyed by (seed, epoch, sample index), so augmentation depends
neither on the batch's shape nor on the number of workers. Source: ours.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from .splitting import batch_length, map_tensors, micro_batch_sizes, split_batch
from .types import TriAccelError

__all__ = ["ElasticBatches", "batch_length", "micro_batch_sizes", "split_batch"]

_MASK = (1 << 64) - 1


def _mix(*values: int) -> int:
    """63-bit key of a few integers (SplitMix64's finaliser), the same on every platform and run."""
    key = 0x9E3779B97F4A7C15
    for value in values:
        key = (key ^ (value & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key >> 1


class _Keyed(Dataset[Any]):
    """A map-style data set read by (epoch, index), its random transforms keyed by (seed, epoch, index)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        mixed = _mix(self.seed, epoch, index)
        torch.default_generator.manual_seed(mixed)
        random.seed(mixed)
        np.random.seed(mixed & 0xFFFFFFFF)
        return self.dataset[index]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        return [self[key] for key in keys]


class _Stream:
    """Batch sampler of a ``DataLoader``: lists of (epoch, index), formed as they are asked for."""

    def __init__(self, form: Callable[[], Iterator[tuple[int, Tensor]]]) -> None:
        self._form = form

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for epoch, indices in self._form():
            yield [(epoch, index) for index in indices.tolist()]


class ElasticBatches:
    """Iterates over batches for all epochs; the size is asked for when each batch is formed.

    Args:
        data: an object with ``fetch(indices: LongTensor (B,), epoch: int) -> batch`` and ``__len__`` (resident data with its own
            augmentation); a tuple or list of tensors of equal length, or a ``TensorDataset``; or any map-style data set.
        epochs: passes over the data.
        batch_size: called for the size of each batch, samples.
        seed: of the permutations and of the keys of random transforms.
        collate_fn: list of samples -> batch, for a map-style data set; ``None``: PyTorch's ``default_collate``.
        num_workers: processes that load a map-style data set. They prefetch; a batch that is larger than the size in force when
            its turn comes is split.
        tail: ``"keep"`` or ``"drop"`` the last partial batch of an epoch.
        device: where batches go; ``None``: they stay.
        minimum_micro: samples that every batch has at least (2 where the model has BatchNorm).

    Raises:
        TriAccelError: data without a length, shorter than one batch or of unequal lengths; options that could not be honoured.

    Source: ours.
    """

    def __init__(
        self,
        data: Any,
        *,
        epochs: int,
        batch_size: Callable[[], int],
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        tail: Literal["keep", "drop"] = "keep",
        device: torch.device | str | None = None,
        minimum_micro: int = 1,
    ) -> None:
        if epochs < 1 or minimum_micro < 1 or num_workers < 0:
            raise TriAccelError(
                f"epochs={epochs} and minimum_micro={minimum_micro} must be at least 1, num_workers={num_workers} at least 0"
            )
        self._batch_size = batch_size
        self._epochs = epochs
        self._seed = seed
        self._tail = tail
        self._device = None if device is None else torch.device(device)
        self._minimum = minimum_micro
        self._workers = num_workers
        self._bind(data, collate_fn)
        self._epoch = 0
        self._position = 0
        self._pending: deque[tuple[int, int, int]] = deque()
        self._last: tuple[int, int, int] | None = None
        self._order: tuple[int, Tensor] | None = None
        self._warned_size = False
        first = self._requested()
        if first > self._length:
            raise TriAccelError(
                f"the batch size {first} is larger than the data set ({self._length} samples); "
                f"lower batch.initial to {self._length} or less"
            )
        if self._length < minimum_micro:
            raise TriAccelError(
                f"the data set has {self._length} sample(s) but the model needs {minimum_micro} in a batch (BatchNorm); "
                "use more data or another normalisation"
            )

    def _bind(self, data: Any, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate_fn or default_collate
        loading = collate_fn is not None or self._workers > 0
        self._keyed: _Keyed | None = None
        if isinstance(data, Tensor):
            data = (data,)
        is_tensors = (
            isinstance(data, tuple | list) and len(data) > 0 and all(isinstance(t, Tensor) for t in data)
        )
        if hasattr(data, "fetch") or is_tensors:
            if loading:
                raise TriAccelError(
                    "collate_fn and num_workers are for map-style data sets; this data is resident and is indexed directly: "
                    "leave both out"
                )
            if is_tensors:
                self._take = _tensor_fetch(tuple(data))
                self._length = len(data[0])
            else:
                self._take = data.fetch
                self._length = len(data)
        elif isinstance(data, TensorDataset) and not loading:
            self._take = _tensor_fetch(data.tensors)
            self._length = len(data)
        else:
            if isinstance(data, IterableDataset) or not (
                hasattr(data, "__getitem__") and hasattr(data, "__len__")
            ):
                raise TriAccelError(
                    f"{type(data).__name__} has no length and index: elastic batches are cut from a permutation of the "
                    "samples; give tensors, an object with fetch(indices, epoch), or a map-style data set"
                )
            self._keyed = _Keyed(data, self._seed)
            self._take = self._load
            self._length = len(data)

    def _load(self, indices: Tensor, epoch: int) -> Any:
        """Samples of a map-style data set, loaded here, the process's own random streams left untouched."""
        assert self._keyed is not None
        before = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
        try:
            return self._collate([self._keyed[epoch, index] for index in indices.tolist()])
        finally:
            torch.default_generator.set_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])

    def _requested(self) -> int:
        size = int(self._batch_size())
        if size < 1:
            raise TriAccelError(f"batch_size() gave {size}; a batch has at least one sample")
        return max(size, self._minimum)

    @property
    def total_samples(self) -> int:
        """Samples that all epochs hold together; with ``tail="drop"`` at the size now in force."""
        if self._tail == "keep":
            return self._epochs * self._length
        size = self._requested()
        return self._epochs * (self._length // size) * size

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0; ``epochs`` at the end."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of that epoch handed out so far, prefetched ones not among them."""
        return self._position

    def __len__(self) -> int:
        """Samples in one epoch."""
        return self._length

    def _permutation(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(_mix(self._seed, epoch))
            self._order = epoch, torch.randperm(self._length, generator=generator)
        return self._order[1]

    def _size(self, remaining: int) -> int | None:
        """Samples of the next batch where ``remaining`` are left in the epoch; ``None``: the tail is dropped."""
        size = self._requested()
        if size > self._length and not self._warned_size:
            self._warned_size = True
            warnings.warn(
                f"the batch size has grown to {size}, past the data set ({self._length} samples): batches stay at "
                f"{self._length}; lower batch.maximum",
                stacklevel=2,
            )
        size = min(size, self._length)
        if remaining < size and self._tail == "drop":
            return None
        return micro_batch_sizes(remaining, size, minimum=self._minimum)[0]

    def _form(self) -> Iterator[tuple[int, Tensor]]:
        """(epoch, indices) of batch after batch from the position on; those formed before a checkpoint keep their sizes."""
        replayed = list(self._pending)
        self._pending.clear()
        for epoch, start, size in replayed:
            self._pending.append((epoch, start, size))
            yield epoch, self._permutation(epoch)[start : start + size]
        epoch, start = self._epoch, self._position
        if replayed:
            epoch, start = replayed[-1][0], replayed[-1][1] + replayed[-1][2]
        while epoch < self._epochs:
            remaining = self._length - start
            size_or_none = self._size(remaining) if remaining else None
            if size_or_none is None:
                epoch, start = epoch + 1, 0
                continue
            self._pending.append((epoch, start, size_or_none))
            yield epoch, self._permutation(epoch)[start : start + size_or_none]
            start += size_or_none

    def _hand_out(self, size: int) -> None:
        epoch, start, formed = self._pending.popleft()
        if size < formed:
            self._pending.appendleft((epoch, start + size, formed - size))
        self._last = epoch, start, size
        self._epoch, self._position = epoch, start + size
        if self._position == self._length:
            self._epoch, self._position = epoch + 1, 0

    def _loaded(self) -> Iterator[Any]:
        if self._workers == 0:
            for epoch, indices in self._form():
                yield self._take(indices, epoch)
            return
        yield from DataLoader(
            self._keyed,  # type: ignore[arg-type]
            batch_sampler=_Stream(self._form),
            collate_fn=self._collate,
            num_workers=self._workers,
            generator=torch.Generator().manual_seed(_mix(self._seed)),
            pin_memory=self._device is not None and self._device.type == "cuda",
        )

    def __iter__(self) -> Iterator[Any]:
        """Batches from the position on; a second iteration goes on where the first one stopped."""
        for loaded in self._loaded():
            size = self._pending[0][2]
            if self._workers and size > self._requested():
                length = batch_length(loaded)
                if length != size:
                    raise TriAccelError(
                        f"collate_fn made {length} samples of {size}: elastic batches need one entry per sample to split them"
                    )
            rest: Any = loaded
            while size:
                piece = (
                    micro_batch_sizes(size, self._requested(), minimum=self._minimum)[0]
                    if self._workers
                    else size
                )
                batch, *others = split_batch(rest, [piece, size - piece]) if piece < size else [rest]
                rest = others[0] if others else None
                self._hand_out(piece)
                size -= piece
                yield self._placed(batch)

    def _placed(self, batch: Any) -> Any:
        device = self._device
        if device is None:
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))

    def unread(self) -> None:
        """Take the last batch handed out back, so that a checkpoint taken now starts with its samples.

        Raises:
            TriAccelError: none was handed out since the start or since the last call.
        """
        if self._last is None:
            raise TriAccelError(
                "no batch to take back: none was handed out since the start or since the last unread()"
            )
        self._pending.appendleft(self._last)
        self._epoch, self._position = self._last[:2]
        self._last = None

    def draw(self, n: int, *, seed: int) -> Any:
        """A probe batch of ``n`` distinct samples, chosen by ``seed`` and the present epoch; the position does not move.

        Raises:
            TriAccelError: ``n`` is larger than the data set.
        """
        if not 1 <= n <= self._length:
            raise TriAccelError(
                f"cannot draw a probe batch of {n} from a data set of {self._length} samples; lower curvature.probe_batch"
            )
        epoch = min(self._epoch, self._epochs - 1)
        generator = torch.Generator().manual_seed(_mix(self._seed, seed, 1))
        indices = torch.randperm(self._length, generator=generator)[:n]
        return self._placed(self._take(self._permutation(epoch)[indices], epoch))

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position and the sizes of the batches formed but not handed out; plain JSON values."""
        return {
            "seed": self._seed,
            "length": self._length,
            "epoch": self._epoch,
            "position": self._position,
            "pending": [list(entry) for entry in self._pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; takes effect at the next ``iter()``.

        Raises:
            TriAccelError: the state is of other data or another seed.
        """
        for key, mine in (("length", self._length), ("seed", self._seed)):
            if state[key] != mine:
                raise TriAccelError(
                    f"the checkpoint's sampler has {key} {state[key]}, this one {mine}: the order of samples would differ; "
                    "resume with the same data and seed"
                )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._pending = deque((int(e), int(p), int(s)) for e, p, s in state["pending"])
        self._last = None


def _tensor_fetch(tensors: tuple[Tensor, ...]) -> Callable[[Tensor, int], Any]:
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise TriAccelError(
            f"the data's tensors have unequal lengths {lengths}; the first dimension must be the samples"
        )

    def fetch(indices: Tensor, epoch: int) -> tuple[Tensor, ...]:
        del epoch  # resident tensors are the same in every epoch
        return tuple(tensor[indices.to(tensor.device)] for tensor in tensors)

    return fetch
