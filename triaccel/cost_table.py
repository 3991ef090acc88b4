"""What a layer costs in each format on this device: the table that was measured, and the arithmetic on it. Free of torch.

The model is a graph of nodes. A node is a layer together with the normalisation, activation and other operations that follow
its output alone, because they run in the format of their input; a *join* is an operation on the outputs of several nodes (a
residual add, a gate), which runs in the widest of their formats. An edge is a tensor that goes from a node into a layer or a
join. With a format x_u for each layer u (a join has the widest of its inputs')

    seconds(x) = Σ_u t_u(x_u) + Σ_(u→v) n_uv · c(x_u, x_v),        kept bytes likewise

where t_u is forward plus backward, measured inside the whole model, n_uv elements and c the time to convert one of them forward
and back. Times are per measured batch size (a bucket); other sizes use the nearest bucket in log scale. ``measured`` holds the
seconds of whole forward and backward passes under whole maps, which correct the sum. Source: ours.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .types import Precision, TriAccelError

__all__ = ["CostTable", "Edge", "MeasuredMap", "Node"]

_FORMAT = 1
_SIZE = {Precision.FP16: 2, Precision.BF16: 2, Precision.FP32: 4}


@dataclass(frozen=True, slots=True)
class Node:
    """A layer with its followers, or a join.

    Attributes:
        name: layer name; ``"join 3"`` for a join.
        layer: whether it is a layer (whose format is chosen) or a join (whose format follows).
        signature: type, shapes, groups and memory format; layers with the same one share their measurements.
        seconds: forward plus backward, per format and bucket.
        bytes_per_sample: kept for backward, per format.
        bytes_fixed: kept for backward whatever the batch (casts of weights), per format.
        follows: formats that the layer really ran in.
    """

    name: str
    layer: bool
    signature: str
    seconds: Mapping[Precision, tuple[float, ...]]
    bytes_per_sample: Mapping[Precision, float]
    bytes_fixed: Mapping[Precision, float]
    follows: tuple[Precision, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor from node ``source`` into node ``target`` (indices into ``CostTable.nodes``).

    Attributes:
        source: index of the node that made it.
        target: index of the layer or join that reads it.
        elements: elements per sample.
        kept: whether it is kept for backward on account of another node, so that a converted copy comes on top.
        gradient: whether a gradient goes back along it.
    """

    source: int
    target: int
    elements: float
    kept: bool
    gradient: bool = True


