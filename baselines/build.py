"""``make_arm``: the object that runs an arm, or ``Unsupported`` with the measured reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from triaccel.calibration import Calibration
from triaccel.config import TriAccelConfig
from triaccel.cost import device_ladder
from triaccel.loop import TriAccel
from triaccel.memory import MemoryProbe
from triaccel.trace import Trace
from triaccel.types import TriAccelError

from .arms import arm_config, parse_arm
from .static import StaticArm

__all__ = ["Unsupported", "make_arm"]


class Unsupported(TriAccelError):
    """The device cannot do what the arm asks; the message gives the measured reason."""


def make_arm(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    config: TriAccelConfig | None = None,
    calibration: Calibration | None = None,
    memory: MemoryProbe | None = None,
    trace: Trace | None = None,
    force_unsupported: bool = False,
) -> Any:
    """The object that trains ``model`` as arm ``name`` says.

    Args:
        name: an arm, with or without ``@batch``.
        model: the module, FP32 parameters, on its device.
        optimizer: its optimizer.
        config: the grid's configuration; the arm's own follows from it.
        calibration: measured before on this machine for this model.
        memory: probe of bytes; ``None``: the device's own.
        trace: the run to replay; needed by ``replay`` alone.
        force_unsupported: run a format even where the device does not accelerate it.

    Returns:
        ``StaticArm`` or ``TriAccel``: both have ``batches``, ``step``, ``schedule``, ``evaluation``, ``trace``,
        ``report``, ``samples_seen``, ``state_dict`` and ``load_state_dict``.

    Raises:
        UnknownArm: no such arm.
        Unsupported: the device does not accelerate the arm's format.
        TriAccelError: ``replay`` without a trace, or a trace for an arm that has no use for it.
    """
    arm, _ = parse_arm(name)
    resolved = arm_config(name, config)
    if (arm.kind == "replay") != (trace is not None):
        raise TriAccelError(
            "arm 'replay' needs the trace of a finished tri-accel run: pass trace="
            if trace is None
            else f"arm {name!r} adapts or is static: it has no use for a trace; only 'replay' has"
        )
    if arm.kind == "static":
        assert arm.format is not None
        device = next(model.parameters()).device
        ladder = device_ladder(device)
        if arm.format not in ladder.precisions and not force_unsupported:
            raise Unsupported(
                f"{arm.format.value} is not supported on this device: {ladder.reasons[arm.format]}; "
                "--force-unsupported runs it all the same"
            )
        return StaticArm(model, optimizer, resolved, precision=arm.format)
    policies = trace.policies() if trace is not None else None
    return TriAccel(model, optimizer, resolved, calibration=calibration, memory=memory, policies=policies)
