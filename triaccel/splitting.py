"""A batch of any structure as samples: how many, and cut into consecutive pieces.

Nested mappings, tuples, named tuples and lists of tensors, arrays and lists of strings or numbers are understood; the first
dimension of every entry is the samples. Pieces are views: cost and memory do not depend on the batch. What cannot be told
apart by samples is refused by its place in the batch. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from .types import TriAccelError

__all__ = ["batch_length", "map_tensors", "micro_batch_sizes", "split_batch"]


def _leaf_length(leaf: Any, where: str) -> int | None:
    if leaf is None:
        return None
    if isinstance(leaf, Tensor | np.ndarray):
        if leaf.ndim == 0:
            raise TriAccelError(
                f"the batch holds a single number at {where}: it cannot be split by samples; "
                "let collate_fn give one entry per sample"
            )
        return len(leaf)
    if isinstance(leaf, list | tuple):
        return len(leaf)
    raise TriAccelError(
        f"the batch holds a {type(leaf).__name__} at {where}, whose samples cannot be told apart; "
        "let collate_fn return tensors, arrays, lists of strings or numbers, or mappings, tuples and lists of them"
    )


def _is_leaf(batch: Any) -> bool:
    """Mappings and sequences of containers are nodes; a sequence of strings or numbers is a leaf with one entry per sample."""
    if isinstance(batch, Mapping):
        return False
    if isinstance(batch, list | tuple):
        return not batch or all(isinstance(entry, str | bytes | bool | int | float) for entry in batch)
    return True


def _leaves(batch: Any, where: str = "batch") -> Iterator[tuple[str, Any]]:
    if _is_leaf(batch):
        yield where, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{where}[{key!r}]")
    else:
        for index, value in enumerate(batch):
            yield from _leaves(value, f"{where}[{index}]")


def _rebuild(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    if _is_leaf(batch):
        return leaf(batch)
    if isinstance(batch, Mapping):
        values = {key: _rebuild(value, leaf) for key, value in batch.items()}
        return values if type(batch) is dict else type(batch)(values)  # type: ignore[call-arg]
    entries = [_rebuild(value, leaf) for value in batch]
    if hasattr(batch, "_fields"):
        return type(batch)(*entries)
    return type(batch)(entries)


def _window(leaf: Any, *, start: int, stop: int) -> Any:
    return None if leaf is None else leaf[start:stop]


def batch_length(batch: Any) -> int:
    """Samples in ``batch``: the leading dimension that its tensors share.

    Args:
        batch: a tensor ``(B, ...)``, or nested mappings, tuples and lists of tensors, arrays and lists of strings or numbers.

    Raises:
        TriAccelError: two entries disagree on B, an entry has no samples dimension or an unknown type, or there is none.

    Source: ours.
    """
    length: int | None = None
    first = ""
    for where, leaf in _leaves(batch):
        found = _leaf_length(leaf, where)
        if found is None:
            continue
        if length is None:
            length, first = found, where
        elif found != length:
            raise TriAccelError(
                f"the batch holds {length} samples at {first} but {found} at {where}; "
                "the first dimension of every entry must be the samples"
            )
    if length is None:
        raise TriAccelError(
            f"the batch ({type(batch).__name__}) holds no tensor: its number of samples is unknown"
        )
    return length


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """``batch`` in consecutive pieces of ``sizes`` samples, same structure; tensors are views, nothing is copied.

    Raises:
        TriAccelError: the sizes do not add up to the batch's samples, or it cannot be split (see ``batch_length``).

    Source: ours.
    """
    length = batch_length(batch)
    if sum(sizes) != length or any(size < 1 for size in sizes):
        raise TriAccelError(f"cannot split a batch of {length} samples into pieces of {list(sizes)}")
    if len(sizes) == 1:
        return [batch]
    pieces = []
    start = 0
    for size in sizes:
        pieces.append(_rebuild(batch, partial(_window, start=start, stop=start + size)))
        start += size
    return pieces


def micro_batch_sizes(length: int, limit: int, *, minimum: int = 1) -> list[int]:
    """Sizes of consecutive micro-batches of at most ``limit`` samples, none below ``minimum`` (2 for BatchNorm).

    A last piece that would be too small borrows from the one before it; where that would leave both too small they are
    merged, which is the only case that exceeds ``limit``.

    Source: ours.
    """
    if length < 1 or limit < 1:
        raise TriAccelError(
            f"cannot cut {length} samples into micro-batches of at most {limit}: both must be at least 1"
        )
    limit = max(limit, minimum)
    full, rest = divmod(length, limit)
    sizes = [limit] * full + ([rest] if rest else [])
    if len(sizes) > 1 and rest and rest < minimum:
        borrowed = minimum - rest
        if limit - borrowed >= minimum:
            sizes[-2:] = [limit - borrowed, minimum]
        else:
            sizes[-2:] = [limit + rest]
    return sizes


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``batch`` with ``function`` applied to each of its tensors, same structure."""
    return _rebuild(batch, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)
