from __future__ import annotations

import gzip
import json
import os
import pathlib
import pwd
import shutil

import numpy as np
import pytest
from etils import epath

from paxcli.errors import ConfigError, DataError
from paxcli.inputs import files
from paxcli.inputs.text import TextInput
from paxcli.inputs.token_files import TokenFileInfo, write_token_file
from paxcli.inputs.tokenizers import ByteTokenizer

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None, "batch_size": 4, "seq_len": 8}
SIDECAR = {"dtype": "uint16", "vocab_size": 50257, "eos_id": 50256}


def token_input(*paths, **fields) -> TextInput:
    return TextInput(**{"files": [str(path) for path in paths], **EPOCH, **fields})


def write_foreign(path: pathlib.Path, ids: list[int], **sidecar) -> pathlib.Path:
    np.array(ids, "<u2").tofile(path)
    path.with_name(path.name + ".json").write_text(json.dumps(SIDECAR | sidecar))
    return path


def test_documents_end_at_eos_and_the_last_may_be_incomplete(tmp_path):
    path = write_foreign(tmp_path / "a.bin", [50256, 5, 6, 50256, 50256, 7, 8, 9])
    batch = token_input(path, batch_size=1).get_next()
    assert batch.ids[0].tolist() == [5, 6, 7, 8, 0, 0, 0, 0]
    assert batch.labels[0].tolist() == [6, 50256, 8, 9, 0, 0, 0, 0]
    assert batch.segment_ids[0].tolist() == [1, 1, 2, 2, 0, 0, 0, 0]
    assert batch.segment_pos[0].tolist() == [0, 1, 0, 1, 0, 0, 0, 0]


def test_the_owner_of_a_file_needs_no_name(tmp_path, monkeypatch):
    path, text = write_foreign(tmp_path / "a.bin", [5, 6, 50256]), tmp_path / "a.txt.gz"
    text.write_bytes(gzip.compress(b"text"))
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container
    assert token_input(path).num_rows() == token_input(text).num_rows() == 1
    assert token_input(path).get_state()["data"] != token_input(text).get_state()["data"]


def test_wide_ids(tmp_path):
    info = TokenFileInfo(dtype="uint32", vocab_size=2**20, eos_id=1)
    write_token_file(epath.Path(tmp_path / "a.bin"), [np.array([2**20 - 1, 70_000, 1])], info, [])
    batch = token_input(tmp_path / "a.bin", batch_size=1).get_next()
    assert batch.ids[0, :2].tolist() == [2**20 - 1, 70_000] and batch.labels[0, :2].tolist() == [70_000, 1]


def test_without_their_tokenizer_ids_are_numbers(tmp_path):
    path = write_foreign(tmp_path / "a.bin", [5, 6, 50256])
    data = token_input(path)
    assert data.ids_to_strings(data.get_next().ids[:1], [2]) == ["5 6"]
    assert data.special_tokens() == {0: "<pad>", 50256: "<eos>"}
    with pytest.raises(ConfigError, match="token files have 50257 ids, but ByteTokenizer has 259"):
        _ = data.text_tokenizer


def test_a_position_in_other_data_is_an_error(tmp_path):
    path = write_foreign(tmp_path / "a.bin", [5, 6, 7, 50256] * 20)
    state = token_input(path).get_state()
    token_input(path).set_state(state)
    write_foreign(path, [5, 6, 8, 50256] * 20)
    with pytest.raises(DataError, match="has changed since"):
        token_input(path).set_state(state)


def test_data_altered_between_runs_is_refused_and_old_files_keep_their_identity(tmp_path):
    path = epath.Path(tmp_path / "a.bin")
    documents, info = [np.array([5, 6, 7, 1])] * 50, TokenFileInfo.of(ByteTokenizer())
    write_token_file(path, documents, info, [])
    state = token_input(path).get_state()
    write_token_file(path, documents, info, [])
    token_input(path).set_state(state)
    write_token_file(path, [*documents[:25], np.array([5, 6, 8, 1]), *documents[26:]], info, [])
    with pytest.raises(DataError, match="has changed since"):
        token_input(path).set_state(state)
    sidecar = path.with_name("a.bin.json")
    fields = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps({k: v for k, v in fields.items() if not k.endswith("checksum")}))
    assert token_input(path).data_fingerprint() == 378332936  # as before the files had checksums


