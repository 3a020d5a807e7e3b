"""What an evaluation reads, and the metrics that follow from it."""

from __future__ import annotations

import io
import itertools
import json
import math
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import sentencepiece

import paxcli as pax
from paxcli.errors import DataError
from paxcli.inputs.base_input import BaseInput
from paxcli.inputs.text import TextInput
from paxcli.inputs.tokenizers import ByteTokenizer, SentencePieceTokenizer, count_bytes
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.metrics.text import values_text
from paxcli.nested_map import NestedMap
from paxcli.training import evaluate
from paxcli.training.task import Metrics
from tests.training.runs import evals
from tests.training.test_loop import Messages, small_recipe

TEXTS = {"a.txt": "Größe: 3 µm\n" * 7, "b.txt": "one line\n", "c.md": ""}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pax.Run:
    directory = tmp_path_factory.mktemp("run")
    pax.train(small_recipe(1), directory, progress=Messages())
    return pax.Run(directory)


@pytest.fixture(scope="module")
def text_files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def test_files_are_read_to_the_last_byte(run: pax.Run, text_files: pathlib.Path) -> None:
    ((name, values),) = run.evaluate(files=[f"{text_files}/*.txt"]).items()
    num_bytes = sum(len(TEXTS[name].encode()) for name in ("a.txt", "b.txt"))
    num_targets = num_bytes + 2  # the end of each document
    rows = math.ceil(num_targets / 16)
    assert name == "files"
    assert (values["num_tokens"], values["num_batches"], values["data_share"]) == (num_targets, math.ceil(rows / 4), 1)
    np.testing.assert_allclose(values["perplexity"], np.exp(values["log_pplx"]), rtol=1e-6)
    bits = values["log_pplx"] * num_targets / np.log(2)
    np.testing.assert_allclose(values["bits_per_byte"], bits / num_bytes, rtol=0.02)  # characters split between rows
    written = json.loads((pathlib.Path(run.path) / "eval" / "1-files.json").read_text())
    assert written["metrics"]["files"] == values


def test_a_result_whose_file_cannot_be_written_is_returned(run: pax.Run, caplog: pytest.LogCaptureFixture) -> None:
    (pathlib.Path(run.path) / "decoded").write_text("in the way, like a directory without permission")
    (one,) = run.generate("x", max_tokens=1)
    assert one.prompt == "x" and "The results of step 1 were not written" in caplog.text


def test_a_missing_file_is_an_error(run: pax.Run, text_files: pathlib.Path) -> None:
    with pytest.raises(DataError, match=r"d\.txt"):
        run.evaluate(files=[f"{text_files}/a.txt", f"{text_files}/d.txt"])


def test_a_part_of_the_data_is_reported_as_such(tmp_path: pathlib.Path) -> None:
    sets: dict[str, Any] = {"eval_inputs": None, "eval_inputs.0.reset_for_eval": False}
    result = pax.train(small_recipe(1, **sets, **{"eval_inputs.0.eval_loop_num_batches": 3}), tmp_path).result
    assert result is not None
    (values,) = result["eval"].values()
    assert values["num_batches"] == 3 and values["num_tokens"] == 3 * 4 * 16 and 0 < values["data_share"] < 0.01
    assert values_text(values).endswith(f"num_batches 3 · on {values['data_share']:.2%} of its data")
    assert "data" not in values_text(values | {"data_share": 1.0})


