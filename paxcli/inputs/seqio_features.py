"""Pax's feature converters: from the features of a SeqIO task to the fields of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paxcli.config.configurable import Configurable
from paxcli.config.fields import NonNegativeInt
from paxcli.inputs.base_input import language_spec, sequence_spec
from paxcli.inputs.seqio_library import load, map_in_parallel
from paxcli.nested_map import NestedMap

Lengths = Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features(Configurable):
    """Converts a dataset of examples to a dataset of rows."""

    def __call__(self, ds: Any, task_feature_lengths: Lengths) -> Any:
        """Converts a `tf.data.Dataset` of examples to one of rows.

        Args:
          ds: The examples of a task, with the features of `task_feature_lengths`.
          task_feature_lengths: Maximum length of each feature.
        """
        return map_in_parallel(self._convert(ds, task_feature_lengths), self.fields)

    def _convert(self, ds: Any, task_feature_lengths: Lengths) -> Any:
        """Converts the examples to rows with the features of SeqIO's converter."""
        raise NotImplementedError

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Converts the features of SeqIO's converter to the fields of a row."""
        raise NotImplementedError

    def spec(self, batch_size: int | None, task_feature_lengths: Lengths) -> NestedMap:
        """Shapes and dtypes of a batch of rows."""
        raise NotImplementedError

    def row_length(self, task_feature_lengths: Lengths) -> int:
        """The length of the longest field."""
        return max(task_feature_lengths.values())


