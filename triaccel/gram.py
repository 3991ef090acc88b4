"""Exact Fisher-block spectra, gradient variance and noise of every layer, from one small extra batch.

For layer l and the samples i, j of a probe batch, K_l[i,j] = ⟨∇_l ℓ_i, ∇_l ℓ_j⟩ (B×B). From it, exactly:

    curvature      eigenvalues of F_l = (1/B) Σ ∇ℓ_i ∇ℓ_iᵀ   = those of K_l / B
    variance       tr Σ_l = (tr K − 1ᵀK1/B) / (B − 1)
    square norm    |G_l|² = (1ᵀK1 − tr K) / (B (B − 1)), unbiased, may be negative (arXiv 1812.06162)

Layers give their inputs and output gradients by one forward and one backward to layer outputs (weight gradients are not formed);
``gram_rules`` turns them into K; parameters without a rule, or used where no rule sees it, go through ``per_sample``, by name.
Cost: about two plain forward+backward of the probe batch, ``max_bytes`` of temporaries a layer, one host sync.
The network is that of ``probe_pass``: FP32, no dropout, batch norms on constants. Needs no double backward.
Source: ours; DESIGN section 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .gram_pass import Labels, layer_grams
from .labels import LossFunction
from .layers import Layer
from .probe_pass import NormStatistics

__all__ = ["LayerProbe", "ProbeResult", "gram_matrices", "gram_probe"]

CLIP = 12.0
"""Times the median sample's squared deviation beyond which a sample counts no further in ``typical_trace``.

ResNet-18 on CIFAR-10 after 62 and 126 steps: B_simple 363 and 76 with 12, 393 and 79 by two batch sizes in training mode."""


@dataclass(frozen=True, slots=True)
class LayerProbe:
    """What one probe says of one layer.

    Attributes:
        curvature: the top k eigenvalues reduced to one number λ.
        eigenvalues: top k of the Fisher block, descending.
        sample_variance: tr Σ of the per-sample gradients (observed labels).
        square_norm: unbiased |G|² of the mean gradient (observed labels); may be negative.
        route: how K was found: ``"outer"``, ``"inner"``, ``"direct"``, joined by ``"+"``, or ``"generic"``.
        finite: whether all of the above are finite.
    """

    curvature: float
    eigenvalues: tuple[float, ...]
    sample_variance: float
    square_norm: float
    route: str
    finite: bool = True


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One probe of all layers.

    Attributes:
        layers: per layer that has a gradient.
        without_gradient: the others, and why (frozen, unused).
        generic: layers that took the generic route, and why.
        batch_size: samples B.
        loss: mean loss of the probe batch.
        trace: Σ_l tr Σ_l.
        typical_trace: the same with each sample's squared deviation clipped at ``CLIP`` times the median sample's: one
            sample in a hundred may have a gradient ten to thirty times as long, and then decides ``trace`` alone.
        square_norm: Σ_l |G_l|², unbiased.
    """

    layers: Mapping[str, LayerProbe]
    without_gradient: Mapping[str, str]
    generic: Mapping[str, str]
    batch_size: int
    loss: float
    trace: float
    typical_trace: float
    square_norm: float

    @property
    def finite(self) -> bool:
        """Whether every layer's figures are finite."""
        return math.isfinite(self.loss) and all(layer.finite for layer in self.layers.values())

    @property
    def noise_scale(self) -> float | None:
        """B_simple of this probe alone, samples; ``None`` when the unbiased |G|² is not positive."""
        return self.trace / self.square_norm if self.square_norm > 0 else None


