"""The rate policy: scales in closed form, averaging, bounds, and what it is worth on quadratics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from triaccel.config import CurvatureConfig
from triaccel.learning_rate import CurvatureRate, RateState, UnitRate, make_rate_policy, rate_scales
from triaccel.types import LayerInfo, LayerStats, Observation


def infos(*names):
    return tuple(LayerInfo(n, "Linear", "compute", i, 10) for i, n in enumerate(names))


def seen(probe_id, **curvature):
    layers = {n: LayerStats(curvature=v, probe_id=probe_id) for n, v in curvature.items()}
    return Observation(1, 1, 100, None, 96, layers=layers)


def wide(**options):
    return CurvatureConfig(**({"scale_min": 1e-6, "scale_max": 1e6} | options))


def test_plain_shrinking_in_closed_form():
    config = wide(normalise="none", alpha=0.5)
    scales = rate_scales({"a": 1.0, "b": 2.0, "c": 6.0}, config)
    assert scales == pytest.approx({"a": 1 / 1.25, "b": 1 / 1.5, "c": 1 / 2.5})


def test_geometric_mean_is_one_and_ratios_are_kept():
    curvature = {"a": 0.1, "b": 2.0, "c": 60.0}
    scales = rate_scales(curvature, wide())
    plain = rate_scales(curvature, wide(normalise="none"))
    assert math.prod(scales.values()) == pytest.approx(1.0)
    assert scales["a"] / scales["c"] == pytest.approx(plain["a"] / plain["c"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=12), st.floats(0, 100))
def test_bounds_order_and_mean_hold_whatever_the_curvature(values, alpha):
    config = CurvatureConfig(alpha=alpha)
    curvature = {str(i): v for i, v in enumerate(values)}
    scales = rate_scales(curvature, config)
    assert all(config.scale_min * (1 - 1e-9) <= s <= config.scale_max * (1 + 1e-9) for s in scales.values())
    assert math.fsum(math.log(s) for s in scales.values()) == pytest.approx(0.0, abs=1e-6)
    for a in curvature:
        for b in curvature:
            if curvature[a] < curvature[b]:
                assert scales[a] >= scales[b] * (1 - 1e-9)


def test_a_probe_counts_once_and_the_average_is_debiased():
    policy = make_rate_policy(CurvatureConfig(decay=0.7))
    state = policy.init(infos("a", "b"))
    state, first = policy.step(state, seen(0, a=1.0, b=4.0))
    assert state.curvature == {"a": 1.0, "b": 4.0}  # no start-up bias
    again, second = policy.step(state, seen(0, a=1.0, b=4.0))
    assert again is state
    assert second.scales == first.scales
    assert second.changes == ()
    state, _ = policy.step(state, seen(1, a=3.0, b=4.0))
    assert state.curvature["a"] == pytest.approx((0.7 * 1.0 + 1.0 * 3.0) / 1.7)
    state, _ = policy.step(state, seen(2, a=3.0, b=4.0))
    assert state.curvature["a"] == pytest.approx((0.49 * 1.0 + 0.7 * 3.0 + 3.0) / 2.19)


def test_missing_bad_and_negative_curvature():
    policy = make_rate_policy(CurvatureConfig())
    state = policy.init((*infos("a", "b", "c"), LayerInfo("empty", "BatchNorm2d", "norm", 3, 0)))
    assert "empty" not in state.layers
    state, decision = policy.step(state, seen(0, a=math.nan, b=-3.0, c=2.0))
    assert state.curvature == {"b": 0.0, "c": 2.0}
    assert set(decision.scales) == {"b", "c"}
    assert decision.scales["b"] > 1 > decision.scales["c"]
    state, decision = policy.step(policy.init(infos("a", "b")), seen(0, a=0.0, b=0.0))
    assert decision.scales == {"a": 1.0, "b": 1.0}
    assert decision.changes == ()


def test_changes_are_reported_with_a_reason_and_only_when_they_matter():
    policy = make_rate_policy(CurvatureConfig())
    state = policy.init(infos("a", "b", "c"))
    state, decision = policy.step(state, seen(0, a=1.0, b=2.0, c=6.4))
    by_layer = {c.layer: c for c in decision.changes}
    assert by_layer["c"].why == "curvature 3.2 x the median layer's"
    assert by_layer["c"].component == "curvature"
    assert by_layer["c"].before == 1.0
    assert by_layer["c"].after == decision.scales["c"]
    _, decision = policy.step(state, seen(1, a=1.01, b=2.0, c=6.5))
    assert decision.changes == ()


def test_off_is_a_policy_too():
    for config in (CurvatureConfig(estimator="off"), CurvatureConfig(alpha=0.0)):
        policy = make_rate_policy(config)
        assert isinstance(policy, UnitRate)
        state = policy.init(infos("a"))
        assert policy.initial(state).scales == {}
        assert policy.step(state, seen(0, a=9.0))[1].scales == {}
    assert isinstance(make_rate_policy(CurvatureConfig()), CurvatureRate)


def test_state_is_plain_json():
    policy = make_rate_policy(CurvatureConfig())
    state, _ = policy.step(policy.init(infos("a", "b")), seen(0, a=1.0, b=4.0))
    adapter = TypeAdapter(RateState)
    assert adapter.validate_json(adapter.dump_json(state)) == state


# ---------------------------------------------------------------- worth, on quadratics with known blocks

RANGES = ((0.6, 1.0), (1.4, 2.0), (5.0, 8.0))
SIZE = 30


def best_steps(hessian, x, scales, limit=400):
    """Fewest gradient steps to 1e-6 of the first loss, over a fine grid of base rates at once."""
    rates = 0.02 * 1.02 ** torch.arange(300, dtype=torch.float64)
    points = x.repeat(len(rates), 1)
    target = 1e-6 * float(x @ hessian @ x)
    for step in range(limit):
        slopes = points @ hessian
        if bool(((points * slopes).sum(1) <= target).any()):
            return step
        points = (points - rates[:, None] * scales * slopes).clamp(-1e6, 1e6)
    return limit


def policy_scales(hessian):
    """Scales of the policy from the true top eigenvalue of each layer's diagonal block."""
    blocks = {str(i): hessian[i * SIZE : (i + 1) * SIZE, i * SIZE : (i + 1) * SIZE] for i in range(3)}
    curvature = {name: float(torch.linalg.eigvalsh(block)[-1]) for name, block in blocks.items()}
    policy = make_rate_policy(wide(alpha=10.0))
    _, decision = policy.step(policy.init(infos(*blocks)), seen(0, **curvature))
    scales = torch.tensor([decision.scales[name] for name in blocks], dtype=torch.float64)
    return scales.repeat_interleave(SIZE)


def test_helps_on_block_quadratics_and_not_under_rotation():
    """Per-layer rates need fewer steps than the best single rate where layers differ; where a rotation mixes them, no fewer."""
    eigenvalues = torch.cat([torch.linspace(low, high, SIZE, dtype=torch.float64) for low, high in RANGES])
    plain = torch.diag(eigenvalues)
    x = ones = torch.ones(3 * SIZE, dtype=torch.float64)
    single = best_steps(plain, x, ones)
    assert best_steps(plain, x, policy_scales(plain)) < 0.5 * single
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        q, _ = torch.linalg.qr(torch.randn(3 * SIZE, 3 * SIZE, generator=generator, dtype=torch.float64))
        turned = q @ plain @ q.T
        turned_single = best_steps(turned, q @ x, ones)
        assert abs(turned_single - single) <= 1  # plain gradient descent does not see a rotation
        assert best_steps(turned, q @ x, policy_scales(turned)) >= 0.95 * turned_single
