"""Which compute formats a device accelerates: its ladder, with the reason for each format that is not on it.

CUDA, by compute capability: FP16 from sm_60 (not sm_61, whose FP16 units are 1/64 as fast), BF16 from sm_80 (emulated below).
CPU, by what oneDNN and the instruction set really have: a format casts on every CPU, and without such kernels it is tens of
times slower. A format off the ladder can still be asked for by name; one that cannot run at all is an error. Layers whose
operation ignores autocast (``Embedding`` everywhere, RNNs on a CPU) are found by running a tiny one of each kind.
No clock decides anything here, so the same machine always has the same ladder. Source: ours (DESIGN section 6).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from .types import Precision, TriAccelError

__all__ = ["Ladder", "device_ladder"]

_EMPTY: Mapping[Precision, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Ladder:
    """Formats that layers may run in.

    Attributes:
        precisions: lowest first, FP32 last.
        reasons: why each other format is not among them.
        ignored: for each format, the module kinds whose operation does not follow it on this device.
        unavailable: formats that cannot run on this device at all, and why.
    """

    precisions: tuple[Precision, ...]
    reasons: Mapping[Precision, str] = field(default_factory=dict)
    ignored: Mapping[Precision, tuple[str, ...]] = field(default_factory=dict)
    unavailable: Mapping[Precision, str] = field(default_factory=dict)

    @property
    def lowest(self) -> Precision:
        """Lowest format."""
        return self.precisions[0]

    def follows(self, kind: str, precision: Precision) -> bool:
        """Whether a module of class ``kind`` really runs in ``precision``."""
        return kind not in self.ignored.get(precision, ())

    def up(self, precision: Precision, *, kind: str | None = None) -> Precision:
        """Nearest format at or above ``precision`` that is on the ladder and that ``kind`` follows."""
        for rung in self.precisions:
            if rung.rank >= precision.rank and (kind is None or self.follows(kind, rung)):
                return rung
        return Precision.FP32


def device_ladder(device: torch.device | str, *, allowed: Sequence[Precision] | None = None) -> Ladder:
    """Ladder of ``device``.

    Args:
        device: where the model trains.
        allowed: formats that the user asks for instead of those that the device accelerates.

    Raises:
        TriAccelError: a format in ``allowed`` cannot run on the device.
    """
    device = torch.device(device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    reasons = dict(_off_ladder(device))
    unavailable = {
        p: why for p in (Precision.FP16, Precision.BF16) if (why := _failure(device, p)) is not None
    }
    reasons.update(unavailable)
    if allowed is not None:
        wanted = {Precision(p) for p in allowed}
        for precision in sorted(wanted & set(unavailable), key=lambda p: p.rank):
            raise TriAccelError(
                f"precision.ladder asks for {precision}, which {device} cannot run: {unavailable[precision]}; take it out"
            )
        reasons = {p: reasons.get(p, "left out of precision.ladder") for p in Precision if p not in wanted}
    precisions = tuple(p for p in Precision if p not in reasons)
    ignored = {
        p: _ignoring_kinds(device, p) for p in (Precision.FP16, Precision.BF16) if p not in unavailable
    }
    return Ladder(precisions, reasons, ignored, unavailable)


@functools.lru_cache
def _off_ladder(device: torch.device) -> tuple[tuple[Precision, str], ...]:
    if device.type == "cuda":
        return tuple(_off_cuda(torch.cuda.get_device_capability(device)).items())
    if device.type == "cpu":
        return tuple(_off_cpu().items())
    return tuple(
        (p, f"nothing is known of {p} on {device.type!r} devices; name it in precision.ladder to use it")
        for p in (Precision.FP16, Precision.BF16)
    )


def _off_cuda(capability: tuple[int, int]) -> dict[Precision, str]:
    """Reasons by compute capability."""
    major, minor = capability
    reasons: dict[Precision, str] = {}
    if capability < (6, 0):
        reasons[Precision.FP16] = f"sm_{major}{minor} has no FP16 arithmetic"
    elif capability == (6, 1):
        reasons[Precision.FP16] = "sm_61 does FP16 arithmetic at 1/64 of its FP32 rate"
    if capability < (8, 0):
        reasons[Precision.BF16] = f"sm_{major}{minor} only emulates BF16; sm_80 is the first with it"
    return reasons


def _off_cpu() -> dict[Precision, str]:
    reasons: dict[Precision, str] = {}
    for precision in (Precision.FP16, Precision.BF16):
        name = precision.value
        supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
        if supported is None or not supported():  # also where PyTorch was built without oneDNN
            missing = f"oneDNN has no {name} kernels for this CPU"
        elif precision is Precision.BF16 and not _cpu_has_bf16():
            missing = "this CPU has no BF16 instructions (AVX512-BF16, AMX-BF16): oneDNN emulates them"
        else:
            continue
        reasons[precision] = f"{missing}: {_slowdown(precision)}"
    return reasons


def _cpu_has_bf16() -> bool:
    capabilities: Callable[[], Mapping[str, object]] | None = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        found = capabilities()
        if found.get("architecture") not in ("x86_64", "amd64"):
            return True  # elsewhere oneDNN says supported only where the instructions are
        return bool(found.get("avx512_bf16") or found.get("amx_bf16"))
    native: Callable[[], bool] | None = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return native is None or native()


def _slowdown(precision: Precision) -> str:
    """Words for the records only: how a small convolution, forward and backward, compares with FP32 (medians of 3)."""

    def seconds(dtype: torch.dtype) -> float:
        x = torch.ones(16, 32, 8, 8, dtype=dtype, requires_grad=True)
        w = torch.ones(32, 32, 3, 3, dtype=dtype, requires_grad=True)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            torch.autograd.grad(nn.functional.conv2d(x, w, padding=1).sum(), (x, w))
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    try:
        ratio = seconds(precision.torch_dtype) / seconds(torch.float32)
    except RuntimeError as error:
        return f"a convolution fails ({error})"
    return f"a 3 x 3 convolution takes {ratio:.2g} x as long as in fp32"


@functools.lru_cache
def _failure(device: torch.device, precision: Precision) -> str | None:
    """What went wrong when a matmul and a convolution ran forward and backward in ``precision``; ``None`` if nothing did."""
    dtype = precision.torch_dtype
    try:
        a = torch.ones(4, 4, device=device, dtype=dtype, requires_grad=True)
        x = torch.ones(1, 1, 4, 4, device=device, dtype=dtype, requires_grad=True)
        w = torch.ones(1, 1, 3, 3, device=device, dtype=dtype, requires_grad=True)
        total = (a @ a).float().sum() + nn.functional.conv2d(x, w).float().sum()
        torch.autograd.grad(total, (a, x, w))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return f"{precision} arithmetic fails there ({error})"
    return None


def _kinds() -> dict[str, tuple[Callable[[], nn.Module], Callable[[torch.device], tuple[torch.Tensor, ...]]]]:
    def sequence(device: torch.device) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(2, 2, 4, device=device),)

    def row(device: torch.device) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(2, 4, device=device),)

    def indices(device: torch.device) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(2, 2, dtype=torch.long, device=device),)

    return {
        "Embedding": (lambda: nn.Embedding(2, 4), indices),
        "EmbeddingBag": (lambda: nn.EmbeddingBag(2, 4), indices),
        "RNN": (lambda: nn.RNN(4, 4), sequence),
        "LSTM": (lambda: nn.LSTM(4, 4), sequence),
        "GRU": (lambda: nn.GRU(4, 4), sequence),
        "RNNCell": (lambda: nn.RNNCell(4, 4), row),
        "LSTMCell": (lambda: nn.LSTMCell(4, 4), row),
        "GRUCell": (lambda: nn.GRUCell(4, 4), row),
        "Bilinear": (lambda: nn.Bilinear(4, 4, 4), lambda device: row(device) * 2),
        "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), lambda device: sequence(device) * 3),
    }


@functools.lru_cache
def _ignoring_kinds(device: torch.device, precision: Precision) -> tuple[str, ...]:
    """Kinds whose output is in another format, or that fail, inside an autocast region of ``precision``."""
    ignoring = []
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU
        for kind, (make, inputs) in _kinds().items():
            module = make().to(device)
            try:
                with torch.autocast(device.type, dtype=precision.torch_dtype, cache_enabled=False):
                    output = module(*inputs(device))
            except (RuntimeError, NotImplementedError):
                ignoring.append(kind)
                continue
            while isinstance(output, tuple):
                output = output[0]
            if output.dtype != precision.torch_dtype:
                ignoring.append(kind)
    return tuple(ignoring)
