"""Tables in their four forms: right numbers, nothing hidden, same bytes, sound LaTeX."""

import csv
import io
import re
import shutil
import subprocess

import pytest
import synthetic_records as synthetic

from analysis.groups import make_groups
from analysis.make import all_tables
from analysis.records import load
from analysis.render import latex_text, to_csv, to_latex, to_markdown, to_rich
from analysis.table import Column, Number, Section, Table, probability, show


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    states = {("fp32", 3): "oom", ("tri-accel", 2): "diverged", ("replay", 5): "missing"}
    folder = synthetic.write_run(
        tmp_path_factory.mktemp("records") / "run",
        models=("efficientnet_b0", "resnet18"),
        seeds=range(6),
        states=states,
        shared={("off", 1)},
    )
    for seed in range(6):
        cell = synthetic.make_cell("fp32", "resnet18", "cifar10-jpeg", seed, engine=True)
        synthetic.write_cell(folder, cell, synthetic.make_result(cell), [])
    return all_tables(make_groups(load(folder).records))


def rows_of(table, **fields):
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    return [row for row in rows if all(row[key] == value for key, value in fields.items())]


def test_every_table_has_content(tables):
    assert list(tables) == [
        "main", "primary", "ablation", "factorial", "comparisons", "time_to_target", "memory", "controller", "states", "paper",
    ]  # fmt: skip
    assert all(table.sections for table in tables.values())


def test_main_table_keeps_failed_arms(tables):
    rows = {row["arm"]: row for row in rows_of(tables["main"], model="resnet18")}
    assert len(rows) == len(synthetic.ARMS) + 1
    assert rows["amp-fp16"]["cells"] == "0/6, 6 unsupported"
    assert rows["amp-fp16"]["accuracy"] == ""
    assert rows["fp32"]["cells"] == "5/6, 1 oom"
    assert rows["replay"]["cells"] == "5/6, 1 missing"
    assert float(rows["tri-accel"]["time_ratio"]) == pytest.approx(0.80 * 1.03 * 0.85, rel=0.02)
    assert float(rows["precision"]["peak_mib"]) == pytest.approx(163 * 0.88, abs=0.01)


def test_states_are_counted_and_reasons_shown(tables):
    row = rows_of(tables["states"], model="resnet18", arm="tri-accel")[0]
    assert (row["cells"], row["done"], row["diverged"], row["oom"], row["missing"]) == (
        "6",
        "5",
        "1",
        "0",
        "0",
    )
    text = to_markdown(tables["states"])
    assert "tri-accel: diverged at seed 2: tri-accel: diverged in this test" in text
    assert "amp-fp16: unsupported at seeds 0, 1, 2, 3, 4, 5" in text


def test_shared_machines_are_marked(tables):
    text = to_markdown(tables["main"])
    assert re.search(r"\| off \|.*\]† \|", text)
    assert "† cells timed while other work ran" in text
    assert len([line for line in text.splitlines() if "†" in line and line.startswith("|")]) == 2


def test_memory_is_labelled_and_rss_stands_beside_it(tables):
    text = to_markdown(tables["memory"])
    assert "peak live tensor bytes (without oneDNN scratch)" in text
    assert "Peak RSS MiB" in text
    rows = {row["arm"]: row for row in rows_of(tables["memory"], model="resnet18")}
    assert (rows["fp32"]["engine"], rows["fp32 + engine"]["engine"]) == ("off", "on")
    assert float(rows["fp32 + engine"]["bytes_ratio_plain"]) == pytest.approx(0.8)


def test_six_seeds_say_what_they_cannot_show(tables):
    assert "cannot reach 0.05 after Holm" in to_markdown(tables["main"])


def test_ablation_has_the_eight_arms(tables):
    rows = rows_of(tables["ablation"], model="resnet18")
    assert [(row["precision"], row["curvature"], row["batch"]) for row in rows[:2]] == [
        ("–",) * 3,
        ("●", "–", "–"),
    ]
    assert len(rows) == 8
    assert rows[-1]["arm"] == "tri-accel"


def test_factorial_effects_are_those_that_were_put_in(tables):
    rows = {row["effect"]: row for row in rows_of(tables["factorial"], model="resnet18")}
    assert len(rows) == 7
    assert float(rows["precision"]["time"]) == pytest.approx(100 * (0.80 - 1), abs=1.5)
    assert float(rows["batch"]["bytes"]) == pytest.approx(25.0, abs=0.1)
    assert rows["precision"]["seeds"] == "5"  # one of the eight arms failed at seed 2
    assert float(rows["curvature"]["accuracy_low"]) < float(rows["curvature"]["accuracy"])


def test_paper_stands_beside_ours(tables):
    text = to_markdown(tables["paper"])
    assert "−9.9" in text
    assert "arXiv 2508.16905" in text
    assert "Hardware, data and schedule differ" in text


