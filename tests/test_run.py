import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import CONFIG, fake_result

from ablations.folder import RunFolder
from ablations.record import read_json, read_lines
from ablations.run import main
from ablations.status import status

GRID = """
models = ["resnet8"]
datasets = ["digits"]
arms = {arms}
epochs = {epochs}
train_samples = 300
test_samples = 64
"""


def write_grid(path: Path, *arms: str, epochs: int = 1) -> Path:
    lines = [GRID.format(arms=json.dumps(arms), epochs=epochs)]
    for name, fields in CONFIG.items():
        if isinstance(fields, dict):
            lines += [f"[config.{name}]", *(f"{key} = {value}" for key, value in fields.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ablations.run", *arguments]


def test_a_grid_from_start_to_end_and_again(tmp_path, capsys):
    """`unsupported` is a cell with its measured reason; a second call runs nothing; other options need another folder."""
    grid, out = (
        str(write_grid(tmp_path / "mine.toml", "fp32", "tri-accel", "amp-fp16")),
        str(tmp_path / "out"),
    )
    assert main(["--grid", grid, "--out", out, "--workers", "2"]) == 0
    printed = capsys.readouterr().out
    found = {cell.arm: cell for cell in status(tmp_path / "out")}
    assert (found["fp32"].state, found["tri-accel"].state) == ("done", "done")
    if found["amp-fp16"].state != "done":  # as on a CPU without fast FP16
        assert found["amp-fp16"].state == "unsupported"
        assert "fp16 is not supported on this device" in found["amp-fp16"].reason
        assert "fp16 is not supported on this device" in printed
    result = read_json(tmp_path / "out" / "cells" / found["fp32"].id / "result.json")
    provenance = result["provenance"]
    assert result["shared_machine"], "two workers: its times count as disturbed"
    for key in ("git_commit", "sources_hash", "packages", "cpu", "threads", "deterministic", "device"):
        assert key in provenance
    assert provenance["packages"]["torch"]
    assert not list((tmp_path / "out").rglob("checkpoint-*.pt"))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("result.json")}
    assert main(["--grid", grid, "--out", out]) == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("result.json")} == before
    assert "3 of 3 cells have a result already" in capsys.readouterr().out
    assert main(["--grid", grid, "--out", out, "--epochs", "2"]) == 2
    assert "another grid" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("result.json")} == before


def wait_for_steps(out: Path, count: int) -> Path:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        for log in out.glob("cells/*/log.jsonl"):
            if sum(event["event"] == "step" for event in read_lines(log)) >= count:
                return log
        time.sleep(0.02)
    raise AssertionError("the cell did not start")


