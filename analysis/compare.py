"""Paired comparisons of two arms within blocks, and the primary family.

A pair is two finished cells of one seed in one block on one host. Pairs are refused, with the reason, where the blocks or hosts
differ, and, for times, where a cell ran on a shared machine: a refused pair is counted, never averaged in. Accuracy is a
difference in points of final test accuracy; time and bytes are log-ratios, shown as ratios of geometric means. All three come
from the same cells, and time is all training time, the controller's own cost and the calibration included.
Source: ours; the tests are those of ``analysis.stats``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .groups import Group
from .record import Record
from .stats import Estimate, NonInferiority, bca, holm, non_inferiority, paired_t, sign_flip

__all__ = [
    "Comparer",
    "Comparison",
    "Outcome",
    "Primary",
    "Refused",
    "compare",
    "peak_bytes",
    "primary_family",
    "ratio_of",
    "response",
]

Outcome = Literal["accuracy", "time", "bytes"]
MANY = 40
"""Seeds above which fewer resamples are enough."""


class Refused(ValueError):
    """Two cells may not be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm against a reference, one outcome.

    Attributes:
        arm, reference: labels.
        outcome: ``accuracy`` (points), ``time`` or ``bytes`` (natural log of the ratio).
        estimate: mean over pairs with its t interval, or ``None`` without a pair.
        bootstrap: BCa interval, or ``None`` with fewer than two pairs.
        p_sign_flip: or ``None``.
        seeds, values: of the pairs.
        refused: why pairs were left out, one line a pair.
    """

    arm: str
    reference: str
    outcome: Outcome
    estimate: Estimate | None
    bootstrap: tuple[float, float] | None
    p_sign_flip: float | None
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Primary:
    """One hypothesis of the primary family.

    Attributes:
        group: where it was tested.
        hypothesis: in words.
        comparison: the paired comparison.
        non_inferiority: for accuracy, else ``None``.
        p, p_holm: before and after Holm over the family of the model; ``None`` if untestable.
        verdict: in a word; ``inconclusive`` whenever the interval crosses the margin or Holm does not clear 0.05.
    """

    group: Group
    hypothesis: str
    comparison: Comparison
    non_inferiority: NonInferiority | None
    p: float | None
    p_holm: float | None
    verdict: str


def peak_bytes(record: Record) -> float | None:
    """Bytes that the memory columns compare: reserved on CUDA, peak live tensor storage on CPU."""
    return record.metric("peak_cuda_reserved_bytes" if record.on_cuda else "peak_live_tensor_bytes")


def response(record: Record, outcome: Outcome) -> float | None:
    """Accuracy in points, natural log of seconds, or natural log of bytes; ``None`` if unmeasured."""
    if outcome == "accuracy":
        value = record.accuracy
        return None if value is None else 100.0 * value
    value = record.metric("train_seconds") if outcome == "time" else peak_bytes(record)
    return math.log(value) if value else None


def ratio_of(new: Record, reference: Record, outcome: Outcome) -> float:
    """Difference of the two responses: points, or log-ratio.

    Raises:
        Refused: other model, data set, seed, block, host or hardware, or (times) a shared machine.
    """
    from .groups import hardware

    what = f"seed {new.seed}: {new.arm} against {reference.arm}"
    if (new.model, new.dataset, new.seed) != (reference.model, reference.dataset, reference.seed):
        raise Refused(f"{what}: another model, data set or seed")
    if new.block != reference.block:
        raise Refused(f"{what}: ran in different blocks ({new.block!r}, {reference.block!r})")
    if new.provenance != reference.provenance and (
        hardware(new) != hardware(reference) or new.provenance.get("host") != reference.provenance.get("host")
    ):
        raise Refused(f"{what}: ran on different hardware ({hardware(new)}; {hardware(reference)})")
    if outcome == "time" and (new.shared_machine or reference.shared_machine):
        raise Refused(f"{what}: timed while other work ran on the machine")
    ours, theirs = response(new, outcome), response(reference, outcome)
    if ours is None or theirs is None:
        raise Refused(f"{what}: {outcome} not measured")
    return ours - theirs


def compare(group: Group, arm: str, reference: str, outcome: Outcome) -> Comparison:
    """All pairs of two arms of a group.

    Args:
        group: cells that may be compared.
        arm: label of the new arm.
        reference: label of the reference.
        outcome: what to compare.
    """
    others = {record.seed: record for record in group.done(reference)}
    seeds: list[int] = []
    values: list[float] = []
    refused: list[str] = []
    for record in group.done(arm):
        if record.seed not in others:
            continue
        try:
            values.append(ratio_of(record, others[record.seed], outcome))
            seeds.append(record.seed)
        except Refused as why:
            refused.append(str(why))
    if not values:
        return Comparison(arm, reference, outcome, None, None, None, (), (), tuple(refused))
    few = len(values) <= MANY
    key = "|".join((group.model, group.dataset, arm, reference, outcome)).encode()
    generator = np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest()[:8], "big"))
    return Comparison(
        arm,
        reference,
        outcome,
        paired_t(values),
        bca(values, generator=generator, resamples=4999 if few else 999),
        sign_flip(values, generator=generator, resamples=20_000 if few else 999),
        tuple(seeds),
        tuple(values),
        tuple(refused),
    )


class Comparer:
    """``compare`` with its results kept, so that every table shows the same numbers and none is computed twice."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str, Outcome], Comparison] = {}
        self._groups: list[Group] = []  # keeps the ids in use

    def get(self, group: Group, arm: str, reference: str, outcome: Outcome) -> Comparison:
        """As ``compare``."""
        key = (id(group), arm, reference, outcome)
        if key not in self._known:
            self._groups.append(group)
            self._known[key] = compare(group, arm, reference, outcome)
        return self._known[key]


