import json
import subprocess
import sys
import tomllib

import optuna
import pytest
from harness import fake_result
from optuna.trial import TrialState, create_trial

from ablations import study as studies
from ablations.grid import load_grid, read_config
from ablations.pareto import best_trial, front, to_toml
from ablations.search import Arguments, SearchError, main, make_plan, trial_cells
from ablations.space import SPACES, SpaceError, load_space
from ablations.study import open_study, recover_dead, search
from triaccel.config import TriAccelConfig


def values_of(cell):
    """A landscape with a known best: accuracy falls with α, time falls with the noise cap."""
    config = cell.config
    return 0.9 - 0.1 * config.curvature.alpha, 10.0 / (config.batch.noise_cap or 1.0)


@pytest.fixture
def fake(monkeypatch):
    """Cells end at once, in a thread of the search: what they measure is the landscape."""
    ran = []

    def run(runner, cell, trial, *, prune):
        folder = runner.folder
        folder.declare(cell)
        if not folder.finished(cell.id):
            ran.append(cell)
            accuracy, seconds = values_of(cell)
            fake_result(folder, cell)
            result = folder.result(cell.id)
            metrics = {**result["metrics"], "test_accuracy": None, "validation_accuracy": accuracy}
            metrics |= {"train_seconds": seconds, "peak_live_tensor_bytes": 1000}
            folder.write_result(cell, state="done", reason=None, metrics=metrics, report={}, provenance={})
        return folder.result(cell.id)

    monkeypatch.setattr(studies, "_run_cell", run)
    return ran


def plan(**changes):
    return make_plan(Arguments(**changes))


def go(tmp_path, *, trials, workers=1, storage=None, **changes):
    chosen = plan(workers=workers, **changes)
    code = search(
        chosen,
        out=tmp_path / "out",
        trials=trials,
        workers=workers,
        devices=["cpu"],
        storage=storage,
        root=tmp_path,
        sampler_seed=0,
        timeout=None,
    )
    return chosen, code


def stored(tmp_path, chosen, storage=None):
    return open_study(chosen, out=tmp_path / "out", storage=storage).trials


