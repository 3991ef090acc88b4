"""The real launch path, compiled for sm_90 without a GPU: the driver only answers questions, launches stop after compiling.

Run as a script in a process of its own, since the kernels must not be interpreted ones.
"""

import json
import os
import subprocess
import sys

import pytest


def test_launches_bind_and_compile_and_steps_do_not_compile_anew():
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    variants = json.loads(done.stdout.splitlines()[-1])
    assert variants == {"update_kernel": 4, "partials_kernel": 2, "outer_kernel": 4, "pairs_kernel": 4}


def main():
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    driver.set_active(Driver())
    launch = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: launch(
        self, *args, grid=grid, warmup=True, **options
    )
    from triaccel.kernels import AdamWRule, SgdRule, triton_gram, triton_stats, triton_update

    grads = [torch.randn(1000), torch.randn(20000)]
    triton_stats.grad_stats(grads, [0, 1], segment_count=2)
    triton_stats.grad_stats([g.bfloat16() for g in grads], [0, 1], segment_count=2, extremes=True)
    cases = (
        (SgdRule(momentum=0.9), torch.float32),
        (SgdRule(), None),
        (AdamWRule(), torch.bfloat16),
    )
    # Steps 1 and 16 are those that Triton would specialise on.
    for sequence in (1, 16, 17):
        for rule, dtype in cases:
            triton_update.fused_update_(
                grads,
                grads,
                [torch.zeros_like(g, dtype=dtype) for g in grads] if dtype else [],
                [torch.zeros_like(g) for g in grads] if isinstance(rule, AdamWRule) else [],
                rule=rule,
                rates=[0.1] * 2,
                weight_decays=[0.0] * 2,
                steps=[1, 1],
                seed=1,
                sequence=sequence,
                segments=[0, 0],
                segment_count=1,
                found_inf=torch.zeros(1),
            )
    one = grads[:1]
    triton_update.fused_update_(one, one, [], [], rule=SgdRule(), rates=[0.1], weight_decays=[0.0], steps=[1])
    for n, b, t, i, o in ((1, 32, 1, 1, 1), (3, 4, 5, 9, 1), (1, 1, 1, 1, 16), (1, 32, 16, 16, 32)):
        for route in ("outer", "pairs"):
            triton_gram.gram(torch.randn(n, b, t, i), torch.randn(n, b, t, o), route=route, max_bytes=2**20)
    kernels = (
        triton_update.update_kernel,
        triton_stats.partials_kernel,
        triton_gram.outer_kernel,
        triton_gram.pairs_kernel,
    )
    print(
        json.dumps({k.fn.__name__: sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels})
    )


if __name__ == "__main__":
    main()
