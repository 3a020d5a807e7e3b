"""Synthetic data, each row generated from its number: tokens with a learnable pattern, sequence pairs, images."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import numpy as np

from paxcli.config.fields import Derived, Examples, NonNegativeFloat, Pixels, PositiveInt, Tokens
from paxcli.inputs.base_input import RandomAccessInput, language_spec, sequence_spec
from paxcli.nested_map import NestedMap

_ALPHABET = 256
_NOISE = 0.1
_ODD = 0x9E3779B97F4A7C15
BOS_ID, EOS_ID = 0, 1


@dataclasses.dataclass(kw_only=True)
class _Synthetic(RandomAccessInput):
    """The base class of synthetic inputs.

    Args:
      num_examples: Number of rows in an epoch. None: infinite.
    """

    num_examples: Examples | None = None

    def validate(self) -> None:
        super().validate()
        if self.num_examples is None and not self.repeats:
            self.refuse("it is infinite, so it cannot run epochs.", "Set num_examples, or repeat=True.")

    def num_rows(self) -> int | None:
        return self.num_examples

    def data_fingerprint(self) -> Any:
        return self.num_examples

    def _random(self, numbers: np.ndarray) -> list[tuple[int, np.random.Generator]]:
        """The index of each row that is not padding, and its random numbers."""
        return [(i, np.random.default_rng([self.seed, self.is_training, n])) for i, n in enumerate(numbers) if n >= 0]


@dataclasses.dataclass(kw_only=True)
class SyntheticInput(_Synthetic):
    """Language-model batches of a noisy cycle: each id has a usual successor, so the loss falls from log V to 0.9.

    Args:
      seq_len: T. None: the trainer sets it to the model's max_seq_len.
      vocab_size: All ids are smaller, and at most 256 are used. None: the trainer sets it to the model's.
      num_examples: Number of rows in an epoch. None: infinite.
    """

    required = ("seq_len", "vocab_size")

    seq_len: Derived[Tokens | None] = None
    vocab_size: Derived[PositiveInt | None] = None

    def element_spec(self) -> NestedMap:
        return language_spec(self.batch_size, self.seq_len)

    def rows(self, numbers: np.ndarray) -> NestedMap:
        assert self.seq_len is not None and self.vocab_size is not None
        tokens = self._tokens(numbers, self.seq_len + 1, self.vocab_size)
        is_token = np.broadcast_to(numbers[:, None] >= 0, (len(numbers), self.seq_len))
        return _language_batch(tokens[:, :-1], tokens[:, 1:], is_token)

    def _tokens(self, numbers: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
        """Tokens [B, length]: a fixed cycle of ids from a random start, with a tenth of them replaced at random."""
        alphabet = min(vocab_size, _ALPHABET)
        seed = _mix(numbers.astype(np.uint64) + np.uint64((self.seed * 2 + self.is_training) * _ODD % 2**64))
        column = np.arange(length)
        cycles = np.resize(np.random.RandomState(0).permutation(alphabet).astype(np.int32), alphabet + length)
        walk = cycles[(seed % np.uint64(alphabet)).astype(np.int64)[:, None] + column]
        draw = _mix(_mix(seed)[:, None] + column.astype(np.uint64))
        other = ((draw & np.uint64(0xFFFF)) * np.uint64(alphabet) >> np.uint64(16)).astype(np.int32)
        return np.where(draw >> np.uint64(32) < int(_NOISE * 2**32), other, walk)


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
            hint = "Set seq_len to 2 or more, and vocab_size to 3 or more: two ids mark the start and the end."
            self.refuse(f"seq_len={self.seq_len} or vocab_size={self.vocab_size} is too small for a pair.", hint)

    def element_spec(self) -> NestedMap:
        return sequence_spec(self.batch_size, self.seq_len, self.seq_len)

    def rows(self, numbers: np.ndarray) -> NestedMap:
        assert self.seq_len is not None and self.vocab_size is not None
        source, labels = np.zeros((2, len(numbers), self.seq_len), np.int32)
        for index, random in self._random(numbers):
            tokens = random.integers(2, self.vocab_size, size=random.integers(1, self.seq_len))
            count = len(tokens) + 1
            source[index, :count] = [*tokens, EOS_ID]
            labels[index, :count] = [*(tokens if self.target == "copy" else tokens[::-1]), EOS_ID]
        ids = np.pad(labels, ((0, 0), (1, 0)), constant_values=BOS_ID)[:, :-1]
        batch = _language_batch(ids, labels, labels != BOS_ID)
        batch.source_ids = source
        batch.source_segment_ids, batch.source_segment_pos = batch.segment_ids, batch.segment_pos
        return batch


@dataclasses.dataclass(kw_only=True)
class SyntheticImages(_Synthetic):
    """Batches of `image` [B, size, size, C], `labels` [B] and `weights` [B].

    Args:
      image_size: Height and width.
      num_channels: C.
      num_classes: Number of classes. None: the trainer sets it to the model's.
      noise: Standard deviation of the noise; a pattern's is 1.
      num_examples: Number of images in an epoch. None: infinite.
    """

    required = ("num_classes",)

    image_size: Pixels = 32
    num_channels: PositiveInt = 3
    num_classes: Derived[PositiveInt | None] = None
    noise: NonNegativeFloat = 2.0

    def rows(self, numbers: np.ndarray) -> NestedMap:
        num_classes, *shape = self._patterns.shape
        labels, images = np.zeros(len(numbers), np.int32), np.zeros((len(numbers), *shape), np.float32)
        for index, random in self._random(numbers):
            labels[index] = random.integers(num_classes)
            images[index] = self._patterns[labels[index]] + self.noise * random.standard_normal(shape, np.float32)
        return NestedMap(image=images, labels=labels, weights=(numbers >= 0).astype(np.float32))

    @functools.cached_property
    def _patterns(self) -> np.ndarray:
        """The image of each class, without noise."""
        assert self.num_classes is not None
        shape = (self.num_classes, self.image_size, self.image_size, self.num_channels)
        return np.random.RandomState(0).standard_normal(shape).astype(np.float32)


def _language_batch(ids: np.ndarray, labels: np.ndarray, is_token: np.ndarray) -> NestedMap:
    """A language-model batch of rows with one segment each; all fields are 0 where `is_token` is False [B, T]."""
    segment_ids = is_token.astype(np.int32)
    return NestedMap(
        ids=ids * segment_ids,
        labels=labels * segment_ids,
        weights=is_token.astype(np.float32),
        segment_ids=segment_ids,
        segment_pos=np.arange(ids.shape[1], dtype=np.int32) * segment_ids,
    )


def _mix(values: np.ndarray) -> np.ndarray:
    """Hashes an array of 64-bit numbers (SplitMix64's finalizer)."""
    values = values + np.uint64(_ODD)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
