"""Typed configuration, one frozen model per component; every default with its range, its unit and why.

``TriAccelConfig()`` is the whole method with nothing to tune. ``TriAccelConfig.arm(...)`` gives the arms of the 2³ design and
``TriAccelConfig.paper()`` the rules as the paper (arXiv 2508.16905) words them. Values that the paper's public text
does not give are ours and say so.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .types import Precision

__all__ = [
    "BatchConfig",
    "CurvatureConfig",
    "EngineConfig",
    "LossScaleConfig",
    "PrecisionConfig",
    "TriAccelConfig",
]

Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LossScaleConfig(_Frozen):
    """Loss scaling, active only while a layer runs in FP16 (arXiv 1710.03740)."""

    initial: Positive = 65536.0
    """First scale, a power of two; PyTorch's default."""
    floor: Positive = 1.0
    """Smallest scale. At the floor the offending layer is promoted instead (ours)."""
    growth: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] = 2.0
    """Factor after ``growth_interval`` steps without overflow."""
    backoff: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Factor after an overflow."""
    growth_interval: Count = 2000
    """Steps without overflow before the scale grows."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.floor > self.initial:
            raise ValueError(
                f"loss_scale.floor {self.floor:g} is above loss_scale.initial {self.initial:g}: "
                "the scale could never be used; lower the floor"
            )
        return self


class PrecisionConfig(_Frozen):
    """Which layer computes in which format, and what decides it."""

    rule: Literal["off", "paper", "auto", "static"] = "auto"
    """``off``: FP32. ``paper``: fixed thresholds. ``auto``: thresholds from a warm-up.
    ``static``: the cost table's best map, fixed at step 0."""
    tau_low: Positive = 1e-4
    """``paper``: gradient variance below which a layer goes to FP16 (ours: the paper's public text gives no figure)."""
    tau_high: Positive = 1e-2
    """``paper``: gradient variance below which a layer goes to BF16, FP32 above (ours)."""
    tau_curvature: Positive = 100.0
    """``paper``: curvature λ above which a layer is held in FP32 (ours)."""
    low_quantile: Fraction = 0.25
    """``auto``: quantile of log variance over the warm-up that becomes the FP16 threshold."""
    high_quantile: Fraction = 0.90
    """``auto``: quantile of log variance over the warm-up that becomes the BF16 threshold."""
    curvature_quantile: Fraction = 0.98
    """``auto``: quantile of log curvature over the warm-up above which a layer is held in FP32."""
    warmup_fraction: Fraction = 0.05
    """``auto``: the warm-up ends at this fraction of the samples at the latest."""
    warmup_skip_steps: Annotated[int, Field(ge=0)] = 100
    """``auto``: first steps left out of the warm-up (variances fall 100-fold there); never more than half of the warm-up."""
    promotion_hold: Count = 3
    """Ticks that a promotion by curvature or overflow holds."""
    hysteresis: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1.5
    """A layer comes back up only when its variance exceeds the threshold times this factor."""
    min_dwell: Count = 2
    """Ticks that a layer keeps its format before variance may change it again."""
    gate: Literal["cost", "off"] | None = None
    """``cost``: lower a layer only where a measurement says it gains. ``None``: ``off`` under ``paper``, ``cost`` otherwise."""
    prefer: Literal["time", "memory"] = "time"
    """What a lower format must gain; under memory pressure bytes count in either case."""
    memory_pressure: Fraction = 0.90
    """Utilisation of the memory budget from which on bytes count instead of seconds; with a cost table only."""
    pin: dict[str, Precision] = Field(default_factory=dict)
    """Layer name patterns (``fnmatch``) to a fixed format: ``{"fc": "fp32", "features.0.*": "bf16"}``. Always wins."""
    ladder: tuple[Precision, ...] | None = None
    """Formats that may be used; ``None``: what the device really accelerates, by measurement."""
    reference_batch: Count | None = None
    """B_ref of the variance, samples; ``None``: the initial batch."""
    overflow_patience: Count = 3
    """Skipped steps in a row before the offending layer is promoted."""
    stats_every: Count = 10
    """Optimizer steps between two readings of the gradients' statistics."""
    stats_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.8
    """Decay of the running variance per reading."""
    cost_budget_seconds: Positive = 5.0
    """Time that measuring the cost table may take, once per machine, model and batch buckets."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Loss scaling for FP16 layers."""

    @property
    def cost_gate(self) -> bool:
        """Whether a layer is lowered only where it gains."""
        return (self.gate or ("off" if self.rule == "paper" else "cost")) == "cost"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.tau_low >= self.tau_high:
            raise ValueError(
                f"precision.tau_low {self.tau_low:g} is not below precision.tau_high {self.tau_high:g}: "
                "FP16 is for the smallest variances; swap them or set them apart"
            )
        if self.low_quantile >= self.high_quantile:
            raise ValueError(
                f"precision.low_quantile {self.low_quantile:g} is not below precision.high_quantile {self.high_quantile:g}"
            )
        if self.ladder is not None and Precision.FP32 not in self.ladder:
            raise ValueError("precision.ladder leaves out fp32, to which promotions go; add it")
        return self


