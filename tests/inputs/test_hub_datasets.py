"""Files of a dataset on the Hugging Face Hub, with a hub on this machine."""

from __future__ import annotations

import json
import pathlib
import subprocess

import pyarrow
import pyarrow.parquet
import pytest

from paxcli.errors import DataError
from paxcli.inputs.files import find_files
from tests.convert.huggingface.fake_hub import fake_hub

TEXTS = ["The cat sat on the mat.", "A dog barked at it.", "Both went home."]


def test_files_of_a_dataset_are_read_as_local_ones(pax, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "hub/mine/stories"
    (folder / "data").mkdir(parents=True)
    (folder / "data/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:2]))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[2:]}), folder / "data/b.parquet")
    (folder / "README.md").write_text("not a part of the data")

    def run(*files: str) -> subprocess.CompletedProcess[str]:
        sets = ("train_input=TextInput", f"train_input.files=[{', '.join(files)}]", "train_input.num_workers=0")
        options = [word for one in sets for word in ("--set", one)]
        return pax("inspect-input", "tiny", *options, "--num-batches", "2", "--json", env=env)

    def inspect(*files: str) -> dict:
        done = run(*files)
        assert not done.returncode, done.stderr
        (found,) = json.loads(done.stdout)["inputs"]
        return {name: found[name] for name in ("fields", "rows", "lengths")}

    with fake_hub(tmp_path / "hub") as (address, sent):
        env = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        found = inspect("'hf://datasets/mine/stories/data/*.jsonl'", "'hf://datasets/mine/stories@main/data/b.parquet'")
        assert found == inspect(f"{folder}/data/*.jsonl", f"{folder}/data/b.parquet")
        assert {*sent} == {"a.jsonl", "b.parquet"}
        other = run("'hf://datasets/mine/other/*'")
        assert other.returncode == 5, other.stdout
        assert "repository not found" in other.stdout and "hf auth login" in other.stdout
    away = run("'hf://datasets/mine/stories/data/*.jsonl'")
    assert away.returncode == 4 and "refused" in away.stdout


def test_a_recursive_pattern_is_refused_where_it_cannot_be_listed() -> None:
    with pytest.raises(DataError, match=r"Cannot list gs://mine/\*\*/a: .*Use `\*` instead"):
        find_files(["gs://mine/**/a"])
