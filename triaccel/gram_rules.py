"""Gram matrices of per-sample gradients, one rule for each kind of parameter.

With l_i the loss of sample i, a parameter W of a linear map has the per-sample gradient ∂W_i = Σ_t L_it ⊗ R_it, where t runs over
positions (and over the uses of a shared module), L is the gradient of the output, R the input (of a convolution: its patch).
Two exact routes to K[i,j] = ⟨∂W_i, ∂W_j⟩, with m = |L_it|, n = |R_it|, T positions, G groups:

    "outer"  form ∂W_i = L_iᵀ R_i, then contract:          B·T·m·n·G + B²·m·n·G multiply-adds, B·m·n·G scalars
    "inner"  K = Σ_{t,s} (L_it·L_js)(R_it·R_js):           B²·T²·(m + n)·G multiply-adds,     2·(B·T)² scalars a group

``choose_route`` takes the cheaper one. Both are tiled so that temporaries stay within ``max_bytes``. Biases and affine parameters
need B×P scalars and no route. Sources: the inner route is arXiv 1510.01799's for norms, extended here to pairs, positions
and groups (ours).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .probe_pass import Use

__all__ = ["Route", "choose_route", "has_rule", "parameter_gram"]

Route = Literal["outer", "inner"]

_AFFINE_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
_RULES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d, nn.Embedding, *_AFFINE_NORMS)


def _rule_class(module: nn.Module) -> type[nn.Module] | None:
    """The class whose rule fits: same forward, so that a subclass with a forward of its own is not mistaken for it."""
    for kind in _RULES:
        if isinstance(module, kind) and type(module).forward is kind.forward:
            if isinstance(module, nn.Conv2d) and type(module)._conv_forward is not nn.Conv2d._conv_forward:
                return None
            if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
                return None  # its gradient depends on the other samples' indices
            return kind
    return None


def has_rule(module: nn.Module) -> bool:
    """Whether ``weight`` and ``bias`` of ``module`` have a rule here."""
    return "forward" not in module.__dict__ and _rule_class(module) is not None


def choose_route(
    *, samples: int, positions: int, left: int, right: int, groups: int, max_bytes: int
) -> Route:
    """The cheaper exact route by multiply-adds, "outer" where the inner one has no tile within ``max_bytes``.

    Args:
        samples: B.
        positions: T.
        left: m.
        right: n.
        groups: G.
        max_bytes: bytes that temporaries may take.
    """
    if 8 * positions * positions + 4 * positions * right > max_bytes:
        return "outer"
    outer = samples * (positions + samples) * left * right
    inner = (samples * positions) ** 2 * (left + right)
    return "inner" if inner <= outer else "outer"


def parameter_gram(
    name: str, uses: Sequence[tuple[Use, Tensor]], *, max_bytes: int
) -> tuple[Tensor, str] | None:
    """Gram matrix of one parameter over all its uses.

    Args:
        name: ``"weight"`` or ``"bias"``, as the modules of ``uses`` call it.
        uses: recorded calls, each with the gradient of its output, ``(B, ...)``.
        max_bytes: bytes that temporaries may take.

    Returns:
        ``(K, route)`` with K ``(B, B)``, or ``None`` when no rule covers this combination of uses.
    """
    kinds = {_rule_class(use.module) for use, _ in uses}
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    if name == "bias":
        return _contract(sum_over(_bias_gradient(use, g) for use, g in uses)), "direct"
    if kind is nn.Embedding:
        return _embedding_gram(uses, max_bytes=max_bytes), "inner"
    if kind is nn.Linear:
        left = torch.cat([_positions(g) for _, g in uses], 1)
        right = torch.cat([_positions(use.input) for use, _ in uses], 1)
        return _linear_gram(left, right, max_bytes=max_bytes)
    if kind is nn.Conv2d:
        return _conv_gram(uses, max_bytes=max_bytes)
    return _contract(sum_over(_affine_gradient(use, g) for use, g in uses)), "direct"


def sum_over(terms: Iterator[Tensor]) -> Tensor:
    """Sum of tensors of one shape."""
    total = next(terms)
    for term in terms:
        total = total + term
    return total


def _contract(gradients: Tensor) -> Tensor:
    flat = gradients.flatten(1)
    return flat @ flat.T


def _positions(x: Tensor) -> Tensor:
    """``(B, ..., F)`` to ``(B, T, F)``."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


# ---------------------------------------------------------------- direct: biases and affine parameters


