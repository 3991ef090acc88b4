"""An optimizer step that survives running out of memory: rolled back, then retried as smaller micro-batches.

``run_step_with_recovery`` calls ``attempt(micro_batch_size)``; on an out-of-memory error it restores what the attempt had
moved (module buffers such as BatchNorm's statistics, random states, the loss scaler, gradients), outside the ``except`` block
and with the failed frames cleared so that their tensors are free, lowers the micro-batch and tries the same samples again. A
retried step equals one that had the smaller size from the start. Cost without an error: one copy of the buffers and of the
random states.

What is an out-of-memory error is told by type, then along the chain of causes, and by text last, per backend: PyTorch's CPU
allocator has no type of its own, and oneDNN reports a failed allocation as ``could not create a primitive``, which counts only
where memory is really short. Source: ours.
"""

from __future__ import annotations

import gc
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .memory import headroom_bytes, resident_set_bytes, trim_heap
from .types import TriAccelError

__all__ = [
    "StepGuard",
    "is_out_of_memory",
    "minimum_micro_batch",
    "refuse_several_ranks",
    "run_step_with_recovery",
]

T = TypeVar("T")

_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HIP out of memory",
    "MPS backend out of memory",
    "XPU out of memory",
    "NPU out of memory",
    "std::bad_alloc",
)
_AMBIGUOUS = ("could not create a primitive", "could not execute a primitive")


class _Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def is_out_of_memory(error: BaseException, *, needed_bytes: int | None = None) -> bool:
    """Whether ``error`` says that memory ran out: by type, along its causes, then by text per backend.

    Args:
        error: what was raised.
        needed_bytes: bytes that the step was expected to need. oneDNN's ``could not create a primitive`` counts as out of
            memory only where less than this is left; ``None``: less than the process holds now.

    Source: ours; type first as in STYLE, texts for backends without one.
    """
    for link in _chain(error):
        if isinstance(link, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(link, RuntimeError):
            text = str(link)
            if any(known in text for known in _TEXTS):
                return True
            if any(known in text for known in _AMBIGUOUS):
                left = headroom_bytes()
                return left is not None and left < (
                    needed_bytes if needed_bytes is not None else resident_set_bytes()
                )
    return False


def minimum_micro_batch(model: nn.Module) -> int:
    """Samples that a forward in training mode needs at least: 2 where a BatchNorm takes statistics of the batch, else 1."""
    return 2 if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()) else 1


