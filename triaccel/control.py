"""One control tick: three policies in turn, each seeing what the one before decided.

    curvature and variance -> precision -> (map, bytes) -> batch,    curvature -> learning-rate scales

``Controller`` holds the policies, their states and the decisions in force. It touches no tensor and reads no clock: given the
same observations it decides the same. Source: the loop is the paper's (arXiv 2508.16905); its order within a tick is ours.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from .trace import Policies, Trace, TraceEntry
from .types import (
    BatchDecision,
    Change,
    LayerInfo,
    Observation,
    PrecisionDecision,
    RateDecision,
    TriAccelError,
)

__all__ = ["Controller"]


class Controller:
    """Policies, their states, and the decisions in force.

    Attributes:
        precision: map in force.
        rate: scales in force.
        batch: batch in force.
        map_version: number of the map in force, by first appearance from 0: a map that comes back has its old number, so
            that peaks observed under it still count.
        decided_by: layer-ticks by what decided them, over the run.
        trace: the log of every tick.
    """

    def __init__(self, policies: Policies, layers: tuple[LayerInfo, ...]) -> None:
        self._policies = policies
        self._states: list[Any] = [policy.init(layers) for policy in policies]
        self.precision: PrecisionDecision = policies.precision.initial(self._states[0])
        self.rate: RateDecision = policies.rate.initial(self._states[1])
        self.batch: BatchDecision = policies.batch.initial(self._states[2])
        self.map_version = 0
        self._maps: list[dict[str, str]] = [_named(self.precision)]
        self.decided_by: Counter[str] = Counter()
        self.trace = Trace([self._entry(Observation(0, 0, 0, None, self.batch.batch_size), (), {})])

    def tick(self, observation: Observation, verified: dict[str, str]) -> tuple[Change, ...]:
        """Take one decision of each policy and log it.

        Args:
            observation: what was seen since the last tick; its map and version are those that ran.
            verified: output dtype per layer that really ran.

        Returns:
            What changed, in the order precision, rate, batch.
        """
        self._states[0], precision = self._policies.precision.step(self._states[0], observation)
        self.precision = precision
        if (formats := _named(precision)) not in self._maps:
            self._maps.append(formats)
        self.map_version = self._maps.index(formats)
        self._states[1], self.rate = self._policies.rate.step(self._states[1], observation)
        after = replace(observation, precision_map=precision.precision_map, map_version=self.map_version)
        self._states[2], self.batch = self._policies.batch.step(self._states[2], after)
        self.decided_by.update(precision.decided_by.values())
        changes = (*precision.changes, *self.rate.changes, *self.batch.changes)
        self.trace.append(self._entry(observation, changes, verified))
        return changes

    def _entry(self, seen: Observation, changes: tuple[Change, ...], verified: dict[str, str]) -> TraceEntry:
        layers = seen.layers
        return TraceEntry(
            step=seen.step,
            samples_seen=seen.samples_seen,
            precision_map=dict(self.precision.precision_map),
            map_version=self.map_version,
            verified=verified,
            scales=dict(self.rate.scales),
            batch_size=self.batch.batch_size,
            micro_batch_size=self.batch.micro_batch_size,
            rate_factor=self.batch.rate_factor,
            curvature={n: s.curvature for n, s in layers.items() if s.curvature is not None},
            eigenvalues={n: s.eigenvalues for n, s in layers.items() if s.eigenvalues},
            sample_variance={
                n: s.sample_variance for n, s in layers.items() if s.sample_variance is not None
            },
            probe_id=max((s.probe_id for s in layers.values()), default=-1),
            variance={n: s.variance for n, s in layers.items() if s.variance is not None},
            noise=seen.noise,
            used_bytes=seen.memory.used_bytes if seen.memory else None,
            budget_bytes=seen.memory.budget_bytes if seen.memory else None,
            decided_by=dict(Counter(self.precision.decided_by.values())),
            changes=changes,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values: policy states, decisions in force, counters and the trace."""
        return {
            "states": [_dump(state) for state in self._states],
            "precision": _dump(self.precision),
            "rate": _dump(self.rate),
            "batch": _dump(self.batch),
            "map_version": self.map_version,
            "maps": [dict(formats) for formats in self._maps],
            "decided_by": dict(self.decided_by),
            "trace": self.trace.dumps(),
        }

    def load_state_dict(self, data: dict[str, Any]) -> None:
        """Inverse of ``state_dict``.

        Raises:
            TriAccelError: ``data`` belongs to other policies or to another version.
        """
        try:
            self._states = [
                _load(type(state), value) for state, value in zip(self._states, data["states"], strict=True)
            ]
            self.precision = _load(PrecisionDecision, data["precision"])
            self.rate = _load(RateDecision, data["rate"])
            self.batch = _load(BatchDecision, data["batch"])
            self.map_version = int(data["map_version"])
            self._maps = [dict(formats) for formats in data["maps"]]
            self.decided_by = Counter(data["decided_by"])
            self.trace.entries[:] = Trace.loads(data["trace"], source="checkpoint").entries
        except (KeyError, ValueError) as error:  # pydantic's ValidationError is a ValueError
            raise TriAccelError(
                f"this controller state belongs to another configuration or version ({error}); "
                "load it with the configuration that saved it"
            ) from error


def _named(decision: PrecisionDecision) -> dict[str, str]:
    return {name: precision.value for name, precision in decision.precision_map.items()}


def _dump(value: Any) -> Any:
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def _load(kind: type[Any], value: Any) -> Any:
    return TypeAdapter(kind).validate_python(value)
