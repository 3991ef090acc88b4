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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .gram_rules import has_rule, parameter_gram
from .layers import Layer
from .per_sample import batch_leaves, generic_grams
from .probe_pass import ConstantStatistics, NormStatistics, Use, call_model, probe_region, record_uses
from .types import TriAccelError

__all__ = ["LayerProbe", "ProbeResult", "gram_matrices", "gram_probe", "loss_scale_of", "sample_labels"]

LossFunction = Callable[[Any, Any], Tensor]
Labels = Literal["observed", "sampled"]


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
        square_norm: Σ_l |G_l|², unbiased.
    """

    layers: Mapping[str, LayerProbe]
    without_gradient: Mapping[str, str]
    generic: Mapping[str, str]
    batch_size: int
    loss: float
    trace: float
    square_norm: float

    @property
    def finite(self) -> bool:
        """Whether every layer's figures are finite."""
        return math.isfinite(self.loss) and all(layer.finite for layer in self.layers.values())

    @property
    def noise_scale(self) -> float | None:
        """B_simple of this probe alone, samples; ``None`` when the unbiased |G|² is not positive."""
        return self.trace / self.square_norm if self.square_norm > 0 else None


@dataclass(slots=True)
class _Grams:
    """K per layer, and what could not be had."""

    grams: dict[str, Tensor] = field(default_factory=dict)
    routes: dict[str, str] = field(default_factory=dict)
    without_gradient: dict[str, str] = field(default_factory=dict)
    generic: dict[str, str] = field(default_factory=dict)
    loss: Tensor | None = None
    sampled: dict[str, Tensor] | None = None


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
    found = _grams(
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
        square_norm=float(norms.sum()),
    )


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
    return _grams(
        model, layers, inputs, targets, loss_fn,
        labels="observed", norm_statistics=norm_statistics, max_bytes=max_bytes, generator=None, top_k=1,
    ).grams  # fmt: skip


def loss_scale_of(loss_fn: LossFunction, loss: Tensor, samples: int) -> float:
    """Factor from ∂loss to ∂ℓ_i: B for a mean over samples, 1 for a sum.

    Raises:
        TriAccelError: the loss is no scalar.
    """
    reduction = getattr(loss_fn, "reduction", "mean")
    if loss.dim() != 0 or reduction == "none":
        raise TriAccelError(
            f"the loss has shape {tuple(loss.shape)} (reduction {reduction!r}), where a probe needs the scalar mean over "
            "samples; use reduction='mean' or 'sum'"
        )
    return 1.0 if reduction == "sum" else float(samples)


def sample_labels(
    outputs: Any, targets: Any, loss_fn: LossFunction, *, generator: torch.Generator | None
) -> Tensor:
    """Targets drawn from the model's own predictive distribution, of the form of ``targets``.

    Args:
        outputs: logits ``(B, C, ...)`` with class targets, or logits of independent bits with ``BCEWithLogitsLoss``.
        targets: observed targets.
        loss_fn: the loss.
        generator: on the CPU.

    Raises:
        TriAccelError: no generator, or the loss is not one whose distribution is known.
    """
    if generator is None:
        raise TriAccelError("labels='sampled' draws labels: pass a seeded torch.Generator as generator=")
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        logits = outputs.detach()
        if isinstance(loss_fn, nn.BCEWithLogitsLoss) or loss_fn is F.binary_cross_entropy_with_logits:
            draw = torch.rand(logits.shape, generator=generator).to(logits.device)
            return (draw < logits.sigmoid()).to(targets.dtype)
        classes = not targets.is_floating_point() and targets.dim() == logits.dim() - 1
        dense = isinstance(loss_fn, nn.CrossEntropyLoss) and targets.shape == logits.shape
        if classes or dense:
            rows = logits.movedim(1, -1)
            flat = rows.reshape(-1, rows.shape[-1]).float().softmax(1).cpu()
            bad = ~torch.isfinite(flat).all(1)
            flat[bad] = 1.0  # a NaN loss is reported by the caller, not by multinomial
            drawn = torch.multinomial(flat, 1, generator=generator).view(rows.shape[:-1]).to(logits.device)
            if dense:
                return F.one_hot(drawn, rows.shape[-1]).movedim(-1, 1).to(targets.dtype)
            ignored = getattr(loss_fn, "ignore_index", None)
            return drawn if ignored is None else torch.where(targets == ignored, targets, drawn)
    raise TriAccelError(
        f"labels='sampled' knows cross entropy and binary cross entropy with logits, not {loss_fn!r}: "
        "use labels='observed'"
    )


