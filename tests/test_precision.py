"""Precision policies: pure, no flapping, pins win, never below ladder or bound, culprits of overflow by name."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from triaccel.config import PrecisionConfig
from triaccel.cost_table import CostTable, Edge, Node
from triaccel.ladder import Ladder
from triaccel.precision import make_precision_policy
from triaccel.precision_rules import Thresholds, Track, step_track
from triaccel.types import LayerInfo, LayerStats, MemoryReading, Observation, Precision, TriAccelError

FP16, BF16, FP32 = Precision
FULL = Ladder((FP16, BF16, FP32))
CPU = Ladder((BF16, FP32), {FP16: "no kernels"}, ignored={BF16: ("Embedding",), FP16: ("Embedding",)})
OFF = {"gate": "off", "hysteresis": 1.5, "min_dwell": 2}


def infos(*names, **changes):
    made = tuple(LayerInfo(name, "Linear", "compute", i, 10) for i, name in enumerate(names))
    return tuple(dataclasses.replace(info, **changes.get(info.name, {})) for info in made)


def observe(tick, *, layers=None, **kwargs):
    seen = {
        name: s if isinstance(s, LayerStats) else LayerStats(variance=s) for name, s in (layers or {}).items()
    }
    values = {
        "step": 10 * tick,
        "updates": 10 * tick,
        "samples_seen": 1000 * tick,
        "total_samples": 100_000,
        "batch_size": 100,
    }
    return Observation(**(values | {"layers": seen} | kwargs))


def policy_for(layers, *, ladder=FULL, costs=None, **config):
    policy = make_precision_policy(
        PrecisionConfig(**config), ladder=ladder, costs=costs, initial_batch=100, total_samples=100_000
    )
    return policy, policy.init(layers)


def drive(policy, state, observations):
    decisions = []
    for observation in observations:
        state, decision = policy.step(state, observation)
        decisions.append(decision)
    return state, decisions


def table(names, gains, *, edges=(), bytes_gain=0.5, precisions=(BF16, FP32), buckets=(100,)):
    """Nodes of 1 ms in FP32 and ``gains[name]`` ms in each lower format."""
    nodes = tuple(
        Node(
            name,
            True,
            "s",
            {p: tuple((1e-3 if p is FP32 else 1e-3 * gains[name]) for _ in buckets) for p in precisions},
            {p: 1000.0 if p is FP32 else 1000.0 * bytes_gain for p in precisions},
            dict.fromkeys(precisions, 0.0),
            tuple(precisions),
        )
        for name in names
    )
    pairs = {f"{a}>{b}": 1e-9 for a in precisions for b in precisions if a is not b}
    return CostTable(tuple(precisions), tuple(buckets), nodes, tuple(edges), pairs, 0.0)


# ------------------------------------------------------------------------------------------------ off, static


def test_off_is_fp32_for_ever():
    policy, state = policy_for(infos("a", "b"), rule="off")
    assert policy.initial(state).precision_map == {"a": FP32, "b": FP32}
    _, decisions = drive(policy, state, [observe(1, layers={"a": 1e-30, "b": 1e-30})])
    assert decisions[0].precision_map == {"a": FP32, "b": FP32}
    assert decisions[0].changes == ()
    assert decisions[0].decided_by == {"a": "fixed", "b": "fixed"}


def test_static_is_the_tables_best_map_from_step_0():
    costs = table(["a", "b"], {"a": 0.5, "b": 3.0})
    policy, state = policy_for(infos("a", "b"), rule="static", ladder=CPU, costs=costs)
    first = policy.initial(state)
    assert first.precision_map == {"a": BF16, "b": FP32}
    assert first.changes[0].layer == "a"
    assert "1 ms -> 0.5 ms" in first.changes[0].why
    assert first.decided_by == {"a": "cost", "b": "cost"}
    _, decisions = drive(policy, state, [observe(1, layers={"a": 1e9, "b": 1e-30})])
    assert decisions[0].precision_map == first.precision_map


@pytest.mark.parametrize("rule", ["static", "auto"])
def test_a_gated_rule_without_measurements_is_an_error(rule):
    with pytest.raises(TriAccelError, match="calibrate first"):
        policy_for(infos("a"), rule=rule)


# ------------------------------------------------------------------------------------------------ paper


def test_paper_thresholds_on_a_full_ladder():
    layers = infos("low", "middle", "high", "unmeasured")
    policy, state = policy_for(layers, rule="paper", tau_low=1e-4, tau_high=1e-2)
    seen = {"low": 1e-5, "middle": 1e-3, "high": 1e-1}
    _, (decision,) = drive(policy, state, [observe(1, layers=seen)])
    assert decision.precision_map == {"low": FP16, "middle": BF16, "high": FP32, "unmeasured": FP32}
    assert {c.layer: c.why for c in decision.changes} == {
        "low": "variance 1e-05 below 0.0001",
        "middle": "variance 0.001 below 0.01",
    }
    assert set(decision.decided_by.values()) == {"variance"}


def test_paper_moves_up_to_the_nearest_format_on_the_ladder():
    policy, state = policy_for(infos("a", "e", e={"kind": "Embedding"}), ladder=CPU, rule="paper")
    _, (decision,) = drive(policy, state, [observe(1, layers={"a": 1e-9, "e": 1e-9})])
    assert decision.precision_map == {"a": BF16, "e": FP32}
    assert decision.decided_by == {"a": "ladder", "e": "ladder"}
    assert "fp16 is not on this device's ladder" in decision.changes[0].why


def test_curvature_holds_fp32_while_above_and_for_the_hold_after():
    policy, state = policy_for(infos("a"), rule="paper", tau_curvature=10.0, promotion_hold=3)
    sharp = LayerStats(variance=1e-9, curvature=11.0)
    flat = LayerStats(variance=1e-9, curvature=9.0)
    observations = [
        observe(i, layers={"a": s}) for i, s in enumerate([flat, sharp, sharp, flat, flat, flat, flat])
    ]
    _, decisions = drive(policy, state, observations)
    assert [d.precision_map["a"] for d in decisions] == [FP16, FP32, FP32, FP32, FP32, FP16, FP16]
    assert decisions[1].decided_by == {"a": "curvature"}
    assert decisions[1].changes[0].why == "curvature 11 above 10"


def test_a_nonfinite_signal_changes_nothing():
    policy, state = policy_for(infos("a"), rule="paper")
    for bad in (math.nan, math.inf):
        stats = LayerStats(variance=bad, curvature=bad)
        after, (decision,) = drive(policy, state, [observe(1, layers={"a": stats})])
        assert decision.precision_map == {"a": FP32}
        assert after.tracks["a"].curvature_hold == 0


def test_variance_falling_over_time_takes_layers_down_and_none_flaps():
    """Noise of a factor 1.2 rides on a variance that falls 10,000-fold: each layer goes down twice and never comes back."""
    names = [f"l{i}" for i in range(8)]
    policy, state = policy_for(infos(*names), rule="paper", hysteresis=1.5)
    observations = [
        observe(
            t,
            layers={
                n: 1e-1 * 10 ** (-t / 10 - i / 8) * 1.2 ** math.sin(7 * t + i) for i, n in enumerate(names)
            },
        )
        for t in range(60)
    ]
    _, decisions = drive(policy, state, observations)
    changes = [c for d in decisions for c in d.changes]
    assert all(d.precision_map[n] is FP16 for d in decisions[-5:] for n in names)
    assert len(changes) == 2 * len(names)
    assert all(Precision(c.after).rank < Precision(c.before).rank for c in changes)
    low = [sum(p is not FP32 for p in d.precision_map.values()) for d in decisions]
    assert low == sorted(low)


def test_hysteresis_and_dwell():
    policy, state = policy_for(
        infos("a"), rule="paper", tau_low=1e-4, tau_high=1e-2, hysteresis=2.0, min_dwell=3
    )
    values = [0.009, 0.011, 0.019, 0.021, 0.021, 0.021, 0.009, 0.009, 0.009]
    _, decisions = drive(policy, state, [observe(t, layers={"a": v}) for t, v in enumerate(values)])
    assert [d.precision_map["a"] for d in decisions] == [BF16, BF16, BF16, FP32, FP32, FP32, BF16, BF16, BF16]


# ------------------------------------------------------------------------------------------------ auto


def test_auto_runs_in_fp32_while_it_learns_thresholds_that_then_stay():
    names = [f"l{i}" for i in range(10)]
    config = {
        "rule": "auto",
        "warmup_skip_steps": 20,
        "low_quantile": 0.25,
        "high_quantile": 0.9,
        "min_dwell": 1,
    }
    policy, state = policy_for(infos(*names), gate="off", **config)
    variances = {n: 10.0 ** (-i) for i, n in enumerate(names)}
    history = []
    for tick in range(1, 8):
        early = 1e6 if tick < 2 else 1.0  # left out: it is within the first 20 steps of 100 samples
        state, decision = policy.step(
            state, observe(tick, layers={n: v * early for n, v in variances.items()})
        )
        history.append(decision)
    warm = [all(p is FP32 for p in d.precision_map.values()) for d in history]
    assert warm == [True] * 4 + [False] * 3  # 5 % of 100,000 samples is the fifth tick
    assert set(history[0].decided_by.values()) == {"warmup"}
    logs = [math.log(v) for v in variances.values()] * 4
    assert math.log(state.thresholds.low) == pytest.approx(np.quantile(logs, 0.25))
    assert math.log(state.thresholds.high) == pytest.approx(np.quantile(logs, 0.9))
    counts = [sum(p is f for p in history[-1].precision_map.values()) for f in (FP16, BF16, FP32)]
    assert counts == [2, 7, 1]
    fixed = state.thresholds
    state, decision = policy.step(state, observe(9, layers={n: v / 1e4 for n, v in variances.items()}))
    assert state.thresholds == fixed
    assert sum(p is FP32 for p in decision.precision_map.values()) == 0


@pytest.mark.parametrize(("total", "ends"), [(2_500, 1), (50_000, 2), (200_000, 10), (None, 20)])
def test_the_warm_up_ends_within_its_share_of_the_samples(total, ends):
    policy = make_precision_policy(
        PrecisionConfig(rule="auto", gate="off"),
        ladder=FULL,
        costs=None,
        initial_batch=100,
        total_samples=total,
    )
    state = policy.init(infos("a"))
    tick = 0
    while state.thresholds is None:
        tick += 1
        state, _ = policy.step(state, observe(tick, layers={"a": 1.0}, total_samples=total))
    assert tick == ends


def test_curvature_gets_its_threshold_from_the_first_probe_even_after_the_warm_up():
    names = [f"l{i}" for i in range(11)]
    policy, state = policy_for(infos(*names), rule="auto", gate="off", curvature_quantile=0.9)
    for tick in range(1, 6):
        state, _ = policy.step(state, observe(tick, layers=dict.fromkeys(names, 1e-9)))
    assert state.thresholds.curvature is None
    stats = {n: LayerStats(variance=1e-9, curvature=float(i + 1), probe_id=0) for i, n in enumerate(names)}
    state, decision = policy.step(state, observe(6, layers=stats))
    assert state.thresholds.curvature == pytest.approx(10.0)
    state, decision = policy.step(state, observe(7, layers=stats))
    assert [n for n, why in decision.decided_by.items() if why == "curvature"] == ["l10"]


def test_a_probe_counts_once_in_the_warm_up():
    policy, state = policy_for(infos("a", "b"), rule="auto", gate="off", warmup_skip_steps=0)
    stats = {
        "a": LayerStats(variance=1.0, curvature=1.0, probe_id=4),
        "b": LayerStats(variance=1.0, curvature=3.0, probe_id=4),
    }
    for tick in (1, 2, 3):
        state, _ = policy.step(state, observe(tick, layers=stats))
    assert len(state.warmup.log_curvature) == 2
    assert len(state.warmup.log_variance) == 6


# ------------------------------------------------------------------------------------------------ cost gate and memory


def settled(policy, state, names, ticks=8, **kwargs):
    for tick in range(1, ticks):
        state, decision = policy.step(state, observe(tick, layers=dict.fromkeys(names, 1e-9), **kwargs))
    return state, decision


def test_a_layer_goes_down_only_where_it_gains_torchao_2410():
    """torchao PR 2410: small layers get slower in low precision. The gate keeps them up and says the figures."""
    names = ["a", "b"]
    costs = table(names, {"a": 0.6, "b": 14.0})
    policy, state = policy_for(infos(*names), ladder=CPU, costs=costs, rule="paper", gate="cost")
    _, decision = settled(policy, state, names, ticks=2)
    assert decision.precision_map == {"a": BF16, "b": FP32}
    assert decision.decided_by == {"a": "ladder", "b": "cost"}
    costs = table(names, {"a": 1.0, "b": 0.999})
    policy, state = policy_for(infos(*names), ladder=CPU, costs=costs, rule="paper", gate="cost")
    _, decision = settled(policy, state, names, ticks=2)
    assert set(decision.precision_map.values()) == {FP32}


def test_a_map_that_costs_bytes_and_gains_no_time_is_not_taken_pytorch_61173():
    """pytorch 61173, 48049: AMP takes more memory than FP32. Bytes are measured and break ties."""
    costs = table(["a"], {"a": 1.0}, bytes_gain=1.5)
    for prefer in ("time", "memory"):
        policy, state = policy_for(
            infos("a"), ladder=CPU, costs=costs, rule="paper", gate="cost", prefer=prefer
        )
        _, decision = settled(policy, state, ["a"], ticks=3)
        assert decision.precision_map == {"a": FP32}


def test_under_memory_pressure_bytes_count_until_they_fit_again():
    names = ["a", "b"]
    costs = table(names, {"a": 0.5, "b": 2.0})  # b is slower in BF16 and keeps half the bytes
    policy, state = policy_for(
        infos(*names), ladder=CPU, costs=costs, rule="paper", gate="cost", promotion_hold=2
    )
    state, decision = settled(policy, state, names)
    assert decision.precision_map == {"a": BF16, "b": FP32}
    used = costs.kept_bytes(decision.precision_map, batch_size=100)

    def memory(utilisation, layers_map):
        kept = costs.kept_bytes(layers_map, batch_size=100)
        return MemoryReading(int(kept), int(used / utilisation))

    history = []
    for tick, utilisation in enumerate([0.95, 0.95, 0.95, 0.95, 0.5, 0.5, 0.5], start=8):
        reading = memory(utilisation, decision.precision_map)
        state, decision = policy.step(state, observe(tick, layers=dict.fromkeys(names, 1e-9), memory=reading))
        history.append((decision.precision_map["b"], decision.decided_by["b"]))
    # It stays down while going back up would bring the pressure back, and no longer.
    assert [p for p, _ in history] == [BF16] * 4 + [FP32] * 3
    assert decision.changes == ()


def test_a_change_of_batch_bucket_may_change_the_map():
    costs = dataclasses.replace(table(["a"], {"a": 0.5}, buckets=(100, 400)))
    slow = dict(costs.nodes[0].seconds) | {BF16: (0.5e-3, 2e-3)}
    costs = dataclasses.replace(costs, nodes=(dataclasses.replace(costs.nodes[0], seconds=slow),))
    policy, state = policy_for(infos("a"), ladder=CPU, costs=costs, rule="paper", gate="cost")
    state, decision = settled(policy, state, ["a"])
    assert decision.precision_map == {"a": BF16}
    _, decision = policy.step(state, observe(9, layers={"a": 1e-9}, batch_size=384))
    assert decision.precision_map == {"a": FP32}
    assert decision.decided_by == {"a": "cost"}


# ------------------------------------------------------------------------------------------------ pins and tied layers


def test_a_pin_to_what_the_device_cannot_do_is_an_error():
    ladder = Ladder((FP32,), {BF16: "x"}, unavailable={BF16: "bf16 arithmetic fails there"})
    with pytest.raises(TriAccelError, match=r"'a' is pinned to bf16.*fails there"):
        policy_for(infos("a", a={"pin": BF16}), ladder=ladder, rule="off")


def test_a_pin_off_the_ladder_that_can_run_wins():
    policy, state = policy_for(infos("a", "b", a={"pin": FP16}), ladder=CPU, rule="paper")
    assert policy.initial(state).precision_map == {"a": FP16, "b": FP32}
    _, (decision,) = drive(policy, state, [observe(1, layers={"a": 1e9, "b": 1e9})])
    assert decision.precision_map["a"] is FP16
    assert decision.decided_by["a"] == "pin"


def test_pinned_norms_are_in_the_map_and_others_are_not():
    layers = infos("a", "n", "m", n={"role": "norm", "pin": FP32}, m={"role": "norm"})
    policy, state = policy_for(layers, rule="paper")
    _, (decision,) = drive(policy, state, [observe(1, layers={"a": 1e-9})])
    assert decision.precision_map == {"a": FP16, "n": FP32}


def test_tied_layers_share_one_precision():
    layers = infos("a", "b", "c", b={"tied_to": "a", "numel": 0})
    policy, state = policy_for(layers, rule="paper")
    seen = {"a": LayerStats(variance=1e-9), "b": LayerStats(curvature=1e9), "c": LayerStats(variance=1e-9)}
    _, (decision,) = drive(policy, state, [observe(1, layers=seen)])
    assert decision.precision_map == {"a": FP32, "b": FP32, "c": FP16}
    pinned = infos("a", "b", "c", b={"tied_to": "a", "pin": BF16})
    policy, state = policy_for(pinned, rule="paper")
    assert policy.initial(state).precision_map == {"a": BF16, "b": BF16, "c": FP32}


def test_tied_layers_pinned_apart_are_an_error():
    layers = infos("a", "b", "c", b={"tied_to": "a", "pin": BF16}, c={"tied_to": "a", "pin": FP32})
    with pytest.raises(TriAccelError, match="share a parameter"):
        policy_for(layers, rule="paper")


def test_tied_layers_move_together_through_the_cost_gate():
    costs = table(["a", "b"], {"a": 0.4, "b": 1.2})
    layers = infos("a", "b", b={"tied_to": "a", "numel": 0})
    policy, state = policy_for(layers, ladder=CPU, costs=costs, rule="paper", gate="cost")
    _, decision = settled(policy, state, ["a", "b"])
    assert decision.precision_map == {"a": BF16, "b": BF16}
    costs = table(["a", "b"], {"a": 0.4, "b": 2.0})
    policy, state = policy_for(layers, ladder=CPU, costs=costs, rule="paper", gate="cost")
    _, decision = settled(policy, state, ["a", "b"])
    assert decision.precision_map == {"a": FP32, "b": FP32}


def test_a_frozen_layer_goes_to_bf16_and_no_lower():
    policy, state = policy_for(infos("a", "b", a={"numel": 0}), rule="paper")
    _, (decision,) = drive(policy, state, [observe(1, layers={"b": 1.0})])
    assert decision.precision_map == {"a": BF16, "b": FP32}


# ------------------------------------------------------------------------------------------------ overflow


def overflow(found, precision_map, *, skips=3, floor=False, tick=5, variance=1e-9):
    return observe(
        tick,
        layers=dict.fromkeys(precision_map, variance),
        found_inf=found,
        consecutive_skips=skips,
        loss_scale=1.0,
        loss_scale_at_floor=floor,
        precision_map=precision_map,
    )


def all_fp16(names, ladder=FULL, **config):
    policy, state = policy_for(infos(*names), ladder=ladder, rule="paper", **config)
    state, decision = settled(policy, state, names, ticks=2)
    assert set(decision.precision_map.values()) == {FP16}
    return policy, state, dict(decision.precision_map)


def test_overflow_first_backs_the_scale_off_then_the_layer_nearest_the_loss_is_promoted_pytorch_99640():
    """pytorch 99640: the run dies at the minimum scale. The offending layer, and no other, is promoted, by name."""
    names = ["a", "b", "c"]
    policy, state, formats = all_fp16(names)
    state, decision = policy.step(state, overflow(("b", "a"), formats, skips=1))
    assert decision.precision_map == formats
    state, decision = policy.step(state, overflow(("b", "a"), formats, skips=3))
    assert decision.precision_map == formats | {"b": BF16}
    assert decision.decided_by["b"] == "overflow"
    assert decision.changes[0].why == "found inf in b in 3 steps in a row; fp16 -> bf16 for 3 ticks"
    assert [c.layer for c in decision.changes] == ["b"]


def test_at_the_floor_one_skip_is_enough():
    names = ["a", "b"]
    policy, state, formats = all_fp16(names)
    _, decision = policy.step(state, overflow(("b", "a"), formats, skips=1, floor=True))
    assert decision.precision_map == {"a": FP16, "b": BF16}
    assert "floor" in decision.changes[0].why


def test_without_bf16_it_goes_to_fp32():
    names = ["a", "b"]
    policy, state, formats = all_fp16(names, ladder=Ladder((FP16, FP32)))
    _, decision = policy.step(state, overflow(("b",), formats))
    assert decision.precision_map == {"a": FP16, "b": FP32}


def test_when_the_first_suspect_is_out_of_fp16_the_next_ones_follow():
    names = ["a", "b", "c"]
    policy, state, formats = all_fp16(names)
    promoted = []
    for _ in range(4):
        state, decision = policy.step(state, overflow(("b", "a"), formats))
        promoted += [c.layer for c in decision.changes]
        formats = dict(decision.precision_map)
    # b; then c, whose input gradient may have overflowed; then a, whose output may have; then b once more.
    assert promoted[:3] == ["b", "c", "a"]


def test_a_layer_that_overflows_again_is_held_twice_as_long():
    names = ["a"]
    policy, state, formats = all_fp16(names, promotion_hold=2, ladder=Ladder((FP16, FP32)))
    holds = []
    for _ in range(3):
        state, decision = policy.step(state, overflow(("a",), formats))
        ticks = 0
        while decision.precision_map["a"] is not FP16:
            ticks += 1
            state, decision = policy.step(
                state, observe(9, layers={"a": 1e-9}, precision_map=decision.precision_map)
            )
        holds.append(ticks)
    assert holds == [2, 4, 8]


def test_a_pinned_layer_is_never_promoted():
    policy, state = policy_for(infos("a", "b", b={"pin": FP16}), rule="paper")
    state, decision = settled(policy, state, ["a", "b"], ticks=2)
    _, decision = policy.step(state, overflow(("b", "a"), dict(decision.precision_map)))
    assert decision.precision_map == {"a": BF16, "b": FP16}


def test_nonfinite_gradients_in_fp32_promote_nothing():
    policy, state = policy_for(infos("a"), rule="paper")
    _, decision = policy.step(state, overflow(("a",), {"a": FP32}, variance=1.0))
    assert decision.precision_map == {"a": FP32}
    assert decision.changes == ()


# ------------------------------------------------------------------------------------------------ properties

variances = st.floats(1e-12, 1e3)
formats = st.sampled_from(list(Precision))


@given(
    st.lists(st.tuples(variances, st.floats(1e-3, 1e5)), min_size=1, max_size=25),
    st.sampled_from([FULL, CPU, Ladder((FP16, FP32)), Ladder((FP32,))]),
    formats,
    st.sampled_from(["paper", "auto"]),
)
def test_pins_win_and_nothing_is_below_the_ladder(history, ladder, pin, rule):
    layers = infos("a", "b", "p", p={"pin": pin})
    policy, state = policy_for(layers, ladder=ladder, rule=rule, gate="off", tau_curvature=100.0)
    for tick, (v, curvature) in enumerate(history, start=1):
        stats = LayerStats(variance=v, curvature=curvature, probe_id=tick)
        found = ("b", "a") if v > 100 else ()
        state, decision = policy.step(
            state,
            observe(
                tick, layers=dict.fromkeys("abp", stats), found_inf=found, consecutive_skips=3 if found else 0
            ),
        )
        assert decision.precision_map["p"] is pin
        assert decision.decided_by["p"] == "pin"
        assert decision.precision_map["a"] in ladder.precisions
        assert set(decision.precision_map) == {"a", "b", "p"}
        assert {c.layer for c in decision.changes} <= {"a", "b"}


@given(
    st.builds(Track, level=formats, dwell=st.integers(0, 5)),
    variances,
    st.floats(1.0, 1e6),
    st.floats(1.0, 4.0),
)
def test_the_bound_is_monotone_in_variance(track, v, factor, hysteresis):
    config = PrecisionConfig(hysteresis=hysteresis, min_dwell=2)
    thresholds = Thresholds(1e-6, 1e-2)
    bounds = [
        step_track(track, LayerStats(variance=x), thresholds, config=config, frozen=False)[1]
        for x in (v, v * factor)
    ]
    assert bounds[0].precision.rank <= bounds[1].precision.rank


@given(st.floats(1e-9, 1.0), st.lists(st.floats(0.0, 1.0), min_size=10, max_size=60), st.floats(1.05, 3.0))
def test_no_flapping_inside_the_dead_band(centre, noise, hysteresis):
    """Variance that wanders by less than the hysteresis changes a layer's format at most once in each direction of approach."""
    config = PrecisionConfig(hysteresis=hysteresis, min_dwell=1)
    thresholds = Thresholds(1e-6, 1e-2)
    track, levels = Track(dwell=1), []
    for x in noise:
        variance = centre * (1 + x * (hysteresis - 1) * 0.99)
        track, bound = step_track(
            track, LayerStats(variance=variance), thresholds, config=config, frozen=False
        )
        levels.append(bound.precision)
    changes = sum(a != b for a, b in pairwise(levels))
    assert changes <= 2
    ranks = [p.rank for p in levels]
    assert ranks == sorted(ranks, reverse=True)  # from FP32 it only ever goes down


