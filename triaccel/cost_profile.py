"""One forward and backward pass, looked at from inside: who feeds whom, and what each layer takes and keeps.

Layers are seen through their forward hooks, everything between them through a ``TorchFunctionMode``, the backward through hooks
on the autograd nodes that each operation made. Tensors carry the name of the node that made them by their storage, so views
and in-place operations keep it. What follows one node's output alone belongs to that node, because it runs in its format; what
joins several is a join (``cost_table``). Nothing of the model is changed: the hooks come off, gradients are taken with
``autograd.grad`` and never accumulated. Cost: some µs an operation beside the pass itself. Source: ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Pass", "differentiable", "run_pass"]

_LEAF = "AccumulateGrad"


@dataclass(slots=True)
class Seen:
    """One node in one pass: seconds of the layer itself and of its followers, bytes kept, output dtype."""

    own_seconds: float = 0.0
    rest_seconds: float = 0.0
    bytes_batch: int = 0
    bytes_fixed: int = 0
    dtype: torch.dtype | None = None
    shapes: str = ""


@dataclass(slots=True)
class Pass:
    """One pass.

    Attributes:
        nodes: by key, in order of execution: a layer's name, or a tuple for a join.
        edges: (source key, target key) to (elements, storage of the tensor, whether a gradient goes back, dtype).
        saved_by: storage to the key of the node that first saved it for backward.
        seconds: of the whole pass, hooks included.
    """

    nodes: dict[Any, Seen] = field(default_factory=dict)
    edges: dict[tuple[Any, Any], tuple[int, int, bool, torch.dtype]] = field(default_factory=dict)
    saved_by: dict[int, Any] = field(default_factory=dict)
    seconds: float = 0.0


class _Clock:
    """Stamps that cost little; differences in seconds are read when the pass is over."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pairs: list[tuple[Any, str, Any, Any]] = []

    def stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, seen: Seen, part: str, start: Any) -> None:
        self._pairs.append((seen, part, start, self.stamp()))

    def settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        for seen, part, start, end in self._pairs:
            seconds = start.elapsed_time(end) / 1e3 if self._cuda else end - start
            setattr(seen, part, getattr(seen, part) + seconds)
        self._pairs.clear()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Floating tensors in nested tuples, lists, dicts and objects with ``__dict__``-like dataclass fields."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


def differentiable(output: Any) -> Tensor | None:
    """A scalar that depends on every differentiable output: half the sum of squares; ``None`` when there is none."""
    parts = [t.float().square().sum() for t in tensors_in(output) if t.requires_grad]
    if not parts:
        return None
    return torch.stack(parts).sum() / 2


