import itertools
import json
import math
import random
import signal

import pytest
import torch
from harness import declared, tiny_cell, tiny_grid
from torch import nn

from ablations.cell import Options
from ablations.cell import run_cell as run_whole_cell
from ablations.checkpoint import load_checkpoint, save_checkpoint
from ablations.record import Log, RecordError, read_lines
from ablations.train import Diverged, Preempted, Run, train
from triaccel.memory import FakeMemory
from triaccel.recovery import is_out_of_memory
from triaccel.trace import Trace


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny steps: a second thread gains little, and beside other work on the machine costs a lot."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Killed(BaseException):
    pass


def memory():
    """Scripted bytes: room to grow, then a budget that falls."""
    return FakeMemory(lambda batch, version, step: 1000 * batch, lambda step: 90_000 if step < 12 else 40_000)


def run_cell(cell, path, **options) -> Run:
    checkpoint = options.get("checkpoint")
    log = Log(path, size=checkpoint["log_bytes"] if checkpoint else 0)
    own = {"memory": memory()} if not cell.arm.startswith(("fp32", "amp")) else {}
    return Run(cell=cell, device=torch.device("cpu"), log=log, force_unsupported=True, **own, **options)


def finished(run: Run) -> dict:
    with run.log:
        found = train(run)
    found["weights"] = run.model.state_dict()
    found["log"] = [
        {key: value for key, value in event.items() if key != "train_seconds"}
        for event in read_lines(run.log.path)
    ]
    return found


@pytest.mark.parametrize("arm", ["tri-accel", "fp32", "amp-bf16"])
def test_killed_at_20_random_steps_ends_like_the_unbroken_run(arm, tmp_path):
    cell = tiny_cell(arm, epochs=5)
    whole = run_cell(cell, tmp_path / "whole.jsonl")
    unbroken = finished(whole)
    draw = random.Random(f"kill {arm}")
    home = tmp_path / "home"
    home.mkdir()
    saved, kills = None, 0
    while True:
        # a checkpoint after some steps, and death some steps later: what came between is lost and done again
        save_at, die_at = draw.choice((0, 1, 1)), draw.randint(1, 4)
        asked = itertools.count(2)  # twice a step

        def due(asked=asked, save_at=save_at, die_at=die_at, last=kills == 20):
            step = next(asked) // 2
            if step > die_at and not last:
                raise Killed
            return step == save_at

        run = run_cell(
            cell,
            home / "log.jsonl",
            checkpoint=saved,
            calibration=whole.measured,
            save=lambda state: save_checkpoint(home, {**state, "sources": "s"}),
            due=due,
        )
        try:
            broken = finished(run)
            break
        except Killed:
            kills += 1
            saved = load_checkpoint(home, cell, sources="s")
    assert kills == 20
    assert broken["weights"].keys() == unbroken["weights"].keys()
    for name, value in unbroken["weights"].items():
        assert torch.equal(broken["weights"][name], value), name
    assert broken["log"] == unbroken["log"]
    assert broken["trace"].dumps() == unbroken["trace"].dumps()
    same = (
        "test_accuracy",
        "test_loss",
        "final_train_loss",
        "steps",
        "updates",
        "samples_seen",
        "skipped_steps",
    )
    assert {k: broken["metrics"][k] for k in same} == {k: unbroken["metrics"][k] for k in same}
    if arm == "tri-accel":
        sizes = {e["batch_size"] for e in unbroken["log"] if e["event"] == "step"}
        assert len(sizes) > 1, "the run must change its batch for this to mean something"


def test_sigterm_checkpoints_before_it_stops(tmp_path):
    """ "requeue cannot save a checkpoint" (hydra 2042)."""
    kept: list[dict] = []
    run = run_cell(
        tiny_cell("fp32"), tmp_path / "log.jsonl", save=kept.append, stopping=lambda: run.log.size > 0
    )
    with pytest.raises(Preempted, match="checkpoint written"), run.log:
        train(run)
    assert len(kept) == 1
    assert kept[0]["arm"]["counters"][0] >= 1


