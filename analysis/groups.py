"""Records that may stand in one table: same grid, model, data set, epochs and hardware.

Times of different hardware never meet, since hardware is part of the key. A group whose cells ran different training
sources is refused unless asked for, and then says so. The best static setting is the one that the grid names (chosen on
seeds apart); where it names none, the fastest static arm of these records within 1 point of the best accuracy. Source: ours.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .labels import COMPONENTS, FACTORIAL_ARMS, STATIC_ARMS, labelled
from .record import Record, RecordError

__all__ = [
    "COMPONENTS",
    "FACTORIAL_ARMS",
    "STATIC_ARMS",
    "Group",
    "MixedCode",
    "hardware",
    "make_groups",
    "timed",
]

_LENIENT = ("cpu", "quick", "gpu-check")


class MixedCode(RecordError):
    """Cells of one group ran different training sources."""


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that may be compared.

    Attributes:
        grid: name of the grid.
        model, dataset: what was trained.
        epochs: passes over the training set.
        hardware: device and threads, as the tables show it.
        arms: records by arm label, in table order; each list by seed.
        best_static: label of the best static setting, or ``None`` where no static arm is done.
        best_static_why: how it was chosen.
        mixed_code: hashes of the training sources if there are several, else empty.
        donors: cells of seeds that the grid does not report, run only to record a trace for ``replay``; in no table.
    """

    grid: str
    model: str
    dataset: str
    epochs: float
    hardware: str
    arms: Mapping[str, tuple[Record, ...]]
    best_static: str | None
    best_static_why: str
    mixed_code: tuple[str, ...] = ()
    donors: int = 0

    @property
    def name(self) -> str:
        """Short title: model on data set."""
        return f"{self.model} on {self.dataset}"

    @property
    def records(self) -> tuple[Record, ...]:
        """All records, in table order."""
        return tuple(record for records in self.arms.values() for record in records)

    @property
    def on_cuda(self) -> bool:
        """Whether this group trained on a CUDA device."""
        return any(record.on_cuda for record in self.records)

    @property
    def margin(self) -> float:
        """Non-inferiority margin in accuracy points: 1.5 for the short grids, 0.5 for ``full`` and any other."""
        return 1.5 if self.grid in _LENIENT else 0.5

    def done(self, label: str) -> tuple[Record, ...]:
        """Finished records of an arm, by seed."""
        return tuple(record for record in self.arms.get(label, ()) if record.done)


def hardware(record: Record) -> str:
    """Device and threads that a record's times belong to."""
    seen = record.provenance
    device = seen.get("gpu") if record.on_cuda else seen.get("cpu")
    if isinstance(device, Mapping):
        device = device.get("name") or json.dumps(device, sort_keys=True)
    text = " ".join(str(device or "unknown device").split())
    threads = seen.get("threads")
    if isinstance(threads, Mapping):
        threads = threads.get("torch", threads.get("intra_op"))
    return text if record.on_cuda or threads is None else f"{text}, {threads} threads"


def timed(records: Sequence[Record]) -> Sequence[Record]:
    """The records whose times are to be shown: those that ran alone, or all where none did."""
    return [record for record in records if not record.shared_machine] or records


