"""Tokens/s from JSON lines to files of ids: pax and Hugging Face's `datasets.map`, as JSON.

    python benchmarks/tokenizing.py [--rounds 3] --peer-python PYTHON

Both tokenize the sources of Python's standard library (some 30 MB, in documents of some 2 kB) with the same byte-level
BPE of 8,192 tokens, learned from a part of them, with all cores, alternating (`peers/tokenize_text.py`). `datasets.map`
runs with one process, whose tokenizer has threads, and with a process for each core. Both must find the same number of
tokens. PYTHON has datasets and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator

import tokenizers

SCRIPT = pathlib.Path(__file__).parent / "peers" / "tokenize_text.py"
CHARACTERS = 2_000


def documents() -> Iterator[str]:
    """Pieces of the standard library's sources."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            text = path.read_text(errors="ignore")
            yield from (text[start : start + CHARACTERS] for start in range(0, len(text), CHARACTERS))


def write_tokenizer(directory: pathlib.Path, texts: list[str]) -> None:
    """A byte-level BPE, in the files that transformers writes."""
    end = "<|endoftext|>"
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    settings = {"vocab_size": 8_192, "special_tokens": [end], "initial_alphabet": alphabet, "show_progress": False}
    library.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**settings))
    library.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def tokenize(python: str, library: str, directory: pathlib.Path) -> dict[str, float]:
    """Tokens and seconds of one pass.

    Raises:
      CalledProcessError: The process failed; its error is on stderr.
    """
    env = {**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryDirectory(dir=directory) as out:
        command = [python, str(SCRIPT), library, str(directory / "text.jsonl"), str(directory), out]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env).stdout.splitlines()[-1]
    return json.loads(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", required=True)
    options = parser.parse_args()
    pythons = {"pax": sys.executable} | dict.fromkeys(("hf_datasets", "hf_datasets_processes"), options.peer_python)
    with tempfile.TemporaryDirectory() as name:
        directory, texts = pathlib.Path(name), list(documents())
        write_tokenizer(directory, texts[::10])
        (directory / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        rounds = [
            {key: tokenize(python, key, directory) for key, python in pythons.items()} for _ in range(options.rounds)
        ]
    found = {one["tokens"] for of_round in rounds for one in of_round.values()}
    assert len(found) == 1, f"numbers of tokens differ: {found}"
    result: dict = {"tokens": found.pop(), "rounds": options.rounds, "cores": len(os.sched_getaffinity(0))}
    rates = [{key: one["tokens"] / one["seconds"] for key, one in of_round.items()} for of_round in rounds]
    result["tokens_per_second"] = {key: statistics.median(rate[key] for rate in rates) for key in pythons}
    for key in list(pythons)[1:]:
        result[f"pax_over_{key}"] = statistics.median(rate["pax"] / rate[key] for rate in rates)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
