"""The decision log: what was decided at each control tick, why, and how to run it again without deciding.

One ``TraceEntry`` per control tick. On disk a trace is JSON lines; a field equal to that of the entry before is left out, so
a long run stays small. ``Trace.policies()`` gives the three policies that replay a trace on the clock of samples seen: the
``replay`` arm, which tells the value of adapting from the value of what adapting found. Source: ours.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from .types import (
    BatchDecision,
    Change,
    LayerInfo,
    NoiseScale,
    Observation,
    Policy,
    Precision,
    PrecisionDecision,
    RateDecision,
    TriAccelError,
)

__all__ = ["Policies", "Trace", "TraceEntry"]

FORMAT = 1


class Policies(NamedTuple):
    """The three controllers of one run."""

    precision: Policy[Any, PrecisionDecision]
    rate: Policy[Any, RateDecision]
    batch: Policy[Any, BatchDecision]


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """Decisions of one control tick, in force from the next optimizer step on.

    Attributes:
        step: optimizer steps done when it was taken; 0 for what was in force at the start.
        samples_seen: samples consumed by then.
        precision_map: format per compute layer.
        map_version: version of that map.
        verified: output dtype that each layer had in the first forward under the map in force *before* this tick.
        scales: scale per layer on the learning rate; absent layers have 1.
        batch_size: samples per optimizer step.
        micro_batch_size: samples per forward.
        rate_factor: factor on the learning rate that goes with the batch.
        curvature: λ per layer of the last probe.
        eigenvalues: top-k eigenvalues per layer of the last probe, descending.
        sample_variance: tr Σ per layer of the last probe.
        probe_id: number of that probe, -1 before the first.
        variance: running gradient variance per layer.
        noise: noise scale, if known.
        used_bytes: peak bytes of the last observed step, if known.
        budget_bytes: bytes that may be used, if known.
        decided_by: number of layers by what decided them at this tick.
        changes: what changed and why.
    """

    step: int
    samples_seen: int
    precision_map: Mapping[str, Precision]
    map_version: int
    batch_size: int
    micro_batch_size: int
    rate_factor: float
    scales: Mapping[str, float] = field(default_factory=dict)
    verified: Mapping[str, str] = field(default_factory=dict)
    curvature: Mapping[str, float] = field(default_factory=dict)
    eigenvalues: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sample_variance: Mapping[str, float] = field(default_factory=dict)
    probe_id: int = -1
    variance: Mapping[str, float] = field(default_factory=dict)
    noise: NoiseScale | None = None
    used_bytes: int | None = None
    budget_bytes: int | None = None
    decided_by: Mapping[str, int] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()


_ALWAYS = ("step", "samples_seen", "changes")


class Trace:
    """Entries of one run, oldest first."""

    def __init__(self, entries: tuple[TraceEntry, ...] | list[TraceEntry] = ()) -> None:
        self.entries: list[TraceEntry] = list(entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[TraceEntry]:
        return iter(self.entries)

    def append(self, entry: TraceEntry) -> None:
        """Add the entry of one tick."""
        self.entries.append(entry)

    @property
    def changes(self) -> tuple[Change, ...]:
        """Every change, oldest first."""
        return tuple(change for entry in self.entries for change in entry.changes)

    def dumps(self) -> list[dict[str, Any]]:
        """Plain JSON objects, one per entry; the first carries the format's version."""
        rows: list[dict[str, Any]] = []
        before: dict[str, Any] = {}
        for entry in self.entries:
            full = _plain(asdict(entry))
            row = {
                key: value
                for key, value in full.items()
                if key in _ALWAYS or before.get(key, _ABSENT) != value
            }
            rows.append(row if rows else {"format": FORMAT, **row})
            before = full
        return rows

    @classmethod
    def loads(cls, rows: list[dict[str, Any]], *, source: str = "trace") -> Trace:
        """Inverse of ``dumps``.

        Raises:
            TriAccelError: an entry is malformed, or the trace is of another version; names ``source`` and the line.
        """
        entries: list[TraceEntry] = []
        full: dict[str, Any] = {}
        known = {f.name for f in fields(TraceEntry)}
        for number, row in enumerate(rows, start=1):
            try:
                row = dict(row)
                if number == 1 and (version := row.pop("format", None)) != FORMAT:
                    raise ValueError(f"format {version!r}, this version reads {FORMAT}")
                if unknown := set(row) - known:
                    raise ValueError(f"unknown fields {sorted(unknown)}")
                full = {**full, **row}
                entries.append(_entry(full))
            except (TypeError, ValueError, KeyError) as error:
                raise TriAccelError(
                    f"{source}, line {number}: not a trace entry ({error}); record the run again or cut the file before that line"
                ) from error
        return cls(entries)

    def save(self, path: str | Path) -> None:
        """Write JSON lines."""
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in self.dumps())
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read JSON lines.

        Raises:
            TriAccelError: the file is missing, empty, or a line of it is not an entry.
        """
        path = Path(path)
        if not path.is_file():
            raise TriAccelError(
                f"no trace at {path}: give the file that Trace.save wrote, or run the arm to be replayed first"
            )
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise TriAccelError(
                    f"{path}, line {number}: not JSON ({error}); the trace is cut or corrupt, record it again"
                ) from error
        if not rows:
            raise TriAccelError(f"{path} holds no trace entry; record the run again")
        return cls.loads(rows, source=str(path))

    def policies(self) -> Policies:
        """The three policies that run this trace again, whatever they observe.

        Raises:
            TriAccelError: the trace is empty.
        """
        if not self.entries:
            raise TriAccelError("an empty trace has nothing to replay; record a run first")
        return Policies(ReplayPrecision(self), ReplayRate(self), ReplayBatch(self))


_ABSENT = object()


def _plain(value: Any) -> Any:
    """Enums to their values, tuples to lists: what ``torch.load(weights_only=True)`` and JSON both accept."""
    if isinstance(value, Precision):
        return value.value
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value


def _entry(full: dict[str, Any]) -> TraceEntry:
    values = dict(full)
    values["precision_map"] = {k: Precision(v) for k, v in values["precision_map"].items()}
    values["eigenvalues"] = {k: tuple(v) for k, v in values.get("eigenvalues", {}).items()}
    values["changes"] = tuple(Change(**change) for change in values.get("changes", ()))
    if values.get("noise") is not None:
        values["noise"] = NoiseScale(**values["noise"])
    return TraceEntry(**values)


@dataclass(frozen=True, slots=True)
class ReplayState:
    """Index of the entry in force."""

    index: int = 0


class _Replay:
    def __init__(self, trace: Trace) -> None:
        self._entries = tuple(trace)
        self._clock = [entry.samples_seen for entry in self._entries]

    def init(self, layers: tuple[LayerInfo, ...]) -> ReplayState:
        """Start at the first entry.

        Raises:
            TriAccelError: the trace is of another model.
        """
        names = {layer.name for layer in layers}
        if missing := sorted(set(self._entries[0].precision_map) - names):
            raise TriAccelError(
                f"the trace is of another model: it has layers {missing[:3]} that this one lacks; replay it on its own model"
            )
        return ReplayState()

    def _advance(self, observation: Observation) -> ReplayState:
        return ReplayState(max(0, bisect_right(self._clock, observation.samples_seen) - 1))


class ReplayPrecision(_Replay):
    """The recorded maps."""

    def initial(self, state: ReplayState) -> PrecisionDecision:
        """Recorded map of the entry in force."""
        recorded = self._entries[state.index].precision_map
        return PrecisionDecision(recorded, decided_by=dict.fromkeys(recorded, "fixed"))

    def step(self, state: ReplayState, observation: Observation) -> tuple[ReplayState, PrecisionDecision]:
        """Move to the last entry whose clock is not past ``observation.samples_seen``."""
        after = self._advance(observation)
        decision = self.initial(after)
        old = observation.precision_map
        changes = tuple(
            Change("precision", name, old.get(name), new, "replayed")
            for name, new in decision.precision_map.items()
            if old.get(name) != new
        )
        return after, PrecisionDecision(decision.precision_map, changes, decision.decided_by)


class ReplayRate(_Replay):
    """The recorded scales."""

    def initial(self, state: ReplayState) -> RateDecision:
        """Recorded scales of the entry in force."""
        return RateDecision(self._entries[state.index].scales)

    def step(self, state: ReplayState, observation: Observation) -> tuple[ReplayState, RateDecision]:
        """Move to the last entry whose clock is not past ``observation.samples_seen``."""
        after = self._advance(observation)
        return after, self.initial(after)


class ReplayBatch(_Replay):
    """The recorded batch sizes."""

    def initial(self, state: ReplayState) -> BatchDecision:
        """Recorded batch of the entry in force."""
        entry = self._entries[state.index]
        return BatchDecision(entry.batch_size, entry.micro_batch_size, entry.rate_factor)

    def step(self, state: ReplayState, observation: Observation) -> tuple[ReplayState, BatchDecision]:
        """Move to the last entry whose clock is not past ``observation.samples_seen``."""
        after = self._advance(observation)
        before, decision = self.initial(state), self.initial(after)
        changes: tuple[Change, ...] = ()
        if decision.batch_size != before.batch_size:
            changes = (Change("batch", None, before.batch_size, decision.batch_size, "replayed"),)
        return after, BatchDecision(
            decision.batch_size, decision.micro_batch_size, decision.rate_factor, changes
        )