class CurvatureConfig(_Frozen):
    """Top-k eigenvalues of every layer's block, the learning rates that follow, and promotion in precision."""

    estimator: Literal["off", "fisher", "hessian"] = "fisher"
    """``fisher``: exact empirical-Fisher block by Gram matrices. ``hessian``: block Lanczos, the paper's words."""
    top_k: Count = 5
    """Eigenvalues per layer."""
    reduce: Literal["mean", "max"] = "mean"
    """How the top k become λ."""
    probe_batch: Annotated[int, Field(ge=2)] = 32
    """Samples of one probe."""
    labels: Literal["observed", "sampled"] = "observed"
    """``sampled`` draws labels from the model (Monte-Carlo Fisher) at the cost of a second backward."""
    norm_statistics: Literal["probe", "running"] = "probe"
    """Constants that normalisation layers use in a probe: those of the probe batch (a channel's variance never below the
    running one), or the running ones."""
    max_overhead: Annotated[float, Field(gt=0.0, le=1.0)] = 0.02
    """Share of training time that probes may take; sets the interval at calibration."""
    interval_samples: Count | None = None
    """Samples between probes; ``None``: from ``max_overhead`` at calibration."""
    adaptive_interval: bool = False
    """Follow the measured overhead during the run. Gives up that the same inputs give the same records."""
    max_bytes: Count = 256 * 2**20
    """Bytes of temporaries that one layer's Gram matrix may use; larger ones are tiled."""
    alpha: NonNegative = 0.5
    """Strength α of s = 1 / (1 + α·λ̂)."""
    normalise: Literal["geomean", "none"] = "geomean"
    """``geomean`` keeps the geometric mean of the scales at 1; ``none`` is the paper's plain shrinking."""
    scale_min: Positive = 0.5
    """Smallest scale on a layer's learning rate."""
    scale_max: Positive = 2.0
    """Largest scale on a layer's learning rate."""
    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.7
    """Decay of the running λ per probe."""
    audit: bool = False
    """Run the other estimator on rotating layers and log the rank correlation of the two."""
    lanczos_tolerance: Positive = 1e-3
    """``hessian``: relative residual at which an eigenpair counts as converged."""
    lanczos_max_iterations: Count = 40
    """``hessian``: block iterations at most."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_k > self.probe_batch:
            raise ValueError(
                f"curvature.top_k {self.top_k} exceeds curvature.probe_batch {self.probe_batch}: "
                "the Fisher block of B samples has rank B at most; lower top_k or raise probe_batch"
            )
        if not self.scale_min <= 1.0 <= self.scale_max:
            raise ValueError(
                f"curvature.scale_min {self.scale_min:g} and scale_max {self.scale_max:g} "
                "must enclose 1, the scale of an average layer"
            )
        return self


class BatchConfig(_Frozen):
    """Batch size from the memory really in use."""

    rule: Literal["off", "paper", "model"] = "model"
    """``off``: constant. ``paper``: ±δ at two utilisation thresholds.
    ``model``: largest rung that a fit of observed peaks allows."""
    initial: Count = 96
    """First batch size, samples."""
    minimum: Count = 16
    """Floor, samples."""
    maximum: Count = 512
    """Ceiling, samples."""
    ladder: tuple[int, ...] | None = None
    """Sizes to choose from, ascending; ``None``: all 2^k and 3·2^k from floor to ceiling, with ``initial``."""
    delta: Count = 32
    """``paper``: step δ, samples (ours)."""
    rho_low: Fraction = 0.70
    """Utilisation below which the batch may grow."""
    rho_high: Fraction = 0.90
    """Utilisation that the batch must stay below."""
    margin: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of the available bytes that is never budgeted."""
    budget_bytes: Count | None = None
    """User's cap on bytes; ``None``: what the device has."""
    cooldown: Annotated[int, Field(ge=0)] = 3
    """Control ticks between two growths; shrinking is immediate."""
    noise_cap: NonNegative = 1.0
    """The batch never grows past this many times B_simple (arXiv 1812.06162); 0 removes the cap. ``model`` only."""
    min_updates: Fraction = 0.6
    """Optimizer steps that a run keeps at least, as a share of the fixed-batch count. ``model`` only."""
    noise_interval_samples: Count | None = None
    """Samples between noise probes when curvature is off; ``None``: from ``curvature.max_overhead``."""
    effective: Literal["grow", "hold"] = "grow"
    """``grow``: the batch of an update changes. ``hold``: it stays, and micro-batches follow memory."""
    rate_rule: Literal["sqrt", "linear", "none"] = "sqrt"
    """How the learning rate follows a grown batch."""
    tail: Literal["keep", "drop"] = "keep"
    """The last partial batch of an epoch."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"batch.minimum {self.minimum} <= batch.initial {self.initial} <= batch.maximum {self.maximum} does not hold"
            )
        if self.rho_low >= self.rho_high:
            raise ValueError(
                f"batch.rho_low {self.rho_low:g} is not below batch.rho_high "
                f"{self.rho_high:g}: the batch would grow and shrink at once"
            )
        if self.ladder is not None:
            if (
                not self.ladder
                or any(b <= a for a, b in zip(self.ladder, self.ladder[1:], strict=False))
                or self.ladder[0] < 1
            ):
                raise ValueError(
                    f"batch.ladder {list(self.ladder)} is not a non-empty ascending list of sizes >= 1; sort it and drop repeats"
                )
            if self.initial not in self.ladder:
                raise ValueError(
                    f"batch.initial {self.initial} is not a rung of batch.ladder {list(self.ladder)}; add it"
                )
        return self

    @property
    def rungs(self) -> tuple[int, ...]:
        """The ladder in force, ascending, ``initial`` among its rungs; a single rung when the rule is ``off``."""
        if self.rule == "off":
            return (self.initial,)
        if self.ladder is not None:
            return tuple(b for b in self.ladder if self.minimum <= b <= self.maximum)
        sizes = {self.initial, self.maximum, self.minimum}
        sizes |= {m << k for m in (1, 3) for k in range(31) if self.minimum <= m << k <= self.maximum}
        return tuple(sorted(sizes))


class EngineConfig(_Frozen):
    """Savings that belong to no component; an option of every arm, off in the 2³ design."""

    fused_update: bool = False
    """One pass over the parameters for SGD and AdamW."""
    gradient_release: bool = False
    """Update each parameter as its gradient arrives in backward, then free the gradient."""
    momentum_bf16: bool = False
    """Keep momentum in BF16 with stochastic rounding; needs ``fused_update``."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.momentum_bf16 and not self.fused_update:
            raise ValueError(
                "engine.momentum_bf16 needs engine.fused_update: plain torch.optim keeps FP32 state; set fused_update=True"
            )
        return self


