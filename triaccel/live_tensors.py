"""Peak bytes of live tensor storage, followed by a dispatch mode.

PyTorch's CPU allocator keeps no statistics, so each operation's outputs are looked at as they are made: a storage not seen
before adds its bytes, and a weak reference takes them off when it is freed. A storage that first appears as an *input* was
there all along (parameters, optimizer state, the batch) and is added to the peak in hindsight. Forward, backward and the
update are seen alike; results and random streams are untouched. What an operation allocates and frees inside itself (oneDNN
scratch) is not seen. Cost: a few microseconds per tensor and operation, so one step is tracked for each new (batch, map),
never every step. Compiled regions run eagerly while tracked. Source: ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LiveTensors", "live_tensor_bytes"]


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that follows live tensor storage.

    Attributes:
        live_bytes: bytes of the storages followed that are alive now.
        peak_bytes: the most that were alive at once since the start.
        before_bytes: bytes of the storages that were there before anything inside made them.
    """

    def __init__(self, resident: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.before_bytes = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        for tensor in resident:
            self._see(tensor, before=True)

    def _see(self, value: Any, *, before: bool) -> None:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                if value.device.type != "meta":
                    self._count(value.untyped_storage(), before=before)
            elif value.layout is torch.sparse_coo:
                self._see(value._indices(), before=before)
                self._see(value._values(), before=before)
        elif isinstance(value, list | tuple):
            for entry in value:
                self._see(entry, before=before)

    def _count(self, storage: torch.UntypedStorage, *, before: bool) -> None:
        key = storage._cdata
        size = storage.nbytes()
        known = self._storages.get(key)
        if known is not None:
            if known[1] == size:
                return
            self._storages[key] = known[0], size  # resized in place
            self.live_bytes += size - known[1]
        else:
            self._storages[key] = weakref.ref(storage, partial(self._freed, key)), size
            self.live_bytes += size
            if before:
                self.peak_bytes += size
                self.before_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int, _: object) -> None:
        known = self._storages.pop(key, None)
        if known is not None:
            self.live_bytes -= known[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see(args, before=True)
        if kwargs:
            self._see(list(kwargs.values()), before=True)
            out = func(*args, **kwargs)
        else:
            out = func(*args)
        self._see(out, before=False)
        return out

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._storages.clear()  # drops the weak references, so nothing calls back later


def live_tensor_bytes(resident: Iterable[Tensor] = ()) -> LiveTensors:
    """Tracker for ``with live_tensor_bytes() as tracker: ...``; read ``tracker.peak_bytes`` afterwards.

    Args:
        resident: tensors to count although nothing inside may touch them (a resident data set, an averaged copy of the weights).

    Source: ours.
    """
    return LiveTensors(resident)
