"""One module in one compute format: a replacement ``forward`` that opens an autocast region and puts it away again.

The replacement is a bound method in the instance's ``__dict__``: parameters, buffers, hooks and ``state_dict`` names stay as
they are, ``copy.deepcopy`` binds it to the copy, and pickling leaves it out. It acts only inside the region that it was made
for (``surrounding``): outside ``Caster.forward``, or in an autocast region that the user opened within the model, the module
runs as the user wrote it. Equal formats share one function, so ``torch.compile`` finds code that it compiled for an earlier map.
Cost: about 5 µs a call. Source: ours.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .types import Precision, Role

__all__ = [
    "autocast_format",
    "install_map",
    "map_tensors",
    "outer_format",
    "output_format",
    "raised",
    "replace_forward",
    "restore_forward",
    "restore_map",
]

Installed = list[tuple[nn.Module, Any]]

_LOW = (torch.float16, torch.bfloat16)
_FORWARD = "forward"


def autocast_format(device_type: str) -> torch.dtype:
    """Format of the autocast region in force on ``device_type``; ``torch.float32`` where there is none."""
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return torch.float32


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to each tensor in tuples, lists, dicts and dataclasses; itself if nothing changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, nn.utils.rnn.PackedSequence):
        data = change(value.data)
        return value if data is value.data else value._replace(data=data)
    if isinstance(value, tuple | list):
        items = [map_tensors(item, change) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        parts = {name: map_tensors(getattr(value, name), change) for name in names}
        if all(parts[name] is getattr(value, name) for name in names):
            return value
        return dataclasses.replace(value, **parts)
    if isinstance(value, dict):
        entries = {key: map_tensors(item, change) for key, item in value.items()}
        if all(entries[key] is value[key] for key in value):
            return value
        return entries if type(value) is dict else type(value)(entries)
    return value


def _raise(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor


def raised(value: Any) -> Any:
    """``value`` with FP16 and BF16 tensors as FP32; all else untouched."""
    return map_tensors(value, _raise)


def output_format(value: Any) -> torch.dtype | None:
    """Dtype of the first floating tensor in a module's output, ``None`` when it has none."""
    found: list[torch.dtype] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append(tensor.dtype)
        return tensor

    map_tensors(value, look)
    return found[0] if found else None


def replace_forward(
    module: nn.Module,
    *,
    dtype: torch.dtype | None,
    surrounding: torch.dtype,
    device_type: str,
    norm: bool = False,
    output_fp32: bool = False,
) -> Any:
    """Let ``module`` compute in ``dtype`` wherever the autocast region in force is ``surrounding``.

    Args:
        module: any module.
        dtype: compute format; ``torch.float32`` also takes FP16 and BF16 inputs up; ``None`` keeps the surrounding one.
        surrounding: format of the region that the module is called in (``torch.float32``: none).
        device_type: ``"cpu"`` or ``"cuda"``.
        norm: the module normalises: input and output are in ``dtype``, its statistics stay as PyTorch takes them.
        output_fp32: FP16 and BF16 outputs leave as FP32 (the root of a model).

    Returns:
        What ``restore_forward`` needs.
    """
    before = module.__dict__.get(_FORWARD)
    if before is None:
        original: Callable[..., Any] = type(module).forward
    elif isinstance(before, MethodType) and before.__self__ is module:
        original = before.__func__
    else:
        original = functools.partial(_call_unbound, before)
    function = _replacement(original, dtype, surrounding, device_type, norm, output_fp32)
    module.__dict__[_FORWARD] = MethodType(function, module)
    return before


def restore_forward(module: nn.Module, before: Any) -> None:
    """Undo ``replace_forward``; replacements are undone in reverse order."""
    if before is None:
        module.__dict__.pop(_FORWARD, None)
    else:
        module.__dict__[_FORWARD] = before


def _call_unbound(function: Callable[..., Any], _module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _replacement(
    original: Callable[..., Any],
    dtype: torch.dtype | None,
    surrounding: torch.dtype,
    device_type: str,
    norm: bool,
    output_fp32: bool,
) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if autocast_format(device_type) != surrounding:
            return original(self, *args, **kwargs)
        if dtype is None:
            output = original(self, *args, **kwargs)
        elif dtype == torch.float32:
            with torch.autocast(device_type, enabled=False):
                output = original(self, *raised(args), **raised(kwargs))
        elif norm:
            output = _lowered(original(self, *_lowered(args, dtype), **kwargs), dtype)
        else:
            with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
                output = original(self, *args, **kwargs)
        return raised(output) if output_fp32 else output

    if isinstance(original, functools.partial):
        return forward
    return functools.wraps(original)(forward)


def _lowered(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(
        value, lambda tensor: tensor.to(dtype) if tensor.dtype in (*_LOW, torch.float32) else tensor
    )


# ------------------------------------------------------------------------------------------------ a whole map


def outer_format(precision_map: Mapping[str, Precision]) -> Precision:
    """Lowest format of a map: that of the region around the whole forward; FP32 (none) for an empty map."""
    return min(precision_map.values(), key=lambda precision: precision.rank, default=Precision.FP32)


def install_map(
    root: nn.Module,
    modules: Mapping[str, tuple[nn.Module, Role]],
    precision_map: Mapping[str, Precision],
    *,
    device_type: str,
) -> Installed:
    """Put regions on the modules that differ from what surrounds them, and FP32 on what leaves ``root``.

    Args:
        root: the model.
        modules: module and role per layer name.
        precision_map: format per layer name; not all FP32.
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        What ``restore_map`` needs.
    """
    outer = outer_format(precision_map).torch_dtype
    # Children of a module that has a region of its own are called inside that one.
    around = {name: p.torch_dtype for name, p in precision_map.items() if modules[name][1] == "other"}
    installed: Installed = []

    def install(module: nn.Module, **how: Any) -> None:
        installed.append((module, replace_forward(module, device_type=device_type, **how)))

    for name, precision in precision_map.items():
        module, role = modules[name]
        dtype, surrounding = precision.torch_dtype, _surrounding(name, around, outer)
        if dtype != surrounding or role == "norm":
            install(module, dtype=dtype, surrounding=surrounding, norm=role == "norm")
    install(root, dtype=None, surrounding=outer, output_fp32=True)
    return installed


def restore_map(installed: Installed) -> None:
    """Undo ``install_map``, leaving every module as it was found."""
    for module, before in reversed(installed):
        restore_forward(module, before)
    installed.clear()


def _surrounding(name: str, around: Mapping[str, torch.dtype], outer: torch.dtype) -> torch.dtype:
    parents: Iterable[str] = ()
    if around and name:
        parts = name.split(".")
        parents = (".".join(parts[:n]) for n in range(len(parts) - 1, -1, -1))
    return next((around[parent] for parent in parents if parent in around), outer)
