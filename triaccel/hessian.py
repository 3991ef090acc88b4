"""Largest eigenvalues of every layer's Hessian block, by block Lanczos on exact Hessian-vector products.

For layer l, H_l = ∂²L/∂θ_l² of the mean loss of one fixed batch. ``block_lanczos`` builds an orthonormal basis V of a block
Krylov space with full re-orthogonalisation, T = VᵀHV computed outright, and reads the largest *algebraic* eigenvalues off T.
A block of at least k vectors finds eigenvalues repeated up to k times. When the basis is full it restarts from its best Ritz
vectors (thick restart). The residual of a Ritz pair is what the last block leaves outside V.

Cost per layer: iterations × block HVPs, each a backward through the graph of the gradient; ``max_bytes`` of basis. The graph
of the gradient is built once for all layers. Everything goes through ``torch.autograd.grad``, so nothing accumulates in
``.grad`` and memory is flat. ``hutchinson_trace`` estimates tr H_l = E[zᵀH_l z] with Rademacher z. Sources: block Lanczos,
Golub & Underwood 1977; thick restart, Wu & Simon 2000; Hutchinson 1990.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Layer
from .probe_pass import NormStatistics, call_model, probe_region
from .types import TriAccelError

__all__ = [
    "BlockSpectrum",
    "TraceEstimate",
    "block_lanczos",
    "hessian_probe",
    "hessian_trace",
    "hutchinson_trace",
    "rademacher",
]

Matvec = Callable[[Tensor], Tensor]
"""``(n, b) -> (n, b)``, a symmetric linear map on each column."""


@dataclass(frozen=True, slots=True)
class BlockSpectrum:
    """Largest algebraic eigenvalues of one Hessian block.

    Attributes:
        eigenvalues: top k (or all, if the block is smaller), descending.
        residuals: ‖H v − λ v‖ of each, for unit v.
        iterations: block iterations done.
        matvecs: Hessian-vector products done.
        converged: whether every residual is within the tolerance times the largest |Ritz value|.
        seed: seed of the start block.
    """

    eigenvalues: tuple[float, ...]
    residuals: tuple[float, ...]
    iterations: int
    matvecs: int
    converged: bool
    seed: int

    @property
    def finite(self) -> bool:
        """Whether every figure is finite."""
        return all(math.isfinite(x) for x in (*self.eigenvalues, *self.residuals))


@dataclass(frozen=True, slots=True)
class TraceEstimate:
    """Hutchinson's estimate: mean over ``samples`` draws, and its standard error."""

    mean: float
    standard_error: float
    samples: int
    seed: int


def block_lanczos(
    matvec: Matvec,
    size: int,
    *,
    top_k: int,
    tolerance: float,
    max_iterations: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_bytes: int = 2**30,
) -> BlockSpectrum:
    """Largest algebraic eigenvalues of a symmetric map.

    Args:
        matvec: the map.
        size: its dimension n.
        top_k: eigenvalues wanted; ``min(top_k, n)`` are returned.
        tolerance: residual over the largest |Ritz value| at which a pair has converged.
        max_iterations: block iterations at most.
        seed: of the start block, drawn on the CPU.
        dtype: of the basis.
        device: of the basis.
        max_bytes: bytes of the basis; at least three blocks are kept.

    Returns:
        The spectrum; ``converged`` says whether the tolerance was reached.
    """
    k = min(top_k, size)
    block = min(max(top_k, 1), size)
    room = max_bytes // max(1, size * torch.empty((), dtype=dtype).element_size())
    capacity = min(size, max(3 * block, min(room, block * max_iterations)))
    generator = torch.Generator().manual_seed(seed)

    def draw(columns: int) -> Tensor:
        return torch.randn(size, columns, generator=generator, dtype=torch.float64).to(device, dtype)

    basis = torch.empty(size, 0, dtype=dtype, device=device)
    projected = torch.zeros(0, 0, dtype=torch.float64)
    fresh = _orthonormal(draw(block), basis, draw, fill=True)
    values, residuals = torch.zeros(0), torch.full((k,), math.inf, dtype=torch.float64)
    iterations = matvecs = 0
    converged = False
    while iterations < max_iterations and fresh.shape[1]:
        if basis.shape[1] + fresh.shape[1] > capacity:
            keep = max(k, min(basis.shape[1] - 1, capacity - 2 * block))
            ritz, vectors = torch.linalg.eigh(projected)
            basis = basis @ vectors[:, -keep:].to(device, dtype)
            projected = torch.diag(ritz[-keep:])
        product = matvec(fresh)
        iterations += 1
        matvecs += fresh.shape[1]
        old = basis.shape[1]
        basis = torch.cat([basis, fresh], 1)
        coupling = (basis.T @ product).double().cpu()
        grown = torch.zeros(basis.shape[1], basis.shape[1], dtype=torch.float64)
        grown[:old, :old] = projected
        grown[:, old:] = coupling
        grown[old:, :old] = coupling[:old].T
        projected = (grown + grown.T) / 2
        if not bool(torch.isfinite(projected).all()):
            nan = (math.nan,) * k
            return BlockSpectrum(nan, nan, iterations, matvecs, False, seed)
        rest = product - basis @ (basis.T @ product)
        rest = rest - basis @ (basis.T @ rest)
        ritz, vectors = torch.linalg.eigh(projected)
        best = vectors.flip(1)[:, :k]
        values = ritz.flip(0)[:k]
        gram = (rest.T @ rest).double().cpu()
        last = best[old:]
        residuals = (last * (gram @ last)).sum(0).clamp_min(0.0).sqrt()
        scale = float(ritz.abs().max())
        if basis.shape[1] >= k and bool((residuals <= tolerance * scale).all()):
            converged = True
            break
        if basis.shape[1] >= size:
            converged = bool((residuals <= tolerance * scale).all())
            break
        fresh = _orthonormal(rest, basis, draw, fill=basis.shape[1] < k, floor=1e-10 * scale)
    return BlockSpectrum(
        tuple(values.tolist()), tuple(residuals.tolist()), iterations, matvecs, converged, seed
    )


