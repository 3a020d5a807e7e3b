"""Fields under the names of other tools."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import yaml

import paxcli.config
from paxcli.config.names_elsewhere import field_of
from paxcli.config.resolve import resolve
from paxcli.config.tree import walk
from paxcli.errors import ConfigError
from paxcli.inputs.text import TextInput
from paxcli.layers.lora import Lora
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.positions import LearnedPositions
from paxcli.models.beam_search import BeamSearch
from paxcli.optim.adamw import AdamW

FILE = pathlib.Path(paxcli.config.__path__[0]) / "data" / "names_elsewhere.yaml"
# Together they have every field that the file names.
RECIPES = ("tiny", "llama-1b", "c4-1b")
PARTS = (MoeFeedForward, LearnedPositions, AdamW, Lora, BeamSearch, TextInput)


def test_the_file_names_fields_of_recipes_and_each_foreign_name_once() -> None:
    names = yaml.safe_load(FILE.read_text())
    foreign = [name for each in names.values() for name in each]
    assert len(set(foreign)) == len(foreign) and not set(foreign) & set(names)
    fields = {str(node.key) for recipe in RECIPES for node in walk(resolve(recipe).config)}
    fields |= {field.name for part in PARTS for field in dataclasses.fields(part)}
    assert set(names) - fields == set()


@pytest.mark.parametrize(
    ("name", "field"),
    {
        "lr": "learning_rate",
        "train.lr": "learning_rate",
        "hidden_size": "model_dims",
        "max_steps": "num_train_steps",
        "epochs": "num_train_epochs",
        "per_device_train_batch_size": "percore_batch_size",
        "report_to": "writers",
        "tokenizer_dir": "tokenizer",
        "max_grad_norm": "clip_gradient_norm_to_value",
        "CHECKPOINT_EVERY_N_STEPS": "save_interval_steps",
        "CHECKPOINT_POLICY": "remat_policy",
        "SOFTMAX_CAP_LOGITS": "logit_cap",
        "LR_COS_WARMUP": "warmup_steps",
    }.items(),
)
def test_the_name_of_another_tool_is_answered_with_the_field(name: str, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("tiny", sets=[f"{name}=4"])
    assert error.value.hint == f"Did you mean `{field}`?"


def test_a_field_that_the_recipe_lacks_is_not_proposed() -> None:
    with pytest.raises(ConfigError) as error:
        resolve("tiny", sets=["num_local_experts=4"])
    assert "num_experts" not in (error.value.hint or "")


def test_the_batch_size_is_not_that_of_decoding() -> None:
    with pytest.raises(ConfigError, match=r"`batch_size` is ambiguous: .*`decoding\.batch_size`") as error:
        resolve("tiny", sets=["batch_size=4"])
    assert error.value.hint == "Did you mean `global_batch_size`? Otherwise write more of the path."
    assert resolve("tiny", sets=["decoding.batch_size=4"]).config.decoding.batch_size == 4


def test_case_and_hyphens_do_not_matter() -> None:
    assert field_of("Batch-Size") == "global_batch_size"
    assert field_of("DROPOUT") == "residual_dropout_prob"
    assert field_of("flavor") is None
