import json
import subprocess
import sys
from collections import Counter

import pytest
from harness import tiny_cell, tiny_grid

from ablations.cells import Cell, CellError, expand
from ablations.grid import BUILT_IN, GridError, load_grid
from baselines.arms import ARMS, COMPONENT_ARMS


def test_every_combination_once():
    """Enumerated, not sampled: "grid sampler repeats cells" (optuna 2039, 5489)."""
    grid = tiny_grid("fp32", "off", "replay", "tri-accel", seeds=(0, 1, 2), datasets=("digits", "cifar10"))
    cells = expand(grid)
    assert Counter((c.arm, c.dataset, c.seed) for c in cells) == Counter(
        (arm, dataset, seed) for arm in grid.arms for dataset in grid.datasets for seed in grid.seeds
    )
    assert len({cell.id for cell in cells}) == len(cells)


def test_ids_are_content_hashes_that_do_not_depend_on_the_rest_of_the_grid():
    """ "resume renumbers and overwrites" (hydra 3328)."""
    alone = tiny_cell("off")
    among = next(
        c for c in expand(tiny_grid("fp32", "off", "batch", seeds=(0, 1))) if (c.arm, c.seed) == ("off", 0)
    )
    assert alone.id == among.id
    assert alone.id != tiny_cell("off", epochs=3).id
    assert alone.id != tiny_cell("off", seeds=(1,)).id
    assert Cell.from_json(json.loads(json.dumps(alone.to_json()))) == alone


def test_an_edited_cell_is_told():
    data = tiny_cell("off").to_json()
    with pytest.raises(CellError, match="was edited"):
        Cell.from_json(data | {"seed": 7})
    with pytest.raises(CellError, match="not a cell"):
        Cell.from_json({"id": "x"})


def test_a_block_is_contiguous_and_its_order_is_drawn_from_the_seed():
    """Interleaved: "one shared process skews later timings" (timm 955)."""
    grid = tiny_grid(*COMPONENT_ARMS, seeds=tuple(range(6)))
    cells = expand(grid)
    assert cells == expand(grid)
    blocks = [cell.block for cell in cells]
    assert blocks == sorted(blocks, key=blocks.index)
    orders = {tuple(c.arm for c in cells if c.seed == seed) for seed in grid.seeds}
    assert len(orders) == 6


@pytest.mark.parametrize("seeds", [(0,), (0, 1), (3, 5, 9)])
def test_replay_needs_the_run_of_another_seed(seeds):
    cells = {cell.id: cell for cell in expand(tiny_grid("replay", seeds=seeds))}
    for cell in list(cells.values()):
        if cell.arm == "replay":
            donor = cells[cell.needs]
            assert donor.arm == "tri-accel"
            assert donor.seed != cell.seed
            assert (donor.model, donor.dataset, donor.settings["epochs"]) == (cell.model, cell.dataset, 2)


def test_the_full_grid_is_the_design_s():
    cells = expand(load_grid("full"))
    counts = Counter((c.model, c.dataset, c.arm) for c in cells)
    assert set(counts) == {
        (model, dataset, arm)
        for model in ("resnet18", "efficientnet_b0")
        for dataset in ("cifar10", "cifar100")
        for arm in ARMS
    }
    for (_, _, arm), count in counts.items():
        assert count == (10 if arm in ("fp32", "tri-accel", "profiled-static") else 6)
    recipe = cells[0].settings["recipe"]
    assert (recipe["momentum"], recipe["rate_per_256"], recipe["weight_decay"]) == (0.9, 0.1, 5e-4)
    assert {c.settings["epochs"] for c in cells} == {30}
    assert {c.batch for c in cells} == {96}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_grids_expand(name):
    assert expand(load_grid(name))


def test_set_reaches_the_configuration_and_changes_the_cells():
    grid = load_grid("quick", sets=["batch.initial=48", "precision.rule=paper", "curvature.alpha=1.5"])
    assert (grid.config.batch.initial, grid.config.precision.rule, grid.config.curvature.alpha) == (
        48,
        "paper",
        1.5,
    )
    assert grid.digest != load_grid("quick").digest
    assert grid.config.batch.maximum == load_grid("quick").config.batch.maximum


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["batch.initial"], "write component.field=value"),
        (["batch.initial=0"], r"batch\.initial"),
        (["batch.nothing=3"], r"config\.batch\.nothing"),
        (["precision.tau_low=-1"], r"precision\.tau_low"),
        (["precision.tau_low=1.0", "precision.tau_high=0.5"], "is not below precision.tau_high"),
        (["batch.rho_low=0.95"], "is not below batch.rho_high"),
    ],
)
def test_wrong_overrides_name_the_key(sets, message):
    with pytest.raises(GridError, match=message):
        load_grid("quick", sets=sets)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("models = [", r"mine\.toml: not TOML"),
        (
            'models = ["resnet8"]\ndatasets = ["digits"]\narms = ["fp64"]',
            r"mine\.toml: .*unknown arm 'fp64'; the arms are",
        ),
        ('models = ["resnet8"]\ndatasets = ["digits"]\narms = ["off"]\nepoch = 3', r"mine\.toml: epoch: "),
        ('models = ["resnet8"]\ndatasets = ["digits"]', r"mine\.toml: arms: "),
        (
            'models = ["resnet8"]\ndatasets = ["digits"]\narms = ["off"]\nseeds = [0, 0]',
            "a seed is listed twice",
        ),
        ('models = ["resnet8"]\ndatasets = ["digits"]\narms = ["off"]\nepochs = 0', r"mine\.toml: epochs: "),
    ],
)
def test_a_wrong_file_names_file_and_key(tmp_path, content, message):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(GridError, match=message):
        load_grid(str(path))


def test_an_unknown_grid_lists_those_that_are():
    with pytest.raises(GridError, match=r"no grid 'quikc': the built-in grids are .*quick"):
        load_grid("quikc")


def test_grids_and_cells_need_no_torch():
    code = (
        "import sys; from ablations.grid import load_grid; from ablations.cells import expand;"
        "expand(load_grid('full')); import ablations.run, ablations.status, ablations.record, ablations.publish;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
