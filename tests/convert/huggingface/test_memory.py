"""An import reads each tensor once, and needs little memory beyond the parameters."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

import paxcli as pax
from paxcli.convert.huggingface import files
from tests.convert.huggingface.directories import SIZES, tensors_of, write_directory

V, D, F, L = 32_000, 1024, 2816, 6
# Prints the most anonymous memory before and during the import: the pages of the mapped files are the system's to drop.
MEASURE = """
import json, re, sys, threading, time
import paxcli as pax
from paxcli.convert import formats
def now():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before, most, done = now(), [0], threading.Event()
def watch():
    while not done.wait(0.005):
        most.append(max(most[-1], now()))
thread = threading.Thread(target=watch)
thread.start()
imported = pax.import_weights(sys.argv[1], sys.argv[2])
done.set()
print(json.dumps({"before": before, "most": most[-1], "parameters": imported.parameters}))
"""


def test_each_tensor_is_read_once(tmp_path: pathlib.Path, monkeypatch):
    read = collections.Counter()
    get = files.Safetensors.__getitem__

    def count(self: files.Safetensors, name: str) -> np.ndarray:
        read[name] += 1
        return get(self, name)

    monkeypatch.setattr(files.Safetensors, "__getitem__", count)
    pax.import_weights(write_directory(tmp_path / "hf", "mixtral"), tmp_path / "run")
    assert read == dict.fromkeys(tensors_of("mixtral"), 1)


@pytest.mark.slow
def test_an_import_needs_the_memory_of_the_parameters_and_of_a_tensor(tmp_path: pathlib.Path):
    """A Llama of 140 million parameters in shards: the limit for its memory does not grow with its layers."""
    source = tmp_path / "hf"
    source.mkdir()
    sizes = {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": 8,
    }
    config = SIZES | sizes | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    layer = {f"self_attn.{x}_proj.weight": (D, D) for x in "qkvo"}
    layer |= {"mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F)}
    layer |= {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    shards = [{f"model.layers.{i}.{name}": shape for name, shape in layer.items()} for i in range(L)]
    shards.append({"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D), "model.norm.weight": (D,)})
    index, parameters = {}, 0
    random = np.random.default_rng(0)
    for number, shapes in enumerate(shards):
        tensors = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        save_file(tensors, source / f"{number}.safetensors")
        index |= dict.fromkeys(tensors, f"{number}.safetensors")
        parameters += sum(x.size for x in tensors.values())
    (source / files.INDEX).write_text(json.dumps({"weight_map": index}))
    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"] == parameters
    largest = 4 * V * D
    assert 4 * parameters <= found["most"] - found["before"] <= 4 * parameters + 2 * largest + 2e8, found
