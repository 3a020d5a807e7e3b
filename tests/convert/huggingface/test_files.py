"""Files of a directory of Hugging Face: safetensors, sharded, damaged and missing; the recipe of its config.json."""

from __future__ import annotations

import json
import pathlib
import struct

import ml_dtypes
import numpy as np
import pytest
import yaml

import paxcli as pax
from paxcli.convert.huggingface.files import INDEX, SINGLE, Safetensors, read_json, write_safetensors
from paxcli.convert.huggingface.weights import recipe_of
from paxcli.errors import DataError
from tests.convert.huggingface.directories import write_directory, write_tokenizer

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.asfortranarray(np.arange(6, dtype=np.float16).reshape(3, 2)),
}
SIZES = {name: x.nbytes for name, x in TENSORS.items()}


@pytest.mark.parametrize(("shard_bytes", "count"), [(1000, 1), (33, 2), (1, 3)])
def test_what_is_written_is_read(tmp_path: pathlib.Path, shard_bytes: int, count: int):
    files = write_safetensors(tmp_path, TENSORS.items(), SIZES, shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == count
    assert files[-1] == (SINGLE if count == 1 else INDEX)
    found = Safetensors(tmp_path)
    assert found.shapes.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert (found.shapes[name].shape, found[name].dtype) == (x.shape, x.dtype)
        np.testing.assert_array_equal(found[name], x)


def damage(path: pathlib.Path, **changes: object) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["a"] |= changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


@pytest.mark.parametrize("changes", [{"shape": [3, 3]}, {"data_offsets": [0, 10**9]}, {"dtype": "F16"}], ids=str)
def test_a_lying_header_is_refused(tmp_path: pathlib.Path, changes: dict[str, object]):
    write_safetensors(tmp_path, TENSORS.items(), SIZES)
    damage(tmp_path / SINGLE, **changes)
    with pytest.raises(DataError, match=f"{SINGLE} is damaged or incomplete"):
        Safetensors(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 50, -1])
def test_a_file_cut_short_is_refused(tmp_path: pathlib.Path, kept: int):
    write_safetensors(tmp_path, TENSORS.items(), SIZES)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:kept])
    with pytest.raises(DataError, match="damaged or incomplete"):
        Safetensors(tmp_path)


def test_a_missing_shard_is_named(tmp_path: pathlib.Path):
    write_safetensors(tmp_path, TENSORS.items(), SIZES, 1)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DataError, match="00002-of-00003.safetensors does not exist"):
        Safetensors(tmp_path)


def test_an_index_that_names_a_tensor_of_no_file_is_refused(tmp_path: pathlib.Path):
    write_safetensors(tmp_path, TENSORS.items(), SIZES, 1)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["d"] = index["weight_map"]["a"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(DataError, match="names `d`, which no file has"):
        Safetensors(tmp_path)


def test_a_pickle_is_refused_with_the_call_that_converts_it(tmp_path: pathlib.Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(DataError, match="is a pickle") as caught:
        Safetensors(tmp_path)
    assert "save_pretrained(" in str(caught.value.hint)


def test_a_gguf_file_is_named(tmp_path: pathlib.Path):
    (tmp_path / "q4.gguf").write_bytes(b"GGUF")
    for source in (tmp_path, tmp_path / "q4.gguf"):
        with pytest.raises(DataError, match=r"q4\.gguf is a GGUF file") as caught:
            pax.import_weights(source, tmp_path / "run")
        assert "safetensors" in caught.value.hint


def test_quantized_tensors_are_refused(tmp_path: pathlib.Path):
    write_safetensors(tmp_path, {"a": np.zeros(2, np.int8)}.items(), {"a": 2})
    with pytest.raises(DataError, match="`a` in .* is I8; pax reads F64"):
        Safetensors(tmp_path)


def test_a_config_that_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path} has no config.json"):
        read_json(tmp_path / "config.json")
    for content in ("{", "[" * 100_000, "[1]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(DataError, match="config.json is") as caught:
            read_json(tmp_path / "config.json")
        assert "download it again" in caught.value.hint


def test_a_file_in_place_of_its_directory(tmp_path: pathlib.Path):
    source = write_directory(tmp_path / "hf", "llama2")
    with pytest.raises(DataError) as raised:
        pax.import_weights(source / "model.safetensors", tmp_path / "run")
    assert "a directory of Hugging Face's format, not a file in it" in str(raised.value.hint)


def test_the_recipe_of_an_import_is_known_without_its_weights(tmp_path: pathlib.Path):
    source = write_directory(tmp_path / "hf", "llama31")
    write_tokenizer(source)
    recipe = pax.import_weights(source, tmp_path / "run").recipe
    imported = yaml.safe_load(recipe.replace(str(tmp_path / "run" / "huggingface"), str(source)))
    (source / "model.safetensors").unlink()
    found = yaml.safe_load(recipe_of(source))
    decoding = {path for path in imported["set"] if path.startswith("decoding.")}
    assert decoding == imported["set"].keys() - found["set"].keys() == {"decoding.eos_ids"}
    assert found["recipe"] == imported["recipe"] and found["set"].items() <= imported["set"].items()
