"""MaxText's models by name: keys and parameters against the numbers of its model files."""

from __future__ import annotations

import datetime
import pathlib
import re

import pytest
import yaml

import paxcli as pax
from paxcli.config.assign import assign
from paxcli.convert.huggingface.config import config_json
from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.launch import Launch, Pair
from paxcli.convert.maxtext.launch_to_recipe import convert
from paxcli.convert.maxtext.sizes import num_parameters
from paxcli.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[3]
FILES = yaml.safe_load((ROOT / "tests/data/maxtext_models.yaml").read_text())
PAGE = ROOT / "docs/maxtext-models.md"


def of_model(name: str) -> Conversion:
    launch = Launch(1, pairs=[Pair("model_name", name, 1)])
    return convert(launch, name, date=datetime.date(2026, 8, 22))


# What MaxText's models have and pax lacks, as a part of the message.
REFUSED = {
    "deepseek-custom": "use_indexer=True, mhc_expansion_rate=4, engram_layers=[1, 4]",
    "deepseek3.2-671b": "DeepSeek Sparse Attention",
    "deepseek4-284b": "compressed attention",
    "deepseek4-tiny": "compressed attention",
    "gemma4-26b": "a second head size",
    "gemma4-31b": "a second head size",
    "gemma4-e2b": "embeddings of each layer",
    "gemma4-e4b": "embeddings of each layer",
    "qwen3-custom-30b-a3b": "experts in a latent",
    "qwen3-next-80b-a3b": "Gated DeltaNet",
    "qwen3.5-35b-a3b": "Gated DeltaNet",
    "qwen3.5-397b-a17b": "Gated DeltaNet",
}
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
CONVERTED = [name for name in FILES if name not in REFUSED]


def count(file: dict) -> int:
    """Parameters of a text decoder, by the shapes of its arrays."""

    def get(key: str, otherwise: object = 0) -> object:
        return file.get(key, otherwise)

    block = file["decoder_block"]
    d, n, k, h = (get(key, 128) for key in ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim"))
    projections = d * n * h + 2 * d * k * h + n * h * d
    if get("attention_type") == "mla":
        q, c, nope, rope, v = (file[f"{key}"] for key in LATENT)
        query = d * n * (nope + rope) if q == 0 else d * q + q + q * n * (nope + rope)
        projections = query + d * (c + rope) + c + c * n * (nope + v) + n * v * d
    biases = {"gpt3": (n + 2 * k) * h + d, "qwen2": (n + 2 * k) * h, "gpt_oss": (n + 2 * k) * h + d}.get(block, 0)
    matrices = len(file["mlp_activations"]) + 1
    layers = file["base_num_decoder_layers"] * (2 if block == "gemma2" else 1)
    dense = matrices * d * file["base_mlp_dim"]
    num_dense = layers
    sparse = 0
    if get("num_experts") > 1:
        every = get("interleave_moe_layer_step", 1)
        num_dense = get("first_num_dense_layers") if block == "deepseek" else layers - layers // every
        sparse = get("num_experts") * (matrices * d * file["base_moe_mlp_dim"] + d)
        sparse += (
            get("shared_experts") * matrices * d * file["base_moe_mlp_dim"] + get("routed_bias") * file["num_experts"]
        )
    if block == "gpt_oss":
        sparse += file["num_experts"] * (2 * file["base_moe_mlp_dim"] + d)
    norms = {"gpt3": 4, "gemma2": 4, "gemma3": 4, "envy": 3}.get(block, 2) * d
    if block == "gpt3":
        biases += file["base_mlp_dim"] + d
    if block in ("gemma3", "qwen3", "qwen3_moe", "envy"):
        norms += 2 * h
    if block == "olmo3":  # one norm over all heads
        norms += (n + k) * h
    sinks = n if block == "gpt_oss" else 0
    top = (2 if block == "gpt3" else 1) * d + max(get("trainable_position_size"), 0) * d
    tables_of_words = file["vocab_size"] * d * (1 if get("logits_via_embedding") else 2)
    feed_forward = num_dense * dense + (layers - num_dense) * sparse
    return layers * (projections + biases + norms + sinks) + feed_forward + top + tables_of_words


def test_every_model_of_maxtext_is_known() -> None:
    assert len(FILES) == 78 and set(tables.table("models")) == set(FILES)


@pytest.mark.parametrize("name", CONVERTED)
def test_the_keys_of_a_model_are_those_of_its_file(name: str) -> None:
    """Keys that the file does not set are compared with MaxText's defaults; those without a field are reported."""
    settings = of_model(name).settings
    day = datetime.date(2026, 8, 22)
    named = {key for key in {*FILES[name], *tables.table("models")[name]} - {"published"} if key[0] != "_"}
    dropped = {key: FILES[name][key] for key in FILES[name] if tables.drop_reason(key)}
    reported = {dropped.key: dropped.value for dropped in settings.dropped}
    assert {key: reported[key] for key in dropped} == {key: str(value) for key, value in dropped.items()}
    named = {key for key in named if not tables.drop_reason(key)}
    expected = {key: FILES[name].get(key, default_of(key, day)) for key in named}
    assert {key: settings[key] for key in expected} == expected


def default_of(key: str, day: datetime.date) -> object:
    return tables.default(key, day) if key in tables.part("defaults") else None


@pytest.mark.parametrize("name", CONVERTED)
def test_a_model_has_the_parameters_of_its_file(name: str) -> None:
    assert num_parameters(of_model(name).settings) == count(FILES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_with_the_part_that_pax_lacks(name: str) -> None:
    with pytest.raises(ConfigError, match=f"of model {re.escape(name)}: pax lacks ") as refused:
        of_model(name)
    assert REFUSED[name] in refused.value.message


@pytest.mark.parametrize(("name", "step"), [("llama4-17b-16e", 1), ("llama4-17b-128e", 2)])
def test_llama_4_is_what_hugging_face_calls_so(name: str, step: int) -> None:
    """The keys of `transformers` for the recipe's model are those that Meta published."""
    config = pax.load("maxtext-base").config
    for path, value in of_model(name).values.items():
        assign(config, path, value)
    found = config_json(config, None, "bfloat16")
    expected = {"model_type": "llama4_text", "num_experts_per_tok": 1, "num_local_experts": 16 if step == 1 else 128}
    expected |= {"intermediate_size": 8192, "attention_chunk_size": 8192, "attn_temperature_tuning": True}
    expected |= {"attn_scale": 0.1, "floor_scale": 8192, "use_qk_norm": step == 1, "no_rope_layers": [1, 1, 1, 0] * 12}
    expected |= {"moe_layers": list(range(step - 1, 48, step)), "intermediate_size_mlp": 8192 * step}
    assert {key: found[key] for key in expected} == expected
    assert found.get("rope_scaling", {}).get("rope_type") == ("llama3" if step == 1 else None)


def models_table() -> str:
    """The table of docs/maxtext-models.md."""
    lines = ["| model | parameters | |", "|---|---|---|"]
    for name in FILES:
        if name in CONVERTED:
            remark = "text decoder only" if FILES[name].get("use_multimodal") else ""
            lines.append(f"| `{name}` | {num_parameters(of_model(name).settings):,} | {remark} |")
        else:
            with pytest.raises(ConfigError) as refused:
                of_model(name)
            lines.append(f"| `{name}` | | refused: lacks {refused.value.message.partition('pax lacks ')[2]} |")
    return "\n".join(lines)


def test_the_page_has_all_models() -> None:
    page = PAGE.read_text()
    assert models_table() in page and f"{len(CONVERTED)} of {len(FILES)}" in page
