"""Text from a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxcli.errors import ConfigError
from paxcli.inputs.base_input import BaseInput
from paxcli.models.decoding import Generated, Sampling, generate
from paxcli.training.session import Session

_PROMPTS_AT_ONCE = 16


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
    model, tokenizer = session.experiment.task.model, tokenizer_of(session.experiment.train_input)
    if not hasattr(model, "empty_cache"):
        raise ConfigError(f"{type(model).__name__} cannot decode.", "Use a recipe of a LanguageModel.")
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    encoded = [np.concatenate([bos, tokenizer.encode(prompt)]).astype(np.int32) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        _check_room(prompt, len(ids), max_tokens, model.max_seq_len)
    params = model.cast(params)
    step = jax.jit(generate, static_argnames=("model", "max_tokens", "eos_id", "sampling"))
    outputs = []
    for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
        rows = encoded[start : start + _PROMPTS_AT_ONCE]
        size = max(map(len, rows))
        padded = np.stack([np.pad(row, (0, size - len(row))) for row in rows])
        lengths = np.array([len(row) for row in rows], np.int32)
        key = jax.random.fold_in(jax.random.key(seed), start)
        result = step(
            model, params, jnp.asarray(padded), jnp.asarray(lengths), key, max_tokens, tokenizer.eos_id, sampling
        )
        outputs += _readable(jax.device_get(result), prompts[start : start + _PROMPTS_AT_ONCE], lengths, tokenizer)
    return outputs


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


def _check_room(prompt: str, length: int, max_tokens: int, limit: int) -> None:
    if length == 0:
        raise ConfigError("A prompt is empty, and the tokenizer has no token to begin with.")
    if length + max_tokens > limit:
        shown = prompt if len(prompt) <= 40 else prompt[:37] + "…"
        raise ConfigError(
            f"Prompt {shown!r} has {length} tokens; with {max_tokens} more it is longer than max_seq_len={limit}.",
            f"Shorten it, or give `--max-tokens {max(limit - length, 1)}`.",
        )


def _readable(result: Generated, prompts: Sequence[str], lengths: np.ndarray, tokenizer: Any) -> list[dict[str, Any]]:
    outputs = []
    for row, prompt in enumerate(prompts):
        answer = slice(int(lengths[row]), int(result.lengths[row]))
        ids = result.ids[row, answer]
        outputs.append(
            {
                "prompt": prompt,
                "text": tokenizer.decode(ids),
                "ids": ids.tolist(),
                "log_probs": [round(float(value), 6) for value in result.log_probs[row, answer]],
                "finish_reason": "eos" if result.ended[row] else "length",
            }
        )
    return outputs