def _batch_size(inputs: Any, targets: Any) -> int:
    for tree in (inputs, targets):
        for leaf in torch.utils._pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return int(leaf.shape[0])
    raise TriAccelError("the probe batch holds no tensor with a batch dimension")


def _grams(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction,
    *,
    labels: Labels,
    norm_statistics: NormStatistics,
    max_bytes: int,
    generator: torch.Generator | None,
    top_k: int,
) -> _Grams:
    samples = _batch_size(inputs, targets)
    if samples < 2:
        raise TriAccelError(
            f"a probe needs at least 2 samples, not {samples}: the variance over samples is undefined"
        )
    if top_k > samples:
        raise TriAccelError(
            f"top_k {top_k} exceeds the probe batch of {samples} samples, whose Fisher blocks have rank {samples} at most; "
            "lower curvature.top_k or draw more samples"
        )
    owned = [layer for layer in layers if layer.parameters]
    if not owned:
        raise TriAccelError("no layer has a trainable parameter: there is nothing to probe; unfreeze a layer")
    device = owned[0].parameters[0].device
    holders = _holders(model, owned)
    modules = list({id(m): m for held in holders.values() for m, _ in held if has_rule(m)}.values())
    with probe_region(model, statistics=norm_statistics, device=device) as constants:
        with record_uses(modules, constants) as (uses, stop):
            outputs = call_model(model, inputs)
            loss = loss_fn(outputs, targets)
            stop()
            scale = loss_scale_of(loss_fn, loss, samples)
            if not loss.requires_grad:
                raise TriAccelError(
                    "the loss depends on no trainable parameter: no layer is differentiable; check that the model's output "
                    "is not detached"
                )
            counts = _count_edges(loss, {id(p) for layer in owned for p in layer.parameters})
            leaves = batch_leaves(outputs, samples)
            losses = [loss]
            if labels == "sampled":
                drawn = sample_labels(outputs, targets, loss_fn, generator=generator)
                losses.append(loss_fn(outputs, drawn))
            found = _Grams(loss=loss.detach())
            for index, value in enumerate(losses):
                wanted: list[Any] = [use.edge for use in uses]
                wanted += [torch.autograd.graph.get_gradient_edge(leaf) for leaf in leaves]
                gradients = (
                    torch.autograd.grad(
                        value, wanted, retain_graph=index + 1 < len(losses), allow_unused=True
                    )
                    if wanted
                    else ()
                )
                part = found if index == 0 else _Grams()
                with torch.no_grad():
                    _fill(
                        part, model, owned, holders, counts, uses, gradients, outputs, inputs,
                        samples=samples, constants=constants, max_bytes=max_bytes,
                    )  # fmt: skip
                    for gram in part.grams.values():
                        gram *= scale * scale
                if index == 1:
                    found.sampled = part.grams
    for layer in layers:
        if not layer.parameters:
            found.without_gradient[layer.name] = "frozen, tied to an earlier layer, or without parameters"
    if not found.grams:
        raise TriAccelError(
            "no layer has a gradient: the loss does not depend on any trainable parameter of the model; check that the output "
            "is not detached"
        )
    return found


def _holders(model: nn.Module, owned: Sequence[Layer]) -> dict[int, list[tuple[nn.Module, str]]]:
    """Parameter id to the modules that hold it, each with the name it has there."""
    wanted = {id(p) for layer in owned for p in layer.parameters}
    holders: dict[int, list[tuple[nn.Module, str]]] = {key: [] for key in wanted}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) in wanted:
                holders[id(p)].append((module, name))
    return holders


def _count_edges(loss: Tensor, wanted: set[int]) -> dict[int, int]:
    """How many nodes of the graph read each parameter; a use that no hook saw shows as one edge too many."""
    counts: dict[int, int] = {}
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith("CheckpointFunctionBackward"):
            raise TriAccelError(
                "the model uses torch.utils.checkpoint with use_reentrant=True, which allows no torch.autograd.grad: a probe "
                "cannot see its layers; pass use_reentrant=False"
            )
        for child, _ in node.next_functions:
            if child is None:
                continue
            variable = getattr(child, "variable", None)
            if variable is None:
                stack.append(child)
            elif id(variable) in wanted:
                counts[id(variable)] = counts.get(id(variable), 0) + 1
    return counts


