"""`pax import` and `pax export`, as a user types them."""

from __future__ import annotations

import json
import pathlib

import pytest

from paxcli.cli.main import app
from paxcli.cli.output import run
from tests.convert.huggingface.directories import write_directory


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
    assert run(app, ["export", run_dir, "--out", str(tmp_path / "back"), "--dtype", "bfloat16"]) == 0
    assert "parameters of step 0 as llama in bfloat16" in capsys.readouterr().out
    assert run(app, ["import", str(source), "--out", run_dir]) == 2
    assert "already has checkpoints" in capsys.readouterr().err


def test_bad_sources_have_the_exit_codes_of_data_and_configuration(tmp_path: pathlib.Path, capsys):
    source = write_directory(tmp_path / "hf", "llama2", model_type="qwen2")
    assert run(app, ["import", str(source), "--out", str(tmp_path / "run")]) == 2
    (tmp_path / "weights.pt").write_bytes(b"")
    assert run(app, ["import", str(tmp_path / "weights.pt"), "--out", str(tmp_path / "run")]) == 5
    errors = capsys.readouterr().err
    assert "attention with biases on queries, keys and values only" in errors and "save_pretrained(" in errors
