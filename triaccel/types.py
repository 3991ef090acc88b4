"""Value types shared by every part: frozen, free of torch, shapes and units beside each field.

Policies see nothing but these types, so a policy can be tested, replayed and reasoned about without a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchDecision",
    "Change",
    "Component",
    "Decision",
    "LayerInfo",
    "LayerStats",
    "MemoryReading",
    "NoiseScale",
    "Observation",
    "Policy",
    "Precision",
    "PrecisionDecision",
    "RateDecision",
    "StepReport",
    "TriAccelError",
]


class TriAccelError(RuntimeError):
    """Base of the errors that say what was found, why it is wrong and how to go on."""


class Precision(StrEnum):
    """A compute format, ordered by the number of bits that it keeps: ``FP16 < BF16 < FP32`` (ours, DESIGN order)."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def rank(self) -> int:
        """Position in the order, 0 for FP16 to 2 for FP32."""
        return ("fp16", "bf16", "fp32").index(self.value)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The matching ``torch.dtype``."""
        import torch

        return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[self.value]


Component = Literal["precision", "curvature", "batch", "loop"]
Role = Literal["compute", "norm", "other"]


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """What a policy may know of a layer.

    Attributes:
        name: module path in the model (``"layer1.0.conv1"``); ``""`` for parameters of the root itself.
        kind: class name of the module (``"Conv2d"``).
        role: ``"compute"`` layers have a precision; ``"norm"`` layers follow their input; ``"other"`` is neither.
        index: position in ``model.named_modules()`` order, counted over layers only.
        numel: trainable scalars owned by the layer.
        pin: precision demanded by the user, or ``None``.
        tied_to: name of the first layer that shares a parameter with this one, or ``None``. Tied layers share one precision.
    """

    name: str
    kind: str
    role: Role
    index: int
    numel: int
    pin: Precision | None = None
    tied_to: str | None = None


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Signals of one layer at one control tick. ``None`` means "not measured", never 0.

    Attributes:
        variance: running elementwise variance of the unscaled mean-loss gradient, scaled by B / B_ref to the reference batch.
        sample_variance: tr Σ of the per-sample gradients (from a probe).
        curvature: reduced top-k eigenvalues λ of the layer's block at the last probe (mean or max of the top k).
        eigenvalues: the top-k eigenvalues, descending.
        nonfinite: non-finite gradient entries since the last tick.
        underflow: fraction of non-zero gradient entries below the smallest FP16 subnormal, in [0, 1].
        probe_id: number of the probe that ``curvature`` came from; a policy averages each probe once.
    """

    variance: float | None = None
    sample_variance: float | None = None
    curvature: float | None = None
    eigenvalues: tuple[float, ...] = ()
    nonfinite: int = 0
    underflow: float | None = None
    probe_id: int = -1


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The simple noise scale B_simple = tr Σ / |G|² (arXiv 1812.06162), numerator and denominator averaged apart.

    Attributes:
        value: samples; ``None`` while the interval of |G|² includes 0.
        trace: running mean of Σ_l tr Σ_l.
        square_norm: running mean of the unbiased |G|² (may be ≤ 0 when noisy).
        probes: number of probes averaged.
        lower: samples; a lower bound of ``value`` (two standard errors each way), known before ``value`` is.
    """

    value: float | None
    trace: float
    square_norm: float
    probes: int
    lower: float | None = None

    @property
    def trusted(self) -> float | None:
        """``value`` where it is known, else ``lower``."""
        return self.value if self.value is not None else self.lower


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes at one control tick.

    Attributes:
        used_bytes: peak bytes of the last observed step (CUDA: reserved by the allocator; CPU: peak live tensor storage).
        budget_bytes: bytes that may be used, after margin.
        peaks: observed peaks as ``(batch_size, map_version, peak_bytes)``, oldest first.
        source: where the figure comes from (``"cuda"``, ``"cpu-tracker"``, ``"fake"``).
        reserved_unused_bytes: reserved minus allocated (fragmentation), if known.
        resident_bytes: bytes that do not depend on the batch (parameters, optimizer state), live between steps, if known.
        failed: sizes that ran out of memory, as ``(batch_size, map_version, budget_bytes at that time)``.
        other_tenants_bytes: bytes that other processes hold on the device, if known.
        unavailable: what could not be measured, and why.
    """

    used_bytes: int
    budget_bytes: int
    peaks: tuple[tuple[int, int, int], ...] = ()
    source: str = "fake"
    reserved_unused_bytes: int | None = None
    resident_bytes: int | None = None
    failed: tuple[tuple[int, int, int], ...] = ()
    other_tenants_bytes: int | None = None
    unavailable: tuple[str, ...] = ()

    @property
    def utilisation(self) -> float:
        """``used_bytes / budget_bytes``."""
        return self.used_bytes / self.budget_bytes


