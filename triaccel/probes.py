"""When probes run and what becomes of them: schedule, running noise scale, failures, audit.

The clock is samples seen. The interval is the configured one, or

    interval = probe_seconds / (max_overhead · sample_seconds)

from times measured once at calibration, so that no decision of the run reads a clock (``adaptive_interval`` gives that up).
``estimator="fisher"`` takes curvature, variance and noise of all layers from one Gram probe. ``"hessian"`` takes variance and
noise from it, and curvature from block Lanczos on ``ROTATION`` layers a probe, in turn, since a Hessian costs a hundred times
more; normalisation layers are left out. ``audit`` runs the Hessian on rotating layers beside the Fisher and logs the rank
correlation of the two. With the estimator off, the batch rule ``model`` still runs the noise probe. Non-finite or unconverged
results keep the former values and are counted. Source: ours; DESIGN section 5.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import BatchConfig, CurvatureConfig
from .gram import ProbeResult, gram_probe
from .hessian import BlockSpectrum, hessian_probe
from .layers import Layer
from .noise import NoiseEstimator
from .probe_pass import training_square_norm
from .sampler import batch_length, split_batch
from .types import NoiseScale, TriAccelError

__all__ = ["LayerSignal", "ProbeRunner", "rank_correlation"]

ROTATION = 4
"""Layers whose Hessian block one probe takes."""


@dataclass(frozen=True, slots=True)
class LayerSignal:
    """Latest good figures of one layer.

    Attributes:
        curvature: λ, the mean or maximum of the top k; ``None`` before the first.
        eigenvalues: top k, descending.
        sample_variance: tr Σ.
        probe_id: number of the probe that ``curvature`` came from, -1 before the first.
    """

    curvature: float | None = None
    eigenvalues: tuple[float, ...] = ()
    sample_variance: float | None = None
    probe_id: int = -1


class ProbeRunner:
    """Owns estimators, schedule and running figures of one run.

    Args:
        layers: the model's layers.
        curvature: what is estimated, how often, from how many samples.
        batch: whether the noise scale is needed.
        seed: of sampled labels and Lanczos start blocks; each probe derives its own.

    Attributes:
        enabled: whether any probe ever runs.
        interval_samples: samples between probes, ``None`` until known.
    """

    def __init__(
        self, layers: Sequence[Layer], *, curvature: CurvatureConfig, batch: BatchConfig, seed: int
    ) -> None:
        self._layers = tuple(layers)
        self._config = curvature
        self._seed = seed
        needs_noise = batch.rule == "model" and batch.noise_cap > 0
        self._needs_noise = needs_noise
        self._initial_batch = batch.initial
        self.enabled = curvature.estimator != "off" or needs_noise
        given = curvature.interval_samples if curvature.estimator != "off" else batch.noise_interval_samples
        self.interval_samples: int | None = given if self.enabled else None
        self._measured = given is None
        self._next_due: int | None = self.interval_samples
        self._sample_seconds: float | None = None
        self._signals: dict[str, LayerSignal] = {}
        self._noise = NoiseEstimator()
        self._probes = 0
        self._failed = 0
        self._unconverged = 0
        self._seconds = 0.0
        self._turn = 0
        self._fisher: dict[str, float] = {}
        self._hessian: dict[str, float] = {}
        self._correlations: list[tuple[int, int, float]] = []
        self._generic: dict[str, str] = {}
        self._without_gradient: dict[str, str] = {}

    # ---------------------------------------------------------------- schedule

    def calibrate(self, *, probe_seconds: float, sample_seconds: float) -> None:
        """Set the interval from ``max_overhead``, unless one is configured.

        Args:
            probe_seconds: time of one probe.
            sample_seconds: training time per sample.

        Raises:
            TriAccelError: a time is not positive.
        """
        if not (probe_seconds > 0.0 and sample_seconds > 0.0):
            raise TriAccelError(
                f"probe_seconds {probe_seconds} and sample_seconds {sample_seconds} must be positive: measure them again"
            )
        self._sample_seconds = sample_seconds
        if self.enabled and self._measured:
            self._set_interval(probe_seconds)
            if self._next_due is None:
                self._next_due = self.interval_samples

    def _set_interval(self, probe_seconds: float) -> None:
        assert self._sample_seconds is not None
        samples = math.ceil(probe_seconds / (self._config.max_overhead * self._sample_seconds))
        self.interval_samples = max(samples, self._config.probe_batch)

    def due(self, samples_seen: int) -> bool:
        """Whether a probe should run now.

        Raises:
            TriAccelError: probes are enabled, but neither an interval nor a calibration was given.
        """
        if not self.enabled:
            return False
        if self._next_due is None:
            raise TriAccelError(
                "probes are enabled but their interval is not known: call calibrate() first, or set "
                "curvature.interval_samples (batch.noise_interval_samples when curvature is off)"
            )
        return samples_seen >= self._next_due

    # ---------------------------------------------------------------- one probe

    def run(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        samples_seen: int,
    ) -> None:
        """Run one probe and take in what is finite and converged. Nothing happens when probes are not enabled.

        Args:
            model: the plain FP32 module, in training mode.
            inputs: probe inputs, batch in dimension 0.
            targets: their targets.
            loss_fn: mean loss.
            samples_seen: the clock.

        Raises:
            TriAccelError: as ``gram_probe`` and ``hessian_probe``.
        """
        if not self.enabled:
            return
        start = time.perf_counter()
        config = self._config
        number = self._probes
        seed = (self._seed * 1_000_003 + number * 7919) % 2**63
        estimating = config.estimator != "off"
        result = gram_probe(
            model,
            self._layers,
            inputs,
            targets,
            loss_fn,
            top_k=config.top_k if estimating else 1,
            reduce=config.reduce,
            labels=config.labels if estimating else "observed",
            norm_statistics=config.norm_statistics,
            max_bytes=config.max_bytes,
            generator=torch.Generator().manual_seed(seed),
        )
        self._probes += 1
        good = self._take(result, number)
        if self._needs_noise and good:
            self._take_small(model, inputs, targets, loss_fn)
        if config.estimator == "hessian" or (estimating and config.audit):
            spectra = hessian_probe(
                model,
                self._rotated(result),
                inputs,
                targets,
                loss_fn,
                top_k=config.top_k,
                tolerance=config.lanczos_tolerance,
                max_iterations=config.lanczos_max_iterations,
                seed=seed,
                norm_statistics=config.norm_statistics,
            )
            good = self._take_hessian(spectra, number) and good
            self._audit(samples_seen)
        if not good:
            self._failed += 1
        seconds = time.perf_counter() - start
        self._seconds += seconds
        if config.adaptive_interval and self._measured and self._sample_seconds is not None:
            self._set_interval(self._seconds / self._probes)
        if self.interval_samples is not None:
            self._next_due = (samples_seen // self.interval_samples + 1) * self.interval_samples

    def give_up(self, *, samples_seen: int) -> None:
        """Count a probe that could not run (memory ran out) as failed; the former figures stay."""
        self._failed += 1
        if self.interval_samples is not None:
            self._next_due = (samples_seen // self.interval_samples + 1) * self.interval_samples

    def _take(self, result: ProbeResult, number: int) -> bool:
        self._generic, self._without_gradient = dict(result.generic), dict(result.without_gradient)
        if result.finite:
            self._noise.add_probe(trace=result.typical_trace, square_norm=result.square_norm)
        for name, layer in result.layers.items():
            if not layer.finite or self._config.estimator == "off":
                continue
            self._fisher[name] = layer.curvature
            former = self._signals.get(name, LayerSignal())
            if self._config.estimator == "fisher":
                self._signals[name] = LayerSignal(
                    layer.curvature, layer.eigenvalues, layer.sample_variance, number
                )
            else:
                self._signals[name] = LayerSignal(
                    former.curvature, former.eigenvalues, layer.sample_variance, former.probe_id
                )
        return result.finite

    def _take_small(
        self, model: nn.Module, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], Tensor]
    ) -> None:
        """|g_b|² in training mode, b a third of the training batch at most: the other size of the noise scale."""
        count = batch_length((inputs, targets))
        size = max(2, min(count, (self._noise.last_batch or self._initial_batch) // 3))
        if size > count:
            return
        parts = split_batch((inputs, targets), [size] * (count // size) + [count % size] * bool(count % size))
        norm = training_square_norm(
            model,
            [p for layer in self._layers for p in layer.parameters],
            parts[: count // size],
            loss_fn,
            device=next(p.device for layer in self._layers for p in layer.parameters),
        )
        self._noise.add_small(square_norm=norm, batch_size=size)

    def _rotated(self, result: ProbeResult) -> list[Layer]:
        usable = [
            layer for layer in self._layers if layer.name in result.layers and layer.info.role != "norm"
        ] or [layer for layer in self._layers if layer.name in result.layers]
        count = min(ROTATION, len(usable))
        chosen = [usable[(self._turn + i) % len(usable)] for i in range(count)]
        self._turn = (self._turn + count) % len(usable)
        return chosen

    def _take_hessian(self, spectra: Mapping[str, BlockSpectrum], number: int) -> bool:
        good = True
        for name, spectrum in spectra.items():
            if not (spectrum.converged and spectrum.finite):
                self._unconverged += 1
                good = False
                continue
            values = spectrum.eigenvalues
            reduced = values[0] if self._config.reduce == "max" else math.fsum(values) / len(values)
            self._hessian[name] = reduced
            if self._config.estimator == "hessian":
                former = self._signals.get(name, LayerSignal())
                self._signals[name] = LayerSignal(reduced, values, former.sample_variance, number)
        return good

    def _audit(self, samples_seen: int) -> None:
        names = [name for name in self._hessian if name in self._fisher]
        if len(names) >= 3:
            rho = rank_correlation(
                [self._fisher[name] for name in names], [self._hessian[name] for name in names]
            )
            if math.isfinite(rho):
                self._correlations.append((samples_seen, len(names), rho))

    # ---------------------------------------------------------------- what it knows

    def layer_signals(self) -> Mapping[str, LayerSignal]:
        """Latest good figures per layer; empty with the estimator off."""
        return dict(self._signals)

    def observe_gradient(self, *, square_norm: float, batch_size: int) -> None:
        """|g_B|² of a training batch, for the denominator of the noise scale."""
        self._noise.add_gradient(square_norm=square_norm, batch_size=batch_size)

    def noise(self) -> NoiseScale | None:
        """Running noise scale, ``None`` before the first probe."""
        return self._noise.read()

    def report(self) -> dict[str, Any]:
        """Counts, seconds, what took the generic route, and the rank correlations as ``[samples_seen, layers, rho]``."""
        return {
            "probes": self._probes,
            "failed": self._failed,
            "unconverged_layers": self._unconverged,
            "seconds": self._seconds,
            "interval_samples": self.interval_samples,
            "generic": dict(self._generic),
            "without_gradient": dict(self._without_gradient),
            "rank_correlations": [list(row) for row in self._correlations],
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "interval_samples": self.interval_samples,
            "next_due": self._next_due,
            "sample_seconds": self._sample_seconds,
            "signals": {name: asdict(signal) for name, signal in self._signals.items()},
            "noise": self._noise.state_dict(),
            "counts": [self._probes, self._failed, self._unconverged, self._turn],
            "seconds": self._seconds,
            "fisher": dict(self._fisher),
            "hessian": dict(self._hessian),
            "correlations": [list(row) for row in self._correlations],
            "generic": dict(self._generic),
            "without_gradient": dict(self._without_gradient),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of ``state_dict``."""
        self.interval_samples = state["interval_samples"]
        self._next_due = state["next_due"]
        self._sample_seconds = state["sample_seconds"]
        self._signals = {
            name: LayerSignal(
                s["curvature"], tuple(s["eigenvalues"]), s["sample_variance"], int(s["probe_id"])
            )
            for name, s in state["signals"].items()
        }
        self._noise.load_state_dict(state["noise"])
        self._probes, self._failed, self._unconverged, self._turn = state["counts"]
        self._seconds = state["seconds"]
        self._fisher, self._hessian = dict(state["fisher"]), dict(state["hessian"])
        self._correlations = [(int(n), int(c), float(r)) for n, c, r in state["correlations"]]
        self._generic = dict(state["generic"])
        self._without_gradient = dict(state["without_gradient"])


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, ties at their mean rank; NaN when one side is constant."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) - 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return covariance / spread if spread > 0 else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for index in order[start : end + 1]:
            ranks[index] = (start + end) / 2
        start = end + 1
    return ranks
