"""Memory, bytes read and speed of `pax import` of a large model, as JSON.

    python benchmarks/import_size.py [--layers 32] [--directory DIR]

Writes a Llama of random bfloat16 weights in shards of one layer, 7B-shaped by default, one tensor in memory
at a time, and imports it in a process of its own. The parameters of the state are float32: 32 layers need 27 GB of
memory, 13.5 GB of disk for the shards and 81 GB for the checkpoint, which includes Adam's moments, all zeros. `--sgd`
imports into a recipe without moments: 27 GB.

`anonymous_over_state_bytes` is the process's peak anonymous memory less the bytes of the parameters. Pages of the
mapped shards are the system's to drop, and count only in `peak_resident_bytes`. `storage_read_over_shards` is what the
process read from the disk over the size of the shards: about 1 where each byte is read once (Python and JAX are read,
too), less where the system still had some in its page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

POLL_SECONDS = 0.02


def shapes_of(dims: int, hidden: int, vocab: int, layers: int) -> list[dict[str, tuple[int, ...]]]:
    """The tensors of each shard."""
    layer = {f"self_attn.{name}_proj.weight": (dims, dims) for name in "qkvo"}
    layer |= {f"mlp.{name}_proj.weight": (hidden, dims) for name in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": (dims, hidden)}
    layer |= {"input_layernorm.weight": (dims,), "post_attention_layernorm.weight": (dims,)}
    shards = [{f"model.layers.{i}.{name}": shape for name, shape in layer.items()} for i in range(layers)]
    ends = {"model.embed_tokens.weight": (vocab, dims), "lm_head.weight": (vocab, dims), "model.norm.weight": (dims,)}
    return [*shards, ends]


def write_shard(path: pathlib.Path, shapes: dict[str, tuple[int, ...]], random: np.random.Generator) -> int:
    """Writes one safetensors file, a tensor at a time; returns its size."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            block = (random.standard_normal(shape[-1], np.float32) * 0.02).astype(ml_dtypes.bfloat16)
            rows = np.lib.stride_tricks.sliding_window_view(np.concatenate([block, block]), shape[-1])
            file.write(rows[np.arange(shape[0]) % shape[-1]].tobytes() if len(shape) > 1 else block.tobytes())
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path.stat().st_size


def write_model(folder: pathlib.Path, options: argparse.Namespace) -> tuple[int, int]:
    """Writes the directory; returns the bytes of its shards and the number of parameters."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": options.vocab,
        "hidden_size": options.dims,
        "intermediate_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.dims // 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random, index, total, parameters = np.random.default_rng(0), {}, 0, 0
    for number, shapes in enumerate(shapes_of(options.dims, options.hidden, options.vocab, options.layers)):
        file = f"model-{number:05}.safetensors"
        total += write_shard(folder / file, shapes, random)
        index |= dict.fromkeys(shapes, file)
        parameters += sum(int(np.prod(shape)) for shape in shapes.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return total, parameters


def watch(command: list[str]) -> tuple[dict, dict]:
    """Runs a command; returns its JSON, and its peak memory, seconds and bytes read from storage."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    found: dict[str, int] = {}
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        try:
            proc = pathlib.Path("/proc") / str(process.pid)
            status, read = (proc / "status").read_text(), (proc / "io").read_text()
        except OSError:
            break
        for key, pattern in (("anonymous", r"RssAnon:\s+(\d+)"), ("resident", r"VmHWM:\s+(\d+)")):
            if match := re.search(pattern, status):
                found[key] = max(found.get(key, 0), int(match[1]) * 1024)
        if match := re.search(r"^read_bytes: (\d+)", read, re.MULTILINE):
            found["storage"] = max(found.get("storage", 0), int(match[1]))
    text = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return json.loads(text), found | {"seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("layers", 32), ("dims", 4096), ("hidden", 11_008), ("vocab", 32_000)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--directory", help="Where to work. Default: the system's directory for temporary files.")
    parser.add_argument("--sgd", action="store_true", help="Import into a recipe without moments.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        work = pathlib.Path(name)
        began = time.perf_counter()
        shards, parameters = write_model(work / "hf", options)
        facts = {"parameters": parameters, "shard_bytes": shards, "write_seconds": time.perf_counter() - began}
        command = [sys.executable, "-m", "paxcli", "import", str(work / "hf"), "--out", str(work / "run"), "--json"]
        if options.sgd:
            dry, _ = watch([*command, "--dry-run"])
            (work / "sgd.yaml").write_text(dry["recipe"] + "  task.train.learner.optimizer: Sgd\n")
            command += ["--recipe", str(work / "sgd.yaml")]
        done, used = watch(command)
        assert done["parameters"] == parameters
        checkpoint = sum(path.stat().st_size for path in (work / "run").rglob("*") if path.is_file())
        shutil.rmtree(work / "run")
    facts |= {
        "state_bytes": 4 * parameters,
        "anonymous_over_state_bytes": used["anonymous"] - 4 * parameters,
        "peak_anonymous_bytes": used["anonymous"],
        "peak_resident_bytes": used["resident"],
        "storage_read_over_shards": used["storage"] / shards,
        "checkpoint_bytes": checkpoint,
        "seconds": used["seconds"],
        "import_seconds": done["seconds"],
        "shard_bytes_per_second": shards / done["seconds"],
    }
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
