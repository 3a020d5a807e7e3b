from __future__ import annotations

import os
import sysconfig

import fiddle as fdl
import numpy as np
import pytest

from paxcli.errors import ConfigError, DataError
from paxcli.inputs.stdlib import StdlibInput
from paxcli.inputs.text import TextInput
from paxcli.inputs.tokenizers import ByteTokenizer

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None, "batch_size": 4}


def text_input(*files, **fields) -> TextInput:
    return TextInput(**{"files": [str(file) for file in files], "seq_len": 8, **EPOCH, **fields})


def documents(data: TextInput) -> list[bytes]:
    """The documents of an epoch, from its ids alone."""
    ids = np.concatenate([batch.ids[batch.weights > 0] for batch in data.eval_batches()]).astype(np.uint8)
    return [bytes(part[1:] - 3) for part in np.split(ids, np.flatnonzero(ids == ByteTokenizer.bos_id))[1:]]


def test_an_epoch_has_all_documents_of_the_files(tmp_path):
    texts = {"b.txt": "second", "a.txt": "first: naïve ☃", "sub/c.txt": "x" * 30}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    data = text_input(tmp_path / "**" / "*.txt", tmp_path / "a.txt")
    assert documents(data) == [texts[name].encode() for name in sorted(texts)]


def test_working_directory_may_have_wildcards_in_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "data [v2]"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.txt").write_text("abc")
    monkeypatch.chdir(folder)
    for pattern in ("*/*.txt", "**/*.txt", "../data*/sub/*"):
        assert documents(text_input(pattern)) == [b"abc"]


def test_labels_end_each_document_and_text_can_be_read(tmp_path):
    (tmp_path / "a").write_text("abc")
    data = text_input(tmp_path / "a", batch_size=1)
    batch = data.get_next()
    assert data.ids_to_strings(batch.ids, [3]) == ["ab"]
    assert batch.ids[0, :4].tolist() == [2, *ByteTokenizer().encode("abc")]
    assert batch.labels[0, :4].tolist() == [*ByteTokenizer().encode("abc"), 1]
    assert batch.weights[0].tolist() == [1] * 4 + [0] * 4


def test_builds_from_a_config(tmp_path):
    (tmp_path / "a").write_text("abc")
    config = TextInput.config(files=[str(tmp_path / "a")], seq_len=8, batch_size=1)
    assert config.tokenizer.__fn_or_cls__ is ByteTokenizer
    assert fdl.build(config).get_next().ids.shape == (1, 8)


class TestSplit:
    def test_is_disjoint_complete_and_moves_with_the_data(self, tmp_path):
        names = [f"{i}/{i}.txt" for i in range(200)]
        sets = {}
        for place in ("here", "there"):
            for name in names:
                (tmp_path / place / name).parent.mkdir(parents=True)
                (tmp_path / place / name).write_text(name)
            for split in ("train", "eval"):
                data = text_input(tmp_path / place / "**" / "*.txt", split=split, eval_fraction=0.1)
                sets[place, split] = documents(data)
        assert sets["here", "train"] == sets["there", "train"]
        train, held_out = sets["here", "train"], sets["here", "eval"]
        assert sorted(train + held_out) == sorted(name.encode() for name in names)
        assert 5 < len(held_out) < 40

    def test_no_files_is_an_error(self, tmp_path):
        (tmp_path / "only").write_text("abc")
        with pytest.raises(DataError, match="none of 1 files is in split `eval`"):
            text_input(tmp_path / "*", split="eval").check_data()


