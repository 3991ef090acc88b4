"""Time of `analysis.make` on 10,000 synthetic records: reading, statistics, tables, figures."""

import subprocess
import sys
import time
from pathlib import Path

import synthetic_records as synthetic

ROOT = Path(__file__).resolve().parents[2]


def test_bench_analysis(benchmark, tmp_path):
    folder = synthetic.write_run(tmp_path / "run", seeds=range(715), grid="full")
    cells = len(list((folder / "cells").iterdir()))

    def make():
        start = time.perf_counter()
        arguments = ["--records", str(folder), "--out", str(tmp_path / "out")]
        subprocess.run(
            [sys.executable, "-m", "analysis.make", *arguments],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return time.perf_counter() - start

    seconds = benchmark.pedantic(make, rounds=1)
    print(f"\nanalysis.make: {cells} records with logs, all tables and figures: {seconds:.1f} s")
