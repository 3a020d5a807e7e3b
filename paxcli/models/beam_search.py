"""Beam search (Pax: `praxis.beam_search`)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from paxcli.config.fields import NonNegativeFloat, PositiveInt
from paxcli.errors import ConfigError
from paxcli.models.base import DecodingModel
from paxcli.models.decoding import DecodeState, extend
from paxcli.models.sampling import Decoding, adjust


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch(Decoding):
    """Keeps the `beam_size` most likely sequences, as Pax's beam search and flat beam search do.

    A sequence of n tokens, its end token included, has the score `log-probability / ((n + 5) / 5) ** length_norm_alpha`
    (Wu et al., 2016). Ended sequences rank before those that reached `max_tokens`.

    Attributes:
      beam_size: K.
      tokens_per_beam: Most likely tokens of each beam, end tokens included, that continue it; None = `beam_size`.
      length_norm_alpha: Length normalization; 0 = none.
    """

    beam_size: PositiveInt = 4
    tokens_per_beam: PositiveInt | None = None
    length_norm_alpha: NonNegativeFloat = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_samples > self.beam_size:
            hint = "Lower `num_samples`, or raise `beam_size`."
            raise ConfigError(f"num_samples={self.num_samples} is more than beam_size={self.beam_size}.", hint)

    def normalize(self, log_prob: Any, length: Any) -> Any:
        """The score of sequences of so many tokens: of arrays, or of one."""
        return log_prob / ((length + 5.0) / 5.0) ** self.length_norm_alpha


class Beams(NamedTuple):
    """What `beam_search` returns, best first.

    Attributes:
      ids: Generated tokens, 0 after the end.
      log_probs: The model's log-probability of each, 0 after the end.
      adjusted: The same with the repetition penalty. The scores are sums of these.
      lengths: Number of tokens, the end token included.
      ended: Whether the last one is an end token.
      scores: The scores that sort them; -inf where there are fewer than K sequences.
    """

    ids: Int[jax.Array, "B K M"]
    log_probs: Float[jax.Array, "B K M"]
    adjusted: Float[jax.Array, "B K M"]
    lengths: Int[jax.Array, "B K"]
    ended: Bool[jax.Array, "B K"]
    scores: Float[jax.Array, "B K"]


class _Search(NamedTuple):
    """Ended sequences; live ones, with their log-probabilities; and the logits and the cache that continue those."""

    ended: Beams
    live: Beams
    logits: Float[jax.Array, "B*K V"]
    cache: Any


def beam_search(
    model: DecodingModel, params: dict, prompts: DecodeState, axes: Any, max_tokens: int, settings: BeamSearch
) -> Beams:
    """The best continuations of prompts.

    Args:
      model: The model.
      params: Its parameters.
      prompts: The prefilled prompts, each with its limit.
      axes: Those of the cache (`cache_axes`).
      max_tokens: M; no limit allows more new tokens.
      settings: How to search, and the end tokens.
    """
    batch, beams, vocab = len(prompts.ids), settings.beam_size, prompts.logits.shape[-1]
    per_beam, eos_ids = min(settings.tokens_per_beam or beams, vocab), settings.eos_ids or ()
    eos, limits, rows = jnp.array(eos_ids, jnp.int32), prompts.limits - prompts.starts, jnp.arange(batch)[:, None]
    per_row = prompts.starts, prompts.settings.repetition_penalty
    starts, penalty = jax.tree.map(lambda x: jnp.repeat(x, beams), per_row)
    generated = jnp.arange(batch * beams)[:, None], starts[:, None] + jnp.arange(max_tokens)  # of the flat sequences

    def is_unfinished(carry: tuple[Any, _Search]) -> jax.Array:
        step, search = carry
        # Log-probabilities only decrease, so no continuation of a live sequence can exceed this score.
        bound = settings.normalize(search.live.scores.max(axis=1), limits)
        return jnp.any((step < limits) & (bound > search.ended.scores.min(axis=1)))

    def next_token(carry: tuple[Any, _Search]) -> tuple[Any, _Search]:
        step, search = carry
        ended, live = search.ended, search.live
        log_probs = jax.nn.log_softmax(search.logits)
        ids = jnp.repeat(prompts.ids, beams, axis=0).at[generated].set(live.ids.reshape(-1, max_tokens))
        adjusted = adjust(log_probs, ids, starts + step, starts, penalty, settings)
        log_probs, adjusted = (array.reshape(batch, beams, vocab) for array in (log_probs, adjusted))

        def append(sequences: Beams, parents: jax.Array, token: jax.Array) -> Beams:
            new = (token, log_probs[rows, parents, token], adjusted[rows, parents, token])
            longer = (array.at[:, :, step].set(x) for array, x in zip(sequences[:3], new, strict=True))
            return Beams(*longer, lengths=sequences.lengths + 1, ended=sequences.ended, scores=sequences.scores)

        if eos_ids:
            new = append(live, jnp.arange(beams), eos[jnp.argmax(adjusted[..., eos], axis=-1)])
            total = live.scores + adjusted[..., eos].max(axis=-1)
            scores = jnp.where((step < limits)[:, None], settings.normalize(total, step + 1), -jnp.inf)
            ended = _best(ended, new._replace(scores=scores, ended=jnp.isfinite(scores)))
        likely, tokens = jax.lax.top_k(adjusted, per_beam)
        scores = jnp.where(jnp.isin(tokens, eos), -jnp.inf, live.scores[..., None] + likely)
        scores, picked = jax.lax.top_k(scores.reshape(batch, -1), beams)
        parents, token = picked // per_beam, tokens.reshape(batch, -1)[rows, picked]
        longer = append(_take(live, parents), parents, token)._replace(scores=scores)
        choose = jax.vmap(lambda is_within, *choice: jax.tree.map(functools.partial(jnp.where, is_within), *choice))
        live = choose(step < limits, longer, live)
        flat = (rows * beams + parents).reshape(-1)
        cache = jax.tree.map(lambda array, axis: jnp.take(array, flat, axis=axis), search.cache, axes)
        logits, cache = extend(model, params, token.reshape(-1, 1), (starts + step)[:, None], cache)
        return step + 1, _Search(ended, live, logits[:, 0], cache)

    ids, lengths = jnp.zeros((batch, beams, max_tokens), jnp.int32), jnp.zeros((batch, beams), jnp.int32)
    of_tokens, scores = jnp.zeros(ids.shape), jnp.full(lengths.shape, -jnp.inf)
    nothing = Beams(ids, of_tokens, of_tokens, lengths, ended=jnp.zeros(lengths.shape, bool), scores=scores)
    start = _Search(
        ended=nothing,
        live=nothing._replace(scores=nothing.scores.at[:, 0].set(0.0)),  # the other beams are copies of the first
        logits=jnp.repeat(prompts.logits, beams, axis=0),
        cache=jax.tree.map(lambda array, axis: jnp.repeat(array, beams, axis=axis), prompts.cache, axes),
    )
    _, search = jax.lax.while_loop(is_unfinished, next_token, (0, start))
    return _best(search.ended, search.live._replace(scores=settings.normalize(search.live.scores, limits[:, None])))


def _best(one: Beams, other: Beams) -> Beams:
    """The K best of two sets of K sequences: ended ones first."""
    both = Beams(*(jnp.concatenate(arrays, axis=1) for arrays in zip(one, other, strict=True)))
    return _take(both, jnp.lexsort((-both.scores, ~both.ended))[:, : one.scores.shape[1]])


def _take(beams: Beams, indices: Int[jax.Array, "B K"]) -> Beams:
    return jax.vmap(lambda row, at: jax.tree.map(lambda array: array[at], row))(beams, indices)
