"""What every input is: batches of numpy arrays, a position that can be saved, and one definition of an eval run."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from paxcli.config.configurable import Configurable
from paxcli.errors import ConfigError, DataError
from paxcli.nested_map import NestedMap

_DEFAULT_SEED = 42

# From `example_id` → output to metrics by name.
ExampleMetrics = Callable[[Mapping[int, Any]], dict[str, float]]


def _with_stop_iteration(get_next: Callable[[Any], NestedMap]) -> Callable[[Any], NestedMap]:
    """`get_next`, with one word for the end of the data."""

    @functools.wraps(get_next)
    def wrapped(self: Any) -> NestedMap:
        try:
            return get_next(self)
        except Exception as error:
            tensorflow = sys.modules.get("tensorflow")  # Where nobody has imported it, the error is not its.
            if tensorflow is not None and isinstance(error, tensorflow.errors.OutOfRangeError):
                raise StopIteration from error
            raise

    return wrapped


@dataclasses.dataclass(kw_only=True)
class BaseInput(Configurable, abc.ABC):
    """A stream of batches for one process.

    A new kind of input subclasses this, or inherits an input and changes what its `get_next` returns; its spec is then
    that of what it returns. TensorFlow's OutOfRangeError from `get_next` is the end of the data as StopIteration is.

    Attributes:
      sizes_own_batches: Whether `batch_size` is not to be set, since the data says it.

    Args:
      batch_size: Rows per batch of this process. None: the trainer sets it from the global batch.
      num_infeed_hosts: How many processes share the stream. The trainer sets it; 0 becomes 1.
      infeed_host_index: Which of them this is. The trainer sets it.
      input_random_seed: Drives all randomness. None: a training run draws one, the same in every process, and
        records it; an eval always uses one fixed seed.
      reset_for_eval: An eval run is one epoch, and the next one starts over.
      eval_loop_num_batches: Batches of an eval run that does not reset; None, with `reset_for_eval`: all of an epoch.
      is_training: Whether the input trains.
      repeat: Whether the stream starts over at its end. None: yes, unless `reset_for_eval`.
      name: What metrics call it. None: `train` in training, otherwise `input`.
    """

    sizes_own_batches: ClassVar[bool] = False

    batch_size: int | None = None
    num_infeed_hosts: int = 0
    infeed_host_index: int = 0
    input_random_seed: int | None = None
    reset_for_eval: bool = False
    eval_loop_num_batches: int | None = 1
    is_training: bool = False
    repeat: bool | None = None
    name: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "get_next" in vars(cls):
            cls.get_next = _with_stop_iteration(cls.get_next)  # type: ignore[method-assign]
            if "element_spec" not in vars(cls):
                cls.element_spec = BaseInput.element_spec

    def __post_init__(self) -> None:
        self.num_infeed_hosts = self.num_infeed_hosts or 1
        if self.name is None:
            self.name = "train" if self.is_training else "input"

    @abc.abstractmethod
    def get_next(self) -> NestedMap:
        """The next batch: numpy arrays with leading dimension `batch_size`.

        Raises:
          StopIteration: The data is at its end.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Starts the stream over."""

    def get_state(self) -> dict[str, Any]:
        """The position in the stream: small, and JSON can hold it."""
        raise ConfigError(f"{type(self).__name__} cannot save its position.", "Give it `get_state` and `set_state`.")

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues the stream, batch for batch, from where `get_state` returned `state`."""
        raise ConfigError(f"{type(self).__name__} cannot restore its position.", "Give it `get_state` and `set_state`.")

    def peek(self) -> NestedMap | None:
        """The batch that `get_next` will return, without taking it; None at the end of the data."""
        state = self.get_state()
        try:
            return self.get_next()
        except StopIteration:
            return None
        finally:
            self.set_state(state)

    def element_spec(self) -> NestedMap:
        """Shape and dtype of every field of a batch, as `jax.ShapeDtypeStruct`."""
        batch = self.peek()
        if batch is None:
            raise DataError(f"Input `{self.name}` has no batch left to take a spec from.")
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        """Readable text of the first `lengths[i]` of each row of `ids` [B, T], a field of that name (`key`).

        Without a tokenizer, the ids themselves.
        """
        return [" ".join(map(str, row[:length])) for row, length in zip(np.asarray(ids), lengths, strict=True)]

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer of this input's text; None if it has none."""
        return None

    def special_tokens(self) -> dict[int, str]:
        """Ids that stand for no text, and what to show for them."""
        return {}

    def example_metrics(self, of: Literal["scores", "predictions"]) -> ExampleMetrics | None:
        """What computes this input's own metrics, of the outputs of all examples of an epoch; None = it has none.

        An input that has some gives its batches a field `example_id` [B], negative in rows that stand for no example.

        Args:
          of: What an output is: the log-probability of the example's targets, or the ids [T] generated for it.
        """
        return None

    def eval_batches(self) -> Iterator[NestedMap]:
        """The batches of one eval or decode run: an epoch, or the next `eval_loop_num_batches`."""
        self.validate()
        return self._epoch() if self.reset_for_eval else self._rolling()

    def _epoch(self) -> Iterator[NestedMap]:
        self.reset()
        try:
            with contextlib.suppress(StopIteration):
                while True:
                    batch = self.get_next()
                    yield batch
        finally:
            self.reset()

    def _rolling(self) -> Iterator[NestedMap]:
        assert self.eval_loop_num_batches is not None
        for taken in range(self.eval_loop_num_batches):
            try:
                batch = self.get_next()
            except StopIteration:
                raise DataError(
                    f"Input `{self.name}` ended after {taken} of {self.eval_loop_num_batches} batches.",
                    "Set repeat=True, or reset_for_eval=True with eval_loop_num_batches=None for whole epochs.",
                ) from None
            yield batch

    @property
    def repeats(self) -> bool:
        """`repeat`, or what it is derived to be."""
        return self.repeat if self.repeat is not None else self.is_training or not self.reset_for_eval

    @property
    def seed(self) -> int:
        """`input_random_seed`, or the one that every eval uses."""
        return _DEFAULT_SEED if self.input_random_seed is None else self.input_random_seed

    def validate(self) -> None:
        """Raises ConfigError for settings that cannot work. Touches no file."""
        if not re.fullmatch(r"[a-zA-Z0-9.:_+-]+", self.name or ""):
            raise ConfigError(f"Input name {self.name!r} may hold letters, digits and . : _ + - only.")
        self._validate_sharding()
        self._validate_eval()

    def _validate_sharding(self) -> None:
        if self.sizes_own_batches and self.batch_size is not None:
            raise ConfigError(
                f"Input `{self.name}`: batch_size is {self.batch_size}, but {type(self).__name__} has its data's.",
                "Leave it out, and set the batch size of what the input reads.",
            )
        if not self.sizes_own_batches and (self.batch_size is None or self.batch_size < 1):
            raise ConfigError(
                f"Input `{self.name}`: batch_size is {self.batch_size}.", "Set it to the rows per process, 1 or more."
            )
        if not 0 <= self.infeed_host_index < self.num_infeed_hosts:
            raise ConfigError(
                f"Input `{self.name}`: infeed_host_index is {self.infeed_host_index} of {self.num_infeed_hosts} hosts.",
                "Hosts count from 0.",
            )
        if self.input_random_seed is not None and not 0 <= self.input_random_seed < 2**32:
            raise ConfigError(f"Input `{self.name}`: input_random_seed must be from 0 to 2**32 - 1.")

    def _validate_eval(self) -> None:
        batches = self.eval_loop_num_batches
        if batches is not None and batches < 1:
            raise ConfigError(
                f"Input `{self.name}`: eval_loop_num_batches is {batches}.",
                "Use 1 or more; or None with reset_for_eval=True for a whole epoch.",
            )
        if self.reset_for_eval and batches is not None:
            raise ConfigError(
                f"Input `{self.name}`: reset_for_eval=True runs whole epochs, but eval_loop_num_batches is {batches}.",
                "Set eval_loop_num_batches=None for an epoch, or reset_for_eval=False for the next batches each time.",
            )
        if not self.reset_for_eval and batches is None:
            raise ConfigError(
                f"Input `{self.name}`: eval_loop_num_batches=None runs to the end, and nothing starts it over.",
                "Set reset_for_eval=True for an epoch each time, or a number of batches.",
            )
        if self.reset_for_eval and self.repeats:
            raise ConfigError(
                f"Input `{self.name}`: reset_for_eval=True waits for an end that a repeating stream does not have.",
                "Leave repeat unset (and is_training False), or set reset_for_eval=False.",
            )

    def check_data(self) -> None:
        """Reads what can be wrong with the data before training starts; raises DataError."""


