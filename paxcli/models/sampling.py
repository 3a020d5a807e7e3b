"""How sequences are generated: settings that both methods share, and sampling of the next token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from paxcli.config import fields
from paxcli.config.configurable import Configurable
from paxcli.config.tree import check_fields
from paxcli.errors import ConfigError
from paxcli.layers.base import Ids
from paxcli.models.base import PerRow

Logits = Float[jax.Array, "B V"]
Penalty = Float[jax.Array, " B"]

_ALL = 2**31 - 1  # candidates: every token of the vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding(Configurable):
    """Settings of generation. The methods are `Sampling`, which includes greedy decoding, and `BeamSearch`.

    Attributes:
      max_tokens: The most tokens to generate; None = 128 for a prompt, as many as fit for an example of a dataset.
      min_tokens: End tokens are excluded before this many tokens.
      eos_ids: Ids of the end tokens; None = the tokenizer's.
      stop: Texts that end a sequence. Its text ends before them.
      num_samples: Sequences per prompt, sorted by score: the log-probability, or that of beam search.
      batch_size: Sequences that are decoded at a time (Pax: `num_cache_slots`).
      repetition_penalty: Divides the logits above 0 of all tokens of the prompt and of the text so far, and multiplies
        those below, before all else (Keskar et al., 2019); above 1 it discourages repetition; None = off. Beam search
        applies it to log-probabilities, as Hugging Face transformers does.
      no_repeat_ngram_size: No n-gram of this many tokens that the prompt or the text so far has is generated again, as
        in Hugging Face transformers; None = off.
    """

    max_tokens: fields.Tokens | None = None
    min_tokens: fields.NonNegativeInt = 0
    eos_ids: tuple[fields.NonNegativeInt, ...] | None = None
    stop: tuple[str, ...] = ()
    num_samples: fields.PositiveInt = 1
    batch_size: fields.Examples = 16
    repetition_penalty: fields.PositiveFloat | None = None
    no_repeat_ngram_size: fields.PositiveInt | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if "" in self.stop:
            raise ConfigError("An empty text in `stop` would end every sequence at once.", "Leave it out.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Decoding):
    """Draws each token from the model's distribution, or takes the most likely one.

    Attributes:
      temperature: Divides the logits; 0 = greedy decoding.
      top_k: Only the k most likely tokens; None = all.
      top_p: Only the most likely tokens that together have this probability (nucleus sampling, Holtzman et al., 2020),
        among those that `epsilon` and `top_k` leave; None = all.
      epsilon: Only tokens with at least this probability (epsilon sampling, Hewitt et al., 2022); 0 = all.
      truncate_before_temperature: Whether `top_p` and `epsilon` refer to the probabilities at temperature 1, as in Pax.
        False: at `temperature`, as in Hugging Face transformers.
    """

    temperature: fields.NonNegativeFloat = 0.0
    top_k: fields.TopK | None = None
    top_p: fields.PositiveFraction | None = None
    epsilon: fields.DecayRate = 0.0
    truncate_before_temperature: bool = False


class SequenceSettings(NamedTuple):
    """Settings of sampling for each sequence: numbers of one sequence, or arrays [B] of a batch.

    Attributes:
      temperature: Divides the logits; 0 = greedy decoding.
      top_k: Only the k most likely tokens; 0 = all.
      top_p: Only the nucleus with this probability; 1 = all.
      repetition_penalty: Penalty on the logits of earlier tokens; 1 = none; None = no row has one.
      seed: Seeds the sampling, with `number`: it does not depend on the other rows.
      number: The sequence's number.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    repetition_penalty: Any
    seed: Any
    number: Any


def sequence_settings(decoding: Decoding, seed: Any, number: Any) -> SequenceSettings:
    """The settings of a sequence that has none of its own."""
    sampling = decoding if isinstance(decoding, Sampling) else Sampling()
    top_k, top_p, penalty = sampling.top_k or 0, sampling.top_p or 1.0, decoding.repetition_penalty or 1.0
    return SequenceSettings(sampling.temperature, top_k, top_p, penalty, seed, number)


def num_candidates(settings: SequenceSettings) -> int:
    """How many of the most likely tokens `choose` has to sort for these sequences: 0, a power of 2, or all."""
    is_drawn, top_k = np.asarray(settings.temperature) > 0, np.asarray(settings.top_k)
    if np.any(is_drawn & (top_k == 0) & (np.asarray(settings.top_p) < 1)):
        return _ALL
    largest = int(np.max(np.where(is_drawn, top_k, 0)))
    return 1 << (largest - 1).bit_length() if largest else 0


