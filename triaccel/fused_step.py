"""One pass over the parameters for ``torch.optim.SGD`` and ``AdamW``, on the optimizer's own state.

State keeps PyTorch's names, shapes and step counts, so ``optimizer.state_dict()`` loads in plain PyTorch and back; with BF16
momentum PyTorch's ``load_state_dict`` widens it to FP32 exactly, and the next fused step narrows it again, exactly. Step hooks
and LR schedulers see an ordinary step. What the kernels do and cost: ``triaccel.kernels``.
Source: ours; rules after ``torch.optim``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .kernels import AdamWRule, Backend, GradStats, SgdRule, UpdateRule, fused_update_
from .kernels.chunks import flat, same_order
from .types import TriAccelError

__all__ = ["FusedStep", "as_optimizer_step"]


def as_optimizer_step(optimizer: torch.optim.Optimizer, body: Callable[[], None]) -> None:
    """Run ``body`` as if it were ``optimizer.step()``: with its step hooks, and seen by LR schedulers."""
    torch.optim.Optimizer.profile_hook_step(lambda _: body())(optimizer)
    # What a scheduler's wrapper around ``step`` records, to warn when the scheduler steps first.
    optimizer._opt_called = True  # type: ignore[attr-defined]


class FusedStep:
    """Fused updates over the state of ``optimizer``.

    Args:
        optimizer: ``torch.optim.SGD`` or ``AdamW``; subclasses may step otherwise and are refused.
        segment_of: segment (layer) index per parameter, for statistics.
        segment_count: number of segments; parameters without one count in a last, extra segment that is dropped.
        momentum_bf16: keep momentum (AdamW: the first moment) in BF16.
        seed: of stochastic rounding.
        backend: as ``kernels.dispatch``'s ``forced``.

    Raises:
        TriAccelError: another optimizer, or an option that the fused step does not have.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        segment_of: Mapping[nn.Parameter, int],
        segment_count: int,
        momentum_bf16: bool = False,
        seed: int = 0,
        backend: Backend | None = None,
    ) -> None:
        if type(optimizer) not in (torch.optim.SGD, torch.optim.AdamW):
            raise TriAccelError(
                f"engine.fused_update covers torch.optim.SGD and AdamW, not {type(optimizer).__name__}: "
                "switch fused_update off (any optimizer then takes its own step), or use one of the two"
            )
        self.optimizer = optimizer
        self.segment_of = segment_of
        self.segment_count = segment_count
        self.momentum_dtype = torch.bfloat16 if momentum_bf16 else torch.float32
        self.seed = seed
        self.backend = backend
        self.sequence = 0
        self._key: dict[nn.Parameter, int] = {}
        self._dense: set[nn.Parameter] = set()
        self._counted: dict[nn.Parameter, tuple[Tensor, int, int]] = {}
        for group in optimizer.param_groups:
            self._check(group)
        if momentum_bf16 and not any(self._has_momentum(group) for group in optimizer.param_groups):
            raise TriAccelError(
                "engine.momentum_bf16 but SGD has momentum 0: there is nothing to keep in BF16; set a momentum or switch it off"
            )

    def update(
        self,
        *,
        only: tuple[nn.Parameter, dict[str, Any]] | None = None,
        scale_of: Mapping[nn.Parameter, float],
        factor: float,
        found_inf: Tensor | None = None,
        statistics: bool = False,
        extremes: bool = False,
    ) -> GradStats | None:
        """Update the parameters that have a gradient.

        Args:
            only: one parameter and its group; ``None``: all of the optimizer.
            scale_of: dimensionless scale on the rate; absent ones have 1.
            factor: dimensionless factor on every rate.
            found_inf: as in ``kernels.fused_update_``, shape (1,) for all.
            statistics: also return statistics of the gradients per segment.
            extremes: as in ``kernels.grad_stats``.

        Raises:
            TriAccelError: a gradient is sparse or not FP32, or the learning rate is a tensor on a GPU.
        """
        result: GradStats | None = None
        groups = self.optimizer.param_groups if only is None else [only[1]]
        for group in groups:
            self._check(group)
            by_device: dict[torch.device, list[nn.Parameter]] = {}
            for p in group["params"] if only is None else only[:1]:
                if p.grad is not None:
                    by_device.setdefault(p.device, []).append(p)
            for chosen in by_device.values():
                stats = self._update_group(
                    group, chosen, scale_of, factor, found_inf, statistics=statistics, extremes=extremes
                )
                if stats is not None:
                    result = stats if result is None else result.merged(stats)
        return result

    def _update_group(
        self,
        group: dict[str, Any],
        parameters: list[nn.Parameter],
        scale_of: Mapping[nn.Parameter, float],
        factor: float,
        found_inf: Tensor | None,
        *,
        statistics: bool,
        extremes: bool,
    ) -> GradStats | None:
        for p in parameters:
            if p not in self._dense:
                _require_dense(p)
                self._dense.add(p)
        rate = float(group["lr"])
        rule = _rule(group, adam=self._adam)
        first, second, steps = self._state(group, parameters)
        grads = [p.grad for p in parameters if p.grad is not None]
        stats = fused_update_(
            [p.detach() for p in parameters],
            grads,
            first,
            second,
            rule=rule,
            rates=[rate * scale_of.get(p, 1.0) * factor for p in parameters],
            weight_decays=[group["weight_decay"]] * len(parameters),
            steps=steps,
            found_inf=found_inf,
            segments=[self.segment_of.get(p, self.segment_count) for p in parameters] if statistics else None,
            segment_count=self.segment_count + 1,
            extremes=extremes,
            seed=self.seed,
            sequence=self.sequence,
            keys=[self._key_of(p) for p in parameters],
            backend=self.backend,
        )
        # A kernel writes behind autograd's back: say so, so that a graph that still needs the old values raises.
        torch.autograd.graph.increment_version(parameters)
        return None if stats is None else GradStats(stats.values[: self.segment_count])

    @property
    def _adam(self) -> bool:
        return isinstance(self.optimizer, torch.optim.AdamW)

    def _has_momentum(self, group: dict[str, Any]) -> bool:
        return self._adam or group["momentum"] != 0

    def _key_of(self, parameter: nn.Parameter) -> int:
        if parameter not in self._key:
            everything = [p for group in self.optimizer.param_groups for p in group["params"]]
            self._key = {p: i for i, p in enumerate(everything)}
        return self._key[parameter]

    def _check(self, group: dict[str, Any]) -> None:
        for option in ("amsgrad", "differentiable", "capturable"):
            if group.get(option):
                raise TriAccelError(
                    f"engine.fused_update does not have {option}=True: switch fused_update off, or {option}"
                )
        if isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu":
            raise TriAccelError(
                "the learning rate is a tensor on the GPU, which the fused step would have to wait for: give a float, or switch "
                "engine.fused_update off"
            )

    def _state(
        self, group: dict[str, Any], parameters: list[nn.Parameter]
    ) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Moments in the parameters' memory order and the number of this update, created where absent."""
        steps: list[int] = []
        if not self._has_momentum(group):
            return [], [], [1] * len(parameters)
        name = "exp_avg" if self._adam else "momentum_buffer"
        first: list[Tensor] = []
        second: list[Tensor] = []
        for p in parameters:
            state = self.optimizer.state[p]
            fresh = state.get(name) is None
            first.append(_kept(state, name, p, self.momentum_dtype))
            if self._adam:
                second.append(_kept(state, "exp_avg_sq", p, torch.float32))
            else:
                steps.append(1 if fresh else 2)
        return first, second, self._advance(group, parameters) if self._adam else steps

    def _advance(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> list[int]:
        """AdamW's step counts, advanced; a count that lies on the GPU is read only if someone else changed it."""
        tensors: list[Tensor] = []
        steps: list[int] = []
        for p in parameters:
            state = self.optimizer.state[p]
            if "step" not in state:
                state["step"] = torch.zeros(
                    (), dtype=torch.float32, device=p.device if group.get("fused") else "cpu"
                )
                self._counted[p] = (state["step"], state["step"]._version, 0)
            tensor = state["step"]
            known = self._counted.get(p)
            if known is None or known[0] is not tensor or known[1] != tensor._version:
                known = (tensor, tensor._version, int(tensor))
            tensors.append(tensor)
            steps.append(known[2] + 1)
        torch._foreach_add_(tensors, 1.0)
        for p, tensor, step in zip(parameters, tensors, steps, strict=True):
            self._counted[p] = (tensor, tensor._version, step)
        return steps

    def take_back(self, parameters: Sequence[nn.Parameter], *, fresh: Sequence[nn.Parameter] = ()) -> None:
        """Undo the step count of parameters whose update was skipped on the device.

        Args:
            parameters: those skipped.
            fresh: those of them that had no state before this step.
        """
        for p in parameters:
            if p in fresh:
                self.optimizer.state.pop(p, None)
                self._counted.pop(p, None)
            elif "step" in self.optimizer.state[p]:
                self.optimizer.state[p]["step"].sub_(1.0)
                self._counted.pop(p, None)


def _rule(group: dict[str, Any], *, adam: bool) -> UpdateRule:
    if adam:
        beta1, beta2 = group["betas"]
        return AdamWRule(float(beta1), float(beta2), group["eps"], group["maximize"])
    return SgdRule(group["momentum"], group["dampening"], group["nesterov"], group["maximize"])


def _require_dense(parameter: nn.Parameter) -> None:
    if flat(parameter.detach()).data_ptr() != parameter.data_ptr():
        raise TriAccelError(
            f"a parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} does not fill one run of memory: "
            "make it contiguous, or switch engine.fused_update off"
        )


def _kept(state: dict[str, Any], name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A moment in ``dtype`` and the parameter's memory order, created, converted or reordered in the state where need be."""
    moment: Tensor | None = state.get(name)
    if moment is None:
        moment = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    elif moment.dtype != dtype or moment.stride() != parameter.stride():
        moment = same_order(moment.to(dtype), parameter.detach())
    state[name] = moment
    return moment