def test_arms_of_one_seed_start_from_the_same_weights_and_see_the_same_samples(tmp_path):
    first = {}
    for arm in ("fp32", "off", "amp-bf16"):
        cell = tiny_cell(arm, epochs=1)
        run = run_cell(cell, tmp_path / f"{arm}.jsonl")
        found = finished(run)
        first[arm] = next(e["loss"] for e in found["log"] if e["event"] == "step")
    assert first["fp32"] == first["off"]
    assert first["amp-bf16"] == pytest.approx(first["fp32"], rel=0.02)


def test_fp32_is_the_plain_loop(tmp_path):
    """The recipe by hand: SGD with momentum 0.9 and weight decay, cosine by samples, FP32."""
    from ablations.train import _data
    from ablations.workloads import build_model
    from triaccel.sampler import ElasticBatches

    cell = tiny_cell("fp32", epochs=1)
    run = run_cell(cell, tmp_path / "log.jsonl")
    found = finished(run)
    train_set, _, classes = _data(run)
    torch.manual_seed(0)
    model = build_model("resnet8", num_classes=classes, seed=0, device=torch.device("cpu"))
    recipe = cell.settings["recipe"]
    base = recipe["rate_per_256"] * 16 / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=base, momentum=0.9, weight_decay=5e-4, foreach=True)
    seen, loss_fn = 0, nn.CrossEntropyLoss()
    for images, labels in ElasticBatches(train_set, epochs=1, batch_size=lambda: 16, seed=0, minimum_micro=2):
        optimizer.param_groups[0]["lr"] = base * (0.5 * (1 + math.cos(math.pi * seen / len(train_set))))
        optimizer.zero_grad()
        loss_fn(model(images), labels).backward()
        optimizer.step()
        seen += len(labels)
    for name, value in model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], value), name
    assert found["metrics"]["samples_seen"] == seen == 200


def test_a_batch_in_the_arm_s_name_scales_the_rate(tmp_path):
    from ablations.train import _optimizer
    from ablations.workloads import build_model

    model = build_model("resnet8", num_classes=10, seed=0, device=torch.device("cpu"))
    rates = {
        arm: _optimizer(model, tiny_cell(arm), torch.device("cpu")).param_groups[0]["lr"]
        for arm in ("fp32", "fp32@64")
    }
    assert rates["fp32"] == pytest.approx(0.1 * 16 / 256)
    assert rates["fp32@64"] == pytest.approx(2.0 * rates["fp32"])


def test_the_record_has_what_the_analysis_reads(tmp_path):
    found = finished(run_cell(tiny_cell("tri-accel"), tmp_path / "log.jsonl"))
    kinds = {event["event"] for event in found["log"]}
    assert {"step", "eval", "change", "precision_map", "curvature", "decided_by"} <= kinds
    metrics = found["metrics"]
    assert 0 <= metrics["test_accuracy"] <= 1
    assert metrics["train_seconds"] > metrics["calibration_seconds"] >= 0
    assert metrics["peak_rss_bytes"] > metrics["peak_live_tensor_bytes"] > 0
    evals = [event for event in found["log"] if event["event"] == "eval"]
    assert [event["epoch"] for event in evals] == [1, 2]
    assert evals[-1]["accuracy"] == metrics["test_accuracy"]
    json.dumps(found["report"])


def test_every_arm_reports_its_peak_bytes_on_the_same_ground(tmp_path):
    peaks = {
        arm: finished(run_cell(tiny_cell(arm, epochs=1), tmp_path / f"{arm}.jsonl"))["metrics"][
            "peak_live_tensor_bytes"
        ]
        for arm in ("fp32", "off", "amp-bf16")
    }
    assert peaks["off"] == pytest.approx(peaks["fp32"], rel=0.01)
    assert peaks["amp-bf16"] < peaks["fp32"]


