"""Throughput of a `TextInput` in one process, without a model. As JSON.

python benchmarks/input_rate.py [--tokens 100000000] [--batch-size 32] [--seq-len 1024]

`token_files`: shuffled rows of memory-mapped token files, in tokens/s; in one file, in 16, and first-fit. `text`: from
opening JSON lines to the last batch of their epoch with a byte tokenizer, in tokens/s. `eval_memory_bytes`: growth of
the process's memory over an eval epoch of the token files, without mapped pages; for a tenth and for all of the data.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import statistics
import tempfile
import time

import numpy as np
from etils import epath

from paxcli.inputs.text import TextInput
from paxcli.inputs.token_files import TokenFileInfo, write_token_file
from paxcli.inputs.tokenizers import ByteTokenizer

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None}


def write_tokens(directory: pathlib.Path, tokens: int, files: int) -> None:
    """Documents of some 500 ids."""
    generator = np.random.default_rng(0)
    for number in range(files):
        lengths = generator.integers(20, 1000, tokens // files // 510)
        documents = (generator.integers(3, 259, length).astype(np.uint16) for length in lengths)
        write_token_file(epath.Path(directory) / f"{number}.bin", documents, TokenFileInfo.of(ByteTokenizer()), [])


def rate(source: TextInput, seconds: float = 1.0) -> float:
    """Tokens/s, the median of three."""
    source.get_next()
    rates = []
    for _ in range(3):
        began, tokens = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            tokens += source.get_next().ids.size
        rates.append(tokens / passed)
    return statistics.median(rates)


def own_memory() -> int:
    """Bytes of memory that are not pages of a mapped file."""
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024


def eval_memory(source: TextInput) -> int:
    """Growth of the process over an epoch, in bytes."""
    gc.collect()
    before = own_memory()
    for _ in source.eval_batches():
        pass
    return own_memory() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=1024)
    options = parser.parse_args()
    shape = {"batch_size": options.batch_size, "seq_len": options.seq_len}
    result = {}
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        for kind, files in (("tenth", 1), ("one", 1), ("sixteen", 16)):
            (directory / kind).mkdir()
            write_tokens(directory / kind, options.tokens // (10 if kind == "tenth" else 1), files)
        inputs = {
            "one": TextInput(files=[f"{directory}/one/*.bin"], is_training=True, **shape),
            "sixteen": TextInput(files=[f"{directory}/sixteen/*.bin"], is_training=True, **shape),
            "first_fit": TextInput(files=[f"{directory}/one/*.bin"], is_training=True, packing="first_fit", **shape),
        }
        result["token_files"] = {kind: round(rate(source)) for kind, source in inputs.items()}
        epochs = {kind: TextInput(files=[f"{directory}/{kind}/*.bin"], **EPOCH, **shape) for kind in ("tenth", "one")}
        eval_memory(epochs["tenth"])
        result["eval_memory_bytes"] = {kind: eval_memory(source) for kind, source in epochs.items()}
        line = json.dumps({"text": "a line of text with some words in it. " * 13}) + "\n"
        (directory / "text.jsonl").write_text(line * (options.tokens // 10 // len(line)))
        began, tokens = time.perf_counter(), 0
        for batch in TextInput(files=[f"{directory}/text.jsonl"], **EPOCH, **shape).eval_batches():
            tokens += int(batch.weights.sum())
        result["text"] = round(tokens / (time.perf_counter() - began))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
