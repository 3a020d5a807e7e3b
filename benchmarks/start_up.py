"""Seconds from process start to the end of the first step: `pax train`, naive JAX and PyTorch eager, as JSON.

    python benchmarks/start_up.py [--sizes A B] [--rounds 3] [--peer-python PYTHON]

Each start is a process of its own, timed from outside: to pax's report of its first step, and to the peer's answer
after its own. `cold` has an empty compilation cache, `warm` the one that the cold start of the round filled; the peer
in JAX has a cache of its own, with pax's settings. PyTorch compiles nothing, so pax's cold and warm starts are both
compared with the same one. A round starts each variant once; the first round is not recorded, since it reads the
packages from the disk. PyTorch runs under PYTHON (torch 2.13.0), and is skipped without one. On a busy machine, compare
CPU seconds on one core: start it with `taskset -c 0`.
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

from train_step import HERE, SIZES

FIELDS = {"seq_len": "max_seq_len", "batch": "global_batch_size", "vocab_size": "task.model.vocab_size"}


def pax_command(size: dict[str, int], run_dir: pathlib.Path) -> list[str]:
    """`pax train` of `tiny` at a size, its layers scanned as the peer's, with the peers' optimizer."""
    sets = {FIELDS.get(name, name): value for name, value in size.items()}
    sets |= {"unroll": 1, "optimizer": "AdamW"}
    assigned = [f"--set={path}={value}" for path, value in sets.items()]
    return [sys.executable, "-m", "paxcli", "train", "tiny", *assigned, "--run-dir", str(run_dir)]


def first_step(command: list[str], mark: str, cache: pathlib.Path) -> dict[str, float]:
    """Starts a process and ends it at the line of its first step, which begins with `mark`.

    Raises:
      RuntimeError: It ended before.
    """
    environment = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # an installed package has its bytecode
    began, used = time.perf_counter(), time_of_children()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        if line.startswith(mark):
            seconds = time.perf_counter() - began
            process.kill()
            process.communicate()
            return {"seconds": seconds, "cpu_seconds": time_of_children() - used}
        shown.append(line)
    raise RuntimeError(f"{command} ended before its first step:\n{''.join(shown)}")


def time_of_children() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(size: dict[str, int], rounds: int, peer_python: str | None) -> dict:
    """All variants at one size."""
    task = json.dumps(size)
    answer = '{"first_step_seconds"'
    recorded: list[dict[str, dict[str, float]]] = []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            work, found = pathlib.Path(name), {}
            for kind in ("cold", "warm"):
                pax = pax_command(size, work / kind)
                naive = [sys.executable, str(HERE / "peers" / "naive_jax.py"), task]
                found[f"pax_{kind}"] = first_step(pax, "step 1 ", work / "pax_cache")
                found[f"naive_jax_{kind}"] = first_step(naive, answer, work / "naive_cache")
            if peer_python:
                loop = [peer_python, str(HERE / "peers" / "torch_loop.py"), task]
                found["torch"] = first_step(loop, answer, work)
        if number:
            recorded.append(found)
    facts: dict = {"size": size, "rounds": rounds, "cores": len(os.sched_getaffinity(0))}
    for unit, key in (("seconds", "ratios"), ("cpu_seconds", "cpu_ratios")):
        facts[key] = {
            f"pax_over_{peer}_{kind}": statistics.median(
                found[peer if peer in found else f"{peer}_{kind}"][unit] / found[f"pax_{kind}"][unit]
                for found in recorded
            )
            for peer in (("naive_jax", "torch") if peer_python else ("naive_jax",))
            for kind in ("cold", "warm")
        }
    for variant in recorded[0]:
        facts[variant] = {
            unit: {
                "median": statistics.median(values := [found[variant][unit] for found in recorded]),
                "least": min(values),
                "most": max(values),
            }
            for unit in ("seconds", "cpu_seconds")
        }
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["A"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python")
    options = parser.parse_args()
    results = {size: run(SIZES[size], options.rounds, options.peer_python) for size in options.sizes}
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
