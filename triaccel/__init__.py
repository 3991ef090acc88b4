"""Tri-Accel: precision, curvature and batch size adapted in one control loop (arXiv 2508.16905).

Names are loaded on first use, so that configuration and command lines start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import (
        BatchConfig,
        CurvatureConfig,
        EngineConfig,
        LossScaleConfig,
        PrecisionConfig,
        TriAccelConfig,
    )
    from .loop import TriAccel
    from .trace import Trace
    from .types import Precision, StepReport, TriAccelError

__version__ = "0.1.0"

_HOME = {
    "BatchConfig": "config",
    "CurvatureConfig": "config",
    "EngineConfig": "config",
    "LossScaleConfig": "config",
    "Precision": "types",
    "PrecisionConfig": "config",
    "StepReport": "types",
    "Trace": "trace",
    "TriAccel": "loop",
    "TriAccelConfig": "config",
    "TriAccelError": "types",
}

__all__ = [
    "BatchConfig",
    "CurvatureConfig",
    "EngineConfig",
    "LossScaleConfig",
    "Precision",
    "PrecisionConfig",
    "StepReport",
    "Trace",
    "TriAccel",
    "TriAccelConfig",
    "TriAccelError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
