"""Several inputs as one, each with its share of the rows."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from paxcli.errors import ConfigError
from paxcli.inputs.base_input import BaseInput, RandomAccessInput
from paxcli.nested_map import NestedMap

_PASSED_ON = ("batch_size", "is_training", "reset_for_eval", "eval_loop_num_batches", "repeat")
_ENDLESS = 2**48


@dataclasses.dataclass(kw_only=True)
class MixtureInput(RandomAccessInput):
    """Rows of several inputs in fixed shares: any stretch of n rows has n * share of each input, to within one or two.

    Which row comes next follows from its number alone, so a mixture resumes on any number of hosts. Each input starts
    over when it is at its end, whatever the others do. An epoch (`reset_for_eval`) is every row of every input once,
    one input after the other, and knows no shares.

    Args:
      inputs: What is mixed. Batch size and role are the mixture's; so are seed, seq_len and vocab_size if not set.
      weights: The share of each input; only their ratio counts.
      seq_len: T. None: the trainer sets it to the model's max_seq_len.
      vocab_size: The model's. None: the trainer sets it.
    """

    inputs: list[BaseInput] = dataclasses.field(default_factory=list)
    weights: list[float] | None = None
    seq_len: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for number, each in enumerate(self.inputs):
            for field in _PASSED_ON:
                setattr(each, field, getattr(self, field))
            for field in ("seq_len", "vocab_size"):
                if getattr(each, field, 0) is None:
                    setattr(each, field, getattr(self, field))
            if each.input_random_seed is None:
                each.input_random_seed = (self.seed + number) % 2**32
            if each.name in ("input", "train"):
                each.name = f"{self.name}.{number}"

    def validate(self) -> None:
        super().validate()
        if not self.inputs:
            raise ConfigError(
                f"Mixture `{self.name}` has no inputs.", "Set `inputs` to a list, and `weights` to another."
            )
        if self.weights is None or len(self.weights) != len(self.inputs):
            given = "no weights" if self.weights is None else f"{len(self.weights)} weights"
            raise ConfigError(
                f"Mixture `{self.name}` has {len(self.inputs)} inputs and {given}.", "Set `weights`: a number for each."
            )
        if bad := [weight for weight in self.weights if not (math.isfinite(weight) and weight > 0)]:
            raise ConfigError(
                f"Mixture `{self.name}`: a weight is {bad[0]}.", "Weights are above 0; leave out what has no share."
            )
        for each in self.inputs:
            if not isinstance(each, RandomAccessInput):
                raise ConfigError(
                    f"Mixture `{self.name}`: rows of {type(each).__name__} cannot be had by number.",
                    "Mix TextInput, SyntheticInput and the like.",
                )
            each.validate()
        specs = [{k: (v.shape, v.dtype) for k, v in each.element_spec().items()} for each in self.inputs]
        if any(spec != specs[0] for spec in specs):
            raise ConfigError(f"Mixture `{self.name}`: batches of its inputs differ: {specs}.", "Set the same seq_len.")

    def check_data(self) -> None:
        """Reads what can be wrong with the data of each input.

        Raises:
          ConfigError: Inputs have different ids for the end of a document.
          DataError: As the inputs say.
        """
        self.validate()
        for each in self.inputs:
            each.check_data()
        ends = {id for each in self.inputs for id, name in each.special_tokens().items() if name == "<eos>"}
        if len(ends) > 1:
            raise ConfigError(
                f"Mixture `{self.name}`: inputs end documents with ids {ends}.", "Give all one tokenizer."
            )

    def element_spec(self) -> NestedMap:
        return self.inputs[0].element_spec()

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        return self.inputs[0].ids_to_strings(ids, lengths, key)

    def special_tokens(self) -> dict[int, str]:
        return self.inputs[0].special_tokens()

    @property
    def text_tokenizer(self) -> Any:
        """The first input's tokenizer, or None."""
        return self.inputs[0].text_tokenizer

    @property
    def bad_records(self) -> list[str]:
        """What the inputs left out because it cannot be read, and where."""
        return [record for each in self._children for record in getattr(each, "bad_records", ())]

    @property
    def _children(self) -> list[RandomAccessInput]:
        return [each for each in self.inputs if isinstance(each, RandomAccessInput)]

    def num_rows(self) -> int | None:
        sizes = [each.num_rows() for each in self._children]
        return None if None in sizes else sum(filter(None, sizes))

    def data_fingerprint(self) -> Any:
        inputs = [each.data_fingerprint() for each in self._children]
        return zlib.crc32(json.dumps([inputs, self.weights]).encode())

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"bad_records": len(self.bad_records)}

    def order(self, positions: np.ndarray) -> np.ndarray:
        """The row at each position: its number within its input, times the number of inputs, plus the input's."""
        if self.repeats:
            child, position = np.array([self._mixed[at] for at in positions.tolist()], np.int64).reshape(-1, 2).T
        else:
            ends = np.cumsum([each.num_rows() or 0 for each in self._children])
            positions = np.minimum(positions, ends[-1] - 1)
            child = np.searchsorted(ends, positions, side="right")
            position = positions - np.where(child > 0, ends[child - 1], 0)
        numbers = np.empty_like(positions)
        for number, each in enumerate(self._children):
            mine = child == number
            numbers[mine] = each.order(position[mine]) * len(self.inputs) + number
        return numbers

    def rows(self, numbers: np.ndarray) -> NestedMap:
        # Padding is made by the first input.
        child = np.where(numbers < 0, 0, numbers % len(self.inputs))
        row = np.where(numbers < 0, -1, numbers // len(self.inputs))
        mine = [np.flatnonzero(child == number) for number in range(len(self.inputs))]
        parts = [each.rows(row[at]) for each, at in zip(self._children, mine, strict=True) if len(at)]
        back = np.argsort(np.concatenate(mine))
        return NestedMap({name: np.concatenate([part[name] for part in parts])[back] for name in parts[0]})

    @functools.cached_property
    def _mixed(self) -> Any:
        """For each position of the mixture: which input, and the position in it."""
        import grain

        streams = [
            grain.MapDataset.range(_ENDLESS).map(functools.partial(_named, number))
            for number in range(len(self.inputs))
        ]
        return grain.MapDataset.mix(streams, weights=self.weights)


def _named(number: int, position: int) -> tuple[int, int]:
    return number, position
