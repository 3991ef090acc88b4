"""Per-layer learning rates on any ``torch.optim`` optimizer, without changing anything that is the user's.

For one update each of the user's ``param_groups`` is split into temporary groups of parameters with equal scale,

    lr of a parameter = lr of its group x scale of its layer x factor,

over the same state; the optimizer steps once, and the user's list comes back in ``finally``. So LR schedulers, closures, hooks,
``capturable``/``foreach``/``fused`` flags and ``state_dict()`` are plain PyTorch's before and after. Cost: one small dict per
distinct scale; with no scale and factor 1 it is ``optimizer.step()`` itself, bit for bit.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .config import EngineConfig
from .layers import Layer
from .types import TriAccelError

__all__ = ["Updater", "scaled_groups"]

_PER_PARAMETER = ("params", "param_names")


def scaled_groups(
    groups: Sequence[dict[str, Any]], *, scale_of: Mapping[nn.Parameter, float], factor: float
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Temporary groups with scaled rates.

    Args:
        groups: ``optimizer.param_groups``; left as they are.
        scale_of: dimensionless scale per parameter; absent parameters have scale 1.
        factor: common factor on every rate.

    Returns:
        Pairs ``(temporary group, the user's group that it came from)``, one per distinct scale in each group.
    """
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in groups:
        members: dict[float, list[int]] = {}
        for position, parameter in enumerate(group["params"]):
            members.setdefault(scale_of.get(parameter, 1.0) * factor, []).append(position)
        for rate, positions in members.items():
            part = dict(group)
            for key in _PER_PARAMETER:
                if key in group:
                    part[key] = [group[key][p] for p in positions]
            # A tensor rate gives a new tensor: the user's own is never written.
            part["lr"] = group["lr"] if rate == 1.0 else group["lr"] * rate
            pairs.append((part, group))
        if not members:
            pairs.append((dict(group), group))
    return pairs


class Updater:
    """Applies the update of one step with a rate per layer.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        layers: layers of the model; parameters that no layer owns have scale 1.
        engine: what the engine saves: fused update, gradient release, BF16 momentum.
        seed: seed of stochastic rounding.

    Raises:
        TriAccelError: the engine cannot go with this optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layers: Sequence[Layer],
        *,
        engine: EngineConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.optimizer = optimizer
        self.layers = tuple(layers)
        self.engine = engine or EngineConfig()
        self.seed = seed
        self._layer_of = {p: layer.name for layer in self.layers for p in layer.parameters}

    @property
    def releases(self) -> bool:
        """Whether updates run during backward."""
        return self.engine.gradient_release

    @property
    def released(self) -> bool:
        """Whether any parameter was updated in backward since ``begin_step``."""
        return False

    @property
    def found_inf(self) -> tuple[str, ...]:
        """Layers of which a parameter was skipped in this step for a non-finite gradient, nearest the loss first."""
        return ()

    def step(
        self, *, scales: Mapping[str, float], factor: float = 1.0, closure: Callable[[], Any] | None = None
    ) -> None:
        """Update the parameters.

        Args:
            scales: dimensionless scale on the rate per layer name; absent layers have 1.
            factor: dimensionless factor on every rate.
            closure: passed on to ``optimizer.step``.

        Raises:
            TriAccelError: a scale belongs to no layer, or the optimizer keeps one state for all parameters.
        """
        scale_of = self._scale_of(scales)
        if factor == 1.0 and not any(scale != 1.0 for scale in scale_of.values()):
            self._plain_step(closure)
            return
        self._scaled_step(scale_of, factor, closure)

    def _scale_of(self, scales: Mapping[str, float]) -> dict[nn.Parameter, float]:
        if not scales:
            return {}
        if unknown := set(scales).difference(layer.name for layer in self.layers):
            raise TriAccelError(
                f"rate scales name {sorted(unknown)}, which are no layers of this model; use the names of find_layers()"
            )
        return {p: scales[name] for p, name in self._layer_of.items() if name in scales}

    def _plain_step(self, closure: Callable[[], Any] | None) -> None:
        if closure is None:
            self.optimizer.step()
        else:
            self.optimizer.step(closure)

    def _scaled_step(
        self, scale_of: Mapping[nn.Parameter, float], factor: float, closure: Callable[[], Any] | None
    ) -> None:
        optimizer = self.optimizer
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TriAccelError(
                "LBFGS keeps one curvature history for all parameters and takes a single group: it cannot have a rate per "
                "layer; switch curvature and the batch rule off, or use another optimizer"
            )
        own = optimizer.param_groups
        pairs = scaled_groups(own, scale_of=scale_of, factor=factor)
        before = [dict(group) for group in own]
        optimizer.param_groups = [part for part, _ in pairs]
        try:
            self._plain_step(closure)
        finally:
            optimizer.param_groups = own
        for group, old in zip(own, before, strict=True):
            _write_back(group, old, [part for part, source in pairs if source is group])

    def state_dict(self) -> dict[str, Any]:
        """Extras of the engine; the optimizer's own state is ``optimizer.state_dict()``."""
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.seed = state["seed"]


def _write_back(group: dict[str, Any], old: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """Keep what the optimizer itself wrote into its groups (a step count, an accumulated weight)."""
    for key in parts[0]:
        if key in _PER_PARAMETER or key == "lr":
            continue
        news = [part.get(key) for part in parts]
        if all(new is old.get(key) for new in news):
            continue
        if any(type(new) is not type(news[0]) or bool(new != news[0]) for new in news[1:]):
            raise TriAccelError(
                f"the optimizer keeps a value {key!r} per parameter group that depends on the learning rate; with a rate per "
                f"layer it came out as {news}: switch curvature off, or use an optimizer that keeps its state per parameter"
            )
        group[key] = news[0]
