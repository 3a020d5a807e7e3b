"""C4, the Colossal Clean Crawled Corpus, preprocessed like in Pax's C4 recipes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from paxcli.config.configurable import Configurable, part
from paxcli.config.fields import TokenizerFile
from paxcli.errors import ConfigError, DataError
from paxcli.inputs.documents import BadRecords, Reading
from paxcli.inputs.files import SourceFile, local_copy
from paxcli.inputs.seqio_features import Features, LanguageModelFeatures
from paxcli.inputs.seqio_input import SeqIOInput
from paxcli.inputs.seqio_library import load, map_in_parallel, translate_errors, without_autograph
from paxcli.inputs.tokenizers import SentencePieceTokenizer

# Values of Pax's recipes: documents are concatenated in groups of this size, and rows go through this shuffle buffer.
_DOCUMENTS_PER_GROUP = 4096
_SHUFFLE_BUFFER = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class C4(Configurable):
    """The C4 dataset and its tokenizer, shared by the inputs of a recipe.

    Attributes:
      path: The directory of the `*SPLIT*.json.gz` files (one JSON object per line), such as
        `c4-train.00000-of-01024.json.gz`; with `tfds_name`, the data directory of TensorFlow Datasets.
      tokenizer_path: A SentencePiece model (`*.model`) with padding as id 0.
      tfds_name: Dataset and version, such as `c4/en:3.0.1`. None: JSON files.
      tokenized: Whether records have a sequence of `ids` instead of `text`. Sequences longer than a row are split.
    """

    path: str | None = None
    tokenizer_path: TokenizerFile = None
    tfds_name: str | None = None
    tokenized: bool = False

    def task(self, split: str) -> Any:
        """A `seqio.Task` of one split, with the feature `targets`."""
        seqio = load("seqio")
        return seqio.Task(
            "c4",
            source=self._source(split),
            preprocessors=[self._tokenize, functools.partial(_split_into_rows, concatenate=not self.tokenized)],
            output_features={"targets": seqio.Feature(self._vocabulary, add_eos=False)},
            shuffle_buffer_size=_SHUFFLE_BUFFER,
        )

    @functools.cached_property
    def _vocabulary(self) -> Any:
        path = str(local_copy(epath.Path(str(self.tokenizer_path)).expanduser(), None))
        SentencePieceTokenizer(path=path).vocab_size  # noqa: B018 - raises DataError for another file
        vocabulary = load("seqio").SentencePieceVocabulary(path)
        if vocabulary.tokenizer.unk_id() == 0:
            hint = "Train it with --pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1."
            raise ConfigError(f"{self.tokenizer_path} uses id 0 for the unknown token, not for padding.", hint)
        return vocabulary

    def _source(self, split: str) -> Any:
        seqio = load("seqio")
        if self.tfds_name is not None:
            return seqio.TfdsDataSource(self.tfds_name, tfds_data_dir=str(self.path), splits=[split])
        if not (files := sorted(map(str, epath.Path(str(self.path)).expanduser().glob(f"*{split}*.json.gz")))):
            hint = "Set `path` to the directory of C4's files, and `split_name` to a part of their names."
            raise DataError(f"No file matches {self.path}/*{split}*.json.gz.", hint)
        return seqio.FileDataSource(self._records, {split: files})

    def _records(self, file: Any) -> Any:
        """The documents of a JSON file as a `tf.data.Dataset`."""
        tf = load("tensorflow")
        text, ids = tf.TensorSpec([], tf.string), tf.TensorSpec([None], tf.int32)
        signature = {"ids": ids} if self.tokenized else {"text": text}
        return tf.data.Dataset.from_generator(self._read, args=(file,), output_signature=signature)

    def _read(self, path: bytes) -> Iterator[dict[str, Any]]:
        # TensorFlow's reader does not detect a gzip file that is truncated between two blocks.
        file = epath.Path(path.decode())
        yield from _Reading(tokenized=self.tokenized).documents(SourceFile(file.name, file), BadRecords())

    def _tokenize(self, ds: Any) -> Any:
        """Converts documents to ids, `targets` [length]."""
        tf = load("tensorflow")

        def tokenize(record: Mapping[str, Any]) -> dict[str, Any]:
            ids = record["ids"] if self.tokenized else self._vocabulary.encode_tf(record["text"])
            return {"targets": tf.cast(ids, tf.int32)}

        return map_in_parallel(ds, tokenize)


@dataclasses.dataclass(frozen=True)
class _Reading(Reading):
    """Reads the text of each document, or with `tokenized` its ids."""

    tokenized: bool = False

    def document_of(self, record: dict[str, Any], place: str) -> dict[str, Any]:
        text, ids = record.get("text"), record.get("ids")
        if not self.tokenized and isinstance(text, str):
            return {"text": text.encode()}
        if self.tokenized and isinstance(ids, list) and all(isinstance(token, int) for token in ids):
            return {"ids": np.asarray(ids, np.int32)}
        hint = "Set `tokenized` as the files are: true for ids, false for text."
        raise DataError(f"{place} has no {'ids' if self.tokenized else 'text'}.", hint)


@dataclasses.dataclass(kw_only=True)
class C4Input(SeqIOInput):
    """C4 as rows of T tokens, preprocessed like in Pax's C4 recipes.

    Concatenates documents, without a separator, in groups of 4,096, and splits each group into rows of T tokens. The
    shorter last rows of groups are packed in training and padded in an evaluation. `ids` are the tokens, `labels` the
    next tokens, with the end token after the last one.

    Args:
      c4: The dataset and its tokenizer.
      split_name: None: `train` in training, otherwise `validation`. The other arguments are those of `SeqIOInput`.
      feature_converter: None: language-model features as described above.
    """

    c4: C4 = part(C4)
    feature_converter: Features | None = None  # pyrefly: ignore

    def __post_init__(self) -> None:
        self._split, self._converter = self.split_name, self.feature_converter
        super().__post_init__()

    def derive_fields(self) -> None:
        self.split_name = self._split or ("train" if self.is_training else "validation")
        converter = self._converter or LanguageModelFeatures(pack=self.is_training, reverse_bos_padding=True)
        self.feature_converter = converter

    @functools.cached_property
    def task(self) -> Any:
        assert self.split_name is not None
        with translate_errors(self.name):
            return self.c4.task(self.split_name)

    def _validate_task(self) -> None:
        holder = "train_input.c4" if self.is_training else "eval_inputs.0.c4"
        for field, example in (("path", "~/c4/en"), ("tokenizer_path", "c4.model")):
            if getattr(self.c4, field) is None:
                hint = f"Set it, such as --set {holder}.{field}={example}, or use `--overlay synthetic-data`."
                raise ConfigError(f"Input `{self.name}` has no data: {field} is None.", hint)


def _split_into_rows(ds: Any, sequence_length: Mapping[str, int], *, concatenate: bool) -> Any:
    """Splits documents, or groups of concatenated documents, into rows of at most T tokens."""
    tf = load("tensorflow")
    length = sequence_length["targets"]

    def split(example: Mapping[str, Any]) -> Any:
        tokens = example["targets"]
        starts = tf.data.Dataset.range(0, tf.size(tokens, tf.int64), length)
        return starts.map(without_autograph(lambda start: {"targets": tokens[start : start + length]}))

    def join(group: Mapping[str, Any]) -> dict[str, Any]:
        return {"targets": group["targets"].flat_values}

    if concatenate:
        ds = ds.ragged_batch(_DOCUMENTS_PER_GROUP).map(without_autograph(join))
    return ds.flat_map(without_autograph(split))
