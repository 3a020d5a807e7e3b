"""Greedy decoding: pax against Hugging Face `generate` with its cache, on the same weights, as JSON.

    python benchmarks/decode.py --peer-python PYTHON [--batches 1 8 32] [--tokens 64] [--rounds 5]

A random Llama in float32 is written by transformers and imported by pax. Each is a process of its own that keeps its
compiled loop; in each round, each generates one batch after prompts of 32 tokens while the other waits. No end token:
both generate all tokens. `equal_ids` is the share of rows that have the same ids in both. On a busy machine, compare
CPU seconds on one core: start it with `taskset -c 0`. PYTHON has torch 2.13.0, transformers and safetensors.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from train_step import HERE, HUGE_PAGES, Peer, ratio

MODEL = dict(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
)
PROMPT = 32


def run(directory: pathlib.Path, batch: int, tokens: int, rounds: int, peer_python: str) -> dict:
    """Both at one batch size."""
    peers, scripts = {}, {"pax": (sys.executable, HUGE_PAGES), "hf": (peer_python, {})}
    for name, (python, env) in scripts.items():
        task = dict(directory=str(directory), batch=batch, tokens=tokens, prompt=PROMPT, ids=f"{name}-{batch}.json")
        peers[name] = Peer(name, [python, str(HERE / "peers" / f"{name}_generate.py")], task, env)
    for _ in range(rounds):
        for peer in peers.values():
            time.sleep(1)  # threads of the previous process spin for a while
            peer.steps(1)
    ours, theirs = (json.loads((directory / f"{name}-{batch}.json").read_text()) for name in scripts)
    return {
        "tokens_per_second": {name: batch * tokens / statistics.median(peer.seconds) for name, peer in peers.items()},
        "pax_over_hf": ratio(peers["hf"].seconds, peers["pax"].seconds, 1),
        "pax_over_hf_cpu": ratio(peers["hf"].cpu_seconds, peers["pax"].cpu_seconds, 1),
        "equal_ids": statistics.mean(a == b for a, b in zip(ours, theirs, strict=True)),
    } | {name: peer.close() for name, peer in peers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        writer = str(HERE / "peers" / "hf_generate.py")
        subprocess.run([options.peer_python, writer, "--write", name, json.dumps(MODEL)], check=True, stdout=sys.stderr)
        settings = (options.tokens, options.rounds, options.peer_python)
        results = {batch: run(directory, batch, *settings) for batch in options.batches}
    facts = {"model": MODEL, "prompt": PROMPT, "tokens": options.tokens, "rounds": options.rounds}
    print(json.dumps(facts | {"cores": len(os.sched_getaffinity(0)), "batches": results}, indent=2))


if __name__ == "__main__":
    main()
