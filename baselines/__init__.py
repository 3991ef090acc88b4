"""Arms of the ablation: what each name runs. Names and configurations need no torch; ``make_arm`` loads it when called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arms import ARMS, COMPONENT_ARMS, Arm, UnknownArm, arm_config, parse_arm

if TYPE_CHECKING:
    from .build import Unsupported, make_arm

__all__ = [
    "ARMS",
    "COMPONENT_ARMS",
    "Arm",
    "UnknownArm",
    "Unsupported",
    "arm_config",
    "make_arm",
    "parse_arm",
]


def __getattr__(name: str) -> Any:
    if name in ("Unsupported", "make_arm"):
        from . import build

        return getattr(build, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
