"""The loss over a vocabulary without all of its logits: a few tokens of each device at a time.

The gradients of a chunk are made while its logits are there, forward, so that nothing is computed twice. They cannot
know what the loss is multiplied by afterwards, so the backward pass does that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from paxcli.config.fields import Tokens
from paxcli.errors import ConfigError
from paxcli.layers.output_head import Scorer
from paxcli.mesh.sharding import axes_of, constrain, layout, split
from paxcli.models.losses import WeightedScalars, means_over_tokens, token_losses
from paxcli.nested_map import NestedMap

LossChunk = Tokens | Literal["auto"] | None

_TOKENS = ("activation_batch", "activation_length")
_LARGE = 4 * 2**30  # bytes of float32 logits on a device from which on `auto` takes chunks
_CHUNK = 2**30  # and how many those of a chunk have at most


def chunk_size(asked: LossChunk, tokens: tuple[int, ...], vocab_size: int) -> int | None:
    """How many tokens of a device make a chunk, of `tokens` = (B, T) in all; None = no chunks."""
    if asked != "auto":
        return asked
    parts = split((*tokens, vocab_size), *_TOKENS, "activation_vocab")
    token_bytes = 4 * vocab_size // parts[2]
    if math.prod(tokens) // (parts[0] * parts[1]) * token_bytes <= _LARGE:
        return None
    return 2 ** max(8, int(math.log2(_CHUNK / token_bytes)))


def chunked_token_metrics(
    scorer: Scorer,
    x: Float[jax.Array, "B T D"],
    labels: Int[jax.Array, "B T"],
    weights: Float[jax.Array, "B T"],
    chunk: int,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> tuple[WeightedScalars, NestedMap]:
    """What `token_metrics` returns for the logits of `x`. Of the results, `loss` alone has a gradient.

    Args:
      scorer: What makes logits.
      x: What they are made of.
      labels: What came.
      weights: How much each token counts; data, of which there is no gradient.
      chunk: How many tokens of a device have logits at one time.
      label_smoothing: As in `token_losses`.
      z_loss_weight: As in `token_losses`.
    """
    how = _How(scorer.score, scorer.axes, chunk, label_smoothing, z_loss_weight)
    total, xent, correct = _sums(how, scorer.params, x, labels, weights)
    is_xent = not (label_smoothing or z_loss_weight)
    return means_over_tokens(total / (jnp.sum(weights) + 1e-6), is_xent, xent, correct, weights)


@dataclasses.dataclass(frozen=True, eq=False)
class _How:
    """What is the same for all tokens."""

    score: Callable[..., jax.Array]
    axes: dict[str, tuple[str, ...]]
    chunk: int
    label_smoothing: float
    z_loss_weight: float

    def of_chunk(self, params: Any, x: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        """The weighted sum of the losses of tokens, [C, D] and [C]; each one's cross-entropy and correctness."""
        logits = self.score(params, x[None])[0]
        loss, xent, correct = token_losses(logits, labels, self.label_smoothing, self.z_loss_weight)
        return jnp.sum(loss * weights), (xent, correct)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(how: _How, params: Any, x: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
    """The weighted sum of all losses; each token's cross-entropy and correctness."""
    return _on_shards(how, False, params, x, labels, weights)[:3]


def _forward(how: _How, params: Any, x: Any, labels: Any, weights: Any):
    params, x, labels, weights = jax.tree.map(
        lambda primal: primal.value,
        (params, x, labels, weights),
        is_leaf=lambda leaf: hasattr(leaf, "perturbed"),
    )
    *sums, param_grads, x_grads = _on_shards(how, True, params, x, labels, weights)
    param_grads = {name: constrain(grad, *how.axes[name]) for name, grad in param_grads.items()}
    # Empty arrays, for their types: the gradients of parameters are summed in float32.
    return tuple(sums), (param_grads, x_grads, {name: jnp.zeros(0, param.dtype) for name, param in params.items()})


def _backward(how: _How, residuals: Any, grads: Any):
    total_grad, *others = grads
    if not all(isinstance(grad, SymbolicZero) for grad in others):
        raise ConfigError(
            "A loss in chunks of tokens has a gradient for `loss` alone.",
            "Set `loss_chunk` to null, or train on `loss`.",
        )
    param_grads, x_grads, types = residuals
    param_grads = {name: (total_grad * grad).astype(types[name].dtype) for name, grad in param_grads.items()}
    return param_grads, (total_grad * x_grads.astype(jnp.float32)).astype(x_grads.dtype), None, None


_sums.defvjp(_forward, _backward, symbolic_zeros=True)


def _on_shards(how: _How, with_grads: bool, *arrays: Any) -> tuple[Any, ...]:
    """`_in_chunks` of each device's tokens, summed over devices where it sums over tokens."""
    tokens = layout(arrays[1].shape[:2], *_TOKENS)
    run = functools.partial(_in_chunks, how, with_grads)
    if tokens is None:
        return run((), *arrays)
    axes = tuple(axis for entry in tokens for axis in axes_of(entry))
    whole = PartitionSpec()
    grads = (whole, tokens) if with_grads else ()
    return jax.shard_map(
        functools.partial(run, axes),
        in_specs=(whole, tokens, tokens, tokens),
        out_specs=(whole, tokens, tokens, *grads),
        axis_names=set(axes),
        check_vma=False,
    )(*arrays)


def _in_chunks(
    how: _How, with_grads: bool, axes: tuple[str, ...], params: Any, x: jax.Array, *facts: jax.Array
) -> tuple[Any, ...]:
    """The sum of losses, what is known of each token, and if asked for the gradients of parameters and of `x`."""
    count = x.shape[0] * x.shape[1]
    size = min(how.chunk, count)
    padding = -count % size  # tokens without weight

    def chunks(array: jax.Array) -> jax.Array:
        flat = array.reshape(count, *array.shape[2:])
        flat = jnp.pad(flat, ((0, padding), *((0, 0),) * (flat.ndim - 1)))
        return flat.reshape(-1, size, *flat.shape[1:])

    def whole(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[2:])[:count].reshape(*x.shape[:2], *array.shape[2:])

    def step(sums: tuple, rows: tuple) -> tuple[tuple, tuple]:
        if not with_grads:
            total, seen = how.of_chunk(params, *rows)
            return (sums[0] + total,), seen
        (total, seen), (of_params, of_x) = jax.value_and_grad(how.of_chunk, (0, 1), has_aux=True)(params, *rows)
        return (sums[0] + total, jax.tree.map(jnp.add, sums[1], of_params)), (*seen, of_x)

    sums: tuple = (jnp.zeros((), jnp.float32),)
    if with_grads:
        sums += (jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), params),)
    sums, per_token = jax.lax.scan(step, sums, tuple(map(chunks, (x, *facts))))
    total, *param_grads = jax.lax.psum(sums, axes) if axes else sums
    xent, correct, *x_grads = map(whole, per_token)
    return (total, xent, correct, *param_grads, *x_grads)
