"""Configurations: ranges, round trips, the arms of the 2³ design."""

import itertools
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from triaccel.config import BatchConfig, CurvatureConfig, EngineConfig, PrecisionConfig, TriAccelConfig


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: PrecisionConfig(tau_low=-1.0), "tau_low"),
        (lambda: PrecisionConfig(tau_low=1e-2, tau_high=1e-4), "not below precision.tau_high"),
        (lambda: PrecisionConfig(tau_low=1e-3, tau_high=1e-3), "not below precision.tau_high"),
        (lambda: PrecisionConfig(tau_high=float("nan")), "tau_high"),
        (lambda: PrecisionConfig(low_quantile=0.9, high_quantile=0.1), "low_quantile"),
        (lambda: PrecisionConfig(ladder=("bf16",)), "leaves out fp32"),
        (lambda: PrecisionConfig(pin={"fc": "fp8"}), "pin"),
        (lambda: CurvatureConfig(top_k=64, probe_batch=32), "exceeds curvature.probe_batch"),
        (lambda: CurvatureConfig(scale_min=1.5), "must enclose 1"),
        (lambda: BatchConfig(initial=8, minimum=16), "batch.minimum 16"),
        (lambda: BatchConfig(rho_low=0.9, rho_high=0.7), "grow and shrink at once"),
        (lambda: BatchConfig(ladder=(96, 64)), "ascending"),
        (lambda: BatchConfig(ladder=(64, 128)), "not a rung"),
        (lambda: BatchConfig(ladder=()), "ascending"),
        (lambda: EngineConfig(momentum_bf16=True), "needs engine.fused_update"),
        (
            lambda: TriAccelConfig(engine={"gradient_release": True}, max_grad_norm=1.0),
            "cannot go with max_grad_norm",
        ),
        (
            lambda: TriAccelConfig(engine={"gradient_release": True}, batch={"effective": "hold"}),
            "accumulation",
        ),
        (lambda: TriAccelConfig(unknown=1), "unknown"),
    ],
)
def test_bad_values_are_named(build, words):
    with pytest.raises(ValidationError, match=words):
        build()


def test_arms_of_the_design_differ_only_in_what_is_off():
    base = TriAccelConfig(seed=3)
    for p in (False, True):
        for c in (False, True):
            for b in (False, True):
                arm = TriAccelConfig.arm(precision=p, curvature=c, batch=b, base=base)
                assert (arm.precision.rule != "off") == p
                assert (arm.curvature.estimator != "off") == c
                assert (arm.batch.rule != "off") == b
                assert arm.seed == 3
    assert TriAccelConfig.arm(precision=True, curvature=True, batch=True, base=base) == base


def test_paper_rules_have_no_cost_gate():
    paper = TriAccelConfig.paper()
    assert not paper.precision.cost_gate
    assert TriAccelConfig().precision.cost_gate
    assert (paper.precision.rule, paper.curvature.estimator, paper.curvature.normalise, paper.batch.rule) == (
        "paper",
        "hessian",
        "none",
        "paper",
    )


@given(
    initial=st.integers(1, 4096),
    below=st.integers(0, 4095),
    above=st.integers(0, 8192),
)
def test_rungs_ascend_between_floor_and_ceiling_and_hold_the_initial(initial, below, above):
    config = BatchConfig(initial=initial, minimum=max(1, initial - below), maximum=initial + above)
    rungs = config.rungs
    assert initial in rungs
    assert all(a < b for a, b in itertools.pairwise(rungs))
    assert rungs[0] == config.minimum
    assert rungs[-1] == config.maximum


@given(
    st.floats(1e-12, 1e-3),
    st.floats(2e-3, 1e3),
    st.integers(1, 32),
    st.sampled_from(["fp16", "bf16", "fp32"]),
)
def test_json_and_toml_round_trips(low, high, k, pinned):
    config = TriAccelConfig(
        precision={"tau_low": low, "tau_high": high, "pin": {"fc": pinned}}, curvature={"top_k": k}
    )
    assert TriAccelConfig.model_validate_json(config.model_dump_json()) == config
    text = f'[precision]\ntau_low = {low!r}\ntau_high = {high!r}\n[precision.pin]\nfc = "{pinned}"\n[curvature]\ntop_k = {k}\n'
    assert TriAccelConfig.model_validate(tomllib.loads(text)) == config


def test_every_field_has_a_docstring():
    for model in (PrecisionConfig, CurvatureConfig, BatchConfig, EngineConfig, TriAccelConfig):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_configuration_and_arm_names_start_without_torch():
    code = "import sys, triaccel.config, baselines; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