@pytest.mark.parametrize("unweighted", ["all", "first"])
def test_an_evaluation_without_weights_has_no_loss(
    unweighted: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It had a perplexity of 1, at which early stopping ended the run."""
    read, numbers = BaseInput.eval_batches, itertools.count()

    def eval_batches(source: BaseInput) -> Iterator[Any]:
        drops = unweighted == "all" or next(numbers) == 0
        for batch in read(source):
            yield NestedMap({**batch, "weights": batch.weights * (0 if drops else 1)})

    monkeypatch.setattr(BaseInput, "eval_batches", eval_batches)
    sets: dict[str, Any] = {"eval_inputs": None, "eval_inputs.0.reset_for_eval": False, "eval_interval_steps": 1}
    sets |= {"eval_inputs.0.eval_loop_num_batches": 1, "early_stopping_fn.target": 0.5}
    result = pax.train(small_recipe(2, **sets), tmp_path, progress=Messages()).result
    assert result is not None and result["steps"] == 2
    warning = "Eval input `stdlib`: all target weights are 0, so its loss is undefined."
    assert caplog.messages.count(warning) == (2 if unweighted == "all" else 1)
    without, last = evals(tmp_path)[1], evals(tmp_path)[2]
    assert without.keys() == {"step", "split", "num_examples", "num_tokens", "num_batches", "data_share"}
    assert ("log_pplx" in last) == (unweighted == "first")
    values = pax.Run(tmp_path).evaluate()["stdlib"]
    assert ("perplexity" in values) == (unweighted == "first") and values["num_batches"] == 1


def test_a_loss_that_is_the_log_perplexity_is_shown_once() -> None:
    assert values_text({"log_pplx": 1.5, "loss": 1.5}) == "log_pplx 1.5000"
    assert values_text({"log_pplx": 1.5, "loss": 1.75}) == "log_pplx 1.5000 · loss 1.7500"
    assert values_text({"loss": 1.5}) == "loss 1.5000"


@pytest.mark.parametrize("text", ["", "plain", "µ€😀", "two\x00documents"])
def test_bytes_of_text(text: str) -> None:
    ids = np.concatenate([np.append(ByteTokenizer().encode(part), 1) for part in text.split("\x00")])
    before = np.append(-1, ids[:-1])
    assert count_bytes(ByteTokenizer(), ids, before) == len(text.replace("\x00", "").encode())
    halves = (slice(2), slice(2, None))  # cut characters
    assert sum(count_bytes(ByteTokenizer(), ids[half], before[half]) for half in halves) == sum(ids > 2)


class Pieces:
    """A tokenizer whose ids are not bytes."""

    eos_id, decode = 1, ByteTokenizer().decode


def test_a_replacement_character_of_the_text_has_its_three_bytes() -> None:
    text = "a\ufffdb"
    ids = np.append(ByteTokenizer().encode(text), [1, *ByteTokenizer().encode("µ")[:1]])
    before = np.append(-1, ids[:-1])
    assert count_bytes(Pieces(), ids, before) == len(text.encode()) + 1  # the last character is incomplete


@pytest.mark.parametrize("bos_id", [-1, 3])
@pytest.mark.parametrize("seq_len", [5, 64])
@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_spaces_where_rows_and_documents_begin_are_counted(
    bos_id: int, seq_len: int, packing: str, tmp_path: pathlib.Path
) -> None:
    """SentencePiece drops the space at the start of what it decodes: the bytes of many rows were too few."""
    texts = [f"{i} bottles of größe {i} hang on the wall, and {'of ' * (i % 5)}others" for i in range(30)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 2),
        model_writer=model,
        vocab_size=120,
        hard_vocab_limit=False,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": bos_id, "minloglevel": 2},
    )
    (tmp_path / "a.model").write_bytes(model.getvalue())
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = SentencePieceTokenizer(path=str(tmp_path / "a.model"))
    epoch: dict[str, Any] = {"reset_for_eval": True, "eval_loop_num_batches": None, "batch_size": 4}
    source = TextInput(
        files=[str(tmp_path / "a.jsonl")], tokenizer=lambda: tokenizer, seq_len=seq_len, packing=packing, **epoch
    )
    counts = sum((evaluate._count(batch, tokenizer) for batch in source.eval_batches()), Counter[str]())
    # Without BOS, the first token of a document is not a target.
    first = 0 if bos_id >= 0 else sum(len(tokenizer.decode(tokenizer.encode(text)[:1]).encode()) for text in texts)
    assert counts["bytes"] == sum(len(text.encode()) for text in texts) - first


def test_an_answer_begins_with_the_space_that_its_tokenizer_adds() -> None:
    """The answer of a SeqIO task is tokenized alone; the space before its first word is not in its text."""

    class Words(Pieces):
        def decode(self, ids: np.ndarray) -> str:
            return "".join(f" word{i}" for i in ids if i > 1)[1:]

    ids, labels = np.array([[0, 5, 6, 7]]), np.array([[5, 6, 7, 1]])
    batch = NestedMap(ids=ids, labels=labels, weights=np.array([[0.0, 1.0, 1.0, 1.0]]))
    assert evaluate._count(batch, Words())["bytes"] == len("word6 word7")  # pyrefly: ignore


def test_processes_that_read_the_same_rows_count_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(tree: Any) -> Any:
        return jax.tree.map(lambda x: np.stack([x] * 4), tree)

    monkeypatch.setattr(evaluate.multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(evaluate, "infeed_shard", lambda mesh: (2, 0))
    assert evaluate._over_processes(Counter(num_tokens=2**31 + 5), build_mesh(Mesh())) == {"num_tokens": 2**32 + 10}


def test_bits_per_byte_of_more_targets_than_float32_counts() -> None:
    counts = {"targets": 30_000_000, "bytes": 30_000_000}
    values = evaluate._of_perplexity(math.log(2), float(np.float32(30_000_000) + 64), counts)
    assert values == {"perplexity": pytest.approx(2), "bits_per_byte": pytest.approx(1)}
    assert "bits_per_byte" not in evaluate._of_perplexity(1.0, 30_000_000 * 0.15, counts)


def test_many_batches_are_added_up_without_bias() -> None:
    """In float32, the weights of batches of 1,023 tokens are rounded up once there are more than 2^25 tokens."""
    means = 3 + 0.1 * np.random.default_rng(0).normal(size=40_000)
    batches: list = [{"log_pplx": (np.float32(mean * 1023), np.float32(1023))} for mean in means]
    value, weight = Metrics().combine(batches)["log_pplx"]
    assert weight == 1023 * 40_000
    assert value / weight == pytest.approx(means.mean(), rel=1e-6)