def test_the_default_is_trial_zero_and_the_front_is_right(tmp_path, fake, capsys):
    chosen, code = go(tmp_path, trials=12)
    assert code == 0
    trials = stored(tmp_path, chosen)
    assert len(trials) == 12
    default = TriAccelConfig()
    assert trials[0].params["curvature.alpha"] == default.curvature.alpha
    assert trials[0].params["precision.low_quantile"] == default.precision.low_quantile
    assert trials[0].user_attrs["values"]["batch.noise_cap"] == load_grid("quick").config.batch.noise_cap
    points = [(-t.values[0], t.values[1], t.values[2]) for t in trials]
    brute = {
        i for i, p in enumerate(points)
        if not any(all(a <= b for a, b in zip(q, p, strict=True)) and q != p for q in points)
    }  # fmt: skip
    assert {t.number for t in front(trials, chosen.objectives)} == brute
    assert (tmp_path / "out" / "pareto.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "Pareto front of 12 complete trials" in printed
    assert "held-out seeds 2000, 2001: accuracy" in printed


def test_best_is_written_as_toml_that_run_takes(tmp_path, fake):
    chosen, _ = go(tmp_path, trials=10)
    path = tmp_path / "out" / "best.toml"
    best = best_trial(stored(tmp_path, chosen), chosen.objectives)
    grid = load_grid("quick", changes={"config": read_config(path, base="quick")})
    for name, value in best.user_attrs["values"].items():
        component, field = name.split(".")
        assert getattr(getattr(grid.config, component), field) == value
    assert grid.config.batch.initial == load_grid("quick").config.batch.initial
    assert "held-out seeds" in path.read_text()


def test_seeds_and_split_keep_away_from_what_is_reported(tmp_path, fake):
    go(tmp_path, trials=3)
    reported = load_grid("quick")
    assert {cell.settings["split"] for cell in fake} == {"validation"}
    assert not {cell.seed for cell in fake} & {*reported.seeds, *reported.more_seeds}
    assert {cell.seed for cell in fake} == {1000, 2000, 2001}
    with pytest.raises(SearchError, match=r"--seeds \[0\] are used elsewhere"):
        plan(seeds="0,1000")
    with pytest.raises(SearchError, match=r"--final-seeds \[1000\]"):
        plan(final_seeds="1000")


def test_several_workers_share_the_journal_and_drop_the_time(tmp_path, fake):
    """ "database is locked" (optuna 820, 4994): a journal file by default."""
    with pytest.warns(UserWarning, match="2 workers share 1 device"):
        chosen, code = go(tmp_path, trials=10, workers=2)
    assert code == 0
    assert chosen.objectives == ("accuracy", "bytes")
    trials = stored(tmp_path, chosen)
    assert [t.number for t in trials] == list(range(len(trials)))
    assert sum(t.state is TrialState.COMPLETE for t in trials) == 10


def test_a_second_call_goes_on(tmp_path, fake):
    go(tmp_path, trials=3)
    before = len(fake)
    chosen, _ = go(tmp_path, trials=5)
    assert len(stored(tmp_path, chosen)) == 5
    assert len(fake) - before <= 4  # two trials, and the comparison if the best changed


def test_a_trial_whose_worker_died_is_closed_and_tried_again(tmp_path, fake):
    chosen = plan()
    opened = open_study(chosen, out=tmp_path / "out", storage=None)
    dead = opened.ask()
    chosen.space.draw(dead)
    owner = subprocess.Popen([sys.executable, "-c", ""])
    owner.wait()
    import socket

    dead.set_user_attr("owner", {"host": socket.gethostname(), "pid": owner.pid, "run": "x", "beat": 0.0})
    alive = opened.ask()
    alive.set_user_attr(
        "owner", {"host": "elsewhere", "pid": 1, "run": "y", "beat": __import__("time").time()}
    )
    assert recover_dead(opened) == 1
    assert recover_dead(opened) == 0
    states = [t.state for t in opened.trials]
    assert states == [TrialState.FAIL, TrialState.RUNNING, TrialState.WAITING]
    again = opened.ask()
    assert chosen.space.draw(again) == pytest.approx(
        {k: v for k, v in dead.params.items() if k != "x"}, rel=1e-12
    )


def test_a_database_url_works_and_one_that_does_not_says_so(tmp_path, fake):
    chosen, code = go(tmp_path, trials=2, storage=f"sqlite:///{tmp_path}/study.db")
    assert code == 0
    for url in ("sqlite:////nowhere/at/all/study.db", "nonsense://x"):
        with pytest.raises(SearchError, match=r"cannot be used .*leave --storage out for a journal file"):
            open_study(chosen, out=tmp_path, storage=url)


def test_another_study_in_the_same_folder_is_refused(tmp_path, fake):
    go(tmp_path, trials=1)
    with pytest.raises(SearchError, match="made for another grid, space or set of objectives"):
        go(tmp_path, trials=1, epochs=3)


def test_one_objective_prunes_by_samples_seen(tmp_path, monkeypatch):
    """A trial that falls behind after the same number of samples is stopped; its process is asked to end."""
    stops = []

    class Process:
        exit_code = 0

        def __init__(self, out, cell_id, options):
            self.began, self.left, self.home = 0.0, 4, out / "cells" / cell_id
            self.cell = json.loads((self.home / "cell.json").read_text())
            self.poor = self.cell["config"]["curvature"]["alpha"] != 0.5

        @property
        def alive(self):
            self.left -= 1
            return self.left >= 0

        def stop(self, *, grace):
            stops.append(self.home.name)
            self.left = 0

        def join(self, timeout=None):
            seen = 100 * (4 - self.left)
            with open(self.home / "log.jsonl", "a") as log:
                accuracy = 0.1 if self.poor else 0.9
                log.write(json.dumps({"event": "eval", "samples_seen": seen, "accuracy": accuracy}) + "\n")
            (self.home / "result.json").write_text(json.dumps(
                {"state": "done", "reason": None, "metrics": {
                    "validation_accuracy": 0.9, "train_seconds": 1.0, "peak_cuda_reserved_bytes": None,
                    "peak_live_tensor_bytes": 1}}))  # fmt: skip

    monkeypatch.setattr(studies, "CellProcess", Process)
    chosen = plan(objectives="accuracy", final_seeds="")
    opened = open_study(chosen, out=tmp_path / "out", storage=None)
    assert isinstance(opened.pruner, optuna.pruners.MedianPruner)
    for alpha in (0.5, 0.5, 0.5, 0.5, 0.5, 1.7):
        params = chosen.space.defaults(chosen.grid.config) | {"curvature.alpha": alpha}
        if alpha == 0.5:
            params["batch.noise_cap"] = 1.0 + 0.1 * len(opened.trials)
        opened.enqueue_trial(params)
        import threading

        runner = studies.Runner(
            studies.RunFolder(tmp_path / "out" / "trials"), studies.Options(), threading.Event()
        )
        studies._one(opened, runner, chosen, 100, threading.Lock())
    assert [t.state for t in opened.trials] == [TrialState.COMPLETE] * 5 + [TrialState.PRUNED]
    assert len(set(stops)) == 1
    assert set(opened.trials[-1].intermediate_values) <= {100, 200, 300, 400}


def test_a_cell_that_fails_fails_its_trial_with_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        studies, "_run_cell", lambda *_, **__: {"state": "diverged", "reason": "the loss was not finite"}
    )
    chosen, code = go(tmp_path, trials=2)
    assert code == 1
    assert "no trial has a result" in capsys.readouterr().out
    assert {t.state for t in stored(tmp_path, chosen)} == {TrialState.FAIL}


