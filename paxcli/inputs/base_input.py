"""The contract of an input: batches of numpy arrays, a position that can be saved, and eval epochs."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import jax
import numpy as np

from paxcli.config.configurable import Configurable
from paxcli.config.fields import Derived, Examples, NonNegativeInt, PositiveInt, Seed
from paxcli.config.tree import check_fields
from paxcli.errors import ConfigError, DataError, PaxError
from paxcli.log import log
from paxcli.nested_map import NestedMap

_DEFAULT_SEED = 42

# Maps outputs by `example_id` to metrics by name.
ExampleMetrics = Callable[[Mapping[int, Any]], dict[str, float]]


def _translate_out_of_range(get_next: Callable[[Any], NestedMap]) -> Callable[[Any], NestedMap]:
    """Wraps `get_next` so that TensorFlow's OutOfRangeError becomes StopIteration."""

    @functools.wraps(get_next)
    def wrapper(self: Any) -> NestedMap:
        try:
            return get_next(self)
        except Exception as error:
            tensorflow = sys.modules.get("tensorflow")  # if it was never imported, the error is not TensorFlow's
            if tensorflow is not None and isinstance(error, tensorflow.errors.OutOfRangeError):
                raise StopIteration from error
            raise

    return wrapper


@dataclasses.dataclass(kw_only=True)
class BaseInput(Configurable, abc.ABC):
    """A stream of batches for one process.

    A subclass implements:
      get_next: Returns the next batch. Raises StopIteration, or TensorFlow's OutOfRangeError, at the end of the data.
      reset: Restarts the stream.
      get_state, set_state: Save and restore the position, for resuming a run and for `peek`.
      element_spec: Optional. The default reads one batch and returns its shapes and dtypes.
      derive_fields, parts, check_data, describe_data, num_rows, ids_to_strings, special_tokens, prompt_template,
      example_metrics: Optional.

    A subclass of a concrete input may override `get_next` alone, to change the batches of its parent. Its
    `element_spec` is then the default one, not the parent's.

    Attributes:
      sizes_own_batches: Whether the data determines the batch size, so that `batch_size` must not be set.
      required: Fields besides `batch_size` that must not be None when the input is read.

    Args:
      batch_size: Rows per batch of this process. None: the trainer sets it from the global batch.
      num_infeed_hosts: Number of processes that share the stream. The trainer sets it; 0 becomes 1.
      infeed_host_index: Index of this process among them. The trainer sets it.
      input_random_seed: Seed of all randomness. None: training uses the run's `random_seed`; an eval always uses one
        fixed seed.
      reset_for_eval: Whether an eval run is one epoch, from the start of the data.
      eval_loop_num_batches: Number of batches of an eval run without `reset_for_eval`. None, with `reset_for_eval`:
        the full epoch.
      is_training: Whether this is the training input.
      repeat: Whether the stream restarts at its end. None: yes, unless `reset_for_eval`.
      name: Name of the input in metrics. None: `train` in training, otherwise `input`.
    """

    sizes_own_batches: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = ()

    batch_size: Examples | None = None
    num_infeed_hosts: Derived[NonNegativeInt] = 0
    infeed_host_index: Derived[NonNegativeInt] = 0
    input_random_seed: Derived[Seed | None] = None
    reset_for_eval: bool = False
    eval_loop_num_batches: PositiveInt | None = 1
    is_training: bool = False
    repeat: bool | None = None
    name: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Translates the OutOfRangeError of a subclass's `get_next`, and gives it the default `element_spec`."""
        super().__init_subclass__(**kwargs)
        if "get_next" in vars(cls):
            cls.get_next = _translate_out_of_range(cls.get_next)  # type: ignore[method-assign]
            if "element_spec" not in vars(cls):
                cls.element_spec = BaseInput.element_spec

    def __post_init__(self) -> None:
        self.num_infeed_hosts = self.num_infeed_hosts or 1
        if self.name is None:
            self.name = "train" if self.is_training else "input"
        self.derive_fields()

    def derive_fields(self) -> None:
        """Sets fields of this input, and of inputs that it reads, that follow from its other fields.

        It is called at the start, and again after an input that reads this one has set its fields.
        """

    @abc.abstractmethod
    def get_next(self) -> NestedMap:
        """Returns the next batch: numpy arrays with leading dimension `batch_size`.

        Raises:
          StopIteration: The end of the data.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Restarts the stream from its first batch."""

    def get_state(self) -> dict[str, Any]:
        """The position in the stream: small, and serializable as JSON."""
        raise ConfigError(f"{type(self).__name__} cannot save its position.", "Implement `get_state` and `set_state`.")

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the position that `get_state` returned. The next batches are the same as after that call."""
        self.refuse(f"{type(self).__name__} cannot restore its position.", "Implement `get_state` and `set_state`.")

    def peek(self) -> NestedMap | None:
        """The next batch, without advancing the stream; None at the end of the data."""
        state = self.get_state()
        try:
            return next(self.remaining_batches(), None)
        finally:
            self.set_state(state)

    def element_spec(self) -> NestedMap:
        """Shape and dtype of every field of a batch, as `jax.ShapeDtypeStruct`."""
        if (batch := self.peek()) is None:
            self.refuse("there are no batches left, so its element spec is unknown.", "Call `reset` first.", DataError)
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        """Decodes the first `lengths[i]` ids of each row of `ids` [B, T], which is the batch's field `key`.

        Without a tokenizer, returns the ids as numbers.
        """
        return [" ".join(map(str, row[:length])) for row, length in zip(np.asarray(ids), lengths, strict=True)]

    def num_rows(self) -> int | None:
        """Number of rows in an epoch; None: infinite, or unknown."""
        return None

    def data_share(self, num_batches: int) -> float | None:
        """The share of this input's data that an evaluation of so many batches covers; None = unknown."""
        return 1.0 if self.reset_for_eval else None

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer of this input's text; None if it has none."""
        return None

    def prompt_template(self) -> Any:
        """The chat template of prompts (`paxcli.inputs.chat_template.ChatTemplate`); None if there is none."""
        return None

    def special_tokens(self, key: str = "ids") -> dict[int, str]:
        """Ids of special tokens in the batch's field `key`, such as padding, and the text to show for each."""
        tokenizer = self.text_tokenizer
        return {} if tokenizer is None else {tokenizer.pad_id: "<pad>", tokenizer.eos_id: "<eos>"}

    def example_metrics(self, of: Literal["scores", "predictions"]) -> ExampleMetrics | None:
        """A function that computes this input's own metrics from the outputs of all examples of an epoch, or None.

        An input with such metrics adds the field `example_id` [B] to its batches, negative in rows of padding.

        Args:
          of: Kind of outputs: "scores", the log-probability of an example's targets, or "predictions", the generated
            ids [T].
        """
        return None

    def remaining_batches(self) -> Iterator[NestedMap]:
        """The batches from here to the end of the data."""
        with contextlib.suppress(StopIteration):
            while True:
                yield self.get_next()

    def eval_batches(self) -> Iterator[NestedMap]:
        """The batches of one eval or decode run: an epoch, or the next `eval_loop_num_batches` batches."""
        self.validate()
        return self._read_epoch() if self.reset_for_eval else self._read_next_batches()

    def _read_epoch(self) -> Iterator[NestedMap]:
        self.reset()
        try:
            yield from self.remaining_batches()
        finally:
            self.reset()

    def _read_next_batches(self) -> Iterator[NestedMap]:
        assert self.eval_loop_num_batches is not None
        count = 0
        for batch in itertools.islice(self.remaining_batches(), self.eval_loop_num_batches):
            yield batch
            count += 1
        if count < self.eval_loop_num_batches:
            hint = "Set repeat=True, or reset_for_eval=True with eval_loop_num_batches=None to evaluate full epochs."
            self.refuse(f"it ended after {count} of {self.eval_loop_num_batches} batches.", hint, DataError)

    @property
    def repeats(self) -> bool:
        """`repeat`, or its default for this input."""
        return self.repeat if self.repeat is not None else self.is_training or not self.reset_for_eval

    @property
    def seed(self) -> int:
        """`input_random_seed`, or the fixed seed of evals."""
        return _DEFAULT_SEED if self.input_random_seed is None else self.input_random_seed

    def validate(self) -> None:
        """Raises ConfigError for invalid settings. Reads no files."""
        if not re.fullmatch(r"[a-zA-Z0-9.:_+-]+", self.name or ""):
            hint = "Rename the input."
            raise ConfigError(f"Input name {self.name!r} may contain only letters, digits and . : _ + -", hint)
        check_fields(self, f"Input `{self.name}`: ")
        if self.sizes_own_batches and self.batch_size is not None:
            hint = "Leave it out, and set the batch size of the inputs or the generator that it reads."
            self.refuse(f"batch_size is {self.batch_size}, but the data of {type(self).__name__} sets it.", hint)
        for field in (*self.required, *(() if self.sizes_own_batches else ("batch_size",))):
            if getattr(self, field) is None:
                self.refuse(f"{field} is None.", "Set it to 1 or more.")
        if not 0 <= self.infeed_host_index < self.num_infeed_hosts:
            hint = "Hosts are numbered from 0."
            self.refuse(f"infeed_host_index is {self.infeed_host_index} of {self.num_infeed_hosts} hosts.", hint)
        batches = self.eval_loop_num_batches
        if self.reset_for_eval and batches is not None:
            hint = "Set eval_loop_num_batches=None for an epoch, or reset_for_eval=False for the next batches."
            self.refuse(f"reset_for_eval=True runs full epochs, but eval_loop_num_batches is {batches}.", hint)
        if not self.reset_for_eval and batches is None:
            hint = "Set reset_for_eval=True for an epoch each time, or a number of batches."
            self.refuse("eval_loop_num_batches=None runs to the end, and nothing restarts the data.", hint)
        if self.reset_for_eval and self.repeats:
            hint = "Leave repeat unset (and is_training False), or set reset_for_eval=False."
            self.refuse("reset_for_eval=True needs a finite stream, but this one repeats.", hint)
        for part in self.parts():
            part.validate()

    def refuse(self, problem: str, hint: str, kind: type[PaxError] = ConfigError) -> NoReturn:
        """Raises an error about this input: its cause, and what to do next."""
        raise kind(f"Input `{self.name}`: {problem}", hint) from None

    def check_fits_model(self, what: str, num_ids: int, vocab_size: int | None) -> None:
        """Raises ConfigError if `what`, such as a tokenizer, has more ids than the model; None: the model has none."""
        if vocab_size is not None and num_ids > vocab_size:
            hint = f"Set the model's vocab_size to {num_ids} or more, or use the model's tokenizer."
            self.refuse(f"{what} {num_ids} ids, but the model's vocab_size is {vocab_size}.", hint)
        if vocab_size is not None and 2 * num_ids < vocab_size:
            message = "Input %s: %s only %d ids, and the model's vocab_size is %d. Is it the model's tokenizer?"
            log.warning(message, self.name, what, num_ids, vocab_size)

    def parts(self) -> Iterable[BaseInput]:
        """The inputs that this one combines."""
        return ()

    def check_data(self) -> None:
        """Reads and checks the data, and loads libraries, before training starts its threads. Raises DataError."""
        self.validate()
        for part in self.parts():
            part.check_data()

    def describe_data(self) -> str:
        """The source of the data, for a dry run. Reads no data; raises DataError if it does not exist."""
        return " + ".join(part.describe_data() for part in self.parts()) or type(self).__name__


