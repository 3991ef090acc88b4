"""Per-sample gradients of any parameter, by running the model sample by sample: the route for what has no rule.

The gradient of sample i is taken by ``torch.func.vmap(grad)`` of the whole model with that sample alone, against the
recorded gradient of its output, so that it agrees with the batch's loss whatever its reduction over positions. Every use of
a parameter counts: in a recurrent module, tied, or as a raw tensor in somebody else's forward. Where ``vmap`` has no rule for
an operation the samples are run one after the other, and the result says so.

Cost: one forward and backward of the model for all the parameters asked for at once, B × their size in memory; above
``max_bytes`` the samples are run in blocks, pair of blocks by pair. Source: ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from .probe_pass import ConstantStatistics

__all__ = ["batch_leaves", "generic_grams"]


def batch_leaves(outputs: Any, samples: int) -> list[Tensor]:
    """Differentiable tensors of ``outputs`` whose leading dimension is the batch."""
    return [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dim() > 0 and leaf.shape[0] == samples
    ]


class _Runner:
    """Per-sample gradients of blocks of samples."""

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        inputs: Any,
        gradients: Sequence[Tensor],
        picks: Sequence[int],
        constants: ConstantStatistics,
    ) -> None:
        self.model = model
        self.parameters = {name: p.detach() for name, p in parameters.items()}
        mine = {id(p) for p in parameters.values()}
        self.others = {name: p.detach() for name, p in model.named_parameters() if id(p) not in mine}
        self.leaves, self.spec = pytree.tree_flatten(inputs)
        self.samples = gradients[0].shape[0]
        self.batched = [
            isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == self.samples for x in self.leaves
        ]
        self.gradients = list(gradients)
        self.picks = list(picks)
        self.constants = constants
        self.looped: str | None = None

    def _objective(
        self, parameters: dict[str, Tensor], batched: list[Tensor], gradients: list[Tensor]
    ) -> Tensor:
        one = iter(batched)
        leaves = [
            next(one).unsqueeze(0) if flag else leaf
            for leaf, flag in zip(self.leaves, self.batched, strict=True)
        ]
        inputs = pytree.tree_unflatten(leaves, self.spec)
        args, kwargs = (
            ((), inputs)
            if isinstance(inputs, dict)
            else (tuple(inputs), {})
            if isinstance(inputs, (tuple, list))
            else ((inputs,), {})
        )
        with self.constants.replaying():
            outputs = pytree.tree_leaves(
                functional_call(self.model, {**self.others, **parameters}, args, kwargs)
            )
        total = gradients[0].new_zeros(())
        for pick, g in zip(self.picks, gradients, strict=True):
            total = total + (outputs[pick] * g.unsqueeze(0)).sum()
        return total

    def block(self, rows: slice) -> dict[str, Tensor]:
        """``name -> (b, P)`` for the samples of ``rows``."""
        batched = [x[rows] for x, flag in zip(self.leaves, self.batched, strict=True) if flag]
        gradients = [g[rows] for g in self.gradients]
        if self.looped is None:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="There is a performance drop")
                    found = vmap(grad(self._objective), in_dims=(None, 0, 0), randomness="different")(
                        self.parameters, batched, gradients
                    )
                return {name: g.detach().flatten(1) for name, g in found.items()}
            except (RuntimeError, ValueError, NotImplementedError) as error:
                self.looped = str(error).splitlines()[0]
        rows_found: list[dict[str, Tensor]] = []
        for i in range(gradients[0].shape[0]):
            leaves = {name: p.clone().requires_grad_() for name, p in self.parameters.items()}
            value = self._objective(leaves, [x[i] for x in batched], [g[i] for g in gradients])
            found_i = torch.autograd.grad(
                value, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
            rows_found.append({name: g.flatten() for name, g in zip(leaves, found_i, strict=True)})
        return {name: torch.stack([row[name] for row in rows_found]) for name in self.parameters}


def generic_grams(
    model: nn.Module,
    groups: dict[str, dict[str, nn.Parameter]],
    inputs: Any,
    outputs: Any,
    gradients: Sequence[Tensor],
    *,
    constants: ConstantStatistics,
    max_bytes: int,
) -> tuple[dict[str, Tensor], str | None]:
    """Gram matrices of the parameters of each layer.

    Args:
        model: the module, inside a probe region.
        groups: layer name to its parameters by their name in the model.
        inputs: the probe's inputs.
        outputs: what the model returned for them.
        gradients: gradients of ``batch_leaves(outputs, B)``, same order.
        constants: normalisation constants of that forward.
        max_bytes: bytes of per-sample gradients held at once.

    Returns:
        ``(grams, looped)``: layer name to K ``(B, B)``, and why the samples were run one by one, or ``None``.
    """
    samples = gradients[0].shape[0]
    chosen = {id(leaf) for leaf in batch_leaves(outputs, samples)}
    picks = [i for i, leaf in enumerate(pytree.tree_leaves(outputs)) if id(leaf) in chosen]
    grams: dict[str, Tensor] = {}
    looped: str | None = None
    for names in _packed(groups, samples, max_bytes):
        parameters = {p: tensor for name in names for p, tensor in groups[name].items()}
        runner = _Runner(model, parameters, inputs, gradients, picks, constants)
        row_bytes = sum(4 * tensor.numel() for tensor in parameters.values())
        size = max(1, min(samples, max_bytes // max(1, row_bytes)))
        if size < samples:
            size = max(1, size // 2)  # two blocks at a time
        tiles = [slice(i, min(i + size, samples)) for i in range(0, samples, size)]
        for name in names:
            grams[name] = gradients[0].new_zeros(samples, samples)
        for index, rows in enumerate(tiles):
            left = runner.block(rows)
            for columns in tiles[index:]:
                right = left if columns == rows else runner.block(columns)
                for name in names:
                    for p in groups[name]:
                        part = left[p] @ right[p].T
                        grams[name][rows, columns] += part
                        if rows != columns:
                            grams[name][columns, rows] += part.T
        looped = looped or runner.looped
    return grams, looped


def _packed(groups: dict[str, dict[str, nn.Parameter]], samples: int, max_bytes: int) -> list[list[str]]:
    """Layers that fit into one run together, in order."""
    packs: list[list[str]] = []
    used = 0
    for name, parameters in groups.items():
        need = samples * sum(4 * p.numel() for p in parameters.values())
        if not packs or used + need > max_bytes:
            packs.append([])
            used = 0
        packs[-1].append(name)
        used += need
    return packs
