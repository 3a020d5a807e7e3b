"""The recipes' GPT-3 family is GPT-2, as HF `transformers` computes it (tests/data/hf_gpt2.py)."""

from __future__ import annotations

import pathlib

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_recipes.gpt3 import c4_gpt3_l16
from paxcli.nested_map import NestedMap

DATA = pathlib.Path(__file__).parents[1] / "data" / "hf_gpt2.npz"


def _params(hf: dict[str, np.ndarray], num_layers: int, num_heads: int) -> dict:
    """HF's weights in our tree: query, key and value apart, heads apart, a norm's scale as what is added to 1."""

    def stacked(name: str) -> np.ndarray:
        return np.stack([hf[f"h.{i}.{name}"] for i in range(num_layers)])

    def norm(name: str) -> dict:
        return {"scale": stacked(f"{name}.weight") - 1, "bias": stacked(f"{name}.bias")}

    qkv = stacked("attn.c_attn.weight"), stacked("attn.c_attn.bias")
    dims = qkv[0].shape[1]
    attention = {}
    for name, w, bias in zip(("query", "key", "value"), *(np.split(x, 3, axis=-1) for x in qkv), strict=True):
        attention[name] = w.reshape(num_layers, dims, num_heads, -1)
        attention[f"{name}_bias"] = bias.reshape(num_layers, num_heads, -1)
    attention["post"] = stacked("attn.c_proj.weight").reshape(num_layers, num_heads, -1, dims)
    attention["post_bias"] = stacked("attn.c_proj.bias")
    feed_forward = {
        "w_in": stacked("mlp.c_fc.weight"),
        "b_in": stacked("mlp.c_fc.bias"),
        "w_out": stacked("mlp.c_proj.weight").swapaxes(1, 2),
        "b_out": stacked("mlp.c_proj.bias"),
    }
    layers = {"attention_norm": norm("ln_1"), "attention": attention}
    layers |= {"feed_forward_norm": norm("ln_2"), "feed_forward": feed_forward}
    return {
        "embedding": {"table": hf["wte.weight"]},
        "position": {"table": hf["wpe.weight"]},
        "stack": {"layers": layers},
        "final_norm": {"scale": hf["ln_f.weight"] - 1, "bias": hf["ln_f.bias"]},
    }


@pytest.mark.parametrize("documents", [1, 3])
def test_logits_are_those_of_transformers(documents):
    """Also of a row of several documents, which GPT-2 reads as one."""
    with np.load(DATA) as file:
        arrays = dict(file)
    hf = {name.removeprefix("param/"): x for name, x in arrays.items() if name.startswith("param/")}
    config = c4_gpt3_l16().task.model
    config.fprop_dtype = "float32"
    config.num_layers, config.num_heads, config.dims_per_head = 3, 4, 8
    config.vocab_size, config.model_dims, config.hidden_dims = 61, 32, 80
    config.max_seq_len = config.position.num_positions = 24
    config.stack.block.attention.segmented = documents == 1
    model = fdl.build(config)
    ids = jnp.asarray(arrays["in/ids"], jnp.int32)
    length = -(-ids.shape[1] // documents)
    document, position = jnp.divmod(jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), length)
    batch = NestedMap(ids=ids, segment_ids=document + 1, segment_pos=position)
    variables = {"params": jax.tree.map(jnp.asarray, _params(hf, num_layers=3, num_heads=4))}
    found = jax.jit(lambda: model.apply(variables, batch, method="compute_predictions"))()
    np.testing.assert_allclose(found.logits, arrays["out/logits"], atol=1e-4, rtol=0)
    assert np.abs(arrays["out/logits"]).max() > 1
