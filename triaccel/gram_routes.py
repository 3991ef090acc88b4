"""Gram matrices of per-sample gradients that are sums of outer products, by the cheaper of two exact routes.

With ∂W_i = Σ_t L_it ⊗ R_it for sample i (L the gradient of an output, R its input or patch; m = |L_it|, n = |R_it|, T positions):

    "outer"  form ∂W_i = L_iᵀ R_i, then contract:        B·T·m·n + B²·m·n multiply-adds,  B·m·n scalars
    "inner"  K[i,j] = Σ_{t,s} (L_it·L_js)(R_it·R_js):    B²·T²·(m + n) multiply-adds,     2·(B·T)² scalars

``choose_route`` takes the cheaper. Temporaries stay within ``max_bytes``: the outer route goes by tiles of R's columns and
L's, the inner by tiles of samples, using K's symmetry. R comes from a function, so that patches need never be there all at once.
Sources: the inner route is arXiv 1510.01799's for norms, extended to pairs and positions (ours).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

__all__ = ["Route", "choose_route", "contract", "outer_sum_gram"]

Route = Literal["outer", "inner"]
Rows = Callable[[slice, slice], Tensor]
"""``(samples, column units) -> (b, T, columns)``: part of R."""


def choose_route(*, samples: int, positions: int, left: int, right: int, max_bytes: int) -> Route:
    """The cheaper exact route by multiply-adds; "outer" where one sample's tile of the inner route exceeds ``max_bytes``.

    Args:
        samples: B.
        positions: T.
        left: m.
        right: n.
        max_bytes: bytes that temporaries may take.
    """
    if 8 * positions * positions + 8 * positions * (left + right) > max_bytes:
        return "outer"
    outer = samples * (positions + samples) * left * right
    inner = (samples * positions) ** 2 * (left + right)
    return "inner" if inner <= outer else "outer"


def contract(gradients: Tensor) -> Tensor:
    """``(B, ...)`` to the ``(B, B)`` matrix of inner products."""
    flat = gradients.flatten(1)
    return flat @ flat.T


def outer_sum_gram(
    left: Tensor, right: Rows, *, units: int, width: int, max_bytes: int, route: Route | None = None
) -> tuple[Tensor, Route]:
    """K of ∂W_i = Σ_t L_it ⊗ R_it.

    Args:
        left: L, ``(B, T, m)``.
        right: gives R for a slice of samples and a slice of column units.
        units: column units of R (input channels).
        width: columns in a unit (kernel taps); n = units · width.
        max_bytes: bytes that temporaries may take.
        route: force one; ``None``: the cheaper.

    Returns:
        ``(K, route)``.
    """
    samples, positions, m = left.shape
    route = route or choose_route(
        samples=samples, positions=positions, left=m, right=units * width, max_bytes=max_bytes
    )
    if route == "outer":
        return _outer(left, right, units, width, max_bytes), route
    if positions == 1:
        return contract(left) * contract(right(slice(None), slice(None))), route
    return _inner(left, right, units * width, max_bytes), route


def _outer(left: Tensor, right: Rows, units: int, width: int, max_bytes: int) -> Tensor:
    samples, positions, m = left.shape
    size = left.element_size() * samples
    rows = max(1, min(m, max_bytes // (2 * size * width)))
    step = max(1, min(units, max_bytes // (size * width * (positions + rows))))
    gram = left.new_zeros(samples, samples)
    transposed = left.transpose(1, 2)
    for start in range(0, units, step):
        columns = right(slice(None), slice(start, min(start + step, units)))
        for row in range(0, m, rows):
            gram += contract(transposed[:, row : row + rows] @ columns)
    return gram


def _inner(left: Tensor, right: Rows, n: int, max_bytes: int) -> Tensor:
    samples, positions, m = left.shape
    size = left.element_size()
    budget = max_bytes // size
    tile = samples
    while tile > 1 and 2 * (tile * positions) ** 2 + 2 * tile * positions * (m + n) > budget:
        tile = (tile + 1) // 2
    if tile == samples and samples * positions >= 1024:
        tile = (samples + 3) // 4  # large enough that computing K's lower half only is worth four tiles
    tiles = [slice(i, min(i + tile, samples)) for i in range(0, samples, tile)]
    gram = left.new_zeros(samples, samples)
    everything = slice(None)
    for index, rows in enumerate(tiles):
        l_i, r_i = left[rows].flatten(0, 1), right(rows, everything).flatten(0, 1)
        for columns in tiles[index:]:
            same = columns == rows
            l_j = l_i if same else left[columns].flatten(0, 1)
            r_j = r_i if same else right(columns, everything).flatten(0, 1)
            part = (l_i @ l_j.T).mul_(r_i @ r_j.T)
            part = part.view(-1, positions, part.shape[1] // positions, positions).sum((1, 3))
            gram[rows, columns] = part
            if not same:
                gram[columns, rows] = part.T
    return gram
