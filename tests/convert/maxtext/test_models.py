"""MaxText's models by name: keys and parameters against the numbers of its model files."""

from __future__ import annotations

import datetime
import pathlib
import re

import pytest
import yaml

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.launch import Launch, Pair
from paxcli.convert.maxtext.launch_to_recipe import convert
from paxcli.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[3]
FILES = yaml.safe_load((ROOT / "tests/data/maxtext_models.yaml").read_text())
PAGE = ROOT / "docs/maxtext-models.md"


def of_model(name: str) -> Conversion:
    launch = Launch(1, pairs=[Pair("model_name", name, 1)])
    return convert(launch, name, date=datetime.date(2026, 8, 22))


def converts(name: str) -> bool:
    return tables.models()[name]["decoder_block"] in tables.blocks()


CONVERTED = [name for name in FILES if converts(name)]


def count(file: dict) -> int:
    """Parameters of a text decoder, by the shapes of its arrays."""

    def get(key: str, otherwise: object = 0) -> object:
        return file.get(key, otherwise)

    block = file["decoder_block"]
    d, n, k, h = (get(key, 128) for key in ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim"))
    projections = d * n * h + 2 * d * k * h + n * h * d
    biases = {"gpt3": (n + 2 * k) * h + d, "qwen2": (n + 2 * k) * h}.get(block, 0)
    matrices = len(file["mlp_activations"]) + 1
    feed_forward = matrices * d * file["base_mlp_dim"]
    if get("num_experts") > 1:
        feed_forward = get("num_experts") * (matrices * d * file["base_moe_mlp_dim"] + d)
    norms = {"gpt3": 4, "gemma2": 4, "gemma3": 4}.get(block, 2) * d
    if block == "gpt3":
        biases += file["base_mlp_dim"] + d
    if block in ("gemma3", "qwen3", "qwen3_moe"):
        norms += 2 * h
    if block == "olmo3":  # one norm over all heads
        norms += (n + k) * h
    layers = file["base_num_decoder_layers"] * (2 if block == "gemma2" else 1)
    top = (2 if block == "gpt3" else 1) * d + max(get("trainable_position_size"), 0) * d
    tables_of_words = file["vocab_size"] * d * (1 if get("logits_via_embedding") else 2)
    return layers * (projections + biases + feed_forward + norms) + top + tables_of_words


def test_every_model_of_maxtext_is_known() -> None:
    assert len(FILES) == 78 and set(tables.models()) == set(FILES)


@pytest.mark.parametrize("name", CONVERTED)
def test_the_keys_of_a_model_are_those_of_its_file(name: str) -> None:
    """Keys that the file does not set are compared with MaxText's defaults."""
    settings = of_model(name).settings
    day = datetime.date(2026, 8, 22)
    expected = {
        key: FILES[name].get(key, tables.default(key, day))
        for key in {*FILES[name], *tables.models()[name]} - {"published"}
    }
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize("name", CONVERTED)
def test_a_model_has_the_parameters_of_its_file(name: str) -> None:
    assert of_model(name).parameters == count(FILES[name])


@pytest.mark.parametrize("name", [name for name in FILES if not converts(name)])
def test_other_models_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"decoder_block={FILES[name]['decoder_block']} of model {name}")):
        of_model(name)


def models_table() -> str:
    """The table of docs/maxtext-models.md."""
    lines = ["| model | parameters | |", "|---|---|---|"]
    for name in FILES:
        if converts(name):
            remark = "text decoder only" if FILES[name].get("use_multimodal") else ""
            lines.append(f"| `{name}` | {of_model(name).parameters:,} | {remark} |")
        else:
            lines.append(f"| `{name}` | | refused: `decoder_block={FILES[name]['decoder_block']}` |")
    return "\n".join(lines)


def test_the_page_has_all_models() -> None:
    page = PAGE.read_text()
    assert models_table() in page and f"{len(CONVERTED)} of {len(FILES)}" in page