@dataclass(frozen=True, slots=True)
class Observation:
    """All that the policies see at one control tick.

    Attributes:
        step: optimizer steps done (skipped ones included).
        updates: optimizer steps that were applied.
        samples_seen: training samples consumed; the clock.
        total_samples: samples of the whole run, if known.
        batch_size: samples of the current step (effective batch).
        layers: statistics per layer name.
        precision_map: precision per compute layer in force during the last step.
        map_version: version of that map.
        found_inf: layers with non-finite gradients in the last step, nearest the loss first.
        consecutive_skips: steps skipped in a row, up to now.
        loss_scale: current loss scale, or ``None`` when no layer is FP16.
        loss_scale_at_floor: whether it can be backed off no further.
        memory: bytes, or ``None`` when unavailable.
        noise: noise scale, or ``None`` when unavailable.
    """

    step: int
    updates: int
    samples_seen: int
    total_samples: int | None
    batch_size: int
    layers: Mapping[str, LayerStats] = field(default_factory=dict)
    precision_map: Mapping[str, Precision] = field(default_factory=dict)
    map_version: int = 0
    found_inf: tuple[str, ...] = ()
    consecutive_skips: int = 0
    loss_scale: float | None = None
    loss_scale_at_floor: bool = False
    memory: MemoryReading | None = None
    noise: NoiseScale | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One decided change, with its reason. ``layer`` is ``None`` for whole-run quantities."""

    component: Component
    layer: str | None
    before: str | float | int | None
    after: str | float | int | None
    why: str


@dataclass(frozen=True, slots=True)
class PrecisionDecision:
    """Precision per compute layer from the next step on, the changes, and what decided each layer at this tick.

    ``decided_by`` maps layer name to ``"variance" | "curvature" | "cost" | "pin" | "ladder" | "overflow" | "memory" | "fixed"``.
    """

    precision_map: Mapping[str, Precision]
    changes: tuple[Change, ...] = ()
    decided_by: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RateDecision:
    """Dimensionless scale on the base learning rate per layer; absent layers have scale 1."""

    scales: Mapping[str, float]
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """Batch from the next step on.

    Attributes:
        batch_size: samples per optimizer step (effective batch).
        micro_batch_size: samples per forward; equals ``batch_size`` unless ``effective="hold"``.
        rate_factor: dimensionless factor on the learning rate that goes with this batch size.
        changes: what changed and why; a hold with a reason worth reading may be a change with before == after.
    """

    batch_size: int
    micro_batch_size: int
    rate_factor: float = 1.0
    changes: tuple[Change, ...] = ()


Decision = PrecisionDecision | RateDecision | BatchDecision

S = TypeVar("S")
D_co = TypeVar("D_co", PrecisionDecision, RateDecision, BatchDecision, covariant=True)


@runtime_checkable
class Policy(Protocol, Generic[S, D_co]):
    """A pure controller: no tensor of the model, no clock, no I/O; state goes in and comes out.

    States are frozen dataclasses of plain JSON values (str, int, float, bool, None, tuples and dicts of them, ``Precision``),
    so that a checkpoint can hold them.
    """

    def init(self, layers: tuple[LayerInfo, ...]) -> S:
        """State before the first step."""
        ...

    def initial(self, state: S) -> D_co:
        """Decision in force for the first step."""
        ...

    def step(self, state: S, observation: Observation) -> tuple[S, D_co]:
        """Next state and the decision from the next optimizer step on."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did.

    Attributes:
        step: index of this step, from 0.
        samples_seen: samples consumed, this step included.
        loss: mean loss over the batch, detached scalar tensor on the training device.
        stepped: whether the optimizer update was applied.
        batch_size: samples in this step.
        micro_batches: forward passes that made it up.
        found_inf: layers whose gradient was non-finite, nearest the loss first.
        loss_scale: scale in force during this step; ``None`` when no layer is FP16.
        map_version: version of the precision map that ran.
        precision_map: that map.
        rate_scales: scale per layer in force in this update (absent: 1).
        rate_factor: common factor on the learning rate in this update (batch rule times schedule).
        recovered_oom: out-of-memory errors survived in this step.
        changes: decisions taken at the end of this step (empty unless it ended with a control tick).
    """

    step: int
    samples_seen: int
    loss: Any
    stepped: bool
    batch_size: int
    micro_batches: int
    found_inf: tuple[str, ...]
    loss_scale: float | None
    map_version: int
    precision_map: Mapping[str, Precision]
    rate_scales: Mapping[str, float]
    rate_factor: float
    recovered_oom: int = 0
    changes: tuple[Change, ...] = ()
