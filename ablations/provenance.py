"""Where a record comes from: code, packages, machine. Needs no torch until ``describe`` is called."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["describe", "machine_key", "sources_hash"]

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "torchvision", "triton", "numpy", "pydantic", "scikit-learn")


@cache
def sources_hash() -> str:
    """First 16 hex digits of SHA-256 over the sources that decide a result: ``triaccel``, ``baselines`` and the trainer."""
    digest = hashlib.sha256()
    files = [*(_ROOT / "triaccel").rglob("*.py"), *(_ROOT / "baselines").rglob("*.py")]
    files += [
        _ROOT / "ablations" / name
        for name in ("train.py", "workloads.py", "cell.py", "cells.py", "timing.py", "checkpoint.py")
    ]
    for path in sorted(files):
        if path.is_file():
            digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _git_commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(_ROOT), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


@cache
def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no /proc: the platform module's name has to do
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def describe(device: str) -> dict[str, Any]:
    """Provenance of a run on ``device``, as plain JSON values."""
    import torch

    described: dict[str, Any] = {
        "git_commit": _git_commit(),
        "sources_hash": sources_hash(),
        "packages": _versions(),
        "python": platform.python_version(),
        "system": platform.system(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "host": machine_key(device),
        "device": device,
        "gpu": None,
        "driver": None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "clocks_mhz": None,
    }
    if device.startswith("cuda"):
        index = torch.device(device).index or 0
        described["gpu"] = torch.cuda.get_device_name(index)
        described["cuda"] = torch.version.cuda
        described |= _nvml(index)
    return described


def _nvml(index: int) -> dict[str, Any]:
    """Driver and clocks, where NVML tells them."""
    import torch

    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(
            uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        )
        driver = pynvml.nvmlSystemGetDriverVersion()
        clocks = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        pynvml.nvmlShutdown()
    except (ImportError, pynvml.NVMLError) as error:
        return {"driver": None, "clocks_mhz": None, "nvml": f"unavailable: {error}"}
    return {"driver": driver, "clocks_mhz": clocks}


def machine_key(device: str) -> str:
    """Identifies the kind of machine without its name: what times may be compared on."""
    text = f"{_cpu()}|{os.cpu_count()}|{platform.machine()}|{device}"
    if device.startswith("cuda"):
        import torch

        text += f"|{torch.cuda.get_device_name(torch.device(device).index or 0)}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