def _reason(
    layer: Layer,
    holders: Mapping[int, list[tuple[nn.Module, str]]],
    counts: Mapping[int, int],
    found: Mapping[int, list[tuple[Use, Tensor]]],
    samples: int,
) -> str | None:
    """Why ``layer`` needs the generic route, or ``None``."""
    for p in layer.parameters:
        held = holders[id(p)]
        if not all(has_rule(m) and name in ("weight", "bias") for m, name in held):
            return f"no rule for {layer.info.kind}"
        if len({name for _, name in held}) > 1 or len({type(m) for m, _ in held}) > 1:
            return "a parameter shared between kinds of layers"
        here = [use for m, _ in held for use in found.get(id(m), [])]
        if len(here) != counts.get(id(p), 0):
            return "a parameter is used outside its own module's forward"
        for use, g in here:
            if use.input._version != use.version:
                return "its input was overwritten in place"
            if use.input.shape[0] != samples or g.shape[0] != samples:
                return f"dimension 0 of its input is {use.input.shape[0]}, not the batch of {samples}"
            if isinstance(use.module, nn.Conv2d) and use.input.dim() != 4:
                return "an unbatched input"
    return None


def _fill(
    part: _Grams,
    model: nn.Module,
    owned: Sequence[Layer],
    holders: Mapping[int, list[tuple[nn.Module, str]]],
    counts: Mapping[int, int],
    uses: Sequence[Use],
    gradients: Sequence[Tensor | None],
    outputs: Any,
    inputs: Any,
    *,
    samples: int,
    constants: ConstantStatistics,
    max_bytes: int,
) -> None:
    by_module: dict[int, list[tuple[Use, Tensor]]] = {}
    for use, g in zip(uses, gradients, strict=False):
        if g is not None:
            by_module.setdefault(id(use.module), []).append((use, g))
    generic: dict[str, dict[str, nn.Parameter]] = {}
    for layer in owned:
        if not any(counts.get(id(p), 0) for p in layer.parameters):
            part.without_gradient[layer.name] = "unused: the loss does not depend on it"
            continue
        reason = _reason(layer, holders, counts, by_module, samples)
        if reason is None:
            routes: list[str] = []
            total: Tensor | None = None
            for p in layer.parameters:
                held = holders[id(p)]
                here = [pair for m, _ in held for pair in by_module.get(id(m), [])]
                if not here:
                    continue
                one = parameter_gram(held[0][1], here, max_bytes=max_bytes)
                if one is None:
                    reason = f"no rule for {layer.info.kind} as it is used here"
                    break
                gram, route = one
                total = gram if total is None else total + gram
                routes.append(route)
            if reason is None:
                assert total is not None
                part.grams[layer.name] = total
                part.routes[layer.name] = "+".join(dict.fromkeys(routes))
                continue
        part.generic[layer.name] = reason
        generic[layer.name] = dict(zip(layer.parameter_names, layer.parameters, strict=True))
    if not generic:
        return
    tops = list(gradients[len(uses) :])
    if not tops or any(g is None for g in tops):
        leaves = batch_leaves(outputs, samples)
        tops = [g if g is not None else torch.zeros_like(x) for g, x in zip(tops, leaves, strict=True)]
    if not tops:
        raise TriAccelError(
            f"layers {sorted(generic)} have no rule ({next(iter(part.generic.values()))}), and the model's output has no "
            f"tensor with the batch of {samples} in dimension 0 to run it sample by sample; return batch-first outputs"
        )
    with torch.enable_grad():
        grams, looped = generic_grams(
            model,
            generic,
            inputs,
            outputs,
            [g for g in tops if g is not None],
            constants=constants,
            max_bytes=max_bytes,
        )
    order = [layer.name for layer in owned]
    part.grams.update(grams)
    part.routes.update(dict.fromkeys(grams, "generic"))
    part.grams = {name: part.grams[name] for name in order if name in part.grams}
    if looped:
        part.generic = {
            name: f"{why}; sample by sample, since vmap said: {looped}" for name, why in part.generic.items()
        }
