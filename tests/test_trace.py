"""The trace: round trip, compactness, replay, and clear errors on damaged files."""

import json

import pytest

from triaccel.trace import Trace, TraceEntry
from triaccel.types import Change, LayerInfo, NoiseScale, Observation, Precision, TriAccelError

LAYERS = (LayerInfo("a", "Linear", "compute", 0, 4), LayerInfo("b", "Linear", "compute", 1, 4))


def entry(step, seen, batch, low, **extra):
    return TraceEntry(
        step=step,
        samples_seen=seen,
        precision_map={"a": Precision.BF16 if low else Precision.FP32, "b": Precision.FP32},
        map_version=int(low),
        batch_size=batch,
        micro_batch_size=batch,
        rate_factor=(batch / 8) ** 0.5,
        scales={"a": 0.5, "b": 2.0} if low else {},
        **extra,
    )


@pytest.fixture
def trace():
    return Trace(
        [
            entry(0, 0, 8, False),
            entry(4, 32, 8, True, noise=NoiseScale(40.0, 2.0, 0.05, 3), eigenvalues={"a": (3.0, 1.0)}),
            entry(8, 64, 16, True, changes=(Change("batch", None, 8, 16, "utilisation 0.20 below 0.70"),)),
        ]
    )


def test_round_trip_by_file(trace, tmp_path):
    trace.save(tmp_path / "trace.jsonl")
    assert Trace.load(tmp_path / "trace.jsonl").entries == trace.entries


def test_what_did_not_change_is_not_written_again(trace):
    rows = trace.dumps()
    assert "precision_map" not in rows[2]
    assert "batch_size" not in rows[1]
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize(
    ("seen", "batch", "low"),
    [(0, 8, False), (31, 8, False), (32, 8, True), (63, 8, True), (64, 16, True), (999, 16, True)],
)
def test_replay_follows_the_clock_of_samples(trace, seen, batch, low):
    replay = Trace.loads(trace.dumps()).policies()
    states = [policy.init(LAYERS) for policy in replay]
    observation = Observation(step=0, updates=0, samples_seen=seen, total_samples=None, batch_size=8)
    decisions = [policy.step(state, observation)[1] for policy, state in zip(replay, states, strict=True)]
    assert decisions[0].precision_map["a"] is (Precision.BF16 if low else Precision.FP32)
    assert decisions[1].scales.get("a", 1.0) == (0.5 if low else 1.0)
    assert decisions[2].batch_size == batch
    assert decisions[2].rate_factor == (batch / 8) ** 0.5


def test_replay_on_another_model_is_refused(trace):
    with pytest.raises(TriAccelError, match="another model"):
        trace.policies().precision.init((LayerInfo("other", "Linear", "compute", 0, 4),))


def test_empty_and_missing(tmp_path):
    with pytest.raises(TriAccelError, match="nothing to replay"):
        Trace().policies()
    with pytest.raises(TriAccelError, match="no trace at"):
        Trace.load(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(TriAccelError, match="holds no trace entry"):
        Trace.load(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: [*lines[:2], lines[2][:20]], "line 3: not JSON"),
        (
            lambda lines: [
                lines[0].replace('"format": 1', '"format": 99').replace('"format":1', '"format":99'),
                *lines[1:],
            ],
            "format 99",
        ),
        (lambda lines: [*lines[:1], '{"surprise": 1}'], "line 2.*unknown fields"),
        (lambda lines: ['{"format": 1, "step": 0}'], "line 1: not a trace entry"),
        (lambda lines: [*lines[:1], "[1, 2]"], "line 2: not a trace entry"),
    ],
)
def test_damaged_files_name_the_line(trace, tmp_path, damage, words):
    path = tmp_path / "trace.jsonl"
    trace.save(path)
    path.write_text("\n".join(damage(path.read_text().splitlines())) + "\n")
    with pytest.raises(TriAccelError, match=words):
        Trace.load(path)
