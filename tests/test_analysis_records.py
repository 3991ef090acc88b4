"""Reading run folders and compact records: every state kept, one clear error for what is corrupt."""

import gzip
import json
import math

import pytest
import synthetic_records as synthetic

from analysis.compact import read_compact, slug, write_compact
from analysis.logs import MAX_STEPS, read_log, series_from_events
from analysis.record import STATES, RecordError
from analysis.records import load


@pytest.fixture
def folder(tmp_path):
    return synthetic.write_run(tmp_path / "run", seeds=range(2), arms=("fp32", "off", "tri-accel"), points=10)


def _cell(folder, arm="fp32", seed=0):
    return next(folder.glob(f"cells/{arm}-*-{seed}-96-0"))


def test_every_state_is_kept(tmp_path):
    """AlgoPerf PR 780, timm (CSV only at the end): failure is a state, and a cell that has not run is one too."""
    arms = tuple(synthetic.ARMS[: len(STATES)])
    states = {(arm, 0): state for arm, state in zip(arms, STATES, strict=True)}
    run = load(synthetic.write_run(tmp_path / "run", arms=arms, seeds=[0], states=states))
    assert sorted(record.state for record in run.records) == sorted(STATES)
    for record in run.records:
        assert record.done == (record.state == "done")
        if not record.done:
            assert record.metric("test_accuracy") is None
        if record.state not in ("done", "missing"):
            assert "in this test" in record.reason


def test_a_half_written_last_line_is_left_out_and_counted(folder):
    log = _cell(folder) / "log.jsonl"
    whole = load(folder).records
    log.write_bytes(log.read_bytes() + b'{"event": "step", "samples_se')
    run = load(folder)
    assert run.half_written_lines == 1
    assert run.records == whole


