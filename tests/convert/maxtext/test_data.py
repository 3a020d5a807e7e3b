"""The data of MaxText's launches becomes the input of a recipe."""

from __future__ import annotations

import json
import pathlib

import fiddle as fdl
import grain.python as grain
import numpy as np
import pytest

from paxcli.config.assign import assign
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.launch_to_recipe import BASE_RECIPE
from paxcli.convert.maxtext.recipe_to_launch import to_maxtext
from paxcli.convert.runs import recipe_with
from paxcli.errors import ConfigError
from paxcli.inputs.mixture import MixtureInput
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.training.validate import validate
from tests.convert.maxtext.test_launch_to_recipe import of_keys


def test_keys_of_data_and_evaluation_name_the_field_to_set() -> None:
    keys = {"dataset_type": "hf", "hf_path": "a/b", "tokenizer_path": "y", "eval_steps": 2, "num_epoch": 3}
    why = {found.key: found.why for found in of_keys(**keys, logits_via_embedding="true").settings.dropped}
    fields = {"tokenizer_path": "tokenizer=hf:", "eval_steps": "eval_loop_num_batches"}
    assert all(field in why[key] for key, field in fields.items()) and "repeats" in why["num_epoch"]
    assert "logits_via_embedding" not in why


_TO_SET = "The tokenizer: `--set tokenizer=hf:org/model`."


@pytest.mark.parametrize(
    ("keys", "expected", "asks"),
    [
        (
            dict(
                dataset_type="hf", hf_path="parquet", hf_train_files="gs://b/c4/*.parquet", train_data_columns="[body]"
            ),
            dict(files=["gs://b/c4/*.parquet"], format="parquet", text_field="body", tokenizer="HuggingFaceTokenizer"),
            [_TO_SET],
        ),
        (
            dict(dataset_type="hf", hf_path="json", hf_train_files="a.jsonl", packing="false"),
            dict(files=["a.jsonl"], format="jsonl", packing="one_per_row", text_field="text"),
            [_TO_SET],
        ),
        (
            dict(dataset_type="hf", hf_path="allenai/c4"),
            dict(files=None, format=None, packing="first_fit"),
            [
                "The data: set `train_input.files`, such as `--set train_input.files='[hf://datasets/allenai/c4/**/"
                "*train*]'`, or train with `--overlay synthetic-data`.",
                _TO_SET,
            ],
        ),
        (
            dict(dataset_type="grain", grain_train_files="a*", tokenizer_type="tiktoken"),
            dict(files=["a*"], format="arrayrecord", tokenizer="TiktokenTokenizer"),
            [],
        ),
        (
            dict(dataset_type="grain", grain_train_files="a*", grain_file_type="tfrecord"),
            {"files": None, "tokenizer": "SentencePieceTokenizer", "tokenizer.path": "org/model"},
            [
                "The data: set `train_input.files` in place of grain_train_files=a*, which pax cannot read, or train "
                "with `--overlay synthetic-data`."
            ],
        ),
    ],
    ids=str,
)
def test_files_of_hf_and_grain_are_those_of_a_text_input(keys: dict, expected: dict, asks: list[str]) -> None:
    converted = of_keys(**keys, tokenizer_path="org/model", ici_fsdp_parallelism=4)
    assert converted.values["train_input"] == "TextInput"
    assert {field: converted.values[f"train_input.{field}"] for field in expected} == expected
    assert converted.settings.undecided == asks
    assert any("MaxText cuts documents" in text for text in converted.approximated)


def of_grain(**keys: object) -> Conversion:
    return of_keys(dataset_type="grain", tokenizer_path="org/model", ici_fsdp_parallelism=4, **keys)


@pytest.mark.parametrize("files", ["gs://b/x*,0.3;y*,0.7;z*,0", "gs://b/x*:3;y*:7;z*:0.0"])
def test_weighted_files_of_grain_become_a_mixture(files: str) -> None:
    converted = of_grain(grain_train_files=files, train_data_columns="[body]")
    mixture = recipe_with(BASE_RECIPE, converted.values).train_input
    assert [each.files for each in mixture.inputs] == [["gs://b/x*"], ["y*"]]
    assert {(each.format, each.text_field, each.packing) for each in mixture.inputs} == {
        ("arrayrecord", "body", "first_fit")
    }
    assert [fdl.ordered_arguments(each.tokenizer)["path"] for each in mixture.inputs] == ["org/model"] * 2
    datasets = [grain.MapDataset.range(1000), grain.MapDataset.range(1000, 2000)]
    theirs = grain.MapDataset.mix(datasets, [weight / sum(mixture.weights) for weight in mixture.weights])
    ours = MixtureInput(inputs=[SyntheticInput(seq_len=8), SyntheticInput(seq_len=8)], weights=mixture.weights)
    ours.is_training = True
    second = np.count_nonzero(ours.order(np.arange(1000)) % 2)
    assert abs(second - sum(theirs[row] >= 1000 for row in range(1000))) <= 2
    assert converted.settings.undecided == [] and not [one for one in converted.settings.dropped if one.line]
    assert any("shares of the documents" in text for text in converted.approximated)


