"""From the features of a SeqIO task to the fields of our batches: Pax's feature converters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paxcli.config.configurable import Configurable
from paxcli.config.fields import NonNegativeInt
from paxcli.inputs.base_input import language_spec
from paxcli.inputs.seqio_library import load, plain
from paxcli.nested_map import NestedMap

Lengths = Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features(Configurable):
    """Converts a dataset of one example an element to one of one row an element."""

    def __call__(self, ds: Any, task_feature_lengths: Lengths) -> Any:
        """The rows of a `tf.data.Dataset`.

        Args:
          ds: The examples of a task, which has the features that `task_feature_lengths` names.
          task_feature_lengths: How long each feature may be.
        """
        raise NotImplementedError

    def spec(self, batch_size: int | None, task_feature_lengths: Lengths) -> NestedMap:
        """Shapes and dtypes of a batch of rows."""
        raise NotImplementedError

    def row_length(self, task_feature_lengths: Lengths) -> int:
        """The length of the longest field."""
        return max(task_feature_lengths.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelFeatures(Features):
    """`targets`, or `inputs` and after them `targets`, as language-model rows (Pax: `LanguageModelFeatures`).

    Every field is [T]: `ids`, `labels`, `weights`, `segment_ids` from 1, `segment_pos` from 0. With `inputs`, T is the
    sum of both lengths, and `inputs_indicator` is 1 where a prefix-LM may look both ways: from the first position to
    the one that predicts the first target.

    Attributes:
      pack: Several examples in a row, as many as fit, in their order.
      weights_on_targets_only: True: only targets weigh. False: all tokens do. None: all tokens but those of negative
        ids do. An id is made positive once that is settled.
      bos_id: What stands before the first token.
      reverse_bos_padding: `ids` are the tokens themselves, with nothing before them; `labels` are the tokens after
        them, closed with `eos_id`, which weighs nothing. Pax closes only the last segment of a row; the others' last
        label is there the first token of the next segment.
      eos_id: Closes labels when `reverse_bos_padding`.
      use_custom_packing_ops: Pack with tensor2tensor's operations, if they are installed.
    """

    pack: bool = False
    weights_on_targets_only: bool | None = None
    bos_id: NonNegativeInt = 0
    reverse_bos_padding: bool = False
    eos_id: NonNegativeInt = 1
    use_custom_packing_ops: bool = False

    def __call__(self, ds: Any, task_feature_lengths: Lengths) -> Any:
        seqio, tf = load("seqio"), load("tensorflow")
        convert = seqio.DecoderFeatureConverter(
            pack=self.pack, use_custom_packing_ops=self.use_custom_packing_ops, bos_id=self.bos_id
        )
        rows = convert(ds, task_feature_lengths)
        return rows.map(plain(self.fields), num_parallel_calls=tf.data.AUTOTUNE)

    def spec(self, batch_size: int | None, task_feature_lengths: Lengths) -> NestedMap:
        spec = language_spec(batch_size, self.row_length(task_feature_lengths))
        if task_feature_lengths.keys() & {"inputs", "decoder_causal_attention"}:
            spec.inputs_indicator = spec.ids
        return spec

    def row_length(self, task_feature_lengths: Lengths) -> int:
        return sum(task_feature_lengths.values())

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Our fields of a row that SeqIO's converter, or whoever packed the data, has made."""
        tf = load("tensorflow")
        labels, is_target = row["decoder_target_tokens"], row["decoder_loss_weights"] > 0
        is_token = is_target
        if "decoder_causal_attention" in row:
            is_token = is_token | (row["decoder_causal_attention"] > 0)
        weighs = is_token
        if self.weights_on_targets_only is not False:
            weighs = weighs & (labels >= 0)
        if self.weights_on_targets_only:
            weighs = weighs & is_target
        out = {
            "ids": tf.abs(row["decoder_input_tokens"]),
            "labels": tf.abs(labels),
            "weights": tf.cast(weighs, tf.float32),
            **_segments(row, "decoder", is_token),
        }
        if "decoder_causal_attention" in row:
            out["inputs_indicator"] = row["decoder_causal_attention"]
        return self._reversed(out) if self.reverse_bos_padding else out

    def _reversed(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with each token at its own place rather than at the next one's."""
        tf = load("tensorflow")

        def moved(array: Any, last: Any) -> Any:
            return tf.concat([array[1:], tf.cast([last], array.dtype)], axis=0)

        segments = row["segment_ids"]
        goes_on = (moved(segments, 0) == segments) & (segments > 0)
        out = {name: tf.where(goes_on, moved(row[name], 0), 0) for name in row.keys() & {"weights", "inputs_indicator"}}
        closing = tf.where(segments > 0, self.eos_id, 0)
        return row | out | {"ids": row["labels"], "labels": tf.where(goes_on, moved(row["labels"], 0), closing)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedLanguageModelFeatures(LanguageModelFeatures):
    """Rows that were packed when they were written (Pax: `PackedLanguageModelFeatures`).

    The task has the features of SeqIO's `LMFeatureConverter` or `PrefixLMFeatureConverter`, of their full length:
    `decoder_input_tokens`, `decoder_target_tokens`, `decoder_loss_weights`, `decoder_segment_ids`, `decoder_positions`.
    """

    def __call__(self, ds: Any, task_feature_lengths: Lengths) -> Any:
        return _checked(ds, task_feature_lengths).map(
            plain(self.fields), num_parallel_calls=load("tensorflow").data.AUTOTUNE
        )

    def row_length(self, task_feature_lengths: Lengths) -> int:
        return max(task_feature_lengths.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceModelFeatures(Features):
    """`inputs` and `targets` as rows of an encoder-decoder (Pax: `SequenceModelFeatures`).

    `source_ids`, `source_segment_ids` and `source_segment_pos` are [S]; those of a language model, of the target, [T].

    Attributes:
      pack: Several examples in a row, as many as fit, in their order.
      bos_id: What stands before the first target token.
    """

    pack: bool = False
    bos_id: NonNegativeInt = 0

    def __call__(self, ds: Any, task_feature_lengths: Lengths) -> Any:
        seqio, tf = load("seqio"), load("tensorflow")
        rows = seqio.EncDecFeatureConverter(pack=self.pack, bos_id=self.bos_id)(ds, task_feature_lengths)
        return rows.map(plain(self.fields), num_parallel_calls=tf.data.AUTOTUNE)

    def spec(self, batch_size: int | None, task_feature_lengths: Lengths) -> NestedMap:
        lengths = task_feature_lengths
        spec = language_spec(batch_size, lengths.get("targets", lengths.get("decoder_target_tokens")))
        source = language_spec(batch_size, lengths.get("inputs", lengths.get("encoder_input_tokens")))
        for name in ("ids", "segment_ids", "segment_pos"):
            spec[f"source_{name}"] = source[name]
        return spec

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Our fields of a row that SeqIO's converter, or whoever packed the data, has made."""
        tf = load("tensorflow")
        source, is_target = row["encoder_input_tokens"], row["decoder_loss_weights"] > 0
        of_source = _segments(row, "encoder", source != 0)
        return {
            "ids": row["decoder_input_tokens"],
            "labels": row["decoder_target_tokens"],
            "weights": tf.cast(is_target, tf.float32),
            **_segments(row, "decoder", is_target),
            "source_ids": source,
            **{f"source_{name}": value for name, value in of_source.items()},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedSequenceModelFeatures(SequenceModelFeatures):
    """Encoder-decoder rows that were packed when they were written (Pax: `PackedSequenceModelFeatures`).

    The task has the features of SeqIO's `EncDecFeatureConverter(pack=True)`, of their full length.
    """

    def __call__(self, ds: Any, task_feature_lengths: Lengths) -> Any:
        return _checked(ds, task_feature_lengths).map(
            plain(self.fields), num_parallel_calls=load("tensorflow").data.AUTOTUNE
        )


def _segments(row: Mapping[str, Any], side: str, is_token: Any) -> dict[str, Any]:
    """The segments of a packed row; otherwise the tokens are one."""
    tf = load("tensorflow")
    if f"{side}_segment_ids" in row:
        return {"segment_ids": row[f"{side}_segment_ids"], "segment_pos": row[f"{side}_positions"]}
    segment_ids = tf.cast(is_token, tf.int32)
    return {"segment_ids": segment_ids, "segment_pos": segment_ids * tf.range(tf.size(segment_ids))}


def _checked(ds: Any, lengths: Lengths) -> Any:
    """Rows with the features that `lengths` names, each refused unless it is as long as it says."""
    tf = load("tensorflow")

    def check(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tf.ensure_shape(tf.cast(row[name], tf.int32), [length]) for name, length in lengths.items()}

    return ds.map(plain(check), num_parallel_calls=tf.data.AUTOTUNE)