def adjust(
    logits: Logits, ids: Ids, lengths: PerRow, starts: PerRow, penalty: Penalty | None, decoding: Decoding
) -> Logits:
    """Logits, or log-probabilities, with the repetition penalty, and -inf for tokens that may not come next.

    Args:
      logits: Of the next token.
      ids: Prompt and text so far.
      lengths: Tokens of both.
      starts: Tokens of the prompts.
      penalty: The repetition penalty of each row; 1 = none; None = no row has one.
      decoding: What all rows share: `no_repeat_ngram_size`, `min_tokens` and `eos_ids`.
    """
    vocab_size = logits.shape[-1]
    if penalty is not None:
        factor = jnp.where(_ends_ngram(ids, lengths, 1, vocab_size), penalty[:, None], 1.0)
        logits = jnp.where(logits > 0, logits / factor, logits * factor)
    if size := decoding.no_repeat_ngram_size:
        logits = jnp.where(_ends_ngram(ids, lengths, size, vocab_size), -jnp.inf, logits)
    if decoding.min_tokens:
        is_end = jnp.isin(jnp.arange(vocab_size), jnp.array(decoding.eos_ids or (), jnp.int32))
        logits = jnp.where((lengths - starts < decoding.min_tokens)[:, None] & is_end, -jnp.inf, logits)
    return logits


def _ends_ngram(ids: jax.Array, lengths: jax.Array, size: int, vocab_size: int) -> Bool[jax.Array, "B V"]:
    """The tokens that would complete an n-gram of `size` tokens that the row has already; with 1, all it has."""
    rows, starts = jnp.arange(len(ids))[:, None], jnp.arange(ids.shape[1] - size + 1)
    ngrams = ids[:, starts[:, None] + jnp.arange(size)]
    last = ids[rows, lengths[:, None] - jnp.arange(size - 1, 0, -1)]
    is_again = jnp.all(ngrams[..., :-1] == last[:, None], axis=-1) & (starts + size <= lengths[:, None])
    return jnp.zeros((len(ids), vocab_size), bool).at[rows, ngrams[..., -1]].max(is_again)


def choose(
    logits: Logits, keys: Callable[[], jax.Array], settings: SequenceSettings, candidates: int, sampling: Sampling
) -> Int[jax.Array, " B"]:
    """The next token of each row.

    Args:
      logits: The model's.
      keys: Computes the PRNG key of each row, [B]. It runs only if a row is sampled.
      settings: Those of the rows.
      candidates: At least their `num_candidates`.
      sampling: Those that all rows share: `epsilon` and `truncate_before_temperature`.
    """
    ids, temperature = jnp.arange(logits.shape[-1]), settings.temperature
    # As jnp.argmax, which XLA does not vectorize on a CPU.
    most_likely = jnp.where(logits == logits.max(axis=-1, keepdims=True), ids, ids[-1]).min(axis=-1)

    def draw() -> jax.Array:
        tempered = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
        truncated = logits if sampling.truncate_before_temperature else tempered
        allowed = _is_allowed(truncated, settings, candidates, sampling.epsilon)
        drawn = jax.vmap(jax.random.categorical)(keys(), jnp.where(allowed, tempered, -jnp.inf))
        return jnp.where(temperature > 0, drawn, most_likely)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: most_likely)


def _is_allowed(logits: Logits, settings: SequenceSettings, candidates: int, epsilon: float) -> Bool[jax.Array, "B V"]:
    """The tokens that `epsilon`, then `top_k`, then `top_p` leave. The most likely one always remains."""
    if epsilon:
        is_largest = logits == logits.max(axis=-1, keepdims=True)
        logits = jnp.where((jax.nn.softmax(logits) >= epsilon) | is_largest, logits, -jnp.inf)
    if candidates:
        top_k, top_p = settings.top_k[:, None], settings.top_p[:, None]
        descending = jax.lax.top_k(logits, min(candidates, logits.shape[-1]))[0]
        kth = jnp.take_along_axis(descending, jnp.clip(top_k - 1, 0, descending.shape[-1] - 1), axis=-1)
        kth = jnp.where(top_k > 0, kth, -jnp.inf)
        probabilities = jax.nn.softmax(jnp.where(descending >= kth, descending, -jnp.inf), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The first token that reaches top_p is still included.
        nucleus = jnp.min(jnp.where(before < top_p, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= jnp.where(top_p < 1, jnp.maximum(nucleus, kth), kth), logits, -jnp.inf)
    return logits > -jnp.inf
