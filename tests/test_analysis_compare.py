"""Pairs within blocks, what is refused, groups and labels, the primary family and the paper's figures."""

import json
import math

import pytest
import scipy.stats
import synthetic_records as synthetic

from analysis.compare import Refused, compare, primary_family, ratio_of
from analysis.groups import MixedCode, make_groups
from analysis.paper import PAPER, ours
from analysis.record import RecordError
from analysis.records import load
from analysis.target import target_accuracy, time_to_target


def one_group(tmp_path, **options):
    best = options.pop("best_static", None)
    groups = make_groups(
        load(synthetic.write_run(tmp_path / "run", **options)).records,
        allow_mixed_code=True,
        best_static=best,
    )
    assert len(groups) == 1
    return groups[0]


def test_log_ratios_are_paired_by_seed(tmp_path):
    group = one_group(tmp_path, arms=("fp32", "tri-accel"), seeds=range(6))
    ours_ = compare(group, "tri-accel", "fp32", "time")
    expected = [
        math.log(new.metrics["train_seconds"] / old.metrics["train_seconds"])
        for new, old in zip(group.arms["tri-accel"], group.arms["fp32"], strict=True)
    ]
    assert ours_.values == pytest.approx(expected)
    assert ours_.estimate.p == pytest.approx(scipy.stats.ttest_1samp(expected, 0.0).pvalue)
    assert math.exp(ours_.estimate.value) == pytest.approx(0.80 * 1.03 * 0.85, rel=0.02)
    accuracy = compare(group, "tri-accel", "fp32", "accuracy")
    assert accuracy.values[0] == pytest.approx(
        100
        * (
            group.arms["tri-accel"][0].metrics["test_accuracy"]
            - group.arms["fp32"][0].metrics["test_accuracy"]
        )
    )


def test_failed_cells_leave_their_pairs_out(tmp_path):
    """AlgoPerf PR 780."""
    states = {("fp32", 2): "oom", ("tri-accel", 4): "diverged"}
    group = one_group(tmp_path, arms=("fp32", "tri-accel"), seeds=range(6), states=states)
    assert compare(group, "tri-accel", "fp32", "bytes").seeds == (0, 1, 3, 5)
    assert len(group.arms["fp32"]) == 6


def test_times_of_a_shared_machine_are_refused_and_its_accuracy_is_not(tmp_path):
    """timm 955: one shared process skews later timings."""
    group = one_group(tmp_path, arms=("fp32", "tri-accel"), seeds=range(4), shared={("tri-accel", 1)})
    time = compare(group, "tri-accel", "fp32", "time")
    assert time.seeds == (0, 2, 3)
    assert "seed 1" in time.refused[0]
    assert "other work" in time.refused[0]
    assert compare(group, "tri-accel", "fp32", "accuracy").seeds == (0, 1, 2, 3)
    assert time_to_target(group.arms["tri-accel"][1], 0.0) is None


def test_times_of_different_hardware_never_meet(tmp_path):
    run = load(
        synthetic.write_run(
            tmp_path / "run",
            arms=("fp32", "tri-accel"),
            seeds=range(4),
            cpu=lambda cell: "Fast CPU" if cell["seed"] >= 2 else "Slow CPU",
        )
    )
    groups = make_groups(run.records)
    assert [group.hardware for group in groups] == ["Fast CPU, 2 threads", "Slow CPU, 2 threads"]
    assert [compare(group, "tri-accel", "fp32", "time").seeds for group in groups] == [(2, 3), (0, 1)]
    fast, slow = groups[0].arms["fp32"][0], groups[1].arms["fp32"][0]
    with pytest.raises(Refused, match="another model, data set or seed"):
        ratio_of(fast, slow, "time")


def test_a_block_that_was_split_over_machines_gives_no_ratio(tmp_path):
    run = load(
        synthetic.write_run(
            tmp_path / "run",
            arms=("fp32", "tri-accel"),
            seeds=[0],
            cpu=lambda cell: "A" if cell["arm"] == "fp32" else "B",
        )
    )
    groups = make_groups(run.records)
    assert all(compare(group, "tri-accel", "fp32", "time").estimate is None for group in groups)
    a, b = sorted(run.records, key=lambda r: r.arm)
    with pytest.raises(Refused, match="different hardware"):
        ratio_of(b, a, "accuracy")