def _orthonormal(
    block: Tensor, basis: Tensor, draw: Callable[[int], Tensor], *, fill: bool, floor: float = 0.0
) -> Tensor:
    """Orthonormal columns spanning ``block`` outside ``basis``; those below ``floor`` are dropped, or drawn anew if ``fill``."""
    room = basis.shape[0] - basis.shape[1]
    left: Tensor
    left, singular, _ = torch.linalg.svd(block, full_matrices=False)
    cut = max(floor, float(singular[0]) * 1e-12) if singular.numel() else 0.0
    keep = left[:, : min(room, int((singular > cut).sum()))]
    if fill and keep.shape[1] < min(room, block.shape[1]):
        keep = torch.cat([keep, draw(min(room, block.shape[1]) - keep.shape[1])], 1)
    for _ in range(2):
        keep = keep - basis @ (basis.T @ keep)
        if keep.shape[1]:
            keep, _ = torch.linalg.qr(keep)
    return keep


def rademacher(size: int, columns: int, *, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """``(size, columns)`` of independent −1 and +1 with equal probability."""
    return torch.randint(0, 2, (size, columns), generator=generator).to(dtype).mul_(2).sub_(1)


def hutchinson_trace(
    matvec: Matvec,
    size: int,
    *,
    samples: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> TraceEstimate:
    """tr H as the mean of zᵀHz over Rademacher z, one product at a time.

    Args:
        matvec: the map.
        size: its dimension.
        samples: draws, at least 2.
        seed: of the draws.
        dtype: of the vectors.
        device: of the vectors.

    Raises:
        TriAccelError: fewer than two draws, which have no spread.
    """
    if samples < 2:
        raise TriAccelError(f"Hutchinson's estimate needs at least 2 draws for its error, not {samples}")
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(samples):
        z = rademacher(size, 1, generator=generator, dtype=dtype).to(device)
        values.append((z * matvec(z)).sum().double())
    drawn = torch.stack(values).cpu()
    return TraceEstimate(float(drawn.mean()), float(drawn.std() / samples**0.5), samples, seed)


class _Blocks:
    """Hessian-vector products of each layer's block, over one graph of the gradient."""

    def __init__(self, gradients: dict[int, Tensor | None]) -> None:
        self._gradients = gradients
        self._batched = True

    def matvec(self, layer: Layer) -> Matvec:
        pairs = [(p, self._gradients[id(p)]) for p in layer.parameters]
        live = [(p, g) for p, g in pairs if g is not None and g.requires_grad]

        def multiply(vectors: Tensor) -> Tensor:
            columns = vectors.shape[1]
            pieces = dict(
                zip(
                    (id(p) for p, _ in pairs),
                    torch.split(vectors, [p.numel() for p, _ in pairs]),
                    strict=True,
                )
            )
            if not live:
                return torch.zeros_like(vectors)
            out = [
                _second(layer, live, [pieces[id(p)][:, c].reshape(p.shape) for p, _ in live])
                for c in range(columns)
            ]
            products = {
                id(p): torch.stack([row[i].reshape(-1) for row in out], 1) for i, (p, _) in enumerate(live)
            }
            return torch.cat([products.get(id(p), torch.zeros_like(pieces[id(p)])) for p, _ in pairs])

        return multiply


def _second(
    layer: Layer, live: Sequence[tuple[nn.Parameter, Tensor]], vectors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    with _double_backward(layer.name):
        return torch.autograd.grad(
            [g for _, g in live],
            [p for p, _ in live],
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
            raise TriAccelError(
                f"the Hessian of {where!r} needs a second derivative that an operation lacks ({text.splitlines()[0]}); "
                "curvature estimator 'fisher' (the Gram route) needs none"
            ) from error
        raise


@contextmanager
def _blocks(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    norm_statistics: NormStatistics,
) -> Iterator[tuple[list[Layer], _Blocks]]:
    owned = [layer for layer in layers if layer.parameters]
    if not owned:
        raise TriAccelError("no layer has a trainable parameter: there is no Hessian block; unfreeze a layer")
    device = owned[0].parameters[0].device
    with probe_region(model, statistics=norm_statistics, device=device) as constants, constants:
        loss = loss_fn(call_model(model, inputs), targets)
        reduction = getattr(loss_fn, "reduction", "mean")
        if loss.dim() != 0 or reduction == "none":
            raise TriAccelError(
                f"the loss has shape {tuple(loss.shape)} (reduction {reduction!r}), where a Hessian needs a scalar; "
                "use reduction='mean' or 'sum'"
            )
        if not loss.requires_grad:
            raise TriAccelError("the loss depends on no trainable parameter: no layer has a Hessian block")
        if reduction == "sum":
            loss = loss / targets.shape[0]
        parameters = [p for layer in owned for p in layer.parameters]
        with _double_backward("the model"):
            found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        used: dict[int, Tensor | None] = {id(p): g for p, g in zip(parameters, found, strict=True)}
        yield (
            [layer for layer in owned if any(used[id(p)] is not None for p in layer.parameters)],
            _Blocks(used),
        )


def hessian_probe(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor],
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
    loss_fn: Callable[[Any, Any], Tensor],
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
