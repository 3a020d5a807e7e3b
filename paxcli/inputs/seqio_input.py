"""SeqIOInput: batches from SeqIO tasks and mixtures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from paxcli.config.configurable import part
from paxcli.config.fields import Derived, Examples, PositiveInt, Tokens
from paxcli.errors import DataError, did_you_mean
from paxcli.inputs.base_input import ExampleMetrics, StreamInput
from paxcli.inputs.seqio_features import Features, LanguageModelFeatures
from paxcli.inputs.seqio_library import load, translate_errors
from paxcli.log import log
from paxcli.nested_map import NestedMap, num_rows

_ID_FIELDS = ("ids", "labels", "source_ids")


@dataclasses.dataclass(kw_only=True)
class SeqIOInput(StreamInput):
    """Batches of a SeqIO task or mixture (Pax: `SeqIOInput`). The recipe must import the module that registers it.

    Training reads epoch after epoch. Each epoch is `seqio.get_dataset` with one epoch: the first with this input's
    seed, each later one with a different seed, so every epoch has all examples. Each host reads its own shard
    (`seqio.ShardInfo`). A run resumes on the same number of hosts, by reading again the rows that it has already seen
    in the epoch. A repeating mixture is a single infinite epoch.

    An evaluation, and any other finite stream, is the same on any number of hosts: every host reads all data and takes
    its rows of every global batch. The last batch is padded with rows of zeros, of weight 0. Batches have two more
    fields [B]: `eval_sample_weights`, 0 for padding and 1 for other rows, and `example_id`, the row's number in the
    epoch, or -1 for padding, to match outputs with targets.

    Args:
      mixture_name: Name of a registered task or mixture. Set this or `mixture_or_task`.
      mixture_or_task: A `seqio.Task` or `seqio.Mixture`.
      split_name: Such as `train` or `validation`.
      task_feature_lengths: Feature of the task → maximum length; longer ones are trimmed. None: `targets`, of seq_len.
      feature_converter: Converts the task's features to fields of a batch: a `Features`, or a callable like
        `seqio.FeatureConverter`.
      shuffle: Whether to shuffle. None: in training. An evaluation is never shuffled.
      use_cached: Whether to read the task from SeqIO's cache directories.
      trim_output_features: Whether SeqIO trims features to their maximum length before packing.
      eval_num_examples: Maximum number of rows of an eval epoch; None: all.
      seq_len: The model's maximum row length. None: the trainer sets it.
      vocab_size: The model's vocabulary size; all ids must be smaller. None: the trainer sets it.
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

    @functools.cached_property
    def task(self) -> Any:
        """The `seqio.Task` or `seqio.Mixture`.

        Raises:
          MissingError: SeqIO is not installed.
          ConfigError: No task or mixture is registered under the name.
        """
        seqio = load("seqio")
        if self.mixture_or_task is not None:
            return self.mixture_or_task
        names = {*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()}
        if self.mixture_name not in names:
            hint = did_you_mean(str(self.mixture_name), names) or "Import the module that registers it in the recipe."
            self.refuse(f"there is no SeqIO task or mixture `{self.mixture_name}`.", hint)
        return seqio.get_mixture_or_task(self.mixture_name)

    def data_share(self, num_batches: int) -> float | None:
        return None if self.eval_num_examples is not None else super().data_share(num_batches)

    @property
    def lengths(self) -> dict[str, int]:
        """`task_feature_lengths`, or its default."""
        return dict(self.task_feature_lengths or {"targets": self.seq_len})  # type: ignore[dict-item]

    @property
    def is_sharded(self) -> bool:
        """Whether this host reads its own shard; otherwise it reads all data and takes its rows of each batch."""
        return self.is_training and self.repeats

    def examples(self, epoch: int = 0) -> Any:
        """The task's examples of one epoch as a `tf.data.Dataset`, before the feature converter."""
        seqio = load("seqio")
        shard = seqio.ShardInfo(self.infeed_host_index, self.num_infeed_hosts) if self.is_sharded else None
        return self.task.get_dataset(
            sequence_length=self.lengths,
            split=self.split_name,
            shuffle=self.is_training if self.shuffle is None else self.shuffle,
            seed=int(np.random.default_rng([self.seed, epoch]).integers(2**31)) if epoch else self.seed,
            shard_info=shard,
            num_epochs=None if isinstance(self.task, seqio.Mixture) and self.repeats else 1,
            use_cached=self.use_cached,
            trim_output_features=self.trim_output_features,
            try_in_mem_cache=False,
        )

    def get_state(self) -> dict[str, Any]:
        epoch, row = self.position
        return {"pass": epoch, "row": row, **self._position_context()}

    def set_state(self, state: dict[str, Any]) -> None:
        for name, value in self._position_context().items():
            if state[name] != value:
                problem = f"its position was saved with {name} {state[name]}, and now it is {value}."
                hint = "Resume with the old settings, or start a new run from the old one's parameters (--from)."
                self.refuse(problem, hint, DataError)
        if state["row"]:
            log.info("Input `%s` resumes: skipping the %d rows of this epoch already read.", self.name, state["row"])
        self.seek((state["pass"], state["row"]))

    def _position_context(self) -> dict[str, Any]:
        """The settings that a saved position depends on."""
        hosts = f"{self.infeed_host_index} of {self.num_infeed_hosts}" if self.is_sharded else "any"
        return {"data": f"{self.task.name}/{self.split_name}", "host": hosts, "seed": self.seed}

    def read_batches(self, position: tuple[int, int]) -> Iterator[tuple[NestedMap, tuple[int, int]]]:
        """This host's batches from a row of an epoch, each with the position after it."""
        self._warn_of_few_shards()
        epoch, row = position
        assert self.batch_size is not None
        size = self.batch_size * (1 if self.is_sharded else self.num_infeed_hosts)
        remainder: list[NestedMap] = []  # fewer rows than a batch
        while True:
            for new in self._read_epoch_rows(epoch, row, size):
                row += num_rows(new)
                rows = jax.tree.map(lambda *arrays: np.concatenate(arrays), *remainder, new) if remainder else new
                rest = num_rows(rows) % size
                if num_rows(rows) >= size:
                    yield self._take_host_rows(_slice(rows, 0, size)), (epoch, row - rest)
                remainder = [_slice(rows, num_rows(rows) - rest, None)] if rest else []
            if not self.repeats:
                if remainder:
                    yield self._take_host_rows(_pad(remainder[0], size)), (epoch, row)
                return
            if row == 0:
                self.refuse("this host has no examples.", "Check the task, the split and its files.", DataError)
            epoch += 1
            row = 0

    def _read_epoch_rows(self, epoch: int, row: int, size: int) -> Iterator[NestedMap]:
        """The rows of an epoch from `row`, `size` at a time; the last ones may be fewer."""
        with translate_errors(self.name):
            rows = self.feature_converter(self.examples(epoch), task_feature_lengths=self.lengths)
            rows = rows.take(self.eval_num_examples or -1).skip(row)
            for arrays in rows.batch(size).prefetch(load("tensorflow").data.AUTOTUNE).as_numpy_iterator():
                batch = NestedMap(jax.tree.map(self._to_device_dtype, arrays))
                count = num_rows(batch)
                if not self.is_training:
                    batch.example_id = np.arange(row, row + count, dtype=np.int32)
                    batch.eval_sample_weights = np.ones(count, np.float32)
                row += count
                yield batch

    def _to_device_dtype(self, array: Any) -> np.ndarray:
        if not isinstance(array, np.ndarray) or array.dtype == object:
            hint = "Change it to drop or pad them."
            self.refuse("the feature converter returns strings or ragged arrays, which JAX does not support.", hint)
        return array.astype(np.int32) if array.dtype == np.int64 else array

    def _take_host_rows(self, batch: NestedMap) -> NestedMap:
        """This host's rows of a batch, after a check against the model's vocabulary size."""
        if not self.is_sharded:
            size = num_rows(batch) // self.num_infeed_hosts
            batch = _slice(batch, self.infeed_host_index * size, (self.infeed_host_index + 1) * size)
        largest = max((int(batch[key].max()) for key in _ID_FIELDS if key in batch), default=0)
        if self.vocab_size is not None and largest >= self.vocab_size:
            hint = f"Set the model's vocab_size to {largest + 1} or more, or use the model's tokenizer."
            self.refuse(f"the data has id {largest}, but the model's vocab_size is {self.vocab_size}.", hint, DataError)
        return batch

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
        if self.task_feature_lengths is None and self.seq_len is None:
            hint = "Set the maximum length of each feature of the task, such as {inputs: 512, targets: 114}."
            self.refuse("neither task_feature_lengths nor seq_len is set.", hint)
        if isinstance(self.feature_converter, Features) and self.seq_len is not None:
            lengths, length = self.lengths, self.feature_converter.row_length(self.lengths)
            if length > self.seq_len:
                hint = "Lower task_feature_lengths, or raise the model's max_seq_len."
                self.refuse(f"rows of {lengths} have {length} tokens, but the model's maximum is {self.seq_len}.", hint)
        if self.shuffle and not self.is_training:
            hint = "Leave shuffle unset; for a sample of the data, use a split such as validation[:5%]."
            self.refuse("shuffle=True, but an evaluation is never shuffled.", hint)
        if self.eval_num_examples is not None and self.is_training:
            hint = "Use it in an eval input, and None in training."
            self.refuse(f"eval_num_examples={self.eval_num_examples} does not limit an evaluation.", hint)

    def _validate_task(self) -> None:
        if (self.mixture_name is None) == (self.mixture_or_task is None):
            problem = "neither is set" if self.mixture_name is None else "both are set"
            self.refuse(f"mixture_name, mixture_or_task: {problem}.", "Set one of them.")
        if not self.split_name:
            self.refuse(f"split_name is {self.split_name!r}.", "Set it, such as `train`.")
        self.task  # noqa: B018 - raises ConfigError for an unknown name

    def check_data(self) -> None:
        """Reads the first batch.

        Raises:
          ConfigError: The tokenizer has ids beyond the model's, or the split or a feature does not exist.
          DataError: Files are missing or cannot be read.
        """
        self.validate()
        with translate_errors(self.name):
            splits = list(self.task.splits)
        split = str(self.split_name).partition("[")[0]
        if splits and split not in splits:
            self.refuse(f"there is no split `{split}`.", did_you_mean(split, splits) or f"Splits: {', '.join(splits)}.")
        for name in self.task.output_features.keys() & self.lengths.keys():
            size = self.task.output_features[name].vocabulary.vocab_size
            self.check_fits_model(f"the vocabulary of `{name}` has", size, self.vocab_size)
        self.peek()

    def _warn_of_few_shards(self) -> None:
        for task in getattr(self.task, "tasks", [self.task]) if self.is_sharded and self.num_infeed_hosts > 1 else ():
            with translate_errors(self.name):
                files = self.num_infeed_hosts if self.use_cached else len(task.source.list_shards(self.split_name))
            if files < self.num_infeed_hosts:
                message = "Input `%s`: %d hosts share only %d files, so each host reads all of them."
                log.warning(message, self.name, self.num_infeed_hosts, files)

    @functools.cached_property
    def text_tokenizer(self) -> VocabularyTokenizer:
        """The vocabulary of `targets`, as a tokenizer.

        Raises:
          ConfigError: The task has no such feature.
        """
        has_bos = not getattr(self.feature_converter, "reverse_bos_padding", False)
        bos_id = getattr(self.feature_converter, "bos_id", 0) if has_bos else None
        if (targets := self.task.output_features.get("targets")) is None:
            hint = "Add it to the task."
            self.refuse("its task has no feature `targets`, whose vocabulary would read its ids.", hint)
        return VocabularyTokenizer(targets.vocabulary, bos_id)

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        decode = self.task.output_features.get("inputs" if key.startswith("source") else "targets").vocabulary.decode
        texts = [decode([int(i) for i in row[:length]]) for row, length in zip(np.asarray(ids), lengths, strict=True)]
        return [text if isinstance(text, str) else " ".join(map(str, text)) for text in texts]  # or the ids themselves

    def example_metrics(self, of: Literal["scores", "predictions"]) -> ExampleMetrics | None:
        """A function that computes the task's `score_metric_fns` or `predict_metric_fns`.

        None if the task has none, and for a mixture, whose tasks need an input each.

        Raises:
          ConfigError: A row of this input is not one example, or the inputs of an example have weights too.
        """
        functions = getattr(self.task, "score_metric_fns" if of == "scores" else "predict_metric_fns", ())
        if not functions or not self.reset_for_eval:
            return None
        converter = self.feature_converter
        metrics = f"the metrics of task `{self.task.name}`"
        if getattr(converter, "pack", False):
            self.refuse(f"pack=True, but {metrics} need one example per row.", "Set pack=False.")
        if of == "scores" and "inputs" in self.lengths and not getattr(converter, "weights_on_targets_only", True):
            hint = "Set weights_on_targets_only=True."
            self.refuse(f"{metrics} need the scores of targets, but inputs have weights too.", hint)
        return functools.partial(self._task_metrics, functions, of)

    def _task_metrics(self, functions: Iterable[Callable], of: str, outputs: Mapping[int, Any]) -> dict[str, float]:
        """Computes the metrics of the task, named `seqio/NAME`, like `seqio.Evaluator`.

        Args:
          functions: `(targets, scores)` or `(targets, predictions)` → metrics by name.
          of: Kind of outputs: `scores` or `predictions`.
          outputs: For each `example_id`, the log-probability of its targets, or the generated ids [T].

        Raises:
          DataError: There is not exactly one output per example.
          ConfigError: Two functions return a metric of the same name.
        """
        targets, answers = [], []
        for number, example in enumerate(self._targets()):
            if number not in outputs:
                self.refuse(f"example {number} was not evaluated.", "Evaluate full epochs.", DataError)
            targets.append(self.task.postprocess_fn(self._target_text(example), example=example, is_target=True))
            answer = outputs[number]
            if of == "predictions":
                text = self.text_tokenizer.decode(np.asarray(answer))
                answer = self.task.postprocess_fn(text, example=example, is_target=False)
            answers.append(answer)
        if len(targets) != len(outputs):
            hint = "The feature converter must return one row per example."
            self.refuse(f"there are {len(outputs)} outputs for {len(targets)} examples.", hint, DataError)
        metrics: dict[str, float] = {}
        for function in functions:
            for name, value in function(targets, answers).items():
                value = getattr(value, "value", value)  # seqio.metrics.Scalar
                if f"seqio/{name}" in metrics:
                    self.refuse(f"two metric functions of the task return `{name}`.", "Rename one.")
                if isinstance(value, int | float | np.number) or getattr(value, "ndim", None) == 0:
                    metrics[f"seqio/{name}"] = float(value)
                else:
                    log.warning("Input `%s`: metric `%s` is not a number; skipped.", self.name, name)
        return metrics

    def _target_text(self, example: Mapping[str, Any]) -> str:
        """The original text of the targets, or the decoded ids."""
        if (text := example.get("targets_pretokenized")) is None:
            text = self.text_tokenizer.decode(example["targets"])
        return text.decode("utf-8") if isinstance(text, bytes) else text

    def _targets(self) -> Iterator[Mapping[str, Any]]:
        """The examples of an eval epoch, ordered by `example_id`."""
        with translate_errors(self.name):
            yield from self.examples().take(self.eval_num_examples or -1).as_numpy_iterator()


@dataclasses.dataclass(frozen=True)
class VocabularyTokenizer:
    """A `Tokenizer` that wraps a `seqio.Vocabulary`.

    Attributes:
      vocabulary: The vocabulary.
      bos_id: Id before the first token of a sequence; None: none.
    """

    vocabulary: Any
    bos_id: int | None

    vocab_size = property(lambda self: self.vocabulary.vocab_size)
    pad_id = property(lambda self: self.vocabulary.pad_id)
    eos_id = property(lambda self: self.vocabulary.eos_id)
    special_tokens = special_tokens_by_id = property(lambda self: {})  # a vocabulary names none

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text` [T]."""
        return np.asarray(self.vocabulary.encode(text), np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids [T], up to the first end token."""
        return self.vocabulary.decode([int(token) for token in ids])


def _slice(rows: NestedMap, start: int, stop: int | None) -> NestedMap:
    return jax.tree.map(lambda array: array[start:stop], rows)


def _pad(rows: NestedMap, size: int) -> NestedMap:
    """Pads a batch with rows of zeros, and `example_id` -1."""
    missing = size - num_rows(rows)
    padded = jax.tree.map(lambda array: np.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)]), rows)
    if "example_id" in padded:
        padded.example_id[size - missing :] = -1
    return padded