def test_a_file_with_a_mixture_is_read(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "mixture.json"
    file.write_text(json.dumps({"web": {"path": "w*", "weight": 3}, "code": {"path": "c*", "weight": 1}}))
    converted = of_grain(grain_train_mixture_config_path=file, grain_train_files="ignored*")
    mixture = recipe_with(BASE_RECIPE, converted.values).train_input
    assert [each.files for each in mixture.inputs] == [["w*"], ["c*"]] and mixture.weights == [3, 1]
    file.write_text(json.dumps({"web": {"path": "w*", "weight": 3}}))
    assert of_grain(grain_train_mixture_config_path=file).values["train_input.files"] == ["w*"]


@pytest.mark.parametrize("content", [None, "", "[]", "{", '{"web": {"path": "w*"}}', '{"web": 3}'])
def test_a_mixture_that_cannot_be_read_is_for_the_user_to_decide(tmp_path: pathlib.Path, content: str | None) -> None:
    file = tmp_path / "mixture.json"
    if content is not None:
        file.write_text(content)
    converted = of_grain(grain_train_mixture_config_path=file)
    assert converted.values["train_input"] == "TextInput" and converted.values["train_input.files"] is None
    assert [str(file) in text for text in converted.settings.undecided] == [True]
    undecided = of_grain(grain_train_files="a*;b*").settings.undecided
    assert len(undecided) == 1 and "a*;b*" in undecided[0]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"reset_for_eval": True, "eval_loop_num_batches": None}),
        ({"eval_steps": 5}, {"reset_for_eval": False, "eval_loop_num_batches": 5}),
    ],
)
def test_files_of_evaluation_are_evaluated(keys: dict, expected: dict) -> None:
    keys = {"grain_train_files": "a*", "eval_interval": 100, "per_device_batch_size": 12, **keys}
    converted = of_grain(**keys, grain_eval_files="held*", eval_data_columns="[body]")
    (source,) = recipe_with(BASE_RECIPE, converted.values).eval_inputs
    assert (source.files, source.format, source.text_field) == (["held*"], "arrayrecord", "body")
    assert fdl.ordered_arguments(source.tokenizer)["path"] == "org/model"
    assert {field: getattr(source, field) for field in expected} == expected
    assert converted.settings.undecided == [] and not [one for one in converted.settings.dropped if one.line]
    assert any("on the same rows" in text for text in converted.approximated) == ("eval_steps" in keys)


def test_evaluation_on_a_dataset_of_the_hub_is_for_the_user_to_decide() -> None:
    keys = {"dataset_type": "hf", "hf_path": "allenai/c4", "eval_interval": 10, "tokenizer_path": "org/model"}
    converted = of_keys(**keys, hf_eval_split="validation", ici_fsdp_parallelism=4)
    assert converted.values["eval_inputs.0.files"] is None
    assert converted.settings.undecided[-1] == (
        "The data: set `eval_inputs.0.files`, such as `--set eval_inputs.0.files='[hf://datasets/allenai/c4/**/"
        "*validation*]'`, or train with `--overlay synthetic-data`."
    )
    assert of_keys(eval_interval=10, dataset_type="synthetic").settings.undecided[-1].startswith("The evaluation: ")


@pytest.mark.parametrize(
    ("keys", "train", "held"),
    [
        (dict(hf_path="org/name", hf_train_files="en/t*.jsonl"), "hf://datasets/org/name/en/t*.jsonl", None),
        (dict(hf_path="org/name", hf_train_files="gs://b/t*", hf_eval_files="/e*"), "gs://b/t*", "/e*"),
        (dict(hf_path="./mine/", hf_train_files="t*", hf_eval_files="e*"), "./mine/t*", "./mine/e*"),
        # As in MaxText's `construct_hf_dataset_path`.
        (
            dict(dataset_type="grain", grain_file_type="parquet", hf_path="org/name"),
            "hf://datasets/org/name/**/*train*.parquet",
            "hf://datasets/org/name/**/*validation*.parquet",
        ),
        (
            dict(dataset_type="grain", grain_file_type="parquet", hf_path="org/name", hf_eval_split="test"),
            "hf://datasets/org/name/**/*train*.parquet",
            "hf://datasets/org/name/**/*test*.parquet",
        ),
    ],
    ids=str,
)
def test_files_of_a_dataset_are_found_in_it(keys: dict, train: str, held: str | None) -> None:
    values = of_keys(**{"dataset_type": "hf", **keys}, eval_interval=5).values
    assert values["train_input.files"] == [train]
    assert values["eval_inputs.0.files"] == (held and [held])


