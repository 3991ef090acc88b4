"""One cell's ``log.jsonl``, thinned to what tables and figures show.

Events are read in order. A log that goes back in ``samples_seen`` (a run resumed from a checkpoint) has the repeated part
replaced by the later one. A last line without its end (a killed run) is left out and counted; any other line that is not
JSON is an error with its number. Thinning keeps first and last points, both sides of every change of batch size, and at
most ``MAX_STEPS`` steps and ``MAX_PROBES`` probes; numbers keep 6 significant digits. Cost: one pass. Source: ours.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["EMPTY", "MAX_PROBES", "MAX_STEPS", "Series", "read_log", "series_from_events"]

MAX_STEPS = 60
MAX_PROBES = 16
_STEP = ("samples_seen", "train_seconds", "batch_size", "used_bytes", "loss", "rate_factor")
_EVAL = ("samples_seen", "train_seconds", "accuracy", "loss")
_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # "torch." in front is cut


@dataclass(frozen=True, slots=True)
class Series:
    """Columns over training; every list of one table has the same length.

    Attributes:
        steps: columns ``samples_seen`` (samples), ``train_seconds``, ``batch_size``, ``used_bytes``, ``loss``, ``rate_factor``.
        evals: columns ``samples_seen``, ``train_seconds``, ``accuracy`` (fraction, test split), ``loss``.
        maps: precision maps as ``{"samples_seen", "map": {layer: format}, "ignored": [layers that ran in another format]}``;
            after the first only the layers that changed.
        curvature: ``{"samples_seen": [...], "layers": [...], "curvature": [[per layer] per probe], "scale": [[...]],
            "noise_scale": [...]}``.
        changes: number of logged changes per component.
        decided_by: layer-ticks by what decided them.
    """

    steps: Mapping[str, list[float | None]] = field(default_factory=dict)
    evals: Mapping[str, list[float | None]] = field(default_factory=dict)
    maps: Sequence[Mapping[str, Any]] = ()
    curvature: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, int] = field(default_factory=dict)
    decided_by: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value, empty parts left out."""
        return {key: value for key, value in asdict(self).items() if value}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Series:
        """Inverse of ``to_json``."""
        known = {key: value[key] for key in cls.__dataclass_fields__ if key in value}
        if "maps" in known:
            known["maps"] = tuple(known["maps"])
        return cls(**known)


EMPTY = Series()


def read_log(file: Path) -> tuple[Series, int]:
    """The thinned log, and the number of half-written lines left out (0 or 1).

    Args:
        file: a ``log.jsonl``.

    Raises:
        RecordError: a line other than a half-written last one is not a JSON object.
    """
    from .record import RecordError

    lines = file.read_bytes().split(b"\n")
    try:  # one call for the whole log; line by line only to find what is wrong
        events = json.loads(b"[" + b",".join(line for line in lines if line.strip()) + b"]")
    except (json.JSONDecodeError, UnicodeDecodeError):
        events = None
    if isinstance(events, list) and all(type(event) is dict for event in events):
        return series_from_events(events), 0
    events = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            if number == len(lines):
                return series_from_events(events), 1
            raise RecordError(
                f"{file}:{number}: not a JSON line, and not the last one; remove the cell's folder and run the cell again"
            ) from None
        if not isinstance(event, dict):
            raise RecordError(f"{file}:{number}: a {type(event).__name__} where an event object was expected")
        events.append(event)
    return series_from_events(events), 0


def series_from_events(events: Sequence[Mapping[str, Any]]) -> Series:
    """Thinned series of a list of log events; a field that an event lacks is ``None`` there."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        kind = str(event.get("event"))
        kept = kinds.setdefault(kind, [])
        if kind == "step" and kept and _seen(event) <= _seen(kept[-1]):
            for name, known in kinds.items():
                kinds[name] = [old for old in known if _seen(old) < _seen(event)]
        elif (
            kind == "eval"
            and kept
            and _seen(event) <= _seen(kept[-1])
            and event.get("split") == kept[-1].get("split")
        ):
            kinds[kind] = [old for old in kept if _seen(old) < _seen(event)]
        kinds[kind].append(event)
    steps = _thin_steps(kinds.get("step", []))
    evals = kinds.get("eval", [])
    if any(event.get("split", "test") == "test" for event in evals):
        evals = [event for event in evals if event.get("split", "test") == "test"]
    decided: Counter[str] = Counter()
    for event in kinds.get("decided_by", []):
        decided.update(event.get("counts") or {})
    return Series(
        steps=_columns(steps, _STEP),
        evals=_columns(evals, _EVAL),
        maps=_maps(kinds.get("precision_map", [])),
        curvature=_curvature(kinds.get("curvature", [])),
        changes=dict(sorted(Counter(str(e.get("component")) for e in kinds.get("change", [])).items())),
        decided_by=dict(sorted(decided.items())),
    )


def _seen(event: Mapping[str, Any]) -> float:
    return event.get("samples_seen") or 0


def _thin(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _thin_steps(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    edges = [
        index
        for index in range(1, len(steps))
        if steps[index].get("batch_size") != steps[index - 1].get("batch_size")
    ]
    edges = [edges[i] for i in _thin(len(edges), MAX_STEPS // 4)]
    keep = set(_thin(len(steps), MAX_STEPS - 2 * len(edges))) | {
        i for edge in edges for i in (edge - 1, edge)
    }
    return [steps[index] for index in sorted(keep)]


def _columns(events: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[float | None]]:
    if not events:
        return {}
    columns = {name: _rounded([event.get(name) for event in events]) for name in names}
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}


def _rounded(values: Sequence[Any]) -> list[Any]:
    """Floats at 6 significant digits, ``None`` for those that are not finite; anything else as it is."""
    return [
        (float("%.6g" % value) if value - value == 0.0 else None)  # noqa: UP031 (faster)
        if type(value) is float
        else (None if type(value) is dict else value)  # {"nonfinite": "nan"}
        for value in values
    ]


def _maps(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Changes of the map. What an event verified is the map in force before it, since that one has run."""
    found: list[dict[str, Any]] = []
    now: dict[str, str] = {}
    for event in events:
        ran = {
            layer: str(dtype).removeprefix("torch.") for layer, dtype in (event.get("verified") or {}).items()
        }
        ignored = sorted(
            layer for layer, dtype in ran.items() if layer in now and _FORMATS.get(dtype, dtype) != now[layer]
        )
        if ignored:
            found[-1]["ignored"] = ignored
        changed = {layer: fmt for layer, fmt in (event.get("map") or {}).items() if now.get(layer) != fmt}
        if changed:
            found.append({"samples_seen": event.get("samples_seen") or 0, "map": changed, "ignored": []})
            now.update(changed)
    return tuple(found)


def _curvature(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kept = [events[index] for index in _thin(len(events), MAX_PROBES)]
    if not kept:
        return {}
    layers = list(dict.fromkeys(layer for event in kept for layer in event.get("layers") or {}))

    def rows(name: str) -> list[list[float | None]]:
        empty: dict[str, Any] = {}
        return [
            _rounded([(seen.get(layer) or empty).get(name) for layer in layers])
            for seen in (event.get("layers") or empty for event in kept)
        ]

    return {
        "samples_seen": [event.get("samples_seen") or 0 for event in kept],
        "layers": layers,
        "curvature": rows("curvature"),
        "scale": rows("scale"),
        "noise_scale": _rounded([event.get("noise_scale") for event in kept]),
    }