class TriAccelConfig(_Frozen):
    """The whole method. The defaults need no tuning; DESIGN and the docs give the reason of each."""

    precision: PrecisionConfig = PrecisionConfig()
    """Precision-adaptive updates."""
    curvature: CurvatureConfig = CurvatureConfig()
    """Sparse second-order signals."""
    batch: BatchConfig = BatchConfig()
    """Memory-elastic batch scaling."""
    engine: EngineConfig = EngineConfig()
    """Fused update and gradient release."""
    tick_samples: Count | None = None
    """Samples between two control ticks; ``None``: ten initial batches."""
    max_grad_norm: Positive | None = None
    """Global gradient norm to clip to, after unscaling; ``None``: no clipping."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of data order, probes and stochastic rounding."""

    @property
    def tick(self) -> int:
        """Samples between two control ticks."""
        return self.tick_samples or 10 * self.batch.initial

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.engine.gradient_release:
            refused = None
            if self.max_grad_norm is not None:
                refused = "max_grad_norm (the global norm is known only after all gradients are)"
            elif self.batch.effective == "hold":
                refused = "batch.effective='hold' (accumulation keeps gradients)"
            if refused:
                raise ValueError(
                    f"engine.gradient_release cannot go with {refused}; switch one of the two off"
                )
        return self

    @classmethod
    def arm(
        cls, *, precision: bool, curvature: bool, batch: bool, base: TriAccelConfig | None = None
    ) -> TriAccelConfig:
        """One arm of the 2³ design: components switched off are policies that always decide the same."""
        config = base or cls()
        return config.model_copy(
            update={
                "precision": config.precision
                if precision
                else config.precision.model_copy(update={"rule": "off"}),
                "curvature": config.curvature
                if curvature
                else config.curvature.model_copy(update={"estimator": "off"}),
                "batch": config.batch if batch else config.batch.model_copy(update={"rule": "off"}),
            }
        )

    @classmethod
    def paper(cls, base: TriAccelConfig | None = None) -> TriAccelConfig:
        """Every rule as the paper words it: thresholds, no cost gate, block Hessian, plain shrinking of rates, ±δ."""
        config = base or cls()
        return config.model_copy(
            update={
                "precision": config.precision.model_copy(update={"rule": "paper"}),
                "curvature": config.curvature.model_copy(
                    update={"estimator": "hessian", "normalise": "none"}
                ),
                "batch": config.batch.model_copy(update={"rule": "paper"}),
            }
        )
