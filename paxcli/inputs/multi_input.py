"""Several inputs that are read together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from paxcli.errors import ConfigError
from paxcli.inputs.base_input import BaseInput
from paxcli.nested_map import NestedMap, num_rows


@dataclasses.dataclass(kw_only=True)
class MultiInput(BaseInput):
    """A batch of each of its inputs under the input's name (Pax's MultiInput).

    Its rows are the greatest common divisor of the inputs' batch sizes: with 8 and 12 rows a field [8, …] becomes
    [4, 2, …], and a field [12, …] becomes [4, 3, …]. It ends where the first of them ends. What is set here of hosts,
    training, evaluation and seed holds for all of them.

    Args:
      inputs: Name → input, each with its own batch_size, seq_len and so on.
      default_input: Whose tokenizer reads a field of no input's name. None: the first one's.
    """

    sizes_own_batches: ClassVar[bool] = True

    inputs: dict[str, BaseInput] = dataclasses.field(default_factory=dict)
    default_input: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, child in self.inputs.items():
            child.name = f"{self.name}_{name}"
            for field in ("num_infeed_hosts", "infeed_host_index", "is_training", "reset_for_eval"):
                setattr(child, field, getattr(self, field))
            child.eval_loop_num_batches, child.repeat = self.eval_loop_num_batches, self.repeats
            if child.input_random_seed is None:
                child.input_random_seed = self.input_random_seed

    def validate(self) -> None:
        super().validate()
        if not self.inputs or (self.reset_for_eval and len(self.inputs) > 1):
            raise ConfigError(
                f"Input `{self.name}` has {len(self.inputs)} inputs.",
                "Give it some; just one with reset_for_eval=True, since the epochs of several differ in length.",
            )
        if self.default_input is not None and self.default_input not in self.inputs:
            raise ConfigError(f"Input `{self.name}`: default_input is {self.default_input}, none of its inputs.")
        for child in self.inputs.values():
            child.validate()

    def check_data(self) -> None:
        self.validate()
        for child in self.inputs.values():
            child.check_data()

    def get_next(self) -> NestedMap:
        return _joined({name: child.get_next() for name, child in self.inputs.items()})

    def peek(self) -> NestedMap | None:
        batches = {name: child.peek() for name, child in self.inputs.items()}
        return None if any(batch is None for batch in batches.values()) else _joined(batches)

    def reset(self) -> None:
        for child in self.inputs.values():
            child.reset()

    def get_state(self) -> dict[str, Any]:
        return {name: child.get_state() for name, child in self.inputs.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        for name, child in self.inputs.items():
            child.set_state(state[name])

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        return self._child_of(key).ids_to_strings(ids, lengths, key.partition(".")[2] or key)

    def _child_of(self, field: str) -> BaseInput:
        name = field.partition(".")[0]
        return self.inputs[name if name in self.inputs else self.default_input or next(iter(self.inputs))]


def _joined(batches: dict[str, Any]) -> NestedMap:
    rows = math.gcd(*map(num_rows, batches.values()))
    return jax.tree.map(lambda array: array.reshape(rows, -1, *array.shape[1:]), NestedMap(batches))
