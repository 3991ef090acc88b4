"""Gradient release: each parameter is updated as its gradient arrives in backward, and the gradient is freed.

At most a few gradients are alive at a time, so the peak falls by nearly the bytes of all gradients (4 per parameter). It
changes the order of the work, not the result: weights are those of an update after backward, bit for bit, as each
parameter's update depends on its own gradient alone. Whatever needs all gradients first (clipping by the global norm, a loss
scale that may have overflowed), or a second look at them (accumulation, a retry after out-of-memory), is refused.

A non-finite gradient skips that parameter only. On CPU, and with an optimizer's own step, this is decided on the host; the
fused step on a GPU decides on the device, and the one host sync is at the end of the step.
Source: post-accumulate hooks after PyTorch's tutorial "optimizer step in backward"; the rest ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .types import TriAccelError

__all__ = ["GradientRelease", "refuse_release"]

UpdateOne = Callable[[nn.Parameter, Tensor | None], None]


def refuse_release(
    *, loss_scaling: bool = False, clipping: bool = False, accumulation: bool = False, oom_retry: bool = False
) -> None:
    """Say what gradient release cannot go with.

    Raises:
        TriAccelError: for the first of the four that is asked for.
    """
    reasons = {
        "an active loss scaler (weights move before an overflow is seen); keep fp16 out of precision.ladder": loss_scaling,
        "clipping by the global norm (it is known only after all gradients are); set max_grad_norm to None": clipping,
        "gradient accumulation (the gradients of earlier micro-batches are gone); use one micro-batch a step": accumulation,
        "a retry after out-of-memory (part of the weights has moved); set batch.rule to 'off'": oom_retry,
    }
    for reason, asked in reasons.items():
        if asked:
            raise TriAccelError(
                f"engine.gradient_release cannot go with {reason}, or switch gradient_release off"
            )


class GradientRelease:
    """Hooks that update and free, active between ``arm`` and ``disarm`` only, so that probes and evaluation are untouched.

    Args:
        parameters: parameters of the optimizer.
        names: name of each, for messages.
        update: updates one parameter from its ``.grad``; its second argument is a flag on the device, shape (1,), that
            must stop it where not 0, or ``None``.
        on_device: decide about non-finite gradients on the device, where ``update`` honours the flag.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        names: Mapping[nn.Parameter, str],
        update: UpdateOne,
        on_device: bool,
    ) -> None:
        self._names = names
        self._update = update
        self._on_device = on_device
        self._index = {p: i for i, p in enumerate(parameters)}
        self._armed = False
        # A dict keeps the order of arrival.
        self._arrived: dict[nn.Parameter, None] = {}
        self._skipped: set[nn.Parameter] = set()
        self._flags: dict[torch.device, Tensor] = {}
        self._handles: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]
            for p in parameters
            if p.requires_grad
        ]

    @property
    def armed(self) -> bool:
        """Whether gradients are released now."""
        return self._armed

    @property
    def arrived(self) -> tuple[nn.Parameter, ...]:
        """Parameters whose gradient came since ``arm``, in that order: nearest the loss first."""
        return tuple(self._arrived)

    def arm(self) -> None:
        """Release gradients from now on."""
        self._arrived.clear()
        self._skipped.clear()
        for flags in self._flags.values():
            flags.zero_()
        self._armed = True

    def disarm(self) -> tuple[nn.Parameter, ...]:
        """Stop, and tell which parameters were skipped for a non-finite gradient, in order of arrival."""
        self._armed = False
        flagged = {device: flags.tolist() for device, flags in self._flags.items()} if self._arrived else {}
        skipped = set(self._skipped)
        for p in self._arrived:
            if p.device in flagged and flagged[p.device][self._index[p]]:
                skipped.add(p)
        return tuple(p for p in self._arrived if p in skipped)

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, parameter: Tensor) -> None:
        if not self._armed or not isinstance(parameter, nn.Parameter) or parameter.grad is None:
            return
        if parameter in self._arrived:
            raise TriAccelError(
                f"parameter {self._names.get(parameter, '?')!r} got a second gradient in one step and has been updated "
                "with the first: gradient release cannot go with accumulation or a second backward; call begin_step before and "
                "step after each backward, or switch engine.gradient_release off"
            )
        self._arrived[parameter] = None
        with torch.no_grad():
            if self._on_device and parameter.device.type == "cuda":
                self._update(parameter, self._flag(parameter))
            elif finite(parameter.grad):
                self._update(parameter, None)
            else:
                self._skipped.add(parameter)
        parameter.grad = None

    def _flag(self, parameter: nn.Parameter) -> Tensor:
        device = parameter.device
        if device not in self._flags:
            self._flags[device] = torch.zeros(len(self._index), device=device)
        index = self._index[parameter]
        flag = self._flags[device][index : index + 1]
        assert parameter.grad is not None
        torch._amp_foreach_non_finite_check_and_unscale_(
            [parameter.grad], flag, torch.ones((), device=device)
        )
        return flag


def finite(gradient: Tensor) -> bool:
    """Whether all entries are finite: one read, as a sum with one infinite or NaN entry is itself infinite or NaN."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    # A sum of finite entries may overflow as well: then look again.
    return math.isfinite(float(gradient.sum())) or bool(gradient.isfinite().all())
