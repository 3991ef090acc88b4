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
from torch import Tensor, nn

from .config import EngineConfig
from .fused_step import FusedStep, as_optimizer_step
from .kernels import Backend, GradStats, grad_stats
from .layers import Layer
from .release import GradientRelease, refuse_release
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

        updater.begin_step(scales=..., factor=...)      # needed with gradient release only
        loss.backward()
        updater.step(scales=..., factor=...)

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        layers: layers of the model; parameters that no layer owns have scale 1.
        engine: what the engine saves: fused update, gradient release, BF16 momentum.
        seed: seed of stochastic rounding.
        clipping: the caller clips by the global norm.
        accumulation: the caller adds up gradients of several backward passes.
        oom_retry: the caller repeats a step that ran out of memory.
        backend: as ``kernels.dispatch``'s ``forced``.

    Raises:
        TriAccelError: the engine cannot go with this optimizer, or with what the caller does.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layers: Sequence[Layer],
        *,
        engine: EngineConfig | None = None,
        seed: int = 0,
        clipping: bool = False,
        accumulation: bool = False,
        oom_retry: bool = False,
        backend: Backend | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.layers = tuple(layers)
        self.engine = engine or EngineConfig()
        self.seed = seed
        self._sequence = 0
        self._layer_of = {p: layer.name for layer in self.layers for p in layer.parameters}
        self._segment_of = {p: i for i, layer in enumerate(self.layers) for p in layer.parameters}
        self._stats: GradStats | None = None
        self._skipped: tuple[nn.Parameter, ...] = ()
        self._released = False
        self._fused: FusedStep | None = None
        if self.engine.fused_update:
            self._fused = FusedStep(
                optimizer,
                segment_of=self._segment_of,
                segment_count=len(self.layers),
                momentum_bf16=self.engine.momentum_bf16,
                seed=seed,
                backend=backend,
            )
        self._release: GradientRelease | None = None
        if self.engine.gradient_release:
            refuse_release(clipping=clipping, accumulation=accumulation, oom_retry=oom_retry)
            self._release = self._install_release()

    @property
    def releases(self) -> bool:
        """Whether updates run during backward."""
        return self._release is not None

    @property
    def released(self) -> bool:
        """Whether any parameter was updated, or skipped as non-finite, during backward since ``begin_step``."""
        return self._released or (self._release is not None and bool(self._release.arrived))

    @property
    def found_inf(self) -> tuple[str, ...]:
        """Under release: layers of which a parameter was skipped as non-finite in the last step, nearest the loss first."""
        names = (self._layer_of.get(p) for p in self._skipped)
        return tuple(dict.fromkeys(name for name in names if name is not None))

    @property
    def skipped_parameters(self) -> tuple[str, ...]:
        """Under release: names of those parameters."""
        return tuple(self._names[p] for p in self._skipped)

    @property
    def gradient_stats(self) -> GradStats | None:
        """Statistics per layer, in the order of ``layers``, of the last step that was asked for them."""
        return self._stats

    def begin_step(
        self,
        *,
        scales: Mapping[str, float],
        factor: float = 1.0,
        statistics: bool = False,
        extremes: bool = False,
        loss_scale: float | None = None,
        micro_batches: int = 1,
    ) -> None:
        """Before backward: with gradient release, from here to ``step`` each gradient is applied as it arrives.

        Args:
            scales: as in ``step``.
            factor: as in ``step``.
            statistics: read statistics of each gradient before it is gone.
            extremes: as in ``kernels.grad_stats``.
            loss_scale: the loss scale in force, if any.
            micro_batches: backward passes of this step.

        Raises:
            TriAccelError: release cannot go with that loss scale or accumulation, or a step hook wants all gradients.
        """
        self._released = False
        self._skipped = ()
        if self._release is None:
            return
        refuse_release(loss_scaling=loss_scale not in (None, 1.0), accumulation=micro_batches > 1)
        if self.optimizer._optimizer_step_pre_hooks or (
            self._fused is None and self.optimizer._optimizer_step_post_hooks
        ):
            raise TriAccelError(
                "the optimizer has step hooks, which gradient release would run without the gradients, or once for every "
                "parameter: remove them, or switch engine.gradient_release off"
            )
        self._rates = self._scale_of(scales), factor
        self._group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        self._stats = None
        self._wanted = statistics, extremes
        self._advance()
        self._release.arm()

    def step(
        self,
        *,
        scales: Mapping[str, float],
        factor: float = 1.0,
        closure: Callable[[], Any] | None = None,
        found_inf: Tensor | None = None,
        statistics: bool = False,
        extremes: bool = False,
    ) -> None:
        """Update the parameters; with gradient release, finish the step that ``begin_step`` began.

        Args:
            scales: dimensionless scale on the rate per layer name; absent layers have 1.
            factor: dimensionless factor on every rate.
            closure: passed on to ``optimizer.step``.
            found_inf: float32 of shape (1,) on the parameters' device; where it is not 0 the fused update writes nothing.
            statistics: also read statistics of the gradients (``gradient_stats``);
                the fused update on a GPU has them for nothing.
            extremes: as in ``kernels.grad_stats``.

        Raises:
            TriAccelError: a scale belongs to no layer, the optimizer keeps one state for all parameters, or release is on and
                ``begin_step`` was not called.
        """
        scale_of = self._scale_of(scales)
        if self._release is not None:
            self._finish_release(scale_of, factor, closure)
            return
        self._advance()
        self._stats = None
        if self._fused is not None:
            fused = self._fused
            if closure is not None:
                with torch.enable_grad():
                    closure()

            def body() -> None:
                self._stats = fused.update(
                    scale_of=scale_of,
                    factor=factor,
                    found_inf=found_inf,
                    statistics=statistics,
                    extremes=extremes,
                )

            as_optimizer_step(self.optimizer, body)
            return
        if found_inf is not None:
            raise TriAccelError(
                "found_inf on the device needs engine.fused_update: an optimizer's own step cannot be stopped from there; "
                "read it on the host and leave out the call, or switch fused_update on"
            )
        if statistics:
            self._stats = self._read([p for p in self._parameters if p.grad is not None], extremes=extremes)
        self._ordinary_step(scale_of, factor, closure)

    # ---------------------------------------------------------------- gradient release

    def _install_release(self) -> GradientRelease:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise TriAccelError(
                "LBFGS needs all gradients at once: switch engine.gradient_release off, or use another optimizer"
            )
        return GradientRelease(
            self._parameters,
            names=self._names,
            update=self._update_one,
            on_device=self._fused is not None,
        )

    def _update_one(self, parameter: nn.Parameter, flag: Tensor | None) -> None:
        scale_of, factor = self._rates
        statistics, extremes = self._wanted
        stats: GradStats | None = None
        if self._fused is not None:
            if not self.optimizer.state.get(parameter):
                self._fresh.add(parameter)
            stats = self._fused.update(
                only=(parameter, self._group_of[parameter]),
                scale_of=scale_of,
                factor=factor,
                found_inf=flag,
                statistics=statistics,
                extremes=extremes,
            )
        else:
            if statistics:
                stats = self._read([parameter], extremes=extremes)
            self._step_alone(parameter, scale_of.get(parameter, 1.0) * factor)
        if stats is not None:
            self._stats = stats if self._stats is None else self._stats.merged(stats)

    def _step_alone(self, parameter: nn.Parameter, rate: float) -> None:
        """The optimizer's own step on one parameter."""
        own = self.optimizer.param_groups
        group = self._group_of[parameter]
        ((part, _),) = scaled_groups([{**group, **_only(group, parameter)}], scale_of={}, factor=rate)
        self.optimizer.param_groups = [part]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = own
        for key, value in part.items():
            if key not in (*_PER_PARAMETER, "lr") and value is not group[key]:
                raise TriAccelError(
                    f"the optimizer changes {key!r} of its parameter group in each step, which gradient release would do "
                    "once for every parameter: switch engine.gradient_release off, or use another optimizer"
                )

    def _finish_release(
        self, scale_of: Mapping[nn.Parameter, float], factor: float, closure: Callable[[], Any] | None
    ) -> None:
        release = self._release
        assert release is not None
        if closure is not None:
            raise TriAccelError(
                "gradient release has updated the parameters in backward and takes no closure: call backward before step"
            )
        if not release.armed:
            raise TriAccelError(
                "engine.gradient_release needs begin_step(scales=..., factor=...) before backward: call it once a step, or "
                "switch gradient_release off"
            )
        self._released = bool(release.arrived)
        self._skipped = release.disarm()
        if self._fused is not None:
            self._fused.take_back(
                [p for p in self._skipped if self.optimizer.state.get(p)], fresh=tuple(self._fresh)
            )
        left = [p for p in self._parameters if p.grad is not None]
        if left and self._fused is not None:
            self._fused.update(scale_of=scale_of, factor=factor)
        elif left:
            self._ordinary_step(scale_of, factor, None)
        as_optimizer_step(self.optimizer, lambda: None)

    # ---------------------------------------------------------------- the optimizer's own step

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def _names(self) -> dict[nn.Parameter, str]:
        names = {p: f"parameter {i} of the optimizer" for i, p in enumerate(self._parameters)}
        for layer in self.layers:
            names.update(zip(layer.parameters, layer.parameter_names, strict=True))
        return names

    def _advance(self) -> None:
        """Number of this optimizer step, on which stochastic rounding depends."""
        self._sequence += 1
        self._fresh: set[nn.Parameter] = set()
        if self._fused is not None:
            self._fused.sequence = self._sequence

    def _read(self, parameters: Sequence[nn.Parameter], *, extremes: bool) -> GradStats:
        owned = [p for p in parameters if p in self._segment_of]
        return grad_stats(
            [p.grad for p in owned if p.grad is not None],
            [self._segment_of[p] for p in owned],
            segment_count=len(self.layers),
            extremes=extremes,
        )

    def _ordinary_step(
        self, scale_of: Mapping[nn.Parameter, float], factor: float, closure: Callable[[], Any] | None
    ) -> None:
        if factor == 1.0 and not any(scale != 1.0 for scale in scale_of.values()):
            self._plain_step(closure)
        else:
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
        return {"seed": self.seed, "sequence": self._sequence}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.seed = state["seed"]
        self._sequence = state["sequence"]
        if self._fused is not None:
            self._fused.seed = self.seed


def _only(group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """The entries of ``group`` that are lists over parameters, cut down to one."""
    position = next(i for i, p in enumerate(group["params"]) if p is parameter)
    return {key: [group[key][position]] for key in _PER_PARAMETER if key in group}


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
