"""Synthetic sequence pairs: the target is the source, copied or reversed."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from paxcli.errors import ConfigError
from paxcli.inputs.base_input import sequence_spec
from paxcli.inputs.synthetic import SyntheticInput, language_batch
from paxcli.nested_map import NestedMap

BOS_ID, EOS_ID = 0, 1


@dataclasses.dataclass(kw_only=True)
class SyntheticPairs(SyntheticInput):
    """Encoder-decoder batches: `source_ids`, `source_segment_ids`, `source_segment_pos`, and the language-model fields.

    A source is 1 to T - 1 random tokens and the end token 1. The target begins with 0 and ends with 1.

    Args:
      target: Copy the source's tokens, or reverse them. The other arguments are those of `SyntheticInput`; source and
        target have the same T.
    """

    target: Literal["copy", "reversed"] = "reversed"

    def validate(self) -> None:
        super().validate()
        assert self.seq_len is not None and self.vocab_size is not None
        if self.seq_len < 2 or self.vocab_size < 3:
            raise ConfigError(
                f"Input `{self.name}`: seq_len={self.seq_len} or vocab_size={self.vocab_size} is too small for a pair.",
                "Set seq_len to 2 or more, and vocab_size to 3 or more: two ids mark the start and the end.",
            )

    def element_spec(self) -> NestedMap:
        return sequence_spec(self.batch_size, self.seq_len, self.seq_len)

    def rows(self, numbers: np.ndarray) -> NestedMap:
        assert self.seq_len is not None and self.vocab_size is not None
        length = self.seq_len
        shape = (len(numbers), length)
        source, labels = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        num_tokens = np.zeros((len(numbers), 1), np.int32)
        for index, number in enumerate(numbers):
            if number >= 0:
                random = np.random.default_rng([self.seed, self.is_training, number])
                tokens = random.integers(2, self.vocab_size, size=random.integers(1, length))
                count = len(tokens) + 1
                num_tokens[index] = count
                source[index, :count] = [*tokens, EOS_ID]
                labels[index, :count] = [*(tokens if self.target == "copy" else tokens[::-1]), EOS_ID]
        is_token = np.arange(length) < num_tokens
        ids = np.pad(labels, ((0, 0), (1, 0)), constant_values=BOS_ID)[:, :-1]
        batch = language_batch(ids, labels, is_token)
        batch.source_ids = source
        batch.source_segment_ids, batch.source_segment_pos = batch.segment_ids, batch.segment_pos
        return batch
