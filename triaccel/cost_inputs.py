"""Example batches of any size, and a model that is as before after it was run on them. Source: ours."""

from __future__ import annotations

import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .regions import map_tensors
from .types import TriAccelError

__all__ = ["all_tensors", "batch_length", "call_model", "device_name", "resize", "undisturbed"]


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers, RNG and modes as before on exit; no garbage collection in between."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    modes = [(module, module.training) for module in model.modules()]
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
            yield
    finally:
        if collecting:
            gc.enable()
        with torch.no_grad():
            for module, name, buffer, saved in buffers:
                module._buffers[name] = buffer.copy_(saved)
        for module, mode in modes:
            module.training = mode


def all_tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, look)
    return found


def batch_length(inputs: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one.

    Raises:
        TriAccelError: there is none.
    """
    for tensor in all_tensors(inputs):
        if tensor.dim():
            return tensor.shape[0]
    raise TriAccelError(
        f"the example batch ({type(inputs).__name__}) holds no tensor with a sample dimension: costs cannot be measured on it; "
        "give a tensor, or a tuple or dict of tensors with samples first"
    )


def resize(inputs: Any, size: int) -> Any:
    """``inputs`` with ``size`` samples, repeated in turn or cut; tensors of another length stay."""
    length = batch_length(inputs)
    if size == length:
        return inputs

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != length:
            return tensor
        index = torch.arange(size, device=tensor.device) % length
        picked = tensor[index]
        if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
            picked = picked.contiguous(memory_format=torch.channels_last)
        return picked

    return map_tensors(inputs, change)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """``model(**inputs)`` for a dict, ``model(*inputs)`` for a tuple or list, ``model(inputs)`` otherwise."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def device_name(device: torch.device) -> str:
    """What measurements belong to: the GPU, or the CPU and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
