"""Throughput on one GPU: pax, pax in FP8, and its peers, interleaved in one run, as JSON.

    python benchmarks/gpu.py --out gpu.json [--recipes gpt2-124m llama-1b] [--variants pax torch maxtext] [--rounds 3]
        [--steps 50] [--seconds 540]

Peers: a tuned PyTorch loop (`torch.compile`, cuDNN's attention, autocast, fused AdamW), the `Trainer` of Hugging Face,
torchtitan and MaxText, the last two for Llama only. All have the shapes and batch of the recipe; random tokens, mixed
precision (bfloat16 with float32 master weights), AdamW, clip 1.0, and activation checkpointing where the activations do
not fit otherwise. Each measurement is a process of its own that has the GPU alone: 5 steps to warm up, then twice
`--steps` steps that are dispatched without waiting in between. Each round measures every variant, and ratios are within
a round. After `--seconds` no process is started, and one that runs is stopped; the file is written after each
measurement. `--overlays cpu` tries it without a GPU.
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
from typing import Any

from train_step import HERE, Peer

os.environ["JAX_PLATFORMS"] = "cpu"  # keeps this process off the GPU, which its children use

PEERS = {
    "torch": "torch_loop.py",
    "hf_trainer": "hf_trainer.py",
    "torchtitan": "torchtitan_step.py",
    "maxtext": "maxtext_step.py",
}
VARIANTS = ("pax", "pax_fp8", *PEERS)
WARM_UP = 5
RECOMPUTED = ("llama2-7b", "llama3-8b")  # PyTorch's state and gradients leave 30 of 141 GB for activations
VERSIONS = """
import importlib.metadata as m, json, re
kept = re.compile("jax|flax|optax|torch$|torchtitan|maxtext|transformers|triton|cudnn|cublas")
names = {d.name for d in m.distributions() if d.name and kept.search(d.name.lower())}
print(json.dumps({name: m.version(name) for name in sorted(names)}))
"""


def task_of(recipe: str, overlays: list[str], sets: list[str], platform: str, fields: dict) -> dict:
    """The settings of a recipe for its peers, and the FLOPs of its step by both conventions."""
    import fiddle as fdl

    from paxcli.config.resolve import resolve
    from paxcli.inputs.base_input import language_spec
    from paxcli.training.experiment import global_batch_size

    config = resolve(recipe, overlays, sets).config
    model, batch = config.task.model, global_batch_size(config, 1)
    sizes = ("num_layers", "model_dims", "hidden_dims", "num_heads", "num_kv_heads", "vocab_size")
    flops = fdl.build(model).step_flops(language_spec(batch, model.max_seq_len))
    return {name: getattr(model, name) for name in sizes} | {
        "kind": "gpt2" if model.head is None else "llama",
        "seq_len": model.max_seq_len,
        "batch": batch,
        "dtype": model.fprop_dtype,
        "recompute": recipe in RECOMPUTED,
        "platform": platform,
        "recipe": recipe,
        "overlays": overlays,
        "sets": sets,
        "flops_causal": flops.total,
        "flops_full": flops.total + flops.attention,
        **fields,
    }


def start_peer(variant: str, task: dict, peer_python: str, cache: str, seconds: float) -> Peer:
    """Starts the process of one variant, which is stopped after some seconds."""
    limit, peers = ["timeout", str(int(seconds) + 1)], HERE / "peers"
    env = {"JAX_PLATFORMS": task["platform"], "JAX_COMPILATION_CACHE_DIR": cache}
    env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.92"
    if variant.startswith("pax"):
        sets = [*task["sets"], "precision=fp8"] if variant == "pax_fp8" else task["sets"]
        return Peer(variant, [*limit, sys.executable, str(peers / "pax_step.py")], task | {"sets": sets}, env)
    task = task | {"compile": variant != "hf_trainer"}
    return Peer(variant, [*limit, peer_python, str(peers / PEERS[variant])], task, env)


def measure(variant: str, task: dict, steps: int, peer_python: str, cache: str, seconds: float) -> dict:
    """Seconds of a step, and from process start to the first step; or the error."""
    try:
        peer = start_peer(variant, task, peer_python, cache, seconds)
        peer.ask(-WARM_UP)
        both = [peer.ask(-steps)["seconds"][0] for _ in range(2)]
        last = peer.ask(0)
        peer.process.wait()
    except RuntimeError as error:
        return {"failed": str(error)}
    return {
        "step_seconds": statistics.mean(both),
        "both_seconds": both,
        "first_step_seconds": peer.first["first_step_seconds"],
        "gpu_memory_bytes": last["gpu_memory_bytes"],
    }


def summarize(task: dict, rounds: list[dict[str, dict]], peak: float | None) -> dict:
    """Medians of each variant, and of the rounds' ratios."""
    tokens, result = task["batch"] * task["seq_len"], {"task": task, "rounds": rounds}
    for variant in VARIANTS:
        times = [found[variant]["step_seconds"] for found in rounds if "step_seconds" in found.get(variant, {})]
        if times:
            seconds = statistics.median(times)
            values: dict[str, Any] = {"step_seconds": seconds, "tokens_per_second": tokens / seconds}
            for convention in ("causal", "full"):
                values[f"mfu_{convention}"] = task[f"flops_{convention}"] / seconds / peak if peak else None
            result[variant] = values
    for over, under in (*(("pax", peer) for peer in PEERS), ("pax_fp8", "pax")):
        ratios = [
            found[under]["step_seconds"] / found[over]["step_seconds"]
            for found in rounds
            if all("step_seconds" in found.get(name, {}) for name in (over, under))
        ]
        result[f"{over}_over_{under}"] = statistics.median(ratios) if ratios else None
    return result


def machine(peer_python: str) -> dict:
    """The GPU, and the versions of what runs on it."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    except (OSError, subprocess.CalledProcessError):
        gpu = None
    pythons = {"ours": sys.executable, "theirs": peer_python}
    versions = {
        name: json.loads(subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout)
        for name, python in pythons.items()
    }
    return {"gpu": gpu, "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON file")
    parser.add_argument("--recipes", nargs="+", default=["gpt2-124m", "llama-1b"])
    parser.add_argument("--overlays", nargs="+", default=["gpu-1"])
    parser.add_argument("--sets", nargs="*", default=[], help="assignments for every recipe")
    parser.add_argument("--task", type=json.loads, default={}, help="fields for the peers (their docstrings), as JSON")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=540, help="no process runs after this time")
    parser.add_argument("--peer-python", default=sys.executable, help="where torch and transformers are installed")
    options = parser.parse_args()

    from paxcli.metrics.peaks import peak_flops

    ends = time.monotonic() + options.seconds
    facts = machine(options.peer_python)
    peak = peak_flops(facts["gpu"][0]) if facts["gpu"] else None
    platform = "cuda" if facts["gpu"] else "cpu"
    settings = (options.overlays, options.sets, platform, options.task)
    tasks = {name: task_of(name, *settings) for name in options.recipes}
    rounds: dict[str, list[dict]] = {name: [] for name in tasks}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(options.rounds):
            for name, task in tasks.items():
                rounds[name].append({})
                for variant in options.variants:
                    if (left := ends - time.monotonic()) > 0:
                        found = measure(variant, task, options.steps, options.peer_python, cache, left)
                        rounds[name][-1][variant] = found
                    results = {name: summarize(task, rounds[name], peak) for name, task in tasks.items()}
                    options.out.write_text(json.dumps(facts | {"recipes": results}, indent=2) + "\n")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
