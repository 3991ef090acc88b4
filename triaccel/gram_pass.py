"""One forward and one backward that give the Gram matrix K of every layer.

Hooks record the input of each layer and the gradient edge of its output; ``torch.autograd.grad`` to those edges gives the
output gradients without forming weight gradients. Each layer's parameters go to ``gram_rules``, or, with a reason, to
``per_sample``: no rule for the module; a parameter used outside its module's forward (a walk over the graph counts who reads it);
an input overwritten in place; a batch that is not in dimension 0. Modules called several times and tied parameters count with all
uses, cross terms included. Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from .gram_rules import has_rule, parameter_gram
from .labels import LossFunction, batch_size_of, loss_scale_of, sample_labels
from .layers import Layer
from .per_sample import batch_leaves, generic_grams
from .probe_pass import ConstantStatistics, NormStatistics, Use, call_model, probe_region, record_uses
from .types import TriAccelError

__all__ = ["Grams", "Labels", "layer_grams"]

Labels = Literal["observed", "sampled"]


@dataclass(slots=True)
class Grams:
    """K per layer, and what could not be had."""

    grams: dict[str, Tensor] = field(default_factory=dict)
    routes: dict[str, str] = field(default_factory=dict)
    without_gradient: dict[str, str] = field(default_factory=dict)
    generic: dict[str, str] = field(default_factory=dict)
    loss: Tensor | None = None
    sampled: dict[str, Tensor] | None = None


def layer_grams(
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
) -> Grams:
    """Gram matrices of all layers on one batch; arguments and errors as for ``gram.gram_probe``."""
    samples = batch_size_of(inputs, targets)
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
        with constants, record_uses(modules, constants) as (uses, stop):
            outputs = call_model(model, inputs)
            loss = loss_fn(outputs, targets)
            stop()
        scale = loss_scale_of(loss_fn, loss, samples)
        if not loss.requires_grad:
            raise TriAccelError(
                "the loss depends on no trainable parameter: no layer is differentiable; check that the model's output is "
                "not detached"
            )
        counts = _count_edges(loss, {id(p) for layer in owned for p in layer.parameters})
        losses = [loss]
        if labels == "sampled":
            losses.append(loss_fn(outputs, sample_labels(outputs, targets, loss_fn, generator=generator)))
        edges = [use.edge for use in uses] + [get_gradient_edge(x) for x in batch_leaves(outputs, samples)]
        elsewhere = _batch_elsewhere(model, inputs, uses, constants, samples)
        found = Grams(loss=loss.detach())
        for index, value in enumerate(losses):
            last = index + 1 == len(losses)
            with constants:
                gradients = (
                    torch.autograd.grad(value, edges, retain_graph=not last, allow_unused=True)
                    if edges
                    else ()
                )
            part = found if index == 0 else Grams()
            with torch.no_grad():
                _fill(
                    part, model, owned, holders, counts, uses, gradients, outputs, inputs, elsewhere,
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


def _batch_elsewhere(
    model: nn.Module, inputs: Any, uses: Sequence[Use], constants: ConstantStatistics, samples: int
) -> frozenset[int]:
    """Modules whose input has the batch in another dimension than 0, where shapes alone cannot tell.

    Only where a further dimension happens to be B too, one forward of B − 1 samples settles it.
    """
    doubtful = [
        use.module
        for use in uses
        if isinstance(use.module, (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding))
        and samples in use.input.shape[1 : None if isinstance(use.module, nn.Embedding) else -1]
    ]
    if not doubtful:
        return frozenset()
    found: set[int] = set()

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and args[0].shape[0] != samples - 1:
            found.add(id(module))

    handles = [module.register_forward_hook(hook, prepend=True) for module in dict.fromkeys(doubtful)]
    try:
        with torch.no_grad(), constants.replaying():
            call_model(model, pytree.tree_map(lambda x: _fewer(x, samples), inputs))
    finally:
        for handle in handles:
            handle.remove()
    return frozenset(found)


def _fewer(x: Any, samples: int) -> Any:
    return x[:-1] if isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == samples else x


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
    elsewhere: frozenset[int],
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
            if id(use.module) in elsewhere:
                return "the batch is not in dimension 0 of its input"
            if isinstance(use.module, nn.Conv2d) and use.input.dim() != 4:
                return "an unbatched input"
    return None


def _fill(
    part: Grams,
    model: nn.Module,
    owned: Sequence[Layer],
    holders: Mapping[int, list[tuple[nn.Module, str]]],
    counts: Mapping[int, int],
    uses: Sequence[Use],
    gradients: Sequence[Tensor | None],
    outputs: Any,
    inputs: Any,
    elsewhere: frozenset[int],
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
        reason = _reason(layer, holders, counts, by_module, elsewhere, samples)
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
