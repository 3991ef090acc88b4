"""Claims, executors and the queue: no cell twice, none lost, whatever dies when."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from harness import declared, fake_result, tiny_grid

from ablations.cell import Options
from ablations.executors.inline import run_inline
from ablations.executors.local import run_local
from ablations.folder import RunFolder
from ablations.record import RecordError, write_json
from ablations.schedule import Queue, in_shard

TESTS = str(Path(__file__).parent)


# what a cell's process runs in these tests; top-level, so that a fork server finds it


def fake_cell(out: str, cell_id: str, options: Options) -> None:
    folder = RunFolder(out)
    cell = next(c for c in _cells(folder) if c.id == cell_id)
    if options.root == "die":
        tries = folder.cell_folder(cell_id) / "tries"
        tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
        if len(tries.read_text()) < 3:
            os.kill(os.getpid(), signal.SIGKILL)
    if options.root == "always die":
        print("last words", flush=True)
        os._exit(3)
    fake_result(folder, cell, state="error" if options.root == "error" else "done")


def _cells(folder):
    from ablations.status import cells_of

    return cells_of(folder.path)


# ---------------------------------------------------------------- claims


def test_a_claim_is_for_one(tmp_path):
    folder, (cell,) = declared(tmp_path / "run", tiny_grid("fp32"))
    other = RunFolder(tmp_path / "run")
    assert folder.claim(cell.id)
    assert not other.claim(cell.id)
    assert other.claimed(cell.id)
    other.release(cell.id)  # not theirs
    assert not other.claim(cell.id)
    folder.release(cell.id)
    assert other.claim(cell.id)


def test_a_claim_of_a_dead_process_is_taken_at_once(tmp_path):
    folder, (cell,) = declared(tmp_path / "run", tiny_grid("fp32"))
    code = f"from ablations.folder import RunFolder; RunFolder({str(folder.path)!r}).claim({cell.id!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (folder.cell_folder(cell.id) / "claim").exists()
    assert not folder.claimed(cell.id)
    assert folder.claim(cell.id)


def test_a_recycled_process_id_is_not_the_owner(tmp_path):
    folder, (cell,) = declared(tmp_path / "run", tiny_grid("fp32"))
    assert folder.claim(cell.id)
    path = folder.cell_folder(cell.id) / "claim"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": "1"}))
    assert RunFolder(folder.path).claim(cell.id)


def test_a_claim_of_another_host_holds_until_its_lease_ends(tmp_path):
    folder, (cell,) = declared(tmp_path / "run", tiny_grid("fp32"))
    assert folder.claim(cell.id)
    path = folder.cell_folder(cell.id) / "claim"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "elsewhere", "pid": 1}))
    other = RunFolder(folder.path, lease=30.0)
    assert not other.claim(cell.id)
    old = time.time() - 31
    os.utime(path, (old, old))
    folder.touch(cell.id)  # the other host lives
    assert not other.claim(cell.id)
    os.utime(path, (old, old))
    assert other.claim(cell.id)
    assert not folder.holds(cell.id)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    folder, (cell,) = declared(tmp_path / "run", tiny_grid("fp32"))
    home = folder.cell_folder(cell.id)
    (home / "cell.json").unlink()
    home.rmdir()
    home.write_text("")
    with pytest.raises(RecordError, match=r"cannot claim .*check --out"):
        folder.claim(cell.id)


RUNNER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from harness import fake_result
from ablations.executors.inline import run_inline
from ablations.folder import RunFolder
from ablations.locks import locked
from ablations.schedule import Queue
from ablations.status import cells_of
from pathlib import Path

out = Path(sys.argv[2])
folder = RunFolder(out)

def work(cell):
    home = folder.cell_folder(cell.id)
    try:
        with locked(home / ".alone", wait=0.0):
            time.sleep(0.01)
            fake_result(folder, cell)
            with open(home / "finished", "a") as file:
                file.write("x")
    except TimeoutError:
        (out / "overlap").write_text(cell.id)
    return "done"

run_inline(Queue(folder, cells_of(out)), folder, work)
"""


def test_four_runners_under_kill_9_lose_no_cell_and_repeat_none(tmp_path):
    folder, cells = declared(tmp_path / "run", tiny_grid("fp32", "off", seeds=tuple(range(100))))
    draw = random.Random(7)

    def start():
        return subprocess.Popen([sys.executable, "-c", RUNNER, TESTS, str(folder.path)])

    runners = [start() for _ in range(4)]
    kills = 0
    while kills < 10 and any(runner.poll() is None for runner in runners):
        time.sleep(draw.uniform(0.05, 0.4))
        victim = draw.randrange(4)
        if runners[victim].poll() is None:
            runners[victim].kill()
            runners[victim].wait()
            kills += 1
        runners[victim] = start()
    for runner in runners:
        assert runner.wait(timeout=60) == 0
    assert kills >= 5
    assert not (folder.path / "overlap").exists()
    assert {folder.state(cell.id) for cell in cells} == {"done"}
    written = [
        (folder.cell_folder(c.id) / "finished").read_text()
        for c in cells
        if (folder.cell_folder(c.id) / "finished").exists()
    ]
    assert set(written) == {"x"}
    assert len(written) >= len(cells) - kills


