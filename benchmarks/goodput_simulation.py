"""The best checkpoint cadences of a long run on 1 to 50,000 chips, from a seeded simulation of failures, as JSON.

    python benchmarks/goodput_simulation.py [--chips 1024 16384] [--failures llama3] [--local-survival 0.23] [--seed 0]

A run saves to two tiers: the local disks of its hosts, and a bucket. A failure ends all processes. The run restarts,
after `--restart-seconds`, from the newest checkpoint that is left: the local one with probability `--local-survival`,
otherwise the one in the bucket. Failures come at a constant rate per chip, in saves and restarts too. Training waits
for saves, so each costs the state's bytes over the bandwidth: the worst case of an asynchronous save. The step time is
a prediction for a TPU slice and does not change with the number of chips (weak scaling).

The output has the cadences of closed formulas too: Young's and Daly's for the bucket alone, and Young's for each tier
with the failures that it serves.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

PREDICTIONS = pathlib.Path(__file__).parent / "results" / "tpu_aot.json"
CHIPS = (1, 8, 128, 1024, 4096, 16_384, 50_000)
HOUR = 3600.0
BYTES_PER_PARAMETER = 12  # parameters and both moments of Adam, float32

# Published failures per chip and second.
FAILURES = {
    # Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs.
    "llama3": 419 / (54 * 24 * HOUR * 16_384),
    # Kokolis et al., HPCA 2025 (arXiv 2410.21680): 6.50 and 2.34 failures per 1,000 days of a node of 8 GPUs.
    "rsc1": 6.50e-3 / (24 * HOUR * 8),
    "rsc2": 2.34e-3 / (24 * HOUR * 8),
}
# Llama 3, table 5: software 54, dependencies 2, NCCL timeouts 7, network 35 of 419. No host loses its disks in these.
LOCAL_SURVIVAL = 98 / 419
# All hosts together: 200 Gb/s, Cloud Storage's default quota of a project in a region. Llama 3's storage had 2 TB/s.
BUCKET_BYTES_PER_SECOND = 25e9
# One host: its network, 100 Gb/s, and its local NVMe disks, as Google Cloud documents writes to 24 of them.
HOST_NETWORK_BYTES_PER_SECOND, LOCAL_BYTES_PER_SECOND = 12.5e9, 4.68e9


class Job(NamedTuple):
    """A job, in seconds: mean time between failures, step, save and restore of each tier, restart without restore."""

    mtbf: float
    step: float
    local_save: float
    bucket_save: float
    local_restore: float
    bucket_restore: float
    restart: float
    local_survival: float


class Result(NamedTuple):
    """Goodput of each cadence, and the shares of the time that went to saves, to lost steps, and to restarts."""

    goodput: np.ndarray
    save: np.ndarray
    lost: np.ndarray
    restart: np.ndarray


def simulate(job: Job, local_steps: np.ndarray, bucket_saves: np.ndarray, failures: int, seed: int) -> Result:
    """Simulates a run through many failures, for many cadences at once, which all see the same failures.

    Args:
      job: The job.
      local_steps: Steps between saves to the local tier, one number for each cadence.
      bucket_saves: Every so many of these saves, the run saves to the bucket too.
      failures: The number of failures.
      seed: Of the times between failures, and of the choice whether one costs the local tier.
    """
    rng = np.random.default_rng(seed)
    gaps, survives = rng.exponential(job.mtbf, failures), rng.random(failures) < job.local_survival
    cycle = local_steps * job.step + job.local_save  # from one local save to the next
    macro = bucket_saves * cycle + job.bucket_save  # from one save to the bucket to the next
    done = np.zeros_like(cycle)  # local saves in the current macro cycle that the run still has
    macros, saving, restarting = np.zeros_like(cycle), np.zeros_like(cycle), np.zeros_like(cycle)
    restore = 0.0  # the run starts from nothing
    for gap, survived in zip(gaps, survives, strict=True):
        overhead = job.restart + restore
        trained = max(gap - overhead, 0.0)
        restarting += gap - trained
        # Time since the start of the current macro cycle, as if it had been trained in one go.
        at = done * cycle + trained
        finished = np.floor(at / macro)
        within = at - finished * macro
        saved = np.minimum(np.floor(within / cycle), bucket_saves)
        saving += (finished * bucket_saves + saved - done) * job.local_save + finished * job.bucket_save
        macros += finished
        done = saved if survived else np.zeros_like(saved)
        restore = job.local_restore if survived else job.bucket_restore
    total = gaps.sum()
    useful = (macros * bucket_saves + done) * local_steps * job.step / total
    save, restart = saving / total, restarting / total
    return Result(useful, save, 1 - useful - save - restart, restart)


def young(save: float, mtbf: float) -> float:
    """Seconds of training between saves: the first-order optimum (Young 1974)."""
    return math.sqrt(2 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """Seconds of training between saves: the higher-order optimum (Daly 2006, equation 37)."""
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return young(save, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def exact_goodput(train: float, save: float, restart: float, mtbf: float) -> float:
    """Goodput of one tier with exponential failures, in restarts too (Daly 2006, equation 20)."""
    return train / (mtbf * math.exp(restart / mtbf) * math.expm1((train + save) / mtbf))


def best_cadence(job: Job, failures: int, seed: int) -> dict[str, Any]:
    """The cadences with the highest goodput: steps between saves of each tier, and where the time goes."""
    around_local = young(max(job.local_save, 1e-3), job.mtbf / max(job.local_survival, 0.01)) / job.step
    around_bucket = young(job.bucket_save, job.mtbf / max(1 - job.local_survival, 0.01)) / job.step
    steps = np.unique(np.maximum(np.rint(around_local * np.geomspace(1 / 8, 8, 61)), 1))
    saves = np.unique(np.maximum(np.rint(around_bucket / around_local * np.geomspace(1 / 16, 16, 61)), 1))
    local_steps, bucket_saves = (grid.ravel() for grid in np.meshgrid(steps, saves))
    result = simulate(job, local_steps, bucket_saves, failures, seed)
    best = int(np.argmax(result.goodput))
    return {
        "local_interval_steps": int(local_steps[best]),
        "bucket_interval_steps": int(local_steps[best] * bucket_saves[best]),
        **{name: round(float(values[best]), 4) for name, values in result._asdict().items()},
    }


def best_bucket_cadence(job: Job, failures: int, seed: int) -> dict[str, Any]:
    """The same of a run that saves to the bucket only."""
    alone = job._replace(local_save=0.0, local_survival=0.0)
    steps = np.unique(np.maximum(np.rint(young(job.bucket_save, job.mtbf) / job.step * np.geomspace(1 / 8, 8, 241)), 1))
    result = simulate(alone, steps, np.ones_like(steps), failures, seed)
    best = int(np.argmax(result.goodput))
    return {"bucket_interval_steps": int(steps[best]), "goodput": round(float(result.goodput[best]), 4)}


def plan(chips: int, options: argparse.Namespace) -> dict[str, Any]:
    """The job on so many chips, its best cadences, and those of the closed formulas."""
    rows = [row for row in json.loads(PREDICTIONS.read_text()) if row["recipe"] == options.recipe and row["fits"]]
    prediction = min(rows, key=lambda row: row["predicted_step_seconds"])
    state = prediction["parameters"] * BYTES_PER_PARAMETER
    hosts = math.ceil(chips / options.chips_per_host)
    local = state / (hosts * options.local_bandwidth)
    bucket = state / min(hosts * HOST_NETWORK_BYTES_PER_SECOND, options.bucket_bandwidth)
    mtbf = 1 / (FAILURES[options.failures] * chips)
    step = prediction["predicted_step_seconds"]
    job = Job(mtbf, step, local, bucket, local, bucket, options.restart_seconds, options.local_survival)
    survival = options.local_survival
    formulas = {
        "bucket_alone_young": young(bucket, mtbf) / step,
        "bucket_alone_daly": daly(bucket, mtbf) / step,
        "local_young": young(local, mtbf / survival) / step if survival > 0 else math.inf,
        "bucket_young": young(bucket, mtbf / (1 - survival)) / step if survival < 1 else math.inf,
    }
    return {
        "chips": chips,
        "mtbf_hours": round(mtbf / HOUR, 2),
        "step_seconds": round(step, 3),
        "local_save_seconds": round(local, 3),
        "bucket_save_seconds": round(bucket, 3),
        "two_tiers": best_cadence(job, options.samples, options.seed),
        "bucket_alone": best_bucket_cadence(job, options.samples, options.seed),
        "formula_interval_steps": {name: round(steps) for name, steps in formulas.items() if math.isfinite(steps)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", type=int, nargs="+", default=CHIPS)
    parser.add_argument("--recipe", default="c4-32b", help="a recipe of benchmarks/results/tpu_aot.json")
    parser.add_argument("--failures", choices=FAILURES, default="llama3")
    parser.add_argument("--local-survival", type=float, default=LOCAL_SURVIVAL)
    parser.add_argument("--restart-seconds", type=float, default=600.0)
    parser.add_argument("--local-bandwidth", type=float, default=LOCAL_BYTES_PER_SECOND, help="bytes/s of a host")
    parser.add_argument("--bucket-bandwidth", type=float, default=BUCKET_BYTES_PER_SECOND, help="bytes/s of all hosts")
    parser.add_argument("--chips-per-host", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4000, help="failures to simulate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps({**vars(options), "plans": [plan(chips, options) for chips in options.chips]}, indent=1))


if __name__ == "__main__":
    main()