def make_groups(
    records: Iterable[Record], *, allow_mixed_code: bool = False, best_static: Mapping[str, str] | None = None
) -> list[Group]:
    """Groups in a fixed order.

    Args:
        records: of any grids.
        allow_mixed_code: accept groups whose cells ran different sources, and mark them.
        best_static: label of the best static setting by model name; overrides the grid's own ``spec.best_static``.

    Raises:
        MixedCode: sources differ within a group and ``allow_mixed_code`` is off.
        RecordError: two cells of one arm and seed with the same configuration, or an unknown ``best_static``.
    """
    keyed: dict[tuple[Any, ...], list[Record]] = {}
    donors: Counter[tuple[Any, ...]] = Counter()
    waiting: list[Record] = []
    for record in records:
        if _only_donor(record):
            donors[_setting(record)] += 1
        elif record.provenance.get("cpu") or record.provenance.get("gpu"):
            keyed.setdefault((*_setting(record), hardware(record)), []).append(record)
        else:
            waiting.append(record)
    for (
        record
    ) in waiting:  # not run, or it failed before its provenance was known: beside the cells of its setting
        fitting = sorted(key for key in keyed if key[:-1] == _setting(record))
        keyed.setdefault(fitting[0] if fitting else (*_setting(record), "unknown device"), []).append(record)
    groups = []
    for (grid, model, dataset, epochs, device), members in sorted(keyed.items()):
        sources = tuple(
            sorted({str(r.provenance["sources_hash"]) for r in members if r.provenance.get("sources_hash")})
        )
        if len(sources) > 1 and not allow_mixed_code:
            count = Counter(str(r.provenance.get("sources_hash")) for r in members)
            raise MixedCode(
                f"{model} on {dataset} ({grid}): cells ran {len(sources)} versions of the training sources "
                f"({', '.join(f'{key[:12]}: {count[key]} cells' for key in sources)}), so a difference between arms may be "
                "one of code; run the cells again with one version, or pass --allow-mixed-code to compare all the same"
            )
        arms = labelled(members)
        spec = next((r.spec for r in members if r.spec.get("best_static")), {})
        chosen, why = _best_static(arms, model, dataset, spec, best_static or {})
        mixed = sources if len(sources) > 1 else ()
        spare = donors[grid, model, dataset, epochs]
        groups.append(Group(grid, model, dataset, epochs, device, arms, chosen, why, mixed, spare))
    return groups


def _only_donor(record: Record) -> bool:
    """Whether the grid runs this seed for its trace alone."""
    seeds = [*(record.spec.get("seeds") or ()), *(record.spec.get("more_seeds") or ())]
    return bool(seeds) and record.seed not in seeds


def _setting(record: Record) -> tuple[str, str, str, float]:
    return (record.grid, record.model, record.dataset, record.epochs)


def _best_static(
    arms: Mapping[str, tuple[Record, ...]],
    model: str,
    dataset: str,
    spec: Mapping[str, Any],
    given: Mapping[str, str],
) -> tuple[str | None, str]:
    named: Any = given.get(model) or spec.get("best_static")
    if isinstance(named, Mapping):
        named = named.get(f"{model}/{dataset}") or named.get(model)
    if named:
        if named not in arms and f"{named}".endswith("@96"):
            named = str(named).removesuffix("@96")
        if named in arms:
            return str(named), "chosen on seeds apart from the reported ones"
        if given.get(model):
            raise RecordError(f"--best-static {model}={named}: no such arm; the arms are {', '.join(arms)}")
    seeds = [set(_seeds(arms[label])) for label in arms if _is_static(label) and _seeds(arms[label])]
    most = max(map(len, seeds), default=0)
    fits = {
        label: [r for r in arms[label] if r.done]
        for label in arms
        if _is_static(label) and len(_seeds(arms[label])) == most and most
    }
    if not fits:
        return None, "no static arm is done"
    accuracy = {label: _mean(_chosen_by(r) for r in records) for label, records in fits.items()}
    good = [label for label in fits if accuracy[label] >= max(accuracy.values()) - 0.01]
    fastest = min(
        good, key=lambda label: (_mean(r.metrics["train_seconds"] for r in timed(fits[label])), label)
    )
    return (
        fastest,
        "chosen among the static arms of these records, on the reported seeds themselves: a choice in their favour",
    )


def _is_static(label: str) -> bool:
    return label.partition("@")[0] in STATIC_ARMS


def _seeds(records: Sequence[Record]) -> list[int]:
    return [record.seed for record in records if record.done]


def _chosen_by(record: Record) -> float:
    value = record.metrics.get("validation_accuracy")
    return float(record.metrics["test_accuracy"] if value is None else value)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
