"""What the harness itself costs: a fake cell of 10 ms through claim, declaration, result and release; start to first step."""

import subprocess
import sys
import time

from harness import declared, fake_result, tiny_grid

from ablations.executors.inline import run_inline
from ablations.record import read_lines
from ablations.schedule import Queue

CELLS = 1000


def test_bench_harness_overhead(benchmark, tmp_path):
    """Issue's bound: 10 ms a cell."""

    def run() -> float:
        start = time.perf_counter()
        folder, cells = declared(tmp_path / "run", tiny_grid("fp32", seeds=tuple(range(CELLS))))
        spent = 0.0

        def work(cell):
            nonlocal spent
            begun = time.perf_counter()
            time.sleep(0.01)
            spent += time.perf_counter() - begun
            fake_result(folder, cell)
            return "done"

        run_inline(Queue(folder, cells), folder, work)
        return (time.perf_counter() - start - spent) / CELLS

    overhead = benchmark.pedantic(run, rounds=1, iterations=1)
    print(f"\nharness: {1000 * overhead:.2f} ms a cell over {CELLS} cells")
    assert overhead <= 0.010


def test_bench_harness_first_step(benchmark, tmp_path):
    """Issue's bound: 6 s from the command to the first training step on 2 cores."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "ablations.run", "--grid", "quick", "--arms", "fp32", "--out", str(out)]

    def run() -> float:
        start = time.perf_counter()
        runner = subprocess.Popen([*command, "--epochs", "1"], stdout=subprocess.DEVNULL)
        while True:
            logs = list(out.glob("cells/*/log.jsonl"))
            if logs and any(event["event"] == "step" for event in read_lines(logs[0])):
                seconds = time.perf_counter() - start
                runner.wait()
                return seconds
            time.sleep(0.01)

    seconds = benchmark.pedantic(run, rounds=1, iterations=1)
    print(f"\nharness: {seconds:.2f} s from the command to the first step")
    assert seconds <= 6.0