@dataclass(frozen=True, slots=True)
class MeasuredMap:
    """Seconds of whole forward and backward passes under one map, medians of alternating runs, per bucket (``None``: not run)."""

    formats: tuple[Precision, ...]
    seconds: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured costs of one model on one device.

    Attributes:
        precisions: formats measured, lowest first, FP32 last.
        buckets: batch sizes measured, ascending, samples.
        nodes: in order of execution.
        edges: tensors between them.
        convert_seconds: per ``"bf16>fp32"``-like pair, seconds per element of one conversion.
        convert_overhead: seconds of one conversion of almost nothing.
        measured: whole maps that were timed; ``formats`` are those of the layers in ``layer_names`` order.
        missing: layers that did not run during measuring, with the reason.
        device: what it was measured on.
        measured_seconds: what measuring took (not part of ``digest``).
    """

    precisions: tuple[Precision, ...]
    buckets: tuple[int, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    convert_seconds: Mapping[str, float]
    convert_overhead: float
    measured: tuple[MeasuredMap, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    measured_seconds: float = 0.0

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Layers in order of execution."""
        return tuple(node.name for node in self.nodes if node.layer)

    def bucket(self, batch_size: int) -> int:
        """Index of the measured batch size nearest to ``batch_size`` in log scale."""
        return min(range(len(self.buckets)), key=lambda i: (abs(math.log(self.buckets[i] / batch_size)), i))

    def labels(self, formats: Mapping[str, Precision]) -> list[Precision]:
        """Format of every node under ``formats`` (layers left out: FP32): a join takes the widest of its inputs'."""
        sources: dict[int, list[int]] = {}
        for edge in self.edges:
            sources.setdefault(edge.target, []).append(edge.source)
        labels: list[Precision] = []
        for i, node in enumerate(self.nodes):
            if node.layer:
                labels.append(formats.get(node.name, Precision.FP32))
            else:
                labels.append(max((labels[s] for s in sources.get(i, ())), key=_rank, default=Precision.FP32))
        return labels

    def node_seconds(self, index: int, precision: Precision, *, bucket: int) -> float:
        """Forward plus backward of a node; a format that was not measured counts as FP32."""
        seconds = self.nodes[index].seconds
        return seconds.get(precision, seconds[Precision.FP32])[bucket]

    def edge_seconds(self, edge: Edge, source: Precision, target: Precision, *, batch_size: int) -> float:
        """Converting the tensor forward and its gradient back; 0 between equal formats.

        A join of mixed formats reads them as they are, so only the gradient of the narrower operand is converted.
        """
        if source == target:
            return 0.0
        elements = edge.elements * batch_size
        total = 0.0
        if self.nodes[edge.target].layer:
            total += elements * self._convert(source, target) + self.convert_overhead
        if edge.gradient:
            total += elements * self._convert(target, source) + self.convert_overhead
        return total

    def _convert(self, before: Precision, after: Precision) -> float:
        known = self.convert_seconds.get(f"{before}>{after}")
        if known is not None:
            return known
        return max(self.convert_seconds.values(), default=0.0)

    def modelled_seconds(self, formats: Mapping[str, Precision], *, batch_size: int) -> float:
        """Forward plus backward under ``formats``: the sum over nodes and edges, at the bucket of ``batch_size``."""
        bucket = self.bucket(batch_size)
        labels = self.labels(formats)
        total = sum(self.node_seconds(i, label, bucket=bucket) for i, label in enumerate(labels))
        size = self.buckets[bucket]
        return total + sum(
            self.edge_seconds(e, labels[e.source], labels[e.target], batch_size=size)
            for e in self.edges
            if labels[e.source] != labels[e.target]
        )

    def seconds(self, formats: Mapping[str, Precision], *, batch_size: int) -> float:
        """As ``modelled_seconds``, corrected by the whole map that was measured nearest to ``formats`` (fewest layers apart)."""
        bucket = self.bucket(batch_size)
        modelled = self.modelled_seconds(formats, batch_size=batch_size)
        mine = tuple(formats.get(name, Precision.FP32) for name in self.layer_names)
        nearest: tuple[int, float] | None = None
        for known in self.measured:
            seconds = known.seconds[bucket]
            if seconds is None:
                continue
            apart = sum(a != b for a, b in zip(mine, known.formats, strict=True))
            if nearest is None or apart < nearest[0]:
                base = dict(zip(self.layer_names, known.formats, strict=True))
                # The offset in seconds: what two maps have in common cancels.
                nearest = apart, seconds - self.modelled_seconds(base, batch_size=batch_size)
        return modelled + (nearest[1] if nearest else 0.0)

    def kept_bytes(self, formats: Mapping[str, Precision], *, batch_size: int) -> float:
        """Bytes that forward keeps for backward under ``formats`` at ``batch_size`` samples."""
        labels = self.labels(formats)
        total = 0.0
        for node, label in zip(self.nodes, labels, strict=True):
            slope = node.bytes_per_sample
            total += batch_size * slope.get(label, slope[Precision.FP32])
            total += node.bytes_fixed.get(label, node.bytes_fixed[Precision.FP32])
        for edge in self.edges:
            source, target = labels[edge.source], labels[edge.target]
            if edge.kept and source != target and self.nodes[edge.target].layer:
                total += batch_size * edge.elements * _SIZE[target]
        return total

    # ---------------------------------------------------------------- records

    @property
    def digest(self) -> str:
        """First 16 hex digits of SHA-256 over the content without ``measured_seconds``."""
        data = self.to_json() | {"measured_seconds": None}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON object."""
        return {
            "format": _FORMAT,
            "precisions": [p.value for p in self.precisions],
            "buckets": list(self.buckets),
            "nodes": [
                {
                    "name": n.name,
                    "layer": n.layer,
                    "signature": n.signature,
                    "seconds": {p.value: list(s) for p, s in n.seconds.items()},
                    "bytes_per_sample": {p.value: b for p, b in n.bytes_per_sample.items()},
                    "bytes_fixed": {p.value: b for p, b in n.bytes_fixed.items()},
                    "follows": [p.value for p in n.follows],
                }
                for n in self.nodes
            ],
            "edges": [[e.source, e.target, e.elements, e.kept, e.gradient] for e in self.edges],
            "convert_seconds": dict(self.convert_seconds),
            "convert_overhead": self.convert_overhead,
            "measured": [
                {"formats": [p.value for p in m.formats], "seconds": list(m.seconds)} for m in self.measured
            ],
            "missing": dict(self.missing),
            "device": self.device,
            "measured_seconds": self.measured_seconds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostTable:
        """Inverse of ``to_json``.

        Raises:
            TriAccelError: ``data`` is no cost table, or of another version.
        """
        try:
            if data["format"] != _FORMAT:
                raise ValueError(f"format {data['format']!r}, this version reads {_FORMAT}")
            return cls(
                precisions=tuple(Precision(p) for p in data["precisions"]),
                buckets=tuple(int(b) for b in data["buckets"]),
                nodes=tuple(_node(n) for n in data["nodes"]),
                edges=tuple(Edge(*edge) for edge in data["edges"]),
                convert_seconds=dict(data["convert_seconds"]),
                convert_overhead=float(data["convert_overhead"]),
                measured=tuple(
                    MeasuredMap(tuple(Precision(p) for p in m["formats"]), tuple(m["seconds"]))
                    for m in data["measured"]
                ),
                missing=dict(data["missing"]),
                device=data["device"],
                measured_seconds=float(data["measured_seconds"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TriAccelError(
                f"not a cost table of this version ({error!r}); delete it and let the run measure again"
            ) from error


def _node(data: Mapping[str, Any]) -> Node:
    return Node(
        name=data["name"],
        layer=data["layer"],
        signature=data["signature"],
        seconds={Precision(p): tuple(s) for p, s in data["seconds"].items()},
        bytes_per_sample={Precision(p): float(b) for p, b in data["bytes_per_sample"].items()},
        bytes_fixed={Precision(p): float(b) for p, b in data["bytes_fixed"].items()},
        follows=tuple(Precision(p) for p in data["follows"]),
    )


def _rank(precision: Precision) -> int:
    return precision.rank
