"""Runs that were never imported: the config.json of their export, and what it leaves out."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file

import paxcli as pax
from paxcli.checkpoint.reading import named_leaves, read_manifest
from paxcli.config.assign import assign
from paxcli.convert.huggingface.config import FAMILIES, config_json, differing_fields, model_values
from paxcli.errors import ConfigError
from paxcli.training.session import state_shapes
from paxcli.training.start_from import write_run
from tests.convert.huggingface.directories import CONFIGS, write_directory

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def written_for(family: str, **keys: Any) -> dict[str, Any]:
    """The config.json of a recipe of this model, which has the same fields."""
    found = {key: x for key, x in CONFIGS[family].items() if keys.get(key, x) is not ...} | keys
    config = pax.load(FAMILIES[found["model_type"]].recipe).config
    for path, value in model_values(found).items():
        assign(config, f"task.model.{path}", value)
    written = config_json(config, None, "float32")
    assert written["model_type"] == found["model_type"] and not differing_fields(config, written)
    return written


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo3"])
def test_the_first_layer_may_have_full_attention(family: str):
    written = written_for(family, num_hidden_layers=4, layer_types=[GLOBAL, LOCAL, LOCAL, GLOBAL], sliding_window=5)
    assert written["sliding_window"] == 5 and written["layer_types"] == [GLOBAL, LOCAL, LOCAL, GLOBAL]


def test_the_first_layer_of_llama_4_may_have_no_rope():
    count = CONFIGS["llama4_text"]["num_hidden_layers"]
    turned = {"no_rope_layers": ([0, 1] * count)[:count], "layer_types": None}
    chunk = CONFIGS["llama4_text"]["attention_chunk_size"]
    assert written_for("llama4_text", **turned)["attention_chunk_size"] == chunk


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_full_attention_alone_has_a_window_that_is_not_used(family: str):
    """transformers makes the mask of sliding windows for these families always, and fails if there is none."""
    count = CONFIGS[family]["num_hidden_layers"]
    written = written_for(family, layer_types=[GLOBAL] * count)
    assert written["sliding_window"] == FAMILIES[family].defaults["sliding_window"]


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "yarn", "factor": 4.0}])
def test_both_kinds_of_olmo_3_layers_have_the_theta_of_the_recipe(scaling: dict[str, Any]):
    """transformers 5 gives `rope_theta` to full attention only: sliding windows had 500,000 instead."""
    more = {"original_max_position_embeddings": 16} if scaling else {}
    parameters = {LOCAL: {"rope_theta": 300.0}, GLOBAL: {"rope_theta": 300.0, **scaling, **more}}
    found = written_for("olmo3", rope_parameters=parameters)["rope_parameters"]
    assert found[LOCAL] == {"rope_type": "default", "rope_theta": 300.0}
    assert found[GLOBAL].items() >= ({"rope_type": "default"} | parameters[GLOBAL]).items()
    assert "rope_local_base_freq" not in written_for("olmo3") and "rope_local_base_freq" in written_for("gemma3_text")


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma3_text", {"num_hidden_layers": 2, "layer_types": [GLOBAL, LOCAL]}),  # the last one has the local RoPE
        ("olmo3", {"rope_parameters": {LOCAL: {"rope_theta": 300.0}, GLOBAL: {"rope_theta": 500.0}}}),
        ("olmo3", {"num_hidden_layers": 1, "layer_types": [LOCAL]}),
        ("gemma2", {"num_hidden_layers": 1, "layer_types": [GLOBAL]}),
        ("gpt_oss", {"num_hidden_layers": 1, "layer_types": [GLOBAL]}),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    ],
)
def test_kinds_of_layers_have_their_own_rope_and_need_not_alternate(family: str, keys: dict[str, Any]):
    written = written_for(family, **keys)
    assert {LOCAL, GLOBAL} & {*written["layer_types"]}
    if "rope_theta" in keys.get("rope_parameters", {}):  # without the key, transformers scales by YaRN
        assert written["rope_parameters"] == keys["rope_parameters"] and written["rope_scaling"] is None


@pytest.mark.parametrize("window", [None, 7])
def test_partial_rope_is_that_of_phi_3(window: int | None):
    rope = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
    written = written_for("phi3", rope_parameters=rope, sliding_window=window)
    assert (written["partial_rotary_factor"], written["rope_theta"]) == (0.5, 300.0)


def test_gemma_3_without_rope_is_refused_by_its_fields():
    config = pax.load(FAMILIES["gemma3_text"].recipe).config
    for path, value in model_values(CONFIGS["gemma3_text"]).items():
        assign(config, f"task.model.{path}", value)
    for block in config.task.model.stack.turns:
        block.attention.rotary = None
    with pytest.raises(ConfigError, match="rotary is None, not 'Rotary'"):
        config_json(config, None, "float32")


@pytest.mark.parametrize("family", ["llama31", "mistral", "qwen3", "mixtral", "olmo2", "gemma", "phi3"])
@pytest.mark.parametrize(
    "keys",
    [
        {"layer_types": [LOCAL, GLOBAL], "sliding_window_pattern": 2},
        {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
        {"query_pre_attn_scalar": 2, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0},
        {"first_k_dense_replace": 1, "interleave_moe_layer_step": 2, "moe_layers": [0]},
    ],
)
def test_keys_of_other_families_are_not_read(family: str, keys: dict[str, Any]):
    """`transformers` ignores them: its logits are the same with and without."""
    if (family, *keys) == ("qwen3", "layer_types", "sliding_window_pattern"):
        keys = {"sliding_window_pattern": 2}
    assert model_values({**CONFIGS[family], **keys}) == model_values(CONFIGS[family])


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_all_layers_of_deepseek_may_be_dense(family: str):
    count = CONFIGS[family]["num_hidden_layers"]
    for first in (count, count + 2):
        found = {**CONFIGS[family], "first_k_dense_replace": first}
        values = model_values(found)
        assert values["stack"] == "Stack" and values["stack.block.feed_forward"] == "FeedForward"
        config = pax.load(FAMILIES[family].recipe).config
        for path, value in values.items():
            assign(config, f"task.model.{path}", value)
        params = named_leaves(state_shapes(config).params)
        assert params["stack.layers.feed_forward.w_in"].shape[0] == count
        written = config_json(config, None, "float32")  # of latent attention without a router, it is V2's
        assert written["first_k_dense_replace"] == count and not differing_fields(config, written)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: pathlib.Path):
    small = {"num_layers": 2, "model_dims": 16, "hidden_dims": 24, "num_heads": 4, "num_kv_heads": 2}
    small |= {"task.model.vocab_size": 32, "max_seq_len": 16, "mtp_num_layers": 1}
    recipe = pax.load("llama-1b", set=small)
    shapes, random = state_shapes(recipe.config), np.random.default_rng(0)
    params = {name: random.normal(size=x.shape).astype(np.float32) for name, x in named_leaves(shapes.params).items()}
    assert any(name.startswith("mtp_0.") for name in params)
    arrays = {f"params.{name}": x for name, x in params.items()}
    write_run(recipe.config, recipe.yaml(), tmp_path / "run", shapes, arrays)
    done = pax.export_weights(tmp_path / "run", tmp_path / "hf")
    assert done.parameters == sum(x.size for name, x in params.items() if not name.startswith("mtp_"))
    assert done.left_out == ["mtp_0"]
    assert len(load_file(tmp_path / "hf/model.safetensors")) == 9 * 2 + 3
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "llama"
    assert not pax.import_weights(tmp_path / "hf", tmp_path / "again", dry_run=True).tensors


@pytest.mark.parametrize("field", ["lora", "dpo"])
def test_a_recipe_with_adapters_or_dpo_imports_the_weights_alone(field: str, tmp_path: pathlib.Path):
    source = write_directory(tmp_path / "hf", "llama2")
    pax.import_weights(source, tmp_path / "plain")
    recipe = pax.load(f"{tmp_path}/plain", set={f"task.model.{field}": field.capitalize()})
    pax.import_weights(source, tmp_path / "run", recipe=recipe)
    assert pax.load(f"{tmp_path}/run").config.task.model == recipe.config.task.model
    saved = [read_manifest(epath.Path(tmp_path / name / "checkpoints" / "0")) for name in ("run", "plain")]
    found, expected = ({name: x for name, x in one.arrays.items() if name.startswith("params.")} for one in saved)
    assert found == expected
