"""One dynamic loss scale for all FP16 layers (arXiv 1710.03740), with a floor.

The loss is multiplied by ``value`` in FP32, gradients are divided by it before anything reads them. A step with a non-finite
gradient is skipped and backs the scale off, down to the floor and no further: from there on it is the precision policy that
promotes the layer that overflows. Powers of two scale exactly. Cost: one multiplication of every gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .config import LossScaleConfig

__all__ = ["LossScaler"]

_LARGEST = float(torch.finfo(torch.float32).max)


class LossScaler:
    """Scale of the loss while a layer runs in FP16.

    Attributes:
        value: the scale in force, dimensionless.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self._config = config
        self._clean_steps = 0
        self.value = config.initial

    @property
    def at_floor(self) -> bool:
        """Whether the scale can be backed off no further."""
        return self.value <= self._config.floor

    def scale(self, loss: Tensor) -> Tensor:
        """``loss``, any shape and format, as FP32 times ``value``."""
        return loss.float() * self.value

    def unscale_(self, parameters: Iterable[Tensor]) -> None:
        """Divide every ``.grad`` by ``value``, in place; non-finite entries stay non-finite.

        Args:
            parameters: those whose gradients came from a scaled loss; ones without a gradient are passed over.
        """
        dense: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                grad = parameter.grad
                dense.append(grad._values() if grad.is_sparse else grad)
        if dense and self.value != 1.0:
            with torch.no_grad():
                torch._foreach_mul_(dense, 1.0 / self.value)

    def update(self, *, found_inf: bool) -> None:
        """Back off after an overflow; grow after ``growth_interval`` steps without one.

        Args:
            found_inf: whether this step had a non-finite gradient (and was skipped).
        """
        config = self._config
        if found_inf:
            self.value = max(config.floor, self.value * config.backoff)
            self._clean_steps = 0
            return
        self._clean_steps += 1
        if self._clean_steps >= config.growth_interval:
            self._clean_steps = 0
            grown = self.value * config.growth
            if math.isfinite(grown) and grown <= _LARGEST:
                self.value = grown

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"value": self.value, "clean_steps": self._clean_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of ``state_dict``."""
        self.value = float(state["value"])
        self._clean_steps = int(state["clean_steps"])