class _Watch(TorchFunctionMode):
    def __init__(self, result: Pass, clock: _Clock, *, parameters: set[int], keep_bytes: bool) -> None:
        super().__init__()
        self.result = result
        self.clock = clock
        self.parameters = parameters
        self.keep_bytes = keep_bytes
        self.inside = 0
        self.current: Any = None
        self.shapes: frozenset[torch.Size] = frozenset()
        self._maker: dict[int, Any] = {}
        self._known: set[Any] = set()
        self._joins: dict[Any, int] = {}
        self._started: Any = None

    # ---------------------------------------------------------------- operations between layers

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        sources: dict[Any, Tensor] = {}
        for tensor in (*tensors_in(args), *tensors_in(kwargs)):
            key = self._maker.get(_storage(tensor))
            if key is not None:
                sources.setdefault(key, tensor)
        self.current = next(iter(sources)) if len(sources) == 1 else None
        join = tuple(sources) if len(sources) > 1 else None
        if join is not None:
            count = self._joins.get(join, 0)
            self.current = ("join", count, *join)
        start = self.clock.stamp()
        output = func(*args, **kwargs)
        made = list(tensors_in(output))
        if not made:
            return output
        if self.current is None:
            for tensor in made:
                self._maker.pop(_storage(tensor), None)
            return output
        seen = self.result.nodes.setdefault(self.current, Seen())
        self.clock.add(seen, "rest_seconds", start)
        if join is not None:
            self._joins[join] = self._joins.get(join, 0) + 1
            seen.dtype = made[0].dtype
            for key, tensor in sources.items():
                self._edge(key, self.current, tensor)
        self._made(made, self.current, seen, "rest_seconds")
        self.current = None
        return output

    # ---------------------------------------------------------------- layers

    def enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        self.inside += 1
        if self.inside > 1:
            return
        seen = self.result.nodes.setdefault(name, Seen())
        shapes = []
        for tensor in tensors_in(inputs):
            shapes.append(f"{tuple(tensor.shape[1:])}")
            key = self._maker.get(_storage(tensor))
            if key is not None and key != name:
                self._edge(key, name, tensor)
        seen.shapes = ",".join(shapes)
        self.current = name
        self.shapes = frozenset(p.shape for p in module.parameters())
        self._started = self.clock.stamp()

    def leave(self, name: str, output: Any) -> None:
        self.inside -= 1
        if self.inside:
            return
        seen = self.result.nodes[name]
        self.clock.add(seen, "own_seconds", self._started)
        made = list(tensors_in(output))
        if made:
            seen.dtype = made[0].dtype
        self._made(made, name, seen, "own_seconds")
        self.current, self.shapes = None, frozenset()

    # ---------------------------------------------------------------- both

    def _edge(self, source: Any, target: Any, tensor: Tensor) -> None:
        known = self.result.edges.get((source, target))
        if known is None or known[0] < tensor.numel():
            self.result.edges[source, target] = (
                tensor.numel(),
                _storage(tensor),
                tensor.requires_grad,
                tensor.dtype,
            )

    def _made(self, tensors: Sequence[Tensor], key: Any, seen: Seen, part: str) -> None:
        for tensor in tensors:
            self._maker[_storage(tensor)] = key
            stack = [tensor.grad_fn]
            while stack:
                node = stack.pop()
                if node is None or node in self._known or _LEAF in node.name():
                    continue
                self._known.add(node)
                self._time(node, seen, part)
                stack.extend(following for following, _ in node.next_functions)

    def _time(self, node: Any, seen: Seen, part: str) -> None:
        started: list[Any] = []
        node.register_prehook(lambda *_: started.append(self.clock.stamp()))
        node.register_hook(lambda *_: self.clock.add(seen, part, started.pop()))

    def pack(self, tensor: Tensor) -> Tensor:
        """Called for each tensor saved for backward."""
        storage = _storage(tensor)
        if storage not in self.parameters and storage not in self.result.saved_by:
            self.result.saved_by[storage] = self.current
            if self.current is not None:
                seen = self.result.nodes.setdefault(self.current, Seen())
                size = tensor.untyped_storage().nbytes()
                if tensor.shape in self.shapes:
                    seen.bytes_fixed += size
                else:
                    seen.bytes_batch += size
        return tensor.detach()  # the tensor itself would keep its own graph alive


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and other tensors without one storage
        return id(tensor)


def run_pass(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    call: Callable[[], Any],
    *,
    device: torch.device,
    keep_bytes: bool,
) -> Pass:
    """Run ``call`` forward and backward and look at it.

    Args:
        model: the model, for its parameters.
        layers: module per layer name.
        call: runs the model on a batch, in whatever region it should.
        device: where it runs.
        keep_bytes: also look at what is saved for backward (slower: not for timing).
    """
    result, clock = Pass(), _Clock(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    fixed = {_storage(t) for t in (*model.parameters(), *model.buffers())}
    watch = _Watch(result, clock, parameters=fixed, keep_bytes=keep_bytes)
    start = time.perf_counter()
    with ExitStack() as stack:
        for name, module in layers.items():
            before = module.register_forward_pre_hook(
                lambda m, a, k, name=name: watch.enter(name, m, (a, k)), with_kwargs=True
            )
            after = module.register_forward_hook(
                lambda _m, _a, output, name=name: watch.leave(name, output), prepend=True
            )
            stack.callback(before.remove)
            stack.callback(after.remove)
        if keep_bytes:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda t: t))
        with watch:
            output = call()
        watch.current = None
        loss = differentiable(output)
        if loss is not None and parameters:
            torch.autograd.grad(loss, parameters, allow_unused=True)
    clock.settle()
    result.seconds = time.perf_counter() - start
    return result
