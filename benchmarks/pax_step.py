"""A training step of the C4 recipes' model, with all its terms, as JSON.

    python benchmarks/pax_step.py [--sizes A B] [--rounds 3] [--steps 5] [--remat nothing everything]

`c4-1b` reduced to the sizes of `train_step.py`, in float32 on the CPU: soft caps, the learned query scale, the tied
embedding with its bias, Adam with clipped updates and weight decay. Each measurement is a process of its own, with an
empty compilation cache; sizes are interleaved. `paxml` has the times of real paxml on another machine of this class.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from peers.steps import since_process_start
from train_step import HUGE_PAGES, SIZES

PAXML = {
    "A": {"step_seconds": 1.06, "first_step_seconds": 24.0, "peak_memory_bytes": 1.8e9},
    "B": {"step_seconds": 7.6, "first_step_seconds": 54.0, "peak_memory_bytes": 2.7e9},
}


def measure(size: dict, remat_policy: str, steps: int) -> dict:
    """Time and memory of a few steps, in this process, which has done nothing else."""
    from paxcli.config.resolve import resolve
    from paxcli.jax_defaults import configure_jax

    configure_jax()
    import jax

    from paxcli.mesh.sharding import put_batch
    from paxcli.mesh.startup import return_free_memory
    from paxcli.training.instrument import step_of
    from paxcli.training.session import build_session

    fields = ("num_layers", "model_dims", "hidden_dims", "num_heads")
    sets = [f"task.model.{name}={size[name]}" for name in fields]
    sets += [f"task.model.vocab_size={size['vocab_size']}", f"max_seq_len={size['seq_len']}", "fprop_dtype=float32"]
    sets += [f"global_batch_size={size['batch']}", "ici_mesh_shape=null", f"remat_policy={remat_policy}"]
    config = resolve("c4-1b", ["synthetic-data"], sets).config
    with build_session(config).active() as session:
        batches = session.experiment.train_input
        lowered = step_of(session).lower(session.abstract, session.batch)
        began = time.perf_counter()
        step = lowered.compile()
        compile_seconds = time.perf_counter() - began
        state = session.new_state()
        return_free_memory()
        seconds = []
        first = None
        for _ in range(steps + 1):
            began = time.perf_counter()
            state, metrics = step(state, put_batch(batches.get_next(), session.mesh))
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - began)
            first = first or since_process_start()
    return {
        "step_seconds": statistics.median(seconds[1:]),
        "compile_seconds": compile_seconds,
        "first_step_seconds": first,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "loss": float(metrics["loss"]),
    }


def measure_in_process(size: str, remat_policy: str, steps: int) -> dict:
    """`measure` in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--measure", size, "--remat", remat_policy, "--steps", str(steps)],
            env={**os.environ, **HUGE_PAGES, "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"},
            cwd=pathlib.Path(__file__).parent,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def summarize(size: str, runs: list[dict]) -> dict:
    """Medians of the runs, and their ratios to paxml's."""
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    tokens = SIZES[size]["batch"] * SIZES[size]["seq_len"]
    theirs = PAXML[size]
    return medians | {
        "tokens_per_second": tokens / medians["step_seconds"],
        "paxml": theirs,
        "tokens_per_second_over_paxml": theirs["step_seconds"] / medians["step_seconds"],
        "first_step_over_paxml": medians["first_step_seconds"] / theirs["first_step_seconds"],
        "peak_memory_over_paxml": medians["peak_memory_bytes"] / theirs["peak_memory_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    parser.add_argument("--remat", nargs="+", default=["nothing", "everything"], help="remat policies to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--measure", choices=sorted(SIZES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(SIZES[options.measure], options.remat[0], options.steps)))
        return
    cases = [(size, policy) for size in options.sizes for policy in options.remat]
    runs: dict[tuple[str, str], list[dict]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for size, policy in cases:
            runs[size, policy].append(measure_in_process(size, policy, options.steps))
    print(json.dumps({f"{size} {policy}": summarize(size, runs[size, policy]) for size, policy in cases}, indent=2))


if __name__ == "__main__":
    main()
