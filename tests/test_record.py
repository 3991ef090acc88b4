import errno
import json
import math

import pytest

from ablations.record import Log, RecordError, read_json, read_lines, write_json


def test_values_come_back_as_they_were(tmp_path):
    value = {"a": [1, 2.5, None, True, "é"], "b": {"c": math.inf, "d": -math.inf}}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    write_json(tmp_path / "x.json", {"n": math.nan})
    assert math.isnan(read_json(tmp_path / "x.json")["n"])
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_the_log_is_json_that_others_can_read(tmp_path):
    with Log(tmp_path / "log.jsonl") as log:
        log.append("step", loss=math.nan)
    json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_a_torn_last_line_is_left_out_and_cut_before_going_on(tmp_path):
    """Also "CSV written only at the end: a crash loses all" (timm): every line is on its own, from the first step on."""
    path = tmp_path / "log.jsonl"
    log = Log(path)
    log.append("step", step=0)
    log.append("step", step=1)
    log.close()
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 2):
        path.write_bytes(whole[:-cut])
        assert [line["step"] for line in read_lines(path)] == [0]
        resumed = Log(path)
        resumed.append("step", step=1)
        resumed.close()
        assert path.read_bytes() == whole


def test_lines_after_the_checkpoint_are_cut_on_resume(tmp_path):
    path = tmp_path / "log.jsonl"
    log = Log(path)
    log.append("step", step=0)
    size = log.size
    log.append("step", step=1)
    log.close()
    resumed = Log(path, size=size)
    resumed.append("step", step=1)
    resumed.close()
    assert [line["step"] for line in read_lines(path)] == [0, 1]


def test_a_corrupt_line_names_file_and_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event":"step"}\n{"event":\n{"event":"step"}\n')
    with pytest.raises(RecordError, match=r"log\.jsonl, line 2 is corrupt.*delete the cell's folder"):
        list(read_lines(path))


@pytest.mark.parametrize("content", ["", "{", '{"a": 1} x', "\x00\x01"])
def test_a_corrupt_record_names_the_file(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=r"result\.json is corrupt"):
        read_json(path)


def test_a_log_shorter_than_its_checkpoint_is_an_error(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event":"step"}\n')
    with pytest.raises(RecordError, match="cut from outside"):
        Log(path, size=1000)


def test_a_full_disk_leaves_the_record_before(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_json(path, {"good": 1})

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ablations.record.os.fsync", full)
    with pytest.raises(RecordError, match=r"cannot write .*No space left on device; free space"):
        write_json(path, {"good": 2})
    assert read_json(path) == {"good": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    log.append("step", step=0)
    real = log._file

    class Full:
        def write(self, data):
            return real.write(data[:5])

        def __getattr__(self, name):
            return getattr(real, name)

    log._file = Full()
    with pytest.raises(RecordError, match="disk full"):
        log.append("step", step=1)
    log._file = real
    log.append("step", step=2)
    log.close()
    assert [line["step"] for line in read_lines(log.path)] == [0, 2]


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write"):
        write_json(tmp_path / "file" / "result.json", {})
    with pytest.raises(RecordError, match=r"cannot write .*check --out"):
        Log(tmp_path / "file" / "log.jsonl")
