"""Seconds from process start to the first finished step of `pax train` at size A, cold and with a warm cache, as JSON.

python benchmarks/start_up.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

SIZE_A = ["vocab_size=1024", "unroll=4"]


def first_step_seconds(directory: pathlib.Path, cache: pathlib.Path) -> float:
    """Starts a run, and stops it after the report of its first step."""
    run_dir = directory / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    sets = [f"--set=task.model.{value}" if "vocab" in value else f"--set={value}" for value in SIZE_A]
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "paxcli", "train", "tiny", *sets, "--run-dir", str(run_dir)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 1 "):
            seconds = time.perf_counter() - began
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return seconds
    raise RuntimeError("the run ended before its first step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        for number in range(rounds):
            cache = directory / f"cache{number}"
            cold.append(first_step_seconds(directory, cache))
            warm.append(first_step_seconds(directory, cache))
    print(json.dumps({"cold_seconds": statistics.median(cold), "warm_seconds": statistics.median(warm)}))


if __name__ == "__main__":
    main()
