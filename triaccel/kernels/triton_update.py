# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False, check-untyped-defs=False
"""Triton kernel of the whole update: unscale, skip where non-finite, weight decay, momentum, step and statistics in one pass.

One launch for all parameters of a model: each program takes one chunk and finds its addresses and its rate in tables.
Bytes per entry: SGD with momentum 20 (16 with BF16 momentum), AdamW 28 (24); statistics of the same gradient read nothing more.

BF16 momentum is rounded stochastically: the 16 bits below BF16's last place are added to and cut, so that the mean is exact. They
come from Philox 4x32-10 (arXiv: Salmon et al., SC 2011) with counter (entry / 8, tensor key, step, 0) and the run's seed:
one call serves eight entries, and the result depends neither on block size nor on launch order.
Eager reference: ``reference.fused_update_``. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import chunk_plan, flat, same_order, send
from .rules import AdamWRule, GradStats, UpdateRule
from .triton_stats import add_partials, aligned, gather, write_partials

__all__ = ["BLOCK", "default_warps", "fused_update_", "update_kernel"]

BLOCK = 1024
"""Entries per turn of the loop in one program."""


def default_warps(*, adam: bool, stats: bool, low: bool) -> int:
    """Warps per program, the fewest and the most that spill no register on any target (``compile_targets``)."""
    return 8 if (adam or stats) and not low else 4


@triton.jit
def rounding_bits(seed, key, sequence, first, BLOCK: tl.constexpr):
    """(BLOCK,) int32 uniform on 0 … 65535 for entries ``first`` … ``first + BLOCK - 1``."""
    EIGHTH: tl.constexpr = BLOCK // 8
    counter = (first // 8 + tl.arange(0, EIGHTH)).to(tl.uint32)
    zero = counter * 0
    a, b, c, d = tl.philox(seed, counter, zero + key.to(tl.uint32), zero + sequence.to(tl.uint32), zero)
    words = tl.join(tl.join(a, b), tl.join(c, d))
    pairs = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(pairs, (BLOCK,)).to(tl.int32, bitcast=True)


@triton.jit
def to_bf16(values, noise):
    """Stochastic rounding of FP32 to BF16; NaN stays NaN."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = ((bits + noise) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.where(values == values, rounded, values.to(tl.bfloat16))


