"""Main effects and interactions of the 2³ design, with intervals over seeds.

One response y a seed and arm (accuracy, log time, log bytes). With s_i = +-1 for component i on or off, the effect of a set of
components is 2/8 Σ_arms (Π_i s_i) y: for one component the mean with it minus the mean without it; for two, half the change
that one makes to the other's effect. Each seed gives one value of each effect, and the interval is the paired t over seeds,
so that what seeds share cancels. Only seeds with all eight arms count. Cost: O(8 seeds). Source: the textbook contrasts of
a 2^k design (Box, Hunter and Hunter); ours in the pairing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from .labels import COMPONENTS, FACTORIAL_ARMS
from .stats import Estimate, paired_t

__all__ = ["EFFECTS", "Effect", "contrast", "factorial_effects"]

EFFECTS: tuple[tuple[str, ...], ...] = tuple(
    effect for size in (1, 2, 3) for effect in combinations(COMPONENTS, size)
)
"""Three main effects, three two-way interactions, one three-way."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect.

    Attributes:
        components: one name for a main effect, several for an interaction.
        estimate: mean over seeds, with its interval, in the unit of the response.
        per_seed: (n,) the effect at each seed.
        seeds: the seeds, ascending.
    """

    components: tuple[str, ...]
    estimate: Estimate
    per_seed: NDArray[np.float64]
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """``"precision"`` or ``"precision x batch"``."""
        return " x ".join(self.components)


def contrast(effect: tuple[str, ...]) -> NDArray[np.float64]:
    """Weights (8,) of the arms, in the order of ``FACTORIAL_ARMS``."""
    signs = []
    for arm in FACTORIAL_ARMS:
        on = set(COMPONENTS) if arm == "tri-accel" else set(arm.split("+"))
        signs.append(np.prod([1.0 if component in on else -1.0 for component in effect]))
    return np.array(signs) / 4.0


def factorial_effects(responses: Mapping[str, Mapping[int, float]]) -> list[Effect]:
    """All seven effects, or none where no seed has all eight arms.

    Args:
        responses: arm -> seed -> response.
    """
    if any(arm not in responses for arm in FACTORIAL_ARMS):
        return []
    seeds = sorted(set.intersection(*(set(responses[arm]) for arm in FACTORIAL_ARMS)))
    if not seeds:
        return []
    y = np.array([[responses[arm][seed] for arm in FACTORIAL_ARMS] for seed in seeds])
    effects = []
    for effect in EFFECTS:
        per_seed = y @ contrast(effect)
        effects.append(Effect(effect, paired_t(per_seed), per_seed, tuple(seeds)))
    return effects
