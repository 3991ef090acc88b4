"""All kernels checked and timed on this machine's GPU, in minutes, as one JSON file.

    python -m triaccel.kernels.check --out result.json

What is checked: ``checks``; what is timed: ``timings``. Without a GPU it says so and ends with status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import dispatch
from .checks import run_checks
from .timings import run_timings

__all__ = ["environment", "main"]

Result = dict[str, Any]


def environment(device: torch.device) -> Result:
    """Card, driver and versions."""
    import triton

    card: Result = {"device": platform.processor() or platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        card = {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "driver": _driver(),
        }
    return {
        **card,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return str(pynvml.nvmlSystemGetDriverVersion())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 0 when all checks hold, 1 when one does not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description="Check and time all kernels on this GPU (under 5 minutes).")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--no-timings", action="store_true", help="checks only")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "no CUDA GPU here: nothing was checked or timed. Run this where torch.cuda.is_available(); without a GPU the "
            "interpreter tests (pytest tests/test_kernels_*.py) and python -m triaccel.kernels.compile_targets cover them.",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    dispatch(device, "triton")
    start = time.perf_counter()
    report: Result = {"schema": 1, "environment": environment(device), "checks": run_checks(device)}
    if not chosen.no_timings:
        report["timings"] = run_timings(device)
    report["seconds"] = time.perf_counter() - start
    for check in report["checks"]:
        print(
            f"{'ok  ' if check['ok'] else 'FAIL'} {check['name']}: {check['deviation']:.3g} (limit {check['limit']:.3g})"
        )
    if "timings" in report:
        for name, share in report["timings"]["share_of_copy_bandwidth"].items():
            print(f"     {name}: {100 * share:.0f} % of the copy bandwidth")
        for kind, found in report["timings"]["ratio_to_torch_fused_plus_statistics"].items():
            print(
                f"     {kind} with statistics: {found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}] x "
                "torch fused + statistics"
            )
    if chosen.out is not None:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        partial = chosen.out.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(partial, chosen.out)
    return 0 if all(check["ok"] for check in report["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