def test_one_seed_prints_no_interval(tmp_path):
    folder = synthetic.write_run(tmp_path / "run", seeds=[0], grid="quick")
    for name, table in all_tables(make_groups(load(folder).records)).items():
        text = to_markdown(table)
        assert not re.search(r"\d \[[−+\d]", text), name
    assert "One seed: no intervals." in to_markdown(all_tables(make_groups(load(folder).records))["main"])


def test_the_same_records_give_the_same_tables(tmp_path):
    texts = []
    for place in ("a", "b"):
        folder = synthetic.write_run(
            tmp_path / place, seeds=range(3), arms=synthetic.ARMS[:: 1 if place == "a" else -1]
        )
        tables = all_tables(make_groups(load(folder).records))
        texts.append([form(table) for table in tables.values() for form in (to_markdown, to_csv, to_latex)])
    assert texts[0] == texts[1]


# ------------------------------------------------------------------ forms


def test_numbers():
    assert show(Number(None)) == "–"
    assert show(Number(0.812, 0.79, 0.83)) == "0.81 [0.79, 0.83]"
    assert show(Number(-0.001, digits=2, signed=True)) == "0.00"
    assert show(Number(-1.25, -2.0, 0.5, digits=1, signed=True, mark="†")) == "−1.2 [−2.0, +0.5]†"
    assert show(probability(0.00001)) == "<0.0001"
    assert show(probability(None)) == "–"


def test_csv_has_three_columns_for_an_interval():
    section = Section(
        "t", {"grid": "g"}, [["a", Number(1 / 3, 0.25, 0.5)], ["b", Number(None)], ["c", "reference"]]
    )
    table = Table("t", "t", [Column("arm", "Arm", number=False), Column("x", "X", interval=True)], [section])
    assert to_csv(table).splitlines() == [
        "grid,arm,x,x_low,x_high",
        "g,a,0.3333333333,0.25,0.5",
        "g,b,,,",
        "g,c,,,",
    ]


def test_markdown_escapes_bars():
    table = Table("t", "T", [Column("a", "A", number=False)], [Section("", {}, [["x|y"]])])
    assert "x\\|y" in to_markdown(table)


def _check_latex(text):
    """Braces balance, environments nest, every row of a tabular has as many cells as columns, nothing is left unescaped."""
    bare = text.replace(r"\{", "").replace(r"\}", "")
    depth = 0
    for char in bare:
        depth += (char == "{") - (char == "}")
        assert depth >= 0
    assert depth == 0
    open_ = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            open_.append(name)
        else:
            assert open_.pop() == name
    assert open_ == []
    spec = re.search(r"\\begin\{tabular\}\{@\{\}([lr]+)@\{\}\}", text).group(1)
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    rows = [line for line in body.splitlines() if line.endswith(r"\\") and r"\multicolumn" not in line]
    assert rows
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row)) == len(spec) - 1, row
    assert text.isascii()
    assert not re.search(r"(?<!\\)[#_]", re.sub(r"\\label\{[^}]*\}", "", text))
    assert len(re.findall(r"(?<!\\)\$", text)) % 2 == 0
    for command in set(re.findall(r"\\([a-zA-Z]+)", text)):
        assert KNOWN.fullmatch(command), command


KNOWN = re.compile(
    "begin|end|centering|caption|label|footnotesize|resizebox|linewidth|toprule|midrule|bottomrule|multicolumn|emph|par|smallskip"
    "|raggedright|scriptsize|textbackslash|textasciitilde|textasciicircum|textless|textgreater|textbar|times|pm|le|ge|Delta"
    "|lambda|bullet|dagger|rightarrow|dots"
)
"""Commands of LaTeX itself, booktabs and graphicx that a table may use."""


def test_latex_is_well_formed(tables):
    for table in tables.values():
        _check_latex(to_latex(table))


def test_latex_escapes_everything_special():
    assert latex_text(r"a_b & 50 % {x} \y ~ ^ # $ |") == (
        r"a\_b \& 50 \% \{x\} \textbackslash{}y \textasciitilde{} \textasciicircum{} \# \$ \textbar{}"
    )
    assert latex_text("Δ −1 × λ³ 日") == r"$\Delta$ $-$1 $\times$ $\lambda$$^3$ ?"


@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="no pdflatex here: the structure is checked, the compile is not"
)
def test_latex_compiles(tables, tmp_path):
    inputs = []
    for name, table in tables.items():
        (tmp_path / f"{name}.tex").write_text(to_latex(table))
        inputs.append(rf"\input{{{name}}}\clearpage")
    document = "\n".join(
        [r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}", *inputs, r"\end{document}"]
    )
    (tmp_path / "all.tex").write_text(document)
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]


def test_rich_tables_show_every_row(tables):
    drawn = to_rich(tables["main"])
    assert [table.row_count for table in drawn] == [len(section.rows) for section in tables["main"].sections]
