"""Metric to interval: paired seeds to estimates, intervals and p-values.

All functions take one difference (or log-ratio) a seed, ``(n,)`` float64, paired within a block.

- ``paired_t``: mean +- t_{n-1} s/sqrt(n), the interval that is reported first;
- ``sign_flip``: exact permutation test of "differences are symmetric about 0" over the 2^n signs (Monte Carlo above 2^14);
- ``bca``: bias-corrected and accelerated bootstrap over whole seeds (Efron 1987), beside the t interval: at n <= 10 it is
  the narrower and undercovers;
- ``holm``: step-down adjustment over a family (Holm 1979);
- ``non_inferiority``: one-sided t bound against a margin; an interval that crosses it is ``inconclusive``.

With one seed there is no interval (``low`` and ``high`` are ``None``). Needs scipy.special alone, so it starts fast.
Cost: O(n resamples). Sources as named; conventions ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Estimate",
    "NonInferiority",
    "Verdict",
    "bca",
    "holm",
    "non_inferiority",
    "paired_t",
    "sign_flip",
    "smallest_sign_flip_p",
]

Verdict = Literal["non-inferior", "inferior", "inconclusive"]
EXACT_UP_TO = 14
"""Seeds up to which the sign-flip test enumerates every sign."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its interval.

    Attributes:
        value: mean of the differences.
        low, high: ends of the two-sided interval; ``None`` with fewer than two seeds.
        p: two-sided p-value of a mean of 0; ``None`` with fewer than two seeds.
        n: seeds.
    """

    value: float
    low: float | None
    high: float | None
    p: float | None
    n: int


@dataclass(frozen=True, slots=True)
class NonInferiority:
    """Is the mean difference above ``-margin``?

    Attributes:
        value: mean difference (new minus reference; larger is better).
        low: lower one-sided bound at the confidence asked for; ``None`` with one seed.
        high: upper one-sided bound at the same confidence.
        p: one-sided p-value of "the difference is at most -margin".
        margin: positive, in the unit of the differences.
        verdict: ``non-inferior`` if ``low > -margin``, ``inferior`` if ``high < -margin``, else ``inconclusive``.
        n: seeds.
    """

    value: float
    low: float | None
    high: float | None
    p: float | None
    margin: float
    verdict: Verdict
    n: int


def _vector(differences: ArrayLike) -> NDArray[np.float64]:
    x = np.asarray(differences, dtype=np.float64)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"differences of shape {x.shape}: one number a seed, at least one, was expected")
    if not np.isfinite(x).all():
        raise ValueError(
            "a difference is not finite: failed cells are states, not numbers; leave them out and count them"
        )
    return x


def _t_and_scale(x: NDArray[np.float64], shift: float) -> tuple[float, float]:
    scale = float(x.std(ddof=1) / math.sqrt(x.size))
    if scale <= 1e-12 * max(1.0, float(np.abs(x).max())):  # equal differences, up to rounding
        distance = float(x.mean()) - shift
        return (0.0 if abs(distance) < 1e-12 else math.copysign(math.inf, distance)), 0.0
    return (float(x.mean()) - shift) / scale, scale


def paired_t(differences: ArrayLike, *, confidence: float = 0.95) -> Estimate:
    """Mean, two-sided t interval and p-value.

    Args:
        differences: (n,) one a seed.
        confidence: in (0, 1).

    Raises:
        ValueError: empty, not one-dimensional, or not finite.
    """
    from scipy.special import stdtr, stdtrit

    x = _vector(differences)
    mean = float(x.mean())
    if x.size < 2:
        return Estimate(mean, None, None, None, 1)
    t, scale = _t_and_scale(x, 0.0)
    half = float(stdtrit(x.size - 1, 0.5 + confidence / 2)) * scale
    return Estimate(mean, mean - half, mean + half, float(2 * stdtr(x.size - 1, -abs(t))), int(x.size))


def non_inferiority(differences: ArrayLike, *, margin: float, confidence: float = 0.95) -> NonInferiority:
    """One-sided t test of ``mean > -margin``.

    Args:
        differences: (n,) new minus reference, larger is better.
        margin: positive, in the same unit.
        confidence: of each one-sided bound.

    Raises:
        ValueError: as ``paired_t``, or a margin that is not positive.
    """
    from scipy.special import stdtr, stdtrit

    if not margin > 0:
        raise ValueError(f"margin {margin}: a positive number was expected")
    x = _vector(differences)
    mean = float(x.mean())
    if x.size < 2:
        return NonInferiority(mean, None, None, None, margin, "inconclusive", 1)
    t, scale = _t_and_scale(x, -margin)
    half = float(stdtrit(x.size - 1, confidence)) * scale
    low, high = mean - half, mean + half
    verdict: Verdict = "non-inferior" if low > -margin else "inferior" if high < -margin else "inconclusive"
    return NonInferiority(mean, low, high, float(stdtr(x.size - 1, -t)), margin, verdict, int(x.size))


def sign_flip(
    differences: ArrayLike, *, generator: np.random.Generator, resamples: int = 20_000
) -> float | None:
    """Two-sided p-value of the sign-flip test on the mean; ``None`` with one seed.

    Exact (all 2^n signs) up to ``EXACT_UP_TO`` seeds; above, ``(1 + hits) / (1 + resamples)`` with random signs.

    Args:
        differences: (n,).
        generator: source of the signs; untouched where the test is exact.
        resamples: random sign vectors.

    Raises:
        ValueError: as ``paired_t``.
    """
    x = _vector(differences)
    n = x.size
    if n < 2:
        return None
    observed = abs(float(x.sum())) * (1 - 1e-12) - 1e-15
    if n <= EXACT_UP_TO:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float((np.abs(signs @ x) >= observed).mean())
    signs = generator.integers(0, 2, size=(resamples, n)) * 2 - 1
    return float((1 + int((np.abs(signs @ x) >= observed).sum())) / (1 + resamples))


def smallest_sign_flip_p(n: int) -> float:
    """Least two-sided p-value that n paired seeds can give: 2 / 2^n."""
    return min(1.0, 2.0 / 2.0**n)


def bca(
    differences: ArrayLike, *, generator: np.random.Generator, resamples: int = 4999, confidence: float = 0.95
) -> tuple[float, float] | None:
    """BCa bootstrap interval of the mean over whole seeds; ``None`` with one seed.

    Bias correction z0 from the share of resampled means below the mean, acceleration from the jackknife. Equal
    differences give that one value twice.

    Args:
        differences: (n,).
        generator: source of the resamples.
        resamples: bootstrap samples.
        confidence: two-sided.

    Raises:
        ValueError: as ``paired_t``.

    Source: Efron 1987, as in Efron and Tibshirani 1993, chapter 14.
    """
    from scipy.special import ndtr, ndtri

    x = _vector(differences)
    n = x.size
    if n < 2:
        return None
    mean = x.mean()
    if np.ptp(x) <= 1e-12 * max(1.0, float(np.abs(x).max())):
        return float(mean), float(mean)
    means = x[generator.integers(0, n, size=(resamples, n))].mean(axis=1)
    share = ((means < mean).sum() + (means <= mean).sum()) / (2 * resamples)
    z0 = ndtri(np.clip(share, 1 / (resamples + 1), resamples / (resamples + 1)))
    jack = (x.sum() - x) / (n - 1)
    centred = jack.mean() - jack
    acceleration = (centred**3).sum() / (6 * (centred**2).sum() ** 1.5)
    z = ndtri(np.array([(1 - confidence) / 2, (1 + confidence) / 2]))
    level = ndtr(z0 + (z0 + z) / (1 - acceleration * (z0 + z)))
    low, high = np.quantile(means, level)
    return float(low), float(high)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values, in the order given; ``None`` (not tested) stays and does not count.

    Source: Holm 1979: p_(i) -> max over j <= i of min(1, (m - j + 1) p_(j)).
    """
    tested = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - rank) * p))
        adjusted[index] = highest
    return adjusted
