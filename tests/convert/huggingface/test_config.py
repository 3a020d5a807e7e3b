"""Values that are read from a `config.json` as transformers reads them."""

from __future__ import annotations

from typing import Any

import pytest

from paxcli.convert.huggingface.config import model_values
from tests.convert.huggingface.directories import CONFIGS, SIZES


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_scaling_begins_at_the_context_of_the_config(kind: str):
    """As in transformers: beside `rope_parameters`, which overrides; inside; or else `max_position_embeddings`."""
    scaling = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    base, inside = CONFIGS["llama31"] | {"max_position_embeddings": 96}, {"original_max_position_embeddings": 16}
    beside = {"original_max_position_embeddings": 32, "rope_parameters": scaling | inside}
    found = [model_values(base | keys) for keys in ({"rope_parameters": scaling}, beside)]
    assert [values["stack.block.attention.rotary.scaling.original_max_seq_len"] for values in found] == [96, 32]


def test_heads_of_qwen_3_moe_are_as_wide_as_in_transformers():
    """Without `head_dim` in its config.json: hidden_size / num_attention_heads, which is 128 for Qwen 3 alone."""
    base = {key: value for key, value in CONFIGS["qwen3_moe"].items() if key != "head_dim"}
    assert model_values(base)["dims_per_head"] is None
    assert model_values(base | {"model_type": "qwen3"} | SIZES)["dims_per_head"] == 128


@pytest.mark.parametrize(("mscale", "factor"), [({}, None), ({"mscale": 0}, None), ({"mscale": 1.0}, 1.0249580)])
def test_yarn_sharpens_by_mscale_where_both_of_its_keys_are_set(mscale: dict[str, float], factor: float | None):
    """As in transformers: None is `0.1 ln(factor) + 1`, 1.0249580 the ratio of that for 1.0 and for 0.8."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 0.8, "original_max_position_embeddings": 24}
    values = model_values(CONFIGS["deepseek_v3"] | {"rope_parameters": scaling | mscale})
    found = [values.get(f"stack.{kind}.attention.rotary.scaling.attention_factor") for kind in ("first", "turns.0")]
    assert found == [factor and pytest.approx(factor, rel=1e-6)] * 2


def test_windows_by_their_period_or_layer_by_layer():
    base = CONFIGS["gemma3_text"] | {"num_hidden_layers": 4, "sliding_window": 5}
    base.pop("layer_types")

    def windows(**keys: Any) -> list[int | None]:
        values = model_values(base | keys)
        return [values[f"stack.turns.{i}.attention.window"] for i in range(len(values["stack.turns"]))]

    assert windows(sliding_window_pattern=2) == [5, None, 5, None]
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert windows(layer_types=kinds) == [None, 5, 5, None]
