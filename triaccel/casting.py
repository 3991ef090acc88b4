"""A precision map put on a model, and taken off again.

Parameters, gradients and optimizer state stay FP32; a layer's *compute* format is an autocast region. The forward runs in an
outer region at the lowest format of the map, so functional operations keep PyTorch's promotion rules: a residual add or a
``cat`` of two formats gives the wider one; ``matmul`` and attention take their operands to the outer format. Only layers that
differ from it get a region of their own (``regions``), an FP32 layer also takes its input up, and what leaves the model is
FP32. Normalisation and elementwise modules follow their input; a pinned one is in the map and gets its format.

What really ran is looked at in the first forward of each map: ``verified`` holds output dtypes, ``mismatches()`` the layers
whose operation ignored the region (``Embedding``, RNNs on a CPU). With an all-FP32 map nothing is installed.
Cost: one autocast region (about 5 µs) per layer that differs from the outer format. Source: ours (DESIGN section 6).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .layers import Layer
from .regions import Installed, autocast_format, install_map, outer_format, output_format, restore_map
from .types import Precision, TriAccelError

__all__ = ["Caster"]


class Caster:
    """Puts precision maps on ``model``.

    Args:
        model: any module, compiled or not.
        layers: its layers.
        device_type: ``"cpu"`` or ``"cuda"``.

    Attributes:
        verified: output dtype that each layer really had in the first forward of the current map, in order of execution.
        version: version of the map in force, -1 for none.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], *, device_type: str) -> None:
        self._model = model
        self._root = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        self._layers = {layer.name: layer for layer in layers}
        self._device_type = device_type
        self._map: dict[str, Precision] = {}
        self._outer = Precision.FP32
        self._installed: Installed = []
        self._unverified = False
        self.verified: dict[str, torch.dtype] = {}
        self.version = -1

    def apply(self, precision_map: Mapping[str, Precision], *, version: int) -> None:
        """Replace the map in force.

        Args:
            precision_map: format per layer name; layers left out run in the outer region. Normalisation layers and modules
                with parameters of their own get a region only when they are named here.
            version: number of the map; a new one is verified in its first forward.

        Raises:
            TriAccelError: a name is no layer of this model.
        """
        if unknown := sorted(set(precision_map) - set(self._layers)):
            raise TriAccelError(
                f"the precision map names {unknown[:3]}, which are no layers of this model; "
                "use the names that find_layers gives for it"
            )
        self.remove()
        if version != self.version or dict(precision_map) != self._map:
            self.verified = {}
            self._unverified = True
        self._map = {name: Precision(precision) for name, precision in precision_map.items()}
        self._outer = outer_format(self._map)
        self.version = version
        if self._outer is not Precision.FP32:
            modules = {name: (layer.module, layer.info.role) for name, layer in self._layers.items()}
            self._installed = install_map(self._root, modules, self._map, device_type=self._device_type)

    def remove(self) -> None:
        """Leave the model exactly as found; ``apply`` puts a map on again."""
        restore_map(self._installed)
        self._outer = Precision.FP32

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Region for the model's calls: the lowest format of the map, none (also not the caller's) if all layers are FP32."""
        with ExitStack() as stack:
            if self._outer is not Precision.FP32:
                stack.enter_context(
                    torch.autocast(self._device_type, dtype=self._outer.torch_dtype, cache_enabled=False)
                )
            elif autocast_format(self._device_type) != torch.float32:
                stack.enter_context(torch.autocast(self._device_type, enabled=False))
            if self._unverified:
                stack.enter_context(self._verification())
            yield

    def mismatches(self) -> tuple[str, ...]:
        """Layers whose output was not in the format that the map asks for."""
        return tuple(
            name
            for name, dtype in self.verified.items()
            if name in self._map and dtype != self._map[name].torch_dtype
        )

    # ---------------------------------------------------------------- inside

    @contextmanager
    def _verification(self) -> Iterator[None]:
        """Look at the output of every layer, eagerly: hooks must not become part of compiled code."""
        compiled = self._model is not self._root or any(
            module._compiled_call_impl is not None for module in self._root.modules()
        )
        if compiled and self._outer is Precision.FP32:
            self._unverified = False  # nothing was asked of it, and its first step stays the compiled one
            yield
            return
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for layer in self._layers.values():
                handle = layer.module.register_forward_hook(self._look(layer.name))
                stack.callback(handle.remove)
            yield
        self._unverified = not self.verified

    def _look(self, name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            dtype = output_format(output)
            if dtype is None:
                return
            wanted = self._map.get(name)
            if name not in self.verified or (wanted is not None and dtype != wanted.torch_dtype):
                self.verified[name] = dtype

        return hook
