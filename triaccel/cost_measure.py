"""Measures a cost table inside a time budget: whole-model passes in each format, looked at from inside, then whole maps.

For each batch size that the budget affords (the batch at hand first, then the largest rung that fits):

1. one pass per format to warm up and, the first time, to see the graph and the bytes kept;
2. passes in alternating formats, timed per layer and per autograd node; medians, layers of one signature pooled;
3. whole maps timed without any hook, alternating: FP32, the lowest format everywhere, and the map that minimises the sum.

Step 3 corrects the sum, and lets the best map be one that was really timed. Weights, ``.grad``, buffers, RNG and train flags are
as before. A saved table is read back for the same model, sizes, formats, machine and threads. Source: ours.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .cost_map import best_map
from .cost_profile import Pass, differentiable, run_pass
from .cost_table import CostTable, Edge, MeasuredMap, Node
from .ladder import Ladder
from .limits import headroom_bytes
from .regions import install_map, map_tensors, outer_format, restore_map
from .types import LayerInfo, Precision, TriAccelError

__all__ = ["measure_costs"]

_ROUNDS = 3
_APART = 1.5  # sizes closer than this share a bucket
_FIRST_SHARE = 0.4  # of the budget, for the batch at hand when larger ones may come
_HOPELESS = 1.3  # a map modelled this much slower than the best is not timed whole
_CONVERT_ELEMENTS = 2**21


class _Layer(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def info(self) -> LayerInfo: ...
    @property
    def module(self) -> nn.Module: ...


def measure_costs(
    model: nn.Module,
    layers: Sequence[_Layer],
    inputs: Any,
    *,
    batch_sizes: Sequence[int],
    ladder: Ladder,
    budget_seconds: float,
    cache_dir: Path | None = None,
) -> CostTable:
    """Measure what each layer costs in each format of ``ladder``.

    Args:
        model: the model, in the mode and on the device in which it trains.
        layers: its layers.
        inputs: one example batch: a tensor, or a tuple or dict of them, samples first.
        batch_sizes: sizes that may be used; those that the budget does not afford share the nearest measured one.
        ladder: formats to measure; FP32 alone costs nothing.
        budget_seconds: time to spend; the first batch size is measured once in each format even if that takes longer.
        cache_dir: folder of saved tables; ``None``: none is read or written.

    Returns:
        The table.

    Raises:
        TriAccelError: the inputs hold no tensor, or no output of the model depends on a trainable parameter.

    Source: ours.
    """
    measuring = _Measuring(model, layers, inputs, sorted(set(batch_sizes)), ladder, budget_seconds)
    path = None
    if cache_dir is not None:
        path = Path(cache_dir) / f"costs-{measuring.key()}.json"
        if path.is_file():
            return CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
    table = measuring.run()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(table.to_json()), encoding="utf-8")
        partial.replace(path)
    return table


class _Measuring:
    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[_Layer],
        inputs: Any,
        batch_sizes: list[int],
        ladder: Ladder,
        budget: float,
    ) -> None:
        self.model = getattr(model, "_orig_mod", model)
        self.layers = layers
        self.inputs = inputs
        self.ladder = ladder
        self.modules = {layer.name: (layer.module, layer.info.role) for layer in layers}
        self.compute = {layer.name: layer.module for layer in layers if layer.info.role == "compute"}
        self.infos = [layer.info for layer in layers]
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.batch = _batch_length(inputs)
        self.sizes = batch_sizes or [self.batch]
        self.start = time.perf_counter()
        self.budget = budget
        self.first: dict[Precision, Pass] = {}
        self.passes: dict[tuple[int, Precision], list[Pass]] = {}
        self.measured: dict[tuple[Precision, ...], dict[int, float]] = {}

    def key(self) -> str:
        """Hash of all that a table depends on."""
        parts = [
            repr(self.model),
            [(n, list(p.shape), p.requires_grad) for n, p in self.model.named_parameters()],
            [(list(t.shape), str(t.dtype), list(t.stride())) for t in _all_tensors(self.inputs)],
            self.sizes,
            [p.value for p in self.ladder.precisions],
            _device_name(self.device),
            torch.get_num_threads(),
            torch.__version__,
            self.budget,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    # ---------------------------------------------------------------- plan

    def run(self) -> CostTable:
        """Measure within the budget."""
        with ExitStack() as stack:
            stack.enter_context(_undisturbed(self.model, self.device))
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            size = min(self.sizes, key=lambda s: (abs(s - self.batch), s))
            larger = [s for s in self.sizes if s >= _APART * size]
            until = self.start + self.budget * (_FIRST_SHARE if larger else 1.0)
            seconds = self._profile(size, until=self.start + 0.6 * (until - self.start))
            self._whole_maps(size, until=until)
            done = [size]
            while len(done) < 3:
                # A warm-up and a timed pass per format, and two rounds of two whole maps.
                per_sample = (2.0 * sum(seconds.values()) + 4.0 * min(seconds.values())) / done[0]
                fits = [
                    s
                    for s in larger
                    if all(max(s, d) >= _APART * min(s, d) for d in done)
                    and s * per_sample <= self._left()
                    and self._has_room(s)
                ]
                if not fits:
                    break
                size = max(fits)
                try:
                    self._profile(size, until=time.perf_counter() + 0.5 * self._left())
                    self._whole_maps(size, until=self.start + self.budget)
                except RuntimeError as error:  # out of memory in one of its forms: smaller sizes are measured
                    self._forget(size)
                    if "memory" not in str(error) and "primitive" not in str(error):
                        raise
                    break
                done.append(size)
            return self._table(sorted(done))

    def _left(self) -> float:
        return self.start + self.budget - time.perf_counter()

    def _forget(self, size: int) -> None:
        for key in [key for key in self.passes if key[0] == size]:
            del self.passes[key]
        for seconds in self.measured.values():
            seconds.pop(size, None)

    def _has_room(self, size: int) -> bool:
        """Whether what forward keeps at ``size`` fits three times into what the device has free."""
        kept = sum(seen.bytes_batch for seen in self.first[Precision.FP32].nodes.values())
        need = 3 * kept * size / self.batch_first
        if self.device.type == "cuda":
            return need < torch.cuda.mem_get_info(self.device)[0]
        if self.device.type == "cpu":
            free = headroom_bytes()
            return free is None or need < free
        return size <= self.batch_first

    # ---------------------------------------------------------------- passes

    def _profile(self, size: int, *, until: float) -> dict[Precision, float]:
        """Passes at one batch size in alternating formats; seconds per pass and format."""
        formats = self.ladder.precisions
        inputs = _resize(self.inputs, size)
        for precision in formats:
            seen = self._pass(precision, inputs, keep_bytes=precision not in self.first)
            if precision not in self.first:
                self.first[precision] = seen
                self.batch_first = size
        rounds = 0
        while rounds < _ROUNDS:
            start = time.perf_counter()
            for precision in formats:
                self.passes.setdefault((size, precision), []).append(
                    self._pass(precision, inputs, keep_bytes=False)
                )
            rounds += 1
            if time.perf_counter() + (time.perf_counter() - start) > until:
                break
        return {p: statistics.median(seen.seconds for seen in self.passes[size, p]) for p in formats}

    def _pass(self, precision: Precision, inputs: Any, *, keep_bytes: bool) -> Pass:
        formats = dict.fromkeys(self.compute, precision)
        with self._region(formats) as call:
            return run_pass(
                self.model,
                self.compute,
                lambda: call(inputs),
                device=self.device,
                keep_bytes=keep_bytes,
            )

    @contextmanager
    def _region(self, formats: Mapping[str, Precision]) -> Iterator[Callable[[Any], Any]]:
        outer = outer_format(formats)
        installed = []
        if outer is not Precision.FP32:
            installed = install_map(self.model, self.modules, formats, device_type=self.device.type)

        def call(inputs: Any) -> Any:
            if outer is Precision.FP32:
                with torch.autocast(self.device.type, enabled=False):
                    return _call(self.model, inputs)
            with torch.autocast(self.device.type, dtype=outer.torch_dtype, cache_enabled=False):
                return _call(self.model, inputs)

        try:
            yield call
        finally:
            restore_map(installed)

    def _whole_maps(self, size: int, *, until: float) -> None:
        """Time whole maps at ``size``, hooks off, alternating: FP32, the cheapest by the sum, the lowest if it has a chance."""
        if len(self.ladder.precisions) < 2:
            return
        table = self._table(sorted({s for s, _ in self.passes}))
        names = table.layer_names
        bounds = dict.fromkeys(self.compute, self.ladder.lowest)
        best, _ = best_map(table, self.infos, batch_size=size, prefer="time", allowed=bounds)
        modelled = {}
        for candidate in (
            {name: best[name] for name in names},
            dict.fromkeys(names, Precision.FP32),
            dict.fromkeys(names, self.ladder.lowest),
        ):
            key = tuple(candidate[name] for name in names)
            modelled[key] = table.modelled_seconds(candidate, batch_size=size), candidate
        least = min(seconds for seconds, _ in modelled.values())
        maps = {
            key: candidate
            for key, (seconds, candidate) in modelled.items()
            if seconds <= _HOPELESS * least or Precision.FP32 in key
        }
        inputs = _resize(self.inputs, size)
        times: dict[tuple[Precision, ...], list[float]] = {key: [] for key in maps}
        for _ in range(2 * _ROUNDS):
            start = time.perf_counter()
            for key, formats in maps.items():
                times[key].append(self._seconds(formats, inputs))
            if time.perf_counter() + (time.perf_counter() - start) > until:
                break
        for key, values in times.items():
            self.measured.setdefault(key, {})[size] = statistics.median(values)

    def _seconds(self, formats: Mapping[str, Precision], inputs: Any) -> float:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        with self._region(formats) as call:
            self._synchronize()
            start = time.perf_counter()
            loss = differentiable(call(inputs))
            if loss is None or not parameters:
                raise TriAccelError(
                    "no output of the model depends on a trainable parameter: there is no backward pass to measure; "
                    "unfreeze a layer, or use precision.rule='off'"
                )
            torch.autograd.grad(loss, parameters, allow_unused=True)
            self._synchronize()
            return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---------------------------------------------------------------- the table

    def _table(self, buckets: list[int]) -> CostTable:
        base = self.first[Precision.FP32]
        keys = list(base.nodes)
        index = {key: i for i, key in enumerate(keys)}
        own = self._pooled(buckets)
        nodes = tuple(self._node(key, i, buckets, own) for key, i in index.items())
        low = self.first[self.ladder.lowest]
        edges = []
        for (source, target), (elements, storage, gradient, _) in base.edges.items():
            other = low.edges.get((source, target))
            if source == target or source not in index or target not in index:
                continue
            if other is not None and len(self.ladder.precisions) > 1 and other[3] == torch.float32:
                continue  # FP32 whatever the source computes in: its conversion is in the target's own time
            edges.append(
                Edge(
                    index[source],
                    index[target],
                    elements / self.batch_first,
                    base.saved_by.get(storage, target) != target,
                    gradient,
                )
            )
        convert, overhead = self._conversions()
        names = [key for key in keys if key in self.compute]
        return CostTable(
            precisions=self.ladder.precisions,
            buckets=tuple(buckets),
            nodes=nodes,
            edges=tuple(edges),
            convert_seconds=convert,
            convert_overhead=overhead,
            measured=tuple(
                MeasuredMap(formats, tuple(seconds.get(b) for b in buckets))
                for formats, seconds in self.measured.items()
                if len(formats) == len(names)
            ),
            missing={
                name: "it did not run while costs were measured" for name in self.compute if name not in index
            },
            device=_device_name(self.device),
            measured_seconds=time.perf_counter() - self.start,
        )

    def _signature(self, key: Any) -> str:
        if key not in self.compute:
            return "join"
        module = self.compute[key]
        seen = self.first[Precision.FP32].nodes[key]
        weights = ",".join(
            f"{tuple(p.shape)}{'' if p.requires_grad else ' frozen'}" for p in module.parameters()
        )
        extra = module.extra_repr() if not list(module.children()) else repr(module)
        return f"{type(module).__name__}({extra}) {weights} on {seen.shapes}"

    def _pooled(self, buckets: list[int]) -> dict[tuple[str, int, Precision], float]:
        """Median seconds of a layer alone, over passes and over layers of one signature."""
        pool: dict[tuple[str, int, Precision], list[float]] = {}
        for (size, precision), passes in self.passes.items():
            if size not in buckets:
                continue
            for seen in passes:
                for key, node in seen.nodes.items():
                    if key in self.first[Precision.FP32].nodes and key in self.compute:
                        pool.setdefault((self._signature(key), size, precision), []).append(node.own_seconds)
        return {key: statistics.median(values) for key, values in pool.items()}

    def _node(
        self, key: Any, i: int, buckets: list[int], own: Mapping[tuple[str, int, Precision], float]
    ) -> Node:
        layer = key in self.compute
        signature = self._signature(key)
        seconds: dict[Precision, tuple[float, ...]] = {}
        per_sample: dict[Precision, float] = {}
        fixed: dict[Precision, float] = {}
        follows = [Precision.FP32]
        for precision in self.ladder.precisions:
            first = self.first[precision].nodes.get(key)
            rest = []
            for size in buckets:
                seen = [p.nodes[key].rest_seconds for p in self.passes[size, precision] if key in p.nodes]
                rest.append(
                    (statistics.median(seen) if seen else 0.0) + own.get((signature, size, precision), 0.0)
                )
            seconds[precision] = tuple(rest)
            per_sample[precision] = (first.bytes_batch if first else 0) / self.batch_first
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

    def _conversions(self) -> tuple[dict[str, float], float]:
        """Seconds per element between each two formats, and of a conversion of almost nothing; measured once."""
        if not hasattr(self, "_convert"):
            result: dict[str, float] = {}
            overhead = 0.0
            for a in self.ladder.precisions:
                for b in self.ladder.precisions:
                    if a is b:
                        continue
                    many = self._convert_seconds(a, b, _CONVERT_ELEMENTS)
                    few = self._convert_seconds(a, b, 16)
                    overhead = max(overhead, few)
                    result[f"{a}>{b}"] = max(0.0, many - few) / _CONVERT_ELEMENTS
            self._convert = result, overhead
        return self._convert

    def _convert_seconds(self, a: Precision, b: Precision, elements: int) -> float:
        x = torch.ones(elements, dtype=a.torch_dtype, device=self.device)
        times = []
        for _ in range(6):
            self._synchronize()
            start = time.perf_counter()
            x.to(b.torch_dtype)
            self._synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


# ------------------------------------------------------------------------------------------------ helpers


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers, RNG and modes as before on exit; no garbage collection in between."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
            yield
    finally:
        if collecting:
            gc.enable()
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
        for module, mode in modes:
            module.training = mode


def _all_tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, look)
    return found


def _batch_length(inputs: Any) -> int:
    for tensor in _all_tensors(inputs):
        if tensor.dim():
            return tensor.shape[0]
    raise TriAccelError(
        f"the example batch ({type(inputs).__name__}) holds no tensor with a sample dimension: costs cannot be measured on it; "
        "give a tensor, or a tuple or dict of tensors with samples first"
    )


def _resize(inputs: Any, size: int) -> Any:
    """``inputs`` with ``size`` samples, repeated in turn or cut; tensors of another length stay."""
    length = _batch_length(inputs)
    if size == length:
        return inputs

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != length:
            return tensor
        index = torch.arange(size, device=tensor.device) % length
        picked = tensor[index]
        if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
            picked = picked.contiguous(memory_format=torch.channels_last)
        return picked

    return map_tensors(inputs, change)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
