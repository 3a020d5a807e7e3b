from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from paxcli.inputs.text import TextInput

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None, "batch_size": 4, "seq_len": 16}


@pytest.fixture
def corpus(tmp_path):
    for i in range(3):
        lines = [json.dumps({"text": f"document {i}.{n}"}) for n in range(50)]
        (tmp_path / f"{i}.jsonl").write_text("\n".join(lines))
    return tmp_path


def as_json(result) -> dict:
    assert len(result.stdout.splitlines()) == 1, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_tokenizes_what_training_reads_from_text(pax, corpus):
    planned = as_json(pax("data", "tokenize", "*.jsonl", "--out", "tokens", "--dry-run", "--json"))
    assert (planned["parts"], planned["parts_done"]) == (1, 0)
    assert not (corpus / "tokens").exists()
    done = pax("data", "tokenize", "*.jsonl", "--out", "tokens", "--num-workers", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert "150 documents" in done.stderr and "\x1b" not in done.stderr
    result = as_json(done)
    assert (result["documents"], result["vocab_size"], result["bad_records"]) == (150, 259, [])
    assert result["tokens"] == (corpus / "tokens" / "part-00000.bin").stat().st_size / 2
    of_text = TextInput(files=[f"{corpus}/*.jsonl"], **EPOCH)
    of_tokens = TextInput(files=[f"{corpus}/tokens/*.bin"], **EPOCH)
    for expected, batch in zip(of_text.eval_batches(), of_tokens.eval_batches(), strict=True):
        for name in expected:
            np.testing.assert_array_equal(expected[name], batch[name])

    written = (corpus / "tokens" / "part-00000.bin").stat().st_mtime_ns
    again = as_json(pax("data", "tokenize", "*.jsonl", "--out", "tokens", "--json"))
    assert {**again, "seconds": 0} == {**result, "seconds": 0, "parts_done": 1}
    assert (corpus / "tokens" / "part-00000.bin").stat().st_mtime_ns == written

    content = (corpus / "tokens" / "part-00000.bin").read_bytes()
    (corpus / "tokens" / "part-00000.bin").write_bytes(content[:100])
    repeated = as_json(pax("data", "tokenize", "*.jsonl", "--out", "tokens", "--json"))
    assert {**repeated, "seconds": 0} == {**result, "seconds": 0}
    assert (corpus / "tokens" / "part-00000.bin").read_bytes() == content

    verified = as_json(pax("data", "verify", "tokens/*.bin", "--json"))
    assert verified == {"files": 1, "tokens": result["tokens"], "without_checksum": []}
    other = pax("data", "tokenize", "0.jsonl", "--out", "tokens", "--json")
    assert other.returncode == 2
    assert "another value of `files`" in as_json(other)["error"]["message"]


def test_tokens_of_other_contents_are_not_taken_for_done(tmp_path, capsys, monkeypatch):
    from paxcli.cli.main import app, run
    from tests.convert.huggingface.directories import write_tokenizer

    def tokenize(tokenizer: str) -> str:
        run(app, ["data", "tokenize", "a.jsonl", "--out", tokenizer, f"--tokenizer={tokenizer}", "--json"])
        return json.loads(capsys.readouterr().out).get("error", {"message": ""})["message"]

    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    text = json.dumps({"text": "a" * 100}) + "\n"
    (tmp_path / "a.jsonl").write_text(text)
    assert tokenize("byte") == tokenize("hf:.") == tokenize("hf:.") == ""
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text() + "\n")
    assert "another value of `tokenizer_checksum`" in tokenize("hf:.")
    (tmp_path / "a.jsonl").write_text(text.replace("a", "b"))
    assert "another value of `files`" in tokenize("byte")


def test_tokens_of_another_format_are_not_taken_for_done(tmp_path, capsys, monkeypatch):
    """Versions before CSV read such a file as one text, and recorded the format as null."""
    from paxcli.cli.main import app, run

    def tokenize(*options: str) -> dict:
        run(app, ["data", "tokenize", "a.csv", "--out", "tokens", *options, "--json"])
        return json.loads(capsys.readouterr().out)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text\na\nb\n")
    assert tokenize("--format", "text")["documents"] == 1
    assert "another value of `format`" in tokenize()["error"]["message"]
    sidecar = tmp_path / "tokens" / "part-00000.bin.json"
    info = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(info | {"made_from": info["made_from"] | {"format": None}}))
    assert "another value of `format`" in tokenize()["error"]["message"]
    shutil.rmtree(tmp_path / "tokens")
    assert tokenize()["documents"] == 2
    assert tokenize("--format", "csv")["parts_done"] == 1


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (["nowhere/*"], 5, "No file matches nowhere/*"),
        (["*.jsonl", "--text-field", "txt"], 5, "0.jsonl, line 1: `txt` is missing; fields: text"),
        (["*.jsonl", "--tokenizer", "missing.model"], 5, "no tokenizer file missing.model"),
        (["*.jsonl", "--tokenizer", "0.jsonl.model"], 5, "0.jsonl.model is not a SentencePiece model"),
        (["*.jsonl", "--tokenizer", "missing.json"], 5, "no tokenizer file missing.json"),
        (["*.jsonl", "--tokenizer", "tokenizer.json"], 2, "does not define an end-of-document token"),
        (["*.jsonl", "--tokenizer", "hf:."], 2, "does not define an end-of-document token"),
        (["*.jsonl", "--tokenizer", "bytes"], 2, "no tokenizer `bytes`"),
        (["*.jsonl", "--tokenizer", "byte", "--eos-token", "x"], 2, "Tokenizer byte defines its own eos"),
    ],
)
def test_mistakes_are_named(pax_here, corpus, arguments, exit_code, says):
    (corpus / "0.jsonl.model").write_bytes(b"no model")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(corpus / "tokenizer.json"))
    result = pax_here("data", "tokenize", *arguments, "--out", "tokens", "--json")
    error = as_json(result)["error"]
    assert (result.returncode, error["exit_code"]) == (exit_code, exit_code)
    assert says in error["message"]
    assert "Traceback" not in result.stderr
    assert not list(corpus.glob("tokens/*"))


def test_a_tokenizer_file_and_its_end_token(pax_here, corpus):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "dog": 1}, unk_token="<unk>"))
    library.save(str(corpus / "tokenizer.json"))
    options = ("--tokenizer", "tokenizer.json", "--eos-token", "dog", "--bos-token", "<unk>")
    done = pax_here("data", "tokenize", "*.jsonl", "--out", "tokens", *options, "--json")
    assert (as_json(done)["vocab_size"], as_json(done)["documents"]) == (2, 150)
    ids = np.fromfile(corpus / "tokens" / "part-00000.bin", np.uint16)
    assert ids.tolist() == [0, 0, 1] * 150


def test_what_is_not_text_or_not_a_token_file_is_refused(pax_here, corpus):
    assert pax_here("data", "tokenize", "*.jsonl", "--out=tokens").returncode == 0
    again = pax_here("data", "tokenize", "tokens/*.bin", "--out=more")
    assert again.returncode == 2 and "token files" in again.stderr and not (corpus / "more").exists()
    directory = pax_here("data", "verify", "tokens")
    assert directory.returncode == 5 and "is a directory" in directory.stderr and "/tokens/*.bin'" in directory.stderr


def test_reader_of_progress_may_go(corpus):
    command = [sys.executable, "-m", "paxcli", "data", "tokenize", "*.jsonl", "--out", "tokens"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, cwd=corpus, stdout=subprocess.PIPE, stderr=write, text=True)
    os.close(write)
    assert (done.returncode, "150 documents" in done.stdout) == (0, True)
