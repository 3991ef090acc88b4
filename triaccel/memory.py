"""Bytes that a step takes and bytes that it may take, per device.

Budget = (1 − margin) · min(user's cap, device free + held by us, control group's limit − what there is not tensors,
``RLIMIT_AS`` − address space that is not tensors). Used: on CUDA the allocator's peak of reserved bytes, with the allocated
peak beside it; on CPU the peak of live tensor storage (``live_tensors``), measured on one step of each new (batch, map). The
first step of a run is not recorded: the optimizer has no state yet. What cannot be measured is ``None`` and said, never 0.

Implementations: ``CpuMemory``, ``FakeMemory`` (scripted), ``cuda_memory.CudaMemory``. Cost: a tracked CPU step about 1.1 ×,
other steps microseconds; about 10 ms a tick where a control group or ``RLIMIT_AS`` is nearly used up. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from .limits import address_space, cgroup, headroom_bytes, resident_set_bytes, system_memory, trim_heap
from .live_tensors import LiveTensors, live_tensor_bytes
from .types import MemoryReading, TriAccelError

__all__ = [
    "BaseProbe",
    "CpuMemory",
    "FakeMemory",
    "LiveTensors",
    "MemoryProbe",
    "headroom_bytes",
    "live_tensor_bytes",
    "make_memory_probe",
    "resident_set_bytes",
    "trim_heap",
]

_KEPT = 256


class MemoryProbe(Protocol):
    """What the loop asks of a probe."""

    def observe(self, *, batch_size: int, map_version: int) -> AbstractContextManager[None]:
        """Context around one whole optimizer step; ``batch_size`` is the largest micro-batch that runs in it."""
        ...

    def out_of_memory(self, *, batch_size: int, map_version: int) -> None:
        """Note that this size did not fit; the observation under way, if any, is void."""
        ...

    def reading(self) -> MemoryReading | None:
        """Bytes since the last reading; ``None`` before anything was observed."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        ...


