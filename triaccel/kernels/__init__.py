"""Kernels with an eager reference of the same signature beside each, dispatched once per device and logged.

Importable without Triton and without a GPU: Triton is imported by the first call that runs one of its kernels. On CPU the
reference is the fast path; ``TRITON_INTERPRET=1`` lets the Triton kernels be forced there, to be tested.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from ..types import TriAccelError
from . import reference
from .rules import COLUMNS, FP16_SMALLEST, AdamWRule, GradStats, SgdRule, UpdateRule

__all__ = [
    "COLUMNS",
    "FP16_SMALLEST",
    "AdamWRule",
    "Backend",
    "GradStats",
    "SgdRule",
    "UpdateRule",
    "dispatch",
    "fused_update_",
    "grad_stats",
    "gram",
    "gram_route",
]

Backend = Literal["triton", "reference"]
MIN_CAPABILITY = (7, 5)
_log = logging.getLogger(__name__)


def dispatch(device: torch.device | str, forced: Backend | None = None) -> Backend:
    """Which implementation runs on ``device``.

    Args:
        device: where the tensors are.
        forced: the one that must run; ``None`` takes Triton on GPUs from sm_75 on where it is installed, else the reference.

    Returns:
        ``"triton"`` or ``"reference"``; decided once per device and logged at level INFO.

    Raises:
        TriAccelError: the forced one cannot run here.
    """
    return _dispatch(torch.device(device), forced)


@lru_cache(maxsize=64)
def _dispatch(device: torch.device, forced: Backend | None) -> Backend:
    if forced not in (None, "triton", "reference"):
        raise TriAccelError(f"unknown kernel backend {forced!r}: use 'triton', 'reference' or None")
    obstacle = _obstacle(device)
    if forced == "triton" and obstacle:
        raise TriAccelError(f"Triton kernels were asked for but {obstacle}; use backend 'reference' or None")
    interpreted = device.type == "cpu"
    chosen = forced or ("triton" if obstacle is None and not interpreted else "reference")
    why = (
        "asked for"
        if forced
        else obstacle or ("the eager reference is the fast path here" if interpreted else "available")
    )
    _log.info("kernels on %s: %s (%s)", device, chosen, why)
    return chosen


def _obstacle(device: torch.device) -> str | None:
    """Why Triton cannot run on ``device``; ``None`` if it can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} is sm_{capability[0]}{capability[1]} and they need sm_75"
        return None
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"they need a CUDA device, not {device.type!r} (TRITON_INTERPRET=1, set before the start, runs them slowly on the CPU)"


def _module(name: str, device: torch.device, backend: Backend | None) -> ModuleType:
    if dispatch(device, backend) == "triton":
        return import_module(f".{name}", __name__)
    return reference


def grad_stats(
    grads: Sequence[Tensor],
    segments: Sequence[int],
    *,
    segment_count: int,
    extremes: bool = False,
    backend: Backend | None = None,
) -> GradStats:
    """Count, sum, sum of squares and non-finite entries of the gradients of each segment, in one pass.

    Args:
        grads: gradients of any shape and memory layout (float32, bfloat16 or float16), on one device.
        segments: segment (layer) index of each.
        segment_count: number of segments S; those without gradients get zeros.
        extremes: also largest magnitude, entries that are not 0, and those that FP16 would lose.
        backend: as ``dispatch``'s ``forced``.

    Returns:
        Statistics of shape (S, 7) on the gradients' device; on a GPU nothing has waited for it.

    Raises:
        TriAccelError: lengths differ, several devices, another dtype, sparse gradients, or the backend cannot run.

    Source: ours.
    """
    if len(grads) != len(segments):
        raise TriAccelError(
            f"{len(grads)} gradients but {len(segments)} segment indices: give one for each gradient"
        )
    if not grads:
        return reference.grad_stats((), (), segment_count=segment_count, extremes=extremes)
    _check(grads, "gradient", (torch.float32, torch.bfloat16, torch.float16))
    module = _module("triton_stats", grads[0].device, backend)
    with torch.no_grad():
        result: GradStats = module.grad_stats(grads, segments, segment_count=segment_count, extremes=extremes)
    return result


