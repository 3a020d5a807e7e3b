"""Converts `generation_config.json` to the values of a recipe's `decoding`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxcli.convert.huggingface.config import read_data
from paxcli.models.sampling import Sampling
from paxcli.training.experiment import Experiment

GENERATION = "generation_config.json"
_DRAWN = ("temperature", "top_k", "top_p", "epsilon_cutoff")  # without `do_sample`, transformers does not use them


def decoding_values(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of `Sampling` → values, and the names of the keys that pax does not have."""
    table = read_data("generation.yaml")
    given = {key: value for key, value in content.items() if value is not None}
    is_drawn = bool(given.get("do_sample"))
    given = {**(table["sampling"] if is_drawn else {}), **given}
    others = [key for key in given if key not in table["fields"] and key not in table["unrelated"]]
    values = {
        field: given[key]
        for key, field in table["fields"].items()
        if key in given and (is_drawn or key not in _DRAWN) and given[key] != table["neutral"].get(key)
    }
    for field in values.keys() & {"eos_ids", "stop"}:
        values[field] = values[field] if isinstance(values[field], list) else [values[field]]
    return values, [key for key in others if given[key] != table["neutral"].get(key)]


def generation_json(config: fdl.Config[Experiment], carried: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `generation_config.json` of a recipe's `decoding`; None = `carried`, that of the import, is it already.

    Beam search is not converted: transformers normalize lengths in another way.
    """
    decoding, table = fdl.build(config.decoding), read_data("generation.yaml")["fields"]
    if not isinstance(decoding, Sampling):
        return None
    now = {key: x for key, field in table.items() if (x := getattr(decoding, field)) != getattr(Sampling(), field)}
    now = {key: list(x) if isinstance(x, tuple) else x for key, x in now.items()}
    if {table[key]: x for key, x in now.items()} == decoding_values(carried)[0]:
        return None
    kept = {key: value for key, value in carried.items() if key not in table}
    # Without `top_k`, transformers samples from 50 ids.
    return kept | ({"top_k": 0} if decoding.temperature > 0 else {}) | now | {"do_sample": decoding.temperature > 0}
