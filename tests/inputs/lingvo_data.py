"""Lingvo input generators for tests, and their files. Imports Lingvo."""

from __future__ import annotations

import pathlib
from typing import Any

import tensorflow as tf  # noqa: TID253
from lingvo.core import base_input_generator, generic_input, py_utils, tokenizers  # noqa: TID253
from lingvo.tasks.mt import input_generator as translation  # noqa: TID253


class Numbers(base_input_generator.BaseInputGeneratorFromFiles):
    """Records that are numbers, by GenericInput: `num`, `weights`, and by Lingvo's infeed context `host`, all [B]."""

    def _DataSourceFromFilePattern(self, file_pattern, input_source_weights=None, **extra):
        arguments = self.CommonInputOpArgs()
        arguments["require_sequential_order"] = bool(self.cluster.require_sequential_input_order)
        host = arguments["input_replica_id"]

        def process(record):
            num = tf.strings.to_number(record, tf.int32)
            return py_utils.NestedMap(num=num, weights=tf.ones([]), host=tf.constant(host), name=record), 1

        batch, _ = generic_input.GenericInput(processor=process, file_pattern=file_pattern, **arguments)
        return batch


def _count(num: int = 11, size: int = 1) -> tf.data.Dataset:
    return tf.data.Dataset.range(num).map(lambda i: {"a": {"b": i}, "data": i}).batch(size)


# A `tf.data.Dataset`, as Lingvo's users define one.
Counted = base_input_generator.DefineTFDataInput("Counted", _count)


def numbers(directory: pathlib.Path, count: int = 120, files: int = 6, **params: Any) -> Any:
    """Params of `Numbers` over `count` records in `files` files."""
    for number in range(files):
        with tf.io.TFRecordWriter(str(directory / f"{number}.tfrecord")) as writer:
            for value in range(number * count // files, (number + 1) * count // files):
                writer.write(b"%d" % value)
    files_read = {"file_pattern": f"tfrecord:{directory}/*.tfrecord", "file_random_seed": 0, "file_parallelism": 1}
    return Numbers.Params().Set(**{**files_read, "batch_size": 4, **params})


def packed_pairs(directory: pathlib.Path, **params: Any) -> Any:
    """Params of Lingvo's packed translation input, over lines of a source, a tab and a target."""
    lines = [f"{i} and {i + 1}\t{'x' * (i % 7)} {i}\n" for i in range(300)]
    (directory / "pairs.tsv").write_text("".join(lines))
    settings = {
        "file_random_seed": 0,
        "file_parallelism": 1,
        "bucket_upper_bound": [64],
        "bucket_batch_limit": [8],
        "packing_factor": 3.5,
        "source_max_length": 64,
        "target_max_length": 64,
        "tokenizer": tokenizers.AsciiTokenizer.Params().Set(vocab_size=76),
    }
    return translation.TextPackedInput.Params().Set(file_pattern=f"text:{directory}/pairs.tsv", **(settings | params))
