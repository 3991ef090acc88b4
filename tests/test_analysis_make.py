"""The command: what it writes, that it writes the same again, and that it needs no torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic_records as synthetic

from analysis.make import main

ROOT = Path(__file__).resolve().parents[1]
FIGURES = (
    "accuracy_against_time",
    "batch_and_memory",
    "curvature",
    "efficiency",
    "factorial_effects",
    "precision_map",
    "time_to_target",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    states = {("tri-accel", 2): "diverged", ("fp32", 3): "missing"}
    return synthetic.write_run(tmp_path_factory.mktemp("records") / "run", seeds=range(4), states=states)


@pytest.fixture(scope="module")
def drawn(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    assert main(["--records", str(folder), "--out", str(out)]) == 0
    return out


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_every_table_and_figure_is_written(drawn):
    names = set(contents(drawn))
    for kind in FIGURES:
        assert {f"{kind}--resnet18--cifar10-jpeg.{suffix}" for suffix in ("png", "pdf")} <= names
    assert {"beside_the_paper.png", "beside_the_paper.pdf"} <= names
    for table in (
        "main",
        "ablation",
        "factorial",
        "states",
        "paper",
        "primary",
        "comparisons",
        "memory",
        "controller",
        "time_to_target",
    ):
        assert {f"{table}.{suffix}" for suffix in ("md", "csv", "tex")} <= names


def test_figures_hold_no_date_and_no_version(drawn):
    for name, data in contents(drawn).items():
        if name.endswith(".png"):
            assert data.startswith(b"\x89PNG")
            assert b"Software" not in data
            assert b"tIME" not in data
        elif name.endswith(".pdf"):
            assert data.startswith(b"%PDF")
            assert b"CreationDate" not in data
            assert b"/Producer" not in data


def test_same_records_same_bytes_also_from_compact_records(folder, drawn, tmp_path):
    """Tables and figures; another process, another hash seed, records from the committed form."""
    assert main(["--compact", str(folder), str(tmp_path / "reference")]) == 0
    code = "import sys; from analysis.make import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "--records",
            str(tmp_path / "reference"),
            "--out",
            str(tmp_path / "again"),
        ],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    again = contents(tmp_path / "again")
    for name, data in contents(drawn).items():
        if not name.startswith("states"):  # a cell that has not run is not in the committed form
            if b"missing" in data:
                continue
            assert again[name] == data, name


def test_main_table_is_printed(folder, tmp_path, capsys):
    assert main(["--records", str(folder), "--out", str(tmp_path), "--formats"]) == 0
    out = capsys.readouterr().out
    for text in (
        "resnet18 on cifar10-jpeg",
        "tri-accel",
        "Time s",
        "Verdict",
        "1 cells have not run yet",
        "diverged at seed 2",
    ):
        assert text in out
    assert not list(tmp_path.glob("*.p*"))


def test_readme_is_written_checked_and_found_stale(folder, tmp_path, capsys):
    readme = tmp_path / "README.md"
    common = ["--records", str(folder), "--out", str(tmp_path / "out"), "--readme", str(readme), "--formats"]
    readme.write_text("# Title\n\n<!-- results:begin -->\n<!-- results:end -->\n\nafter\n")
    assert main([*common, "--check"]) == 1
    assert not (tmp_path / "out").exists()  # a check writes nothing
    assert main(common) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\nafter\n")
    assert "| tri-accel |" in text
    assert main([*common, "--check"]) == 0
    assert main(common) == 0
    assert readme.read_text() == text
    readme.write_text(text.replace("| tri-accel |", "| tri-accel, the best |"))
    capsys.readouterr()
    assert main([*common, "--check"]) == 1
    captured = capsys.readouterr()
    assert "-| tri-accel, the best |" in captured.out
    assert "differ from the records" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--records", "{tmp}/nothing"], "no such folder"),
        (["--records", "{run}", "--margin", "-1"], "a positive number"),
        (["--records", "{run}", "--best-static", "fp32"], "MODEL=ARM"),
        (["--records", "{run}", "--check", "--readme", "{tmp}/no.md"], "no such file"),
        (["--records", "{run}", "--check", "--readme", "{tmp}/bare.md"], "must stand in it once each"),
        (["--compact", "{tmp}/nothing", "{tmp}/ref"], "no such folder"),
    ],
)
def test_bad_input_is_one_clear_line(folder, tmp_path, capsys, arguments, message):
    (tmp_path / "bare.md").write_text("no markers\n")
    arguments = [a.format(tmp=tmp_path, run=folder) for a in arguments]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_several_grids_and_machines_get_files_of_their_own(tmp_path):
    for grid in ("cpu", "full"):
        run = synthetic.write_run(tmp_path / grid, grid=grid, arms=("fp32", "tri-accel"), seeds=[0, 1])
        assert main(["--compact", str(run), str(tmp_path / "reference")]) == 0
    assert (
        main(["--records", str(tmp_path / "reference"), "--out", str(tmp_path / "out"), "--formats", "png"])
        == 0
    )
    names = set(contents(tmp_path / "out"))
    assert {
        "efficiency--resnet18--cifar10-jpeg--cpu.png",
        "efficiency--resnet18--cifar10-jpeg--full.png",
    } <= names


def test_records_without_logs_still_give_tables(tmp_path):
    folder = synthetic.write_run(tmp_path / "run", seeds=[0, 1], points=0)
    assert main(["--records", str(folder), "--out", str(tmp_path / "out"), "--formats", "png"]) == 0
    names = set(contents(tmp_path / "out"))
    assert "main.md" in names
    assert "curvature--resnet18--cifar10-jpeg.png" not in names


def test_a_run_in_which_nothing_is_done_is_shown(tmp_path, capsys):
    folder = synthetic.write_run(tmp_path / "run", arms=("fp32",), seeds=[0], states={("fp32", 0): "error"})
    assert main(["--records", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "0/1, 1 error" in (tmp_path / "out" / "main.md").read_text()
    assert "error at seed 0" in capsys.readouterr().out


def test_no_torch_and_nothing_else_of_the_project_is_imported(folder, tmp_path):
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.partition('.')[0] in ('torch', 'triaccel', 'baselines', 'ablations'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from analysis.make import main\n"
        f"assert main(['--records', {str(folder)!r}, '--out', {str(tmp_path)!r}, '--formats', 'png']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom analysis.make import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'scipy', 'pandas', 'matplotlib', 'seaborn', 'torch'}\n"
        "bad = {name.partition('.')[0] for name in sys.modules} & heavy\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in (
        "--records",
        "--out",
        "--check",
        "--readme",
        "--formats",
        "--compact",
        "--allow-mixed-code",
    ):
        assert option in done.stdout
