"""Chunked cross-entropy: logits exist for a few tokens of each device at a time.

The forward pass also computes the gradients of a chunk while its logits exist, so that nothing is recomputed. The
backward pass multiplies them by the gradient of the loss.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from paxcli.config.fields import Tokens
from paxcli.errors import ConfigError
from paxcli.layers.output_head import Scorer
from paxcli.mesh.sharding import axes_of, constrain, current_device, layout, split
from paxcli.models.losses import WeightedScalars, means_over_tokens, token_losses
from paxcli.nested_map import NestedMap

LossChunk = Tokens | Literal["auto"] | None

_TOKENS = ("activation_batch", "activation_length")
# `auto` uses chunks if the logits of a device have more bytes than the first; those of a chunk have at most the second.
# A chunk of few tokens would slow the matmul down. On a GPU, the sum of the gradients of chunks takes its time, too.
_LOGIT_BYTES = {"cpu": (2**25, 2**24), "gpu": (2**32, 2**32), "tpu": (2**32, 2**30)}
_LEAST_CHUNK = 256


def chunk_size(asked: LossChunk, tokens: tuple[int, ...], vocab_size: int) -> int | None:
    """Tokens per chunk and device, for a batch of `tokens` = (B, T); None = no chunks."""
    if asked != "auto":
        return asked
    parts = split((*tokens, vocab_size), *_TOKENS, "activation_vocab")
    # In float32. For the weight gradient, XLA gathers the gradients of logits that are sharded over the vocabulary, in
    # bfloat16, since `x` is sharded over the same mesh axis.
    token_bytes = 4 * vocab_size // parts[2] + (2 * vocab_size if parts[2] > 1 else 0)
    large, most = _LOGIT_BYTES[current_device().platform]
    if math.prod(tokens) // (parts[0] * parts[1]) * token_bytes <= large:
        return None
    return max(_LEAST_CHUNK, 2 ** int(math.log2(most / token_bytes)))


def chunked_token_metrics(
    scorer: Scorer,
    x: Float[jax.Array, "B T D"],
    labels: Int[jax.Array, "B T"],
    weights: Float[jax.Array, "B T"],
    chunk: int,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> tuple[WeightedScalars, NestedMap]:
    """What `token_metrics` returns for the logits of `x`. Only `loss` has a gradient.

    Args:
      scorer: The output head.
      x: Input of the output head.
      labels: Target token ids.
      weights: Weight of each token in the means; has no gradient.
      chunk: Tokens per chunk and device.
      label_smoothing: As in `token_losses`.
      z_loss_weight: As in `token_losses`.
    """

    def chunk_loss(params: Any, x: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        loss, xent, correct = token_losses(scorer.score(params, x[None])[0], labels, label_smoothing, z_loss_weight)
        return jnp.sum(loss * weights), (xent, correct)

    total, xent, correct = _sums(_Settings(chunk_loss, scorer.axes, chunk), scorer.params, x, labels, weights)
    return means_over_tokens(total / (jnp.sum(weights) + 1e-6), xent, correct, weights, label_smoothing, z_loss_weight)


@dataclasses.dataclass(frozen=True, eq=False)
class _Settings:
    """Values shared by all chunks.

    Attributes:
      chunk_loss: The weighted sum of the losses of a chunk, and the cross-entropy and correctness of each token.
      axes: Logical axes of the parameters of the output head.
      chunk: C.
    """

    chunk_loss: Callable[..., tuple[jax.Array, Any]]
    axes: Mapping[str, tuple[str, ...]]
    chunk: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(settings: _Settings, params: Any, x: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[Any, ...]:
    """The weighted sum of all losses; cross-entropy and correctness of each token."""
    return _on_shards(settings, False, params, x, labels, weights)[:3]


def _forward(settings: _Settings, params: Any, x: Any, labels: Any, weights: Any):
    params, x, labels, weights = custom_vjp_primal_tree_values((params, x, labels, weights))
    *sums, param_grads, x_grads = _on_shards(settings, True, params, x, labels, weights)
    param_grads = {name: constrain(grad, *settings.axes[name]) for name, grad in param_grads.items()}
    # Empty arrays carry the dtypes: gradients of parameters are summed in float32.
    return tuple(sums), (param_grads, x_grads, {name: jnp.zeros(0, param.dtype) for name, param in params.items()})


def _backward(settings: _Settings, residuals: Any, grads: Any):
    total_grad, *others = grads
    if not all(isinstance(grad, SymbolicZero) for grad in others):
        hint = "Set `loss_chunk` to null, or train on `loss`."
        raise ConfigError("With a chunked loss, only the metric `loss` has a gradient.", hint)
    param_grads, x_grads, types = residuals
    param_grads = {name: (total_grad * grad).astype(types[name].dtype) for name, grad in param_grads.items()}
    return param_grads, (total_grad * x_grads.astype(jnp.float32)).astype(x_grads.dtype), None, None


_sums.defvjp(_forward, _backward, symbolic_zeros=True)


def _on_shards(settings: _Settings, with_grads: bool, *arrays: Any) -> tuple[Any, ...]:
    """`_in_chunks` on each device's tokens; its sums over tokens are summed over devices."""
    tokens = layout(arrays[1].shape[:2], *_TOKENS)
    axes = tuple(axis for entry in tokens or () for axis in axes_of(entry))
    run = functools.partial(_in_chunks, settings, with_grads, axes)
    if not axes:
        return run(*arrays)
    replicated = PartitionSpec()
    grads = (replicated, tokens) if with_grads else ()
    return jax.shard_map(
        run,
        in_specs=(replicated, tokens, tokens, tokens),
        out_specs=(replicated, tokens, tokens, *grads),
        axis_names=set(axes),
        check_vma=False,
    )(*arrays)


def _in_chunks(
    settings: _Settings, with_grads: bool, axes: tuple[str, ...], params: Any, x: jax.Array, *facts: jax.Array
) -> tuple[Any, ...]:
    """The sum of losses, the metrics of each token, and optionally the gradients of parameters and of `x`."""
    count = x.shape[0] * x.shape[1]
    size = min(settings.chunk, count)
    padding = -count % size  # tokens without weight

    def chunks(array: jax.Array) -> jax.Array:
        flat = array.reshape(count, *array.shape[2:])
        flat = jnp.pad(flat, ((0, padding), *((0, 0),) * (flat.ndim - 1)))
        return flat.reshape(-1, size, *flat.shape[1:])

    def unchunk(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[2:])[:count].reshape(*x.shape[:2], *array.shape[2:])

    def step(sums: tuple, rows: tuple) -> tuple[tuple, tuple]:
        if not with_grads:
            total, seen = settings.chunk_loss(params, *rows)
            return (sums[0] + total,), seen
        (total, seen), (of_params, of_x) = jax.value_and_grad(settings.chunk_loss, (0, 1), has_aux=True)(params, *rows)
        return (sums[0] + total, jax.tree.map(jnp.add, sums[1], of_params)), (*seen, of_x)

    sums: tuple = (jnp.zeros((), jnp.float32),)
    if with_grads:
        sums += (jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), params),)
    sums, per_token = jax.lax.scan(step, sums, tuple(map(chunks, (x, *facts))))
    total, *param_grads = jax.lax.psum(sums, axes) if axes else sums
    xent, correct, *x_grads = map(unchunk, per_token)
    return (total, xent, correct, *param_grads, *x_grads)
