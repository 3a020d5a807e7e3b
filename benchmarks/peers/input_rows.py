"""Reads JSON lines into batches of packed token rows, as one library does it, and prints tokens and seconds as JSON.

    python peers/input_rows.py LIBRARY FILE

All use a token per byte, an end token after each document, documents one after the other in rows of 1,024 tokens, and
32 rows a batch. The time is from opening the file to the last batch; imports are not counted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

ROWS, LENGTH, OFFSET, END = 32, 1024, 3, 1


def to_ids(line: str | bytes) -> np.ndarray:
    """The ids of one line's text and the end token."""
    text = np.frombuffer(json.loads(line)["text"].encode(), np.uint8).astype(np.int32)
    return np.append(text + OFFSET, np.int32(END))


def pax(path: str) -> Callable[[], Iterator[np.ndarray]]:
    """`TextInput`, reading an epoch."""
    from paxcli.inputs.text import TextInput

    settings = {"batch_size": ROWS, "seq_len": LENGTH, "reset_for_eval": True, "eval_loop_num_batches": None}
    return lambda: (batch.ids for batch in TextInput(files=[path], **settings).eval_batches())


def grain(path: str) -> Callable[[], Iterator[np.ndarray]]:
    """Grain alone: a source of lines, a map, its own concatenation and batches."""
    import grain
    from grain import experimental

    def batches() -> Iterator[np.ndarray]:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
        rows = experimental.ConcatThenSplitIterDataset(
            grain.MapDataset.source(lines)
            .map(lambda line: {"ids": to_ids(line)})
            .to_iter_dataset(grain.ReadOptions(num_threads=0)),
            length_struct={"ids": LENGTH},
        )
        return (batch["ids"] for batch in rows.batch(ROWS))

    return batches


def tf_data(path: str) -> Callable[[], Iterator[np.ndarray]]:
    """tf.data, with as many threads as it wants; JSON is parsed in Python, 256 lines a call."""
    import tensorflow as tf

    def parse(lines: np.ndarray) -> np.ndarray:
        return np.concatenate([to_ids(line) for line in lines])

    def batches() -> Iterator[np.ndarray]:
        lines = tf.data.TextLineDataset(path).batch(256)
        ids = lines.map(lambda part: tf.numpy_function(parse, [part], tf.int32), num_parallel_calls=tf.data.AUTOTUNE)
        rows = ids.map(lambda part: tf.ensure_shape(part, [None])).rebatch(LENGTH)
        return rows.batch(ROWS, drop_remainder=True).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

    return batches


def hf_datasets(path: str) -> Callable[[], Iterator[np.ndarray]]:
    """Hugging Face `datasets` (tokenize, then group into rows, in all cores) and PyTorch's `DataLoader`."""
    import os
    import tempfile

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
            rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
            rows = rows.map(tokenize, batched=True, remove_columns=["text"], num_proc=cores)
            rows = rows.with_format("numpy").map(group, batched=True, num_proc=cores).with_format("torch")
            for batch in torch.utils.data.DataLoader(rows, batch_size=ROWS, drop_last=True):
                yield batch["ids"].numpy()

    return batches


def main() -> None:
    library, path = sys.argv[1:]
    batches = {"pax": pax, "grain": grain, "tf_data": tf_data, "hf_datasets": hf_datasets}[library](path)
    began, tokens = time.perf_counter(), 0
    for ids in batches():
        tokens += ids.size
    print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
