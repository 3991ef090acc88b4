"""Compiles every kernel for real GPUs without one, and reads from the assembler what would slow it down.

    python -m triaccel.kernels.compile_targets [--capability 75 80 90 100]

For each variant that training uses: Triton to PTX, then ``ptxas -v`` of Triton's own package on that PTX. Spilled
registers, or more shared memory than the card has, are failures.
Source: ours; limits from the CUDA programming guide, table of compute capabilities.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["CAPABILITIES", "SHARED_LIMIT", "Compiled", "compile_variant", "variants"]

CAPABILITIES = (75, 80, 90, 100)
SHARED_LIMIT = {75: 64 * 1024, 80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may use."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with the argument types and constants that it is compiled for."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the assembler said of one variant on one target."""

    name: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    wide_loads: int

    @property
    def good(self) -> bool:
        """No spills, and the card has the shared memory."""
        return self.spill_bytes == 0 and self.shared_bytes <= SHARED_LIMIT[self.capability]


def variants() -> Iterator[Variant]:
    """Every kernel in each form that training launches."""
    import triton.language as tl

    from . import triton_gram as gram
    from . import triton_stats as grad_stats
    from . import triton_update as fused_update

    plan = {"tensor_of": "*i32", "offset_of": "*i64", "size_of": "*i32"}
    for extremes in (False, True):
        for element in (tl.float32, tl.bfloat16):
            yield Variant(
                f"grad_stats[{element.name}{',extremes' if extremes else ''}]",
                grad_stats.partials_kernel,
                {"addresses": "*i64", **plan, "partials": "*fp32"},
                {"ELEMENT": element, "ALIGNED": True, "EXTREMES": extremes, "BLOCK": grad_stats.BLOCK},
                grad_stats.WARPS,
            )
        yield Variant(
            f"gather[{'extremes' if extremes else ''}]",
            grad_stats.gather_kernel,
            {"partials": "*fp32", "start_of": "*i32", "count_of": "*fp64", "out": "*fp64"},
            {"EXTREMES": extremes, "GATHER": grad_stats.GATHER},
            4,
        )
    scalars = dict.fromkeys(("inv_scale", "momentum", "rest1", "eps", "rest2"), "fp32")
    for adam, momentum, nesterov, low, stats in (
        (False, False, False, False, False),
        (False, True, False, False, False),
        (False, True, True, False, True),
        (False, True, False, True, False),
        (False, True, False, True, True),
        (True, True, False, False, False),
        (True, True, False, False, True),
        (True, True, False, True, False),
        (True, True, False, True, True),
    ):
        name = "adamw" if adam else "nesterov" if nesterov else "momentum" if momentum else "sgd"
        yield Variant(
            f"fused_update[{name}{',bf16' if low else ''}{',stats' if stats else ''}]",
            fused_update.update_kernel,
            {
                "addresses": "*i64",
                "numbers": "*fp32",
                "found_inf": "*fp32",
                **plan,
                "partials": "*fp32",
                "tensors": "i32",
                **scalars,
                "seed": "i32",
                "sequence": "i32",
            },
            {
                "ADAM": adam,
                "MOMENTUM": momentum,
                "NESTEROV": nesterov,
                "MAXIMIZE": False,
                "LOW": low,
                "STATS": stats,
                "EXTREMES": stats,
                "SKIP": 1 if stats else 0,
                "ALIGNED": True,
                "BLOCK": fused_update.BLOCK,
            },
            fused_update.default_warps(adam=adam, stats=stats, low=low),
        )
    sizes = dict.fromkeys(("samples", "positions", "inputs", "outputs"), "i32")
    pointers = dict.fromkeys(("a", "g", "out"), "*fp32")
    for samples in (16, 32, 64, 128):
        padded, tile_o, tile_i, warps = gram.outer_tiles(samples)
        yield Variant(
            f"gram[outer,{samples}]",
            gram.outer_kernel,
            {**pointers, **sizes, "items": "i32", "programs": "i32"},
            {"SAMPLES": padded, "TILE_O": tile_o, "TILE_I": tile_i},
            warps,
        )
    yield Variant(
        "gram[pairs]",
        gram.pairs_kernel,
        {**pointers, "blocks": "i32", **sizes},
        {"TILE_T": 32, "TILE_K": 32},
        4,
    )


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile one variant for one target.

    Args:
        variant: from ``variants()``; its kernel must not be an interpreted one (``TRITON_INTERPRET=0``).
        capability: 10 x major + minor, as 90.

    Raises:
        RuntimeError: the PTX could not be assembled.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = variant.kernel
    signature = {
        name: "constexpr" if name in variant.constants else variant.signature[name]
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=variant.constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": variant.warps}
    )
    ptx = compiled.asm["ptx"]
    registers, spills, static = assemble(ptx)
    return Compiled(
        name=variant.name,
        capability=capability,
        registers=registers,
        spill_bytes=spills,
        shared_bytes=max(int(compiled.metadata.shared), static),
        wide_loads=len(re.findall(r"ld\.global[^;]*\.v4", ptx)),
    )


def assemble(ptx: str) -> tuple[int, int, int]:
    """(registers per thread, bytes spilled, static shared bytes) as ``ptxas -v`` reports them.

    Raises:
        RuntimeError: no assembler in Triton's package, or it refused the PTX.
    """
    import triton

    target = re.search(r"\.target\s+(sm_\w+)", ptx)
    if target is None:
        raise RuntimeError("the PTX names no target: it was not produced for an NVIDIA card")
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newer = int(re.sub(r"\D", "", target[1])) >= 100 and (folder / "ptxas-blackwell").exists()
    tool = folder / ("ptxas-blackwell" if newer else "ptxas")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "kernel.ptx"
        path.write_text(ptx)
        done = subprocess.run(
            [tool, "-v", f"--gpu-name={target[1]}", path, "-o", Path(place) / "kernel.cubin"],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"ptxas refused the PTX for {target[1]}: {done.stderr.strip()}")
    text = done.stderr + done.stdout
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", text))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", text))
    shared = max([0, *(int(n) for n in re.findall(r"(\d+) bytes smem", text))])
    return registers, spills, shared


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per kernel and target; 1 if any spills or asks for too much shared memory."""
    import json

    parser = argparse.ArgumentParser(description="Compile all kernels for GPUs, without one.")
    parser.add_argument("--capability", type=int, nargs="*", default=list(CAPABILITIES), choices=CAPABILITIES)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    chosen = parser.parse_args(arguments)
    failed = 0
    for variant in variants():
        for capability in chosen.capability:
            result = compile_variant(variant, capability)
            failed += not result.good
            if chosen.json:
                print(json.dumps({**asdict(result), "good": result.good}), flush=True)
                continue
            print(
                f"{'ok  ' if result.good else 'FAIL'} sm_{capability:<3} {result.name:32} {result.registers:3} registers, "
                f"{result.spill_bytes} bytes spilled, {result.shared_bytes} bytes shared, {result.wide_loads} 16-byte loads",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
