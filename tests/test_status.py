import json

from harness import declared, fake_result, tiny_grid

from ablations.status import main, status


def test_by_arm_with_reasons_and_logs(tmp_path, capsys):
    folder, cells = declared(tmp_path / "run", tiny_grid("fp32", "off", "amp-fp16", seeds=(0, 1)))
    by = {(cell.arm, cell.seed): cell for cell in cells}
    fake_result(folder, by["fp32", 0])
    fake_result(folder, by["amp-fp16", 0], state="unsupported")
    fake_result(folder, by["off", 0], state="error")
    (folder.cell_folder(by["off", 0].id) / "stdout.log").write_text("Traceback")
    assert folder.claim(by["off", 1].id)
    found = {(cell.arm, cell.seed): cell for cell in status(tmp_path / "run")}
    assert {key: cell.state for key, cell in found.items()} == {
        ("fp32", 0): "done",
        ("fp32", 1): "missing",
        ("off", 0): "error",
        ("off", 1): "running",
        ("amp-fp16", 0): "unsupported",
        ("amp-fp16", 1): "missing",
    }
    assert found["off", 0].log.endswith("stdout.log")
    assert main([str(tmp_path / "run")]) == 1
    printed = capsys.readouterr().out
    assert "it is error; log: " in printed
    assert main([str(tmp_path / "run"), "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 6


def test_a_finished_run_exits_zero(tmp_path):
    folder, cells = declared(tmp_path / "run", tiny_grid("fp32"))
    fake_result(folder, cells[0])
    assert main([str(tmp_path / "run")]) == 0


def test_no_run_there_is_one_clear_error(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "no folder" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "no record at" in capsys.readouterr().err


def test_a_corrupt_record_names_its_file(tmp_path, capsys):
    folder, cells = declared(tmp_path / "run", tiny_grid("fp32"))
    (folder.cell_folder(cells[0].id) / "result.json").write_text('{"state": "do')
    assert main([str(tmp_path / "run")]) == 2
    assert "result.json is corrupt" in capsys.readouterr().err