def refuse_several_ranks() -> None:
    """A rank that retries alone leaves the others waiting in a collective (composer PR 2117)."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise TriAccelError(
            f"the process group has {distributed.get_world_size()} ranks: a rank that rolls a step back alone would leave the "
            "others waiting; train on one process"
        )


class StepGuard:
    """What a failed attempt at a step must give back: buffers, random states, the loss scaler, gradients (to ``None``).

    Buffers of normalisation layers are copied every step, in one fused copy into storage kept for it; other buffers only when
    their version counter has moved (a causal mask is copied once). Cost: ~0.1 ms a step for ResNet-18 on CPU, and their bytes.

    Args:
        model: whose buffers and gradients are guarded.
        scaler: anything with ``state_dict`` and ``load_state_dict``, or ``None``.

    Raises:
        TriAccelError: several ranks train together.

    Source: ours.
    """

    def __init__(self, model: nn.Module, *, scaler: _Stateful | None = None) -> None:
        refuse_several_ranks()
        self._parameters = list(model.parameters())
        self._scaler = scaler
        self._slots = [
            (module, name, isinstance(module, nn.modules.batchnorm._NormBase))
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._kept: list[tuple[Tensor, Tensor, int]] = []
        self._cuda = sorted({p.device.index for p in self._parameters if p.device.type == "cuda"})
        self._random: tuple[Any, ...] = ()
        self._scaler_state: Any = None
        self.batch_norm = minimum_micro_batch(model) > 1
        """Whether a BatchNorm takes statistics of each micro-batch."""

    def snapshot(self) -> None:
        """Remember the state before the step. Gradients must be ``None`` or zero by now: ``restore`` sets them to ``None``."""
        before: Sequence[tuple[Tensor, Tensor, int] | None] = self._kept or [None] * len(self._slots)
        self._kept = []
        targets: dict[torch.dtype, list[Tensor]] = {}
        sources: dict[torch.dtype, list[Tensor]] = {}
        with torch.no_grad():
            for (module, name, every_step), former in zip(self._slots, before, strict=True):
                buffer = module._buffers[name]
                assert buffer is not None
                version = buffer._version
                if former is None or former[0] is not buffer:
                    copy = buffer.detach().clone()
                else:
                    copy = former[1]
                    if every_step or version != former[2]:
                        targets.setdefault(buffer.dtype, []).append(copy)
                        sources.setdefault(buffer.dtype, []).append(buffer)
                self._kept.append((buffer, copy, version))
            for dtype, copies in targets.items():
                torch._foreach_copy_(copies, sources[dtype])
        numpy = sys.modules.get("numpy")
        self._random = (
            torch.get_rng_state(),
            [torch.cuda.get_rng_state(index) for index in self._cuda],
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
        )
        self._scaler_state = None if self._scaler is None else self._scaler.state_dict()

    def restore(self) -> None:
        """Put everything back as it was at ``snapshot``; gradients become ``None``."""
        for parameter in self._parameters:
            parameter.grad = None
        with torch.no_grad():
            for (module, name, _), (buffer, copy, _) in zip(self._slots, self._kept, strict=True):
                module._buffers[name] = buffer
                buffer.copy_(copy)
        # copy_ moved the version counters: the copies are current at the new ones
        self._kept = [(buffer, copy, buffer._version) for buffer, copy, _ in self._kept]
        cpu, cuda, python, numpy_state = self._random
        torch.set_rng_state(cpu)
        for index, state in zip(self._cuda, cuda, strict=True):
            torch.cuda.set_rng_state(state, index)
        random.setstate(python)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        if self._scaler is not None:
            self._scaler.load_state_dict(self._scaler_state)


def _release(error: BaseException) -> None:
    """Drop the local variables of the failed frames: they hold the very tensors that did not fit (pytorch 18853)."""
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def _next_size(size: int, minimum: int, ladder: Sequence[int]) -> int:
    half = max(size // 2, minimum)
    rungs = [rung for rung in ladder if minimum <= rung <= half]
    return max(rungs) if rungs else half


def run_step_with_recovery(
    attempt: Callable[[int], T],
    *,
    guard: StepGuard,
    micro_batch_size: int,
    minimum: int,
    on_floor: Callable[[], object],
    on_oom: Callable[[int], object] | None = None,
    ladder: Sequence[int] = (),
    needed_bytes: Callable[[int], int | None] | None = None,
    is_oom: Callable[..., bool] = is_out_of_memory,
) -> tuple[T, int, int]:
    """Run ``attempt(micro_batch_size)``; each time memory runs out, roll back and try again with about half the micro-batch.

    Args:
        attempt: forward and backward of one optimizer step over the same samples, cut into micro-batches of at most the
            given size. Not the optimizer's update: weights that have moved cannot be rolled back.
        guard: restores what an attempt moves.
        micro_batch_size: first size, samples.
        minimum: smallest size to try, samples (``minimum_micro_batch``).
        on_floor: called when the smallest size has failed too, before the error: the place to write a checkpoint.
        on_oom: called with each size that failed, after the rollback (tell the memory probe).
        ladder: sizes to prefer, so that compiled code meets few shapes.
        needed_bytes: size -> bytes that the step was expected to need, for backends whose error is ambiguous.
        is_oom: what counts as running out of memory.

    Returns:
        The attempt's result, the micro-batch size that ran, and the number of out-of-memory errors survived.

    Raises:
        TriAccelError: the smallest size ran out of memory.

    Source: ours.
    """
    size = max(micro_batch_size, minimum)
    survived = 0
    guard.snapshot()
    while True:
        try:
            return attempt(size), size, survived
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error, needed_bytes=needed_bytes(size) if needed_bytes else None):
                raise
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            _release(error)
        # outside the except block: the error, its traceback and its frames are gone
        guard.restore()
        gc.collect(
            2 if survived else 1
        )  # cycles of the attempt are young; a full collection can take a second
        trim_heap()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        survived += 1
        if on_oom is not None:
            on_oom(size)
        if size <= minimum:
            on_floor()
            raise TriAccelError(
                f"out of memory with micro-batches of {size}, the smallest that this model can run ({said}); nothing of this "
                "step was applied: free memory, raise the limit, lower the precision or use a smaller model, then resume"
            )
        size = _next_size(size, minimum, ladder)
        if guard.batch_norm and size <= minimum:
            warnings.warn(
                f"out of memory down to micro-batches of {size}, the least that BatchNorm can take statistics of: they are poor "
                "there; free memory, lower the precision, or use a normalisation that does not depend on the batch",
                stacklevel=2,
            )
