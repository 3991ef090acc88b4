"""Gram matrices of convolution weights: patches for the two routes, taps for depthwise ones.

A convolution is a linear map of patches, so ∂W_i = Σ_t g_it ⊗ patch_it, group by group, and ``gram_routes`` applies. Patches are
read through a strided view of the padded input, channels last, and copied once per tile. Where a group has one input channel
(depthwise), each kernel tap is one product: P[i, c] = Σ_t g_itc x_i,(t+tap),c, and K = Σ_tap P Pᵀ; under zero padding only the
part of the map that the tap really touches is read, which for a 5×5 kernel on a 1×1 map is one tap of 25.

Cost: dense as in ``gram_routes``; depthwise taps·B·C·T multiply-adds and B·C·T scalars. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .gram_routes import contract, outer_sum_gram

__all__ = ["conv_gram"]


def conv_gram(uses: Sequence[tuple[nn.Conv2d, Tensor, Tensor]], *, max_bytes: int) -> tuple[Tensor, str]:
    """K of a ``Conv2d`` weight over all its uses.

    Args:
        uses: per call the module (several when a weight is tied), its input ``(B, C, H, W)`` and its output's gradient
            ``(B, O, H', W')``.
        max_bytes: bytes that temporaries may take.

    Returns:
        ``(K, route)`` with K ``(B, B)``.
    """
    first = uses[0][0]
    channels = first.in_channels // first.groups
    if channels == 1 and first.groups > 1:
        return _depthwise(uses, max_bytes=max_bytes), "outer"
    padded = [(module, _padded(module, a)) for module, a, _ in uses]
    left = torch.cat([_positions(g) for _, _, g in uses], 1) if len(uses) > 1 else _positions(uses[0][2])
    taps = first.kernel_size[0] * first.kernel_size[1]
    m = first.out_channels // first.groups
    total: Tensor | None = None
    route = ""
    for group in range(first.groups):
        offset = group * channels

        def right(samples: slice, units: slice, offset: int = offset) -> Tensor:
            start, stop, _ = units.indices(channels)
            parts = [_patches(module, a[samples, offset + start : offset + stop]) for module, a in padded]
            return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

        part, route = outer_sum_gram(
            left[:, :, group * m : (group + 1) * m], right, units=channels, width=taps, max_bytes=max_bytes
        )
        total = part if total is None else total + part
    assert total is not None
    return total, route


def _padded(module: nn.Conv2d, a: Tensor) -> Tensor:
    padding = module._reversed_padding_repeated_twice
    if not any(padding):
        return a
    return F.pad(a, padding, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


def _positions(g: Tensor) -> Tensor:
    """``(B, O, H, W)`` to ``(B, H·W, O)``; no copy when ``g`` is channels last."""
    return g.permute(0, 2, 3, 1).reshape(g.shape[0], -1, g.shape[1])


def _patches(module: nn.Conv2d, a: Tensor) -> Tensor:
    """``(B, C, H, W)``, padded, to ``(B, T, kh·kw·C)``."""
    rows = a.permute(0, 2, 3, 1)
    if module.kernel_size == (1, 1):
        rows = rows[:, :: module.stride[0], :: module.stride[1]]
        return rows.reshape(a.shape[0], -1, a.shape[1])
    for dim in (0, 1):
        extent = module.dilation[dim] * (module.kernel_size[dim] - 1) + 1
        rows = rows.unfold(1 + dim, extent, module.stride[dim])[..., :: module.dilation[dim]]
    samples, height, width, channels, kh, kw = rows.shape
    return rows.permute(0, 1, 2, 4, 5, 3).reshape(samples, height * width, kh * kw * channels)


def _depthwise(uses: Sequence[tuple[nn.Conv2d, Tensor, Tensor]], *, max_bytes: int) -> Tensor:
    first = uses[0][0]
    samples = uses[0][1].shape[0]
    multiple = first.out_channels // first.groups
    area = max(g.shape[2] * g.shape[3] for _, _, g in uses)
    step = max(1, min(first.groups, max_bytes // (8 * samples * multiple * area)))
    gram = uses[0][2].new_zeros(samples, samples)
    for start in range(0, first.groups, step):
        stop = min(start + step, first.groups)
        cut = [(m, a[:, start:stop], g[:, start * multiple : stop * multiple]) for m, a, g in uses]
        for ky in range(first.kernel_size[0]):
            for kx in range(first.kernel_size[1]):
                terms = [t for t in (_tap(m, a, g, ky, kx) for m, a, g in cut) if t is not None]
                if terms:
                    gram += contract(terms[0] if len(terms) == 1 else torch.stack(terms).sum(0))
    return gram


def _tap(module: nn.Conv2d, a: Tensor, g: Tensor, ky: int, kx: int) -> Tensor | None:
    """Per-sample gradient of one tap, ``(B, O)``; ``None`` when the tap only ever sees padding."""
    if module.padding_mode == "zeros":
        # F.pad's order: left, right, top, bottom.
        left, _, top, _ = module._reversed_padding_repeated_twice
    else:
        a, left, top = _padded(module, a), 0, 0
    spans = []
    for dim, (tap, before) in enumerate(((ky, top), (kx, left))):
        offset = tap * module.dilation[dim] - before
        stride, size, out = module.stride[dim], a.shape[2 + dim], g.shape[2 + dim]
        first = max(0, -(offset // stride))
        last = min(out - 1, (size - 1 - offset) // stride)
        if last < first:
            return None
        spans.append((first, last, offset + first * stride, stride))
    (y0, y1, iy, sy), (x0, x1, ix, sx) = spans
    height, width = y1 - y0 + 1, x1 - x0 + 1
    seen = a[:, :, iy : iy + (height - 1) * sy + 1 : sy, ix : ix + (width - 1) * sx + 1 : sx]
    part = g[:, :, y0 : y1 + 1, x0 : x1 + 1]
    if g.shape[1] != a.shape[1]:
        seen = seen.repeat_interleave(g.shape[1] // a.shape[1], 1)
    product = part * seen
    return product.sum((2, 3)) if height * width > 1 else product.flatten(1)
