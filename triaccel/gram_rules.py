"""Which parameters have a rule for their Gram matrix, and the rule for each kind of module.

Linear and ``Conv2d`` weights are sums of outer products (``gram_routes``, ``gram_conv``); an Embedding's gradient is a sum of
rows, so K[i,j] = Σ_{t,s} [index_it = index_js] g_it·g_js; biases and the affine parameters of normalisations need one product and
B×P scalars. A module called several times contributes all its calls, cross terms included: calls are further positions.
A subclass with a forward of its own has no rule, and neither has a module whose instance carries a patched ``forward``.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .gram_conv import conv_gram
from .gram_routes import contract, outer_sum_gram
from .probe_pass import Use

__all__ = ["has_rule", "parameter_gram"]

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
        return contract(sum_over(_bias_gradient(use, g) for use, g in uses)), "direct"
    if kind is nn.Embedding:
        return _embedding_gram(uses, max_bytes=max_bytes), "inner"
    if kind is nn.Linear:
        left = torch.cat([_positions(g) for _, g in uses], 1)
        right = torch.cat([_positions(use.input) for use, _ in uses], 1)
        return outer_sum_gram(
            left,
            lambda rows, units: right[rows, :, units],
            units=right.shape[2],
            width=1,
            max_bytes=max_bytes,
        )
    if kind is nn.Conv2d:
        return conv_gram(
            [(cast(nn.Conv2d, use.module), use.input, g) for use, g in uses], max_bytes=max_bytes
        )
    return contract(sum_over(_affine_gradient(use, g) for use, g in uses)), "direct"


def sum_over(terms: Iterator[Tensor]) -> Tensor:
    """Sum of tensors of one shape."""
    total = next(terms)
    for term in terms:
        total = total + term
    return total


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
