"""Block-diagonal Hessian of a network: largest eigenvalues and trace of every layer's block, by exact Hessian-vector products.

For layer l, H_l = ∂²L/∂θ_l² of the mean loss of one fixed batch, under the conditions of ``probe_pass``. The graph of the
gradient is built once for all layers; a product with H_l is one backward through the part of it that belongs to l.
Everything goes through ``torch.autograd.grad``, so nothing accumulates in ``.grad`` and memory is flat over products.
``lanczos`` does the rest.

Cost: per layer iterations × k products, each up to about twice a plain forward+backward; for memory the gradient's graph and
``max_bytes`` of basis. Source: exact products, Pearlmutter 1994.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .labels import LossFunction, batch_size_of, loss_scale_of
from .lanczos import BlockSpectrum, Matvec, TraceEstimate, block_lanczos, hutchinson_trace
from .layers import Layer
from .probe_pass import NormStatistics, call_model, probe_region
from .types import TriAccelError

__all__ = ["BlockSpectrum", "TraceEstimate", "hessian_probe", "hessian_trace"]


class _Blocks:
    """Hessian-vector products of each layer's block, over one graph of the gradient."""

    def __init__(self, gradients: dict[int, Tensor | None], custom: Sequence[str]) -> None:
        self._gradients = gradients
        self._custom = custom

    def matvec(self, layer: Layer) -> Matvec:
        sizes = [p.numel() for p in layer.parameters]
        live: list[tuple[int, nn.Parameter, Tensor]] = []
        for index, p in enumerate(layer.parameters):
            g = self._gradients[id(p)]
            if g is not None and g.requires_grad:
                live.append((index, p, g))
                if any(node.name().endswith("::Error") for node in _nodes(g)):
                    # Such a node also cuts the graph, so without this check the product would be silently wrong.
                    raise _missing(
                        layer.name, f"an operation that is once_differentiable; custom: {self._custom}"
                    )

        def multiply(vectors: Tensor) -> Tensor:
            product = torch.zeros_like(vectors)
            if not live:
                return product
            inputs, outputs = torch.split(vectors, sizes, 1), torch.split(product, sizes, 1)
            for row in range(vectors.shape[0]):
                found = _second(layer.name, live, [inputs[i][row].view(p.shape) for i, p, _ in live])
                for (index, _, _), part in zip(live, found, strict=True):
                    outputs[index][row] = part.reshape(-1)
            return product

        return multiply


def _second(
    where: str, live: Sequence[tuple[int, nn.Parameter, Tensor]], vectors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    with _double_backward(where):
        return torch.autograd.grad(
            [g for _, _, g in live],
            [p for _, p, _ in live],
            list(vectors),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )


@contextmanager
def _double_backward(where: str) -> Iterator[None]:
    """Name the operation that cannot be differentiated twice."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if (
            "is not implemented" in text
            or "differentiate twice" in text
            or "not differentiable twice" in text
        ):
            raise _missing(where, text.splitlines()[0]) from error
        raise


def _missing(where: str, what: str) -> TriAccelError:
    return TriAccelError(
        f"the Hessian of {where!r} needs a second derivative that an operation lacks ({what}); "
        "curvature estimator 'fisher' (the Gram route) needs none"
    )


def _nodes(root: Tensor) -> Iterator[Any]:
    """Every node of the graph below ``root``."""
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(child for child, _ in node.next_functions)


@contextmanager
def _blocks(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction,
    norm_statistics: NormStatistics,
) -> Iterator[tuple[list[Layer], _Blocks]]:
    owned = [layer for layer in layers if layer.parameters]
    if not owned:
        raise TriAccelError("no layer has a trainable parameter: there is no Hessian block; unfreeze a layer")
    device = owned[0].parameters[0].device
    with probe_region(model, statistics=norm_statistics, device=device) as constants, constants:
        loss = loss_fn(call_model(model, inputs), targets)
        samples = batch_size_of(inputs, targets)
        scale = loss_scale_of(loss_fn, loss, samples)
        if not loss.requires_grad:
            raise TriAccelError("the loss depends on no trainable parameter: no layer has a Hessian block")
        loss = loss * (scale / samples) if scale != samples else loss
        python_node: Any = torch.autograd.function.BackwardCFunction
        custom = sorted({node.name() for node in _nodes(loss) if isinstance(node, python_node)})
        parameters = [p for layer in owned for p in layer.parameters]
        with _double_backward("the model"):
            found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        used: dict[int, Tensor | None] = {id(p): g for p, g in zip(parameters, found, strict=True)}
        yield (
            [layer for layer in owned if any(used[id(p)] is not None for p in layer.parameters)],
            _Blocks(used, custom),
        )


def hessian_probe(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction,
    *,
    top_k: int,
    tolerance: float,
    max_iterations: int,
    seed: int,
    norm_statistics: NormStatistics = "probe",
    max_bytes: int = 2**30,
) -> dict[str, BlockSpectrum]:
    """Top-k eigenvalues of the Hessian block of each of ``layers``; the model is left as it was, bit for bit.

    Args:
        model: the module, in the mode in which it trains.
        layers: the layers wanted (a subset costs less); those that the loss does not depend on are left out of the result.
        inputs: as for ``gram_probe``.
        targets: what ``loss_fn`` compares the outputs with.
        loss_fn: scalar loss; a sum is divided by the batch.
        top_k: eigenvalues per layer.
        tolerance: residual over the largest |Ritz value|.
        max_iterations: block iterations a layer.
        seed: of the start blocks; layer number ``index`` uses ``seed + index``.
        norm_statistics: constants of training batch norms.
        max_bytes: bytes of one layer's basis.

    Raises:
        TriAccelError: an operation has no second derivative (named), nothing is differentiable, or the loss is no scalar.
    """
    result: dict[str, BlockSpectrum] = {}
    with _blocks(model, layers, inputs, targets, loss_fn, norm_statistics) as (usable, blocks):
        for layer in usable:
            first = layer.parameters[0]
            result[layer.name] = block_lanczos(
                blocks.matvec(layer),
                layer.info.numel,
                top_k=top_k,
                tolerance=tolerance,
                max_iterations=max_iterations,
                seed=seed + layer.info.index,
                dtype=first.dtype,
                device=first.device,
                max_bytes=max_bytes,
            )
    return result


def hessian_trace(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction,
    *,
    samples: int,
    seed: int,
    norm_statistics: NormStatistics = "probe",
) -> dict[str, TraceEstimate]:
    """Hutchinson's trace of the Hessian block of each of ``layers``; arguments and errors as for ``hessian_probe``."""
    result: dict[str, TraceEstimate] = {}
    with _blocks(model, layers, inputs, targets, loss_fn, norm_statistics) as (usable, blocks):
        for layer in usable:
            first = layer.parameters[0]
            result[layer.name] = hutchinson_trace(
                blocks.matvec(layer),
                layer.info.numel,
                samples=samples,
                seed=seed + layer.info.index,
                dtype=first.dtype,
                device=first.device,
            )
    return result
