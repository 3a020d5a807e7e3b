"""How sequences are generated: settings that both methods share, and sampling of the next token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from paxcli.config.configurable import Configurable
from paxcli.config.facts import check_fields
from paxcli.config.fields import (
    DecayRate,
    Examples,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    Tokens,
)


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
    """

    max_tokens: Tokens | None = None
    min_tokens: NonNegativeInt = 0
    eos_ids: tuple[NonNegativeInt, ...] | None = None
    stop: tuple[str, ...] = ()
    num_samples: PositiveInt = 1
    batch_size: Examples = 16

    def __post_init__(self) -> None:
        check_fields(self)


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

    temperature: NonNegativeFloat = 0.0
    top_k: PositiveInt | None = None
    top_p: PositiveFraction | None = None
    epsilon: DecayRate = 0.0
    truncate_before_temperature: bool = False


def choose(
    logits: Float[jax.Array, "B V"], keys: jax.Array, temperature: Float[jax.Array, " B"], sampling: Sampling
) -> Int[jax.Array, " B"]:
    """The next token of each row, by the row's PRNG key [B] and temperature."""
    most_likely = jnp.argmax(logits, axis=-1)

    def draw() -> jax.Array:
        tempered = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
        allowed = _is_allowed(logits if sampling.truncate_before_temperature else tempered, sampling)
        drawn = jax.vmap(jax.random.categorical)(keys, jnp.where(allowed, tempered, -jnp.inf))
        return jnp.where(temperature > 0, drawn, most_likely)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: most_likely)


def _is_allowed(logits: Float[jax.Array, "B V"], sampling: Sampling) -> Bool[jax.Array, "B V"]:
    """The tokens that `epsilon`, then `top_k`, then `top_p` leave. The most likely one always remains."""
    if sampling.epsilon:
        is_largest = logits == logits.max(axis=-1, keepdims=True)
        logits = jnp.where((jax.nn.softmax(logits) >= sampling.epsilon) | is_largest, logits, -jnp.inf)
    if sampling.top_k is not None:
        kth = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits >= kth, logits, -jnp.inf)
    if sampling.top_p is not None:
        descending = jnp.sort(logits, axis=-1)[:, ::-1]
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The first token that reaches top_p is still included.
        threshold = jnp.min(jnp.where(before < sampling.top_p, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    return logits > -jnp.inf
