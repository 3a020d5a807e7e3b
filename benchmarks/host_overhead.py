"""Overhead of `pax train tiny` over its compiled step: input, metrics, reports, checkpoints. As JSON.

python benchmarks/host_overhead.py [--rounds 5] [--steps 60]

In each round the compiled step runs `--steps` times on one batch, without waiting in between; then a full run takes as
many steps, with a report every 10 steps and a checkpoint every 50. Set GLIBC_TUNABLES=glibc.malloc.hugetlb=1, as `pax`
does for itself.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax

from pax_recipes.tiny import tiny
from paxcli.mesh.sharding import put_batch
from paxcli.metrics.meter import peak_memory_bytes
from paxcli.training.instrument import step_of
from paxcli.training.loop import train
from paxcli.training.progress import Reporter
from paxcli.training.run_dir import RunDir
from paxcli.training.session import build_session


class Clock(Reporter):
    """Records the time of each step of a run."""

    def __init__(self) -> None:
        self.heard: dict[int, float] = {}

    def step(self, record: Any) -> None:
        """Records the time."""
        self.heard[record.step] = time.perf_counter()


def run_seconds(directory: pathlib.Path, steps: int) -> float:
    """Seconds of a step in a full run, without the first ten steps."""
    config = tiny()
    config.task.train.num_train_steps = steps + 20
    config.eval_inputs = []
    config.checkpoint.save_interval_steps = 50
    clock = Clock()
    train(config, "", RunDir(directory), clock)
    return (clock.heard[steps + 10] - clock.heard[10]) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    bare, whole = [], []
    with tempfile.TemporaryDirectory() as name, build_session(tiny()).active() as session:
        state = session.new_state()
        step = step_of(session)
        batch = put_batch(session.experiment.train_input.get_next(), session.mesh)
        for number in range(options.rounds):
            for timed in (3, options.steps):
                began = time.perf_counter()
                for _ in range(timed):
                    state, metrics = step(state, batch)
                jax.block_until_ready(metrics)
            bare.append((time.perf_counter() - began) / options.steps)
            whole.append(run_seconds(pathlib.Path(name) / str(number), options.steps))
    result = {
        "bare_step_seconds": statistics.median(bare),
        "run_step_seconds": statistics.median(whole),
        "overhead": statistics.median(w / b - 1 for w, b in zip(whole, bare, strict=True)),
        "peak_memory_bytes": peak_memory_bytes(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