# ---------------------------------------------------------------- queue


def test_a_finished_cell_does_not_run_again_and_failures_do(tmp_path):
    folder, cells = declared(tmp_path / "run", tiny_grid("fp32", seeds=tuple(range(8))))
    states = ("done", "oom", "diverged", "unsupported", "error", "timeout", "preempted")
    for state, cell in zip(states, cells, strict=False):
        fake_result(folder, cell, state=state)
    ran = []
    run_inline(Queue(folder, cells), folder, lambda cell: ran.append(cell.seed) or "done")
    assert sorted(ran) == [cell.seed for cell in cells[4:]]


def test_replay_waits_for_what_it_replays(tmp_path):
    folder, cells = declared(tmp_path / "run", tiny_grid("replay", "tri-accel", seeds=(0, 1)))
    order = []

    def work(cell):
        order.append((cell.arm, cell.seed))
        fake_result(folder, cell)
        return "done"

    run_inline(Queue(folder, cells), folder, work)
    assert len(order) == 4
    assert order.index(("replay", 0)) > order.index(("tri-accel", 1))
    assert order.index(("replay", 1)) > order.index(("tri-accel", 0))


def test_replay_of_a_run_that_failed_says_so(tmp_path):
    folder, cells = declared(tmp_path / "run", tiny_grid("replay", "tri-accel", seeds=(0, 1)))

    def work(cell):
        fake_result(folder, cell, state="diverged" if cell.arm == "tri-accel" else "done")
        return "diverged"

    run_inline(Queue(folder, cells), folder, work)
    for cell in cells:
        if cell.arm == "replay":
            result = folder.result(cell.id)
            assert result["state"] == "error"
            assert f"needs the trace of cell {cell.needs}, which ended 'diverged'" in result["reason"]


def test_shards_are_whole_blocks_and_together_everything():
    from ablations.cells import expand

    cells = expand(tiny_grid("fp32", "off", "tri-accel", seeds=tuple(range(5))))
    parts = [in_shard(cells, f"{i}/3") for i in (1, 2, 3)]
    assert Counter(c.id for part in parts for c in part) == Counter(c.id for c in cells)
    blocks = [{c.block for c in part} for part in parts]
    assert not blocks[0] & blocks[1]
    for bad in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(ValueError, match="write i/n"):
            in_shard(cells, bad)


# ---------------------------------------------------------------- local processes


def go(tmp_path, mode, arms=("fp32",), **options):
    folder, cells = declared(tmp_path / "run", tiny_grid(*arms))
    told = []
    finished = run_local(
        Queue(folder, cells),
        folder,
        Options(root=mode),
        work=fake_cell,
        done=lambda cell, state, reason: told.append((cell.arm, state, reason)),
        **options,
    )
    return folder, cells, told, finished


def test_a_process_that_dies_is_tried_again(tmp_path):
    """Retries are the harness's, of infrastructure failures only: "retry callback ignores exceptions" (optuna 6085)."""
    folder, cells, told, finished = go(tmp_path, "die")
    assert finished
    assert [state for _, state, _ in told] == ["retry", "retry", "done"]
    assert "SIGKILL" in told[0][2]
    assert folder.state(cells[0].id) == "done"


def test_a_process_that_always_dies_ends_as_an_error_with_its_log(tmp_path):
    folder, cells, told, _ = go(tmp_path, "always die")
    assert [state for _, state, _ in told] == ["retry", "retry", "error"]
    result = folder.result(cells[0].id)
    assert "exit code 3" in result["reason"]
    log = folder.cell_folder(cells[0].id) / "stdout.log"
    assert str(log) in result["reason"]
    assert log.read_text().count("last words") == 3


def test_fail_fast_stops_at_the_first_error(tmp_path):
    """ "failures shown only at the end" (hydra 2284): told as they come."""
    _, _, told, finished = go(tmp_path, "error", arms=("fp32", "off", "batch"), fail_fast=True)
    assert not finished
    assert [state for _, state, _ in told] == ["error"]
    _, _, told, finished = go(tmp_path, "error", arms=("fp32", "off", "batch"))
    assert finished
    assert len(told) == 3


