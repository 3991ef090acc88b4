"""Bytes of a CUDA device: the caching allocator's peaks, what the device has left, and other tenants by NVML.

Peaks are recorded as the allocated peak times reserved over allocated as last seen at the largest batch, so that what the
cache keeps from a larger batch is not charged to a smaller one. Device-free bytes are ``cudaMemGetInfo``'s, which see every
tenant; NVML, optional and asked by UUID so that MIG and containers work, only names the others' share. Cost: a reset a step,
a read of the statistics for a new (batch, map) and every 16th step. Source: ours.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .memory import BaseProbe
from .types import MemoryReading

__all__ = ["FRAGMENTED", "CudaMemory", "other_tenants_bytes"]

FRAGMENTED = 0.2
"""Share of reserved bytes not in use above which ``expandable_segments`` is suggested."""


class CudaMemory(BaseProbe):
    """The caching allocator's peaks; the cache is emptied when a smaller batch has come to stay, so reserved bytes follow."""

    source = "cuda"

    def __init__(self, device: torch.device, *, budget_bytes: int | None, margin: float) -> None:
        super().__init__(budget_bytes=budget_bytes, margin=margin)
        self._device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self._largest = 0
        self._previous: tuple[int, int] | None = None
        self._ratio = 1.0
        self._resident: int | None = None
        self._unused: int | None = None
        self._warned = False

    @contextmanager
    def observe(self, *, batch_size: int, map_version: int) -> Iterator[None]:
        """One step, its peaks read where the pair is new and now and then after."""
        key = self._begin(batch_size, map_version)
        if key == self._previous and batch_size < self._largest:
            torch.cuda.empty_cache()  # the second step in a row: no tail, the batch has really shrunk
            self._largest = batch_size
        self._largest = max(self._largest, batch_size)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        if self._steps > 0 and not self._void and (key not in self._peaks or self._steps % 16 == 0):
            stats = torch.cuda.memory_stats(self._device)
            allocated, reserved = (
                int(stats["allocated_bytes.all.peak"]),
                int(stats["reserved_bytes.all.peak"]),
            )
            self._resident = int(stats["allocated_bytes.all.current"])
            if batch_size == self._largest:
                self._ratio = max(1.0, reserved / max(1, allocated))
                self._unused = reserved - allocated
                self._suggest_segments(reserved)
            self._record(key, int(allocated * self._ratio))
        self._previous = key
        self._end(key)

    def _suggest_segments(self, reserved: int) -> None:
        """Sizes that vary fragment the cache (pytorch 31252): say once what helps."""
        settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        if self._warned or "expandable_segments" in settings or (self._unused or 0) <= FRAGMENTED * reserved:
            return
        self._warned = True
        warnings.warn(
            f"{self._unused} of {reserved} bytes reserved on {self._device} are not in use: batches of varying size fragment the "
            "cache; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the first CUDA call",
            stacklevel=2,
        )

    def _available(self) -> dict[str, int | None]:
        free, _ = torch.cuda.mem_get_info(self._device)
        return {"device": int(free) + int(torch.cuda.memory_reserved(self._device))}

    def reading(self) -> MemoryReading | None:
        """Peak reserved bytes since the last reading, and what the device has left."""
        others, why = other_tenants_bytes(self._device)
        return self._reading(
            reserved_unused_bytes=self._unused,
            resident_bytes=self._resident,
            other_tenants_bytes=others,
            unavailable=() if why is None else (why,),
        )


def other_tenants_bytes(device: torch.device) -> tuple[int | None, str | None]:
    """Bytes that other processes hold on ``device`` by NVML, asked for by UUID; or ``None`` and why it cannot be told."""
    try:
        import pynvml
    except ImportError:
        return None, "NVML: the pynvml module (nvidia-ml-py) is not installed"
    try:
        pynvml.nvmlInit()
        try:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            prefix = "" if uuid.startswith(("GPU-", "MIG-")) else "GPU-"
            handle = pynvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    held = [process.usedGpuMemory for process in running if process.pid != os.getpid()]
    if any(used is None for used in held):
        return None, "NVML: the driver does not tell the bytes of other processes here (container or MIG)"
    return int(sum(held)), None