def test_sigterm_checkpoints_and_the_next_call_goes_on(tmp_path):
    """ "requeue cannot save a checkpoint" (hydra 2042); no line of the log is torn or repeated."""
    grid, out = str(write_grid(tmp_path / "mine.toml", "tri-accel", epochs=60)), tmp_path / "out"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ["--grid", grid, "--out", str(out), "--set", "batch.maximum=16"]
    runner = subprocess.Popen(command(*arguments), env=env, stdout=subprocess.PIPE, text=True)
    log = wait_for_steps(out, 5)
    runner.send_signal(signal.SIGTERM)
    printed, _ = runner.communicate(timeout=90)
    assert runner.returncode == 1
    assert "preempted" in printed
    result = read_json(log.with_name("result.json"))
    assert result["state"] == "preempted"
    assert list(log.parent.glob("checkpoint-*.pt"))
    seen = [event["samples_seen"] for event in read_lines(log) if event["event"] == "step"]
    again = subprocess.run(command(*arguments), env=env, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stdout + again.stderr
    steps = [event["step"] for event in read_lines(log) if event["event"] == "step"]
    assert steps == sorted(set(steps))
    after = [event["samples_seen"] for event in read_lines(log) if event["event"] == "step"]
    assert after[: len(seen)] == seen
    assert len(after) > len(seen)
    assert read_json(log.with_name("result.json"))["metrics"]["samples_seen"] == 300 * 60


def test_dry_run_lists_cells_and_time_without_torch(capsys):
    code = (
        "import sys; from ablations.run import main; code = main(['--grid', 'full', '--dry-run']);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + 2 * 2 * (14 * 6 + 3 * 4)
    assert all(len(line.split()[0]) == 12 for line in lines[:-1])
    assert " h on one cpu device" in lines[-1]


@pytest.mark.parametrize("module", ["run", "status", "search", "publish"])
def test_help_needs_no_torch(module):
    code = (
        f"import sys; sys.argv = ['x', '--help']\ntry:\n    from ablations.{module} import main; main()\n"
        "except SystemExit: pass\nsys.exit(any(m in sys.modules for m in ('torch', 'optuna', 'wandb', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "fp64"], "unknown arm 'fp64'; the arms are fp32"),
        (["--model", "resnet9"], "unknown model 'resnet9'; the models are resnet18"),
        (["--dataset", "mnist"], "unknown data set 'mnist'; the data sets are digits"),
        (["--dataset", "folder:/not/there"], "no folder '/not/there'"),
        (["--grid", "quikc"], "no grid 'quikc'"),
        (["--seeds", "x"], "write 0,1,2 or 0-5"),
        (["--shard", "3/2"], "write i/n"),
        (["--set", "precision.tau_low=-1"], "precision.tau_low"),
        (["--set", "batch.rho_low=0.99"], "is not below batch.rho_high"),
        (["--config", "nothing.toml"], "no configuration file 'nothing.toml'"),
        (["--epochs", "0"], "epochs"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not list(tmp_path.iterdir()), "nothing is written before the input is known to be good"


def test_a_folder_that_is_no_run_is_left_alone(tmp_path, capsys):
    (tmp_path / "holiday.jpg").write_text("x")
    assert main(["--grid", "quick", "--out", str(tmp_path)]) == 2
    assert "is not empty and holds no grid.json" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["holiday.jpg"]


def test_results_of_other_code_are_not_mixed_unasked(tmp_path, capsys):
    from ablations.cells import expand
    from ablations.grid import load_grid

    grid = load_grid(str(write_grid(tmp_path / "mine.toml", "fp32")))
    folder = RunFolder(tmp_path / "out")
    folder.open(grid)
    (cell,) = expand(grid)
    folder.declare(cell)
    fake_result(folder, cell)
    arguments = ["--grid", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "--allow-mixed-code" in capsys.readouterr().err
    assert main([*arguments, "--allow-mixed-code"]) == 0


def test_arms_and_seeds_may_be_added_to_a_folder(tmp_path):
    from ablations.grid import load_grid

    path = tmp_path / "mine.toml"
    folder = RunFolder(tmp_path / "out")
    folder.open(load_grid(str(write_grid(path, "fp32")), changes={"seeds": [0, 1]}))
    folder.open(load_grid(str(write_grid(path, "off")), changes={"seeds": [5]}))
    spec = read_json(folder.path / "grid.json")["spec"]
    assert spec["arms"] == ["fp32", "off"]
    assert spec["seeds"] == [0, 1, 5]


def test_options_that_change_the_grid_get_a_folder_of_their_own():
    from ablations.grid import load_grid
    from ablations.run import _name

    assert _name("quick", load_grid("quick", changes={"arms": ["fp32"], "seeds": [4]})) == "quick"
    changed = load_grid("quick", changes={"epochs": 1})
    assert _name("quick", changed).startswith("quick-")
    assert _name("quick", changed) == _name(
        "quick", load_grid("quick", changes={"epochs": 1, "arms": ["off"]})
    )
    assert _name("quick", changed) != _name("quick", load_grid("quick", changes={"models": ["resnet18"]}))


def test_real_images_in_a_folder_train(cifar_jpeg, tmp_path):
    out = tmp_path / "out"
    arguments = ["--dataset", f"folder:{cifar_jpeg}", "--model", "resnet8", "--arms", "fp32", "--epochs", "1"]
    assert main(["--grid", "quick", *arguments, "--out", str(out)]) == 0
    (cell,) = status(out)
    assert cell.state == "done"
    result = read_json(out / "cells" / cell.id / "result.json")
    assert result["metrics"]["samples_seen"] == 2000
    assert result["metrics"]["test_accuracy"] > 0.12


def test_force_unsupported_runs_what_was_unsupported(tmp_path, monkeypatch):
    from ablations import run as module
    from ablations.cells import expand
    from ablations.grid import load_grid

    path = write_grid(tmp_path / "mine.toml", "fp32", "amp-fp16")
    grid = load_grid(str(path))
    folder = RunFolder(tmp_path / "out")
    folder.open(grid)
    for cell in expand(grid):
        folder.declare(cell)
        fake_result(folder, cell, state="unsupported" if cell.arm == "amp-fp16" else "done")
    left = []
    monkeypatch.setattr(
        module,
        "_execute",
        lambda _, f, cells: left.extend(c.arm for c in cells if not f.finished(c.id)) or True,
    )
    arguments = ["--grid", str(path), "--out", str(tmp_path / "out"), "--allow-mixed-code"]
    assert main(arguments) == 0
    assert not left
    main([*arguments, "--force-unsupported"])
    assert left == ["amp-fp16"]
