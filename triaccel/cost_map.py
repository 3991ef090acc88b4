"""The cheapest map within given bounds: minimum cuts over node and edge costs, then single moves.

For two formats and no joins the cost (``cost_table``) is a sum of unary and submodular pairwise terms, so one minimum cut is
exact (Greig, Porteous and Seheult 1989). A third format is taken in by expansion moves (Boykov, Veksler and Zabih 2001), each a
minimum cut. Joins take the widest of their inputs: arcs of infinite capacity forbid a narrower one; what the cut cannot say about
them, single moves of one layer under the exact cost put right. Maps that were timed whole are candidates too, so that the
choice is never slower than the best of those. Cost: some ms for 100 layers, free of torch. Source: the composition is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from .cost_table import CostTable, Edge
from .mincut import minimum_cut
from .types import LayerInfo, Precision

__all__ = ["best_map"]

_WORTH = 0.99
_SECONDS_PER_BYTE = 1e-13
_BYTES_PER_SECOND = 1e3


def best_map(
    table: CostTable,
    infos: Sequence[LayerInfo],
    *,
    batch_size: int,
    prefer: Literal["time", "memory"],
    allowed: Mapping[str, Precision],
    pinned: Mapping[str, Precision] | None = None,
) -> tuple[dict[str, Precision], dict[str, str]]:
    """Cheapest format per layer, none below its bound.

    Args:
        table: measured costs.
        infos: the model's layers.
        batch_size: samples per step; the nearest measured bucket counts.
        prefer: ``"time"``: seconds, bytes between equals; ``"memory"``: bytes, seconds between equals.
        allowed: lowest format per layer; layers left out stay FP32.
        pinned: formats that are not to be chosen.

    Returns:
        Format per compute layer (and per pinned layer of another role), and a reason per layer.

    Source: ours.
    """
    return _Problem(table, infos, batch_size, prefer, dict(allowed), dict(pinned or {})).solve()


class _Problem:
    def __init__(
        self,
        table: CostTable,
        infos: Sequence[LayerInfo],
        batch_size: int,
        prefer: str,
        allowed: dict[str, Precision],
        pinned: dict[str, Precision],
    ) -> None:
        self.table = table
        self.prefer = prefer
        self.batch_size = batch_size
        self.bucket = table.bucket(batch_size)
        self.size = table.buckets[self.bucket]
        self.pinned = pinned
        self.infos = {info.name: info for info in infos if info.role == "compute" or info.name in pinned}
        self.index = {node.name: i for i, node in enumerate(table.nodes) if node.layer}
        self.bounds = {name: allowed.get(name, Precision.FP32) for name in self.infos}
        self.options: dict[str, tuple[Precision, ...]] = {}
        for name in self.infos:
            if name in pinned:
                self.options[name] = (pinned[name],)
            elif name not in self.index:
                self.options[name] = (Precision.FP32,)
            else:
                follows = table.nodes[self.index[name]].follows
                self.options[name] = tuple(
                    p
                    for p in table.precisions
                    if p is Precision.FP32 or (p in follows and p.rank >= self.bounds[name].rank)
                )
        self.groups = self._groups()
        self._sources: dict[int, list[int]] = {}
        self._out: list[list[Edge]] = [[] for _ in table.nodes]
        self._in: list[list[Edge]] = [[] for _ in table.nodes]
        for edge in table.edges:
            self._sources.setdefault(edge.target, []).append(edge.source)
            self._out[edge.source].append(edge)
            self._in[edge.target].append(edge)

    def _groups(self) -> list[tuple[tuple[str, ...], tuple[Precision, ...]]]:
        """Layers that move together (tied weights) and the formats that all of them have; those with no choice are left out."""
        members: dict[str, list[str]] = {}
        for name, info in self.infos.items():
            if len(self.options[name]) > 1:
                members.setdefault(info.tied_to or name, []).append(name)
        groups = []
        for names in members.values():
            common = [p for p in self.options[names[0]] if all(p in self.options[n] for n in names)]
            if len(common) > 1:
                groups.append((tuple(names), tuple(common)))
        return groups

    # ---------------------------------------------------------------- costs

    def cost(self, formats: Mapping[str, Precision]) -> float:
        """What is minimised, by the sum over nodes and edges."""
        seconds = self.table.modelled_seconds(formats, batch_size=self.batch_size)
        kept = self.table.kept_bytes(formats, batch_size=self.size)
        if self.prefer == "memory":
            return kept + _BYTES_PER_SECOND * seconds
        return seconds + _SECONDS_PER_BYTE * kept

    def measured_cost(self, formats: Mapping[str, Precision]) -> float:
        """The same with whole maps that were timed."""
        seconds = self.table.seconds(formats, batch_size=self.batch_size)
        kept = self.table.kept_bytes(formats, batch_size=self.size)
        if self.prefer == "memory":
            return kept + _BYTES_PER_SECOND * seconds
        return seconds + _SECONDS_PER_BYTE * kept

    def unary(self, i: int, precision: Precision) -> float:
        """Cost of node ``i`` alone."""
        node = self.table.nodes[i]
        seconds = self.table.node_seconds(i, precision, bucket=self.bucket)
        kept = self.size * node.bytes_per_sample.get(precision, node.bytes_per_sample[Precision.FP32])
        kept += node.bytes_fixed.get(precision, node.bytes_fixed[Precision.FP32])
        if self.prefer == "memory":
            return kept + _BYTES_PER_SECOND * seconds
        return seconds + _SECONDS_PER_BYTE * kept

    # ---------------------------------------------------------------- search

    def solve(self) -> tuple[dict[str, Precision], dict[str, str]]:
        """Candidates from cuts, uniform maps and timed maps; the cheapest one that is worth leaving FP32 for."""
        high = {name: options[-1] for name, options in self.options.items()}
        candidates = [high]
        if self.groups:
            found = dict(high)
            for alpha in sorted(self.table.precisions, key=lambda p: -p.rank):
                if alpha is not Precision.FP32:
                    moved = self._expand(found, alpha)
                    if self.cost(moved) < self.cost(found):
                        found = moved
            candidates.append(self._descend(found))
            candidates.append(self._within({name: options[0] for name, options in self.options.items()}))
            names = self.table.layer_names
            candidates += [
                self._within(dict(zip(names, known.formats, strict=True))) for known in self.table.measured
            ]
        costs = [self.measured_cost(candidate) for candidate in candidates]
        best = min(range(len(costs)), key=lambda i: costs[i])
        if costs[best] > _WORTH * costs[0]:
            best = 0
        chosen = candidates[best]
        return chosen, {name: self._why(name, chosen) for name in chosen}

    def _within(self, formats: Mapping[str, Precision]) -> dict[str, Precision]:
        """``formats`` moved up to the nearest option of each layer, alike among tied ones."""
        result = {name: options[-1] for name, options in self.options.items()}
        for names, common in self.groups:
            wanted = max((formats.get(name, Precision.FP32) for name in names), key=lambda p: p.rank)
            rung = next(p for p in common if p.rank >= wanted.rank)
            result.update(dict.fromkeys(names, rung))
        return result

    def _expand(self, formats: dict[str, Precision], alpha: Precision) -> dict[str, Precision]:
        """Best move in which any set of layers goes to ``alpha`` and all others stay: one minimum cut."""
        labels = self.table.labels(formats)
        movable = {
            self.index[name]: names
            for names, common in self.groups
            if alpha in common
            for name in names
            if formats[name] is not alpha
        }
        free = set(movable)
        for i, node in enumerate(self.table.nodes):  # a join can go where all of its sources can be
            if (
                not node.layer
                and labels[i].rank > alpha.rank
                and all(s in free or labels[s].rank <= alpha.rank for s in self._sources.get(i, ()))
            ):
                free.add(i)
        keep_cost = {i: self.unary(i, labels[i]) for i in free}
        move_cost = {i: self.unary(i, alpha) for i in free}
        arcs: dict[tuple[int, int], float] = {}

        def arc(u: int, v: int, capacity: float) -> None:
            arcs[u, v] = arcs.get((u, v), 0.0) + capacity

        for edge in self.table.edges:
            u, v = edge.source, edge.target
            if u not in free and v not in free:
                continue
            e = {
                (a, b): self._edge(edge, alpha if a else labels[u], alpha if b else labels[v])
                for a in ((0, 1) if u in free else (0,))
                for b in ((0, 1) if v in free else (0,))
            }
            if u in free and v in free:
                move_cost[u] += e[1, 0] - e[0, 0]
                move_cost[v] += e[1, 1] - e[1, 0]
                arc(u, v, max(0.0, e[0, 1] + e[1, 0] - e[0, 0] - e[1, 1]))
            elif u in free:
                move_cost[u] += e[1, 0] - e[0, 0]
            else:
                move_cost[v] += e[0, 1] - e[0, 0]
            if v in free and not self.table.nodes[v].layer and u in free:
                arc(u, v, math.inf)
        for names in {names for i, names in movable.items() if len(names) > 1}:
            for first, second in pairwise(names):
                a, b = self.index[first], self.index[second]
                arc(a, b, math.inf)
                arc(b, a, math.inf)
        moved = minimum_cut(keep_cost, move_cost, arcs)
        result = dict(formats)
        for i in moved:
            if self.table.nodes[i].layer:
                result[self.table.nodes[i].name] = alpha
        return result

    def _edge(self, edge: Edge, source: Precision, target: Precision) -> float:
        seconds = self.table.edge_seconds(edge, source, target, batch_size=self.size)
        kept = 0.0
        if edge.kept and source != target and self.table.nodes[edge.target].layer:
            kept = self.size * edge.elements * (4 if target is Precision.FP32 else 2)
        if self.prefer == "memory":
            return kept + _BYTES_PER_SECOND * seconds
        return seconds + _SECONDS_PER_BYTE * kept

    def _descend(self, formats: dict[str, Precision]) -> dict[str, Precision]:
        """Single moves under the exact cost until none gains, three sweeps at most; each looks only at what it touches."""
        if not any(not node.layer for node in self.table.nodes) and len(self.table.precisions) == 2:
            return formats  # without joins the cut was exact
        best, labels = dict(formats), self.table.labels(formats)
        for _ in range(3):
            improved = False
            for names, common in self.groups:
                for precision in common:
                    if best[names[0]] is precision:
                        continue
                    changed = self._moved(labels, {self.index[name]: precision for name in names})
                    if self._difference(labels, changed) < 0.0:
                        best.update(dict.fromkeys(names, precision))
                        for i, label in changed.items():
                            labels[i] = label
                        improved = True
            if not improved:
                break
        return best

    def _moved(self, labels: list[Precision], layers: dict[int, Precision]) -> dict[int, Precision]:
        """Nodes whose label changes when ``layers`` do: themselves and the joins downstream."""
        changed = dict(layers)
        waiting = sorted(
            {e.target for i in layers for e in self._out[i] if not self.table.nodes[e.target].layer}
        )
        while waiting:
            i = waiting.pop(0)
            label = max((changed.get(s, labels[s]) for s in self._sources[i]), key=lambda p: p.rank)
            if label is not changed.get(i, labels[i]):
                changed[i] = label
                more = {e.target for e in self._out[i] if not self.table.nodes[e.target].layer}
                waiting = sorted(set(waiting) | more)
        return changed

    def _difference(self, labels: list[Precision], changed: dict[int, Precision]) -> float:
        """Exact change of the cost when the labels of ``changed`` change."""
        total = 0.0
        edges: set[Edge] = set()
        for i, label in changed.items():
            total += self.unary(i, label) - self.unary(i, labels[i])
            edges.update(self._out[i], self._in[i])
        for edge in edges:
            u, v = edge.source, edge.target
            total += self._edge(edge, changed.get(u, labels[u]), changed.get(v, labels[v]))
            total -= self._edge(edge, labels[u], labels[v])
        return total

    # ---------------------------------------------------------------- words

    def _why(self, name: str, chosen: Mapping[str, Precision]) -> str:
        if name in self.pinned:
            return f"pinned to {self.pinned[name]}"
        if name not in self.index:
            return self.table.missing.get(name, "it did not run while costs were measured")
        node = self.table.nodes[self.index[name]]
        lower = [
            p for p in self.table.precisions if p is not Precision.FP32 and p.rank >= self.bounds[name].rank
        ]
        if not lower:
            return "bound to fp32"
        low = chosen[name] if chosen[name] is not Precision.FP32 else lower[0]
        if low not in node.follows:
            return f"its operation does not follow {low} on this device"
        high_s = node.seconds[Precision.FP32][self.bucket]
        low_s = node.seconds.get(low, node.seconds[Precision.FP32])[self.bucket]
        if self.prefer == "memory":
            high_b = node.bytes_per_sample[Precision.FP32] * self.size / 2**20
            low_b = node.bytes_per_sample.get(low, node.bytes_per_sample[Precision.FP32]) * self.size / 2**20
            figures = f"{high_b:.2g} MiB -> {low_b:.2g} MiB kept"
        else:
            figures = f"{1e3 * high_s:.2g} ms -> {1e3 * low_s:.2g} ms"
        if chosen[name] is not Precision.FP32:
            better = low_s < high_s if self.prefer == "time" else low_b < high_b
            return f"gain on this device: {figures}" if better else f"goes with its neighbours: {figures}"
        if self.prefer == "time" and low_s < high_s:
            return f"conversions cost more than it gains: {figures}"
        return f"no gain on this device: {figures}"
