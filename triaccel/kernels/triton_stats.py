# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False, check-untyped-defs=False
"""Triton kernels of the gradient statistics: one launch over all chunks of a dtype, one over segments.

Each program reads one chunk of at most 16,384 entries once, accumulates in FP32 and writes six partials; then one program per
segment adds its partials in FP64, always in the same order, so equal gradients give equal bits. Bandwidth-bound:
4 bytes read per FP32 entry. Nothing waits for the device.
Eager reference: ``reference.grad_stats``. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import ChunkPlan, chunk_plan, flat, send
from .rules import GradStats

__all__ = ["BLOCK", "WARPS", "add_partials", "gather_kernel", "grad_stats", "partials_kernel"]

BLOCK = 1024
"""Entries per turn of the loop in one program."""
WARPS = 8
"""Warps per program: four FP32 entries per thread and turn, one 16-byte load; with eight the extremes spill registers."""
GATHER = 128
"""Chunks added at once by the second kernel."""


@triton.jit
def add_partials(grad, inside, total, square, bad, top, nonzero, tiny, EXTREMES: tl.constexpr):
    """Running statistics of one block; entries where ``inside`` is false count as nothing."""
    magnitude = tl.abs(grad)
    # False for NaN as well as for infinity.
    finite = magnitude <= 3.4028234663852886e38
    kept = tl.where(finite, grad, 0.0)
    total += kept
    square += kept * kept
    bad += tl.where(inside & (finite == 0), 1.0, 0.0)
    if EXTREMES:
        top = tl.maximum(top, tl.where(finite, magnitude, 0.0))
        nonzero += tl.where(grad != 0.0, 1.0, 0.0)
        tiny += tl.where((magnitude > 0.0) & (magnitude < 5.9604644775390625e-08), 1.0, 0.0)
    return total, square, bad, top, nonzero, tiny


@triton.jit
def write_partials(partials, chunk, total, square, bad, top, nonzero, tiny, EXTREMES: tl.constexpr):
    """One row of six partials."""
    row = partials + chunk * 6
    tl.store(row, tl.sum(total))
    tl.store(row + 1, tl.sum(square))
    tl.store(row + 2, tl.sum(bad))
    if EXTREMES:
        tl.store(row + 3, tl.max(top))
        tl.store(row + 4, tl.sum(nonzero))
        tl.store(row + 5, tl.sum(tiny))


@triton.jit
def partials_kernel(
    addresses,
    tensor_of,
    offset_of,
    size_of,
    partials,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    EXTREMES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk: six partials. ``addresses`` (T,) int64; the layout as in ``ChunkPlan``; ``partials`` (C, 6) float32."""
    chunk = tl.program_id(0)
    size = tl.load(size_of + chunk)
    address = tl.load(addresses + tl.load(tensor_of + chunk))
    offset = tl.multiple_of(tl.load(offset_of + chunk), 16)
    data = address.to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    data += offset
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.float32)
    top = tl.zeros((BLOCK,), tl.float32)
    nonzero = tl.zeros((BLOCK,), tl.float32)
    tiny = tl.zeros((BLOCK,), tl.float32)
    full = size // BLOCK * BLOCK
    # Whole blocks need no mask, which is what lets the compiler load 16 bytes at once.
    for start in range(0, full, BLOCK):
        grad = tl.load(data + start + lane).to(tl.float32)
        total, square, bad, top, nonzero, tiny = add_partials(
            grad, lane >= 0, total, square, bad, top, nonzero, tiny, EXTREMES
        )
    if full < size:
        inside = lane < size - full
        grad = tl.load(data + full + lane, mask=inside, other=0.0).to(tl.float32)
        total, square, bad, top, nonzero, tiny = add_partials(
            grad, inside, total, square, bad, top, nonzero, tiny, EXTREMES
        )
    write_partials(partials, chunk, total, square, bad, top, nonzero, tiny, EXTREMES)


