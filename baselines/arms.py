"""Names of the arms, and the configuration that each one runs.

Static arms run one format for the whole run in a plain PyTorch loop. Loop arms are configurations of one code path,
``triaccel.TriAccel``; the eight of the 2³ design differ only in which policies are on. Any arm takes ``@batch``:
``amp-bf16@256`` starts at 256 samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triaccel.config import TriAccelConfig
from triaccel.types import Precision, TriAccelError

__all__ = ["ARMS", "COMPONENT_ARMS", "Arm", "UnknownArm", "arm_config", "parse_arm"]


class UnknownArm(TriAccelError):
    """A name that is no arm; the message lists those that are."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm.

    Attributes:
        name: as given on the command line, without ``@batch``.
        kind: ``"static"`` is a plain loop in one format, ``"loop"`` is ``TriAccel``, ``"replay"`` runs a recorded trace.
        about: one line for tables and ``--help``.
        format: the one format of a static arm.
        components: which of precision, curvature and batch adapt.
    """

    name: str
    kind: Literal["static", "loop", "replay"]
    about: str
    format: Precision | None = None
    components: frozenset[str] = frozenset()


def _loop(name: str, about: str, *components: str) -> Arm:
    return Arm(name, "loop", about, components=frozenset(components))


_ALL = ("precision", "curvature", "batch")

_LIST = (
    Arm("fp32", "static", "FP32, plain loop", Precision.FP32),
    Arm("amp-bf16", "static", "whole-model autocast in BF16", Precision.BF16),
    Arm("amp-fp16", "static", "whole-model autocast in FP16 with a gradient scaler", Precision.FP16),
    _loop("profiled-static", "the cost table's best map, fixed at step 0"),
    _loop("off", "the loop with every component off"),
    _loop("precision", "precision-adaptive updates alone", "precision"),
    _loop("curvature", "second-order signals alone", "curvature"),
    _loop("batch", "memory-elastic batches alone", "batch"),
    _loop("precision+curvature", "all but batch", "precision", "curvature"),
    _loop("precision+batch", "all but curvature", "precision", "batch"),
    _loop("curvature+batch", "all but precision", "curvature", "batch"),
    _loop("tri-accel", "all three components", *_ALL),
    _loop("tri-accel-paper", "all three, by the rules as the paper words them", *_ALL),
    Arm(
        "replay",
        "replay",
        "the map, batches and rates that tri-accel found on another seed, with nothing adapted",
    ),
)

ARMS: dict[str, Arm] = {arm.name: arm for arm in _LIST}
COMPONENT_ARMS: tuple[str, ...] = (
    "off",
    "precision",
    "curvature",
    "batch",
    "precision+curvature",
    "precision+batch",
    "curvature+batch",
    "tri-accel",
)
"""The eight arms of the 2³ design."""


def parse_arm(name: str) -> tuple[Arm, int | None]:
    """Arm and starting batch of ``name`` (``"fp32"``, ``"amp-bf16@256"``).

    Raises:
        UnknownArm: no arm of that name, or the batch is not a positive integer.
    """
    base, at, size = name.partition("@")
    if base not in ARMS:
        raise UnknownArm(f"unknown arm {base!r}; the arms are {', '.join(ARMS)} (each also as ARM@BATCH)")
    if not at:
        return ARMS[base], None
    if not size.isdigit() or int(size) < 1:
        raise UnknownArm(
            f"arm {name!r}: {size!r} after '@' is not a batch size; write for example {base}@128"
        )
    return ARMS[base], int(size)


def arm_config(name: str, base: TriAccelConfig | None = None) -> TriAccelConfig:
    """Configuration that arm ``name`` runs, derived from ``base``.

    Args:
        name: an arm, with or without ``@batch``.
        base: the grid's configuration; ``None``: the defaults.

    Raises:
        UnknownArm: as ``parse_arm``.

    Source: DESIGN's 2³ design; ours.
    """
    arm, batch = parse_arm(name)
    config = base or TriAccelConfig()
    if batch is not None:
        config = _starting_at(config, batch)
    if arm.name == "tri-accel-paper":
        return TriAccelConfig.paper(config)
    config = TriAccelConfig.arm(
        precision="precision" in arm.components,
        curvature="curvature" in arm.components,
        batch="batch" in arm.components,
        base=config,
    )
    if arm.name == "profiled-static":
        config = config.model_copy(
            update={"precision": config.precision.model_copy(update={"rule": "static"})}
        )
    return config


def _starting_at(config: TriAccelConfig, batch: int) -> TriAccelConfig:
    size = {
        "initial": batch,
        "minimum": min(config.batch.minimum, batch),
        "maximum": max(config.batch.maximum, batch),
    }
    return config.model_copy(update={"batch": config.batch.model_copy(update=size)})