def test_replay_runs_the_recorded_sizes(tmp_path):
    recorded = finished(run_cell(tiny_cell("tri-accel"), tmp_path / "a.jsonl"))
    cell = tiny_cell("replay")
    log = Log(tmp_path / "b.jsonl", size=0)
    again = Run(cell=cell, device=torch.device("cpu"), log=log, trace=Trace(recorded["trace"].entries))
    replayed = finished(again)
    sizes = [[e["batch_size"] for e in f["log"] if e["event"] == "step"] for f in (recorded, replayed)]
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0])) > 1


def test_a_loss_that_is_not_finite_is_a_state(tmp_path):
    """ "NaN metrics scored as good, or dropped" (AlgoPerf PR 780)."""
    cell = tiny_cell("fp32", epochs=20, recipe={"rate_per_256": 1e6})
    run = run_cell(cell, tmp_path / "log.jsonl")
    with pytest.raises(Diverged, match="not finite"), run.log:
        train(run)


def test_validation_never_touches_the_test_images(tmp_path):
    from ablations.train import _data

    cell = tiny_cell("fp32", split="validation", train_samples=None, test_samples=None)
    run = run_cell(cell, tmp_path / "log.jsonl")
    train_set, held, _ = _data(run)
    run.log.close()
    assert len(train_set) + len(held) == 1437
    assert len(held) == 143


def test_checkpoints(tmp_path, capsys):
    """Corrupt, torn, of other code, of another cell: the one before, and it is said."""
    cell, other = tiny_cell("fp32"), tiny_cell("off")
    (tmp_path / "log.jsonl").write_text("")
    states = [{"cell": cell.id, "sources": "s", "log_bytes": 0, "n": n, "w": torch.ones(3)} for n in range(4)]
    paths = [save_checkpoint(tmp_path, state) for state in states]
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert load_checkpoint(tmp_path, cell, sources="s")["n"] == 3
    data = bytearray(paths[3].read_bytes())
    data[len(data) // 2] ^= 1
    paths[3].write_bytes(bytes(data))
    assert load_checkpoint(tmp_path, cell, sources="s")["n"] == 2
    assert "checksum" in capsys.readouterr().err
    paths[3].write_bytes(data[:100])
    assert load_checkpoint(tmp_path, cell, sources="s")["n"] == 2
    assert load_checkpoint(tmp_path, cell, sources="t") is None
    assert "--allow-mixed-code" in capsys.readouterr().err
    assert load_checkpoint(tmp_path, cell, sources=None)["n"] == 2
    assert load_checkpoint(tmp_path, other, sources="s") is None


def test_a_checkpoint_executes_nothing(tmp_path, capsys):
    import hashlib
    import pickle

    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    data = pickle.dumps({"cell": tiny_cell("fp32").id, "x": Evil()}, protocol=2)
    (tmp_path / f"checkpoint-000000-{hashlib.sha256(data).hexdigest()[:16]}.pt").write_bytes(data)
    assert load_checkpoint(tmp_path, tiny_cell("fp32"), sources=None) is None
    assert "executed\n" not in capsys.readouterr().out


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    cell = tiny_cell("fp32")
    (tmp_path / "log.jsonl").write_text("")
    save_checkpoint(tmp_path, {"cell": cell.id, "sources": "s", "log_bytes": 0})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ablations.checkpoint.os.fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        save_checkpoint(tmp_path, {"cell": cell.id, "sources": "s", "log_bytes": 0, "n": 1})
    assert load_checkpoint(tmp_path, cell, sources="s") is not None
    assert not list(tmp_path.glob(".checkpoint*"))


def test_out_of_memory_is_a_result():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))


def test_a_cell_that_runs_beside_others_is_done_and_flagged(tmp_path):
    folder, cells = declared(tmp_path / "out", tiny_grid("fp32", epochs=1))
    assert folder.claim(cells[0].id)
    options = Options(shared_machine=True, threads=1, checkpoint_seconds=0.0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert run_whole_cell(str(folder.path), cells[0].id, options) == "done"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert folder.result(cells[0].id)["shared_machine"] is True
