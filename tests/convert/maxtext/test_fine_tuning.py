"""Launches of SFT and DPO become recipes with conversations and preference pairs, which train."""

from __future__ import annotations

import datetime
import json
import pathlib

import fiddle as fdl
import pytest

from paxcli.config.assign import assign
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.launch_to_recipe import BASE_RECIPE, convert
from paxcli.convert.maxtext.recipe_to_launch import command_line, to_maxtext
from paxcli.convert.maxtext.settings import LAST_DAY
from paxcli.convert.maxtext.source import read_file
from paxcli.convert.runs import recipe_with
from paxcli.errors import ConfigError
from tests.convert.maxtext.test_launch_to_recipe import of_keys

SFT, DPO = "maxtext.trainers.post_train.sft.train_sft", "maxtext.trainers.post_train.dpo.train_dpo"
TINY = "model_name=gpt3-52k max_target_length=64 per_device_batch_size=2 steps=2"
OF_SFT = {"use_sft": "true", "dataset_type": "hf", "hf_path": "json", "hf_train_files": "a.jsonl"}

ALL_TOKENS, TUNIX = "sft_train_on_completion_only", "use_tunix_gradient_accumulation"
SAME, OF_MATH = {"prompt": "prompt", "completion": "completion"}, {"prompt": "question", "completion": "answer"}


def of_command(tmp_path: pathlib.Path, command: str, date: datetime.date | None = None, **files: str) -> Conversion:
    for name, text in files.items():
        (tmp_path / f"{name}.yml").write_text(text)
    (tmp_path / "run.sh").write_text(f"{command}\n")
    (launch,) = read_file(tmp_path / "run.sh").launches
    return convert(launch, "run.sh", date=date)


@pytest.mark.parametrize(
    "program",
    [
        f"-m {SFT}",
        f"-m {SFT}_native src/maxtext/configs/post_train/sft.yml",
        "-m MaxText.sft.sft_trainer src/MaxText/configs/sft.yml",
        "-m MaxText.sft_trainer MaxText/configs/sft.yml",
        "MaxText/sft_trainer.py MaxText/configs/sft.yml",
        "-m MaxText.train MaxText/configs/sft.yml",
    ],
)
def test_programs_of_sft_have_the_values_of_its_config(tmp_path: pathlib.Path, program: str) -> None:
    """The program implies the config since March 2026."""
    converted = of_command(tmp_path, f"python3 {program} {TINY} learning_rate=3e-6 tokenizer_path=org/model")
    values = converted.values
    assert values["train_input"] == "ChatInput" and values["train_input.text_field"] == "messages"
    assert values["train_input.packing"] == "first_fit" and values["task.train.learner.learning_rate"] == 3e-6
    hub = "hf://datasets/HuggingFaceH4/ultrachat_200k/**/*train_sft*"
    assert converted.settings.undecided[-3:] == [
        f"The data: set `train_input.files`, such as `--set train_input.files='[{hub}]'`, or train with `--overlay "
        "synthetic-data`.",
        "The tokenizer: `--set tokenizer=hf:org/model`.",
        "The start: give the trained model, with `pax train --from`.",
    ]
    missing = [text for text in converted.settings.warnings if "MaxText's of August 2026 is read" in text]
    assert len(missing) == (".yml" in program)
    assert not any("sft_train_on_completion_only" in text for text in converted.approximated)


def test_the_config_beside_the_script_is_read_with_its_groups(tmp_path: pathlib.Path) -> None:
    """Since May 2026, MaxText's configs of DPO and LoRA have groups of keys."""
    text = "use_dpo: true\ndpo:\n  dpo_beta: 0.3\n  max_prompt_length: 16\ndataset_type: grain\nlora:\n  lora_rank: 4\n"
    text += (
        "grain_train_files: p*\ntrain_data_columns: [input, chosen, worse]\ntokenizer_path: t.model\npacking: false\n"
    )
    command = f"python3 -m {DPO} dpo.yml {TINY} dpo.dpo_label_smoothing=0.1"
    converted = of_command(tmp_path, command, dpo=text)
    values = converted.values
    assert (values["task.model.dpo.beta"], values["task.model.dpo.label_smoothing"]) == (0.3, 0.1)
    assert values["train_input"] == "PreferenceInput" and values["train_input.files"] == ["p*"]
    expected = {"prompt": "input", "chosen": "chosen", "rejected": "worse"}
    assert values["train_input.column_map"] == expected and values["train_input.packing"] == "one_per_row"
    dropped = {one.key: one.why for one in converted.settings.dropped if one.line}
    assert (
        dropped.keys() == {"dpo.max_prompt_length", "lora.lora_rank"}
        and "max_seq_len" in dropped["dpo.max_prompt_length"]
    )
    assert converted.settings.warnings == []


