"""Seconds of one fine-tuning step of a Llama, all parameters or LoRA: pax against TRL's trainer with PEFT, as JSON.

    python benchmarks/finetune.py --peer-python PYTHON [--sizes A B] [--kinds lora full] [--rounds 5]

Both are processes of their own that keep their compiled step; in each round, each takes a few steps while the other
waits. Float32, AdamW, clip 1.0, random rows of full length, adapters of rank 8 on every matrix of attention and
feed-forward layers. On a busy machine, compare CPU seconds on one core: start it with `taskset -c 0`. PYTHON has torch
2.13.0, transformers, peft and trl.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

from train_step import HUGE_PAGES, Peer, ratio

PEERS = pathlib.Path(__file__).parent / "peers"
RANK = 8
SIZES = {
    "A": dict(num_layers=4, model_dims=256, hidden_dims=1024, num_heads=4, vocab_size=1024, seq_len=256, batch=8),
    "B": dict(num_layers=8, model_dims=512, hidden_dims=2048, num_heads=8, vocab_size=8192, seq_len=512, batch=4),
}


def pax_task(size: dict, kind: str) -> dict:
    """The recipe of this size, for `peers/pax_step.py`."""
    sets = [f"task.model.{name}={size[name]}" for name in ("num_layers", "model_dims", "hidden_dims", "num_heads")]
    sets += [f"task.model.vocab_size={size['vocab_size']}", f"task.model.max_seq_len={size['seq_len']}"]
    sets += ["task.model.fprop_dtype=float32", f"task.train.global_batch_size={size['batch']}", "num_kv_heads=null"]
    sets += [f"stack.unroll={size['num_layers']}", "stack.remat_policy=everything"]
    sets += [f"lora.rank={RANK}"] if kind == "lora" else []
    return {"recipe": "llama-1b", "overlays": ["lora"] if kind == "lora" else [], "sets": sets}


def run(size: str, kind: str, rounds: int, steps: int, peer_python: str) -> dict:
    """Both peers at one size."""
    theirs = SIZES[size] | {"rank": RANK if kind == "lora" else None}
    peers = [
        Peer("pax", [sys.executable, str(PEERS / "pax_step.py")], pax_task(SIZES[size], kind), HUGE_PAGES),
        Peer("trl", [peer_python, str(PEERS / "trl_sft.py")], theirs, {}),
    ]
    for _ in range(rounds):
        for peer in peers:
            time.sleep(1)  # threads of the previous process spin for a while
            peer.steps(steps)
    ours, trl = peers
    facts = {"size": SIZES[size], "rounds": rounds, "steps_a_round": steps, "cores": len(os.sched_getaffinity(0))}
    facts["pax_over_trl"] = ratio(trl.seconds, ours.seconds, steps)
    facts["pax_over_trl_cpu"] = ratio(trl.cpu_seconds, ours.cpu_seconds, steps)
    return facts | {peer.name: peer.close() for peer in peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    parser.add_argument("--kinds", nargs="+", choices=("lora", "full"), default=("lora", "full"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peer-python", required=True)
    options = parser.parse_args()
    results = {
        f"{size}/{kind}": run(size, kind, options.rounds, options.steps, options.peer_python)
        for size in options.sizes
        for kind in options.kinds
    }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
