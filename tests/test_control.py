"""The control tick: order, versions, and that the log says what was decided."""

from dataclasses import dataclass

import pytest

from triaccel.control import Controller
from triaccel.trace import Policies
from triaccel.types import (
    BatchDecision,
    Change,
    LayerInfo,
    LayerStats,
    Observation,
    Precision,
    PrecisionDecision,
    RateDecision,
    TriAccelError,
)

LAYERS = (LayerInfo("a", "Linear", "compute", 0, 4),)


@dataclass(frozen=True)
class Count:
    ticks: int = 0


class Flip:
    """FP32 and BF16 in turn."""

    def init(self, layers):
        return Count()

    def initial(self, state):
        return PrecisionDecision(
            {"a": Precision.BF16 if state.ticks % 2 else Precision.FP32}, decided_by={"a": "variance"}
        )

    def step(self, state, observation):
        after = Count(state.ticks + 1)
        new = self.initial(after)
        change = Change("precision", "a", observation.precision_map["a"], new.precision_map["a"], "flip")
        return after, PrecisionDecision(new.precision_map, (change,), new.decided_by)


class Unit:
    def init(self, layers):
        return Count()

    def initial(self, state):
        return RateDecision({})

    def step(self, state, observation):
        return Count(state.ticks + 1), RateDecision({"a": 1.0 + state.ticks})


class SeesMap:
    """Records which map version it was shown, as the batch size."""

    def init(self, layers):
        return Count()

    def initial(self, state):
        return BatchDecision(8, 8)

    def step(self, state, observation):
        return state, BatchDecision(100 + observation.map_version, 8)


def observe(controller, step):
    return Observation(
        step=step,
        updates=step,
        samples_seen=8 * step,
        total_samples=80,
        batch_size=8,
        layers={"a": LayerStats(variance=0.5, curvature=2.0, eigenvalues=(3.0, 1.0), probe_id=step)},
        precision_map=controller.precision.precision_map,
        map_version=controller.map_version,
    )


def make():
    return Controller(Policies(Flip(), Unit(), SeesMap()), LAYERS)


def test_the_batch_policy_sees_the_map_that_was_just_decided():
    controller = make()
    for step in (1, 2, 3):
        controller.tick(observe(controller, step), {})
        assert controller.map_version == step % 2  # a map that comes back has its old number
        assert controller.batch.batch_size == 100 + step % 2


def test_every_tick_is_logged_with_its_signals():
    controller = make()
    controller.tick(observe(controller, 1), {"a": "float32"})
    first, second = controller.trace.entries
    assert (first.step, first.samples_seen, first.map_version) == (0, 0, 0)
    assert (second.samples_seen, second.map_version, second.batch_size) == (8, 1, 101)
    assert second.precision_map == {"a": Precision.BF16}
    assert second.curvature == {"a": 2.0}
    assert second.eigenvalues == {"a": (3.0, 1.0)}
    assert second.variance == {"a": 0.5}
    assert second.verified == {"a": "float32"}
    assert second.changes[0].why == "flip"
    assert controller.decided_by == {"variance": 1}


def test_state_round_trip_goes_on_identically():
    a, b = make(), make()
    a.tick(observe(a, 1), {})
    b.load_state_dict(a.state_dict())
    for step in (2, 3):
        a.tick(observe(a, step), {})
        b.tick(observe(b, step), {})
    assert a.trace.entries == b.trace.entries
    assert a.state_dict() == b.state_dict()


def test_foreign_state_is_refused():
    controller = make()
    state = controller.state_dict()
    with pytest.raises(TriAccelError, match="another configuration or version"):
        controller.load_state_dict({**state, "states": state["states"][:2]})
    with pytest.raises(TriAccelError, match="another configuration or version"):
        controller.load_state_dict({k: v for k, v in state.items() if k != "batch"})
