"""What is measured once, before the first step, and then kept: the costs of formats and the price of a probe.

No decision of a run reads a clock. Whatever a decision needs of time is measured here, stored with the run, identified by
``digest``, and reused on resume and by paired seeds, so that the same inputs give the same records. Measuring changes
nothing: weights, gradients, buffers, RNG and modes are as before. Source: ours.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .config import TriAccelConfig
from .cost import CostTable, device_ladder, measure_costs
from .layers import Layer
from .probe_pass import call_model, unchanged
from .probes import ProbeRunner
from .sampler import batch_length, split_batch
from .types import TriAccelError

__all__ = ["Calibration", "calibrate", "calibration_needed", "call_model", "median_seconds", "unchanged"]

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured once per machine, model and batch.

    Attributes:
        costs: seconds and bytes per layer and format; ``None`` when no policy asks for them.
        sample_seconds: seconds of forward and backward per training sample in FP32 at the initial batch.
        probe_seconds: seconds of one curvature probe; ``None`` when no probe runs.
        seconds: what measuring took.
    """

    costs: CostTable | None = None
    sample_seconds: float | None = None
    probe_seconds: float | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON object."""
        return {
            "costs": None if self.costs is None else self.costs.to_json(),
            "sample_seconds": self.sample_seconds,
            "probe_seconds": self.probe_seconds,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Calibration:
        """Inverse of ``to_json``.

        Raises:
            TriAccelError: ``data`` is not a calibration.
        """
        try:
            costs = data["costs"]
            return cls(
                costs=None if costs is None else CostTable.from_json(costs),
                sample_seconds=data["sample_seconds"],
                probe_seconds=data["probe_seconds"],
                seconds=data["seconds"],
            )
        except (KeyError, TypeError) as error:
            raise TriAccelError(
                f"not a calibration ({error!r}); delete it and let the run measure again"
            ) from error

    @property
    def digest(self) -> str:
        """First 16 hex digits of SHA-256 over the content without ``seconds``."""
        data = self.to_json() | {"seconds": None}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def median_seconds(run: Callable[[], object], *, device: torch.device, repeats: int = 3) -> float:
    """Median wall time of ``run`` after one warm-up, synchronised with ``device``; with ``repeats=0`` the warm-up's own time."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    first = once()
    return statistics.median(once() for _ in range(repeats)) if repeats else first


def calibration_needed(config: TriAccelConfig) -> bool:
    """Whether some decision of this configuration rests on a measurement of the machine."""
    costs = config.precision.rule != "off" and (
        config.precision.cost_gate or config.precision.rule == "static"
    )
    return costs or _probe_timed(config)


def _probe_timed(config: TriAccelConfig) -> bool:
    if config.curvature.estimator != "off":
        return config.curvature.interval_samples is None
    noise = config.batch.rule == "model" and config.batch.noise_cap > 0
    return noise and config.batch.noise_interval_samples is None


def calibrate(
    model: nn.Module,
    layers: Sequence[Layer],
    config: TriAccelConfig,
    *,
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction,
    device: torch.device,
) -> Calibration:
    """Measure what ``config`` needs.

    Args:
        model: the model in training mode.
        layers: its layers.
        config: decides what is measured: the cost table for gated or static precision, the time of a probe for its interval.
        inputs: inputs of one training batch.
        targets: its targets.
        loss_fn: mean loss.
        device: the training device.

    Returns:
        The measurements; fields that nothing asks for are ``None``.
    """
    start = time.perf_counter()
    costs = None
    precision = config.precision
    if precision.rule != "off" and (precision.cost_gate or precision.rule == "static"):
        ladder = device_ladder(device, allowed=precision.ladder)
        costs = measure_costs(
            model,
            layers,
            inputs,
            batch_sizes=config.batch.rungs,
            ladder=ladder,
            budget_seconds=precision.cost_budget_seconds,
        )
    sample_seconds = probe_seconds = None
    if _probe_timed(config):
        parameters = [p for layer in layers for p in layer.parameters]

        def plain() -> None:
            loss = loss_fn(call_model(model, inputs), targets)
            torch.autograd.grad(loss, parameters, allow_unused=True)

        samples = batch_length((inputs, targets))
        count = min(config.curvature.probe_batch, samples)
        part = (
            split_batch((inputs, targets), [count, samples - count])[0]
            if count < samples
            else (inputs, targets)
        )

        def probe() -> None:
            runner = ProbeRunner(layers, curvature=config.curvature, batch=config.batch, seed=config.seed)
            runner.run(model, part[0], part[1], loss_fn, samples_seen=0)

        with unchanged(model):
            sample_seconds = median_seconds(plain, device=device) / samples
            # a Hessian probe takes minutes on a large model: once, with its warm-up inside, is exact enough for an interval
            repeats = 0 if config.curvature.estimator == "hessian" else 3
            probe_seconds = median_seconds(probe, device=device, repeats=repeats)
    return Calibration(costs, sample_seconds, probe_seconds, time.perf_counter() - start)
