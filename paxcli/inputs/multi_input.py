"""Several inputs, read together into one nested batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from paxcli.errors import names_hint
from paxcli.inputs.base_input import BaseInput
from paxcli.nested_map import NestedMap, num_rows


@dataclasses.dataclass(kw_only=True)
class MultiInput(BaseInput):
    """A nested batch with the batch of each input under the input's name (Pax: `MultiInput`).

    Its number of rows is the greatest common divisor of the inputs' batch sizes: with 8 and 12 rows, a field [8, …]
    becomes [4, 2, …], and a field [12, …] becomes [4, 3, …]. It ends with the first input that ends. Its settings for
    hosts, training, evaluation and seed apply to all inputs.

    Args:
      inputs: Name → input, each with its own batch_size, seq_len and so on.
      default_input: The input whose tokenizer decodes fields outside of all inputs. None: the first one.
    """

    sizes_own_batches: ClassVar[bool] = True

    inputs: dict[str, BaseInput] = dataclasses.field(default_factory=dict)
    default_input: str | None = None

    def derive_fields(self) -> None:
        for name, child in self.inputs.items():
            child.name = f"{self.name}_{name}"
            for field in ("num_infeed_hosts", "infeed_host_index", "is_training", "reset_for_eval"):
                setattr(child, field, getattr(self, field))
            child.eval_loop_num_batches, child.repeat = self.eval_loop_num_batches, self.repeats
            if child.input_random_seed is None:
                child.input_random_seed = self.input_random_seed
            child.derive_fields()

    def parts(self) -> Iterable[BaseInput]:
        return self.inputs.values()

    def validate(self) -> None:
        super().validate()
        if not self.inputs or (self.reset_for_eval and len(self.inputs) > 1):
            hint = "Set `inputs`; with reset_for_eval=True only one, since epochs of several inputs differ in length."
            self.refuse(f"it has {len(self.inputs)} inputs.", hint)
        if self.default_input is not None and self.default_input not in self.inputs:
            problem = f"default_input {self.default_input} is not one of its inputs."
            self.refuse(problem, names_hint(self.default_input, self.inputs))

    def get_next(self) -> NestedMap:
        return _combine({name: child.get_next() for name, child in self.inputs.items()})

    def peek(self) -> NestedMap | None:
        batches = {name: child.peek() for name, child in self.inputs.items()}
        return None if any(batch is None for batch in batches.values()) else _combine(batches)

    def reset(self) -> None:
        for child in self.inputs.values():
            child.reset()

    def get_state(self) -> dict[str, Any]:
        return {name: child.get_state() for name, child in self.inputs.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        for name, child in self.inputs.items():
            child.set_state(state[name])

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        return self._input_of(key).ids_to_strings(ids, lengths, key.partition(".")[2] or key)

    def special_tokens(self, key: str = "ids") -> dict[int, str]:
        return self._input_of(key).special_tokens(key.partition(".")[2] or key)

    def _input_of(self, key: str) -> BaseInput:
        """The input that a field of a batch is from, or the one for fields outside of all inputs."""
        name = key.partition(".")[0]
        return self.inputs[name if name in self.inputs else self.default_input or next(iter(self.inputs))]


def _combine(batches: dict[str, Any]) -> NestedMap:
    rows = math.gcd(*map(num_rows, batches.values()))
    return jax.tree.map(lambda array: array.reshape(rows, -1, *array.shape[1:]), NestedMap(batches))
