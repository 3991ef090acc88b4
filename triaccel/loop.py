"""``TriAccel``: the one place where model, optimizer, statistics, probes and policies meet.

    accel = TriAccel(model, optimizer, config)
    for batch in accel.batches(data, epochs=30):
        report = accel.step(batch, loss_fn)

One optimizer step: forward under the precision map in force, backward, unscale, find non-finite gradients, read statistics
every ``stats_every`` steps, update with a rate per layer, and once every ``tick`` samples a control tick. The clock is
samples seen. With all three components off the step is a plain PyTorch step, bit for bit.
Source: the loop is the paper's (arXiv 2508.16905); what each part does is in its own module.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .batch import make_batch_policy
from .calibration import Calibration, LossFunction, calibrate, calibration_needed
from .casting import Caster
from .config import TriAccelConfig
from .control import Controller
from .cost import device_ladder
from .layers import find_layers
from .learning_rate import make_rate_policy
from .loss_scale import LossScaler
from .memory import MemoryProbe, make_memory_probe
from .memory_fit import fit_memory
from .optim import Updater
from .precision import make_precision_policy
from .probe_pass import call_model
from .probes import ProbeRunner
from .recovery import (
    StepGuard,
    is_out_of_memory,
    minimum_micro_batch,
    refuse_several_ranks,
    run_step_with_recovery,
)
from .sampler import ElasticBatches, batch_length, micro_batch_sizes, split_batch
from .statistics import GradientStatistics
from .trace import Policies, Trace
from .types import Change, LayerStats, Observation, Precision, StepReport, TriAccelError

__all__ = ["TriAccel"]

STATE_FORMAT = 1


class TriAccel:
    """Trains any ``nn.Module`` with any ``torch.optim.Optimizer`` under the three controllers.

    Args:
        model: the module; its parameters stay FP32. It is changed only while a step runs in a lower format.
        optimizer: the optimizer over ``model``'s parameters; its ``param_groups`` and schedulers stay the user's.
        config: the whole method; the defaults need no tuning.
        calibration: measured earlier (another seed, a resumed run); ``None`` measures at the first step.
        memory: probe of bytes; ``None``: the device's own.
        total_samples: samples of the whole run, where ``batches`` is not used to draw them.
        policies: three policies to run instead of those of ``config`` (``Trace.policies()`` replays a run).

    Raises:
        TriAccelError: a pin matches no layer, tied layers are pinned apart, several processes train together, or the
            engine cannot go with this optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TriAccelConfig | None = None,
        *,
        calibration: Calibration | None = None,
        memory: MemoryProbe | None = None,
        total_samples: int | None = None,
        policies: Policies | None = None,
    ) -> None:
        refuse_several_ranks()
        self.model = model
        self.optimizer = optimizer
        self.config = config = config or TriAccelConfig()
        self.calibration = calibration
        self.total_samples = total_samples
        self.layers = find_layers(model, config.precision.pin)
        if not any(layer.parameters for layer in self.layers):
            raise TriAccelError(
                "the model has no trainable parameter: nothing to train; unfreeze a layer or check the model"
            )
        self.device = next(p.device for layer in self.layers for p in layer.parameters)
        if config.precision.rule != "off":
            _require_fp32(self.layers)
        # Elastic batches alone recover from an out-of-memory error; elsewhere it is a result, and raised.
        self._recovers = config.batch.rule != "off" and not config.engine.gradient_release
        self._memory = memory or make_memory_probe(
            self.device, budget_bytes=config.batch.budget_bytes, margin=config.batch.margin
        )
        self._caster = Caster(model, self.layers, device_type=self.device.type)
        self._statistics = GradientStatistics(
            self.layers,
            decay=config.precision.stats_decay,
            reference_batch=config.precision.reference_batch or config.batch.initial,
            count_underflow=False,
        )
        self._probes = ProbeRunner(
            self.layers, curvature=config.curvature, batch=config.batch, seed=config.seed
        )
        self._updater = Updater(
            optimizer,
            self.layers,
            engine=config.engine,
            seed=config.seed,
            clipping=config.max_grad_norm is not None,
            accumulation=config.batch.effective == "hold",
        )
        self._scaler = LossScaler(config.precision.loss_scale)
        self._guard = StepGuard(model, scaler=self._scaler)
        self._minimum_micro = minimum_micro_batch(model)
        self.on_out_of_memory: Callable[[], object] | None = None
        """Called before the error when even the smallest micro-batch does not fit: the place to write a checkpoint."""
        self._given_policies = policies
        self._controller: Controller | None = None
        self._batches: ElasticBatches | None = None
        self._loaded: dict[str, Any] | None = None
        self._schedule: Callable[[float], float] | None = None
        self._probe_source: tuple[Any, LossFunction] | None = None
        self._last_batch: Any = None
        self._measuring = ExitStack()
        self._window: list[tuple[torch.Tensor, int]] = []
        self._step = 0
        self._updates = 0
        self._samples_seen = 0
        self._next_tick = config.tick
        self._skips = 0
        self._skipped_steps = 0
        self._recovered = 0
        self._micro_cap: int | None = None
        self._found: tuple[str, ...] = ()
        self._controller_seconds = 0.0
        self._checked_map = -1
        self._warned_scheduler = False

    # ---------------------------------------------------------------- data

    def batches(
        self,
        data: Any,
        *,
        epochs: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Iterator[Any]:
        """Batches of the size in force, each sample once an epoch, on the model's device.

        Args:
            data: ``(inputs, targets)`` tensors, a ``TensorDataset``, any map-style ``Dataset``, or an object with
                ``__len__`` and ``fetch(indices, epoch)``.
            epochs: passes over ``data``.
            collate_fn: as ``DataLoader``'s, for a ``Dataset``.
            num_workers: loading processes, for a ``Dataset``.

        Yields:
            Batches. After ``load_state_dict`` the iteration goes on where it stopped.

        Raises:
            TriAccelError: the data is empty or smaller than the first batch.
        """
        config = self.config.batch
        self._batches = ElasticBatches(
            data,
            epochs=epochs,
            batch_size=lambda: (
                self._controller.batch.batch_size if self._controller else self._initial_batch()
            ),
            seed=self.config.seed,
            collate_fn=collate_fn,
            num_workers=num_workers,
            tail=config.tail,
            device=self.device,
            minimum_micro=self._minimum_micro,
        )
        self.total_samples = self._batches.total_samples
        if self._loaded is not None and self._loaded.get("batches") is not None:
            self._batches.load_state_dict(self._loaded["batches"])
        for batch in self._batches:
            self._last_batch = batch
            yield batch

    def _initial_batch(self) -> int:
        if self._given_policies is None:
            return self.config.batch.initial
        policy = self._given_policies.batch
        return policy.initial(policy.init(tuple(layer.info for layer in self.layers))).batch_size

    # ---------------------------------------------------------------- one step

    def step(self, batch: Any, loss_fn: LossFunction) -> StepReport:
        """One optimizer step on ``batch``.

        Args:
            batch: ``(inputs, targets)``; inputs are a tensor, a tuple (``model(*inputs)``) or a dict (``model(**inputs)``).
            loss_fn: ``loss_fn(outputs, targets)``, a scalar, mean over samples (``reduction="sum"`` is honoured where the
                function has that attribute).

        Returns:
            What the step did.

        Raises:
            TriAccelError: the batch has another form, no gradient arrived, or memory ran out at the smallest micro-batch.
        """
        inputs, targets = _unpack(batch)
        if self._controller is None:
            self.calibrate(batch, loss_fn)
        controller = self._running()
        self._probe_source = (batch, loss_fn)
        samples = batch_length(batch)
        micro = min(controller.batch.micro_batch_size, self._micro_cap or samples, samples)
        with ExitStack() as observed:

            def attempt(size: int) -> tuple[torch.Tensor, int]:
                observed.close()
                observed.enter_context(self._observed(batch_size=size))
                return self._gradients(inputs, targets, loss_fn, samples=samples, micro=size)

            if self._recovers:
                (loss, parts), micro, recovered = run_step_with_recovery(
                    attempt,
                    guard=self._guard,
                    micro_batch_size=micro,
                    minimum=min(self._minimum_micro, samples),
                    on_floor=self._reach_floor,
                    on_oom=lambda size: self._memory.out_of_memory(
                        batch_size=size, map_version=controller.map_version
                    ),
                    ladder=self.config.batch.rungs,
                    needed_bytes=self._expected_bytes,
                )
            else:
                recovered = 0
                loss, parts = attempt(micro)
            stepped = self._apply(samples)
        if recovered:
            self._recovered += recovered
            self._micro_cap = micro
        return self._finish(loss, samples=samples, parts=parts, stepped=stepped, recovered=recovered)

    def _gradients(
        self, inputs: Any, targets: Any, loss_fn: LossFunction, *, samples: int, micro: int
    ) -> tuple[torch.Tensor, int]:
        self.optimizer.zero_grad(set_to_none=True)
        mean = getattr(loss_fn, "reduction", "mean") != "sum"
        parts = (
            [(inputs, targets)]
            if micro >= samples
            else split_batch(
                (inputs, targets),
                micro_batch_sizes(samples, micro, minimum=min(self._minimum_micro, samples)),
            )
        )
        if self._updater.releases:
            self._updater.begin_step(
                scales=self._running().rate.scales,
                factor=self._rate_factor(),
                statistics=self._statistics_due,
                loss_scale=self._scaler.value if self._scaling else None,
                micro_batches=len(parts),
            )
        total: torch.Tensor | None = None
        for part in parts:
            with self._caster.forward():
                outputs = call_model(self.model, part[0])
            loss = loss_fn(outputs, part[1])
            if len(parts) > 1 and mean:
                loss = loss * (batch_length(part) / samples)
            torch.autograd.backward(self._scaler.scale(loss) if self._scaling else loss)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total, len(parts)

    def _expected_bytes(self, micro_batch_size: int) -> int | None:
        """What the observed peaks say that a micro-batch needs; ``None`` before enough were seen."""
        if (seen := self._memory.reading()) is None:
            return None
        fit = fit_memory(
            seen.peaks, map_version=self._running().map_version, resident_bytes=seen.resident_bytes
        )
        needed = fit.predict(micro_batch_size) if fit else None
        return None if needed is None else int(needed)

    def _reach_floor(self) -> None:
        if self._batches is not None:
            self._batches.unread()  # a checkpoint now must give these samples again
        if self.on_out_of_memory is not None:
            self.on_out_of_memory()

    def _apply(self, samples: int) -> bool:
        """Unscale, look for non-finite gradients, read statistics, update. Returns whether weights moved."""
        controller = self._running()
        grads = [p for layer in self.layers for p in layer.parameters if p.grad is not None]
        if not grads and not self._updater.released:
            raise TriAccelError(
                "no layer of the model got a gradient in this step: the loss does not depend on its parameters, "
                "or backward was not called; nothing was updated"
            )
        if self._updater.releases:
            return self._finish_release(samples)
        start = time.perf_counter()
        if self._scaling:
            self._scaler.unscale_(grads)
        self._found = self._statistics.nonfinite_layers() if self._guarded or self._scaling else ()
        if not self._found and self._statistics_due:
            self._statistics.read(batch_size=samples)
        self._controller_seconds += time.perf_counter() - start
        if self._scaling:
            self._scaler.update(found_inf=bool(self._found))
        if self._found:
            self._skips += 1
            self._skipped_steps += 1
            return False
        if self.config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(grads, self.config.max_grad_norm)
        self._updater.step(scales=controller.rate.scales, factor=self._rate_factor())
        self._skips = 0
        self._updates += 1
        return True

    @property
    def _statistics_due(self) -> bool:
        return self._guarded and self._step % self.config.precision.stats_every == 0

    def _finish_release(self, samples: int) -> bool:
        """Gradient release: the parameters moved in backward; a non-finite gradient has held back its own parameter only."""
        controller = self._running()
        self._updater.step(scales=controller.rate.scales, factor=self._rate_factor())
        self._found = self._updater.found_inf
        if self._statistics_due and not self._found and self._updater.gradient_stats is not None:
            self._statistics.take(self._updater.gradient_stats, batch_size=samples)
        self._skips = self._skips + 1 if self._found else 0
        self._updates += 1
        return True

    def _rate_factor(self) -> float:
        factor = self._running().batch.rate_factor
        return factor * self._schedule(self.progress) if self._schedule else factor

    def _finish(
        self, loss: torch.Tensor, *, samples: int, parts: int, stepped: bool, recovered: int
    ) -> StepReport:
        controller = self._running()
        index, version, factor = self._step, controller.map_version, self._rate_factor()
        ran, scales = controller.precision.precision_map, controller.rate.scales
        scale = self._scaler.value if self._scaling else None
        self._check_map()
        self._step += 1
        self._samples_seen += samples
        overflowing = self._skips > 0 and self._skips % self.config.precision.overflow_patience == 0
        changes: tuple[Change, ...] = ()
        if self._samples_seen >= self._next_tick or overflowing:
            start = time.perf_counter()
            changes = self._tick(samples)
            self._controller_seconds += time.perf_counter() - start
            self._next_tick = (self._samples_seen // self.config.tick + 1) * self.config.tick
        return StepReport(
            step=index,
            samples_seen=self._samples_seen,
            loss=loss,
            stepped=stepped,
            batch_size=samples,
            micro_batches=parts,
            found_inf=self._found,
            loss_scale=scale,
            map_version=version,
            precision_map=ran,
            rate_scales=scales,
            rate_factor=factor,
            recovered_oom=recovered,
            changes=changes,
        )

    # ---------------------------------------------------------------- three calls, for loops that own their steps

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Region in which the model's calls run under the precision map in force; outputs leave it as FP32.

        Raises:
            TriAccelError: the configuration needs measurements and ``calibrate`` was not called.
        """
        if self._controller is None:
            self._start_without_batch()
        if not self._window and self._last_batch is not None:
            self._measuring.close()
            self._measuring.enter_context(self._observed(batch_size=batch_length(self._last_batch)))
        try:
            with self._caster.forward():
                yield
        except BaseException:
            self._measuring.close()
            raise

    def backward(self, loss: torch.Tensor, *, samples: int | None = None) -> None:
        """Accumulate gradients of ``loss``, scaled while a layer runs in FP16.

        Args:
            loss: scalar; when several calls make up one update, the caller weights each by its share of the samples.
            samples: samples behind ``loss``; ``None``: the length of the last batch that ``batches`` gave.

        Raises:
            TriAccelError: ``samples`` is neither given nor known.
        """
        if samples is None:
            if self._last_batch is None:
                raise TriAccelError(
                    "backward() does not know how many samples made this loss: pass samples=, or use batches()"
                )
            samples = batch_length(self._last_batch)
        torch.autograd.backward(self._scaler.scale(loss) if self._scaling else loss)
        self._window.append((loss.detach(), samples))

    def update(self) -> StepReport:
        """Apply the gradients that ``backward`` gathered; the caller clears them (``optimizer.zero_grad()``).

        Raises:
            TriAccelError: no ``backward`` came before.
        """
        if not self._window or self._controller is None:
            raise TriAccelError("update() without backward(): there is nothing to apply")
        window, self._window = self._window, []
        samples = sum(n for _, n in window)
        try:
            stepped = self._apply(samples)
        finally:
            self._measuring.close()
        loss = torch.stack([value.float() for value, _ in window]).sum()
        return self._finish(loss, samples=samples, parts=len(window), stepped=stepped, recovered=0)

    # ---------------------------------------------------------------- measurements

    def calibrate(self, batch: Any, loss_fn: LossFunction) -> Calibration:
        """Measure what the configuration needs of this machine, once; ``step`` does it by itself at the first batch.

        Weights, gradients, buffers, RNG and modes stay as they are.

        Args:
            batch: an ordinary training batch.
            loss_fn: as for ``step``.

        Returns:
            The calibration in force; pass it to runs of the same model on the same machine to reuse it.
        """
        inputs, targets = _unpack(batch)
        if self.calibration is None:
            self.calibration = calibrate(
                self.model,
                self.layers,
                self.config,
                inputs=inputs,
                targets=targets,
                loss_fn=loss_fn,
                device=self.device,
            )
        self._probe_source = self._probe_source or (batch, loss_fn)
        if self._controller is None:
            self._start()
        return self.calibration

    def probe(self, batch: Any, loss_fn: LossFunction) -> None:
        """Run one curvature probe now on ``batch``; its signals count at the next control tick.

        In the three-call form this is how probes get data: call it whenever ``probe_due`` is true.
        """
        inputs, targets = _unpack(batch)
        with self._suspended():
            self._probes.run(self.model, inputs, targets, loss_fn, samples_seen=self._samples_seen)

    @property
    def probe_due(self) -> bool:
        """Whether the interval asks for a probe."""
        return self._probes.enabled and self._probes.due(self._samples_seen)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """FP32, ``eval()`` mode and no gradients inside; the modes and the precision map are back afterwards."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with self._suspended(), torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def schedule(self, factor: Callable[[float], float]) -> None:
        """Multiply every learning rate by ``factor(progress)``, progress in [0, 1] by samples seen.

        Unlike a scheduler that is stepped once per update, this follows the data when the batch grows.
        """
        self._schedule = factor

    @property
    def progress(self) -> float:
        """Share of the run's samples seen, in [0, 1].

        Raises:
            TriAccelError: the total is not known.
        """
        if not self.total_samples:
            raise TriAccelError(
                "progress is unknown: draw samples with batches(), or pass total_samples= to TriAccel"
            )
        return min(1.0, self._samples_seen / self.total_samples)

    # ---------------------------------------------------------------- state

    @property
    def samples_seen(self) -> int:
        """Training samples consumed."""
        return self._samples_seen

    @property
    def trace(self) -> Trace:
        """Decisions so far; empty before the first step."""
        return self._controller.trace if self._controller else Trace()

    @property
    def precision_map(self) -> dict[str, Precision]:
        """Format per compute layer from the next step on; empty before the first step."""
        return dict(self._controller.precision.precision_map) if self._controller else {}

    def report(self) -> dict[str, Any]:
        """What the controllers did, as plain JSON values: shares of decisions, probes, costs, skips, recoveries."""
        controller = self._controller
        decided = dict(controller.decided_by) if controller else {}
        total = sum(decided.values())
        return {
            "samples_seen": self._samples_seen,
            "steps": self._step,
            "updates": self._updates,
            "skipped_steps": self._skipped_steps,
            "recovered_oom": self._recovered,
            "map_version": controller.map_version if controller else 0,
            "decided_by": {key: value / total for key, value in sorted(decided.items())},
            "ignored_region": list(self._caster.mismatches()),
            "probes": self._probes.report(),
            "controller_seconds": self._controller_seconds,
            "calibration_seconds": self.calibration.seconds if self.calibration else 0.0,
            "calibration_digest": self.calibration.digest if self.calibration else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything but model and optimizer, as tensors and plain values (loads with ``weights_only=True``)."""
        return {
            "format": STATE_FORMAT,
            "config": self.config.model_dump(mode="json"),
            "calibration": self.calibration.to_json() if self.calibration else None,
            "total_samples": self.total_samples,
            "counters": [
                self._step,
                self._updates,
                self._samples_seen,
                self._next_tick,
                self._skips,
                self._skipped_steps,
                self._recovered,
            ],
            "micro_cap": self._micro_cap,
            "controller": self._controller.state_dict() if self._controller else None,
            "statistics": self._statistics.state_dict(),
            "probes": self._probes.state_dict(),
            "scaler": self._scaler.state_dict(),
            "memory": self._memory.state_dict(),
            "updater": self._updater.state_dict(),
            "batches": self._batches.state_dict() if self._batches else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; call before ``batches``, with model and optimizer already loaded.

        Raises:
            TriAccelError: the state is of another version, configuration or model.
        """
        if (version := state.get("format")) != STATE_FORMAT:
            raise TriAccelError(
                f"state of format {version!r}, this version reads {STATE_FORMAT}: "
                "go on with the version that wrote it, or start again"
            )
        if state["config"] != self.config.model_dump(mode="json"):
            raise TriAccelError(
                "this state was saved under another configuration; load it with the configuration that saved it"
            )
        self._loaded = state
        self.total_samples = state["total_samples"]
        if state["calibration"] is not None:
            self.calibration = Calibration.from_json(state["calibration"])
        self._statistics.load_state_dict(state["statistics"])
        self._probes.load_state_dict(state["probes"])
        self._scaler.load_state_dict(state["scaler"])
        self._memory.load_state_dict(state["memory"])
        self._updater.load_state_dict(state["updater"])
        self._micro_cap = state["micro_cap"]
        (
            self._step,
            self._updates,
            self._samples_seen,
            self._next_tick,
            self._skips,
            self._skipped_steps,
            self._recovered,
        ) = state["counters"]
        if state["controller"] is not None:
            self._start()
            controller = self._running()
            controller.load_state_dict(state["controller"])
            self._install_map()

    # ---------------------------------------------------------------- inside

    def _running(self) -> Controller:
        assert self._controller is not None
        return self._controller

    @property
    def _guarded(self) -> bool:
        """Whether any component adapts: only then are gradients and bytes read."""
        config = self.config
        return (
            self._given_policies is not None
            or config.precision.rule not in ("off", "static")
            or config.curvature.estimator != "off"
            or config.batch.rule != "off"
        )

    @property
    def _scaling(self) -> bool:
        return Precision.FP16 in self._running().precision.precision_map.values()

    def _observed(self, *, batch_size: int) -> AbstractContextManager[None]:
        """Peak bytes of what runs inside, where some policy looks at them."""
        if not self._guarded:
            return nullcontext()
        return self._memory.observe(batch_size=batch_size, map_version=self._running().map_version)

    @property
    def measures_bytes(self) -> bool:
        """Whether steps are measured for a policy that looks at bytes; peaks are then in the trace."""
        return self._guarded

    def _start_without_batch(self) -> None:
        unmeasured = self.calibration is None and calibration_needed(self.config)
        if unmeasured or (self._probes.enabled and self._probe_source is None):
            raise TriAccelError(
                "this configuration measures the machine and probes curvature, for which it needs a batch and the loss: call "
                "accel.calibrate((inputs, targets), loss_fn) once before the first forward"
            )
        self._start()

    def _start(self) -> None:
        config = self.config
        calibration = self.calibration or Calibration()
        ladder = device_ladder(self.device, allowed=config.precision.ladder)
        policies = self._given_policies or Policies(
            make_precision_policy(
                config.precision,
                ladder=ladder,
                costs=calibration.costs,
                initial_batch=config.batch.initial,
                total_samples=self.total_samples,
            ),
            make_rate_policy(config.curvature),
            make_batch_policy(config.batch, total_samples=self.total_samples),
        )
        self._controller = Controller(policies, tuple(layer.info for layer in self.layers))
        if calibration.probe_seconds is not None and calibration.sample_seconds is not None:
            self._probes.calibrate(
                probe_seconds=calibration.probe_seconds, sample_seconds=calibration.sample_seconds
            )
        self._statistics.count_underflow = Precision.FP16 in ladder.precisions
        self._install_map()

    def _install_map(self) -> None:
        controller = self._running()
        self._caster.apply(controller.precision.precision_map, version=controller.map_version)
        if self._scaling and self._updater.releases:
            raise TriAccelError(
                "engine.gradient_release cannot go with FP16 layers: their gradients are scaled until the whole backward is "
                "done; leave fp16 out of precision.ladder or switch gradient_release off"
            )

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        """The model as the user built it, without precision regions."""
        self._caster.remove()
        try:
            yield
        finally:
            if self._controller is not None:
                self._install_map()

    def _check_map(self) -> None:
        """Once per map: say which layers did not run in the format that was asked for."""
        controller = self._running()
        if self._checked_map == controller.map_version:
            return
        self._checked_map = controller.map_version
        if ignored := self._caster.mismatches():
            warnings.warn(
                f"layers {sorted(ignored)} did not run in the format asked for (their operation ignores autocast); "
                "the record says what ran",
                stacklevel=3,
            )

    def _tick(self, samples: int) -> tuple[Change, ...]:
        controller = self._running()
        self._run_probe()
        grown_from = controller.batch.batch_size
        changes = controller.tick(
            self._observe(samples),
            {n: str(d).removeprefix("torch.") for n, d in self._caster.verified.items()},
        )
        if any(change.component == "precision" for change in changes):
            self._install_map()
        if controller.batch.batch_size != grown_from:
            self._micro_cap = None
            self._warn_stepped_scheduler(controller.batch.batch_size)
        return changes

    def _run_probe(self) -> None:
        if not self.probe_due or self._probe_source is None:
            return
        batch, loss_fn = self._probe_source
        count = self.config.curvature.probe_batch
        if self._batches is not None:
            batch = self._batches.draw(count, seed=self.config.seed + self._samples_seen)
        elif batch_length(batch) > count:
            batch = split_batch(batch, [count, batch_length(batch) - count])[0]
        try:
            self.probe(batch, loss_fn)
            return
        except (RuntimeError, MemoryError) as error:
            if not (self._recovers and is_out_of_memory(error)):
                raise
            traceback.clear_frames(error.__traceback__)
        # outside the except block, so that the failed frames hold no tensor
        self._probes.give_up(samples_seen=self._samples_seen)
        warnings.warn(
            f"a curvature probe of {count} samples ran out of memory and was left out; lower curvature.probe_batch or max_bytes",
            stacklevel=5,
        )

    def _observe(self, samples: int) -> Observation:
        controller = self._running()
        layers: dict[str, LayerStats] = {}
        if self._guarded:
            layers = self._statistics.snapshot()
            for name, signal in self._probes.layer_signals().items():
                base = layers.get(name, LayerStats())
                layers[name] = LayerStats(
                    variance=base.variance,
                    sample_variance=signal.sample_variance,
                    curvature=signal.curvature,
                    eigenvalues=tuple(signal.eigenvalues),
                    nonfinite=base.nonfinite,
                    underflow=base.underflow,
                    probe_id=signal.probe_id,
                )
            if (square_norm := self._statistics.gradient_square_norm()) is not None and self._probes.enabled:
                self._probes.observe_gradient(square_norm=square_norm, batch_size=samples)
        return Observation(
            step=self._step,
            updates=self._updates,
            samples_seen=self._samples_seen,
            total_samples=self.total_samples,
            batch_size=samples,
            layers=layers,
            precision_map=controller.precision.precision_map,
            map_version=controller.map_version,
            found_inf=self._found,
            consecutive_skips=self._skips,
            loss_scale=self._scaler.value if self._scaling else None,
            loss_scale_at_floor=self._scaling and self._scaler.at_floor,
            memory=self._memory.reading() if self._guarded else None,
            noise=self._probes.noise(),
        )

    def _warn_stepped_scheduler(self, batch_size: int) -> None:
        if (
            self._warned_scheduler
            or not hasattr(self.optimizer.step, "_wrapped_by_lr_sched")
            or not self.total_samples
        ):
            return
        self._warned_scheduler = True
        expected = self.total_samples // self.config.batch.initial
        real = self._step + (self.total_samples - self._samples_seen) // batch_size
        warnings.warn(
            f"a torch.optim.lr_scheduler is attached and the batch has changed: stepped once per update it expects {expected} "
            f"steps and will get about {real}; use accel.schedule(fn_of_progress), which follows samples",
            stacklevel=4,
        )


def _require_fp32(layers: tuple[Any, ...]) -> None:
    for layer in layers:
        for name, parameter in zip(layer.parameter_names, layer.parameters, strict=True):
            if parameter.dtype in (torch.float16, torch.bfloat16):
                raise TriAccelError(
                    f"parameter {name!r} is {parameter.dtype}: parameters stay FP32 and each layer's compute format is chosen; "
                    "call model.float() first"
                )


def _unpack(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise TriAccelError(
        f"a batch must be a pair (inputs, targets), got {type(batch).__name__}"
        + (f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        + ": return a pair from the data set, or use forward(), backward() and update()"
    )