def gram_probe(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction,
    *,
    top_k: int,
    reduce: Literal["mean", "max"] = "mean",
    labels: Labels = "observed",
    norm_statistics: NormStatistics = "probe",
    max_bytes: int = 256 * 2**20,
    generator: torch.Generator | None = None,
) -> ProbeResult:
    """Probe every layer on one batch; the model is left as it was, bit for bit.

    Args:
        model: the module, in the mode in which it trains.
        layers: its layers (``find_layers``).
        inputs: a tensor, a tuple (``model(*inputs)``) or a dict (``model(**inputs)``); batch in dimension 0.
        targets: what ``loss_fn`` compares the outputs with.
        loss_fn: scalar mean loss over samples; with ``reduction="sum"`` the sum is taken as such, ``"none"`` is an error.
        top_k: eigenvalues per layer, at most B.
        reduce: ``"mean"`` or ``"max"`` of the top k becomes λ.
        labels: ``"sampled"`` draws labels from the model for the curvature (Monte-Carlo Fisher), by a second backward;
            variance and noise are always those of ``targets``.
        norm_statistics: constants of training batch norms: of this batch, or the running ones.
        max_bytes: bytes of temporaries a layer.
        generator: for sampled labels, on the CPU; needed with ``labels="sampled"``.

    Returns:
        The figures of every layer, in FP64 from FP32 gradients.

    Raises:
        TriAccelError: ``top_k`` exceeds the batch, the batch is smaller than 2, nothing is differentiable, the loss is no scalar,
            or labels cannot be sampled for this loss.
    """
    found = layer_grams(
        model, layers, inputs, targets, loss_fn,
        labels=labels, norm_statistics=norm_statistics, max_bytes=max_bytes, generator=generator, top_k=top_k,
    )  # fmt: skip
    names = list(found.grams)
    stacked = torch.stack([found.grams[name] for name in names]).double()
    if found.sampled is not None:
        stacked = torch.cat([stacked, torch.stack([found.sampled[name] for name in names]).double()])
    assert found.loss is not None
    host = stacked.cpu()
    loss = float(found.loss)
    count, samples = len(names), host.shape[1]
    observed, curved = host[:count], host[-count:]
    traces = observed.diagonal(dim1=1, dim2=2).sum(1)
    sums = observed.sum((1, 2))
    variances = (traces - sums / samples) / (samples - 1)
    norms = (sums - traces) / (samples * (samples - 1))
    finite = torch.isfinite(host).flatten(1).all(1)
    finite = finite[:count] & finite[-count:]
    spectra = torch.linalg.eigvalsh(torch.where(finite[:, None, None], curved, torch.zeros(()).double()))
    top = spectra.flip(1)[:, :top_k].clamp_min(0.0) / samples
    reduced = top.mean(1) if reduce == "mean" else top[:, 0]
    nan = float("nan")
    rows = zip(
        names,
        finite.tolist(),
        reduced.tolist(),
        top.tolist(),
        variances.tolist(),
        norms.tolist(),
        strict=True,
    )
    result = {
        name: LayerProbe(
            curvature=lam if ok else nan,
            eigenvalues=tuple(values) if ok else (nan,) * top_k,
            sample_variance=variance if ok else nan,
            square_norm=norm if ok else nan,
            route=found.routes[name],
            finite=ok,
        )
        for name, ok, lam, values, variance, norm in rows
    }
    return ProbeResult(
        layers=result,
        without_gradient=found.without_gradient,
        generic=found.generic,
        batch_size=samples,
        loss=loss,
        trace=float(variances.sum()),
        typical_trace=_typical_trace(observed.sum(0)),
        square_norm=float(norms.sum()),
    )


def _typical_trace(gram: Tensor) -> float:
    """tr Σ from the whole network's ``(B, B)`` Gram matrix, each sample's part clipped."""
    deviations = gram.diagonal() - 2 * gram.mean(1) + gram.mean()
    clipped = deviations.clamp_max(CLIP * float(deviations.median()))
    return float(clipped.sum()) / (gram.shape[0] - 1)


def gram_matrices(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction,
    *,
    norm_statistics: NormStatistics = "probe",
    max_bytes: int = 256 * 2**20,
) -> dict[str, Tensor]:
    """K per layer, ``(B, B)``, observed labels; arguments and errors as for ``gram_probe``."""
    return layer_grams(
        model, layers, inputs, targets, loss_fn,
        labels="observed", norm_statistics=norm_statistics, max_bytes=max_bytes, generator=None, top_k=1,
    ).grams  # fmt: skip