def test_pairs_of_different_blocks_or_hosts_are_refused(tmp_path):
    folder = synthetic.write_run(tmp_path / "run", arms=("fp32", "tri-accel"), seeds=range(2))
    for file in folder.glob("cells/tri-accel-*/result.json"):
        result = json.loads(file.read_text())
        if result["cell"]["seed"] == 0:
            result["cell"]["block"] = "another"
        else:
            result["provenance"]["host"] = "another"
        file.write_text(json.dumps(result))
    group = make_groups(load(folder).records)[0]
    found = compare(group, "tri-accel", "fp32", "time")
    assert found.values == ()
    assert "different blocks" in found.refused[0]
    assert "different hardware" in found.refused[1]


def test_mixed_code_is_refused_and_can_be_allowed(tmp_path):
    options = {"arms": ("fp32", "off"), "seeds": range(2), "sources": lambda cell: f"version-{cell['seed']}"}
    folder = synthetic.write_run(tmp_path / "run", **options)
    with pytest.raises(MixedCode, match=r"2 versions of the training sources .*--allow-mixed-code"):
        make_groups(load(folder).records)
    assert make_groups(load(folder).records, allow_mixed_code=True)[0].mixed_code == (
        "version-0",
        "version-1",
    )


def test_grids_of_different_code_that_are_never_compared_may_stand_together(tmp_path):
    for name in ("cpu", "gpu-check"):
        synthetic.write_run(
            tmp_path / name, grid=name, arms=("fp32",), seeds=[0], sources=lambda cell, n=name: n
        )
    records = [*load(tmp_path / "cpu").records, *load(tmp_path / "gpu-check").records]
    assert [group.grid for group in make_groups(records)] == ["cpu", "gpu-check"]


# ------------------------------------------------------------------ labels


def test_arms_stand_in_the_order_of_the_design(tmp_path):
    group = one_group(tmp_path, arms=("replay", "tri-accel", "amp-bf16@256", "fp32", "amp-bf16"), seeds=[0])
    assert list(group.arms) == ["fp32", "amp-bf16", "amp-bf16@256", "tri-accel", "replay"]


def test_labels_tell_engine_and_differing_settings_apart(tmp_path):
    folder = synthetic.write_run(tmp_path / "run", arms=("fp32", "precision"), seeds=range(2))
    for seed in range(2):
        cell = synthetic.make_cell("fp32", "resnet18", "cifar10-jpeg", seed, engine=True)
        synthetic.write_cell(folder, cell, synthetic.make_result(cell), [])
    cell = synthetic.make_cell("precision", "resnet18", "cifar10-jpeg", 0)
    cell["id"] += "-memory"
    cell["config"]["precision"] = {"prefer": "memory"}
    synthetic.write_cell(folder, cell, synthetic.make_result(cell), [])
    group = make_groups(load(folder).records)[0]
    assert list(group.arms) == ["fp32", "precision", "precision [precision.prefer=memory]", "fp32 + engine"]
    assert compare(group, "fp32 + engine", "fp32", "bytes").estimate.value == pytest.approx(math.log(0.8))


def test_the_same_cell_twice_is_an_error(tmp_path):
    folder = synthetic.write_run(tmp_path / "run", arms=("fp32",), seeds=[0])
    cell = synthetic.make_cell("fp32", "resnet18", "cifar10-jpeg", 0)
    cell["id"] += "-again"
    synthetic.write_cell(folder, cell, synthetic.make_result(cell), [])
    with pytest.raises(RecordError, match="two cells with one seed and one configuration"):
        make_groups(load(folder).records)


def test_traces_for_replay_of_other_seeds_are_in_no_table(tmp_path):
    group = one_group(
        tmp_path, arms=("fp32", "tri-accel"), seeds=range(3), spec={"seeds": [0], "more_seeds": [1]}
    )
    assert group.donors == 2
    assert [record.seed for record in group.arms["tri-accel"]] == [0, 1]


def test_best_static_named_by_the_grid_or_the_user(tmp_path):
    arms = ("fp32", "amp-bf16", "profiled-static@192")
    group = one_group(
        tmp_path / "a", arms=arms, seeds=[0], spec={"best_static": {"resnet18": "profiled-static@192"}}
    )
    assert group.best_static == "profiled-static@192"
    assert "apart" in group.best_static_why
    assert (
        one_group(tmp_path / "b", arms=arms, seeds=[0], best_static={"resnet18": "fp32"}).best_static
        == "fp32"
    )
    with pytest.raises(RecordError, match="no such arm"):
        one_group(tmp_path / "c", arms=arms, seeds=[0], best_static={"resnet18": "amp-bf16@999"})


def test_best_static_found_is_the_fastest_within_a_point_and_never_adaptive(tmp_path):
    """tri-accel is the fastest here, and no static setting."""
    group = one_group(tmp_path, arms=("fp32", "amp-bf16", "off", "tri-accel"), seeds=range(3), noise=0.0)
    assert group.best_static == "amp-bf16"
    assert "in their favour" in group.best_static_why