@triton.jit
def one_block(
    p,
    g,
    m,
    v,
    noise,
    at,
    inside,
    rate,
    decay,
    correction1,
    correction2,
    fresh,
    inv_scale,
    momentum,
    rest1,
    eps,
    rest2,
    total,
    square,
    bad,
    top,
    nonzero,
    tiny,
    limit,
    ADAM: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    LOW: tl.constexpr,
    STATS: tl.constexpr,
    EXTREMES: tl.constexpr,
    MASKED: tl.constexpr,
):
    if MASKED:
        grad = tl.load(g + at, mask=inside, other=0.0) * inv_scale
    else:
        grad = tl.load(g + at) * inv_scale
    if STATS:
        total, square, bad, top, nonzero, tiny = add_partials(
            grad, inside, total, square, bad, top, nonzero, tiny, EXTREMES
        )
    write = at < limit
    if MAXIMIZE:
        grad = -grad
    if MASKED:
        old = tl.load(p + at, mask=inside, other=0.0)
    else:
        old = tl.load(p + at)
    if ADAM:
        if MASKED:
            first = tl.load(m + at, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(v + at, mask=inside, other=0.0)
        else:
            first = tl.load(m + at).to(tl.float32)
            second = tl.load(v + at)
        first += rest1 * (grad - first)
        # Not beta2 * second + ...: 0.999 in FP32 would leave the average off by 1.3e-5.
        second += rest2 * (grad * grad - second)
        # Not old * (1 - rate * decay): that factor rounded to FP32 drifts by up to 6e-8 a step, always the same way.
        new = old - rate * (decay * old + first / correction1 / (tl.sqrt(second) / correction2 + eps))
    else:
        grad += decay * old
        if MOMENTUM:
            if MASKED:
                first = tl.load(m + at, mask=inside, other=0.0).to(tl.float32)
            else:
                first = tl.load(m + at).to(tl.float32)
            # The first step takes the gradient as it is, as PyTorch does.
            first = tl.where(fresh != 0.0, grad, momentum * first + rest1 * grad)
            step = grad + momentum * first if NESTEROV else first
        else:
            first = grad
            step = grad
        new = old - rate * step
    if MASKED:
        tl.store(p + at, new, mask=write)
        if MOMENTUM:
            tl.store(m + at, to_bf16(first, noise) if LOW else first, mask=write)
        if ADAM:
            tl.store(v + at, second, mask=write)
    else:
        if limit > 0:
            tl.store(p + at, new)
            if MOMENTUM:
                tl.store(m + at, to_bf16(first, noise) if LOW else first)
            if ADAM:
                tl.store(v + at, second)
    return total, square, bad, top, nonzero, tiny


# Neither the first step (1 would become a constant) nor every sixteenth may compile anew.
@triton.jit(do_not_specialize=["tensors", "seed", "sequence"])
def update_kernel(
    addresses,
    numbers,
    found_inf,
    tensor_of,
    offset_of,
    size_of,
    partials,
    tensors,
    inv_scale,
    momentum,
    rest1,
    eps,
    rest2,
    seed,
    sequence,
    ADAM: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    LOW: tl.constexpr,
    STATS: tl.constexpr,
    EXTREMES: tl.constexpr,
    SKIP: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk. ``addresses`` (5, T) int64: parameter, gradient, first and second moment, rounding key.

    ``numbers`` (5, T) float32: rate, weight decay, the two bias corrections, whether this is the first step.
    """
    chunk = tl.program_id(0)
    size = tl.load(size_of + chunk)
    tensor = tl.load(tensor_of + chunk)
    offset = tl.multiple_of(tl.load(offset_of + chunk), 16)
    pa = tl.load(addresses + tensor)
    ga = tl.load(addresses + tensors + tensor)
    ma = tl.load(addresses + 2 * tensors + tensor)
    va = tl.load(addresses + 3 * tensors + tensor)
    key = tl.load(addresses + 4 * tensors + tensor)
    p = pa.to(tl.pointer_type(tl.float32))
    g = ga.to(tl.pointer_type(tl.float32))
    m = ma.to(tl.pointer_type(tl.bfloat16 if LOW else tl.float32))
    v = va.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        p = tl.multiple_of(p, 16)
        g = tl.multiple_of(g, 16)
        m = tl.multiple_of(m, 16)
        v = tl.multiple_of(v, 16)
    p += offset
    g += offset
    m += offset
    v += offset
    rate = tl.load(numbers + tensor)
    decay = tl.load(numbers + tensors + tensor)
    correction1 = tl.load(numbers + 2 * tensors + tensor)
    correction2 = tl.load(numbers + 3 * tensors + tensor)
    fresh = tl.load(numbers + 4 * tensors + tensor)
    # Entries that may be written: none of a tensor that is skipped.
    limit = size
    if SKIP == 1:
        limit = tl.where(tl.load(found_inf) == 0.0, size, 0)
    if SKIP == 2:
        limit = tl.where(tl.load(found_inf + tensor) == 0.0, size, 0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.float32)
    top = tl.zeros((BLOCK,), tl.float32)
    nonzero = tl.zeros((BLOCK,), tl.float32)
    tiny = tl.zeros((BLOCK,), tl.float32)
    noise = lane
    full = size // BLOCK * BLOCK
    # Whole blocks need no mask, which is what lets the compiler load and store 16 bytes at once.
    for start in range(0, full, BLOCK):
        if LOW:
            noise = rounding_bits(seed, key, sequence, offset + start, BLOCK)
        total, square, bad, top, nonzero, tiny = one_block(
            p, g, m, v, noise, start + lane, lane >= 0, rate, decay, correction1, correction2, fresh,
            inv_scale, momentum, rest1, eps, rest2, total, square, bad, top, nonzero, tiny, limit,
            ADAM, MOMENTUM, NESTEROV, MAXIMIZE, LOW, STATS, EXTREMES, False,
        )  # fmt: skip
    if full < size:
        if LOW:
            noise = rounding_bits(seed, key, sequence, offset + full, BLOCK)
        total, square, bad, top, nonzero, tiny = one_block(
            p, g, m, v, noise, full + lane, lane < size - full, rate, decay, correction1, correction2, fresh,
            inv_scale, momentum, rest1, eps, rest2, total, square, bad, top, nonzero, tiny, limit,
            ADAM, MOMENTUM, NESTEROV, MAXIMIZE, LOW, STATS, EXTREMES, True,
        )  # fmt: skip
    if STATS:
        write_partials(partials, chunk, total, square, bad, top, nonzero, tiny, EXTREMES)


def fused_update_(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    *,
    rule: UpdateRule,
    rates: Sequence[float],
    weight_decays: Sequence[float],
    steps: Sequence[int],
    inv_scale: float = 1.0,
    found_inf: Tensor | None = None,
    segments: Sequence[int] | None = None,
    segment_count: int = 0,
    extremes: bool = False,
    seed: int = 0,
    sequence: int = 0,
    keys: Sequence[int] | None = None,
    block: int = BLOCK,
    warps: int | None = None,
) -> GradStats | None:
    """Update in place; see ``triaccel.kernels.fused_update_``."""
    device = parameters[0].device
    adam = isinstance(rule, AdamWRule)
    plan = chunk_plan(
        tuple(p.numel() for p in parameters),
        tuple(segments if segments is not None else (0 for _ in parameters)),
        segment_count if segments is not None else 1,
        device,
    )
    partials = torch.empty(max(1, plan.chunks) if segments is not None else 1, 6, device=device)
    # Copies of gradients in another memory order must live until the launch.
    ordered = [flat(same_order(g, p)) for g, p in zip(grads, parameters, strict=True)]
    count = len(parameters)
    nothing = [0] * count
    low = bool(first) and first[0].dtype == torch.bfloat16
    addresses = [
        *(p.data_ptr() for p in parameters),
        *(g.data_ptr() for g in ordered),
        *((t.data_ptr() for t in first) if first else nothing),
        *((t.data_ptr() for t in second) if second else nothing),
    ]
    one = [1.0] * count
    if isinstance(rule, AdamWRule):
        correction1 = [1.0 - rule.beta1**step for step in steps]
        correction2 = [(1.0 - rule.beta2**step) ** 0.5 for step in steps]
    else:
        correction1 = correction2 = one
    numbers = [
        *rates,
        *weight_decays,
        *correction1,
        *correction2,
        *(float(step == 1) for step in steps),
    ]
    if plan.chunks:
        update_kernel[(plan.chunks,)](
            send(
                [*addresses, *(keys if keys is not None else range(count))], dtype=torch.int64, device=device
            ),
            send(numbers, dtype=torch.float32, device=device),
            found_inf if found_inf is not None else partials,
            plan.tensor,
            plan.offset,
            plan.size,
            partials,
            count,
            inv_scale,
            *(
                (rule.beta1, 1.0 - rule.beta1, rule.eps, 1.0 - rule.beta2)
                if isinstance(rule, AdamWRule)
                else (rule.momentum, 1.0 - rule.dampening, 0.0, 0.0)
            ),
            seed & 0x7FFFFFFF,
            sequence & 0x7FFFFFFF,
            ADAM=adam,
            MOMENTUM=bool(first),
            NESTEROV=not isinstance(rule, AdamWRule) and rule.nesterov,
            MAXIMIZE=rule.maximize,
            LOW=low,
            STATS=segments is not None,
            EXTREMES=extremes,
            SKIP=0 if found_inf is None else 1 if found_inf.numel() == 1 else 2,
            ALIGNED=aligned(addresses),
            BLOCK=block,
            num_warps=warps or default_warps(adam=adam, stats=segments is not None, low=low),
        )
    return gather(partials, plan, extremes=extremes) if segments is not None else None