@dataclasses.dataclass(kw_only=True)
class RandomAccessInput(BaseInput):
    """An input that can make any row from its number. Its only state is the number of rows that all hosts took.

    Host h of a global batch that starts at row n holds the rows n + h * batch_size and up, so the hosts' batches
    end to end are the batch that one host alone would have had, and a run resumes on any number of hosts.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._next_row = 0
        self._is_valid = False

    @abc.abstractmethod
    def num_rows(self) -> int | None:
        """Rows in an epoch; None when there is no end."""

    @abc.abstractmethod
    def rows(self, numbers: np.ndarray) -> NestedMap:
        """The rows of these numbers [B]; -1 stands for a row of padding."""

    def order(self, positions: np.ndarray) -> np.ndarray:
        """Which row [B] stands at each position [B] of the endless stream."""
        num_rows = self.num_rows()
        return positions if num_rows is None else positions % num_rows

    def data_fingerprint(self) -> Any:
        """Differs when the data differs, so that a position in other data is refused; JSON can hold it."""
        return None

    def get_next(self) -> NestedMap:
        if not self._is_valid:
            self.validate()
            self._is_valid = True
        assert self.batch_size is not None
        num_rows = self.num_rows()
        ends = num_rows is not None and not self.repeats
        if ends and self._next_row >= num_rows:
            raise StopIteration
        first = self._next_row + self.infeed_host_index * self.batch_size
        positions = np.arange(first, first + self.batch_size)
        numbers = self.order(positions)
        batch = self.rows(np.where(positions < num_rows, numbers, -1) if ends else numbers)
        self._next_row += self.batch_size * self.num_infeed_hosts
        return batch

    def reset(self) -> None:
        self._next_row = 0

    def get_state(self) -> dict[str, Any]:
        return {"next_row": self._next_row, "data": self.data_fingerprint()}

    def set_state(self, state: dict[str, Any]) -> None:
        if state["data"] != self.data_fingerprint():
            raise DataError(
                f"The data of input `{self.name}` is not what it was when its position was saved.",
                "Bring the old data back, or start a new run from the old one's parameters.",
            )
        self._next_row = state["next_row"]


def language_spec(batch_size: int | None, seq_len: int | None) -> NestedMap:
    """Spec of a language-model batch: every field [B, T]."""
    shape = (batch_size, seq_len)
    names = ("ids", "labels", "weights", "segment_ids", "segment_pos")
    return NestedMap({n: jax.ShapeDtypeStruct(shape, np.float32 if n == "weights" else np.int32) for n in names})


@dataclasses.dataclass(kw_only=True)
class Prompts(Configurable):
    """What `pax decode` continues when it is given no prompt.

    Attributes:
      prompts: The texts.
    """

    prompts: list[str] = dataclasses.field(default_factory=list)