@triton.jit
def gather_kernel(
    partials,
    start_of,
    count_of,
    out,
    EXTREMES: tl.constexpr,
    GATHER: tl.constexpr,
):
    """One segment: ``out`` (S, 7) float64 from its chunks' partials."""
    segment = tl.program_id(0)
    first = tl.load(start_of + segment)
    last = tl.load(start_of + segment + 1)
    lane = tl.arange(0, GATHER)
    total = tl.zeros((GATHER,), tl.float64)
    square = tl.zeros((GATHER,), tl.float64)
    bad = tl.zeros((GATHER,), tl.float64)
    top = tl.zeros((GATHER,), tl.float32)
    nonzero = tl.zeros((GATHER,), tl.float64)
    tiny = tl.zeros((GATHER,), tl.float64)
    for start in range(first, last, GATHER):
        inside = start + lane < last
        row = partials + (start + lane) * 6
        total += tl.load(row, mask=inside, other=0.0).to(tl.float64)
        square += tl.load(row + 1, mask=inside, other=0.0).to(tl.float64)
        bad += tl.load(row + 2, mask=inside, other=0.0).to(tl.float64)
        if EXTREMES:
            top = tl.maximum(top, tl.load(row + 3, mask=inside, other=0.0))
            nonzero += tl.load(row + 4, mask=inside, other=0.0).to(tl.float64)
            tiny += tl.load(row + 5, mask=inside, other=0.0).to(tl.float64)
    result = out + segment * 7
    tl.store(result, tl.load(count_of + segment))
    tl.store(result + 1, tl.sum(total))
    tl.store(result + 2, tl.sum(square))
    tl.store(result + 3, tl.sum(bad))
    if EXTREMES:
        tl.store(result + 4, tl.max(top).to(tl.float64))
        tl.store(result + 5, tl.sum(nonzero))
        tl.store(result + 6, tl.sum(tiny))
    else:
        missing = tl.full((), float("nan"), tl.float64)
        tl.store(result + 4, missing)
        tl.store(result + 5, missing)
        tl.store(result + 6, missing)


_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def gather(partials: Tensor, plan: ChunkPlan, *, extremes: bool) -> GradStats:
    """Add the partials of each segment, on the device."""
    values = torch.empty(plan.segments, 7, dtype=torch.float64, device=partials.device)
    if plan.segments:
        gather_kernel[(plan.segments,)](
            partials, plan.start, plan.count, values, EXTREMES=extremes, GATHER=GATHER, num_warps=4
        )
    return GradStats(values)


def aligned(addresses: Sequence[int]) -> bool:
    """Whether every address allows 16-byte loads."""
    return all(address % 16 == 0 for address in addresses)


def grad_stats(
    grads: Sequence[Tensor],
    segments: Sequence[int],
    *,
    segment_count: int,
    extremes: bool = False,
    block: int = BLOCK,
    warps: int = WARPS,
) -> GradStats:
    """Statistics of each segment's gradients; see ``triaccel.kernels.grad_stats``."""
    device = grads[0].device
    result: GradStats | None = None
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        chosen = [i for i, grad in enumerate(grads) if grad.dtype == dtype]
        entries = [flat(grads[i]) for i in chosen]
        plan = chunk_plan(
            tuple(t.numel() for t in entries),
            tuple(segments[i] for i in chosen),
            segment_count,
            device,
        )
        partials = torch.empty(max(1, plan.chunks), 6, dtype=torch.float32, device=device)
        addresses = [t.data_ptr() for t in entries]
        if plan.chunks:
            partials_kernel[(plan.chunks,)](
                send(addresses, dtype=torch.int64, device=device),
                plan.tensor,
                plan.offset,
                plan.size,
                partials,
                ELEMENT=_ELEMENTS[dtype],
                ALIGNED=aligned(addresses),
                EXTREMES=extremes,
                BLOCK=block,
                num_warps=warps,
            )
        stats = gather(partials, plan, extremes=extremes)
        result = stats if result is None else result.merged(stats)
    assert result is not None
    return result