def test_a_directory_means_its_files(tmp_path: pathlib.Path) -> None:
    of = {"grain_eval_files": tmp_path, "eval_interval": 5}
    values = of_grain(grain_train_files=f"{tmp_path},0.3;gs://b/x/,0.7", **of).values
    assert [values[f"train_input.inputs.{i}.files"] for i in (0, 1)] == [[f"{tmp_path}/*"], ["gs://b/x/*"]]
    assert values["eval_inputs.0.files"] == [f"{tmp_path}/*"]


@pytest.mark.parametrize(
    ("date", "keys", "expected"),
    [
        ("2026-08-22", {"eval_steps": 4}, ("c4/en:3.1.0", "validation", False, 4)),
        ("2023-01-12", {}, ("lm1b", "test", True, None)),
        ("2025-01-01", {"eval_dataset_name": "c4/de:1", "eval_split": "t"}, ("c4/de:1", "t", True, None)),
    ],
)
def test_datasets_of_tfds_are_evaluated(date: str, keys: dict, expected: tuple) -> None:
    keys = {"model_name": "gpt3-52k", "dataset_type": "tfds", "dataset_path": "gs://b", "eval_interval": 5, **keys}
    converted = of_keys(date, **keys, tokenizer_path="t.model")
    config = recipe_with(BASE_RECIPE, converted.values)
    validate(config)
    (source,) = config.eval_inputs
    found = (source.c4.tfds_name, source.split_name, source.reset_for_eval, source.eval_loop_num_batches)
    assert found == expected
    assert (source.c4.path, source.c4.tokenizer_path) == ("gs://b", "t.model")
    assert not [text for text in converted.settings.undecided if "evaluation" in text]
    assert not [dropped for dropped in converted.settings.dropped if dropped.key.startswith("eval")]
    back, _ = to_maxtext(config)
    assert [back[key] for key in ("eval_dataset_name", "eval_split", "dataset_path")] == [*expected[:2], "gs://b"]


def test_synthetic_data_is_evaluated(pax, tmp_path: pathlib.Path) -> None:
    keys = ["model_name=gpt3-52k", "steps=2", "per_device_batch_size=2", "max_target_length=32", "eval_interval=1"]
    keys += ["dataset_type=synthetic", "--date", "2026-08-22", "--out"]
    done = pax("maxtext-convert", *keys, "endless.yaml")
    assert done.returncode == 0 and "Synthetic data has no end" in done.stderr, done.stderr
    assert pax("maxtext-convert", "eval_steps=3", *keys, "recipe.yaml").returncode == 0
    assert pax("train", "endless.yaml", "--run-dir", "endless", "--dry-run").returncode == 0
    done = pax("train", "recipe.yaml", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "eval/input"] == [1, 2]


def test_data_that_training_repeats_is_evaluated_once() -> None:
    keys = {"dataset_type": "hf", "hf_path": "json", "hf_train_files": "a.jsonl", "hf_eval_files": "b.jsonl"}
    values = of_keys(**keys, reuse_example_batch=1, eval_interval=5).values
    assert values["train_input"] == "SyntheticInput" and values["eval_inputs.0.files"] == ["b.jsonl"]


def test_a_converted_launch_evaluates(pax, tmp_path: pathlib.Path) -> None:
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"text": f"{name} text. " * 20}) + "\n") * 8)
    keys = ("model_name=gpt3-52k", "steps=4", "per_device_batch_size=2", "max_target_length=32", "dataset_type=hf")
    keys += ("hf_path=json", "hf_train_files=train.jsonl", "hf_eval_files=held.jsonl", "eval_interval=2")
    done = pax("maxtext-convert", *keys, "--date", "2026-08-22", "--out", "recipe.yaml", "--check")
    assert done.returncode == 0, done.stderr
    done = pax("train", "recipe.yaml", "--set", "tokenizer=byte", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = [value for line in lines for key, value in line.items() if key.endswith("data_share")]
    assert shares and set(shares) == {1.0}, lines


def test_a_converted_text_input_reads_its_files(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "one"}) + "\n")
    keys = dict(dataset_type="hf", hf_path="json", hf_train_files=f"{tmp_path}/*.jsonl", train_data_columns="[body]")
    config = recipe_with(BASE_RECIPE, of_keys(**keys, max_target_length=8).values)
    sizes = config.train_input
    sizes.seq_len, sizes.vocab_size, sizes.batch_size = 8, 259, 1
    with pytest.raises(ConfigError, match="The tokenizer has no path") as error:
        fdl.build(config.train_input).validate()
    assert "--set tokenizer=hf:DIR" in str(error.value.hint)
    assign(config, "train_input.tokenizer", "byte")
    source = fdl.build(config.train_input)
    assert source.ids_to_strings(source.get_next().ids, [4]) == ["one"]


def test_biases_of_attention_are_not_reported_as_dropped() -> None:
    converted = of_keys(decoder_block="qwen2", attention_bias="true", dataset_type="synthetic")
    assert converted.values["task.model.stack.block.attention.use_bias"] is True
    assert not converted.settings.dropped
