"""`pax import` and `pax export`, as a user types them."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

import paxcli
from paxcli.cli.main import app
from paxcli.cli.output import run
from tests.convert.huggingface.directories import tensors_of, write_directory, write_tokenizer


@pytest.fixture(autouse=True)
def own_environment(monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_weights_are_imported_and_exported(tmp_path: pathlib.Path, capsys):
    source, run_dir = write_directory(tmp_path / "hf", "llama2"), str(tmp_path / "run")
    assert run(app, ["import", str(source), "--out", run_dir, "--dry-run"]) == 0
    assert "matched: 21\nmissing: 0\nunexpected: 0\nmismatched: 0" in capsys.readouterr().out
    assert run(app, ["import", str(source), "--out", run_dir, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["family"], len(result["tensors"]["matched"])) == ("llama", 21)
    export_it = ["export", run_dir, "--out", str(tmp_path / "back"), "--dtype", "bfloat16"]
    assert run(app, [*export_it, "--dry-run"]) == 0
    assert "Would write" in capsys.readouterr().out and not (tmp_path / "back").exists()
    assert run(app, export_it) == 0
    assert "parameters of step 0 as llama in bfloat16" in capsys.readouterr().out
    assert run(app, ["import", str(source), "--out", run_dir]) == 2
    assert "already has checkpoints" in capsys.readouterr().err


def test_bad_sources_have_the_exit_codes_of_data_and_configuration(tmp_path: pathlib.Path, capsys):
    source = write_directory(tmp_path / "hf", "llama2", model_type="phimoe")
    assert run(app, ["import", str(source), "--out", str(tmp_path / "run")]) == 2
    (tmp_path / "weights.pt").write_bytes(b"")
    assert run(app, ["import", str(tmp_path / "weights.pt"), "--out", str(tmp_path / "run")]) == 5
    errors = capsys.readouterr().err
    assert "it lacks its router, and LongRoPE" in errors and "save_pretrained(" in errors


def test_a_dry_run_of_what_cannot_be_imported_fails(tmp_path: pathlib.Path, capsys):
    source = write_directory(tmp_path / "hf", "llama2", num_hidden_layers=3)
    dry_run = ["import", str(source), "--out", str(tmp_path / "run"), "--dry-run"]
    assert run(app, dry_run) == 5 == run(app, dry_run[:-1])
    shown = capsys.readouterr()
    assert "missing: 9\n" in shown.out and "Cannot import" in shown.err and "are not of this model" in shown.err
    assert run(app, [*dry_run, "--json"]) == 5
    result = json.loads(capsys.readouterr().out)
    assert result["error"]["exit_code"] == 5 and len(result["tensors"]["missing"]) == 9


SMALL = ["num_train_steps=2", "eval_inputs=[]", "train_input=SyntheticInput", "max_seq_len=16", "global_batch_size=2"]


def set_options(*more: str) -> list[str]:
    return [word for value in (*SMALL, "percore_batch_size=null", *more) for word in ("--set", value)]


def test_a_directory_of_hugging_face_is_no_recipe(tmp_path: pathlib.Path, capsys):
    source = write_directory(tmp_path / "hf", "llama2")
    for words in (["recipes", "show"], ["eval"], ["decode"]):
        assert run(app, [*words, str(source)]) in (2, 5)
        error = capsys.readouterr().err
        assert f"It is a Hugging Face model: `pax import {source} --out RUN_DIR`" in error and f"`hf:{source}`" in error


def test_a_model_of_hugging_face_is_described_without_its_weights(pax_here, tmp_path: pathlib.Path):
    write_directory(tmp_path / "model", "llama31").joinpath("model.safetensors").unlink()
    shown = json.loads(pax_here("recipes", "show", "hf:model", "--set", "num_layers=1", "--json").stdout)
    assert shown["name"] == "model" and shown["values"]["task.model.model_dims"] == {"value": 32, "from": "recipe"}
    assert shown["values"]["task.model.num_layers"] == {"value": 1, "from": "--set"}
    assert "train: 1 batches" in pax_here("inspect-input", "hf:model", "--num-batches", "1").stdout
    assert "task.model.model_dims: 32 -> 2048" in pax_here("recipes", "diff", "hf:model", "llama-1b").stdout
    unknown = pax_here("recipes", "show", "hf:model", "--set", "num_layrs=1")
    assert unknown.returncode == 2 and "`num_layers`" in unknown.stderr
    copied = pax_here("recipes", "cp", "hf:model", "mine.py")
    assert copied.returncode == 2 and "pax import model" in copied.stderr
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.slow
def test_weights_of_hugging_face_are_decoded_and_evaluated(pax, tmp_path: pathlib.Path):
    write_tokenizer(write_directory(tmp_path / "model", "llama31"))
    (tmp_path / "text.txt").write_text("a text of its own")
    greedy = ["--prompt", "a text", "--max-tokens", "8", "--temperature", "0", "--json"]
    first, second = (pax("decode", "hf:model", *greedy) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert "Imported" in first.stderr and "Imported" not in second.stderr  # imported once
    imported = pax("import", "model", "--out", "imported")
    assert imported.returncode == 0, imported.stderr
    apart = pax("decode", "imported", *greedy)
    assert json.loads(first.stdout) == json.loads(second.stdout) == json.loads(apart.stdout)
    lost = pax("eval", "hf:model", "--files", "text.txt", "--run-dir", "evaluated", "--json")
    assert list(json.loads(lost.stdout)["metrics"]) == ["files"], lost.stderr
    trained = pax("train", "hf:model", *set_options())
    assert trained.returncode == 0, trained.stderr
    ambiguous = pax("decode", "hf:model", *greedy)  # its weights, or those that were trained?
    assert ambiguous.returncode == 2 and "began with hf:model, and was trained" in ambiguous.stdout
    failed = json.loads(pax("decode", "hf:none", *greedy).stdout)
    assert failed["error"]["exit_code"] == 5


@pytest.mark.slow
def test_training_starts_from_hugging_face_without_a_separate_step(pax, tmp_path: pathlib.Path):
    write_directory(tmp_path / "model", "llama31")
    would = pax("train", "hf:model", *set_options(), "--dry-run")
    assert would.returncode == 0 and "Would import" in would.stderr, would.stderr
    assert would.stdout.startswith("Would start.") and "steps: 2" in would.stdout
    described = json.loads(pax("train", "hf:model", *set_options(), "--dry-run", "--json").stdout)
    assert described["would"] == "start" and described["run_dir"] == "runs/model"
    files = ["--set", "train_input=TextInput", "--set", "train_input.files=[none.bin]"]
    no_data = pax("train", "hf:model", *files, "--dry-run")
    assert no_data.returncode == 5 and "There is no file none.bin" in no_data.stderr
    assert not (tmp_path / "runs").exists()
    for _ in range(2):  # the second time resumes, and imports nothing
        done = pax("train", "hf:model", *set_options(), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["run_dir"] == "runs/model"
    assert "Imported" not in done.stderr
    sizes = ["num_layers=2", "model_dims=32", "hidden_dims=48", "num_heads=4", "num_kv_heads=2"]
    sizes += ["task.model.vocab_size=61", "rotary.max_timescale=1000", "rotary.scaling=Llama31Scaling"]
    sizes += ["scaling.original_max_seq_len=48", "final_norm.epsilon=1e-6", "block.norm.epsilon=1e-6"]
    mine = pax("train", "llama-1b", "--from", "hf:model", "--run-dir", "mine", *set_options(*sizes), "--json")
    assert mine.returncode == 0, mine.stderr
    assert "Imported" in mine.stderr
    trained = paxcli.Run(tmp_path / "mine")
    assert trained.steps == [0, 2]  # at learning rates of warm-up
    table = tensors_of("llama31")["model.embed_tokens.weight"]
    np.testing.assert_allclose(trained.params()["embedding"]["table"], table, atol=1e-4, rtol=0)
    other = pax("train", "llama-1b", "--from", "hf:model", "--run-dir", "other", *set_options(*sizes[1:]))
    assert other.returncode == 2 and "num_layers is" in other.stderr, other.stderr
    assert not (tmp_path / "other/recipe.yaml").exists()


@pytest.mark.slow
def test_weights_in_place_of_a_recipe_are_checked_before_and_after_their_import(pax, tmp_path: pathlib.Path):
    write_directory(tmp_path / "model", "llama31")
    misspelt, no_data = ["--set", "num_layer=1"], ["--set", "train_input=TextInput"]
    for words in (misspelt, [*misspelt, "--dry-run"], ["--overlay", "none-such"], no_data):
        wrong = pax("train", "hf:model", *words, "--json")  # found before the import, which may take long
        assert json.loads(wrong.stdout)["error"]["exit_code"] == wrong.returncode == 2, wrong.stderr
    for words in (["--from", "runs/a"], ["--with-optimizer"]):
        both = pax("train", "hf:model", *words)
        assert both.returncode == 2 and "starts from the weights of hf:model" in both.stderr, both.stderr
    missing = pax("train", "hf:other", "--json")
    assert json.loads(missing.stdout)["error"]["exit_code"] == missing.returncode == 5
    assert not (tmp_path / "runs").exists()

    words = ["train", "hf:model", "--overlay", "lora", *set_options("learning_rate=1")]
    first = subprocess.Popen([sys.executable, "-m", "paxcli", *words], cwd=tmp_path)
    while not (tmp_path / "runs/model/config.txt").exists():
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()  # without a checkpoint of its own
    first.wait()
    assert paxcli.Run(tmp_path / "runs/model").steps == [0]
    done = pax("train", "hf:model", *set_options())
    assert done.returncode == 0, done.stderr
    config = paxcli.Run(tmp_path / "runs/model").config
    assert config.task.model.lora is None and config.task.train.learner.learning_rate < 1
    lora = pax("train", "hf:model", *set_options(), "--overlay", "lora")
    assert lora.returncode == 2 and "task.model.lora: None" in lora.stderr, lora.stderr
    resumed = pax("train", "runs/model")
    assert resumed.returncode == 0 and "is finished" in resumed.stderr, resumed.stderr

    other = pax("train", "hf:other/model", *set_options())  # by default in the same run directory
    assert other.returncode == 2 and "began with" in other.stderr and "pax train runs/model" in other.stderr
