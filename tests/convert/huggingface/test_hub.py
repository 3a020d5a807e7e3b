"""Models on the hub: what is downloaded, and what each failure is called, with a hub on this machine."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Iterator

import pytest

import paxcli as pax
from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError, DataError, MissingError, RemoteError
from paxcli.inputs.hub import find_model
from tests.convert.huggingface.directories import write_directory, write_tokenizer
from tests.convert.huggingface.fake_hub import COMMIT, fake_hub


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub with `mine/llama`; the names of the files that it sent."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    (tmp_path / "models/mine").mkdir(parents=True)
    folder = write_directory(tmp_path / "models/mine/llama", "llama2")
    write_tokenizer(folder)
    for other in ("pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "README.md"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"large")
    with fake_hub(tmp_path / "models") as (address, sent):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        yield sent


def test_a_model_of_the_hub_is_imported_and_downloaded_once(hub: list[str], tmp_path: pathlib.Path):
    done = pax.import_weights("mine/llama", tmp_path / "run")
    assert (done.family, done.source.rpartition("/")[2]) == ("llama", COMMIT)
    description = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {*hub} == {*description, "model.safetensors"} and hub[-1] == "model.safetensors"
    count = len(hub)
    again = pax.import_weights(f"mine/llama@{COMMIT}", tmp_path / "again", dry_run=True)
    assert not again.tensors and len(hub) == count
    (one,) = pax.Run(tmp_path / "run").generate("abc", max_tokens=2, temperature=0)
    assert one.ids


def test_an_architecture_that_pax_does_not_have_is_refused_before_the_weights_come(hub, tmp_path: pathlib.Path):
    write_directory(tmp_path / "models/mine/phi", "llama2", model_type="phimoe")
    with pytest.raises(ConfigError, match="it lacks its router"):
        pax.import_weights("mine/phi", tmp_path / "run")
    assert hub == ["config.json"]


def test_a_directory_comes_before_a_model_of_the_same_name(hub, tmp_path: pathlib.Path):
    (tmp_path / "mine").mkdir()
    write_directory(tmp_path / "mine/llama", "llama2")
    assert find_model("mine/llama") == "mine/llama" and not hub


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "mine/lama",
            DataError,
            "no directory mine/lama, and no model of this name and revision on the Hugging Face Hub",
        ),
        (
            "mine/llama@v2",
            DataError,
            "no directory mine/llama@v2, and no model of this name and revision on the Hugging Face Hub",
        ),
        ("mine/gated", MissingError, "mine/gated is a gated model"),
        (
            "mine/a--b",
            DataError,
            "no directory mine/a--b, and no model of this name and revision on the Hugging Face Hub",
        ),
        ("nowhere", DataError, "There is no directory /.*nowhere"),
        ("../nowhere", DataError, "There is no directory /.*nowhere"),
        ("runs/llama/deep", DataError, "There is no directory /.*runs/llama/deep"),
    ],
)
def test_what_cannot_be_had_is_named(name, kind, message, hub, tmp_path: pathlib.Path):
    shutil.copytree(tmp_path / "models/mine/llama", tmp_path / "models/mine/gated")
    (tmp_path / "models/mine/gated/gated").touch()
    with pytest.raises(kind, match=message):
        pax.import_weights(name, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_that_cannot_be_reached(offline, hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RemoteError, match="no directory mine/llama, and the Hugging Face Hub cannot be reached: "):
        find_model("mine/llama")


def test_a_download_that_breaks_is_continued_by_the_next(hub, tmp_path: pathlib.Path):
    (tmp_path / "models/mine/llama/cut").touch()
    with pytest.raises(RemoteError, match="peer closed connection"):
        find_model("mine/llama", COMMIT)
    (tmp_path / "models/mine/llama/cut").unlink()
    assert pathlib.Path(find_model("mine/llama", COMMIT), "model.safetensors").exists()


def test_the_weights_are_those_of_the_commit_of_the_description(hub: list[str], tmp_path: pathlib.Path):
    (tmp_path / "models/mine/llama/moved").touch()
    done = pax.import_weights("mine/llama", tmp_path / "run", dry_run=True)
    assert done.source.endswith(COMMIT) and hub[-1] == "model.safetensors"
    with pytest.raises(DataError, match="no model of this name and revision"):
        find_model("mine/llama")


def test_a_tokenizer_of_the_hub(hub: list[str], tmp_path: pathlib.Path):
    def tokenizer(name: str) -> dict:
        values = resolve("tiny", sets=[f"tokenizer=hf:{name}"]).values
        return {field: values[f"train_input.tokenizer.{field}"].value for field in ("path", "bos_token", "eos_token")}

    found = tokenizer("mine/llama")
    assert (found["bos_token"], found["eos_token"]) == ("<s>", "</s>")
    assert pathlib.Path(found["path"]).parent.name == COMMIT and "model.safetensors" not in hub
    count = len(hub)
    assert tokenizer(f"mine/llama@{COMMIT}") == found and len(hub) == count
    with pytest.raises(DataError, match="no directory mine/lama, and no model of this name"):
        tokenizer("mine/lama")
    with pytest.raises(DataError, match="no tokenizer file mine/tokenizer.json"):
        tokenizer("mine/tokenizer.json")
