"""A mixture of several inputs with fixed proportions of rows."""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from paxcli.config.fields import Derived, PositiveFloat, PositiveInt, Tokens
from paxcli.inputs.base_input import RandomAccessInput
from paxcli.nested_map import NestedMap, join_rows

_SHARED_FIELDS = ("batch_size", "is_training", "reset_for_eval", "eval_loop_num_batches", "repeat")
_INFINITE = 2**48


@dataclasses.dataclass(kw_only=True)
class MixtureInput(RandomAccessInput):
    """Interleaves rows of several inputs in fixed proportions.

    Any n consecutive rows have n * proportion rows of each input, to within one or two. Proportions are those of the
    weights as multiples of the smallest, rounded down to hundredths. The row at each position is a function of the
    position alone, so a mixture can resume on any number of hosts. Each input restarts at its own end. An epoch
    (`reset_for_eval`) is all rows of all inputs, one input after another, without proportions.

    Args:
      inputs: The inputs. They take batch size, training and eval fields from the mixture, and also seed, seq_len and
        vocab_size where these are not set.
      weights: The weight of each input; only their ratios matter. [0.3, 0.7] are 1 and 2.33.
      seq_len: T. None: the trainer sets it to the model's max_seq_len.
      vocab_size: The model's vocabulary size. None: the trainer sets it.
    """

    inputs: list[RandomAccessInput] = dataclasses.field(default_factory=list)
    weights: list[PositiveFloat] | None = None
    seq_len: Derived[Tokens | None] = None
    vocab_size: Derived[PositiveInt | None] = None

    def __post_init__(self) -> None:
        self._has_seed = [each.input_random_seed is not None for each in self.inputs]
        super().__post_init__()

    def derive_fields(self) -> None:
        for number, each in enumerate(self.inputs):
            for field in _SHARED_FIELDS:
                setattr(each, field, getattr(self, field))
            for field in ("seq_len", "vocab_size"):
                if getattr(each, field, 0) is None:
                    setattr(each, field, getattr(self, field))
            if not self._has_seed[number]:
                each.input_random_seed = (self.seed + number) % 2**32
            if each.name in ("input", "train"):
                each.name = f"{self.name}.{number}"

    def parts(self) -> list[RandomAccessInput]:
        return self.inputs

    def validate(self) -> None:
        super().validate()
        if not self.inputs:
            self.refuse("the mixture has no inputs.", "Set `inputs` to a list of inputs, and `weights` to numbers.")
        if (count := len(self.weights or ())) != len(self.inputs):
            self.refuse(f"the mixture has {len(self.inputs)} inputs and {count} weights.", "Set one weight per input.")
        for each in self.inputs:
            if not isinstance(each, RandomAccessInput):
                hint = "Mix TextInput, SyntheticInput and other subclasses of RandomAccessInput."
                self.refuse(f"{type(each).__name__} has no random access to its rows.", hint)
            if isinstance(each, MixtureInput):
                self.refuse("a mixture is an input of another.", "Put its inputs into one, with adapted weights.")
        specs = [jax.tree.map(lambda x: (x.shape, x.dtype), each.element_spec()) for each in self.inputs]
        if any(spec != specs[0] for spec in specs):
            self.refuse(f"batches of its inputs differ: {specs}.", "Set the same seq_len.")

    def check_data(self) -> None:
        """Checks the data of each input.

        Raises:
          ConfigError: The inputs have different end-of-document ids.
          DataError: The data of an input cannot be used.
        """
        super().check_data()
        ends = {id for each in self.inputs for id, name in each.special_tokens().items() if name == "<eos>"}
        if len(ends) > 1:
            self.refuse(f"its inputs end documents with ids {ends}.", "Use the same tokenizer for all.")

    def element_spec(self) -> NestedMap:
        return self.inputs[0].element_spec()

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        return self.inputs[0].ids_to_strings(ids, lengths, key)

    def special_tokens(self, key: str = "ids") -> dict[int, str]:
        return self.inputs[0].special_tokens(key)

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer of the first input, or None."""
        return self.inputs[0].text_tokenizer

    def num_rows(self) -> int | None:
        sizes = [None] if self.repeats else [each.num_rows() for each in self.inputs]
        return None if None in sizes else sum(filter(None, sizes))

    def data_fingerprint(self) -> Any:
        return zlib.crc32(json.dumps([[each.data_fingerprint() for each in self.inputs], self.weights]).encode())

    def order(self, positions: np.ndarray) -> np.ndarray:
        """The row at each position, encoded as row number in its input * number of inputs + index of the input."""
        if self.repeats:
            mixed = np.array([self._mixed[at] for at in positions.tolist()], np.int64)
            position, child = np.divmod(mixed, len(self.inputs))
        else:
            ends = np.cumsum([each.num_rows() or 0 for each in self.inputs])
            positions = np.minimum(positions, ends[-1] - 1)
            child = np.searchsorted(ends, positions, side="right")
            position = positions - np.where(child > 0, ends[child - 1], 0)
        numbers = np.empty_like(positions)
        for number, each in enumerate(self.inputs):
            selected = child == number
            numbers[selected] = each.order(position[selected]) * len(self.inputs) + number
        return numbers

    def rows(self, numbers: np.ndarray) -> NestedMap:
        # The first input provides rows of padding.
        child = np.where(numbers < 0, 0, numbers % len(self.inputs))
        row = np.where(numbers < 0, -1, numbers // len(self.inputs))
        return join_rows(child, lambda number, index: self.inputs[number].rows(row[index]))

    @functools.cached_property
    def _mixed(self) -> Any:
        """For each position of the mixture: position in its input * number of inputs + index of the input."""
        import grain

        count = len(self.inputs)
        streams = [grain.MapDataset.range(number, _INFINITE * count, count) for number in range(count)]
        return grain.MapDataset.mix(streams, weights=self.weights)