# ------------------------------------------------------------------ primary family, target, paper


def test_primary_family(tmp_path):
    group = one_group(tmp_path, arms=("fp32", "amp-bf16", "tri-accel"), seeds=range(10))
    accuracy, time = primary_family([group])
    assert accuracy.non_inferiority.margin == 1.5  # the short grids
    assert accuracy.verdict == "non-inferior"
    assert time.verdict == "faster"
    assert time.comparison.reference == "amp-bf16"
    raw = sorted([accuracy.p, time.p])
    assert sorted([accuracy.p_holm, time.p_holm]) == pytest.approx([2 * raw[0], max(2 * raw[0], raw[1])])


def test_an_interval_that_crosses_the_margin_is_inconclusive(tmp_path):
    """Differences of -4, +3, -3 and +4 points: mean 0, and no conclusion; times of the same cells still speak."""
    folder = synthetic.write_run(tmp_path / "run", arms=("fp32", "amp-bf16", "tri-accel"), seeds=range(4))
    for seed, points in enumerate((-0.04, 0.03, -0.03, 0.04)):
        for arm, accuracy in (("fp32", 0.70), ("tri-accel", 0.70 + points)):
            file = folder / "cells" / f"{arm}-resnet18-cifar10-jpeg-{seed}-96-0" / "result.json"
            result = json.loads(file.read_text())
            result["metrics"]["test_accuracy"] = accuracy
            file.write_text(json.dumps(result))
    accuracy, time = primary_family(make_groups(load(folder).records))
    assert accuracy.non_inferiority.low < -1.5 < accuracy.non_inferiority.high
    assert accuracy.verdict == "inconclusive"
    assert time.verdict == "faster"


def test_one_seed_decides_nothing(tmp_path):
    group = one_group(tmp_path, arms=("fp32", "amp-bf16", "tri-accel"), seeds=[0])
    assert [(one.verdict, one.p_holm) for one in primary_family([group])] == [("inconclusive", None)] * 2


@pytest.mark.parametrize(
    ("grid", "margin"), [("cpu", 1.5), ("quick", 1.5), ("gpu-check", 1.5), ("full", 0.5), ("my", 0.5)]
)
def test_margins(tmp_path, grid, margin):
    assert one_group(tmp_path, arms=("fp32",), seeds=[0], grid=grid).margin == margin


def test_time_to_target_counts_calibration_and_says_never(tmp_path):
    group = one_group(tmp_path, arms=("fp32", "precision"), seeds=[0])
    record = group.arms["precision"][0]
    evals = record.series.evals
    final = evals["accuracy"][-1]
    assert time_to_target(record, final) == pytest.approx(record.metrics["train_seconds"], rel=1e-5)
    assert time_to_target(record, final + 0.001) is None
    assert target_accuracy(group) == pytest.approx(group.arms["fp32"][0].metrics["test_accuracy"] - 0.015)


def test_calibration_that_the_log_lacks_is_added_to_its_clock(tmp_path):
    folder = synthetic.write_run(tmp_path / "run", arms=("precision",), seeds=[0])
    file = next(folder.glob("cells/*/result.json"))
    result = json.loads(file.read_text())
    result["metrics"]["train_seconds"] += (
        1.5  # as the harness has it: the log's clock starts after calibration
    )
    file.write_text(json.dumps(result))
    record = load(folder).records[0]
    assert record.logged_seconds_lack == pytest.approx(1.5, abs=1e-3)
    assert time_to_target(record, record.series.evals["accuracy"][-1]) == pytest.approx(
        result["metrics"]["train_seconds"], rel=1e-5
    )


def test_the_papers_figures_are_those_of_its_abstract():
    values = {figure.key: figure.value for figure in PAPER}
    assert values == {
        "time": -9.9,
        "memory": -13.3,
        "accuracy": 1.1,
        "memory-amp": -11.4,
        "accuracy-absolute": 78.1,
        "memory-absolute": 0.31,
    }
    for figure in PAPER:
        assert "2508.16905" in figure.source


def test_ours_beside_the_paper(tmp_path):
    group = one_group(tmp_path, arms=("fp32", "amp-bf16", "tri-accel"), seeds=range(4))
    figures = {figure.key: figure for figure in PAPER}
    _, (value, low, high) = ours(figures["memory"], group)
    assert value == pytest.approx(100 * (0.88 * 1.25 - 1), abs=1e-3)
    assert low <= value <= high
    assert ours(figures["accuracy-absolute"], group) is None
    comparison, _ = ours(figures["memory-amp"], group)
    assert comparison.reference == "amp-bf16"