class BaseProbe:
    """What the probes share: peaks per (batch, map), sizes that failed, and what ran since the last reading."""

    source = ""

    def __init__(self, *, budget_bytes: int | None, margin: float) -> None:
        if not 0.0 <= margin < 1.0:
            raise TriAccelError(f"memory margin {margin} is not in [0, 1)")
        self._cap = budget_bytes
        self._margin = margin
        self._peaks: dict[tuple[int, int], int] = {}
        self._failed: dict[tuple[int, int], int] = {}
        self._recent: dict[tuple[int, int], None] = {}
        self._steps = 0
        self._void = False

    def _record(self, key: tuple[int, int], peak: int) -> None:
        self._peaks.pop(key, None)
        self._peaks[key] = peak
        while len(self._peaks) > _KEPT:
            del self._peaks[next(iter(self._peaks))]

    def _begin(self, batch_size: int, map_version: int) -> tuple[int, int]:
        self._void = False
        return batch_size, map_version

    def _end(self, key: tuple[int, int]) -> None:
        self._steps += 1
        self._recent[key] = None

    def out_of_memory(self, *, batch_size: int, map_version: int) -> None:
        """Note that this size did not fit; the observation under way is void."""
        self._void = True
        self._failed[batch_size, map_version] = self._budget()
        self._peaks.pop((batch_size, map_version), None)

    def _available(self) -> dict[str, int | None]:
        """Bytes that tensors may take under each limit; ``None``: no such limit."""
        raise TypeError(f"{type(self).__name__} does not say what is available")

    def _budget(self) -> int:
        found = [limit for limit in (self._cap, *self._available().values()) if limit is not None]
        if not found:
            raise TriAccelError("no memory limit is known on this device: set batch.budget_bytes")
        return max(1, int((1.0 - self._margin) * min(found)))

    def _used(self) -> int | None:
        recent = [self._peaks[key] for key in self._recent if key in self._peaks]
        self._recent = dict.fromkeys(list(self._recent)[-1:])
        if recent:
            return max(recent)
        return next(reversed(self._peaks.values()), None)

    def _reading(self, **fields: Any) -> MemoryReading | None:
        used = self._used()
        if used is None:
            return None
        budget = self._budget()
        self._refuse_too_small(used, fields.get("resident_bytes"))
        return MemoryReading(
            used_bytes=used,
            budget_bytes=budget,
            peaks=tuple((batch, version, peak) for (batch, version), peak in self._peaks.items()),
            source=self.source,
            failed=tuple((batch, version, at) for (batch, version), at in self._failed.items()),
            **fields,
        )

    def _refuse_too_small(self, used: int, resident: int | None) -> None:
        """A user's cap below one sample can never be met: say what one sample needs."""
        if self._cap is None or used <= self._cap:
            return
        (batch, _), peak = next(reversed(self._peaks.items()))
        base = resident or 0
        one = base + (peak - base) // batch
        usable = int((1.0 - self._margin) * self._cap)
        if one > usable:
            raise TriAccelError(
                f"batch.budget_bytes {self._cap} leaves {usable} bytes after the margin, but one sample needs about {one} "
                f"({base} whatever the batch, {one - base} per sample): raise it to {int(one / (1.0 - self._margin)) + 1} or more"
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "source": self.source,
            "steps": self._steps,
            "peaks": [[*key, peak] for key, peak in self._peaks.items()],
            "failed": [[*key, at] for key, at in self._failed.items()],
            "recent": [list(key) for key in self._recent],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; peaks of another device are left out."""
        self._steps = int(state["steps"])
        if state["source"] != self.source:
            return  # another device: what it took there says nothing here
        self._peaks = {(int(b), int(v)): int(p) for b, v, p in state["peaks"]}
        self._failed = {(int(b), int(v)): int(p) for b, v, p in state["failed"]}
        self._recent = {(int(b), int(v)): None for b, v in state["recent"]}


class CpuMemory(BaseProbe):
    """Peak live tensor storage, one tracked step for each new (batch, map)."""

    source = "cpu-tracker"

    def __init__(self, *, budget_bytes: int | None, margin: float) -> None:
        super().__init__(budget_bytes=budget_bytes, margin=margin)
        self._resident: int | None = None
        self._held = 0

    @contextmanager
    def observe(self, *, batch_size: int, map_version: int) -> Iterator[None]:
        """One step, tracked where the pair is new."""
        key = self._begin(batch_size, map_version)
        if self._steps == 0 or key in self._peaks:
            yield
        else:
            with live_tensor_bytes() as tracker:
                yield
                held = tracker.live_bytes
            if not self._void:
                self._resident, self._held = tracker.before_bytes, held
                self._record(key, tracker.peak_bytes)
        self._end(key)

    def _available(self) -> dict[str, int | None]:
        ours = self._held
        peak = max(self._peaks.values(), default=0)
        if any(limit is not None and limit.free_bytes < 2 * peak for limit in (cgroup(), address_space())):
            trim_heap()  # freed tensors that the heap keeps would count as taken
        rss = resident_set_bytes()
        system, group, space = system_memory(), cgroup(), address_space()
        return {
            "system": system.free_bytes + min(ours, rss),
            "cgroup": None
            if group is None
            else max(0, group.limit_bytes - max(0, max(rss, group.used_bytes) - ours)),
            "RLIMIT_AS": None
            if space is None
            else max(0, space.limit_bytes - max(0, space.used_bytes - ours)),
        }

    def reading(self) -> MemoryReading | None:
        """Peak live tensor bytes since the last reading, and what the process may use."""
        return self._reading(resident_bytes=self._resident)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return super().state_dict() | {"resident": self._resident, "held": self._held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        super().load_state_dict(state)
        if state["source"] == self.source:
            self._resident, self._held = state["resident"], int(state["held"])


class FakeMemory(BaseProbe):
    """Scripted bytes and budget, for tests and simulations.

    Args:
        bytes_of: (batch_size, map_version, step) -> bytes that the step takes.
        budget_of: step -> bytes available before the margin.
        margin: share of the budget that is kept back.
        resident_bytes: bytes that do not depend on the batch; ``None``: not known to the probe.
        raises: whether a step over what is available raises ``torch.OutOfMemoryError`` as a device would.
    """

    source = "fake"

    def __init__(
        self,
        bytes_of: Callable[[int, int, int], int],
        budget_of: Callable[[int], int],
        *,
        margin: float = 0.0,
        resident_bytes: int | None = None,
        raises: bool = False,
    ) -> None:
        super().__init__(budget_bytes=None, margin=margin)
        self._bytes_of = bytes_of
        self._budget_of = budget_of
        self._resident = resident_bytes
        self._raises = raises

    @contextmanager
    def observe(self, *, batch_size: int, map_version: int) -> Iterator[None]:
        """One step that takes what the script says."""
        key = self._begin(batch_size, map_version)
        taken = self._bytes_of(batch_size, map_version, self._steps)
        if self._raises and taken > self._budget_of(self._steps):
            self._steps += 1
            raise torch.OutOfMemoryError(f"fake device: {taken} bytes of {self._budget_of(self._steps - 1)}")
        yield
        if not self._void:
            self._record(key, taken)
        self._end(key)

    def _available(self) -> dict[str, int | None]:
        return {"script": self._budget_of(self._steps)}

    def reading(self) -> MemoryReading | None:
        """Scripted bytes."""
        return self._reading(resident_bytes=self._resident)


def make_memory_probe(device: torch.device | str, *, budget_bytes: int | None, margin: float) -> MemoryProbe:
    """The probe for ``device``.

    Args:
        device: where the model is.
        budget_bytes: user's cap on bytes; ``None``: what the device has.
        margin: share of the available bytes that is never budgeted.

    Raises:
        TriAccelError: the device is neither CPU nor CUDA.
    """
    device = torch.device(device)
    if device.type == "cuda":
        from .cuda_memory import CudaMemory

        return CudaMemory(device, budget_bytes=budget_bytes, margin=margin)
    if device.type == "cpu":
        return CpuMemory(budget_bytes=budget_bytes, margin=margin)
    raise TriAccelError(
        f"bytes cannot be measured on a {device.type!r} device: use a CUDA device or the CPU, or pass memory= to TriAccel"
    )
