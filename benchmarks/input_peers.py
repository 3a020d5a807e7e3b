"""Tokens/s from opening a file to the last batch of an epoch: pax and its peers, as JSON.

    python benchmarks/input_peers.py [--formats jsonl parquet tokens] [--tokens 20000000] [--rounds 3]
        [--peer-python PYTHON]

Each library reads the same file in a process of its own, alternating (`peers/input_rows.py`), with all cores that it
cares to use: Grain, tf.data and HF datasets text; LitData and PyTorch's `DataLoader` the ids of five times the text.
PYTHON has datasets, litdata and torch 2.13.0; without it, they are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pyarrow
import pyarrow.parquet
from etils import epath

from paxcli.inputs.token_files import TokenFileInfo, write_token_file
from paxcli.inputs.tokenizers import ByteTokenizer

SCRIPT = pathlib.Path(__file__).parent / "peers" / "input_rows.py"
OURS = {"jsonl": ("pax", "grain", "tf_data"), "parquet": ("pax", "grain"), "tokens": ("pax",)}
PEERS = {"jsonl": ("hf_datasets",), "parquet": ("hf_datasets",), "tokens": ("litdata", "torch")}
SUFFIXES = {"jsonl": ".jsonl", "parquet": ".parquet", "tokens": ".bin"}
TIMES = {"jsonl": 1, "parquet": 1, "tokens": 5}  # ids are read so fast that the same number would take no time


def texts(tokens: int) -> Iterator[str]:
    """Documents of words, of some 500 bytes."""
    generator = np.random.default_rng(0)
    words = np.array(["a", "line", "of", "text", "with", "some", "words", "in", "it", "training", "language", "models"])
    written = 0
    while written < tokens:
        text = " ".join(generator.choice(words, generator.integers(10, 190)))
        yield text
        written += len(text) + 1


def write(directory: pathlib.Path, kind: str, tokens: int) -> pathlib.Path:
    """Writes the file of a format."""
    path = directory / f"text{SUFFIXES[kind]}"
    documents = texts(tokens)
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": list(documents)}), path)
    else:
        tokenizer = ByteTokenizer()
        ids = (np.append(tokenizer.encode(text), np.uint16(tokenizer.eos_id)) for text in documents)
        write_token_file(epath.Path(path), ids, TokenFileInfo.of(tokenizer), [])
    return path


def read(python: str, library: str, path: pathlib.Path) -> float:
    """Tokens/s of one pass.

    Raises:
      CalledProcessError: The process failed; its error is on stderr.
    """
    command = [python, str(SCRIPT), library, str(path)]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env).stdout.splitlines()[-1]
    found = json.loads(answer)
    return found["tokens"] / found["seconds"]


def compare(kind: str, tokens: int, num_rounds: int, peer_python: str | None) -> dict:
    """Tokens/s of each library, and the median ratios."""
    pythons = dict.fromkeys(OURS[kind], sys.executable)
    if peer_python:
        pythons |= dict.fromkeys(PEERS[kind], peer_python)
    with tempfile.TemporaryDirectory() as directory:
        path = write(pathlib.Path(directory), kind, tokens * TIMES[kind])
        rounds = [{name: read(python, name, path) for name, python in pythons.items()} for _ in range(num_rounds)]
    result: dict = {"tokens": tokens * TIMES[kind]}
    result["tokens_per_second"] = {name: statistics.median(one[name] for one in rounds) for name in pythons}
    for name in list(pythons)[1:]:
        result[f"pax_over_{name}"] = statistics.median(one["pax"] / one[name] for one in rounds)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=SUFFIXES, default=list(SUFFIXES))
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python")
    options = parser.parse_args()
    result = {"rounds": options.rounds, "cores": len(os.sched_getaffinity(0))}
    for kind in options.formats:
        result[kind] = compare(kind, options.tokens, options.rounds, options.peer_python)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
