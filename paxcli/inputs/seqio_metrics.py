"""Computes the metrics of a SeqIO task from a model's outputs, like `seqio.Evaluator`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from paxcli.errors import ConfigError, DataError
from paxcli.log import log


def task_metrics(
    task: Any,
    functions: Iterable[Callable[..., Mapping[str, Any]]],
    of: Literal["scores", "predictions"],
    where: str,
    examples: Callable[[], Iterable[Mapping[str, Any]]],
    outputs: Mapping[int, Any],
) -> dict[str, float]:
    """Computes the metrics of a task, named `seqio/NAME`.

    Args:
      task: The `seqio.Task`.
      functions: `(targets, scores)` or `(targets, predictions)` → metrics by name.
      of: Kind of outputs: `scores` or `predictions`.
      where: Prefix of error messages.
      examples: Iterates over the task's examples, ordered by `example_id`.
      outputs: For each `example_id`, the log-probability of its targets, or the generated ids [T].

    Raises:
      DataError: There is not exactly one output per example.
      ConfigError: Two functions return a metric of the same name.
    """
    vocabulary = task.output_features["targets"].vocabulary
    targets, answers = [], []
    for number, example in enumerate(examples()):
        if number not in outputs:
            raise DataError(f"{where}: example {number} was not evaluated.", "Evaluate full epochs.")
        targets.append(task.postprocess_fn(_target(example, vocabulary), example=example, is_target=True))
        answer = outputs[number]
        if of == "predictions":
            text = vocabulary.decode([int(token) for token in np.asarray(answer)])
            answer = task.postprocess_fn(text, example=example, is_target=False)
        answers.append(answer)
    if len(targets) != len(outputs):
        hint = "The feature converter must return one row per example."
        raise DataError(f"{where}: there are {len(outputs)} outputs for {len(targets)} examples.", hint)
    metrics: dict[str, float] = {}
    for function in functions:
        for name, value in function(targets, answers).items():
            value = getattr(value, "value", value)  # seqio.metrics.Scalar
            if f"seqio/{name}" in metrics:
                raise ConfigError(f"{where}: two metric functions of the task return `{name}`.", "Rename one.")
            if isinstance(value, int | float | np.number) or getattr(value, "ndim", None) == 0:
                metrics[f"seqio/{name}"] = float(value)
            else:
                log.warning("%s: metric `%s` is not a number; skipped.", where, name)
    return metrics


def _target(example: Mapping[str, Any], vocabulary: Any) -> str:
    """The original text of the targets, or the decoded ids."""
    text = example.get("targets_pretokenized")
    if text is None:
        text = vocabulary.decode([int(token) for token in example["targets"]])
    return text.decode("utf-8") if isinstance(text, bytes) else text


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

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text` [T]."""
        return np.asarray(self.vocabulary.encode(text), np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids [T], up to the first end token."""
        return self.vocabulary.decode([int(token) for token in ids])