@given(st.lists(variances, min_size=1, max_size=12), st.integers(0, 11))
@settings(max_examples=40)
def test_the_state_survives_a_checkpoint_and_decides_the_same(history, cut):
    costs = table(["a", "b"], {"a": 0.5, "b": 2.0})
    layers = infos("a", "b", b={"pin": FP32})
    policy, state = policy_for(layers, ladder=CPU, costs=costs, rule="auto", warmup_skip_steps=0)
    adapter = TypeAdapter(type(state))
    for tick, v in enumerate(history, start=1):
        if tick == cut:
            state = adapter.validate_json(adapter.dump_json(state))
        seen = observe(
            tick,
            layers={"a": LayerStats(variance=v, curvature=v, probe_id=tick), "b": LayerStats(variance=v)},
        )
        one = policy.step(state, seen)
        assert one == policy.step(state, seen)
        fresh, _ = policy_for(layers, ladder=CPU, costs=costs, rule="auto", warmup_skip_steps=0)
        assert one == fresh.step(state, seen)
        state = one[0]
    assert adapter.validate_python(adapter.dump_python(state, mode="json")) == state


@pytest.mark.parametrize("rule", ["off", "static", "paper", "auto"])
def test_state_types_are_plain(rule):
    _, state = policy_for(infos("a"), ladder=CPU, costs=table(["a"], {"a": 0.5}), rule=rule)
    adapter = TypeAdapter(type(state))
    assert adapter.validate_python(adapter.dump_python(state, mode="json")) == state
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.precision_map = {}


@pytest.mark.parametrize(
    ("values", "words"),
    [({"tau_low": 1.0}, "tau_low"), ({"low_quantile": 0.95}, "low_quantile"), ({"ladder": (BF16,)}, "fp32")],
)
def test_thresholds_out_of_order_are_errors(values, words):
    with pytest.raises(ValueError, match=words):
        PrecisionConfig(**values)


def test_edges_make_a_lone_gain_not_worth_its_conversions():
    """The middle layer gains 0.1 ms and would cost two conversions of 0.2 ms each."""
    names = ["a", "b", "c"]
    edges = (Edge(0, 1, 1000.0, False), Edge(1, 2, 1000.0, False))
    costs = table(names, {"a": 1.5, "b": 0.9, "c": 1.5}, edges=edges)
    policy, state = policy_for(infos(*names), ladder=CPU, costs=costs, rule="static")
    assert set(policy.initial(state).precision_map.values()) == {FP32}
    assert "conversions cost more" in state.reasons["b"]