@pytest.mark.parametrize("name", SPACES)
def test_every_corner_of_a_built_in_space_is_a_valid_configuration(name):
    space, chosen = load_space(name), plan(rule=name)
    distributions = {}

    class Probe:
        def __init__(self, end):
            self.end = end

        def suggest_float(self, field, low, high, log):
            distributions[field] = (low, high, log)
            return (low, high)[self.end]

        def suggest_int(self, field, low, high, step):
            assert (high - low) % step == 0
            return (low, high)[self.end]

    for end in (0, 1):
        assert trial_cells(chosen, space.draw(Probe(end)))
    if name == "paper":
        fields = {"precision.tau_low", "precision.tau_high", "precision.tau_curvature", "curvature.alpha"}
        assert set(space.dimensions) == fields | {"batch.rho_low", "batch.rho_high", "batch.delta"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = [", "not TOML"),
        ("", "no field to vary"),
        ('"curvature.alfa" = { low = 0.0, high = 1.0 }', "'curvature.alfa' is no field"),
        ('"curvature.audit" = { low = 0.0, high = 1.0 }', "is not a number"),
        ('"curvature.alpha" = { low = 2.0, high = 1.0 }', r"curvature\.alpha: .*must be below"),
        ('"curvature.alpha" = { low = 0.0, high = 1.0, log = true }', "positive with log"),
        ('"curvature.alpha" = { low = 0.1, high = 1.0, times = "batch.delta" }', "must stand before it"),
        ('"curvature.alpha" = { low = 0.1, high = 1.0, lo = 3 }', "lo"),
    ],
)
def test_a_wrong_space_names_file_and_field(tmp_path, content, message):
    path = tmp_path / "space.toml"
    path.write_text(content)
    with pytest.raises(SpaceError, match=rf"space\.toml: .*{message}|space\.toml: {message}"):
        load_space(str(path))


def test_toml_round_trip():
    values = {"precision.tau_low": 3.25e-7, "batch.delta": 24, "precision.loss_scale.initial": 1024.0}
    data = tomllib.loads(to_toml(values, comments=["# a"]))
    assert data == {
        "precision": {"tau_low": 3.25e-7, "loss_scale": {"initial": 1024.0}},
        "batch": {"delta": 24},
    }


def test_front_and_best_by_hand():
    def trial(*values):
        made = create_trial(values=list(values), user_attrs={"values": {}})
        made.number = trial.count = getattr(trial, "count", -1) + 1
        return made

    trials = [trial(0.90, 10.0), trial(0.897, 5.0), trial(0.80, 1.0), trial(0.80, 2.0), trial(0.90, 10.0)]
    assert [t.number for t in front(trials, ("accuracy", "time"))] == [0, 4, 1, 2]
    assert best_trial(trials, ("accuracy", "time")).number == 1
    assert best_trial([], ("accuracy", "time")) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--objectives", "speed"], "unknown speed; choose of accuracy, time, bytes"),
        (["--objectives", "time", "--workers", "2"], "cannot be measured with several workers"),
        (["--seeds", "a"], "whole numbers"),
        (["--seeds", ""], "--seeds is empty"),
        (["--trials", "0"], "at least 1"),
        (["--grid", "none"], "no grid 'none'"),
        (["--space", "none.toml"], "no search space 'none.toml'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*workers share")
def test_bad_input_is_one_clear_error(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
