"""The config of a converted recipe, built as `pax train` builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxcli.config.assign import assign
from paxcli.config.load import load
from paxcli.errors import ConfigError
from paxcli.maxtext.conversion import BASE_RECIPE, Converted

PARTS = {
    "task.model.head": "an output head of its own",
    "task.model.embedding.scale_logits_sqrt_depth": "logits divided by the root of the model dimension",
    "task.model.stack.block": "the block of parallel attention and MLP",
    "task.model.stack.block.post_norms": "norms after attention and MLP",
    "task.model.stack.block.attention.relative_bias": "a bias for relative positions",
    "task.model.stack.block.attention.rotary": "this rotation of queries and keys",
    "task.model.stack.block.attention.qk_norm": "norms of queries and keys",
    "task.model.stack.block.attention.query_scale": "a scale of queries",
    "task.model.stack.block.attention.window": "a sliding window",
    "task.model.stack.block.feed_forward": "a mixture of experts",
    "task.loss_aggregator.loss_weights": "a loss that balances experts",
}
"""What a path stands for, where a pax that lacks it has to say so."""


def build_config(converted: Converted) -> fdl.Config:
    """The recipe's config.

    Raises:
      ConfigError: This pax lacks a part of the model, by name.
    """
    return config_with(converted.values, converted.settings.model_name)


def config_with(values: Mapping[str, Any], model_name: str) -> fdl.Config:
    """`BASE_RECIPE` with values on it."""
    config = load(BASE_RECIPE).config
    for path, value in values.items():
        try:
            assign(config, path, value)
        except ConfigError:
            part = next((PARTS[p] for p in (path, path.rpartition(".")[0]) if p in PARTS), None)
            if part is None:
                raise
            name = "The model" if model_name == "default" else model_name
            raise ConfigError(
                f"{name} needs {part}, which this pax lacks (`{path}`).",
                "The nearest that this pax has is decoder_block=gpt3, such as `--model gpt3-22b`.",
            ) from None
    return config
