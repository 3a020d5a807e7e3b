"""SeqIO tasks and mixtures as batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from paxcli.config.configurable import part
from paxcli.config.fields import Derived, Examples, PositiveInt, Tokens
from paxcli.errors import ConfigError, DataError, did_you_mean
from paxcli.inputs.base_input import BaseInput, ExampleMetrics
from paxcli.inputs.seqio_features import Features, LanguageModelFeatures
from paxcli.inputs.seqio_library import as_our_errors, load
from paxcli.inputs.seqio_metrics import TaskMetrics, VocabularyTokenizer
from paxcli.log import log
from paxcli.nested_map import NestedMap, num_rows

_ID_FIELDS = ("ids", "labels", "source_ids")


@dataclasses.dataclass(kw_only=True)
class SeqIOInput(BaseInput):
    """A SeqIO task or mixture (Pax: `SeqIOInput`). Whoever names one imports the module that registers it.

    Training goes through the data pass after pass. Each pass is what `seqio.get_dataset` gives for one epoch, the first
    with this input's seed and each later one with a seed of its own, so that a pass leaves nothing out. Each host reads
    a shard of its own (`seqio.ShardInfo`), and resumes with as many hosts as it began with, by reading again what
    it had read of the pass. A mixture that repeats is one endless pass.

    An evaluation, like any stream that ends, is the same on any number of hosts: all read all of it, and each takes
    its rows of every global batch. The last batch is filled with rows of zeros, which weigh nothing. Batches have two
    fields more, both [B]: `eval_sample_weights`, 0 for such a row and 1 for others, and `example_id`, the row's number
    in the epoch, by which outputs are joined with targets; -1 for such a row.

    Args:
      mixture_name: Name of a registered task or mixture; this or `mixture_or_task`.
      mixture_or_task: A `seqio.Task` or `seqio.Mixture` itself.
      split_name: Such as `train` or `validation`.
      task_feature_lengths: Feature of the task → how long it may be; longer ones are cut. None: `targets`, of seq_len.
      feature_converter: From the task's features to fields of a batch; ours, or any callable like a
        `seqio.FeatureConverter`.
      shuffle: Whether to shuffle. None: in training. An evaluation is never shuffled.
      use_cached: Whether to read the task from SeqIO's cache directories.
      trim_output_features: Whether SeqIO cuts features to their length before it packs.
      eval_num_examples: Rows of an eval epoch at most; None = all.
      seq_len: The longest row that the model takes. None: the trainer sets it.
      vocab_size: The model's, which must hold all ids. None: the trainer sets it.
    """

    mixture_name: str | None = None
    mixture_or_task: Any = None
    split_name: str | None = None
    task_feature_lengths: dict[str, Tokens] | None = None
    feature_converter: Features = part(LanguageModelFeatures)
    shuffle: bool | None = None
    use_cached: bool = False
    trim_output_features: bool = True
    eval_num_examples: Examples | None = None
    seq_len: Derived[Tokens | None] = None
    vocab_size: Derived[PositiveInt | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reset()

    # What it is made of.

    @functools.cached_property
    def task(self) -> Any:
        """The `seqio.Task` or `seqio.Mixture`.

        Raises:
          MissingError: SeqIO is not installed.
          ConfigError: Nothing is registered under the name.
        """
        seqio = load("seqio")
        if self.mixture_or_task is not None:
            return self.mixture_or_task
        names = {*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()}
        if self.mixture_name not in names:
            raise ConfigError(
                f"Input `{self.name}`: no SeqIO task or mixture is called `{self.mixture_name}`.",
                did_you_mean(str(self.mixture_name), names) or "Import the module that registers it in the recipe.",
            )
        return seqio.get_mixture_or_task(self.mixture_name)

    @property
    def lengths(self) -> dict[str, int]:
        """`task_feature_lengths`, or what it is derived to be."""
        assert self.task_feature_lengths is not None or self.seq_len is not None
        return dict(self.task_feature_lengths or {"targets": self.seq_len})  # type: ignore[dict-item]

    @property
    def shuffles(self) -> bool:
        """`shuffle`, or what it is derived to be."""
        return self.is_training if self.shuffle is None else self.shuffle

    @property
    def is_sharded(self) -> bool:
        """Whether this host reads a shard; otherwise it reads all, and takes its rows of each global batch."""
        return self.is_training and self.repeats

    def examples(self, number: int = 0) -> Any:
        """A pass through the task as a `tf.data.Dataset`, an example an element, before the feature converter."""
        seqio = load("seqio")
        shard = seqio.ShardInfo(self.infeed_host_index, self.num_infeed_hosts) if self.is_sharded else None
        seed = int(np.random.default_rng([self.seed, number]).integers(2**31)) if number else self.seed
        return self.task.get_dataset(
            sequence_length=self.lengths,
            split=self.split_name,
            shuffle=self.shuffles,
            seed=seed,
            shard_info=shard,
            num_epochs=None if isinstance(self.task, seqio.Mixture) and self.repeats else 1,
            use_cached=self.use_cached,
            trim_output_features=self.trim_output_features,
            try_in_mem_cache=False,
        )

    def _rows(self, number: int) -> Any:
        rows = self.feature_converter(self.examples(number), task_feature_lengths=self.lengths)
        return rows if self.eval_num_examples is None else rows.take(self.eval_num_examples)

    # The stream.

    def get_next(self) -> NestedMap:
        batch, self._position = self._peeked or self._take()
        self._peeked = None
        return batch

    def peek(self) -> NestedMap | None:
        try:
            self._peeked = self._peeked or self._take()
        except StopIteration:
            return None
        return self._peeked[0]

    def reset(self) -> None:
        self._go_to(0, 0)

    def get_state(self) -> dict[str, Any]:
        return {"pass": self._position[0], "row": self._position[1], **self._whose_position()}

    def set_state(self, state: dict[str, Any]) -> None:
        for what, value in self._whose_position().items():
            if state[what] != value:
                raise DataError(
                    f"The position of input `{self.name}` was saved with {what} {state[what]}, and now it is {value}.",
                    "Resume as it was, or start a new run from the old one's parameters (--from).",
                )
        if state["row"]:
            log.info("Input `%s` reads %d rows again, to go on after them.", self.name, state["row"])
        self._go_to(state["pass"], state["row"])

    def _whose_position(self) -> dict[str, Any]:
        """What a position means nothing without."""
        hosts = f"{self.infeed_host_index} of {self.num_infeed_hosts}" if self.is_sharded else "any"
        return {"data": f"{self.task.name}/{self.split_name}", "host": hosts, "seed": self.seed}

    def _go_to(self, number: int, row: int) -> None:
        self._position = (number, row)
        self._stream: Iterator[tuple[NestedMap, tuple[int, int]]] | None = None
        self._peeked: tuple[NestedMap, tuple[int, int]] | None = None

    def _take(self) -> tuple[NestedMap, tuple[int, int]]:
        if self._stream is None:
            self.validate()
            self._warn_of_few_shards()
            self._stream = self._batches(*self._position)
        return next(self._stream)

    def _batches(self, number: int, row: int) -> Iterator[tuple[NestedMap, tuple[int, int]]]:
        """Batches of this host from a row of a pass on, each with the position after it."""
        assert self.batch_size is not None
        size = self.batch_size * (1 if self.is_sharded else self.num_infeed_hosts)
        held: list[NestedMap] = []  # fewer rows than a batch
        while True:
            for rows in self._read(number, row, size):
                row += num_rows(rows)
                whole = _join([*held, rows])
                rest = num_rows(whole) % size
                if num_rows(whole) >= size:
                    yield self._share(_cut(whole, 0, size)), (number, row - rest)
                held = [_cut(whole, num_rows(whole) - rest, None)] if rest else []
            if not self.repeats:
                if held:
                    yield self._share(_padded(held[0], size)), (number, row)
                return
            if row == 0:
                raise DataError(f"{self._where}: this host has no example.", "Check the task, the split and its files.")
            number, row = number + 1, 0

    def _read(self, number: int, row: int, size: int) -> Iterator[NestedMap]:
        """The rows of a pass from one on, `size` at a time; the last ones fewer."""
        tf = load("tensorflow")
        with as_our_errors(self._where):
            rows = iter(self._rows(number).skip(row).batch(size).prefetch(tf.data.AUTOTUNE).as_numpy_iterator())
        while True:
            with as_our_errors(self._where):
                batch = next(rows, None)
            if batch is None:
                return
            batch = NestedMap(jax.tree.map(self._on_device, batch))
            count = num_rows(batch)
            if not self.is_training:
                batch.example_id = np.arange(row, row + count, dtype=np.int32)
                batch.eval_sample_weights = np.ones(count, np.float32)
            row += count
            yield batch

    def _on_device(self, array: Any) -> np.ndarray:
        if not isinstance(array, np.ndarray) or array.dtype == object:
            raise ConfigError(
                f"{self._where}: the feature converter leaves text or ragged arrays, which no device holds.",
                "Let it drop or pad them.",
            )
        return array.astype(np.int32) if array.dtype == np.int64 else array

    def _share(self, batch: NestedMap) -> NestedMap:
        """This host's rows of a batch, known to fit the model's vocabulary."""
        assert self.batch_size is not None
        if not self.is_sharded and self.num_infeed_hosts > 1:
            first = self.infeed_host_index * self.batch_size
            batch = _cut(batch, first, first + self.batch_size)
        largest = max((int(batch[key].max()) for key in _ID_FIELDS if key in batch), default=0)
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise DataError(
                f"{self._where}: there is an id {largest}, but the model's vocab_size is {self.vocab_size}.",
                f"Set the model's vocab_size to {largest + 1} or more, or use the tokenizer that it was made for.",
            )
        return batch

    # What others ask of it.

    def element_spec(self) -> NestedMap:
        if not isinstance(self.feature_converter, Features):
            return super().element_spec()
        spec = NestedMap(self.feature_converter.spec(self.batch_size, self.lengths))
        if not self.is_training:
            spec.example_id = jax.ShapeDtypeStruct((self.batch_size,), np.int32)
            spec.eval_sample_weights = jax.ShapeDtypeStruct((self.batch_size,), np.float32)
        return spec

    def validate(self) -> None:
        super().validate()
        self._validate_task()
        self._validate_lengths()
        if self.shuffle and not self.is_training:
            raise ConfigError(
                f"Input `{self.name}`: shuffle=True, but an evaluation is never shuffled.",
                "Leave shuffle unset; for a sample of the data, name a split such as validation[:5%].",
            )
        if self.eval_num_examples is not None and self.is_training:
            raise ConfigError(
                f"Input `{self.name}`: eval_num_examples={self.eval_num_examples} does not limit an evaluation.",
                "Use it in an eval input, and None in training.",
            )

    def _validate_task(self) -> None:
        if (self.mixture_name is None) == (self.mixture_or_task is None):
            given = "Neither" if self.mixture_name is None else "Both"
            raise ConfigError(
                f"Input `{self.name}`: {given} of mixture_name and mixture_or_task is set.", "Set one of them."
            )
        if not self.split_name:
            raise ConfigError(f"Input `{self.name}`: split_name is {self.split_name!r}.", "Name one, such as `train`.")
        self.task  # noqa: B018  the name is known, or refused here

    def _validate_lengths(self) -> None:
        if self.task_feature_lengths is None and self.seq_len is None:
            raise ConfigError(
                f"Input `{self.name}`: task_feature_lengths is None, and so is seq_len.",
                "Say how long each feature of the task may be, such as {inputs: 512, targets: 114}.",
            )
        if isinstance(self.feature_converter, Features) and self.seq_len is not None:
            length = self.feature_converter.row_length(self.lengths)
            if length > self.seq_len:
                raise ConfigError(
                    f"Input `{self.name}`: rows of {self.lengths} have {length} tokens, and the model takes "
                    f"{self.seq_len}.",
                    "Lower task_feature_lengths, or raise the model's max_seq_len.",
                )

    def check_data(self) -> None:
        """Makes the first batch.

        Raises:
          ConfigError: A tokenizer with ids that the model lacks, an unknown split, a feature that the task lacks.
          DataError: Files that are not there or cannot be read.
        """
        self.validate()
        with as_our_errors(self._where):
            splits = list(self.task.splits)
        split = str(self.split_name).partition("[")[0]
        if splits and split not in splits:
            raise ConfigError(
                f"{self._where}: there is no split `{split}`.",
                did_you_mean(split, splits) or f"There are {', '.join(splits)}.",
            )
        for name, feature in self.task.output_features.items():
            size = feature.vocabulary.vocab_size
            if name in self.lengths and self.vocab_size is not None and size > self.vocab_size:
                raise ConfigError(
                    f"{self._where}: the vocabulary of `{name}` has {size} ids, but the model's vocab_size is "
                    f"{self.vocab_size}.",
                    f"Set the model's vocab_size to {size} or more, or use the tokenizer that it was made for.",
                )
        self.peek()

    def _warn_of_few_shards(self) -> None:
        tasks = getattr(self.task, "tasks", [self.task])
        for task in tasks if self.is_sharded and self.num_infeed_hosts > 1 else ():
            with as_our_errors(self._where):
                files = self.num_infeed_hosts if self.use_cached else len(task.source.list_shards(self.split_name))
            if files < self.num_infeed_hosts:
                log.warning(
                    "%s: %d hosts share %d files, so each reads them all.", self._where, self.num_infeed_hosts, files
                )

    @functools.cached_property
    def text_tokenizer(self) -> VocabularyTokenizer:
        """The vocabulary of `targets`, as a tokenizer."""
        starts = not getattr(self.feature_converter, "reverse_bos_padding", False)
        bos_id = getattr(self.feature_converter, "bos_id", 0) if starts else None
        return VocabularyTokenizer(self.task.output_features["targets"].vocabulary, bos_id)

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        feature = self.task.output_features.get("inputs" if key.startswith("source") else "targets")
        decode = feature.vocabulary.decode
        return [decode([int(i) for i in row[:length]]) for row, length in zip(np.asarray(ids), lengths, strict=True)]

    def special_tokens(self) -> dict[int, str]:
        return {self.text_tokenizer.pad_id: "<pad>", self.text_tokenizer.eos_id: "<eos>"}

    def example_metrics(self, of: Literal["scores", "predictions"]) -> ExampleMetrics | None:
        """The task's `score_metric_fns` or `predict_metric_fns`, to be called with an output for each `example_id`.

        None where there are none, and for a mixture, whose tasks are evaluated by an input each.

        Raises:
          ConfigError: This input's rows are not the task's examples, or their scores are not those of the targets.
        """
        functions = getattr(self.task, "score_metric_fns" if of == "scores" else "predict_metric_fns", ())
        if not functions or not self.reset_for_eval:
            return None
        converter, metrics = self.feature_converter, f"the metrics of task `{self.task.name}`"
        if getattr(converter, "pack", False):
            raise ConfigError(f"{self._where}: it packs examples, but {metrics} need one a row.", "Set pack=False.")
        on_targets = getattr(converter, "weights_on_targets_only", True)
        if of == "scores" and "inputs" in self.lengths and not on_targets:
            raise ConfigError(
                f"{self._where}: {metrics} need the scores of targets, and inputs weigh too.",
                "Set weights_on_targets_only=True.",
            )
        return TaskMetrics(self.task, tuple(functions), of, self._where, self._targets)

    def _targets(self) -> Iterator[Mapping[str, Any]]:
        """The examples of an eval epoch, in the order of their `example_id`."""
        with as_our_errors(self._where):
            examples = self.examples()
            if self.eval_num_examples is not None:
                examples = examples.take(self.eval_num_examples)
            yield from examples.as_numpy_iterator()

    @property
    def _where(self) -> str:
        return f"Input `{self.name}`"


def _join(parts: Sequence[NestedMap]) -> NestedMap:
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def _cut(rows: NestedMap, start: int, stop: int | None) -> NestedMap:
    return jax.tree.map(lambda array: array[start:stop], rows)


def _padded(rows: NestedMap, size: int) -> NestedMap:
    """The rows, and rows of zeros behind them."""
    missing = size - num_rows(rows)
    padded = jax.tree.map(
        lambda array: np.concatenate([array, np.zeros_like(array, shape=(missing, *array.shape[1:]))]), rows
    )
    if "example_id" in padded:
        padded.example_id[size - missing :] = -1
    return padded
