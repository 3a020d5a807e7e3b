"""Reads a file into batches of packed token rows, as one library does it, and prints tokens and seconds as JSON.

    python peers/input_rows.py LIBRARY FILE

FILE is JSON lines (`.jsonl`), Parquet (`.parquet`) or the ids of tokenized text (`.bin`, 16 bits each). From text, all
use a token per byte, an end token after each document, documents one after the other in rows of 1,024 tokens, and 32
rows a batch. The time is from opening the file to the last batch. Imports are not counted, nor is LitData's conversion
of a file of ids to its own format.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np

ROWS, LENGTH, OFFSET, END = 32, 1024, 3, 1

Batches = Callable[[], Iterator[np.ndarray]]


def to_ids(text: str) -> np.ndarray:
    """The ids of a text and the end token."""
    return np.append(np.frombuffer(text.encode(), np.uint8).astype(np.int32) + OFFSET, np.int32(END))


def line_to_ids(line: str | bytes) -> np.ndarray:
    """The ids of the text of a line of JSON, and the end token."""
    return to_ids(json.loads(line)["text"])


def pax(path: pathlib.Path) -> Batches:
    """`TextInput`, reading an epoch."""
    import grain.experimental  # noqa: F401 - `TextInput` imports it when it opens files

    from paxcli.inputs.text import TextInput

    settings = {"batch_size": ROWS, "seq_len": LENGTH, "reset_for_eval": True, "eval_loop_num_batches": None}
    return lambda: (batch.ids for batch in TextInput(files=[str(path)], **settings).eval_batches())


def grain(path: pathlib.Path) -> Batches:
    """Grain alone: a source of lines or rows, a map, its own concatenation and batches."""
    import grain
    from grain import experimental

    def batches() -> Iterator[np.ndarray]:
        if path.suffix == ".parquet":
            documents = experimental.ParquetIterDataset(str(path)).map(lambda row: {"ids": to_ids(row["text"])})
        else:
            lines = grain.MapDataset.source(path.read_bytes().splitlines())
            documents = lines.map(lambda line: {"ids": line_to_ids(line)})
            documents = documents.to_iter_dataset(grain.ReadOptions(num_threads=0))
        rows = experimental.ConcatThenSplitIterDataset(documents, length_struct={"ids": LENGTH})
        return (batch["ids"] for batch in rows.batch(ROWS))

    return batches


def tf_data(path: pathlib.Path) -> Batches:
    """tf.data, with as many threads as it wants; JSON is parsed in Python, 256 lines a call."""
    import tensorflow as tf

    def parse(lines: np.ndarray) -> np.ndarray:
        return np.concatenate([line_to_ids(line) for line in lines])

    def batches() -> Iterator[np.ndarray]:
        lines = tf.data.TextLineDataset(str(path)).batch(256)
        ids = lines.map(lambda part: tf.numpy_function(parse, [part], tf.int32), num_parallel_calls=tf.data.AUTOTUNE)
        rows = ids.map(lambda part: tf.ensure_shape(part, [None])).rebatch(LENGTH)
        return rows.batch(ROWS, drop_remainder=True).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

    return batches


def hf_datasets(path: pathlib.Path) -> Batches:
    """Hugging Face `datasets` (tokenize, then group into rows, in all cores) and PyTorch's `DataLoader`."""
    import datasets
    import torch

    def tokenize(examples: dict) -> dict:
        return {"ids": [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + OFFSET for text in examples["text"]]}

    def group(examples: dict) -> dict:
        end = np.array([END], np.int32)
        ids = np.concatenate([part for one in examples["ids"] for part in (one, end)])
        return {"ids": ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)}

    def batches() -> Iterator[np.ndarray]:
        with tempfile.TemporaryDirectory() as cache:
            cores = len(os.sched_getaffinity(0))
            kind = "parquet" if path.suffix == ".parquet" else "json"
            rows = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=cache)
            rows = rows.map(tokenize, batched=True, remove_columns=["text"], num_proc=cores)
            rows = rows.with_format("numpy").map(group, batched=True, num_proc=cores).with_format("torch")
            for batch in torch.utils.data.DataLoader(rows, batch_size=ROWS, drop_last=True):
                yield batch["ids"].numpy()

    return batches


def torch(path: pathlib.Path) -> Batches:
    """A memory-mapped file of ids behind PyTorch's `DataLoader`, in its own process, which is faster here."""
    import torch

    class Rows(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.ids = np.memmap(path, np.uint16, "r")

        def __len__(self) -> int:
            return len(self.ids) // LENGTH

        def __getitem__(self, number: int) -> torch.Tensor:
            return torch.from_numpy(self.ids[number * LENGTH : (number + 1) * LENGTH].astype(np.int64))

    return lambda: (batch.numpy() for batch in torch.utils.data.DataLoader(Rows(), batch_size=ROWS, drop_last=True))


def litdata(path: pathlib.Path) -> Batches:
    """LitData's own files of tokens, with its `StreamingDataLoader` in its own process, which is faster here."""
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    converted = path.with_suffix(".litdata")
    if not converted.exists():
        settings = {"chunk_bytes": "64MB", "item_loader": TokensLoader(), "num_workers": 1, "verbose": False}
        litdata.optimize(litdata_documents, [str(path)], str(converted), **settings)

    def batches() -> Iterator[np.ndarray]:
        rows = litdata.StreamingDataset(str(converted), item_loader=TokensLoader(block_size=LENGTH))
        return (batch.numpy() for batch in litdata.StreamingDataLoader(rows, batch_size=ROWS, drop_last=True))

    return batches


def litdata_documents(path: str) -> Iterator:
    """The ids, in pieces, as LitData's converter takes them."""
    from torch import from_numpy

    ids = np.fromfile(path, np.uint16)
    for start in range(0, len(ids), 2**16):
        yield from_numpy(ids[start : start + 2**16])


LIBRARIES = {"pax": pax, "grain": grain, "tf_data": tf_data, "hf_datasets": hf_datasets}
LIBRARIES |= {"torch": torch, "litdata": litdata}


def main() -> None:
    library, path = sys.argv[1:]
    batches = LIBRARIES[library](pathlib.Path(path))
    began, tokens = time.perf_counter(), 0
    for ids in batches():
        tokens += ids.size
    print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
