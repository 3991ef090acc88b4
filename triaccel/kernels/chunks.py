"""Tables through which one launch reaches every tensor of a model.

Tensors are cut into chunks of at most ``CHUNK`` entries, ordered by segment, one program each. The layout (which
tensor, where in it, how long) depends on sizes alone and is built once; addresses are sent only when they changed, from pinned
memory, so nothing waits for the device. Cost: 16 bytes per chunk, 8 per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["CHUNK", "ChunkPlan", "chunk_plan", "flat", "same_order", "send"]

CHUNK = 16384
"""Entries of one program: counts stay exact in FP32, and a model of 25 million parameters gives about 1,600 programs."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Layout of a list of tensors.

    Attributes:
        chunks: number of chunks, C.
        segments: number of segments, S.
        tensor: (C,) int32, which tensor.
        offset: (C,) int64, first entry within it.
        size: (C,) int32, entries.
        start: (S + 1,) int32, chunks of segment s are ``start[s] : start[s + 1]``.
        count: (S,) float64, entries per segment.
    """

    chunks: int
    segments: int
    tensor: Tensor
    offset: Tensor
    size: Tensor
    start: Tensor
    count: Tensor


@lru_cache(maxsize=4096)  # gradient release asks for one layout per parameter
def chunk_plan(
    numels: tuple[int, ...], segments: tuple[int, ...], segment_count: int, device: torch.device
) -> ChunkPlan:
    """Layout for tensors of ``numels`` entries, tensor i in segment ``segments[i]`` of ``segment_count``."""
    tensor: list[int] = []
    offset: list[int] = []
    size: list[int] = []
    start = [0] * (segment_count + 1)
    count = [0.0] * segment_count
    order = sorted(range(len(numels)), key=lambda i: segments[i])
    for i in order:
        count[segments[i]] += numels[i]
        for first in range(0, numels[i], CHUNK):
            tensor.append(i)
            offset.append(first)
            size.append(min(CHUNK, numels[i] - first))
            start[segments[i] + 1] += 1
    for s in range(segment_count):
        start[s + 1] += start[s]
    return ChunkPlan(
        chunks=len(tensor),
        segments=segment_count,
        tensor=torch.tensor(tensor, dtype=torch.int32, device=device),
        offset=torch.tensor(offset, dtype=torch.int64, device=device),
        size=torch.tensor(size, dtype=torch.int32, device=device),
        start=torch.tensor(start, dtype=torch.int32, device=device),
        count=torch.tensor(count, dtype=torch.float64, device=device),
    )


def send(values: Sequence[int] | Sequence[float], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small table on ``device``, without waiting for it; sent once while its values stay the same."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _sent(tuple(values), dtype, device, stream)


@lru_cache(maxsize=1024)
def _sent(values: tuple[float, ...], dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    """One table per stream: work on another stream could read it before it has arrived."""
    table = torch.tensor(values, dtype=dtype)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _dense(tensor: Tensor) -> bool:
    """Whether the entries fill one run of memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """All entries in memory order, (numel,): a view where they fill one run of memory, a copy otherwise."""
    if tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    if _dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1).contiguous()


def same_order(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with its entries in the memory order of the dense ``like``: itself, or a copy."""
    if tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous()):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