def primary_family(groups: Sequence[Group], *, margin: float | None = None) -> list[Primary]:
    """The hypotheses stated beforehand: tri-accel's accuracy against fp32, its time against the best static setting.

    Holm runs over all of them of one model and grid.

    Args:
        groups: as ``make_groups`` gives them.
        margin: accuracy points; ``None``: the grid's own.
    """
    found: list[Primary] = []
    for group in groups:
        if not group.done("tri-accel"):
            continue
        if group.done("fp32"):
            accuracy = compare(group, "tri-accel", "fp32", "accuracy")
            if accuracy.values:
                test = non_inferiority(accuracy.values, margin=margin or group.margin)
                words = f"accuracy not more than {test.margin:g} points below fp32"
                found.append(Primary(group, words, accuracy, test, test.p, None, test.verdict))
        if group.best_static is not None:
            time = compare(group, "tri-accel", group.best_static, "time")
            words = f"training time against the best static setting ({group.best_static})"
            found.append(
                Primary(
                    group, words, time, None, time.estimate.p if time.estimate else None, None, "inconclusive"
                )
            )
    families: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(found):
        families.setdefault((one.group.grid, one.group.model), []).append(index)
    for members in families.values():
        adjusted = holm([found[index].p for index in members])
        for index, p_holm in zip(members, adjusted, strict=True):
            found[index] = _judged(found[index], p_holm)
    return found


def _judged(one: Primary, p_holm: float | None) -> Primary:
    verdict = one.verdict
    clear = p_holm is not None and p_holm < 0.05
    if one.non_inferiority is None:
        estimate = one.comparison.estimate
        if estimate is None:
            verdict = "refused" if one.comparison.refused else "no pairs"
        else:
            verdict = ("faster" if estimate.value < 0 else "slower") if clear else "inconclusive"
    elif verdict == "non-inferior" and not clear:
        verdict = "inconclusive"
    return Primary(one.group, one.hypothesis, one.comparison, one.non_inferiority, one.p, p_holm, verdict)
