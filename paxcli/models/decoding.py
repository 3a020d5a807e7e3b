"""Generation with a decode cache (KV cache): prefill of the prompts, then one token at a time."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from paxcli.config.configurable import Configurable
from paxcli.config.fields import NonNegativeFloat, PositiveFraction, PositiveInt
from paxcli.layers.base import Cache
from paxcli.models.base import CausalModel, DecodingModel, Seq2SeqModel

PROMPTS_AT_ONCE = 16  # batch size of decoding
STATIC_ARGNAMES = ("model", "max_tokens", "eos_id", "sampling")


@dataclasses.dataclass(frozen=True)
class Sampling(Configurable):
    """How the next token is chosen.

    Attributes:
      temperature: Divides the logits; 0 = greedy decoding.
      top_k: Only the k most likely tokens; None = all.
      top_p: Only the most likely tokens that together have this probability (nucleus sampling); None = all.
    """

    temperature: NonNegativeFloat = 0.0
    top_k: PositiveInt | None = None
    top_p: PositiveFraction | None = None


class Generated(NamedTuple):
    """What `generate` returns.

    Attributes:
      ids: Prompt and continuation, [B, P + max_tokens], 0 after the end.
      log_probs: Log-probability of each token given those before it; 0 at position 0 and after the end.
      lengths: Tokens of prompt and continuation, the end token included, [B].
      ended: Whether the end token was generated, [B].
    """

    ids: Int[jax.Array, "B S"]
    log_probs: Float[jax.Array, "B S"]
    lengths: Int[jax.Array, " B"]
    ended: Bool[jax.Array, " B"]


def choose(logits: Float[jax.Array, "B V"], key: jax.Array, sampling: Sampling) -> Int[jax.Array, " B"]:
    """The next token of each row."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        kth = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= kth, logits, -jnp.inf)
    if sampling.top_p is not None:
        descending = jnp.sort(logits, axis=-1)[:, ::-1]
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The first token that reaches top_p is still included.
        threshold = jnp.min(jnp.where(before < sampling.top_p, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    return jax.random.categorical(key, logits, axis=-1)


def jit_generate() -> jax.stages.Wrapped:
    """`generate`, jitted with the arguments that are part of the program as static ones."""
    return jax.jit(generate, static_argnames=STATIC_ARGNAMES)


def generate(
    model: CausalModel,
    params: dict,
    prompts: Int[jax.Array, "B P"],
    prompt_lengths: Int[jax.Array, " B"],
    key: jax.Array,
    max_tokens: int,
    eos_id: int | None,
    sampling: Sampling,
) -> Generated:
    """Continues prompts, right-padded to P, by up to `max_tokens` tokens, or until `eos_id`."""
    cache = model.init_cache(len(prompts), prompts.shape[1] + max_tokens)
    return _decode(model, params, prompts, prompt_lengths, cache, key, max_tokens, eos_id, sampling)


def transduce(
    model: Seq2SeqModel,
    params: dict,
    source_ids: Int[jax.Array, "B S"],
    source_segment_ids: Int[jax.Array, "B S"],
    max_tokens: int,
    bos_id: int,
    eos_id: int | None,
    sampling: Sampling = Sampling(),
    key: jax.Array | None = None,
) -> Generated:
    """Generates the target of each source: `bos_id`, then up to `max_tokens` tokens, or until `eos_id`."""
    cache = model.apply({"params": params}, source_ids, source_segment_ids, max_tokens + 1, method="encode_source")
    batch = len(source_ids)
    starts, lengths = jnp.full((batch, 1), bos_id, jnp.int32), jnp.ones(batch, jnp.int32)
    key = jax.random.key(0) if key is None else key
    return _decode(model, params, starts, lengths, cache, key, max_tokens, eos_id, sampling)


def _decode(
    model: DecodingModel,
    params: dict,
    prompts: Int[jax.Array, "B P"],
    prompt_lengths: Int[jax.Array, " B"],
    cache: Cache,
    key: jax.Array,
    max_tokens: int,
    eos_id: int | None,
    sampling: Sampling,
) -> Generated:
    """The decode loop: prefills the cache with the prompts, then generates token by token."""
    batch, prompt_size = prompts.shape
    size = prompt_size + max_tokens
    rows = jnp.arange(batch)

    def extend(ids, positions, cache):
        segment_ids = jnp.ones_like(ids)
        logits, cache = model.apply({"params": params}, ids, segment_ids, positions, cache, method="extend")
        return logits.astype(jnp.float32), cache

    positions = jnp.broadcast_to(jnp.arange(prompt_size), prompts.shape)
    logits, cache = extend(prompts, positions, cache)
    in_prompt = positions < prompt_lengths[:, None]
    prompt_log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), prompts[:, 1:, None], axis=-1)[..., 0]

    def pad(prompt_part, offset):
        return jnp.pad(prompt_part, ((0, 0), (offset, max_tokens)))

    start = (
        0,
        pad(jnp.where(in_prompt, prompts, 0), 0),
        pad(jnp.where(in_prompt[:, 1:], prompt_log_probs, 0.0), 1),
        prompt_lengths,
        jnp.zeros(batch, bool),
        logits[rows, prompt_lengths - 1],
        cache,
    )

    def is_unfinished(carry):
        step, ended = carry[0], carry[4]
        return (step < max_tokens) & ~jnp.all(ended)

    def next_token(carry):
        step, ids, log_probs, lengths, ended, logits, cache = carry
        token = choose(logits, jax.random.fold_in(key, step), sampling)
        log_prob = jax.nn.log_softmax(logits)[rows, token]
        # An ended row rewrites the 0 after its end.
        at = jnp.minimum(lengths, size - 1)
        ids = ids.at[rows, at].set(jnp.where(ended, ids[rows, at], token))
        log_probs = log_probs.at[rows, at].set(jnp.where(ended, log_probs[rows, at], log_prob))
        next_logits, cache = extend(token[:, None], at[:, None], cache)
        lengths = lengths + ~ended
        ended = ended | (token == eos_id) if eos_id is not None else ended
        return step + 1, ids, log_probs, lengths, ended, next_logits[:, 0], cache

    _, ids, log_probs, lengths, ended, _, _ = jax.lax.while_loop(is_unfinished, next_token, start)
    return Generated(ids, log_probs, lengths, ended)