def test_a_recursive_config_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Exception, match="is not YAML"):
        of_command(tmp_path, f"python3 -m {SFT} sft.yml {TINY}", sft="a: &a\n  b: *a\n")


@pytest.mark.parametrize(
    ("keys", "expected", "differs"),
    [
        ({"sft_train_on_completion_only": "true"}, {"text_field": "text"}, []),
        ({}, {"text_field": "text"}, [ALL_TOKENS]),
        ({"train_data_columns": "[completion,prompt]"}, {"column_map": SAME}, [ALL_TOKENS]),
        ({"train_data_columns": "['question','answer']"}, {"column_map": OF_MATH}, [ALL_TOKENS]),
        ({"chat_template": "{{ messages }}"}, {"chat_template": "{{ messages }}"}, [ALL_TOKENS]),
        ({"packing": "false"}, {"packing": "one_per_row"}, [ALL_TOKENS]),
        ({TUNIX: "true", "gradient_accumulation_steps": 2}, {}, [ALL_TOKENS, TUNIX]),
        ({TUNIX: "true"}, {}, [ALL_TOKENS]),
    ],
    ids=str,
)
def test_columns_and_loss_of_sft(keys: dict, expected: dict, differs: list[str]) -> None:
    converted = of_keys("2026-08-22", **OF_SFT, **keys, tokenizer_path="org/model", ici_fsdp_parallelism=4)
    assert {field: converted.values[f"train_input.{field}"] for field in expected} == expected
    named = [text.partition("=")[0] for text in converted.approximated]
    assert "use_sft" in named and "packing" not in named
    assert [key for key in named if key in (ALL_TOKENS, TUNIX)] == differs


@pytest.mark.parametrize("columns", ["[]", "[a,b,c,d]"])
@pytest.mark.parametrize(
    ("kind", "wanted", "usual"),
    [
        ({}, "1", "[text]"),
        ({"use_sft": "true"}, "1 or 2", "[messages]"),
        ({"use_dpo": "true", "packing": "false"}, "2 or 3", "[chosen,rejected]"),
    ],
    ids=str,
)
@pytest.mark.parametrize("part", ["train", "eval"])
def test_a_wrong_number_of_columns_is_an_error(kind: dict, wanted: str, usual: str, columns: str, part: str) -> None:
    """Those of the evaluation too. MaxText fails at its first batch."""
    keys = {**OF_SFT, "use_sft": "false", **kind, "eval_interval": 5}
    keys |= {"train_data_columns": usual, "eval_data_columns": usual, f"{part}_data_columns": columns}
    with pytest.raises(ConfigError, match=rf"^{part}_data_columns has [04] names, not {wanted}\."):
        of_keys("2026-08-22", **keys)


def test_dpo_does_not_read_the_usual_column() -> None:
    with pytest.raises(ConfigError, match=r"^train_data_columns has 1 names, not 2 or 3\."):
        of_keys("2026-08-22", **{**OF_SFT, "use_sft": "false", "use_dpo": "true", "packing": "false"})


def test_what_sft_ignores_is_not_reported_for_other_data() -> None:
    converted = of_keys("2026-08-22", model_name="gpt3-52k", use_sft="true", dataset_type="synthetic")
    assert converted.values["train_input"] == "SyntheticInput"
    assert not any("sft" in text for text in converted.approximated)


def test_pairs_are_joined_as_maxtext_joins_them() -> None:
    """Without a chat template: MaxText tokenizes the texts as they are, with BOS and EOS, if they are switched on."""
    keys = {"use_dpo": "true", "dataset_type": "hf", "hf_path": "json", "hf_train_files": "p.jsonl", "packing": "false"}
    keys |= {"train_data_columns": "[chosen,rejected]", "tokenizer_path": "org/model"}
    for bos, eos in (("true", "true"), ("false", "false")):
        converted = of_keys("2026-08-22", **keys, add_bos=bos, add_eos=eos)
        config = recipe_with(BASE_RECIPE, converted.values)
        assign(config, "train_input.tokenizer", "byte")
        source = config.train_input
        source.files = ["a"]
        template = fdl.build(source).prompt_template()
        messages = [{"role": "user", "content": "What? "}, {"role": "assistant", "content": "This."}]
        rendered = template.render(messages, "here", {"bos_token": "<s>", "eos_token": "</s>"})
        answer = "This.</s>" if eos == "true" else "This."
        assert rendered.text == ("<s>" if bos == "true" else "") + "What? " + answer
        assert [rendered.text[start:end] for start, end in rendered.assistant] == [answer]
        assert [text for text in converted.settings.undecided if "`prompt`" in text]
        assert not {"add_bos", "add_eos"} & {one.key for one in converted.settings.dropped}
    assert any("truncates the prompt" in text for text in converted.approximated)
    assert any("end of the longer answer" in text for text in of_keys("2025-06-01", **keys).approximated)