def test_a_corrupt_line_within_a_log_is_one_error_with_file_and_line(folder):
    log = _cell(folder) / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    lines[2] = '{"event": "st\n'
    log.write_text("".join(lines))
    with pytest.raises(RecordError, match=rf"{log}:3: .*run the cell again"):
        load(folder)
    lines[2] = "[1]\n"
    log.write_text("".join(lines))
    with pytest.raises(RecordError, match=rf"{log}:3: a list"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(state="finished"), "state 'finished' is none of done"),
        (lambda r: r["metrics"].update(test_accuracy=float("nan")), "metrics.test_accuracy is nan"),
        (lambda r: r["metrics"].update(test_accuracy={"nonfinite": "nan"}), "metrics.test_accuracy is"),
        (lambda r: r["metrics"].update(test_accuracy=71.0), "not a fraction"),
        (lambda r: r["metrics"].pop("train_seconds"), "metrics.train_seconds is None"),
        (lambda r: r["metrics"].update(train_seconds=0), "not positive"),
        (lambda r: r["cell"].pop("seed"), "cell.seed is None, not int"),
        (lambda r: r.pop("cell"), "no object 'cell'"),
        (lambda r: r.update(schema=2), "schema 2"),
    ],
)
def test_a_corrupt_result_is_one_error_with_file_and_line(folder, change, message):
    file = _cell(folder) / "result.json"
    result = json.loads(file.read_text())
    change(result)
    file.write_text(json.dumps(result))
    with pytest.raises(RecordError, match=r"result\.json:1: .*run the cell again") as caught:
        load(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_errors_name_the_line(folder):
    file = _cell(folder) / "result.json"
    file.write_text('{\n"cell": {},\n"state": \n')
    with pytest.raises(RecordError, match=r"result\.json:[34]: not valid JSON"):
        load(folder)
    file.write_text("[]")
    with pytest.raises(RecordError, match="a list where an object"):
        load(folder)


def test_folders_without_records_say_so(tmp_path):
    with pytest.raises(RecordError, match="no such folder"):
        load(tmp_path / "nothing")
    with pytest.raises(RecordError, match="neither a run folder"):
        load(tmp_path)
    (tmp_path / "grid.json").write_text('{"grid": "quick"}')
    with pytest.raises(RecordError, match="no cells"):
        load(tmp_path)


def test_non_finite_numbers_that_are_no_result_become_unknown(folder):
    file = _cell(folder) / "result.json"
    result = json.loads(file.read_text())
    result["metrics"]["test_loss"] = {"nonfinite": "inf"}
    result["metrics"]["final_train_loss"] = math.nan
    file.write_text(json.dumps(result))
    record = next(r for r in load(folder).records if r.arm == "fp32" and r.seed == 0)
    assert record.metric("test_loss") is None
    assert record.metric("final_train_loss") is None


def test_no_folder_or_host_name_of_the_machine_remains(folder):
    """Records are committed: paths and host names are not."""
    for file in folder.glob("cells/*/result.json"):
        result = json.loads(file.read_text())
        result["cell"]["dataset"] = "folder:/home/somebody/images"
        result["provenance"]["host"] = "somebodys-machine"
        result["cell"]["config"]["cache_dir"] = "/home/somebody/cache"
        file.write_text(json.dumps(result))
    records = load(folder).records
    assert {record.dataset for record in records} == {"folder:images"}
    assert "somebody" not in repr(records)
    assert len({record.provenance["host"] for record in records}) == 1


# ------------------------------------------------------------------ logs


def test_a_resumed_log_counts_each_sample_once():
    """A run killed at sample 40 and resumed from 20: what was repeated is replaced."""
    first = [
        {"event": "step", "samples_seen": n, "train_seconds": float(n), "batch_size": 8}
        for n in (10, 20, 30, 40)
    ]
    change = {"event": "change", "samples_seen": 35, "component": "batch"}
    again = [
        {"event": "step", "samples_seen": n, "train_seconds": n + 0.5, "batch_size": 8} for n in (30, 40, 50)
    ]
    series = series_from_events([*first, change, *again])
    assert series.steps["samples_seen"] == [10, 20, 30, 40, 50]
    assert series.steps["train_seconds"] == [10, 20, 30.5, 40.5, 50.5]
    assert series.changes == {}


def test_thinning_keeps_ends_and_both_sides_of_every_change_of_batch():
    events = [
        {
            "event": "step",
            "samples_seen": n,
            "train_seconds": n / 7,
            "batch_size": 96 if n < 777 else 192,
            "loss": 1.0,
        }
        for n in range(5000)
    ]
    steps = series_from_events(events).steps
    assert len(steps["samples_seen"]) <= MAX_STEPS
    assert steps["samples_seen"][0] == 0
    assert steps["samples_seen"][-1] == 4999
    assert {776, 777} <= set(steps["samples_seen"])


def test_a_layer_that_ran_in_another_format_is_known():
    """Never silently something else than was asked."""
    both = {"a": "bf16", "b": "bf16"}
    ran = {"a": "torch.bfloat16", "b": "torch.float32"}  # an event verifies the map in force before it
    events = [
        {"event": "precision_map", "samples_seen": 0, "map": both, "verified": {}},
        {"event": "precision_map", "samples_seen": 9, "map": both | {"a": "fp32"}, "verified": ran},
        {
            "event": "precision_map",
            "samples_seen": 12,
            "map": both | {"a": "fp32"},
            "verified": {"a": "float32"},
        },
    ]
    maps = series_from_events(events).maps
    assert maps[0] == {"samples_seen": 0, "map": both, "ignored": ["b"]}
    assert maps[1] == {"samples_seen": 9, "map": {"a": "fp32"}, "ignored": []}
    assert len(maps) == 2


def test_an_empty_log_is_no_error(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text("")
    assert read_log(file)[0].to_json() == {}


# ------------------------------------------------------------------ compact


@pytest.mark.parametrize("name", ["", "records.jsonl", "records.jsonl.gz"])
def test_compact_records_equal_the_run_folder(folder, tmp_path, name):
    run = load(folder)
    destination = tmp_path / "reference" / name if name else tmp_path / "reference"
    written = write_compact(run, destination)
    assert load(tmp_path / "reference").records == run.records
    before = [file.read_bytes() for file in written]
    assert [file.read_bytes() for file in write_compact(load(tmp_path / "reference"), destination)] == before


def test_compact_leaves_out_what_has_not_run(tmp_path):
    states = {("fp32", 0): "missing", ("off", 0): "oom"}
    run = load(synthetic.write_run(tmp_path / "run", arms=("fp32", "off"), seeds=[0], states=states))
    assert [r.state for r in read_compact(write_compact(run, tmp_path / "ref"))] == ["oom"]


def test_compact_does_not_overwrite_another_run(folder, tmp_path):
    write_compact(load(folder), tmp_path / "ref")
    other = synthetic.write_run(tmp_path / "other", arms=("fp32",), seeds=[7])
    with pytest.raises(RecordError, match="holds 6 cells that this run lacks"):
        write_compact(load(other), tmp_path / "ref")


def test_a_corrupt_compact_line_is_one_error_with_file_and_line(folder, tmp_path):
    file = write_compact(load(folder), tmp_path / "ref" / "r.jsonl.gz")[0]
    lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    file.write_bytes(gzip.compress(b"".join([lines[0], b'{"schema": 1, "cell"\n', *lines[1:]])))
    with pytest.raises(RecordError, match=rf"{file}:2: not a JSON line"):
        load(tmp_path / "ref")
    file.write_bytes(b"not gzip")
    with pytest.raises(RecordError, match=rf"{file}:1: cannot be read"):
        load(tmp_path / "ref")


def test_two_different_results_for_one_cell_are_refused(folder, tmp_path):
    write_compact(load(folder), tmp_path / "ref" / "a.jsonl")
    file = _cell(folder) / "result.json"
    result = json.loads(file.read_text())
    result["metrics"]["test_accuracy"] = 0.5
    file.write_text(json.dumps(result))
    write_compact(load(folder), tmp_path / "ref" / "b.jsonl")
    with pytest.raises(RecordError, match="two different results for cell fp32"):
        load(tmp_path / "ref")


def test_slug():
    assert slug("cpu", "ResNet18", "folder:CIFAR images") == "cpu--resnet18--folder-cifar-images"
