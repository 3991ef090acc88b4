"""Largest algebraic eigenvalues of a symmetric map by block Lanczos, and its trace by Hutchinson's estimate.

``block_lanczos`` builds an orthonormal basis V of a block Krylov space with full re-orthogonalisation, keeps T = VᵀHV as
computed from the products themselves, and reads the largest *algebraic* eigenvalues off T. A block of k vectors finds
eigenvalues repeated up to k times. When the basis is full it restarts from its best Ritz vectors (thick restart). The residual
of a Ritz pair is what the last products leave outside V. New directions are orthonormalised by their b×b Gram matrix, in FP64.

Cost: iterations × b products; n × (columns kept) numbers, at most ``max_bytes``; 4·n·columns multiply-adds per column. Sources:
block Lanczos, Golub & Underwood 1977; thick restart, Wu & Simon 2000; orthonormalisation, Stathopoulos & Wu 2002; trace,
Hutchinson 1990.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .types import TriAccelError

__all__ = ["BlockSpectrum", "Matvec", "TraceEstimate", "block_lanczos", "hutchinson_trace", "rademacher"]

Matvec = Callable[[Tensor], Tensor]
"""``(b, n) -> (b, n)``, a symmetric linear map of each row."""


@dataclass(frozen=True, slots=True)
class BlockSpectrum:
    """Largest algebraic eigenvalues of one symmetric block.

    Attributes:
        eigenvalues: top k (or all, if the block is smaller), descending.
        residuals: ‖H v − λ v‖ of each, for unit v.
        iterations: block iterations done.
        matvecs: products done.
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
    room = max_bytes // (size * torch.finfo(dtype).bits // 8)
    capacity = min(size, max(3 * k, min(room, k * max_iterations)))
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> Tensor:
        return torch.randn(rows, size, generator=generator, dtype=dtype).to(device)

    basis: list[Tensor] = []
    kept = 0
    projected = torch.zeros(0, 0, dtype=torch.float64)
    fresh = _orthonormal(draw(k), basis)
    values, residuals = torch.zeros(0), torch.full((k,), math.inf, dtype=torch.float64)
    iterations = matvecs = 0
    converged = False
    while iterations < max_iterations and fresh.shape[0]:
        if kept + fresh.shape[0] > capacity:
            keep = max(k, min(kept - 1, capacity - 2 * k))
            ritz, vectors = torch.linalg.eigh(projected)
            basis = [_combine(basis, vectors[:, -keep:])]
            projected, kept = torch.diag(ritz[-keep:]), keep
        product = matvec(fresh)
        iterations += 1
        matvecs += fresh.shape[0]
        basis.append(fresh)
        old, kept = kept, kept + fresh.shape[0]
        coupling = _project(basis, product)
        grown = torch.zeros(kept, kept, dtype=torch.float64)
        grown[:old, :old] = projected
        grown[:, old:] = coupling.double().cpu()
        grown[old:, :old] = grown[:old, old:].T
        projected = (grown + grown.T) / 2
        if not bool(torch.isfinite(projected).all()):
            nan = (math.nan,) * k
            return BlockSpectrum(nan, nan, iterations, matvecs, False, seed)
        rest = _outside(_minus(product, basis, coupling), basis)
        ritz, vectors = torch.linalg.eigh(projected)
        values = ritz.flip(0)[:k]
        last = vectors.flip(1)[old:, :k]
        residuals = (last * (_gram(rest) @ last)).sum(0).clamp_min(0.0).sqrt()
        scale = float(ritz.abs().max())
        converged = kept >= k and bool((residuals <= tolerance * scale).all())
        if converged or kept >= size:
            break
        fresh = _orthonormal(rest, basis, floor=1e-12 * scale)[: size - kept]
        if not fresh.shape[0]:  # an invariant subspace: look outside it for what the start block missed
            fresh = _orthonormal(_outside(draw(min(k, size - kept)), basis), basis)
    return BlockSpectrum(
        tuple(values.tolist()), tuple(residuals.tolist()), iterations, matvecs, converged, seed
    )


def _gram(block: Tensor) -> Tensor:
    wide = block.double()
    return (wide @ wide.T).cpu()


def _project(basis: list[Tensor], block: Tensor) -> Tensor:
    """Vᵀ block, ``(columns, b)``."""
    return torch.cat([part @ block.T for part in basis])


def _combine(basis: list[Tensor], weights: Tensor) -> Tensor:
    """Rows Σ_c weights[c] v_c, ``(w, n)``."""
    moved = weights.to(basis[0].device, basis[0].dtype)
    pieces = torch.split(moved, [part.shape[0] for part in basis])
    total = pieces[0].T @ basis[0]
    for piece, part in zip(pieces[1:], basis[1:], strict=True):
        total.addmm_(piece.T, part)
    return total


def _minus(block: Tensor, basis: list[Tensor], coupling: Tensor) -> Tensor:
    """block − Vᵀ coupling, a new tensor."""
    pieces = torch.split(coupling, [part.shape[0] for part in basis])
    rest = torch.addmm(block, pieces[0].T, basis[0], alpha=-1.0)
    for piece, part in zip(pieces[1:], basis[1:], strict=True):
        rest.addmm_(piece.T, part, alpha=-1.0)
    return rest


def _outside(block: Tensor, basis: list[Tensor]) -> Tensor:
    """Part of ``block`` orthogonal to the basis, by one pass of Gram–Schmidt."""
    return _minus(block, basis, _project(basis, block)) if basis else block


def _orthonormal(block: Tensor, basis: list[Tensor], *, floor: float = 0.0) -> Tensor:
    """Orthonormal rows spanning ``block``, nearly outside ``basis`` already; directions no longer than ``floor`` are dropped."""
    for step in range(2):
        values, vectors = torch.linalg.eigh(_gram(block))
        lengths = values.clamp_min(0.0).sqrt()
        longest = float(lengths.max()) if lengths.numel() else 0.0
        keep = lengths > max(floor if step == 0 else 0.0, 1e-7 * longest)
        turn = (vectors[:, keep] / lengths[keep]).flip(1)
        block = turn.T.to(block.device, block.dtype) @ block
        if step == 0:
            block = _outside(block, basis)
    return block


def rademacher(rows: int, size: int, *, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """``(rows, size)`` of independent −1 and +1 with equal probability."""
    return torch.randint(0, 2, (rows, size), generator=generator).to(dtype).mul_(2).sub_(1)


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

    Returns:
        Mean and standard error over the draws.

    Raises:
        TriAccelError: fewer than two draws, which have no spread.
    """
    if samples < 2:
        raise TriAccelError(f"Hutchinson's estimate needs at least 2 draws for its error, not {samples}")
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(samples):
        z = rademacher(1, size, generator=generator, dtype=dtype).to(device)
        values.append((z * matvec(z)).sum().double())
    drawn = torch.stack(values).cpu()
    return TraceEstimate(float(drawn.mean()), float(drawn.std() / samples**0.5), samples, seed)
