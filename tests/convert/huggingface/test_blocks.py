"""Blocks of new families, against transformers: gradients, decoding, unrolled layers, and parameter counts."""

from __future__ import annotations

import functools
import json
import math
import pathlib
from typing import Any

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paxcli as pax
from paxcli.checkpoint.reading import named_leaves, nest_by_name
from paxcli.config.assign import assign
from paxcli.convert.huggingface.config import FAMILIES, config_json, model_values
from paxcli.convert.huggingface.layouts import huggingface_layout, saved_names
from paxcli.convert.layout import from_pax
from paxcli.inputs.base_input import language_spec
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from tests.convert.filling import to_pax
from tests.convert.huggingface.directories import CONFIGS, arrays_of, tensors_of, write_directory

LOGITS = dict(atol=1e-4, rtol=0)


def config_of(found: dict[str, Any]) -> fdl.Config[LanguageModel]:
    """The model of a `config.json`."""
    config = pax.load(FAMILIES[found["model_type"]].recipe).config
    for path, value in model_values(found).items():
        assign(config, f"task.model.{path}", value)
    return config.task.model


def shapes_of(config: fdl.Config[LanguageModel]) -> dict[str, jax.ShapeDtypeStruct]:
    batch = NestedMap(language_spec(1, 4))
    return named_leaves(nn.meta.unbox(jax.eval_shape(fdl.build(config).init, jax.random.key(0), batch))["params"])


@functools.cache
def case(family: str, scan: bool = True) -> tuple[LanguageModel, dict, jax.Array]:
    """A model, transformers' parameters in it, and the ids."""
    config = config_of(CONFIGS[family])
    config.stack.scan = scan
    layout = huggingface_layout(CONFIGS[family]["model_type"], config, shapes_of(config))
    params = to_pax(layout, tensors_of(family))
    for name, x in from_pax(layout, params):
        np.testing.assert_array_equal(x, tensors_of(family)[name])
    params = jax.tree.map(jnp.asarray, nest_by_name(params))
    return fdl.build(config), params, jnp.asarray(arrays_of(family)["in/ids"], jnp.int32)


def logits_of(model: LanguageModel, params: dict, ids: jax.Array, cache: Any = None, start: int = 0):
    positions = jnp.broadcast_to(start + jnp.arange(ids.shape[1]), ids.shape)
    return model.apply({"params": params}, ids, jnp.ones_like(ids), positions, cache, method="extend")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "llama4_text_alternating"]
    + [pytest.param(name, marks=SLOW) for name in ("deepseek_v2", "qwen2_moe", "gpt_oss", "llama4_text", "gpt_neox")],
)
def test_the_gradient_is_that_of_transformers(family: str):
    model, params, ids = case(family)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(logits_of(model, p, ids)[0]))))(params)
    expected = arrays_of(family)["out/table_gradient"]
    largest = np.abs(expected).max()  # the sum over all logits, whose rounding adds up
    assert largest > 1
    # PyTorch has none for id 0, which the configurations call padding.
    np.testing.assert_allclose(gradient["embedding"]["table"][1:] / largest, expected[1:] / largest, **LOGITS)
    for name, x in named_leaves(gradient).items():
        assert np.abs(x).max() > 0, name


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "llama4_text"]
    + [
        pytest.param(name, marks=SLOW)
        for name in ("olmo3", "gpt_oss", "llama4_text_alternating", "gpt_neox", "starcoder2")
    ],
)
def test_decoding_is_the_full_pass(family: str):
    model, params, ids = case(family)
    extend = jax.jit(lambda ids, cache, start: logits_of(model, params, ids, cache, start))
    prompt, cache, found = 7, model.init_cache(*ids.shape), []
    for start, end in ((0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))):
        y, cache = extend(ids[:, start:end], cache, start)
        found.append(y)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), arrays_of(family)["out/logits"], **LOGITS)


def logits_with(**keys: Any) -> np.ndarray:
    """Of Llama 4, with other keys in its config.json."""
    _, params, ids = case("llama4_text")
    model = fdl.build(config_of(CONFIGS["llama4_text"] | {"layer_types": None} | keys))
    return np.asarray(jax.jit(lambda p: logits_of(model, p, ids)[0])(params))


