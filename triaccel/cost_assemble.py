"""Passes that were looked at, made into a cost table: graph, medians per layer, layers of one signature pooled. Source: ours."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .cost_profile import Pass
from .cost_table import CostTable, Edge, MeasuredMap, Node
from .types import Precision

__all__ = ["Measurements", "assemble"]

_UNSEEN = "it did not run while costs were measured"


@dataclass(slots=True)
class Measurements:
    """Everything that was measured.

    Attributes:
        precisions: formats, lowest first.
        compute: module per layer name.
        first: per format, the pass that also looked at bytes.
        first_batch: its batch size.
        passes: timed passes per batch size and format.
        whole: seconds of whole maps, per formats of the layers that ran and batch size.
        convert: seconds per element of each conversion.
        convert_overhead: seconds of one conversion of almost nothing.
        device: what it was measured on.
    """

    precisions: tuple[Precision, ...]
    compute: Mapping[str, nn.Module]
    first: dict[Precision, Pass]
    first_batch: int
    passes: dict[tuple[int, Precision], list[Pass]]
    whole: dict[tuple[Precision, ...], dict[int, float]]
    convert: Mapping[str, float]
    convert_overhead: float
    device: str


def assemble(measured: Measurements, *, seconds: float) -> CostTable:
    """The table.

    Args:
        measured: at least one timed pass in each format.
        seconds: what measuring took.
    """
    return _Assembling(measured).table(seconds)


class _Assembling:
    def __init__(self, measured: Measurements) -> None:
        self.m = measured
        self.buckets = sorted({size for size, _ in measured.passes})
        self.base = measured.first[Precision.FP32]

    def table(self, seconds: float) -> CostTable:
        base = self.base
        keys = list(base.nodes)
        index = {key: i for i, key in enumerate(keys)}
        own = self._pooled()
        nodes = tuple(self._node(key, i, own) for key, i in index.items())
        low = self.m.first[self.m.precisions[0]]
        edges = []
        for (source, target), (elements, storage, gradient, _) in base.edges.items():
            other = low.edges.get((source, target))
            if source == target or source not in index or target not in index:
                continue
            if other is not None and len(self.m.precisions) > 1 and other[3] == torch.float32:
                continue  # FP32 whatever the source computes in: its conversion is in the target's own time
            edges.append(
                Edge(
                    index[source],
                    index[target],
                    elements / self.m.first_batch,
                    base.saved_by.get(storage, target) != target,
                    gradient,
                )
            )
        names = [key for key in keys if key in self.m.compute]
        return CostTable(
            precisions=self.m.precisions,
            buckets=tuple(self.buckets),
            nodes=nodes,
            edges=tuple(edges),
            convert_seconds=self.m.convert,
            convert_overhead=self.m.convert_overhead,
            measured=tuple(
                MeasuredMap(formats, tuple(seconds.get(b) for b in self.buckets))
                for formats, seconds in self.m.whole.items()
                if len(formats) == len(names)
            ),
            missing={name: _UNSEEN for name in self.m.compute if name not in index},
            device=self.m.device,
            measured_seconds=seconds,
        )

    def _signature(self, key: Any) -> str:
        if key not in self.m.compute:
            return "join"
        module = self.m.compute[key]
        seen = self.base.nodes[key]
        weights = ",".join(
            f"{tuple(p.shape)}{'' if p.requires_grad else ' frozen'}" for p in module.parameters()
        )
        extra = module.extra_repr() if not list(module.children()) else repr(module)
        return f"{type(module).__name__}({extra}) {weights} on {seen.shapes}"

    def _pooled(self) -> dict[tuple[str, int, Precision], float]:
        """Median seconds of a layer alone, over passes and over layers of one signature."""
        pool: dict[tuple[str, int, Precision], list[float]] = {}
        for (size, precision), passes in self.m.passes.items():
            for seen in passes:
                for key, node in seen.nodes.items():
                    if key in self.base.nodes and key in self.m.compute:
                        pool.setdefault((self._signature(key), size, precision), []).append(node.own_seconds)
        return {key: statistics.median(values) for key, values in pool.items()}

    def _node(self, key: Any, i: int, own: Mapping[tuple[str, int, Precision], float]) -> Node:
        layer = key in self.m.compute
        signature = self._signature(key)
        seconds: dict[Precision, tuple[float, ...]] = {}
        per_sample: dict[Precision, float] = {}
        fixed: dict[Precision, float] = {}
        follows = [Precision.FP32]
        for precision in self.m.precisions:
            first = self.m.first[precision].nodes.get(key)
            rest = []
            for size in self.buckets:
                seen = [p.nodes[key].rest_seconds for p in self.m.passes[size, precision] if key in p.nodes]
                rest.append(
                    (statistics.median(seen) if seen else 0.0) + own.get((signature, size, precision), 0.0)
                )
            seconds[precision] = tuple(rest)
            per_sample[precision] = (first.bytes_batch if first else 0) / self.m.first_batch
            fixed[precision] = float(first.bytes_fixed if first else 0)
            if precision is not Precision.FP32 and first and first.dtype == precision.torch_dtype:
                follows.insert(0, precision)
        return Node(
            name=key if layer else f"join {i}",
            layer=layer,
            signature=signature,
            seconds=seconds,
            bytes_per_sample=per_sample,
            bytes_fixed=fixed,
            follows=tuple(sorted(follows, key=lambda p: p.rank)),
        )