class TestBadFiles:
    def check(self, message: str, path, error=DataError, **fields) -> None:
        with pytest.raises(error, match=message):
            list(token_input(path, **fields).eval_batches())

    def test_no_sidecar(self, tmp_path):
        write_foreign(tmp_path / "a.bin", [1])
        (tmp_path / "a.bin.json").unlink()
        self.check("there is no .*a.bin.json", tmp_path / "a.bin")

    @pytest.mark.parametrize(
        ("sidecar", "message"),
        [
            ({"dtype": "int64"}, "dtype is 'int64'"),
            ({"eos_id": 60_000}, "are inconsistent"),
            ({"vocab_size": 100_000}, "are inconsistent"),
            ({"vocab_size": "many"}, "does not describe"),
        ],
    )
    def test_bad_sidecar(self, tmp_path, sidecar, message):
        self.check(message, write_foreign(tmp_path / "a.bin", [1], **sidecar))

    def test_invalid_description(self, tmp_path):
        path = write_foreign(tmp_path / "a.bin", [1])
        for text in ("{", "[]", '{"dtype": "uint16"}', "[" * 100_000):
            (tmp_path / "a.bin.json").write_text(text)
            self.check("a.bin.json does not describe a token file", path)

    def test_truncated(self, tmp_path):
        write_token_file(
            epath.Path(tmp_path / "a.bin"), [np.array([5, 6, 7, 1])], TokenFileInfo.of(ByteTokenizer()), []
        )
        for size in (6, 7):
            os.truncate(tmp_path / "a.bin", size)
            self.check(f"a.bin has {size} bytes; expected 4 ids of 2 bytes", tmp_path / "a.bin")

    def test_index_of_another_file(self, tmp_path):
        write_token_file(
            epath.Path(tmp_path / "a.bin"), [np.array([5, 6, 7, 1])], TokenFileInfo.of(ByteTokenizer()), []
        )
        (tmp_path / "a.bin.index").write_bytes(np.array([0, 9], "<i8").tobytes())
        self.check("a.bin.index is not the index of", tmp_path / "a.bin")

    @pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "flipped", "swapped"])
    @pytest.mark.parametrize("has_checksum", [True, False])
    def test_damaged_index(self, tmp_path, damage, has_checksum):
        path, index, sidecar = (tmp_path / f"a.bin{suffix}" for suffix in ("", ".index", ".json"))
        documents = [np.array([5, 6, 7, 1])] * 9
        write_token_file(epath.Path(path), documents, TokenFileInfo.of(ByteTokenizer()), [])
        if not has_checksum:  # as earlier versions wrote it
            fields = json.loads(sidecar.read_text())
            sidecar.write_text(json.dumps({k: v for k, v in fields.items() if not k.endswith("checksum")}))
        content = bytearray(index.read_bytes())
        if damage == "flipped":
            content[4 * 8 + 1] ^= 1
        elif damage == "swapped":
            content[8:16], content[16:24] = content[16:24], content[8:16]
        index.write_bytes(
            {"truncated": content[:-3], "longer": content + b"12345678", "empty": b""}.get(damage, content)
        )
        self.check("a.bin.index is not the index of", path)

    def test_one_flipped_bit(self, tmp_path, monkeypatch):
        write_token_file(
            epath.Path(tmp_path / "a.bin"), [np.arange(3, 250)] * 2000, TokenFileInfo.of(ByteTokenizer()), []
        )
        content = bytearray((tmp_path / "a.bin").read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / "a.bin").write_bytes(content)
        self.check("a.bin is damaged: its ids do not match their checksum", tmp_path / "a.bin")
        monkeypatch.setattr("paxcli.inputs.corpus._CHECKED_BYTES", 2**19)
        token_input(tmp_path / "a.bin").get_next()

    @pytest.mark.parametrize("checked_bytes", [2**32, 0])
    def test_ids_beyond_the_vocabulary(self, tmp_path, monkeypatch, checked_bytes):
        monkeypatch.setattr("paxcli.inputs.corpus._CHECKED_BYTES", checked_bytes)
        path = write_foreign(tmp_path / "a.bin", [1, 60_000, 2])
        if checked_bytes:  # at the start, before a batch is read
            with pytest.raises(DataError, match="a.bin contains id 60000"):
                token_input(path).check_data()
        self.check("a.bin contains id 60000, but its vocab_size is 50257", path)
        self.check("50257 ids, but the model's vocab_size is 32000", path, error=ConfigError, vocab_size=32_000)

    def test_of_different_tokenizers(self, tmp_path):
        write_foreign(tmp_path / "a.bin", [1])
        write_foreign(tmp_path / "b.bin", [1], vocab_size=60_000)
        self.check("b.bin has vocab_size 60000, .*a.bin has 50257", tmp_path / "*.bin")

    def test_empty(self, tmp_path):
        self.check("all files are empty", write_foreign(tmp_path / "a.bin", []))


def test_files_of_a_bucket_are_listed_and_copied_once(tmp_path, monkeypatch):
    from etils.epath import gpath

    bucket = tmp_path / "bucket"
    bucket.mkdir()
    write_foreign(bucket / "a.bin", [5, 6, 50256])
    (bucket / "a.txt").write_text("text")
    local = gpath._PREFIX_TO_BACKEND[None]

    class Bucket(type(local)):
        """Local files, with `gs://bucket` in a directory."""

        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name.startswith("_") or not callable(found):
                return found
            there = lambda value: str(value).replace("gs://bucket", str(bucket))  # noqa: E731
            return lambda path, *args, **kwargs: (
                [value.replace(str(bucket), "gs://bucket") for value in result]
                if isinstance(result := found(there(path), *args, **kwargs), list) and name == "glob"
                else result
            )

    monkeypatch.setattr(gpath._GPath, "_backend", property(lambda self: Bucket() if self._uri_scheme else local))
    assert token_input("gs://bucket/*.txt").get_next().ids[0, :5].tolist() == [2, *ByteTokenizer().encode("text")]
    for _ in range(2):
        data = token_input("gs://bucket/a.bin", cache_dir=str(tmp_path / "cache"))
        assert data.get_next().ids[0, :2].tolist() == [5, 6]
    assert (tmp_path / "cache" / "bucket" / "a.bin").exists()
    shutil.rmtree(bucket)
    with pytest.raises(DataError, match="There is no file gs://bucket/a.bin"):
        files.find_files(["gs://bucket/a.bin"])
