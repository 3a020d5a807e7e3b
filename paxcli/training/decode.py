"""Text from a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxcli.errors import ConfigError
from paxcli.inputs.base_input import BaseInput
from paxcli.models.decoding import PROMPTS_AT_ONCE, STATIC_ARGNAMES, Generated, Sampling, jit_generate
from paxcli.models.sequence_model import SequenceModel, transduce
from paxcli.nested_map import NestedMap
from paxcli.training.session import Session


def decode(
    session: Session, params: dict, prompts: Sequence[str], max_tokens: int, sampling: Sampling, seed: int
) -> list[dict[str, Any]]:
    """Continues prompts.

    Returns:
      For each prompt: `prompt`, `text`, `ids`, `log_probs` (all three of the continuation) and `finish_reason`:
      `eos` or `length`.

    Raises:
      ConfigError: The model cannot decode, the input has no tokenizer, or a prompt leaves no room for an answer.
    """
    tokenizer = tokenizer_of(session.experiment.train_input)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    encoded = [np.concatenate([bos, tokenizer.encode(prompt)]).astype(np.int32) for prompt in prompts]
    writer = _Writer(session, params, max_tokens, tokenizer.eos_id, sampling, seed)
    for prompt, ids in zip(prompts, encoded, strict=True):
        writer.check_room(prompt, len(ids))
    answers = writer.continuations(encoded)
    return [_readable(prompt, answer, tokenizer) for prompt, answer in zip(prompts, answers, strict=True)]


def decode_data(
    session: Session, params: dict, source: BaseInput, max_tokens: int, sampling: Sampling, seed: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Answers the inputs of an epoch of examples: continues them, or turns sources into targets.

    Returns:
      For each example what `decode` returns, and `input` and `example_id`; and the input's metrics of the answers.

    Raises:
      ConfigError: The model cannot decode, or the examples have no inputs, or one leaves no room for an answer.
    """
    tokenizer, metrics = tokenizer_of(source), source.example_metrics("predictions")
    writer = _Writer(session, params, max_tokens, tokenizer.eos_id, sampling, seed)
    outputs, answered = [], {}
    for batch in source.eval_batches():
        numbers = batch.example_id
        if isinstance(writer.model, SequenceModel):
            is_token = batch.source_segment_ids > 0
            prompts = [row[here] for row, here in zip(batch.source_ids, is_token, strict=True)]
            texts = source.ids_to_strings(batch.source_ids, [len(prompt) for prompt in prompts], "source_ids")
            answers = writer.targets(batch, tokenizer.bos_id)
        elif "inputs_indicator" in batch:
            counts = batch.inputs_indicator.sum(axis=1)
            prompts = [row[: max(count, 1)] for row, count in zip(batch.ids, counts, strict=True)]
            texts = source.ids_to_strings(batch.ids, [len(prompt) for prompt in prompts])
            writer.check_room(f"example {numbers[np.argmax(counts)]}", max(map(len, prompts)))
            answers = writer.continuations(prompts, batch.ids.shape[1])
        else:
            raise ConfigError(
                f"Input `{source.name}` has no inputs to answer.",
                "Name the lengths of `inputs` and `targets` in its task_feature_lengths.",
            )
        for number, text, answer in zip(numbers.tolist(), texts, answers, strict=True):
            if number >= 0:
                readable = _readable(text, answer, tokenizer)
                outputs.append(readable | {"input": source.name, "example_id": number})
                answered[number] = readable["ids"]
    return outputs, metrics(answered) if metrics is not None else {}


def tokenizer_of(source: BaseInput) -> Any:
    """The tokenizer of an input.

    Raises:
      ConfigError: It has none.
    """
    tokenizer = getattr(source, "text_tokenizer", None)
    if tokenizer is None:
        raise ConfigError(
            f"{type(source).__name__} has no tokenizer, so text cannot be decoded.",
            "Decode a run that was trained on text.",
        )
    return tokenizer


# Ids that were written and the log-probability of each, and whether the end token is the last of them.
_Answer = tuple[np.ndarray, np.ndarray, bool]


