"""DeepSeek, Kimi K2, gpt-oss and Envy: fields against those of Hugging Face's models, and values by date."""

from __future__ import annotations

import datetime
import pathlib

import pytest
import yaml

from paxcli.convert.huggingface.config import differing_fields
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.launch import Launch, Pair
from paxcli.convert.maxtext.launch_to_recipe import BASE_RECIPE, convert
from paxcli.convert.maxtext.render import report
from paxcli.convert.maxtext.sizes import flops, num_parameters
from paxcli.convert.runs import recipe_with
from paxcli.training.experiment import summarize

# The published config.json of each model, as far as it says what is computed.
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
V3 = {"model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432}
V3 |= {"moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128}
V3 |= {"n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512}
V3 |= {"q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8}
V3 |= {"topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True}
V3 |= {"max_position_embeddings": 163_840, "rms_norm_eps": 1e-6, "rope_theta": 10_000}
V3 |= {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
LITE = V3 | {"model_type": "deepseek_v2", "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944}
LITE |= {"moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16}
LITE |= {"n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 1.0, "q_lora_rank": None}
LITE |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": False}
LITE |= {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}
KIMI = V3 | {"model_type": "kimi_k2", "vocab_size": 163_840, "num_attention_heads": 64, "num_key_value_heads": 64}
KIMI |= {"n_routed_experts": 384, "routed_scaling_factor": 2.827, "n_group": 1, "topk_group": 1}
KIMI |= {"first_k_dense_replace": 1, "max_position_embeddings": 131_072, "rope_theta": 50_000}
KIMI |= {"rope_scaling": {**YARN, "factor": 32, "beta_fast": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}
OSS = {"model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880}
OSS |= {"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
OSS |= {"num_local_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
OSS |= {"rope_theta": 150_000, "sliding_window": 128}
OSS |= {"rope_scaling": {**YARN, "rope_type": "yarn", "factor": 32.0, "truncate": False}}

MLA = "task.model.stack.turns.0.attention"
ROUTER = "task.model.stack.turns.0.feed_forward"


def of_model(name: str, date: str = "2026-08-22", **keys: object) -> Conversion:
    pairs = [Pair(key, str(value), 1) for key, value in {"model_name": name, **keys}.items()]
    return convert(Launch(1, pairs=pairs), name, date=datetime.date.fromisoformat(date))


@pytest.mark.parametrize(
    ("name", "huggingface"),
    [
        ("deepseek3-671b-batchsplit", V3),
        pytest.param("deepseek2-16b", LITE, marks=pytest.mark.slow),
        pytest.param("kimi-k2-1t", KIMI, marks=pytest.mark.slow),
        ("gpt-oss-20b", OSS),
    ],
)
def test_a_model_has_the_fields_of_hugging_faces(name: str, huggingface: dict) -> None:
    differing = differing_fields(recipe_with(BASE_RECIPE, of_model(name).values), huggingface)
    # With one group of experts, its score decides nothing.
    assert [text for text in differing if "group_score_experts" not in text or huggingface["n_group"] > 1] == []


@pytest.mark.parametrize(
    ("name", "date", "expected"),
    [
        ("deepseek3-671b", "2025-02-11", {"task.model.vocab_size": 32_000, "task.model.dims_per_head": 128}),
        ("deepseek3-671b", "2025-02-20", {"task.model.vocab_size": 32_000, MLA: "LatentAttention"}),
        ("deepseek3-671b", "2025-04-01", {f"{ROUTER}.num_groups": 8, f"{ROUTER}.groups_per_token": 4}),
        ("deepseek3-671b", "2025-04-02", {f"{ROUTER}.num_groups": 1, "task.model.vocab_size": 129_280}),
        ("deepseek3-671b-batchsplit", "2026-04-29", {f"{ROUTER}.num_groups": 1}),
        ("deepseek2-16b", "2025-02-21", {"task.model.stack.num_first": 1, f"{MLA}.query_latent_dims": None}),
        ("gpt-oss-120b", "2025-08-29", {"task.model.num_layers": 6, f"{MLA}.rotary.scaling.attention_factor": 1.0}),
        ("gpt-oss-120b", "2025-09-11", {"task.model.num_layers": 36, f"{MLA}.rotary.scaling.truncate": False}),
        ("envy-test", "2026-08-04", {ROUTER: "FeedForward", "task.model.stack.turns.1.feed_forward": "MoeFeedForward"}),
    ],
)
def test_a_model_has_the_values_of_its_day(name: str, date: str, expected: dict) -> None:
    converted = of_model(name, date)
    assert {path: converted.values[path] for path in expected} == expected
    early = [text for text in converted.approximated if "scaled queries otherwise" in text]
    assert bool(early) == (name.startswith("deepseek") and date < "2025-03-11")


def test_what_has_no_field_is_reported() -> None:
    converted = of_model("deepseek3-671b-batchsplit")
    text = " ".join(report(converted).split())
    assert "mesh_axes=['data', 'fsdp', 'expert', 'context']: the order of pax's axes is fixed" in text
    assert "logical_axis_rules=those of its file: its names are MaxText's" in text
    assert "shared_experts" not in {dropped.key for dropped in converted.settings.dropped}
    approximated = of_model("kimi-k2-1t").approximated
    assert any(text.startswith("routed_bias=True: MaxText adds it to the weights") for text in approximated)
    assert not any(text.startswith("routed_bias") for text in converted.approximated)


def test_the_bias_of_a_router_is_trained_as_in_maxtext() -> None:
    """By default not at all; with a rate by the load, which pax leaves to its optimizer."""
    exclusion = "task.train.learner.bprop_variable_exclusion"
    assert of_model("deepseek3-tiny").values[exclusion] == ["balance_bias$"]
    moving = of_model("deepseek3-tiny", routed_bias_update_rate=0.001)
    assert exclusion not in moving.values and "routed_bias_update_rate=0.001" in " ".join(moving.approximated)
    assert of_model("deepseek2-16b").values[f"{ROUTER}.balance_bias"] is False


@pytest.mark.parametrize(
    ("name", "matmuls", "attention"),
    [  # of one further layer, counted as in MaxText's tests: weights of matmuls, and heads times dimensions
        ("llama3-8b", 41_943_040 + 176_160_768, 32 * (128 + 128)),
        ("deepseek2-16b", 13_762_560 + 131_072 + 69_206_016, 16 * (192 + 128)),
    ],
)
def test_multi_token_prediction_is_converted(name: str, matmuls: int, attention: int) -> None:
    batch, length = 4, 2048
    keys = {"max_target_length": length, "per_device_batch_size": batch, "dataset_type": "synthetic"}
    plain, further = of_model(name, **keys), of_model(name, **keys, mtp_num_layers=2, mtp_loss_scaling_factor=0.3)
    assert further.values["task.model.mtp_num_layers"] == 2
    assert further.values["task.loss_aggregator.loss_keys"] == ["loss", "mtp_loss"]
    assert further.values["task.loss_aggregator.loss_weights"] == [1.0, 0.3]
    more = 2 * batch * length * (6 * matmuls + 3 * length * attention) / 1e12
    assert flops(further.settings).total - flops(plain.settings).total == pytest.approx(more)
    before = of_model(name, "2026-04-20", **keys, mtp_num_layers=2)
    assert flops(before.settings).total == flops(of_model(name, "2026-04-20", **keys).settings).total
    config = recipe_with(BASE_RECIPE, further.values)
    assert summarize(config)["parameters"] == num_parameters(further.settings) > num_parameters(plain.settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("envy-test", {}),
        ("deepseek3-tiny", {"mtp_num_layers": 1, "base_num_decoder_layers": 5, "vocab_size": 256}),
        (
            "gpt-oss-20b",
            {"base_num_decoder_layers": 2, "base_emb_dim": 32, "vocab_size": 256, "base_mlp_dim": 32}
            | {"base_moe_mlp_dim": 32, "num_experts": 8},
        ),
    ],
)
def test_a_recipe_trains(pax, tmp_path: pathlib.Path, name: str, keys: dict) -> None:
    keys = {"override_model_config": "true", "max_target_length": 32, "per_device_batch_size": 2, "steps": 2, **keys}
    words = [f"{key}={value}" for key, value in {"model_name": name, "dataset_type": "synthetic", **keys}.items()]
    assert pax("maxtext-convert", *words, "--out", "recipe.yaml").returncode == 0
    done = pax("train", "recipe.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert 0 < yaml.safe_load(done.stdout)["loss"] < 10
