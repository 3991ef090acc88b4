"""What a probe needs to know of a loss: how it averages over samples, and how to draw labels from the model.

With labels drawn from the model's own predictive distribution the Fisher block is the (Monte-Carlo) Fisher, an estimate of the
Gauss-Newton block; with the data's labels it is the empirical Fisher (arXiv 1905.12558 tells the two apart). Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .types import TriAccelError

__all__ = ["LossFunction", "batch_size_of", "loss_scale_of", "sample_labels"]

LossFunction = Callable[[Any, Any], Tensor]


def loss_scale_of(loss_fn: LossFunction, loss: Tensor, samples: int) -> float:
    """Factor from ∂loss to ∂ℓ_i: B for a mean over samples, 1 for a sum.

    Raises:
        TriAccelError: the loss is no scalar.
    """
    reduction = getattr(loss_fn, "reduction", "mean")
    if loss.dim() != 0 or reduction == "none":
        raise TriAccelError(
            f"the loss has shape {tuple(loss.shape)} (reduction {reduction!r}), where a probe needs the scalar mean over "
            "samples; use reduction='mean' or 'sum'"
        )
    return 1.0 if reduction == "sum" else float(samples)


def sample_labels(
    outputs: Any, targets: Any, loss_fn: LossFunction, *, generator: torch.Generator | None
) -> Tensor:
    """Targets drawn from the model's own predictive distribution, of the form of ``targets``.

    Args:
        outputs: logits ``(B, C, ...)`` with class targets, or logits of independent bits with ``BCEWithLogitsLoss``.
        targets: observed targets.
        loss_fn: the loss.
        generator: on the CPU.

    Raises:
        TriAccelError: no generator, or the loss is not one whose distribution is known.
    """
    if generator is None:
        raise TriAccelError("labels='sampled' draws labels: pass a seeded torch.Generator as generator=")
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        logits = outputs.detach()
        if isinstance(loss_fn, nn.BCEWithLogitsLoss) or loss_fn is F.binary_cross_entropy_with_logits:
            draw = torch.rand(logits.shape, generator=generator).to(logits.device)
            return (draw < logits.sigmoid()).to(targets.dtype)
        classes = not targets.is_floating_point() and targets.dim() == logits.dim() - 1
        dense = isinstance(loss_fn, nn.CrossEntropyLoss) and targets.shape == logits.shape
        if classes or dense:
            rows = logits.movedim(1, -1)
            flat = rows.reshape(-1, rows.shape[-1]).float().softmax(1).cpu()
            bad = ~torch.isfinite(flat).all(1)
            flat[bad] = 1.0  # a NaN loss is reported by the caller, not by multinomial
            drawn = torch.multinomial(flat, 1, generator=generator).view(rows.shape[:-1]).to(logits.device)
            if dense:
                return F.one_hot(drawn, rows.shape[-1]).movedim(-1, 1).to(targets.dtype)
            ignored = getattr(loss_fn, "ignore_index", None)
            return drawn if ignored is None else torch.where(targets == ignored, targets, drawn)
    raise TriAccelError(
        f"labels='sampled' knows cross entropy and binary cross entropy with logits, not {loss_fn!r}: "
        "use labels='observed'"
    )


def batch_size_of(inputs: Any, targets: Any) -> int:
    """Length of dimension 0 of the first tensor of ``inputs``, or of ``targets``.

    Raises:
        TriAccelError: neither holds a tensor with a dimension.
    """
    for tree in (inputs, targets):
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return int(leaf.shape[0])
    raise TriAccelError("the probe batch holds no tensor with a batch dimension")