class _Writer:
    """A model that writes, compiled once for each shape of what it is given."""

    def __init__(
        self, session: Session, params: dict, max_tokens: int, eos_id: int | None, sampling: Sampling, seed: int
    ):
        self.model = session.experiment.task.model
        if not hasattr(self.model, "extend"):
            raise ConfigError(
                f"{type(self.model).__name__} cannot decode.", "Use a recipe of a LanguageModel or a SequenceModel."
            )
        self._params = self.model.cast(params)
        self._settings = {"max_tokens": max_tokens, "eos_id": eos_id, "sampling": sampling}
        self._key, self._batches = jax.random.key(seed), 0
        self._generate = jit_generate()
        self._transduce = jax.jit(transduce, static_argnames=(*STATIC_ARGNAMES, "bos_id"))

    def check_room(self, prompt: str, length: int) -> None:
        """Refuses a prompt that is empty, or too long to be answered."""
        if not hasattr(self.model, "empty_cache"):
            raise ConfigError(f"{type(self.model).__name__} does not continue prompts.", "Give it decode_inputs.")
        max_tokens, limit = self._settings["max_tokens"], self.model.max_seq_len
        if length == 0:
            raise ConfigError("A prompt is empty, and the tokenizer has no token to begin with.")
        if length + max_tokens > limit:
            shown = prompt if len(prompt) <= 40 else prompt[:37] + "…"
            raise ConfigError(
                f"Prompt {shown!r} has {length} tokens; with {max_tokens} more it is longer than max_seq_len={limit}.",
                f"Shorten it, or give `--max-tokens {max(limit - length, 1)}`.",
            )

    def continuations(self, prompts: Sequence[np.ndarray], size: int | None = None) -> Iterator[_Answer]:
        """What follows prompts, each an array of ids; `size`: the length to pad them to."""
        for start in range(0, len(prompts), PROMPTS_AT_ONCE):
            rows = prompts[start : start + PROMPTS_AT_ONCE]
            width = size or max(map(len, rows))
            padded = jnp.asarray(np.stack([np.pad(row, (0, width - len(row))) for row in rows]))
            lengths = np.array([len(row) for row in rows], np.int32)
            result = self._generate(
                self.model, self._params, padded, jnp.asarray(lengths), self._next_key(), **self._settings
            )
            yield from _answers(result, lengths)

    def targets(self, batch: NestedMap, bos_id: int | None) -> Iterator[_Answer]:
        """The targets of a batch's sources."""
        if self._settings["max_tokens"] >= self.model.max_seq_len:
            limit = self.model.max_seq_len
            raise ConfigError(f"Targets have at most {limit} tokens.", f"Give `--max-tokens {limit - 1}` or fewer.")
        sources = jnp.asarray(batch.source_ids), jnp.asarray(batch.source_segment_ids)
        result = self._transduce(
            self.model, self._params, *sources, bos_id=bos_id or 0, key=self._next_key(), **self._settings
        )
        yield from _answers(result, np.ones(len(batch.source_ids), np.int32))

    def _next_key(self) -> jax.Array:
        key = jax.random.fold_in(self._key, self._batches * PROMPTS_AT_ONCE)
        self._batches += 1
        return key


def _answers(result: Generated, lengths: np.ndarray) -> Iterator[_Answer]:
    """What stands behind the first `lengths[i]` tokens of each row."""
    ids, log_probs, ends, ended = map(np.asarray, result)
    for row, length in enumerate(lengths):
        answer = slice(int(length), int(ends[row]))
        yield ids[row, answer], log_probs[row, answer], bool(ended[row])


def _readable(prompt: str, answer: _Answer, tokenizer: Any) -> dict[str, Any]:
    ids, log_probs, ended = answer
    return {
        "prompt": prompt,
        "text": tokenizer.decode(ids),
        "ids": ids.tolist(),
        "log_probs": [round(float(value), 6) for value in log_probs],
        "finish_reason": "eos" if ended else "length",
    }