@pytest.mark.parametrize("normalized", [True, False])
def test_norms_after_rope_cancel_the_factor_of_yarn(normalized: bool):
    """Llama 4 of transformers normalizes queries and keys that are rotated; pax does that before."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0}
    one, three = (
        logits_with(rope_parameters=yarn | {"attention_factor": factor}, use_qk_norm=normalized)
        for factor in (1.0, 3.0)
    )
    assert np.allclose(one, three, **LOGITS) == normalized


def test_llama_4_without_chunks_attends_to_all_positions():
    """As with a chunk of all positions: layers with RoPE keep their norms of queries and keys."""
    every, chunked = logits_with(attention_chunk_size=64), logits_with()
    np.testing.assert_allclose(logits_with(attention_chunk_size=None), every, **LOGITS)
    assert np.abs(every - chunked).max() > 1e-2


def test_a_latent_cache_holds_the_latent_and_one_rotated_key():
    model, *_ = case("deepseek_v3")
    assert model.cache_bytes(2, 20) == 3 * 2 * 20 * (16 + 4) * 4  # layers, rows, positions, features, bytes


@SLOW
def test_unrolled_layers_compute_the_same():
    model, params, ids = case("deepseek_v3", scan=False)
    assert {"first", "layers_0", "layers_1"} == params["stack"].keys()
    found = jax.jit(lambda p: logits_of(model, p, ids)[0])(params)
    np.testing.assert_allclose(found, arrays_of("deepseek_v3")["out/logits"], **LOGITS)


def test_layers_for_multi_token_prediction_are_not_read():
    names = ["model.layers.2.mlp.gate.weight", "model.layers.3.eh_proj.weight", "model.norm.weight"]
    assert list(saved_names(names, "deepseek_v3", False, 3)) == [names[0], names[2]]


V3 = dict(vocab_size=129_280, hidden_size=7168, intermediate_size=18_432, moe_intermediate_size=2048)
V3 |= dict(num_hidden_layers=61, num_attention_heads=128, n_routed_experts=256, first_k_dense_replace=3)
V3 |= dict(n_shared_experts=1, q_lora_rank=1536)
LITE = dict(vocab_size=102_400, hidden_size=2048, intermediate_size=10_944, moe_intermediate_size=1408)
LITE |= dict(num_hidden_layers=27, num_attention_heads=16, n_routed_experts=64, first_k_dense_replace=1)
LITE |= dict(n_shared_experts=2, q_lora_rank=None, num_experts_per_tok=6)
KIMI = V3 | dict(vocab_size=163_840, num_attention_heads=64, n_routed_experts=384, first_k_dense_replace=1)
KIMI |= dict(n_group=1, topk_group=1)


def deepseek_parameters(c: dict[str, Any], bias: bool) -> int:
    """By the published sizes: R = 512, rotated features 64, others 128, values 128."""
    d, n, layers, dense = c["hidden_size"], c["num_attention_heads"], c["num_hidden_layers"], c["first_k_dense_replace"]
    q = c["q_lora_rank"]
    query = d * n * 192 if q is None else d * q + q + q * n * 192
    attention = query + d * (512 + 64) + 512 + 512 * n * (128 + 128) + n * 128 * d
    expert, experts = 3 * d * c["moe_intermediate_size"], c["n_routed_experts"]
    sparse = d * experts + bias * experts + (experts + c["n_shared_experts"]) * expert
    feed_forward = dense * 3 * d * c["intermediate_size"] + (layers - dense) * sparse
    return 2 * c["vocab_size"] * d + d + layers * (attention + 2 * d) + feed_forward


@pytest.mark.parametrize(
    ("kind", "sizes", "published"),
    [("deepseek_v3", V3, 671.03e9), ("deepseek_v2", LITE, 15.706e9), ("kimi_k2", KIMI, 1026.4e9)],
)
def test_models_have_as_many_parameters_as_published(kind: str, sizes: dict[str, Any], published: float):
    found = {"model_type": kind, "max_position_embeddings": 4096, **sizes}
    config = config_of(found)
    count = sum(math.prod(x.shape) for x in shapes_of(config).values())
    assert count == deepseek_parameters(sizes, kind != "deepseek_v2") == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(
    ("experts", "step", "published"), [pytest.param(16, 1, 107.77e9, marks=SLOW), (128, 2, 400.71e9)]
)
def test_llama_4_has_as_many_parameters_as_published(experts: int, step: int, published: float):
    d, f, layers, vocabulary = 5120, 8192, 48, 202_048
    found = {"model_type": "llama4_text", "vocab_size": vocabulary, "hidden_size": d, "intermediate_size": f}
    found |= {"intermediate_size_mlp": 2 * f, "num_hidden_layers": layers, "num_attention_heads": 40}
    found |= {"num_key_value_heads": 8, "max_position_embeddings": 4096, "num_local_experts": experts}
    config = config_of(found | {"interleave_moe_layer_step": step})
    assert [block.attention.rotary is None for block in config.stack.turns] == [False, False, False, True]
    count = sum(math.prod(x.shape) for x in shapes_of(config).values())
    attention = d * 128 * 2 * (40 + 8)
    sparse = d * experts + (experts + 1) * 3 * d * f
    feed_forward = layers // step * sparse + (layers - layers // step) * 3 * d * 2 * f
    assert count == 2 * vocabulary * d + d + layers * (attention + 2 * d) + feed_forward
    assert count == pytest.approx(published, rel=1e-3)


def test_a_gpt_oss_of_20b_has_as_many_parameters_as_published():
    found = {"model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880}
    found |= {"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32}
    found |= {"max_position_embeddings": 131_072}
    count = sum(math.prod(x.shape) for x in shapes_of(config_of(found)).values())
    d, expert = 2880, 3 * 2880 * 2880 + 3 * 2880
    attention = d * (64 + 2 * 8) * 64 + (64 + 2 * 8) * 64 + 64 * 64 * d + d + 64
    assert count == 2 * 201_088 * d + d + 24 * (attention + 2 * d + d * 32 + 32 + 32 * expert) == 20_914_757_184


@pytest.mark.parametrize("count", [0, None])
def test_a_mixture_without_shared_experts(count: int | None, tmp_path: pathlib.Path):
    """As transformers writes it, with tensors without elements; DeepSeek's own code writes null, and no tensors."""
    source = write_directory(tmp_path / "hf", "deepseek_v3")
    content, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    shared = {name: x[:, :0] if "down" in name else x[:0] for name, x in tensors.items() if "shared_experts" in name}
    others = {name: x for name, x in tensors.items() if name not in shared}
    (source / "config.json").write_text(json.dumps(content | {"n_shared_experts": count}))
    save_file(others | (shared if count == 0 else {}), source / "model.safetensors", metadata={"format": "pt"})
    done = pax.import_weights(source, tmp_path / "run")
    assert (done.parameters, len(shared)) == (sum(x.size for x in others.values()), 6)
    config = pax.Run(tmp_path / "run").config
    assert config.task.model.stack.turns[0].feed_forward.shared_dims is None
    assert config_json(config, None, "float32")["n_shared_experts"] == 0
