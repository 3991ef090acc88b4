"""What an arm is called in tables and figures, and in which order arms stand.

A label is the arm's ``name``; ``name@batch`` where the grid ran it at several batches; ``+ engine`` where gradient release or the
fused update were on; and the settings that differ, in brackets, where two cells of one arm and seed differ in their
configuration alone. Source: ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .record import Record, RecordError

__all__ = ["COMPONENTS", "FACTORIAL_ARMS", "STATIC_ARMS", "labelled"]

STATIC_ARMS = ("fp32", "amp-bf16", "amp-fp16", "profiled-static")
"""Static settings among which "the best static setting" is chosen."""


COMPONENTS = ("precision", "curvature", "batch")


FACTORIAL_ARMS = (
    "off",
    "precision",
    "curvature",
    "batch",
    "precision+curvature",
    "precision+batch",
    "curvature+batch",
    "tri-accel",
)
"""The eight arms of the 2³ design."""


_ORDER = (*STATIC_ARMS, *FACTORIAL_ARMS, "tri-accel-paper", "replay")


def labelled(members: Sequence[Record]) -> dict[str, tuple[Record, ...]]:
    """Records by label, in the order of the tables; each list by seed.

    Args:
        members: cells of one group.

    Raises:
        RecordError: two cells of one arm, seed and configuration.
    """
    batches: dict[str, set[Any]] = {}
    for record in members:
        batches.setdefault(record.arm.partition("@")[0], set()).add(record.cell.get("batch"))
    usual = {base: _usual_batch(members, base) if len(sizes) > 1 else None for base, sizes in batches.items()}
    found: dict[str, list[Record]] = {}
    for record in members:
        base, at, _ = record.arm.partition("@")
        batch = record.cell.get("batch")
        several = not at and len(batches[base]) > 1 and batch != usual[base]
        label = f"{base}@{batch}" if several else record.arm
        found.setdefault(label + (" + engine" if record.engine else ""), []).append(record)
    labelled: dict[str, list[Record]] = {}
    for label, records in found.items():
        for record, suffix in zip(records, _suffixes(label, records), strict=True):
            labelled.setdefault(label + suffix, []).append(record)
    order = sorted(labelled, key=_arm_order)
    return {label: tuple(sorted(labelled[label], key=lambda r: (r.seed, r.id))) for label in order}


def _usual_batch(members: Sequence[Record], base: str) -> Any:
    count = Counter(r.cell.get("batch") for r in members if r.arm == base)
    return min(count, key=lambda b: (-count[b], b or 0)) if count else None


def _suffixes(label: str, records: Sequence[Record]) -> list[str]:
    """``" [precision.prefer=memory]"`` where cells of one arm and seed differ in their configuration; else nothing."""
    seeds = Counter(record.seed for record in records)
    if max(seeds.values()) == 1:
        return ["" for _ in records]
    flat = [_flatten(record.config) for record in records]
    keys = {key for one in flat for key in one if key != "seed"}
    differing = sorted(key for key in keys if len({repr(one.get(key)) for one in flat}) > 1)
    variants = [tuple((key, one.get(key)) for key in differing) for one in flat]
    if max(Counter((r.seed, repr(v)) for r, v in zip(records, variants, strict=True)).values()) > 1:
        raise RecordError(
            f"arm {label!r} has two cells with one seed and one configuration "
            f"({', '.join(sorted(r.id for r in records)[:4])}); the records of two runs are mixed: "
            "read one --records folder at a time"
        )
    count = Counter(map(repr, variants))
    usual = min(count, key=lambda v: (-count[v], v))
    return [
        "" if repr(v) == usual else f" [{', '.join(f'{key}={value}' for key, value in v)}]" for v in variants
    ]


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def _arm_order(label: str) -> tuple[Any, ...]:
    name, _, rest = label.partition(" ")
    base, _, batch = name.partition("@")
    place = _ORDER.index(base) if base in _ORDER else len(_ORDER)
    return ("+ engine" in rest, place, base, int(batch) if batch.isdigit() else 0, rest)
