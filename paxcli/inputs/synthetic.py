"""Synthetic language-model data with a learnable pattern; each row is generated from its number."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from paxcli.config.fields import Derived, Examples, PositiveInt, Tokens
from paxcli.errors import ConfigError
from paxcli.inputs.base_input import RandomAccessInput, language_spec
from paxcli.nested_map import NestedMap

_ALPHABET = 256
_NOISE = 0.1
_ODD = 0x9E3779B97F4A7C15


@dataclasses.dataclass(kw_only=True)
class SyntheticInput(RandomAccessInput):
    """Language-model batches of a noisy cycle: each id has a usual successor, so the loss falls from log V to 0.9.

    Args:
      seq_len: T. None: the trainer sets it to the model's max_seq_len.
      vocab_size: All ids are smaller, and at most 256 are used. None: the trainer sets it to the model's.
      num_examples: Number of rows in an epoch. None: infinite.
    """

    seq_len: Derived[Tokens | None] = None
    vocab_size: Derived[PositiveInt | None] = None
    num_examples: Examples | None = None

    def validate(self) -> None:
        super().validate()
        check_sizes(self, "seq_len", "vocab_size")

    def element_spec(self) -> NestedMap:
        return language_spec(self.batch_size, self.seq_len)

    def num_rows(self) -> int | None:
        return self.num_examples

    def data_fingerprint(self) -> Any:
        return self.num_examples

    def rows(self, numbers: np.ndarray) -> NestedMap:
        assert self.seq_len is not None and self.vocab_size is not None
        tokens = self._tokens(numbers, self.seq_len + 1, self.vocab_size)
        is_token = np.broadcast_to(numbers[:, None] >= 0, (len(numbers), self.seq_len))
        return language_batch(tokens[:, :-1], tokens[:, 1:], is_token)

    def _tokens(self, numbers: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
        """Tokens [B, length]: a fixed cycle of ids from a random start, with a tenth of them replaced at random."""
        alphabet = min(vocab_size, _ALPHABET)
        seed = _mix(numbers.astype(np.uint64) + np.uint64((self.seed * 2 + self.is_training) * _ODD % 2**64))
        column = np.arange(length)
        cycle = np.random.RandomState(0).permutation(alphabet).astype(np.int32)
        cycles = np.resize(cycle, alphabet + length)
        walk = cycles[(seed % np.uint64(alphabet)).astype(np.int64)[:, None] + column]
        draw = _mix(_mix(seed)[:, None] + column.astype(np.uint64))
        other = ((draw & np.uint64(0xFFFF)) * np.uint64(alphabet) >> np.uint64(16)).astype(np.int32)
        return np.where(draw >> np.uint64(32) < int(_NOISE * 2**32), other, walk)


def language_batch(ids: np.ndarray, labels: np.ndarray, is_token: np.ndarray) -> NestedMap:
    """A language-model batch of rows with one segment each; all fields are 0 where `is_token` is False [B, T]."""
    segment_ids = is_token.astype(np.int32)
    return NestedMap(
        ids=ids * segment_ids,
        labels=labels * segment_ids,
        weights=is_token.astype(np.float32),
        segment_ids=segment_ids,
        segment_pos=np.arange(ids.shape[1], dtype=np.int32) * segment_ids,
    )


def check_sizes(source: RandomAccessInput, *fields: str) -> None:
    """Raises ConfigError unless these fields of a synthetic input are set, and its epochs are finite."""
    for field in fields:
        if getattr(source, field) is None:
            raise ConfigError(f"Input `{source.name}`: {field} is None.", "Set it to 1 or more.")
    if source.num_rows() is None and not source.repeats:
        raise ConfigError(
            f"Input `{source.name}` is infinite, so it cannot run epochs.", "Set num_examples, or repeat=True."
        )


def _mix(values: np.ndarray) -> np.ndarray:
    """Hashes an array of 64-bit numbers (SplitMix64's finalizer)."""
    values = values + np.uint64(_ODD)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