class _PackedFeatures(Features):
    """Rows that are stored packed, at full length: `_convert` only selects and checks the features."""

    def _convert(self, ds: Any, task_feature_lengths: Lengths) -> Any:
        tf = load("tensorflow")
        lengths = task_feature_lengths.items()

        def check(row: Mapping[str, Any]) -> dict[str, Any]:
            return {name: tf.ensure_shape(tf.cast(row[name], tf.int32), [length]) for name, length in lengths}

        return map_in_parallel(ds, check)

    row_length = Features.row_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelFeatures(Features):
    """Language-model rows of `targets`, or of `inputs` followed by `targets` (Pax: `LanguageModelFeatures`).

    Every field is [T]: `ids`, `labels`, `weights`, `segment_ids` from 1, `segment_pos` from 0. With `inputs`, T is the
    sum of both lengths, and `inputs_indicator` is 1 where a prefix-LM may attend bidirectionally: from the first
    position to the one that predicts the first target.

    Attributes:
      pack: Pack several examples into a row, as many as fit, in order.
      weights_on_targets_only: True: only targets have a weight. False: all tokens. None: all tokens except those with
        negative ids. Ids are replaced by their absolute values afterwards.
      bos_id: Id before the first token.
      reverse_bos_padding: `ids` are the tokens, without `bos_id`; `labels` are the next tokens, with `eos_id` (weight
        0) after a segment's last token. Pax appends it only to the last segment of a row; in other segments, Pax's last
        label is the first token of the next segment.
      eos_id: Last label of a segment with `reverse_bos_padding`.
      use_custom_packing_ops: Pack with tensor2tensor's ops, if they are installed.
    """

    pack: bool = False
    weights_on_targets_only: bool | None = None
    bos_id: NonNegativeInt = 0
    reverse_bos_padding: bool = False
    eos_id: NonNegativeInt = 1
    use_custom_packing_ops: bool = False

    def _convert(self, ds: Any, task_feature_lengths: Lengths) -> Any:
        options = dict(pack=self.pack, use_custom_packing_ops=self.use_custom_packing_ops, bos_id=self.bos_id)
        return load("seqio").DecoderFeatureConverter(**options)(ds, task_feature_lengths)

    def spec(self, batch_size: int | None, task_feature_lengths: Lengths) -> NestedMap:
        spec = language_spec(batch_size, self.row_length(task_feature_lengths))
        if task_feature_lengths.keys() & {"inputs", "decoder_causal_attention"}:
            spec.inputs_indicator = spec.ids
        return spec

    def row_length(self, task_feature_lengths: Lengths) -> int:
        return sum(task_feature_lengths.values())

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        tf = load("tensorflow")
        labels, is_target = row["decoder_target_tokens"], row["decoder_loss_weights"] > 0
        causal = row.get("decoder_causal_attention")
        is_token = is_target if causal is None else is_target | (causal > 0)
        has_weight = is_target if self.weights_on_targets_only else is_token
        if self.weights_on_targets_only is not False:
            has_weight = has_weight & (labels >= 0)
        out = {
            "ids": tf.abs(row["decoder_input_tokens"]),
            "labels": tf.abs(labels),
            "weights": tf.cast(has_weight, tf.float32),
            **_segments(row, "decoder", is_token),
        }
        if causal is not None:
            out["inputs_indicator"] = causal
        return self._shift_left(out) if self.reverse_bos_padding else out

    def _shift_left(self, row: dict[str, Any]) -> dict[str, Any]:
        """Shifts a row left by one position within each segment: its labels become the ids."""
        tf = load("tensorflow")

        def shift(array: Any) -> Any:
            return tf.pad(array[1:], [[0, 1]])

        segments = row["segment_ids"]
        has_next = (shift(segments) == segments) & (segments > 0)
        names = row.keys() & {"weights", "inputs_indicator"}
        shifted = {name: tf.where(has_next, shift(row[name]), 0) for name in names}
        labels = tf.where(has_next, shift(row["labels"]), tf.where(segments > 0, self.eos_id, 0))
        return row | shifted | {"ids": row["labels"], "labels": labels}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedLanguageModelFeatures(_PackedFeatures, LanguageModelFeatures):
    """Language-model rows that are stored packed (Pax: `PackedLanguageModelFeatures`).

    The task has the features of SeqIO's `LMFeatureConverter` or `PrefixLMFeatureConverter`, at full length:
    `decoder_input_tokens`, `decoder_target_tokens`, `decoder_loss_weights`, `decoder_segment_ids`, `decoder_positions`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceModelFeatures(Features):
    """Encoder-decoder rows of `inputs` and `targets` (Pax: `SequenceModelFeatures`).

    `source_ids`, `source_segment_ids` and `source_segment_pos` are [S]; the target's language-model fields are [T].

    Attributes:
      pack: Pack several examples into a row, as many as fit, in order.
      bos_id: Id before the first target token.
    """

    pack: bool = False
    bos_id: NonNegativeInt = 0

    def _convert(self, ds: Any, task_feature_lengths: Lengths) -> Any:
        return load("seqio").EncDecFeatureConverter(pack=self.pack, bos_id=self.bos_id)(ds, task_feature_lengths)

    def spec(self, batch_size: int | None, task_feature_lengths: Lengths) -> NestedMap:
        lengths = task_feature_lengths
        source_len = lengths.get("inputs", lengths.get("encoder_input_tokens"))
        return sequence_spec(batch_size, source_len, lengths.get("targets", lengths.get("decoder_target_tokens")))

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        tf = load("tensorflow")
        source, is_target = row["encoder_input_tokens"], row["decoder_loss_weights"] > 0
        return {
            "ids": row["decoder_input_tokens"],
            "labels": row["decoder_target_tokens"],
            "weights": tf.cast(is_target, tf.float32),
            **_segments(row, "decoder", is_target),
            "source_ids": source,
            **{f"source_{name}": value for name, value in _segments(row, "encoder", source != 0).items()},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedSequenceModelFeatures(_PackedFeatures, SequenceModelFeatures):
    """Encoder-decoder rows that are stored packed (Pax: `PackedSequenceModelFeatures`).

    The task has the features of SeqIO's `EncDecFeatureConverter(pack=True)`, at full length.
    """


def _segments(row: Mapping[str, Any], side: str, is_token: Any) -> dict[str, Any]:
    """Segment ids and positions of a packed row; of an unpacked row, whose tokens are one segment."""
    tf = load("tensorflow")
    if f"{side}_segment_ids" in row:
        return {"segment_ids": row[f"{side}_segment_ids"], "segment_pos": row[f"{side}_positions"]}
    segment_ids = tf.cast(is_token, tf.int32)
    return {"segment_ids": segment_ids, "segment_pos": segment_ids * tf.range(tf.size(segment_ids))}
