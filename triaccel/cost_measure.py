"""Measures a cost table inside a time budget: whole-model passes in each format, looked at from inside, then whole maps.

For each batch size that the budget affords (the batch at hand first, then the largest rung that fits):

1. one pass per format to warm up and, the first time, to see the graph and the bytes kept;
2. passes in alternating formats, timed per layer and per autograd node; medians, layers of one signature pooled;
3. whole maps timed without any hook, alternating: FP32, the lowest format everywhere, and the map that minimises the sum.

Step 3 corrects the sum, and lets the best map be one that was really timed. Weights, ``.grad``, buffers, RNG and train flags are
as before. A saved table is read back for the same model, sizes, formats, machine and threads. Source: ours.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from .cost_assemble import Measurements, assemble
from .cost_inputs import all_tensors, batch_length, call_model, device_name, resize, undisturbed
from .cost_map import best_map
from .cost_profile import Pass, differentiable, run_pass
from .cost_table import CostTable
from .ladder import Ladder
from .limits import headroom_bytes
from .regions import install_map, outer_format, restore_map
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
        self.batch = batch_length(inputs)
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
            [(list(t.shape), str(t.dtype), list(t.stride())) for t in all_tensors(self.inputs)],
            self.sizes,
            [p.value for p in self.ladder.precisions],
            device_name(self.device),
            torch.get_num_threads(),
            torch.__version__,
            self.budget,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    # ---------------------------------------------------------------- plan

    def run(self) -> CostTable:
        """Measure within the budget."""
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self.model, self.device))
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
            return self._table()

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
        inputs = resize(self.inputs, size)
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
                    return call_model(self.model, inputs)
            with torch.autocast(self.device.type, dtype=outer.torch_dtype, cache_enabled=False):
                return call_model(self.model, inputs)

        try:
            yield call
        finally:
            restore_map(installed)

    def _whole_maps(self, size: int, *, until: float) -> None:
        """Time whole maps at ``size``, hooks off, alternating: FP32, the cheapest by the sum, the lowest if it has a chance."""
        if len(self.ladder.precisions) < 2:
            return
        table = self._table()
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
        inputs = resize(self.inputs, size)
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

    # ---------------------------------------------------------------- conversions

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

    def _table(self) -> CostTable:
        convert, overhead = self._conversions()
        measured = Measurements(
            precisions=self.ladder.precisions,
            compute=self.compute,
            first=self.first,
            first_batch=self.batch_first,
            passes=self.passes,
            whole=self.measured,
            convert=convert,
            convert_overhead=overhead,
            device=device_name(self.device),
        )
        return assemble(measured, seconds=time.perf_counter() - self.start)
