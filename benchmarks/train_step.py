"""Seconds of one training step: pax, naive JAX, PyTorch eager and compiled, and HF's Trainer, as JSON.

    python benchmarks/train_step.py [--sizes A B] [--rounds 7] [--peer-python PYTHON]

Every variant is a process of its own that keeps its compiled step; in each round, each takes a few steps while the
others wait. Float32, AdamW, clip 1.0. On a busy machine, compare CPU seconds on one core: start it with
`taskset -c 0`, which all of them inherit. PyTorch runs under PYTHON, where torch 2.13.0, transformers and accelerate
are installed, and is skipped without one.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
SIZES = {
    "A": dict(num_layers=4, model_dims=256, hidden_dims=1024, num_heads=4, vocab_size=1024, seq_len=256, batch=8),
    "B": dict(num_layers=8, model_dims=512, hidden_dims=2048, num_heads=8, vocab_size=8192, seq_len=512, batch=4),
}
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Peer:
    """A process that takes steps on request."""

    def __init__(self, name: str, command: list[str], task: dict, env: dict[str, str]):
        self.name = name
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.process = subprocess.Popen(
            [*command, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        self.first = self._answer()

    def steps(self, count: int) -> None:
        """Takes one step to warm up caches, then `count` steps that are recorded."""
        answer = self.ask(count + 1)
        self.seconds += answer["seconds"][1:]
        self.cpu_seconds += answer["cpu_seconds"][1:]

    def ask(self, count: int) -> dict:
        """Sends a count and returns the answer (`peers/steps.py`).

        Raises:
          RuntimeError: The process ended; its error is on stderr.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> dict:
        """Ends the process and returns its measurements."""
        last = self.ask(0)
        self.process.wait()
        return {
            "median_seconds": statistics.median(self.seconds),
            "best_seconds": min(self.seconds),
            "median_cpu_seconds": statistics.median(self.cpu_seconds),
            "first_step_seconds": self.first["first_step_seconds"],
            "steps": len(self.seconds),
            **{name: value for name, value in last.items() if value is not None},
        }

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self.process.wait()}")
        return json.loads(line)


def run(size: str, rounds: int, steps: int, peer_python: str | None) -> dict:
    """All peers at one size."""
    task = SIZES[size]
    peers = [
        Peer("pax", [sys.executable, str(HERE / "peers" / "pax_step.py")], task, HUGE_PAGES),
        Peer("naive_jax", [sys.executable, str(HERE / "peers" / "naive_jax.py")], task, {}),
    ]
    if peer_python:
        loop, trainer = ([peer_python, str(HERE / "peers" / name)] for name in ("torch_loop.py", "hf_trainer.py"))
        peers.append(Peer("torch", loop, task, {}))
        cold = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}  # as for the others, no compiled step of an earlier run
        peers.append(Peer("torch_compiled", loop, task | {"compile": True}, cold))
        peers.append(Peer("hf_trainer", trainer, task, {}))
    for _ in range(rounds):
        for peer in peers:
            time.sleep(1)  # threads of the previous process spin for a while
            peer.steps(steps)
    facts = {"size": task, "rounds": rounds, "steps_a_round": steps, "cores": len(os.sched_getaffinity(0))}
    facts["ratios"] = {f"pax_over_{peer.name}": ratio(peer.seconds, peers[0].seconds, steps) for peer in peers[1:]}
    facts["cpu_ratios"] = {
        f"pax_over_{peer.name}": ratio(peer.cpu_seconds, peers[0].cpu_seconds, steps) for peer in peers[1:]
    }
    closed = {peer.name: peer.close() for peer in peers}
    for key in ("first_step_seconds", "peak_memory_bytes"):
        ours = closed["pax"][key]
        facts[key] = {f"pax_over_{name}": theirs[key] / ours for name, theirs in closed.items() if name != "pax"}
    return facts | closed


def ratio(theirs: list[float], ours: list[float], steps: int) -> float:
    """The median of the ratios within a round, so that both had the same load."""
    rounds = range(0, len(ours), steps)
    return statistics.median(sum(theirs[i : i + steps]) / sum(ours[i : i + steps]) for i in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peer-python")
    options = parser.parse_args()
    results = {size: run(size, options.rounds, options.steps, options.peer_python) for size in options.sizes}
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
