"""How far a kernel may be from float64, by kind of result and dtype, each with its reason. Used by the tests and by ``check``.

``u`` is half the gap between 1 and the next number: 2^-24 for FP32, 2^-9 for BF16, 2^-12 for FP16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TOLERANCE", "Tolerance", "deviation"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest deviation, relative to the scale that ``of`` names, and why."""

    value: float
    of: str
    why: str


TOLERANCE: dict[tuple[str, torch.dtype], Tolerance] = {
    ("total", torch.float32): Tolerance(
        2e-6,
        "sum of magnitudes",
        "FP32 sums of at most 16 terms in a row and a tree of 10 levels: 26 u = 1.6e-6; FP64 above",
    ),
    ("total", torch.bfloat16): Tolerance(
        2e-6, "sum of magnitudes", "BF16 widens to FP32 exactly; then as FP32"
    ),
    ("total", torch.float16): Tolerance(
        2e-6, "sum of magnitudes", "FP16 widens to FP32 exactly; then as FP32"
    ),
    ("square", torch.float32): Tolerance(
        2e-6, "sum of squares", "one more rounding per term than the sum, all terms positive"
    ),
    ("square", torch.bfloat16): Tolerance(
        2e-6, "sum of squares", "squares of BF16 are exact in FP32; then as FP32"
    ),
    ("square", torch.float16): Tolerance(
        2e-6, "sum of squares", "squares of FP16 are exact in FP32; then as FP32"
    ),
    ("update", torch.float32): Tolerance(
        5e-7, "largest magnitude", "one step: at most 8 roundings of terms no larger than the result, 8 u"
    ),
    ("1000 steps", torch.float32): Tolerance(
        1e-5,
        "largest magnitude",
        "1,000 roundings of the parameter, u each, add like a random walk: 32 u = 2e-6, five-fold for the worst entry",
    ),
    ("1000 steps AdamW", torch.float32): Tolerance(
        4e-5,
        "largest magnitude",
        "as above, and torch's operator takes beta2 and 1 - lr wd in FP32: up to 1.3e-5 and 3e-5, always the same way",
    ),
    ("1000 steps", torch.bfloat16): Tolerance(
        2e-2,
        "distance travelled",
        "momentum rounded to 8 bits, unbiased: 2^-8 a step, averaged over steps, amplified by 1 / (1 - momentum) at most",
    ),
    ("gram", torch.float32): Tolerance(
        1e-5, "largest diagonal entry", "FP32 products summed over positions and features, no TF32: 100 u"
    ),
}


def deviation(found: Tensor, exact: Tensor, scale: Tensor | float | None = None) -> float:
    """Largest |found - exact| over ``scale`` (default: the largest magnitude of ``exact``); 0 for empty tensors."""
    if exact.numel() == 0:
        return 0.0
    exact = exact.double()
    difference = (found.double().to(exact.device) - exact).abs()
    if scale is None:
        scale = exact.abs().max()
    ratio = difference / torch.as_tensor(scale, dtype=torch.float64, device=exact.device).clamp_min(1e-300)
    return float(torch.where(difference == 0, 0.0, ratio).max())