def _bias_gradient(use: Use, g: Tensor) -> Tensor:
    """``(B, P)``: the output gradient summed over positions."""
    module = use.module
    if isinstance(module, nn.LayerNorm):
        return g.reshape(g.shape[0], -1, module.weight.numel()).sum(1)
    if isinstance(module, nn.Linear):
        return _positions(g).sum(1)
    return g.flatten(2).sum(2) if g.dim() > 2 else g


def _affine_gradient(use: Use, g: Tensor) -> Tensor:
    """``(B, P)``: output gradient times normalised input, summed over positions."""
    module, a = use.module, use.input
    if isinstance(module, nn.LayerNorm):
        product = g * F.layer_norm(a, module.normalized_shape, eps=module.eps)
        return product.reshape(a.shape[0], -1, module.weight.numel()).sum(1)
    if isinstance(module, nn.RMSNorm):
        product = g * F.rms_norm(a, list(module.normalized_shape), eps=module.eps)
        return product.reshape(a.shape[0], -1, module.weight.numel()).sum(1)
    if isinstance(module, nn.GroupNorm):
        product = g * F.group_norm(a, module.num_groups, eps=module.eps)
        return product.flatten(2).sum(2) if a.dim() > 2 else product
    assert use.statistics is not None
    mean, variance, eps = use.statistics
    scale = torch.rsqrt(variance + eps)
    if a.dim() == 2:
        return g * (a - mean) * scale
    # Σ_t g (a - mean) scale, without the normalised input: one product over the activations, not three.
    dims = tuple(range(2, a.dim()))
    return ((g * a).sum(dims) - g.sum(dims) * mean) * scale


# ---------------------------------------------------------------- Linear