@dataclasses.dataclass(kw_only=True)
class RandomAccessInput(BaseInput):
    """An input with random access to its rows. Its state is the number of rows that all hosts have read.

    In a global batch that starts at row n, host h has the rows from n + h * batch_size. The concatenated batches of all
    hosts equal the batch of a single host, so a run can resume on any number of hosts.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._next_row, self._is_valid = 0, False

    @abc.abstractmethod
    def num_rows(self) -> int | None:
        """Number of rows in an epoch; None: the stream has no epochs."""

    @abc.abstractmethod
    def rows(self, numbers: np.ndarray) -> NestedMap:
        """The rows with these numbers [B]; -1 is a row of padding."""

    def data_share(self, num_batches: int) -> float | None:
        rows, num_rows = num_batches * (self.batch_size or 0) * self.num_infeed_hosts, self.num_rows()
        return None if num_rows is None else min(1.0, rows / num_rows)

    def order(self, positions: np.ndarray) -> np.ndarray:
        """The row number [B] at each position [B] of the infinite stream."""
        num_rows = self.num_rows()
        return positions if num_rows is None else positions % num_rows

    def data_fingerprint(self) -> Any:
        """Identifies the data, so that a position saved with other data is rejected. Serializable as JSON."""
        return None

    def get_next(self) -> NestedMap:
        if not self._is_valid:
            self.validate()
            self._is_valid = True
        assert self.batch_size is not None
        num_rows = self.num_rows()
        is_finite = num_rows is not None and not self.repeats
        if is_finite and self._next_row >= num_rows:
            raise StopIteration
        first = self._next_row + self.infeed_host_index * self.batch_size
        positions = np.arange(first, first + self.batch_size)
        numbers = self.order(positions)
        batch = self.rows(np.where(positions < num_rows, numbers, -1) if is_finite else numbers)
        self._next_row += self.batch_size * self.num_infeed_hosts
        return batch

    def reset(self) -> None:
        self._next_row = 0

    def get_state(self) -> dict[str, Any]:
        return {"next_row": self._next_row, "data": self.data_fingerprint()}

    def set_state(self, state: dict[str, Any]) -> None:
        if state.get("data") != self.data_fingerprint() or not isinstance(state.get("next_row"), int):
            hint = "Restore the old data, or start a new run from the old one's parameters (--from)."
            self.refuse("its data has changed since its position was saved.", hint, DataError)
        self._next_row = state["next_row"]


@dataclasses.dataclass(kw_only=True)
class StreamInput(BaseInput):
    """An input that reads its batches in order. A subclass implements `read_batches`, `get_state` and `set_state`.

    Attributes:
      position: The position before the next batch, as `read_batches` returned it.
    """

    START: ClassVar[Any] = (0, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seek(self.START)

    @abc.abstractmethod
    def read_batches(self, position: Any) -> Iterator[tuple[NestedMap, Any]]:
        """The batches from a position to the end of the data, each with the position after it."""

    def seek(self, position: Any) -> None:
        """Continues at a position; `START` is that of the first batch."""
        self.position = position
        self._stream: Iterator[tuple[NestedMap, Any]] | None = None
        self._peeked: tuple[NestedMap, Any] | None = None

    def get_next(self) -> NestedMap:
        batch, self.position = self._peeked or self._read()
        self._peeked = None
        return batch

    def peek(self) -> NestedMap | None:
        before = self.position
        try:
            batch, after = self._peeked or self._read()
        except StopIteration:
            return None
        try:
            self._peeked = jax.tree.map(lambda array: array, batch), after
            return self.get_next()  # a subclass may change batches there
        finally:
            self.position, self._peeked = before, (batch, after)

    def reset(self) -> None:
        self.seek(self.START)

    def _read(self) -> tuple[NestedMap, Any]:
        if self._stream is None:
            self.validate()
            self._stream = self.read_batches(self.position)
        return next(self._stream)


def language_spec(batch_size: int | None, seq_len: int | None) -> NestedMap:
    """The element spec of a language-model batch: every field is [B, T]."""
    shape = (batch_size, seq_len)
    names = ("ids", "labels", "weights", "segment_ids", "segment_pos")
    return NestedMap({n: jax.ShapeDtypeStruct(shape, np.float32 if n == "weights" else np.int32) for n in names})


def sequence_spec(batch_size: int | None, source_len: int | None, seq_len: int | None) -> NestedMap:
    """The element spec of an encoder-decoder batch: that of its target [B, T], and fields of its source [B, S]."""
    source = language_spec(batch_size, source_len)
    names = ("ids", "segment_ids", "segment_pos")
    return NestedMap(language_spec(batch_size, seq_len), **{f"source_{name}": source[name] for name in names})


@dataclasses.dataclass(kw_only=True)
class Prompts(Configurable):
    """Default prompts of `pax decode`.

    Attributes:
      prompts: The texts.
    """

    prompts: list[str] = dataclasses.field(default_factory=list)


def tokenizer_of(source: BaseInput) -> Any:
    """The tokenizer of an input.

    Raises:
      ConfigError: It has none.
    """
    if (tokenizer := source.text_tokenizer) is not None:
        return tokenizer
    hint = "Decode a run that was trained on text."
    raise ConfigError(f"{type(source).__name__} has no tokenizer, so text cannot be decoded.", hint)
