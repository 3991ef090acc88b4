"""Static arms: one format for the whole run, in a plain PyTorch loop, with whole-model ``torch.autocast`` at its best.

``amp-fp16`` scales the loss with ``torch.amp.GradScaler``. Data, batches and reports have the same form as ``TriAccel``'s, so
that one trainer serves every arm; losses and weights equal those of a hand-written loop bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from triaccel.calibration import LossFunction
from triaccel.config import TriAccelConfig
from triaccel.probe_pass import call_model
from triaccel.recovery import minimum_micro_batch
from triaccel.sampler import ElasticBatches, batch_length
from triaccel.trace import Trace
from triaccel.types import Precision, StepReport, TriAccelError

__all__ = ["StaticArm"]

STATE_FORMAT = 1


class StaticArm:
    """A plain loop in one format.

    Args:
        model: the module, FP32 parameters.
        optimizer: its optimizer; stepped as it is, with the learning rate times the schedule's factor.
        config: only ``batch.initial``, ``batch.tail``, ``max_grad_norm`` and ``seed`` matter here.
        precision: the format of the whole model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TriAccelConfig,
        *,
        precision: Precision,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.precision = precision
        self.device = next(model.parameters()).device
        self.trace = Trace()
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=precision is Precision.FP16)
        self._schedule: Callable[[float], float] | None = None
        self._batches: ElasticBatches | None = None
        self._loaded: dict[str, Any] | None = None
        self.total_samples: int | None = None
        self.samples_seen = 0
        self._step = 0
        self._skipped = 0

    def batches(
        self,
        data: Any,
        *,
        epochs: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Iterator[Any]:
        """Batches of ``config.batch.initial`` in the same order as ``TriAccel.batches`` with the same seed."""
        self._batches = ElasticBatches(
            data,
            epochs=epochs,
            batch_size=lambda: self.config.batch.initial,
            seed=self.config.seed,
            collate_fn=collate_fn,
            num_workers=num_workers,
            tail=self.config.batch.tail,
            device=self.device,
            minimum_micro=minimum_micro_batch(self.model),
        )
        self.total_samples = self._batches.total_samples
        if self._loaded is not None and self._loaded["batches"] is not None:
            self._batches.load_state_dict(self._loaded["batches"])
        yield from self._batches

    def schedule(self, factor: Callable[[float], float]) -> None:
        """Multiply every learning rate by ``factor(progress)``, progress in [0, 1] by samples seen."""
        self._schedule = factor

    @property
    def progress(self) -> float:
        """Share of the run's samples seen, in [0, 1]."""
        if not self.total_samples:
            raise TriAccelError("progress is unknown before batches() was called")
        return min(1.0, self.samples_seen / self.total_samples)

    def step(self, batch: Any, loss_fn: LossFunction) -> StepReport:
        """One optimizer step on ``batch``, a pair ``(inputs, targets)``."""
        inputs, targets = batch
        self.optimizer.zero_grad(set_to_none=True)
        enabled = self.precision is not Precision.FP32
        with torch.autocast(
            self.device.type, self.precision.torch_dtype if enabled else torch.bfloat16, enabled=enabled
        ):
            loss = loss_fn(call_model(self.model, inputs), targets)
        scale = self._scaler.get_scale() if self._scaler.is_enabled() else None
        self._scaler.scale(loss).backward()
        if self.config.max_grad_norm is not None:
            self._scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        factor = self._schedule(self.progress) if self._schedule else 1.0
        with _rate_times(self.optimizer, factor):
            self._scaler.step(self.optimizer)
        self._scaler.update()
        stepped = scale is None or self._scaler.get_scale() >= scale
        self._skipped += not stepped
        samples = batch_length(batch)
        self._step += 1
        self.samples_seen += samples
        return StepReport(
            step=self._step - 1,
            samples_seen=self.samples_seen,
            loss=loss.detach().float(),
            stepped=stepped,
            batch_size=samples,
            micro_batches=1,
            found_inf=(),
            loss_scale=scale,
            map_version=0,
            precision_map={},
            rate_scales={},
            rate_factor=factor,
        )

    @property
    def measures_bytes(self) -> bool:
        """Never: no policy looks at bytes."""
        return False

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """FP32, ``eval()`` mode and no gradients inside: the protocol of every arm."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def report(self) -> dict[str, Any]:
        """The fields of ``TriAccel.report`` that a static arm has."""
        return {
            "samples_seen": self.samples_seen,
            "steps": self._step,
            "updates": self._step - self._skipped,
            "skipped_steps": self._skipped,
            "recovered_oom": 0,
            "controller_seconds": 0.0,
            "calibration_seconds": 0.0,
            "decided_by": {},
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything but model and optimizer, as plain values."""
        return {
            "format": STATE_FORMAT,
            "precision": self.precision.value,
            "counters": [self._step, self.samples_seen, self._skipped],
            "total_samples": self.total_samples,
            "scaler": self._scaler.state_dict(),
            "batches": self._batches.state_dict() if self._batches else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; call before ``batches``.

        Raises:
            TriAccelError: the state is of another version or arm.
        """
        if state.get("format") != STATE_FORMAT or state.get("precision") != self.precision.value:
            raise TriAccelError(
                f"state of format {state.get('format')!r} and precision {state.get('precision')!r} does not fit this arm "
                f"({STATE_FORMAT}, {self.precision.value!r}); start the cell again"
            )
        self._loaded = state
        self._step, self.samples_seen, self._skipped = state["counters"]
        self.total_samples = state["total_samples"]
        self._scaler.load_state_dict(state["scaler"])


@contextmanager
def _rate_times(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Learning rates times ``factor`` for one step; the user's values are back afterwards."""
    if factor == 1.0:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