def test_times_beside_other_workers_are_flagged(tmp_path, monkeypatch):
    from ablations.executors import local

    seen = []

    class Spy(local.CellProcess):
        def __init__(self, out, cell_id, options, *, work):
            seen.append((options.shared_machine, options.threads, options.device))
            super().__init__(out, cell_id, options, work=work)

    monkeypatch.setattr(local, "CellProcess", Spy)
    go(tmp_path, "", arms=("fp32", "off"), workers=2, devices=["cpu", "meta"])
    cores = os.cpu_count() or 1
    assert {shared for shared, _, _ in seen} == {True}
    assert {threads for _, threads, _ in seen} == {max(1, cores // 2)}
    assert {device for _, _, device in seen} == {"cpu", "meta"}


def test_the_runner_s_death_ends_its_cells(tmp_path):
    folder, (cell,) = declared(tmp_path / "run", tiny_grid("fp32"))
    code = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {TESTS!r})
        from pathlib import Path
        import test_executors as t
        from ablations.cell import Options
        from ablations.executors.process import CellProcess
        if __name__ == "__main__":
            CellProcess(Path({str(folder.path)!r}), {cell.id!r}, Options(), work=t.sleeper).join()
    """)
    script = tmp_path / "runner.py"
    script.write_text(code)
    runner = subprocess.Popen([sys.executable, str(script)])
    note = folder.cell_folder(cell.id) / "pid"
    until = time.monotonic() + 60
    while not note.exists() or not note.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    pid = int(note.read_text())
    runner.kill()
    runner.wait()
    from ablations.locks import started

    while started(pid) is not None:
        assert time.monotonic() < until
        time.sleep(0.05)


def sleeper(out: str, cell_id: str, options: Options) -> None:
    (Path(out) / "cells" / cell_id / "pid").write_text(str(os.getpid()))
    time.sleep(120)


# ---------------------------------------------------------------- merge


def test_shards_merge_by_union(tmp_path):
    from ablations.grid import GridError
    from ablations.merge import merge

    grid = tiny_grid("fp32", "off", seeds=(0, 1))
    one, cells = declared(tmp_path / "one", grid)
    two, _ = declared(tmp_path / "two", grid)
    for index, cell in enumerate(cells):
        fake_result(one if index % 2 else two, cell)
    assert merge(tmp_path / "two", one) == 2
    assert {one.state(cell.id) for cell in cells} == {"done"}
    assert merge(tmp_path / "two", one) == 0
    declared(tmp_path / "three", tiny_grid("fp32", epochs=9))
    with pytest.raises(GridError, match="another grid"):
        merge(tmp_path / "three", one)


# ---------------------------------------------------------------- Ray


def test_ray_not_installed_is_one_clear_error(tmp_path, monkeypatch):
    from ablations.executors.ray import run_ray
    from triaccel.types import TriAccelError

    folder, cells = declared(tmp_path / "run", tiny_grid("fp32"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(TriAccelError, match=r"pip install 'tri-accel\[ray\]', or use --executor local"):
        run_ray(Queue(folder, cells), folder, Options(), started=lambda _: None, done=lambda *_: None)


def test_without_a_shared_folder_files_travel(tmp_path, monkeypatch):
    from ablations.executors import ray as executor

    folder, cells = declared(tmp_path / "run", tiny_grid("replay", "tri-accel", seeds=(0, 1)))
    cell = next(c for c in cells if c.arm == "replay")
    donor = folder.cell_folder(cell.needs)
    (donor / "trace.jsonl").write_text("trace")
    write_json(folder.path / "calibration" / "k.json", {"c": 1})
    sent = executor._sent(folder, cell)

    def run(out, cell_id, options):
        there = RunFolder(out)
        assert (there.cell_folder(cell.needs) / "trace.jsonl").read_text() == "trace"
        assert (there.path / "calibration" / "k.json").exists()
        fake_result(there, cell)

    monkeypatch.setattr(executor, "run_cell", run)
    written = executor._task(str(tmp_path / "not-here"), cell.id, Options(), sent)
    assert json.loads(written["result.json"])["state"] == "done"
    assert folder.result(cell.id) is None
    assert executor._task(str(folder.path), cell.id, Options(), sent) is None


RAY = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the loopback address, not one of the network's
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from harness import declared, tiny_grid
from ablations.cell import Options
from ablations.executors.ray import run_ray
from ablations.schedule import Queue

small = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={**small, "node_ip_address": "127.0.0.1"})
lost = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, node_ip_address="127.0.0.1")
ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
folder, cells = declared(Path(sys.argv[2]), tiny_grid("fp32", "off", "batch", "amp-bf16", epochs=40))
running, told = set(), []

def started(cell):
    running.add(cell.id)

def done(cell, state, reason):
    running.discard(cell.id)
    told.append((cell.arm, state, reason))

def kill():
    # in mid-cell: both cells have begun to log
    until = time.monotonic() + 60
    while time.monotonic() < until:
        logs = [folder.cell_folder(i) / "log.jsonl" for i in list(running)]
        if len(logs) == 2 and all(p.exists() and p.stat().st_size > 500 for p in logs):
            break
        time.sleep(0.02)
    cluster.remove_node(lost, allow_graceful=False)

threading.Thread(target=kill, daemon=True).start()
finished = run_ray(Queue(folder, cells), folder, Options(checkpoint_seconds=0.5), started=started, done=done)
print("TOLD", finished, told)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.long
def test_a_real_two_node_cluster_loses_a_node_and_completes_the_grid(tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "run"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", RAY, TESTS, str(out)], capture_output=True, text=True, timeout=150, env=env
    )
    assert process.returncode == 0, process.stderr[-3000:]
    told = process.stdout
    assert "TOLD True" in told
    assert "its node or worker was lost" in told
    from ablations.status import status

    assert [cell.state for cell in status(out)] == ["done"] * 4
