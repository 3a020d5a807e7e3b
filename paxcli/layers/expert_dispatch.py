"""Dispatch of tokens to their experts and back (expert parallel), with expert capacity or dropless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from paxcli.layers.activations import ActivationName, activation, gate
from paxcli.layers.base import HiddenStates
from paxcli.layers.grouped_matmul import grouped_matmul
from paxcli.layers.shared_weights import add_bias, look_up
from paxcli.mesh.sharding import axes_of, constrain, layout


class Routing(NamedTuple):
    """The chosen experts of each token, and their weights."""

    chosen: Int[jax.Array, "B T k"]
    weights: Float[jax.Array, "B T k"]


class Experts(NamedTuple):
    """The matrices of all experts, and their biases; None are those of gates, and biases, that they do not have."""

    w_gate: Float[jax.Array, "E D F"] | None
    w_in: Float[jax.Array, "E D F"]
    w_out: Float[jax.Array, "E F D"]
    b_gate: Float[jax.Array, "E F"] | None = None
    b_in: Float[jax.Array, "E F"] | None = None
    b_out: Float[jax.Array, "E D"] | None = None


def with_capacity(
    x: HiddenStates, routing: Routing, experts: Experts, act: ActivationName, capacity: int
) -> HiddenStates:
    """Each expert takes the first `capacity` tokens of each row that chose it; later ones are dropped and add 0.

    Experts read slots [E, B, C, D]; on a mesh with an `expert` axis these are exchanged by all-to-alls.
    """
    batch, length, dims = x.shape
    num_experts, choices = experts.w_in.shape[0], routing.chosen.shape[-1]
    flat = routing.chosen.reshape(batch, -1)  # [B, T * k]
    is_for = jax.nn.one_hot(flat, num_experts, dtype=jnp.int32)
    place = jnp.sum((jnp.cumsum(is_for, axis=1) - 1) * is_for, axis=-1)
    nowhere = num_experts * capacity
    slot = jnp.where(place < capacity, flat * capacity + place, nowhere)
    of_choice = jnp.broadcast_to(jnp.arange(length * choices) // choices, slot.shape)
    token = jax.vmap(lambda at, tokens: jnp.full(nowhere, length).at[at].set(tokens, mode="drop"))(slot, of_choice)
    slots = _take_rows(x, token).reshape(batch, num_experts, capacity, dims).swapaxes(0, 1)
    slots = constrain(slots, "activation_expert", "activation_batch", None, "activation_embed")

    def by_expert(x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        return jax.vmap(add_bias)(jnp.einsum("ebcd,edf->ebcf", x, w), bias)

    hidden = _hidden(by_expert, slots, experts, act)
    hidden = constrain(hidden, "activation_expert", "activation_batch", None, "activation_mlp")
    y = by_expert(hidden, experts.w_out, experts.b_out)
    y = constrain(y, "activation_expert", "activation_batch", None, "activation_embed")
    y = constrain(y.swapaxes(0, 1).reshape(batch, nowhere, dims), "activation_batch", None, "activation_embed")
    return jnp.einsum("btkd,btk->btd", _take_rows(y, slot).reshape(*routing.weights.shape, -1), routing.weights)


def dropless(x: HiddenStates, routing: Routing, experts: Experts, act: ActivationName) -> HiddenStates:
    """Dropless: sorts the choices by expert, and one grouped matmul multiplies each by its expert's matrix.

    Devices all-gather the parts of the matrices that `embed` shards. Where the mesh axis `expert` shards the rows, the
    devices along it also all-gather their tokens, and reduce-scatter the outputs of their own experts.
    """
    tokens = layout(x.shape, "activation_batch", "activation_length", None)
    wide = layout(experts.w_in.shape, "expert", "embed", "mlp")
    if tokens is None or wide is None:
        return _dropless(x, routing, experts, act)
    on, gathered, split = (axes_of(entry) for entry in wide)
    if not set(on) <= set(axes_of(tokens[0])):
        return _dropless(x, routing, experts, act, partitioned=True)  # XLA gathers the matrices

    def gather(w: jax.Array | None, axis: int) -> Any:  # its gradient is a reduce-scatter
        return jax.lax.all_gather(w, gathered, axis=axis, tiled=True) if gathered and w is not None else w

    def on_device(x: jax.Array, routing: Routing, experts: Experts) -> jax.Array:
        w_gate, w_in, w_out, *_, b_out = experts
        experts = experts._replace(w_gate=gather(w_gate, 1), w_in=gather(w_in, 1), w_out=gather(w_out, 2))
        if split and b_out is not None:  # each device adds its share to the sum
            experts = experts._replace(b_out=b_out / jax.lax.axis_size(split))
        if on:
            x, routing = jax.tree.map(lambda rows: jax.lax.all_gather(rows, on, axis=0, tiled=True), (x, routing))
        y = _dropless(x, routing, experts, act, jax.lax.axis_index(on) * experts.w_in.shape[0] if on else None)
        y = jax.lax.psum(y, split) if split else y
        return jax.lax.psum_scatter(y, on, scatter_dimension=0, tiled=True) if on else y

    specs = jax.tree.map(lambda array: wide if array.ndim == 3 else PartitionSpec(wide[0], wide[2]), experts)
    specs = specs._replace(w_out=PartitionSpec(wide[0], wide[2], wide[1]), b_out=PartitionSpec(wide[0]))
    run = jax.shard_map(on_device, in_specs=(tokens, tokens, specs), out_specs=tokens, check_vma=False)
    return run(x, routing, experts)


def _dropless(
    x: jax.Array,
    routing: Routing,
    experts: Experts,
    act: ActivationName,
    first: jax.Array | None = None,
    partitioned: bool = False,
) -> jax.Array:
    """The outputs of experts `first` and following; None = all. Choices of other experts are sorted last, and add 0."""
    # Choices first: XLA:TPU adds arrays far faster than it sums over an inner axis.
    chosen, weights = (jnp.moveaxis(one, -1, 0) for one in routing)
    flat, num_experts = chosen.reshape(-1), experts.w_in.shape[0]
    num_groups = num_experts + (first is not None)
    if first is not None:
        flat = jnp.where((flat >= first) & (flat < first + num_experts), flat - first, num_experts)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(jax.nn.one_hot(flat, num_groups, dtype=jnp.int32), axis=0)
    tokens = x.reshape(-1, x.shape[-1])[order % chosen[0].size]

    def by_expert(x: jax.Array, w: jax.Array, bias: jax.Array | None, scale: jax.Array | float = 1.0) -> jax.Array:
        y = grouped_matmul(x * scale, w, sizes, partitioned)
        return y if bias is None else y + scale * look_up(jnp.pad(bias, ((0, 1), (0, 0))), flat[order])

    # Scaling what `w_out` reads, not its output, which the backward pass then does not need: remat repeats no `w_out`.
    hidden, scale = _hidden(by_expert, tokens, experts, act), weights.reshape(-1, 1)[order]
    y = by_expert(hidden, experts.w_out, experts.b_out, scale)[jnp.argsort(order)]
    return jnp.asarray(sum(one.astype(jnp.float32) for one in y.reshape(-1, *x.shape)), x.dtype)


def _hidden(multiply: Callable[..., jax.Array], x: jax.Array, experts: Experts, act: ActivationName) -> jax.Array:
    hidden = multiply(x, experts.w_in, experts.b_in)
    if experts.w_gate is None:
        return activation(act)(hidden)
    return gate(act, multiply(x, experts.w_gate, experts.b_gate), hidden)


def _take_rows(x: Float[jax.Array, "B S D"], at: Int[jax.Array, "B R"]) -> Float[jax.Array, "B R D"]:
    """The vectors of each row at these positions; zeros beyond its end."""
    return jax.vmap(lambda row, where: row.at[where].get(mode="fill", fill_value=0))(x, at)