def _linear_gram(left: Tensor, right: Tensor, *, max_bytes: int) -> tuple[Tensor, str]:
    samples, positions, m = left.shape
    n = right.shape[2]
    if positions == 1:
        return _contract(left) * _contract(right), "inner"
    route = choose_route(samples=samples, positions=positions, left=m, right=n, groups=1, max_bytes=max_bytes)
    if route == "inner":
        return _inner(lambda s: (left[s], right[s]), samples, positions, max_bytes=max_bytes), route
    rows = max(1, min(m, max_bytes // (4 * samples * n)))
    columns = max(1, min(n, max_bytes // (4 * samples * rows)))
    gram = left.new_zeros(samples, samples)
    for l_part in torch.split(left, rows, 2):
        for r_part in torch.split(right, columns, 2):
            gram += _contract(l_part.transpose(1, 2) @ r_part)
    return gram, route


def _inner(
    block: Callable[[slice], tuple[Tensor, Tensor]], samples: int, positions: int, *, max_bytes: int
) -> Tensor:
    """Inner route over tiles of samples: ``block(s)`` gives L and R of samples ``s``, each ``(b, T, F)``."""
    size = max(1, min(samples, int((max_bytes / 8) ** 0.5) // positions))
    tiles = [slice(i, min(i + size, samples)) for i in range(0, samples, size)]
    gram: Tensor | None = None
    for index, rows in enumerate(tiles):
        l_i, r_i = (x.flatten(0, 1) for x in block(rows))
        for columns in tiles[index:]:
            l_j, r_j = (l_i, r_i) if rows == columns else (x.flatten(0, 1) for x in block(columns))
            part = (l_i @ l_j.T).mul_(r_i @ r_j.T)
            part = part.view(-1, positions, part.shape[1] // positions, positions).sum((1, 3))
            if gram is None:
                gram = part.new_zeros(samples, samples)
            gram[rows, columns] = part
            if rows != columns:
                gram[columns, rows] = part.T
    assert gram is not None
    return gram


# ---------------------------------------------------------------- Conv2d


def _padded(module: nn.Conv2d, a: Tensor) -> Tensor:
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padding = module._reversed_padding_repeated_twice
    return F.pad(a, padding, mode=mode) if any(padding) else a


def _patches(module: nn.Conv2d, a: Tensor) -> Tensor:
    """Patches of an already padded input, ``(B, C·kh·kw, T)``."""
    return F.unfold(a, module.kernel_size, dilation=module.dilation, stride=module.stride)


def _conv_gram(uses: Sequence[tuple[Use, Tensor]], *, max_bytes: int) -> tuple[Tensor, str]:
    first = uses[0][0].module
    assert isinstance(first, nn.Conv2d)
    groups = first.groups
    m = first.out_channels // groups
    taps = first.kernel_size[0] * first.kernel_size[1]
    n = first.in_channels // groups * taps
    samples = uses[0][1].shape[0]
    positions = sum(g.shape[2] * g.shape[3] for _, g in uses)
    inputs: list[tuple[nn.Conv2d, Tensor, Tensor]] = []
    for use, g in uses:
        assert isinstance(use.module, nn.Conv2d)
        inputs.append((use.module, _padded(use.module, use.input), g.flatten(2)))
    route = choose_route(
        samples=samples, positions=positions, left=m, right=n, groups=groups, max_bytes=max_bytes
    )
    if route == "inner":
        total: Tensor | None = None
        for group in range(groups):
            lefts = slice(group * m, (group + 1) * m)
            rights = slice(group * (n // taps), (group + 1) * (n // taps))

            def block(s: slice, lefts: slice = lefts, rights: slice = rights) -> tuple[Tensor, Tensor]:
                left = torch.cat([g[s, lefts] for _, _, g in inputs], 2)
                right = torch.cat([_patches(module, a[s, rights]) for module, a, _ in inputs], 2)
                return left.transpose(1, 2), right.transpose(1, 2)

            part = _inner(block, samples, positions, max_bytes=max_bytes)
            total = part if total is None else total + part
        assert total is not None
        return total, route
    return _conv_outer(inputs, samples, groups, m, n, taps, positions, max_bytes=max_bytes), route


def _conv_outer(
    inputs: Sequence[tuple[nn.Conv2d, Tensor, Tensor]],
    samples: int,
    groups: int,
    m: int,
    n: int,
    taps: int,
    positions: int,
    *,
    max_bytes: int,
) -> Tensor:
    """Per-sample gradients over tiles of input channels (and groups), contracted tile by tile."""
    channels = n // taps
    gram = inputs[0][2].new_zeros(samples, samples)
    per_channel = 4 * samples * taps * (positions + m)
    if groups > 1 and per_channel * channels <= max_bytes:
        step = max(1, min(groups, max_bytes // (per_channel * channels)))
        tiles = [(g, min(g + step, groups), 0, channels) for g in range(0, groups, step)]
    else:
        step = max(1, min(channels, max_bytes // per_channel))
        tiles = [
            (g, g + 1, c, min(c + step, channels)) for g in range(groups) for c in range(0, channels, step)
        ]
    for g0, g1, c0, c1 in tiles:
        gradients: Tensor | None = None
        for module, a, g in inputs:
            part = a if groups == 1 and c1 - c0 == channels else _channels(a, g0, g1, c0, c1, channels)
            right = _patches(module, part).view(samples, g1 - g0, (c1 - c0) * taps, -1)
            left = g[:, g0 * m : g1 * m].reshape(samples, g1 - g0, m, -1)
            term = left @ right.transpose(2, 3)
            gradients = term if gradients is None else gradients + term
        assert gradients is not None
        gram += _contract(gradients)
    return gram


def _channels(a: Tensor, g0: int, g1: int, c0: int, c1: int, channels: int) -> Tensor:
    """Channels ``c0:c1`` of each of the groups ``g0:g1`` (one of the two ranges is whole or single)."""
    return a[:, g0 * channels + c0 : (g1 - 1) * channels + c1]


# ---------------------------------------------------------------- Embedding


def _embedding_gram(uses: Sequence[tuple[Use, Tensor]], *, max_bytes: int) -> Tensor:
    """K[i,j] = Σ_{t,s} [index_it = index_js] g_it·g_js, without the padding index."""
    index = torch.cat([use.input.reshape(use.input.shape[0], -1) for use, _ in uses], 1)
    g = torch.cat([_positions(g) for _, g in uses], 1)
    module = uses[0][0].module
    assert isinstance(module, nn.Embedding)
    if module.padding_idx is not None:
        g = g * (index != module.padding_idx).unsqueeze(2)
    samples, positions = index.shape
    size = max(1, min(samples, int((max_bytes / 8) ** 0.5) // positions))
    gram = g.new_zeros(samples, samples)
    tiles = [slice(i, min(i + size, samples)) for i in range(0, samples, size)]
    for rows in tiles:
        for columns in tiles:
            same = index[rows].flatten()[:, None] == index[columns].flatten()[None]
            part = (g[rows].flatten(0, 1) @ g[columns].flatten(0, 1).T) * same
            gram[rows, columns] = part.view(-1, positions, part.shape[1] // positions, positions).sum((1, 3))
    return gram
