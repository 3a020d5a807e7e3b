"""C4, the Colossal Clean Crawled Corpus, laid out as Pax's C4 recipes read it."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from paxcli.config.configurable import Configurable, part
from paxcli.errors import ConfigError, DataError
from paxcli.inputs.seqio_features import Features, LanguageModelFeatures
from paxcli.inputs.seqio_input import SeqIOInput
from paxcli.inputs.seqio_library import as_our_errors, load, plain

# Pax's: documents run on into each other in groups of this many, and rows are shuffled among this many.
_DOCUMENTS_AT_ONCE = 4096
_SHUFFLE_BUFFER = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class C4(Configurable):
    """Where C4 is, and the tokenizer. Inputs of one recipe share it.

    Attributes:
      path: The directory: of `*SPLIT*.json.gz` (a JSON object a line), such as `c4-train.00000-of-01024.json.gz`; or,
        with `tfds_name`, of TensorFlow Datasets.
      tokenizer_path: A SentencePiece model (`*.model`) with padding as id 0.
      tfds_name: Name and version there, such as `c4/en:3.0.1`; None = JSON files.
      tokenized: Records hold `ids`, a sequence each, rather than `text`. Sequences longer than a row are split.
    """

    path: str | None = None
    tokenizer_path: str | None = None
    tfds_name: str | None = None
    tokenized: bool = False

    def task(self, split: str) -> Any:
        """A `seqio.Task` of one split, whose feature is `targets`."""
        seqio = load("seqio")
        feature = seqio.Feature(self._vocabulary, add_eos=False)
        chain = [self._ids, functools.partial(_rows_of, run_on=not self.tokenized)]
        return seqio.Task(
            "c4",
            source=self._source(split),
            preprocessors=chain,
            output_features={"targets": feature},
            shuffle_buffer_size=_SHUFFLE_BUFFER,
        )

    def validate(self, name: str, holder: str) -> None:
        """Raises ConfigError for an input `name` when something is not said; `holder` is where the recipe has this."""
        for field, example in (("path", "~/c4/en"), ("tokenizer_path", "c4.model")):
            if getattr(self, field) is None:
                raise ConfigError(
                    f"Input `{name}` has no data: {field} is None.",
                    f"Set it, such as --set {holder}.{field}={example}, or use `--overlay synthetic-data`.",
                )

    @functools.cached_property
    def _vocabulary(self) -> Any:
        seqio = load("seqio")
        path = epath.Path(str(self.tokenizer_path)).expanduser()
        if not path.is_file():
            raise DataError(f"There is no tokenizer file {self.tokenizer_path}.", "Correct tokenizer_path.")
        vocabulary = seqio.SentencePieceVocabulary(str(path))
        try:
            unknown = vocabulary.tokenizer.unk_id()
        except Exception:  # SentencePiece and its protocol buffers raise what they like.
            raise DataError(f"{self.tokenizer_path} is not a SentencePiece model.") from None
        if unknown == 0:
            raise ConfigError(
                f"{self.tokenizer_path} has its unknown token as id 0, which stands for padding here.",
                "Train it with --pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1.",
            )
        return vocabulary

    def _source(self, split: str) -> Any:
        seqio = load("seqio")
        if self.tfds_name is not None:
            return seqio.TfdsDataSource(self.tfds_name, tfds_data_dir=str(self.path), splits=[split])
        files = sorted(map(str, epath.Path(str(self.path)).expanduser().glob(f"*{split}*.json.gz")))
        if not files:
            raise DataError(
                f"No file matches {self.path}/*{split}*.json.gz.",
                "Name a directory with the shards of C4, and a split that is part of their names.",
            )
        return seqio.FileDataSource(self._records, {split: files})

    def _records(self, file: Any) -> Any:
        """The documents of a JSON file."""
        tf = load("tensorflow")
        text, ids = tf.TensorSpec([], tf.string), tf.TensorSpec([None], tf.int32)
        signature = {"ids": ids} if self.tokenized else {"text": text}
        return tf.data.Dataset.from_generator(self._read, args=(file,), output_signature=signature)

    def _read(self, path: bytes) -> Iterator[dict[str, Any]]:
        # TensorFlow's own reader takes a gzip file that was cut off between two blocks for a whole one.
        field, where, number = "ids" if self.tokenized else "text", path.decode(), 0
        try:
            with epath.Path(where).open("rb") as file, gzip.open(file) as lines:
                for line in lines:
                    number += 1
                    value = json.loads(line)[field]
                    yield {field: np.asarray(value, np.int32) if self.tokenized else value.encode()}
        except KeyError:
            raise DataError(f"{where}, line {number} has no field `{field}`.") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{where}, line {number} is not a record of C4: {error}.") from None
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{where} is damaged after line {number}: {error}.") from None

    def _ids(self, ds: Any) -> Any:
        """Documents as `targets` [length]."""
        tf = load("tensorflow")

        def ids(record: Mapping[str, Any]) -> dict[str, Any]:
            if self.tokenized:
                return {"targets": tf.cast(record["ids"], tf.int32)}
            return {"targets": tf.cast(self._vocabulary.encode_tf(record["text"]), tf.int32)}

        return ds.map(plain(ids), num_parallel_calls=tf.data.AUTOTUNE)


@dataclasses.dataclass(kw_only=True)
class C4Input(SeqIOInput):
    """C4 as rows of T tokens, as Pax's C4 recipes read it.

    Documents run on into each other, without a mark between them, in groups of 4,096, and are cut into rows of T;
    what is left of groups is packed in training, and padded in an evaluation. `ids` are the tokens themselves,
    `labels` the tokens after them, closed with the end token.

    Args:
      c4: The data and its tokenizer.
      split_name: None: `train` in training, else `validation`. The other arguments are those of `SeqIOInput`.
      feature_converter: None: as above.
    """

    c4: C4 = part(C4)
    feature_converter: Features | None = None  # pyrefly: ignore

    def __post_init__(self) -> None:
        if self.split_name is None:
            self.split_name = "train" if self.is_training else "validation"
        if self.feature_converter is None:
            self.feature_converter = LanguageModelFeatures(pack=self.is_training, reverse_bos_padding=True)
        super().__post_init__()

    @functools.cached_property
    def task(self) -> Any:
        assert self.split_name is not None
        with as_our_errors(f"Input `{self.name}`"):
            return self.c4.task(self.split_name)

    def _validate_task(self) -> None:
        self.c4.validate(str(self.name), "train_input.c4" if self.is_training else "eval_inputs.0.c4")


def _rows_of(ds: Any, sequence_length: Mapping[str, int], *, run_on: bool) -> Any:
    """Sequences of at most T tokens: each document cut, or, where they run on, groups of documents as one."""
    tf = load("tensorflow")
    length = sequence_length["targets"]

    def cut(example: Mapping[str, Any]) -> Any:
        tokens = example["targets"]
        rows = tf.RaggedTensor.from_row_lengths(tokens, _lengths(tf, tf.size(tokens), length))
        return tf.data.Dataset.from_tensor_slices({"targets": rows}).map(plain(_dense))

    if run_on:
        ds = ds.ragged_batch(_DOCUMENTS_AT_ONCE).map(plain(lambda group: {"targets": group["targets"].flat_values}))
    return ds.flat_map(plain(cut))


def _lengths(tf: Any, total: Any, length: int) -> Any:
    """How long the pieces of `total` tokens are: all `length`, and the last one what is left."""
    rest = total % length
    return tf.concat([tf.fill([total // length], length), tf.fill([tf.minimum(rest, 1)], rest)], axis=0)


def _dense(row: Mapping[str, Any]) -> dict[str, Any]:
    tokens = row["targets"]
    tokens = tokens.to_tensor() if hasattr(tokens, "to_tensor") else tokens
    tokens.set_shape([None])
    return {"targets": tokens}
