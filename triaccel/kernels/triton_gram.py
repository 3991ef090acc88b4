# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False, check-untyped-defs=False
"""Triton kernels of the Gram matrix of per-sample gradients, by the two exact routes of DESIGN section 5.

With layer inputs a (N, B, T, I) and output gradients g (N, B, T, O) of N independent blocks (the groups of a convolution),
B samples and T positions, the gradient of sample i in block n is G_i = sum_t g_it a_it^T and K_ij = sum_n <G_i, G_j>.

- ``outer`` forms G a tile at a time for all samples, never the whole: B T I O multiply-adds and B^2 I O for K.
- ``pairs`` uses K_ij = sum_ts (a_it . a_js)(g_it . g_js): B^2 T^2 (I + O) / 2 multiply-adds, nothing formed.

All in FP32 (no TF32). Neither uses atomics: equal inputs give equal bits. Temporaries: ``outer`` one B x B matrix per program,
``pairs`` none.
Eager reference: ``reference.gram``. Source: ours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import TriAccelError

__all__ = ["OUTER_SAMPLES", "gram", "outer_kernel", "outer_tiles", "pairs_kernel"]

OUTER_SAMPLES = 128
"""Samples at most on the route ``outer``: their B x B matrix stays in registers."""


@triton.jit(do_not_specialize=["samples", "positions", "items", "programs"])
def outer_kernel(
    a,
    g,
    out,
    samples,
    positions,
    inputs,
    outputs,
    items,
    programs,
    SAMPLES: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """Tiles ``program``, ``program + programs``, … of all ``items``: one partial K into ``out`` (programs, B, B)."""
    program = tl.program_id(0)
    tiles_i = tl.cdiv(inputs, TILE_I)
    tiles_o = tl.cdiv(outputs, TILE_O)
    sample = tl.arange(0, SAMPLES)
    present = sample < samples
    result = tl.zeros((SAMPLES, SAMPLES), tl.float32)
    for item in range(program, items, programs):
        block = item // (tiles_i * tiles_o)
        o = item // tiles_i % tiles_o * TILE_O + tl.arange(0, TILE_O)
        i = item % tiles_i * TILE_I + tl.arange(0, TILE_I)
        row = (block.to(tl.int64) * samples + sample) * positions
        mask_o = present[:, None] & (o < outputs)[None, :]
        mask_i = present[:, None] & (i < inputs)[None, :]
        tile = tl.zeros((SAMPLES, TILE_O, TILE_I), tl.float32)
        for t in range(positions):
            left = tl.load(g + (row + t)[:, None] * outputs + o[None, :], mask=mask_o, other=0.0)
            right = tl.load(a + (row + t)[:, None] * inputs + i[None, :], mask=mask_i, other=0.0)
            tile += left[:, :, None] * right[:, None, :]
        gradients = tl.reshape(tile, (SAMPLES, TILE_O * TILE_I))
        result += tl.dot(gradients, tl.trans(gradients), input_precision="ieee")
    at = out + program.to(tl.int64) * samples * samples + sample[:, None] * samples + sample[None, :]
    tl.store(at, result, mask=present[:, None] & present[None, :])


@triton.jit(do_not_specialize=["blocks", "samples", "positions"])
def pairs_kernel(
    a,
    g,
    out,
    blocks,
    samples,
    positions,
    inputs,
    outputs,
    TILE_T: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """K_ij and K_ji into ``out`` (B, B)."""
    i = tl.program_id(0)
    j = tl.program_id(1)
    # K is symmetric: half the programs have nothing to do.
    if j <= i:
        t = tl.arange(0, TILE_T)
        k = tl.arange(0, TILE_K)
        result = tl.zeros((TILE_T, TILE_T), tl.float32)
        for n in range(blocks):
            first_i = (n * samples + i).to(tl.int64) * positions
            first_j = (n * samples + j).to(tl.int64) * positions
            for start_t in range(0, positions, TILE_T):
                row = start_t + t
                row_in = (row < positions)[:, None]
                for start_s in range(0, positions, TILE_T):
                    column = start_s + t
                    column_in = (column < positions)[:, None]
                    left = tl.zeros((TILE_T, TILE_T), tl.float32)
                    for start in range(0, inputs, TILE_K):
                        at = start + k
                        inside = (at < inputs)[None, :]
                        x = tl.load(
                            a + (first_i + row)[:, None] * inputs + at[None, :],
                            mask=row_in & inside,
                            other=0.0,
                        )
                        y = tl.load(
                            a + (first_j + column)[:, None] * inputs + at[None, :],
                            mask=column_in & inside,
                            other=0.0,
                        )
                        left += tl.dot(x, tl.trans(y), input_precision="ieee")
                    right = tl.zeros((TILE_T, TILE_T), tl.float32)
                    for start in range(0, outputs, TILE_K):
                        at = start + k
                        inside = (at < outputs)[None, :]
                        x = tl.load(
                            g + (first_i + row)[:, None] * outputs + at[None, :],
                            mask=row_in & inside,
                            other=0.0,
                        )
                        y = tl.load(
                            g + (first_j + column)[:, None] * outputs + at[None, :],
                            mask=column_in & inside,
                            other=0.0,
                        )
                        right += tl.dot(x, tl.trans(y), input_precision="ieee")
                    result += left * right
        value = tl.sum(tl.sum(result, axis=1), axis=0)
        tl.store(out + i * samples + j, value)
        tl.store(out + j * samples + i, value)


def outer_tiles(samples: int) -> tuple[int, int, int, int]:
    """(SAMPLES, TILE_O, TILE_I, warps) of ``outer_kernel``: 2,048 to 4,096 gradient entries held at once."""
    padded = max(16, triton.next_power_of_2(samples))
    return padded, *{16: (8, 32, 4), 32: (8, 16, 4), 64: (4, 8, 4), 128: (4, 8, 8)}[padded]


def gram(a: Tensor, g: Tensor, *, route: str, max_bytes: int) -> Tensor:
    """Gram matrix of per-sample gradients; see ``triaccel.kernels.gram``."""
    blocks, samples, positions, inputs = a.shape
    outputs = g.shape[3]
    a = a.contiguous()
    g = g.contiguous()
    if route == "pairs":
        out = torch.zeros(samples, samples, device=a.device)
        pairs_kernel[(samples, samples)](
            a, g, out, blocks, samples, positions, inputs, outputs, TILE_T=32, TILE_K=32, num_warps=4
        )
        return out
    if samples > OUTER_SAMPLES:
        raise TriAccelError(
            f"the Triton route 'outer' holds at most {OUTER_SAMPLES} samples, got {samples}: "
            "use route='pairs', backend='reference' or a smaller probe batch"
        )
    padded, tile_o, tile_i, warps = outer_tiles(samples)
    items = blocks * -(-inputs // tile_i) * -(-outputs // tile_o)
    if a.device.type == "cuda":
        programs = 4 * torch.cuda.get_device_properties(a.device).multi_processor_count
    else:
        programs = 4
    programs = max(1, min(items, programs, max_bytes // max(1, 4 * samples * samples)))
    partials = torch.zeros(programs, samples, samples, device=a.device)
    if items:
        outer_kernel[(programs,)](
            a,
            g,
            partials,
            samples,
            positions,
            inputs,
            outputs,
            items,
            programs,
            SAMPLES=padded,
            TILE_O=tile_o,
            TILE_I=tile_i,
            num_warps=warps,
        )
    return partials.sum(0)
