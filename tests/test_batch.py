"""Batch policies: pure functions of observed bytes, noise and counts, driven here by a scripted device."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from triaccel.batch import BatchState, make_batch_policy
from triaccel.config import BatchConfig
from triaccel.memory import FakeMemory
from triaccel.types import MemoryReading, NoiseScale, Observation

TOTAL = 10_000_000
BASE, SAMPLE = 100_000, 1_000


def line(batch, version, step):
    return BASE + SAMPLE * batch


class Simulation:
    """Steps of a training loop in which only batches and bytes exist; a control tick every ``every`` steps."""

    def __init__(
        self,
        config,
        *,
        bytes_of=line,
        budget_of=lambda step: 10**9,
        total=TOTAL,
        every=10,
        noise=10_000.0,
        resident=None,
    ):
        self.config, self.every, self.noise, self.total = config, every, noise, total
        self.policy = make_batch_policy(config, total_samples=total)
        self.state = self.policy.init(())
        self.decision = self.policy.initial(self.state)
        self.memory = FakeMemory(bytes_of, budget_of, resident_bytes=resident)
        self.bytes_of, self.budget_of = bytes_of, budget_of
        self.version = 0
        self.step = self.samples = 0
        self.sizes, self.over, self.changes = [], [], []

    def run(self, steps):
        for _ in range(steps):
            size = self.decision.micro_batch_size
            with self.memory.observe(batch_size=size, map_version=self.version):
                self.sizes.append(size)
            self.over.append(self.bytes_of(size, self.version, self.step) > self.budget_of(self.step))
            self.step += 1
            self.samples += self.decision.batch_size
            if self.step % self.every == 0:
                self.tick()
        return self

    def tick(self, **fields):
        noise = None if self.noise is None else NoiseScale(self.noise, 1.0, 1.0, 4)
        seen = {
            "step": self.step,
            "updates": self.step,
            "samples_seen": self.samples,
            "total_samples": self.total,
            "batch_size": self.decision.batch_size,
            "map_version": self.version,
            "memory": self.memory.reading(),
            "noise": noise,
        }
        self.state, self.decision = self.policy.step(self.state, Observation(**(seen | fields)))
        self.changes += [(self.step // self.every, change) for change in self.decision.changes]
        return self.decision

    def moves(self):
        return [(tick, change) for tick, change in self.changes if change.before != change.after]


def free(**fields):
    """A model rule without noise cap and minimum of updates, so that memory alone decides."""
    return BatchConfig(**({"noise_cap": 0, "min_updates": 0} | fields))


def best_rung(config, budget):
    fitting = [r for r in config.rungs if line(r, 0, 0) <= config.rho_high * budget]
    return max(fitting, default=min(config.rungs))


def test_ten_thousand_steps_under_a_budget_that_halves_and_rises():
    config = free(maximum=512)
    high, low = 700_000, 350_000

    def budget(step):
        return low if 4_000 <= step < 7_000 else high

    simulation = Simulation(config, budget_of=budget).run(10_000)
    settled = simulation.sizes[:4_000][-1]
    assert settled == best_rung(config, high) == 512
    assert simulation.sizes[4_010] == simulation.sizes[6_999] == best_rung(config, low) == 192
    # steps over budget: none after one control tick
    assert not any(simulation.over[4_010:])
    assert not any(simulation.over[:4_000])
    # back at the best rung within five ticks of room
    assert simulation.sizes[7_050] == 512
    moves = simulation.moves()
    assert len([t for t, _ in moves if 110 <= t <= 400]) == 1  # the fall, nothing else
    assert len([t for t, _ in moves if t > 400]) == 1  # the rise, nothing else


@settings(max_examples=60, deadline=None)
@given(
    budgets=st.lists(st.integers(130_000, 1_200_000), min_size=1, max_size=6),
    initial=st.sampled_from([16, 96, 192, 512]),
    base=st.sampled_from([0, 20_000, 100_000]),
)
def test_any_script_of_budgets_is_followed(budgets, initial, base):
    """Over budget for one tick at most after a fall, at the best rung in the end, and back within five ticks of room."""
    config = free(initial=initial)
    length = 300

    def bytes_of(batch, version, step):
        return base + SAMPLE * batch

    def budget(step):
        return budgets[min(step // length, len(budgets) - 1)]

    simulation = Simulation(config, bytes_of=bytes_of, budget_of=budget, resident=base)
    simulation.run(length * len(budgets))
    for index, limit in enumerate(budgets):
        part = slice(index * length + 10, (index + 1) * length)
        floor = bytes_of(16, 0, 0) > config.rho_high * limit
        if floor:
            assert set(simulation.sizes[part]) == {16}
            continue
        assert not any(simulation.over[part]), (index, limit)
        fitting = [r for r in config.rungs if bytes_of(r, 0, 0) <= config.rho_high * limit]
        assert simulation.sizes[part.stop - 1] == max(fitting)
        if index:  # sizes known by now: five ticks
            ran = set(simulation.sizes[: part.start])
            if max(ran) >= max(fitting):
                assert simulation.sizes[index * length + 60] == max(fitting)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), spread=st.floats(0.0, 0.4))
def test_a_trembling_budget_makes_no_oscillation(seed, spread):
    """At most one change per three ticks in steady state, whatever the tremor (steady: after the first 20 ticks)."""
    import random

    rng = random.Random(seed)
    budgets = [int(450_000 * (1 + rng.uniform(-spread, spread))) for _ in range(400)]
    simulation = Simulation(free(), budget_of=lambda step: budgets[min(step // 10, 399)]).run(4_000)
    moves = [tick for tick, _ in simulation.moves() if tick > 20]
    assert len(moves) <= (400 - 20) / 3
    grown = [tick for tick, change in simulation.moves() if change.after > change.before]
    assert all(b - a >= 3 for a, b in itertools.pairwise(grown))


def test_one_size_of_unknown_base_grows_only_where_proportion_allows():
    """No guess: with one size seen, a larger one may take its bytes in proportion; two sizes settle it."""
    simulation = Simulation(free(initial=16), budget_of=lambda step: 137_778).run(200)
    assert set(simulation.sizes) == {16}
    with simulation.memory.observe(batch_size=10, map_version=0):
        pass  # an epoch's tail is a second size
    assert simulation.run(100).sizes[-1] == 24


def test_lower_precision_lets_the_batch_grow():
    def bytes_of(batch, version, step):
        return BASE + (SAMPLE if version == 0 else SAMPLE // 2) * batch

    simulation = Simulation(free(), bytes_of=bytes_of, budget_of=lambda step: 400_000).run(500)
    assert simulation.sizes[-1] == 256
    simulation.version = 1
    simulation.run(500)
    assert simulation.sizes[-1] == 512
    why = simulation.moves()[-1][1].why
    assert "of map 0" in why  # one size under the new map sufficed: the base is the old map's
    assert "predicted at" in why


def test_bytes_of_a_new_map_are_not_those_of_the_old():
    """A map that needs more bytes shrinks the batch at the next tick."""

    def bytes_of(batch, version, step):
        return BASE + SAMPLE * (1 + version) * batch

    simulation = Simulation(free(), bytes_of=bytes_of, budget_of=lambda step: 500_000).run(500)
    assert simulation.sizes[-1] == 256
    simulation.version = 1
    simulation.run(20)
    assert simulation.sizes[-1] == 128


def test_growth_waits_for_cooldown_and_shrinking_does_not():
    simulation = Simulation(free(cooldown=4), budget_of=lambda step: 10**6 if step < 1_000 else 200_000).run(
        1_500
    )
    ticks = [tick for tick, change in simulation.moves() if change.after > change.before]
    assert len(ticks) > 1
    assert all(b - a >= 4 for a, b in itertools.pairwise(ticks))
    fall = next(tick for tick, change in simulation.moves() if change.after < change.before)
    assert fall == 100


def test_only_sizes_within_twice_what_ran():
    """Lightning 18426, 21154: the size decided must not be a guess far from what was tried, nor sit on the edge."""
    simulation = Simulation(free(maximum=4096)).run(1_000)
    ran = [simulation.sizes[0]]
    for _, change in simulation.moves():
        assert change.after <= 2 * max(ran)
        ran.append(change.after)
    share = line(simulation.sizes[-1], 0, 0) / 10**9
    assert share <= 0.9


def test_noise_cap_and_its_absence():
    assert max(Simulation(free(noise_cap=1.0), noise=200.0).run(500).sizes) == 192
    assert max(Simulation(free(noise_cap=2.0), noise=200.0).run(500).sizes) == 384
    assert max(Simulation(free(noise_cap=0), noise=None).run(500).sizes) == 512
    unknown = Simulation(free(noise_cap=1.0), noise=None).run(500)
    assert set(unknown.sizes) == {96}
    said = [change.why for _, change in unknown.changes]
    assert len(said) == 1
    assert said[0].startswith("noise scale unknown")


def test_the_noise_cap_never_shrinks():
    simulation = Simulation(free(noise_cap=1.0), noise=600.0).run(500)
    assert simulation.sizes[-1] == 512
    simulation.noise = 50.0
    assert set(simulation.run(200).sizes[-200:]) == {512}


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_min_updates_bounds_growth(share):
    total = 96 * 500
    simulation = Simulation(free(min_updates=share), total=total, every=5)
    while simulation.samples < total:
        simulation.run(1)
    assert simulation.step >= share * total / 96
    if share < 0.9:
        assert max(simulation.sizes) > 96


def test_unknown_total_holds_the_batch_and_says_so():
    simulation = Simulation(BatchConfig(noise_cap=0), total=None).run(200)
    assert set(simulation.sizes) == {96}
    assert [change.why.partition(":")[0] for _, change in simulation.changes] == ["total_samples unknown"]


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", 2.0), ("linear", 4.0), ("none", 1.0)])
def test_the_rate_follows_the_batch(rule, factor):
    """accelerate PR 3071: batch, accumulation and rate have one owner."""
    decision = Simulation(free(initial=128, rate_rule=rule)).run(500).decision
    assert (decision.batch_size, decision.micro_batch_size) == (512, 512)
    assert decision.rate_factor == pytest.approx(factor)


@pytest.mark.parametrize("rule", ["model", "paper"])
def test_hold_keeps_the_update_and_moves_the_micro_batch(rule):
    config = free(rule=rule, effective="hold", initial=256)
    simulation = Simulation(config, budget_of=lambda step: 10**6 if step >= 100 or step < 50 else 200_000)
    simulation.run(80)
    assert simulation.decision.batch_size == 256
    assert simulation.decision.rate_factor == 1.0
    assert simulation.decision.micro_batch_size <= 128 if rule == "paper" else 64
    simulation.run(400)
    assert simulation.decision.micro_batch_size == 256


def test_off_never_moves():
    simulation = Simulation(BatchConfig(rule="off"), budget_of=lambda step: 1_000).run(100)
    assert set(simulation.sizes) == {96}
    assert simulation.changes == []
    assert simulation.decision.rate_factor == 1.0


def test_paper_moves_by_delta_between_two_utilisations():
    config = BatchConfig(rule="paper", cooldown=0, maximum=256)
    simulation = Simulation(config, budget_of=lambda step: 400_000 if step < 500 else 260_000).run(1_000)
    assert [change.after for _, change in simulation.moves()] == [128, 160, 192, 160, 128]
    assert "below 70%" in simulation.moves()[0][1].why
    assert "above 90%" in simulation.moves()[-1][1].why


def test_paper_with_a_ladder_moves_by_one_rung():
    config = BatchConfig(rule="paper", cooldown=0, ladder=(16, 96, 200, 400))
    simulation = Simulation(config, budget_of=lambda step: 10**6).run(200)
    assert [change.after for _, change in simulation.moves()] == [200, 400]


def test_floor_is_held_and_said_once():
    """accelerate 1934: the batch never reaches zero."""
    simulation = Simulation(free(), budget_of=lambda step: 110_000).run(300)
    assert simulation.sizes[-1] == 16
    floors = [change.why for _, change in simulation.changes if change.before == change.after]
    assert len(floors) == 1
    assert "floor" in floors[0]


def test_a_failed_fit_holds():
    """yolov5 9287: peaks that make no sense are evidence against growing, not a reason for a default."""
    reading = MemoryReading(300_000, 10**6, ((48, 0, 500_000), (96, 0, 300_000)))
    policy = make_batch_policy(free(), total_samples=TOTAL)
    seen = Observation(100, 100, 9_600, TOTAL, 96, memory=reading)
    state, decision = policy.step(policy.init(()), seen)
    assert decision.batch_size == 96
    assert decision.changes[0].why.startswith("no fit")
    assert policy.step(state, seen)[1].changes == ()


def test_a_size_that_ran_out_is_left_and_not_tried_again_until_there_is_more_room():
    policy = make_batch_policy(free(initial=256, cooldown=0), total_samples=TOTAL)

    def seen(budget):
        peaks = ((128, 0, 228_000), (192, 0, 292_000))
        return Observation(
            100,
            100,
            9_600,
            TOTAL,
            256,
            memory=MemoryReading(292_000, budget, peaks, failed=((256, 0, 600_000),)),
        )

    state, decision = policy.step(policy.init(()), seen(600_000))
    assert decision.batch_size == 192
    assert "ran out of memory" in decision.changes[0].why
    for _ in range(5):
        state, decision = policy.step(state, seen(600_000))
        assert decision.batch_size == 192
    for _ in range(20):
        state, decision = policy.step(state, seen(700_000))
    assert decision.batch_size > 192


def test_memory_unknown_holds_and_says_so():
    policy = make_batch_policy(free(), total_samples=TOTAL)
    _, decision = policy.step(policy.init(()), Observation(1, 1, 96, TOTAL, 96))
    assert decision.batch_size == 96
    assert "unknown" in decision.changes[0].why


def test_the_ladder_is_short():
    """composer 2214: each new size may recompile; the sizes are few."""
    assert len(BatchConfig().rungs) <= 12
    assert len(set(Simulation(free()).run(2_000).sizes)) <= len(BatchConfig().rungs)


def test_ladder_must_ascend():
    with pytest.raises(ValueError, match="ascending"):
        BatchConfig(ladder=(96, 64, 128))


@pytest.mark.parametrize("rule", ["off", "paper", "model"])
def test_states_are_json_and_policies_pure(rule):
    simulation = Simulation(free(rule=rule), budget_of=lambda step: 300_000 + 997 * step).run(300)
    adapter = TypeAdapter(BatchState)
    text = json.dumps(adapter.dump_python(simulation.state, mode="json"))
    restored = adapter.validate_json(text)
    assert restored == simulation.state
    seen = Observation(300, 300, simulation.samples, TOTAL, 96, memory=simulation.memory.reading())
    assert simulation.policy.step(restored, seen) == simulation.policy.step(simulation.state, seen)
