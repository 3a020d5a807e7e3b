"""Greedy decoding: pax against Hugging Face `generate` with its cache, and litgpt, on the same weights, as JSON.

    python benchmarks/decode.py --peer-python PYTHON [--litgpt-python PYTHON] [--model small] [--batches 1 8 32]
        [--tokens 64] [--rounds 5] [--compiled]

A random Llama is written by transformers and imported by the others: `small` in float32, or `1b` (TinyLlama's sizes) in
bfloat16, for a GPU. `--compiled` adds `generate` with a static cache and a compiled step. Each is a process of its own
that keeps its compiled loop; in each round, each generates one batch after prompts of 32 tokens while the others wait.
No end token: all generate all tokens. `equal_ids` is the share of rows that have the same ids in all. On a busy
machine, compare CPU seconds on one core: start it with `taskset -c 0`. PYTHON has torch 2.13.0, transformers and
safetensors; that of litgpt, which needs versions of its own, has litgpt.
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

MODELS = {
    "small": dict(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        dtype="float32",
    ),
    "1b": dict(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        dtype="bfloat16",
    ),
}
PROMPT = 32


def run(directory: pathlib.Path, batch: int, tokens: int, rounds: int, pythons: dict[str, str]) -> dict:
    """All at one batch size. `pythons`: that of each peer."""
    peers = {}
    for name, python in {"pax": sys.executable, **pythons}.items():
        # Of a GPU, which all share while they wait, half.
        env = HUGE_PAGES | {"XLA_CLIENT_MEM_FRACTION": "0.5"} if name == "pax" else {}
        task = dict(directory=str(directory), batch=batch, tokens=tokens, prompt=PROMPT, ids=f"{name}-{batch}.json")
        task["compile"] = name == "hf_compiled"
        script = HERE / "peers" / f"{name.removesuffix('_compiled')}_generate.py"
        peers[name] = Peer(name, [python, str(script)], task, env)
    for _ in range(rounds):
        for peer in peers.values():
            time.sleep(1)  # threads of the previous process spin for a while
            peer.steps(1)
    ids = [json.loads((directory / f"{name}-{batch}.json").read_text()) for name in peers]
    ours, ratios = peers["pax"], {}
    for name in pythons:
        ratios[f"pax_over_{name}"] = ratio(peers[name].seconds, ours.seconds, 1)
        ratios[f"pax_over_{name}_cpu"] = ratio(peers[name].cpu_seconds, ours.cpu_seconds, 1)
    return {
        "tokens_per_second": {name: batch * tokens / statistics.median(peer.seconds) for name, peer in peers.items()},
        **ratios,
        "equal_ids": statistics.mean(len(set(map(tuple, rows))) == 1 for rows in zip(*ids, strict=True)),
    } | {name: peer.close() for name, peer in peers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--litgpt-python")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        writer = str(HERE / "peers" / "hf_generate.py")
        command = [options.peer_python, writer, "--write", name, json.dumps(MODELS[options.model])]
        subprocess.run(command, check=True, stdout=sys.stderr)
        pythons = {"hf": options.peer_python}
        if options.compiled:
            pythons["hf_compiled"] = options.peer_python
        if options.litgpt_python:
            pythons["litgpt"] = options.litgpt_python
        settings = (options.tokens, options.rounds, pythons)
        results = {batch: run(directory, batch, *settings) for batch in options.batches}
    facts = {"model": MODELS[options.model], "prompt": PROMPT, "tokens": options.tokens, "rounds": options.rounds}
    print(json.dumps(facts | {"cores": len(os.sched_getaffinity(0)), "batches": results}, indent=2))


if __name__ == "__main__":
    main()
