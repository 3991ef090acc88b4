"""Which modules of a model are layers, which parameters each owns, what is pinned and what is tied.

A layer is the smallest module with a rule of its own: every ``Linear``, convolution, ``Embedding``; a whole
``nn.MultiheadAttention`` (it never calls ``out_proj.forward``) and a whole RNN; every normalisation module; and whatever
other module owns parameters directly (a ViT's class token belongs to its root). Each trainable parameter belongs to
exactly one layer: a tied weight to the first module that holds it, and the others say so in ``LayerInfo.tied_to``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from .types import LayerInfo, Precision, Role, TriAccelError

__all__ = ["Layer", "find_layers"]

_WHOLE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_COMPUTE = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.modules.conv._ConvNd,
    *_WHOLE,
)
_NORM = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A layer bound to its module.

    Attributes:
        info: what policies see.
        module: the module.
        parameters: trainable parameters owned by the layer (may be empty: frozen, or all tied to earlier layers).
        parameter_names: their names in ``model.named_parameters()``, same order.
    """

    info: LayerInfo
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    parameter_names: tuple[str, ...]

    @property
    def name(self) -> str:
        """``info.name``."""
        return self.info.name


def _role(module: nn.Module) -> Role:
    if isinstance(module, _COMPUTE):
        return "compute"
    return "norm" if isinstance(module, _NORM) else "other"


def find_layers(model: nn.Module, pin: Mapping[str, Precision] | None = None) -> tuple[Layer, ...]:
    """Layers of ``model`` in ``named_modules()`` order.

    Args:
        model: any module; modules and parameters used twice count once.
        pin: name patterns (``fnmatch``) to the format that matching layers must keep. A later pattern overrides an earlier one.

    Returns:
        One ``Layer`` for each module with direct parameters, frozen or not, except those inside a layer that is taken whole.

    Raises:
        TriAccelError: a pattern matches no layer, or tied layers are pinned to two formats.

    Source: ours.
    """
    found: list[tuple[str, nn.Module, list[tuple[str, nn.Parameter]]]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        whole = isinstance(module, _WHOLE)
        if whole:
            inside.update(id(m) for m in module.modules())
        own = [
            (f"{name}.{p}" if name else p, parameter)
            for p, parameter in module.named_parameters(recurse=whole, remove_duplicate=False)
        ]
        if own or isinstance(module, _NORM):
            found.append((name, module, own))

    pins = _match_pins([name for name, *_ in found], pin or {})
    owner: dict[int, str] = {}
    layers: list[Layer] = []
    for index, (name, module, own) in enumerate(found):
        mine: list[tuple[str, nn.Parameter]] = []
        tied_to: str | None = None
        for parameter_name, parameter in own:
            first = owner.setdefault(id(parameter), name)
            if first != name:
                tied_to = tied_to or first
            elif parameter.requires_grad and all(parameter is not p for _, p in mine):
                mine.append((parameter_name, parameter))
        info = LayerInfo(
            name=name,
            kind=type(module).__name__,
            role=_role(module),
            index=index,
            numel=sum(p.numel() for _, p in mine),
            pin=pins.get(name),
            tied_to=tied_to,
        )
        layers.append(Layer(info, module, tuple(p for _, p in mine), tuple(n for n, _ in mine)))
    _check_tied_pins([layer.info for layer in layers])
    return tuple(layers)


def _match_pins(names: list[str], pin: Mapping[str, Precision]) -> dict[str, Precision]:
    pins: dict[str, Precision] = {}
    for pattern, precision in pin.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            shown = ", ".join(repr(n) for n in names[:8]) + (", ..." if len(names) > 8 else "")
            raise TriAccelError(
                f"precision.pin pattern {pattern!r} matches no layer of this model; layers are {shown}"
            )
        pins.update(dict.fromkeys(matched, Precision(precision)))
    return pins


def _check_tied_pins(infos: list[LayerInfo]) -> None:
    by_name = {info.name: info for info in infos}
    for info in infos:
        first = by_name.get(info.tied_to) if info.tied_to else None
        if first and info.pin and first.pin and info.pin != first.pin:
            raise TriAccelError(
                f"layers {first.name!r} and {info.name!r} share a parameter but are pinned to {first.pin} and {info.pin}: "
                "tied layers share one precision; pin one of them, or both to the same format"
            )
