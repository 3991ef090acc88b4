"""Dispatch: what runs is decided once and logged, an unavailable choice raises, nothing heavy is imported."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch

from triaccel import kernels
from triaccel.kernels import check, dispatch
from triaccel.types import TriAccelError


@pytest.fixture(autouse=True)
def _fresh():
    kernels._dispatch.cache_clear()
    yield
    kernels._dispatch.cache_clear()


def python(code, **environment):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_the_reference_runs_on_cpu_and_the_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="triaccel.kernels"):
        assert dispatch("cpu") == "reference"
        assert dispatch("cpu") == "reference"
    assert [r.getMessage() for r in caplog.records] == [caplog.records[0].getMessage()]
    assert "kernels on cpu: reference" in caplog.text


def test_an_unavailable_backend_raises(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(TriAccelError, match="asked for but they need a CUDA device"):
        dispatch("cpu", "triton")
    with pytest.raises(TriAccelError, match="unknown kernel backend 'cuda'"):
        dispatch("cpu", "cuda")


def test_without_triton_the_reference_runs_and_forcing_raises(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert dispatch("cpu") == "reference"
    with pytest.raises(TriAccelError, match="triton is not installed"):
        dispatch("cpu", "triton")


def test_importing_and_running_the_reference_needs_no_triton():
    done = python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from triaccel.kernels import grad_stats\n"
        "print(grad_stats([torch.ones(3)], [0], segment_count=1).total.item())"
    )
    assert done.stdout.strip() == "3.0", done.stderr


def test_names_stay_functions_after_a_triton_kernel_was_loaded():
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the interpreter is off")
    kernels.grad_stats([torch.ones(3)], [0], segment_count=1, backend="triton")
    assert callable(kernels.grad_stats)
    assert callable(kernels.gram)


def test_the_gpu_command_says_why_it_does_nothing(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert "no CUDA GPU here: nothing was checked or timed" in capsys.readouterr().err


def test_all_kernels_compile_for_real_gpus_without_spills():
    """sm_75, sm_80, sm_90 and sm_100, by Triton's own assembler, no GPU needed."""
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "triaccel.kernels.compile_targets", "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {r["capability"] for r in results} == {75, 80, 90, 100}
    assert all(r["good"] and r["spill_bytes"] == 0 for r in results)
    wide = [r["wide_loads"] for r in results if r["name"].startswith(("fused_update", "grad_stats[fp32"))]
    assert min(wide) >= 1, "an FP32 kernel lost its 16-byte loads"