def test_converted_launches_of_fine_tuning_train(pax, tmp_path: pathlib.Path) -> None:
    rows = [{"question": f"What is {i} + 1?", "answer": f"It is {i + 1}."} for i in range(8)]
    pairs = [{"input": row["question"], "chosen": row["answer"], "rejected": "No idea."} for row in rows]
    for name, records in (("qa", rows), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    of_eval = "hf_eval_files={0}.jsonl eval_interval=2 eval_data_columns={1} eval_steps=-1"
    data = f"dataset_type=hf hf_path=json hf_train_files={{0}}.jsonl train_data_columns={{1}} {of_eval} add_bos=false"
    sft = f"python3 -m {SFT} {TINY} run_name=sft {data.format('qa', '[question,answer]')}"
    dpo = f"python3 -m {DPO} {TINY} run_name=dpo {data.format('pairs', '[input,chosen,rejected]')} tokenizer_path=x"
    (tmp_path / "run.sh").write_text(f"{sft}\n{dpo}\n")
    done = pax("maxtext-convert", "run.sh", "--out", "recipe.yaml", "--check")
    assert done.returncode == 0, done.stderr
    for recipe, metric in (("recipe.yaml", "loss"), ("recipe-2.yaml", "reward_margin")):
        done = pax("train", recipe, "--set", "tokenizer=byte", "--run-dir", recipe.removesuffix(".yaml"))
        assert done.returncode == 0, done.stderr
        text = (tmp_path / recipe.removesuffix(".yaml") / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert any(metric in line for line in lines), lines
        assert any(line["split"].startswith("eval") for line in lines), lines


OF_DPO = {"use_dpo": "true", "dataset_type": "hf", "hf_path": "json", "hf_train_files": "p.jsonl", "packing": "false"}


@pytest.mark.parametrize(
    ("keys", "program"),
    [
        ({**OF_SFT, "train_data_columns": "[messages]"}, "sft.train_sft_native"),
        ({**OF_SFT, "train_data_columns": "[answer,question]", "packing": "false"}, "sft.train_sft_native"),
        ({**OF_SFT, "hf_path": "parquet", "gradient_accumulation_steps": 2}, "sft.train_sft_native"),
        ({**OF_DPO, "train_data_columns": "[chosen,rejected]", "dpo_beta": 0.3}, "dpo.train_dpo"),
        ({**OF_DPO, "train_data_columns": "[input,chosen,worse]", "dpo_label_smoothing": 0.1}, "dpo.train_dpo"),
    ],
    ids=str,
)
def test_fine_tuning_goes_back_to_maxtexts_program(tmp_path: pathlib.Path, keys: dict, program: str) -> None:
    """With base.yml: that of the program would set a model, steps and more."""
    first = of_keys("2026-08-22", **keys, model_name="gpt3-52k")
    back, left = to_maxtext(recipe_with(BASE_RECIPE, first.values))
    command = command_line(back)
    assert f"maxtext.trainers.post_train.{program} src/maxtext/configs/base.yml" in command and left == []
    assert "dpo_beta" not in back and back["packing"] == str(first.settings["packing"]).lower()
    assert of_command(tmp_path, command, date=LAST_DAY).values == first.values


def test_data_of_evaluations_that_stays_behind_is_named() -> None:
    keys = {**OF_SFT, "train_data_columns": "[messages]", "eval_interval": 10, "hf_eval_files": "e.jsonl"}
    _, left = to_maxtext(recipe_with(BASE_RECIPE, of_keys("2026-08-22", **keys, model_name="gpt3-52k").values))
    assert left == ["eval_inputs.0.files"]


def test_other_recipes_go_back_to_pre_training() -> None:
    back, _ = to_maxtext(recipe_with(BASE_RECIPE, of_keys(model_name="gpt3-52k", dataset_type="synthetic").values))
    assert command_line(back).startswith("python3 -m maxtext.trainers.pre_train.train \\\n")
