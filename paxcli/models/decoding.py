"""Generation with a decode cache (KV cache): prefill of the prompts, then one token at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from paxcli.layers.base import Cache, Layer
from paxcli.layers.matmul import output_first
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.mesh.sharding import current_device
from paxcli.mesh.weights import Weight, weights_of
from paxcli.models.base import CausalModel, DecodingModel, Extended, PerRow, Seq2SeqModel
from paxcli.models.sampling import Sampling, SequenceSettings, adjust, choose, num_candidates, sequence_settings
from paxcli.models.transformer import TransformerModel


class DecodeState(NamedTuple):
    """Sequences between two tokens. A row of zeros is a free slot.

    Attributes:
      ids: Prompt and continuation, [B, S], 0 after the end.
      log_probs: Log-probability of each generated token given those before it; 0 in prompts and after the end.
      lengths: Tokens of prompt and continuation, the end token included, [B].
      ended: Whether an end token was generated, [B].
      starts: Tokens of the prompts, [B].
      limits: Tokens of prompt and continuation at the most, [B].
      settings: Those of the sequences, [B].
      logits: Of the next token, [B, V] float32.
      cache: The decode cache.
    """

    ids: Int[jax.Array, "B S"]
    log_probs: Float[jax.Array, "B S"]
    lengths: PerRow
    ended: Bool[jax.Array, " B"]
    starts: PerRow
    limits: PerRow
    settings: SequenceSettings
    logits: Float[jax.Array, "B V"]
    cache: Cache

    @property
    def done(self) -> Bool[jax.Array, " B"]:
        """Whether a sequence has ended or reached its limit."""
        return self.ended | (self.lengths >= self.limits)


def generate(
    model: DecodingModel, params: dict, ids: Int[jax.Array, "B P"], lengths: PerRow, seed: Any, sampling: Sampling
) -> DecodeState:
    """Continues prompts, or generates the targets of sources, right-padded to P, until one of `sampling.eos_ids`.

    Returns:
      The sequences, of up to P + `max_tokens` tokens, or 1 + `max_tokens` in a target, which starts with token 0; the
      cache is None.
    """
    max_tokens = sampling.max_tokens
    assert max_tokens is not None
    size = max_tokens + (1 if isinstance(model, Seq2SeqModel) else ids.shape[1])
    of_all = sequence_settings(sampling, seed, 0)
    settings = SequenceSettings(*(jnp.full(len(ids), x) for x in of_all))._replace(number=jnp.arange(len(ids)))
    if sampling.repetition_penalty is None:
        settings = settings._replace(repetition_penalty=None)
    state = prefill(model, params, ids, lengths, max_tokens, settings, size)
    return advance(model, params, state, max_tokens, num_candidates(of_all), sampling)._replace(cache=None)


def prefill(
    model: DecodingModel,
    params: dict,
    ids: Int[jax.Array, "B P"],
    lengths: PerRow,
    max_tokens: int | PerRow,
    settings: SequenceSettings,
    size: int,
    bos_id: int = 0,
) -> DecodeState:
    """Runs prompts, right-padded to P, in one pass; or encodes sources, whose targets start with `bos_id`.

    Args:
      model: The model.
      params: Its parameters.
      ids: Prompts or sources.
      lengths: Tokens of each.
      max_tokens: The most tokens to generate.
      settings: Those of the sequences, [B].
      size: S, of the cache too.
      bos_id: The first token of a target.
    """
    in_prompt = jnp.arange(ids.shape[1]) < lengths[:, None]
    if isinstance(model, Seq2SeqModel):
        cache = model.apply({"params": params}, ids, in_prompt.astype(jnp.int32), size, method="encode_source")
        ids, lengths = jnp.full((len(ids), 1), bos_id, jnp.int32), jnp.ones(len(ids), jnp.int32)
        in_prompt = jnp.ones_like(ids, bool)
    else:
        assert isinstance(model, CausalModel)
        cache = model.init_cache(len(ids), size)
    batch, width = ids.shape
    positions = jnp.broadcast_to(jnp.arange(width), ids.shape)
    segment_ids = jnp.where(in_prompt, model.prompt_segment_id, 0)
    logits, cache = extend(model, params, ids, positions, cache, segment_ids, lengths - 1)
    return DecodeState(
        ids=jnp.pad(jnp.where(in_prompt, ids, 0), ((0, 0), (0, size - width))),
        log_probs=jnp.zeros((batch, size)),
        lengths=lengths,
        ended=jnp.zeros(batch, bool),
        starts=lengths,
        limits=lengths + max_tokens,
        settings=settings,
        logits=logits[:, 0],
        cache=cache,
    )


def advance(
    model: DecodingModel, params: dict, state: DecodeState, steps: int | jax.Array, candidates: int, sampling: Sampling
) -> DecodeState:
    """Generates up to `steps` tokens of each sequence; returns early when all are done. `candidates`: of `choose`."""
    rows, size, settings = jnp.arange(len(state.ids)), state.ids.shape[1], state.settings
    row_keys = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(settings.seed), settings.number)

    def is_unfinished(carry: tuple[Any, DecodeState]) -> jax.Array:
        step, state = carry
        return (step < steps) & ~jnp.all(state.done)

    def next_token(carry: tuple[Any, DecodeState]) -> tuple[Any, DecodeState]:
        step, state = carry
        lengths, penalty = state.lengths, settings.repetition_penalty
        logits = adjust(state.logits, state.ids, lengths, state.starts, penalty, sampling)
        keys = functools.partial(jax.vmap(jax.random.fold_in), row_keys, state.lengths)
        token = choose(logits, keys, settings, candidates, sampling)
        log_prob = state.logits[rows, token] - jax.nn.logsumexp(state.logits, axis=-1)
        # A row that is done rewrites what it has.
        at, done = jnp.minimum(state.lengths, size - 1), state.done
        ids = state.ids.at[rows, at].set(jnp.where(done, state.ids[rows, at], token))
        log_probs = state.log_probs.at[rows, at].set(jnp.where(done, state.log_probs[rows, at], log_prob))
        next_logits, cache = extend(model, params, token[:, None], at[:, None], state.cache)
        return step + 1, state._replace(
            ids=ids,
            log_probs=log_probs,
            lengths=state.lengths + ~done,
            ended=state.ended | (~done & jnp.isin(token, jnp.array(sampling.eos_ids or (), jnp.int32))),
            logits=next_logits[:, 0],
            cache=cache,
        )

    return jax.lax.while_loop(is_unfinished, next_token, (0, state))[1]


def extend(
    model: DecodingModel,
    params: dict,
    ids: jax.Array,
    positions: jax.Array,
    cache: Cache,
    segment_ids: jax.Array | None = None,
    last: jax.Array | None = None,
) -> Extended:
    """`DecodingModel.extend` with these parameters; float32 logits. `segment_ids`: None = 1."""
    segment_ids = jnp.ones_like(ids) if segment_ids is None else segment_ids
    logits, cache = model.apply({"params": params}, ids, segment_ids, positions, cache, last, method="extend")
    return logits.astype(jnp.float32), cache


def score(
    model: CausalModel, params: dict, ids: Int[jax.Array, "B N"], starts: PerRow
) -> tuple[Float[jax.Array, "B T"], Bool[jax.Array, "B T"]]:
    """The log-probability of each token but the first, T = N - 1, and whether it is the most likely one.

    Args:
      model: The model.
      params: Its parameters.
      ids: Rows of tokens, right-padded.
      starts: Tokens of each prompt.
    """
    inputs, targets = ids[:, :-1], ids[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    segment_ids = jnp.where(positions < starts[:, None], model.prompt_segment_id, 1)
    logits, _ = extend(model, params, inputs, positions, None, segment_ids)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return log_probs, jnp.argmax(logits, axis=-1) == targets


def insert(state: DecodeState, new: DecodeState, slots: Int[jax.Array, " N"], axes: Any) -> DecodeState:
    """Puts the rows of `new` into `slots` of `state`; those beyond the last are dropped. `axes`: of the cache."""

    def replace(old: jax.Array, rows: jax.Array, axis: int = 0) -> jax.Array:
        return old.at[(*(slice(None),) * axis, slots)].set(rows, mode="drop")

    columns = jax.tree.map(replace, state[:-1], new[:-1])
    return DecodeState(*columns, cache=jax.tree.map(replace, state.cache, new.cache, axes))


def unroll_layers(model: Any) -> tuple[Any, Callable[[dict, bool], dict]]:
    """The model with unrolled layers, and `(params, is_batch) -> params`, its parameters from scanned ones.

    Layers take their `decode_fields`. In a scan, XLA copies the parameters and the cache of each layer for each token;
    not on TPUs, where stacks stay scanned. Layers have no remat: decoding has no backward pass. On a CPU, the function
    also stores a causal model's weights as [outputs, inputs], by which it multiplies faster; for a batch, most in two
    parts, with which one sequence is slower.
    """
    fields = (field.name for field in dataclasses.fields(model) if field.name not in ("parent", "name"))
    model = model.clone(**jax.tree.map(_with_decode_fields, model.named_fields(*fields)))
    platform = current_device().platform
    found = model.stacks() if isinstance(model, TransformerModel) and platform != "tpu" else {}
    stacks = {field: one for field, one in found.items() if one.scan and not isinstance(one, PipelinedStack)}
    in_order = {"scan": False, "remat_policy": "everything", "save": (), "offload": ()}
    templates = model.named_fields(*stacks)
    unrolled = model.clone(**{field: functools.partial(templates[field], **in_order) for field in stacks})

    def convert(params: dict, is_batch: bool) -> dict:
        params = {name: stacks[name].unstack(tree) if name in stacks else tree for name, tree in params.items()}
        if platform != "cpu" or not isinstance(unrolled, CausalModel) or unrolled.lora is not None:
            return params
        ids, init = jnp.zeros((1, 1), jnp.int32), functools.partial(unrolled.init, method="extend")
        boxed = jax.eval_shape(init, jax.random.key(0), ids, ids, ids, unrolled.init_cache(1, 1))
        facts = dict(jax.tree.leaves_with_path(weights_of(boxed["params"])))
        parts = 2 if is_batch else 1
        return jax.tree.map_with_path(lambda path, w: output_first(w, facts.get(path, Weight()), parts), params)

    return unrolled, convert


def _with_decode_fields(template: Any) -> Any:
    """A template of layers, each with its `decode_fields`."""
    if isinstance(template, functools.partial) and isinstance(template.func, type) and issubclass(template.func, Layer):
        fields = jax.tree.map(_with_decode_fields, template.keywords) | template.func.decode_fields
        return functools.partial(template.func, **fields)
    return template


def cache_axes(model: DecodingModel, params: dict, size: int) -> Any:
    """The axis of rows in each array of the decode cache that `prefill` returns."""

    def cache_of(rows: int) -> Cache:
        ids, one = jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32)
        return prefill(model, params, ids, one, one, SequenceSettings(*[one] * 6), size).cache

    small, large = (jax.eval_shape(functools.partial(cache_of, rows)) for rows in (1, 2))
    return jax.tree.map(lambda a, b: [m != n for m, n in zip(a.shape, b.shape, strict=True)].index(True), small, large)
