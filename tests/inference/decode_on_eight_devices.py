"""Run on eight devices by test_decode.py: text decoded on meshes equals that of one device."""

from __future__ import annotations

import os

from tests.devices import cpu_devices

os.environ.update(cpu_devices(8))

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from paxcli.inference.decode import PromptDecoder
from paxcli.inference.prompts import Prompt
from paxcli.inputs.tokenizers import ByteTokenizer
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.rules import DEFAULT_RULES
from paxcli.mesh.sharding import param_shardings, use_mesh
from paxcli.models.beam_search import BeamSearch
from paxcli.models.language_model import LanguageModel
from paxcli.models.sampling import Sampling
from paxcli.nested_map import NestedMap
from tests.tolerances import FLOAT32

MODEL = LanguageModel(vocab_size=259, max_seq_len=64, model_dims=32, hidden_dims=64, num_layers=2, num_heads=4)
PROMPTS = [Prompt("ab" * (1 + i % 4), max_tokens=4 + 3 * i) for i in range(5)]
SETTINGS = [
    Sampling(batch_size=4),
    Sampling(batch_size=4, temperature=1.0, top_p=0.9),
    BeamSearch(beam_size=2, batch_size=4),
]

ones = jnp.ones((1, 4), jnp.int32)
batch = NestedMap(ids=ones, labels=ones, weights=jnp.ones((1, 4)), segment_ids=ones, segment_pos=ones)
boxed = MODEL.init(jax.random.key(0), batch)["params"]
params = jax.tree.map(lambda p: 3 * p, nn.meta.unbox(boxed))


def outputs(params, settings):
    return PromptDecoder(MODEL, params, ByteTokenizer(), settings, 0).continue_prompts(PROMPTS)


expected = [outputs(params, settings) for settings in SETTINGS]
for shape in ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}):
    mesh = build_mesh(Mesh(shape))
    with use_mesh(mesh):
        sharded = jax.device_put(params, param_shardings(mesh, DEFAULT_RULES, boxed))
        for settings, one_device in zip(SETTINGS, expected, strict=True):
            for ours, theirs in zip(outputs(sharded, settings), one_device, strict=True):
                assert ours["ids"] == theirs["ids"], (shape, settings)
                np.testing.assert_allclose(ours["log_probs"], theirs["log_probs"], **FLOAT32)
