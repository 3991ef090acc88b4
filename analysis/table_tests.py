"""The tables of tests: factorial effects, the primary family, and every comparison.

Paired t stands first, sign flip and BCa bootstrap beside it, p-values after Holm last. Source: ours; the tests are those of
``analysis.stats``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .compare import Comparer, Comparison, Outcome, primary_family, response
from .factorial import factorial_effects
from .groups import Group
from .labels import FACTORIAL_ARMS
from .stats import holm
from .table import Column, Number, Section, Table, Value, probability
from .tables import as_points, as_ratio, fields, title

__all__ = ["comparisons", "factorial", "primary", "responses"]


def factorial(groups: Sequence[Group]) -> Table:
    """Main effects and interactions of the 2³ design."""
    columns = [
        Column("effect", "Effect", number=False),
        Column("seeds", "Seeds"),
        Column("accuracy", "Accuracy, points", interval=True),
        Column("time", "Time, %", interval=True),
        Column("bytes", "Bytes, %", interval=True),
    ]
    sections = []
    for group in groups:
        effects = {
            outcome: factorial_effects(responses(group, outcome)) for outcome in ("accuracy", "time", "bytes")
        }
        names = list(dict.fromkeys(e.name for found in effects.values() for e in found))
        rows: list[list[Value]] = []
        for name in names:
            row: list[Value] = [name]
            found = {o: next((e for e in effects[o] if e.name == name), None) for o in effects}
            row.append(Number(max(len(e.seeds) for e in found.values() if e), digits=0))
            for outcome in ("accuracy", "time", "bytes"):
                effect = found[outcome]
                if effect is None:
                    row.append(Number(None))
                    continue
                ends = (effect.estimate.value, effect.estimate.low, effect.estimate.high)
                if outcome != "accuracy":
                    ends = tuple(None if end is None else 100 * (math.exp(end) - 1) for end in ends)  # type: ignore[assignment]
                row.append(Number(*ends, digits=2 if outcome == "accuracy" else 1, signed=True))
            rows.append(row)
        if rows:
            sections.append(Section(title(group), fields(group), rows))
    notes = [
        "Effect of a component: mean of the four arms with it less the mean of the four without; an interaction is half the "
        "change that one makes to the other's effect. Intervals: paired-t 95 % over seeds with all eight arms done.",
    ]
    return Table("factorial", "Main effects and interactions of the 2³ design", columns, sections, notes)


def responses(group: Group, outcome: Outcome) -> dict[str, dict[int, float]]:
    """arm -> seed -> response, for the eight arms; times of shared machines are left out."""
    found: dict[str, dict[int, float]] = {}
    for arm in FACTORIAL_ARMS:
        for record in group.done(arm):
            value = response(record, outcome)
            if value is not None and not (outcome == "time" and record.shared_machine):
                found.setdefault(arm, {})[record.seed] = value
    return found


def primary(groups: Sequence[Group], *, margin: float | None = None) -> Table:
    """The hypotheses stated beforehand, with Holm over those of one model and grid."""
    columns = [
        Column("hypothesis", "Hypothesis (tri-accel)", number=False),
        Column("pairs", "Pairs"),
        Column("estimate", "Points or ratio", interval=True),
        Column("bootstrap", "BCa bootstrap", number=True, interval=True),
        Column("one_sided", "One-sided bound"),
        Column("p", "p (t)"),
        Column("p_sign_flip", "p (sign flip)"),
        Column("p_holm", "p (Holm)"),
        Column("verdict", "Verdict", number=False),
    ]
    family = primary_family(groups, margin=margin)
    sections = []
    for group in groups:
        rows: list[list[Value]] = []
        for one in family:
            if one.group is not group:
                continue
            c, test = one.comparison, one.non_inferiority
            rows.append(
                [
                    one.hypothesis,
                    Number(len(c.values), digits=0),
                    as_points(c) if test else as_ratio(c),
                    bootstrap(c),
                    Number(test.low if test else None, digits=2, signed=True),
                    probability(one.p),
                    probability(c.p_sign_flip),
                    probability(one.p_holm),
                    one.verdict,
                ]
            )
        if rows:
            sections.append(Section(title(group), fields(group), rows))
    notes = [
        "Stated before the runs. Paired t decides; sign flip and bootstrap stand beside it. Holm over the hypotheses of one "
        "model. Accuracy is tested one-sided against the margin, time two-sided; an interval that crosses the margin is "
        "inconclusive.",
    ]
    return Table("primary", "Primary hypotheses", columns, sections, notes)


def bootstrap(comparison: Comparison) -> Number:
    """BCa interval with the estimate, as points or ratio."""
    e = comparison.estimate
    if e is None or comparison.bootstrap is None:
        return Number(None)
    if comparison.outcome == "accuracy":
        return Number(e.value, *comparison.bootstrap, digits=2, signed=True)
    low, high = (math.exp(end) for end in comparison.bootstrap)
    return Number(math.exp(e.value), low, high, digits=3)


def comparisons(groups: Sequence[Group], comparer: Comparer) -> Table:
    """Every arm against fp32 and against the best static setting, all three outcomes; Holm over each column of the grid."""
    columns = [
        Column("arm", "Arm", number=False),
        Column("reference", "Against", number=False),
        Column("outcome", "Outcome", number=False),
        Column("pairs", "Pairs"),
        Column("refused", "Refused"),
        Column("estimate", "Points or ratio", interval=True),
        Column("bootstrap", "BCa bootstrap", interval=True),
        Column("p", "p (t)"),
        Column("p_sign_flip", "p (sign flip)"),
        Column("p_holm", "p (Holm)"),
    ]
    sections = []
    for group in groups:
        rows: list[list[Value]] = []
        references = list(dict.fromkeys(r for r in ("fp32", group.best_static) if r and group.done(r)))
        for reference in references:
            for outcome in ("accuracy", "time", "bytes"):
                found = [comparer.get(group, a, reference, outcome) for a in group.arms if a != reference]
                found = [c for c in found if c.values or c.refused]
                adjusted = holm([c.estimate.p if c.estimate else None for c in found])
                for c, p_holm in zip(found, adjusted, strict=True):
                    rows.append(
                        [
                            c.arm,
                            reference,
                            {"accuracy": "accuracy, points", "time": "time, ratio", "bytes": "bytes, ratio"}[
                                outcome
                            ],
                            Number(len(c.values), digits=0),
                            Number(len(c.refused), digits=0),
                            as_points(c) if outcome == "accuracy" else as_ratio(c),
                            bootstrap(c),
                            probability(c.estimate.p if c.estimate else None),
                            probability(c.p_sign_flip),
                            probability(p_holm),
                        ]
                    )
        if rows:
            sections.append(Section(title(group), fields(group), rows))
    notes = [
        "Descriptive: p-values are two-sided against no difference; Holm over the arms of one outcome and reference."
    ]
    return Table(
        "comparisons", "Every arm against fp32 and the best static setting", columns, sections, notes
    )