def fused_update_(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    *,
    rule: UpdateRule,
    rates: Sequence[float],
    weight_decays: Sequence[float],
    steps: Sequence[int],
    inv_scale: float = 1.0,
    found_inf: Tensor | None = None,
    segments: Sequence[int] | None = None,
    segment_count: int = 0,
    extremes: bool = False,
    seed: int = 0,
    sequence: int = 0,
    keys: Sequence[int] | None = None,
    backend: Backend | None = None,
) -> GradStats | None:
    """Unscale, weight decay, moments and step of all parameters in place, and statistics of the same gradients, in one pass.

    Args:
        parameters: float32, each dense in memory (any order of dimensions).
        grads: float32, same shapes; left as they are.
        first: momentum (SGD) or first moment (AdamW), float32 or bfloat16, each in its parameter's memory order;
            empty without momentum.
        second: second moment (AdamW), float32, likewise; empty for SGD.
        rule: SGD or AdamW.
        rates: learning rate per parameter.
        weight_decays: weight decay per parameter.
        steps: number of this update per parameter, from 1 (PyTorch's rules treat the first step apart).
        inv_scale: factor on the gradients before all else, 1 / loss scale.
        found_inf: float32 of shape (1,) or (len(parameters),), on the device; where it is not 0, nothing is written.
        segments: segment (layer) index per parameter, for statistics of the unscaled gradients; ``None``: no statistics.
        segment_count: number of segments.
        extremes: as in ``grad_stats``.
        seed: of stochastic rounding, where ``first`` is bfloat16.
        sequence: number of the optimizer step; with ``seed`` and ``keys`` it fixes the rounding.
        keys: what tells one parameter's rounding from another's; ``None``: the position in the list.
        backend: as ``dispatch``'s ``forced``.

    Returns:
        Statistics per segment, or ``None`` if not asked for.

    Raises:
        TriAccelError: another dtype, sparse gradients, parameters that are not dense, or the backend cannot run.

    Source: ours; rules after ``torch.optim``.
    """
    if not parameters:
        return (
            None
            if segments is None
            else reference.grad_stats((), (), segment_count=segment_count, extremes=extremes)
        )
    _check(parameters, "parameter", (torch.float32,))
    _check(grads, "gradient", (torch.float32,))
    module = _module("triton_update", parameters[0].device, backend)
    with torch.no_grad():
        result: GradStats | None = module.fused_update_(
            parameters,
            grads,
            first,
            second,
            rule=rule,
            rates=rates,
            weight_decays=weight_decays,
            steps=steps,
            inv_scale=inv_scale,
            found_inf=found_inf,
            segments=segments,
            segment_count=segment_count,
            extremes=extremes,
            seed=seed,
            sequence=sequence,
            keys=keys,
        )
    return result


def gram_route(samples: int, positions: int, inputs: int, outputs: int) -> Literal["outer", "pairs"]:
    """The route with fewer multiply-adds."""
    outer = samples * inputs * outputs * (positions + samples)
    pairs = samples**2 * positions**2 * (inputs + outputs)
    return "outer" if outer <= pairs else "pairs"


def gram(
    a: Tensor,
    g: Tensor,
    *,
    route: Literal["outer", "pairs"] | None = None,
    max_bytes: int = 256 * 2**20,
    backend: Backend | None = None,
) -> Tensor:
    """Gram matrix K_ij = sum_n <G_ni, G_nj> of the per-sample gradients G_ni = sum_t g_nit a_nit^T.

    Args:
        a: layer inputs, (N, B, T, I) float32: N independent blocks (groups of a convolution), B samples, T positions.
        g: output gradients, (N, B, T, O) float32.
        route: ``outer`` forms gradients, ``pairs`` does not; ``None``: the cheaper.
        max_bytes: bytes of temporaries.
        backend: as ``dispatch``'s ``forced``.

    Returns:
        (B, B) float32 (the reference takes float64 too).

    Raises:
        TriAccelError: shapes do not match, or the backend cannot run this.

    Source: ours.
    """
    if a.dim() != 4 or g.dim() != 4 or a.shape[:3] != g.shape[:3]:
        raise TriAccelError(
            f"gram takes inputs (N, B, T, I) and output gradients (N, B, T, O), got {tuple(a.shape)} and {tuple(g.shape)}"
        )
    route = route or gram_route(a.shape[1], a.shape[2], a.shape[3], g.shape[3])
    # One position: two plain matrix products, which no kernel of ours beats.
    module = reference if backend is None and a.shape[2] == 1 else _module("triton_gram", a.device, backend)
    with torch.no_grad():
        result: Tensor = module.gram(a, g, route=route, max_bytes=max_bytes)
    return result


def _check(tensors: Sequence[Tensor], what: str, dtypes: tuple[torch.dtype, ...]) -> None:
    device = tensors[0].device
    for position, tensor in enumerate(tensors):
        if tensor.is_sparse:
            raise TriAccelError(
                f"{what} {position} is sparse: the kernels take dense tensors; "
                "use sparse=False, or switch engine.fused_update off"
            )
        if tensor.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TriAccelError(
                f"{what} {position} is {tensor.dtype}, the kernels take {names}; convert it, or use torch.optim's own step"
            )
        if tensor.device != device:
            raise TriAccelError(
                f"{what} {position} is on {tensor.device} and the first on {device}: call once per device"
            )
