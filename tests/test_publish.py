import json
import struct
from pathlib import Path

import pytest
from harness import declared, fake_result, tiny_grid

from ablations.publish import COMPARISON, PublishError, history, main, publish
from ablations.record import Log


def records(file: Path) -> list:
    """Records of a ``.wandb`` file: LevelDB's log format (32 KiB blocks; checksum, length, type) around protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, found, parts = file.read_bytes(), [], b""
    place = 7  # ":W&B", magic and version
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def sent(folder: Path, run_id: str) -> dict:
    (file,) = (folder / "wandb").glob(f"offline-run-*-{run_id}/*.wandb")
    found = {"history": [], "metrics": [], "config": {}, "summary": {}, "artifacts": []}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["run"] = record.run
            found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            found["history"].append(
                {
                    (item.key or item.nested_key[0]): json.loads(item.value_json)
                    for item in record.history.item
                }
            )
        elif kind == "summary":
            found["summary"] |= {
                (item.key or item.nested_key[0]): json.loads(item.value_json)
                for item in record.summary.update
            }
        elif kind == "metric":
            found["metrics"].append(record.metric)
        elif kind == "artifact":
            found["artifacts"].append(record.artifact)
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            found["artifacts"].append(record.request.log_artifact.artifact)
    return found


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Neither the user's W&B settings nor a network."""
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_API_KEY", "WANDB_RUN_ID", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def run(tmp_path):
    folder, cells = declared(tmp_path / "run", tiny_grid("fp32", "tri-accel", "off"))
    by = {cell.arm: cell for cell in cells}
    fake_result(folder, by["tri-accel"], accuracy=0.93)
    fake_result(folder, by["fp32"], state="diverged")
    with Log(folder.cell_folder(by["tri-accel"].id) / "log.jsonl") as log:
        for seen in (100, 200):
            log.append(
                "step", step=seen // 10, samples_seen=seen, loss=2.0 / seen, batch_size=10, rate_factor=1.0,
                train_seconds=0.1 * seen, used_bytes=5, loss_scale=None, stepped=True, map_version=0,
            )  # fmt: skip
        log.append(
            "precision_map", step=1, samples_seen=150, version=1, map={"a": "bf16", "b": "fp32"}, verified={}
        )
        layer = {"curvature": 2.0, "eigenvalues": [2.0], "sample_variance": 1.0, "scale": 0.5}
        log.append("curvature", samples_seen=160, probe_id=0, layers={"a": layer}, noise_scale=None)
        log.append(
            "eval", samples_seen=200, epoch=1, train_seconds=20.0, split="test", accuracy=0.93, loss=0.2
        )
    return folder.path, by


def test_what_the_client_wrote(run):
    path, by = run
    assert publish(path, mode="offline") == 2
    cell = by["tri-accel"]
    found = sent(path, cell.id)
    assert (found["run"].run_id, found["run"].run_group, found["run"].job_type) == (
        cell.id,
        "tiny",
        "tri-accel",
    )
    assert found["config"]["comparison"] == COMPARISON
    assert found["config"]["seed"] == 0
    assert [row["samples_seen"] for row in found["history"]] == [100, 200, 150, 160, 200]
    assert found["history"][-1]["eval/accuracy"] == 0.93
    assert found["history"][2]["precision/bf16"] == 1
    assert found["history"][3]["rate/layer/a"] == 0.5
    assert found["summary"]["test_accuracy"] == 0.93
    steps = {metric.step_metric for metric in found["metrics"]} | {
        found["metrics"][metric.step_metric_index - 1].name
        for metric in found["metrics"]
        if metric.step_metric_index
    }
    assert "samples_seen" in steps
    failed = sent(path, by["fp32"].id)
    assert failed["config"]["state"] == "diverged"
    assert "test_accuracy" not in failed["summary"]


def test_every_panel_of_the_comparison_has_its_keys():
    from ablations.record import read_lines  # noqa: F401

    keys = set()
    for event in (
        {"event": "step", "samples_seen": 1, "loss": 1.0, "batch_size": 2, "rate_factor": 1.0, "train_seconds": 1.0,
         "used_bytes": 3, "loss_scale": 4.0},
        {"event": "eval", "samples_seen": 1, "accuracy": 0.5, "loss": 1.0, "train_seconds": 1.0},
        {"event": "precision_map", "samples_seen": 1, "map": {"a": "fp32"}},
        {"event": "curvature", "samples_seen": 1, "noise_scale": 5.0, "layers": {}},
    ):  # fmt: skip
        for row in history([event]):
            keys |= set(row)
    assert COMPARISON["x_axis"] in keys
    for panel in COMPARISON["panels"]:
        assert set(panel["y"]) | ({panel["x"]} if "x" in panel else set()) <= keys, panel


def test_a_second_call_sends_nothing(run):
    """ "offline resume overwrites segments" (wandb 5865): published once, from the local log."""
    path, by = run
    assert publish(path) == 2
    before = sorted(p.name for p in (path / "wandb").glob("offline-run-*"))
    assert publish(path) == 0
    assert sorted(p.name for p in (path / "wandb").glob("offline-run-*")) == before
    # a call that was killed before it could note what it had sent leaves no second copy
    note = path / "cells" / by["tri-accel"].id / "published.json"
    note.unlink()
    assert publish(path) == 1
    assert len(list((path / "wandb").glob(f"offline-run-*-{by['tri-accel'].id}"))) == 1


def test_tables_and_figures_are_artifacts(run, tmp_path):
    path, _ = run
    figures = tmp_path / "figures"
    figures.mkdir()
    (figures / "main.md").write_text("| a |")
    (figures / "time.png").write_bytes(b"png")
    publish(path, figures=figures)
    digest = json.loads((path / "grid.json").read_text())["hash"]
    artifacts = sent(path, f"{digest}-tables")["artifacts"]
    assert {(a.name, a.type) for a in artifacts} == {("tiny-tables", "table"), ("tiny-figures", "figure")}


def test_no_login_is_one_clear_error_and_offline_works(run, monkeypatch, capsys):
    path, _ = run
    import wandb

    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    real = wandb.init
    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(PublishError, match=r"wandb login.*--mode offline"):
        publish(path, mode="online")
    monkeypatch.setattr(wandb, "init", real)
    assert main([str(path), "--mode", "offline"]) == 0
    assert "2 cells written; send them with: wandb sync" in capsys.readouterr().out


def test_missing_run_and_figures(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no record at" in capsys.readouterr().err