class TestBadData:
    def check(self, message: str, *files, error=DataError, **fields) -> None:
        with pytest.raises(error, match=message) as caught:
            text_input(*files, **fields).check_data()
        assert caught.value.hint

    def test_missing(self, tmp_path):
        self.check("missing.txt", tmp_path / "missing.txt")
        self.check(r"No file matches .*\*\.txt", tmp_path / "*.txt")

    def test_empty(self, tmp_path):
        (tmp_path / "empty.txt").touch()
        self.check("empty.txt is empty", tmp_path / "empty.txt")
        self.check("all files are empty: .*empty.txt", tmp_path / "*.txt")

    def test_nothing_is_left(self, tmp_path):
        (tmp_path / "a.txt").write_text("some text")
        (tmp_path / "b.txt").write_bytes(b"na\xefve")
        self.check("all documents are dropped or skipped: .*a.txt", tmp_path / "a.txt", drop_longer_than=3)
        self.check("all documents are dropped or skipped: .*b.txt", tmp_path / "b.txt", on_bad_record="skip")

    def test_not_utf8_names_the_byte(self, tmp_path):
        (tmp_path / "latin.txt").write_bytes(b"na\xefve")
        self.check("latin.txt is not UTF-8 text: byte 2 is 0xef", tmp_path / "latin.txt")

    def test_directory(self, tmp_path):
        self.check("Is a directory", tmp_path)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_without_permission(self, tmp_path):
        (tmp_path / "secret.txt").write_text("abc")
        (tmp_path / "secret.txt").chmod(0)
        self.check("secret.txt: Permission denied", tmp_path / "secret.txt")

    def test_vanished_between_listing_and_reading(self, tmp_path):
        (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
        self.check("dangling.txt", tmp_path / "*.txt")

    def test_ids_beyond_the_models_vocabulary(self, tmp_path):
        (tmp_path / "a").write_text("abc")
        self.check("has 259 ids, but the model's vocab_size is 256", tmp_path / "a", vocab_size=256, error=ConfigError)

    def test_a_position_in_other_data_is_an_error(self, tmp_path):
        (tmp_path / "a").write_text("abc")
        state = text_input(tmp_path / "a").get_state()
        (tmp_path / "a").write_text("abd")
        with pytest.raises(DataError, match="has changed since"):
            text_input(tmp_path / "a").set_state(state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": "evla"}, "split must be one of train, eval, not evla"),
        ({"eval_fraction": 1.0}, "eval_fraction must be above 0 and below 1, not 1.0"),
        ({"files": []}, "files is"),
        ({"files": "a.txt"}, "files is 'a.txt'"),
        ({"seq_len": 0}, "seq_len must be at least 1"),
    ],
)
def test_invalid_settings_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        text_input("a", **fields).validate()


class TestStdlib:
    def test_splits_hold_all_sources_once(self):
        train, held_out = (
            {file.path for file in StdlibInput(is_training=training)._files} for training in (True, False)
        )
        assert not train & held_out
        root = sysconfig.get_path("stdlib")
        assert {f"{root}/json/decoder.py", f"{root}/random.py"} <= {str(path) for path in train | held_out}
        assert not [path for path in train | held_out if {"site-packages", "test", "tests"} & set(path.parts)]

    def test_an_eval_takes_seconds(self):
        data = StdlibInput(**{**EPOCH, "batch_size": 8}, seq_len=256)
        assert 100 <= sum(1 for _ in data.eval_batches()) <= 250

    def test_skips_and_logs_files_that_are_not_utf8(self, tmp_path, monkeypatch, caplog):
        (tmp_path / "good.py").write_text("pass")
        (tmp_path / "latin.py").write_bytes(b"\xff")
        (tmp_path / "test").mkdir()
        (tmp_path / "test" / "test_good.py").write_text("test")
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        with caplog.at_level("INFO", logger="pax"):
            data = StdlibInput(**EPOCH, seq_len=8, split="train")
            assert documents(data) == [b"pass"]
        assert "latin.py" in caplog.text

    def test_takes_no_files(self):
        with pytest.raises(ConfigError, match="does not support `files`"):
            StdlibInput(**EPOCH, seq_len=8, files=["a"]).validate()


def test_order_and_splits_never_change(tmp_path):
    """If these numbers change, old runs no longer resume where they were, and held-out files are trained on."""
    (tmp_path / "a").write_text("x" * 159)
    data = text_input(tmp_path / "a", seq_len=16, reset_for_eval=False, eval_loop_num_batches=1, is_training=True)
    assert data.order(np.arange(20)).tolist() == [8, 6, 7, 9, 0, 5, 1, 2, 4, 3, 2, 0, 9, 1, 5, 7, 6, 8, 4, 3]
    assert [i for i in range(100) if data._split_of(f"{i}.txt") == "eval"] == [6, 16, 45, 50, 60, 84]


def test_the_order_is_that_of_grains_shuffle_in_every_epoch(tmp_path):
    import grain

    (tmp_path / "a").write_text("x" * 159)
    training = {
        "reset_for_eval": False,
        "eval_loop_num_batches": 1,
        "is_training": True,
        "input_random_seed": 2**32 - 1,
    }
    data = text_input(tmp_path / "a", **training)
    expected = grain.MapDataset.range(data.num_rows()).shuffle(seed=2**32 - 1).repeat()
    positions = [*range(3 * data.num_rows()), 10**12]
    assert data.order(np.array(positions)).tolist() == [expected[position] for position in positions]
