"""Attention backends: their interface, and the base class of fused kernels."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from paxcli.layers.activations import identity
from paxcli.layers.scopes import ATTENTION_CORE
from paxcli.mesh.sharding import axes_of, layout, split

Context = Float[jax.Array, "B N T Hv"]  # what each query attends to: the weighted mean of the values
HEADS = ("activation_batch", "activation_heads", "activation_length", None)


@dataclasses.dataclass(frozen=True)
class Demand:
    """The attention that a layer asks a backend to compute.

    Attributes:
      length: T.
      dims_per_head: H, of queries and keys.
      dtype: Of queries, keys and values.
      value_dims_per_head: Hv, of values; None = H.
      causal: Whether a position sees only itself and earlier ones.
      logit_cap: Soft cap on the logits; None = off.
      window: Number of positions seen, the query's own included; None = all.
      biased: Whether a learned bias is added to the logits.
      sinks: Whether heads have attention sinks.
      drop: Dropout of the probabilities.
      length_parts: Number of devices that each row is sharded over.
    """

    length: int
    dims_per_head: int
    dtype: str
    value_dims_per_head: int | None = None
    causal: bool = True
    logit_cap: float | None = None
    window: int | None = None
    biased: bool = False
    sinks: bool = False
    drop: Callable[[jax.Array], jax.Array] = identity
    length_parts: int = 1

    @classmethod
    def of(cls, query: Float[jax.Array, "B N T H"], value: Float[jax.Array, "B K T Hv"], **fields: Any) -> Demand:
        """The demand with the sizes of these arrays."""
        length, dims = query.shape[2:]
        parts = split(query.shape, *HEADS)[2]
        return cls(length, dims, query.dtype.name, value.shape[3], length_parts=parts, **fields)


class Operands(NamedTuple):
    """The arrays of one attention.

    Attributes:
      query: Scaled queries.
      key: Keys; query head n reads key/value head n // (N / K) (GQA).
      value: Values, likewise.
      segment_ids: Positions see their own segment only; None = the whole row.
      bias: Added to the logits.
      sinks: One more logit of each head in its softmax.
    """

    query: Float[jax.Array, "B N T H"]
    key: Float[jax.Array, "B K T H"]
    value: Float[jax.Array, "B K T Hv"]
    segment_ids: Int[jax.Array, "B T"] | None
    bias: Float[jax.Array, "N T T"] | None = None
    sinks: Float[jax.Array, " N"] | None = None


class AttentionBackend(abc.ABC):
    """One implementation of attention, registered by name in `kernels.py`.

    Attributes:
      name: Its name in recipes: `attention.kernel`.
      platform: The JAX platform it runs on: `tpu` or `gpu`; None = all.
      names_context: Whether it names its output, and the residuals of its backward pass, for remat policies.
    """

    name: ClassVar[str]
    platform: ClassVar[str | None] = None
    names_context: ClassVar[bool] = False

    def refusal(self, demand: Demand, capability: str | None = None) -> str | None:
        """Why it cannot serve a demand on its platform; None if it can.

        Args:
          demand: The attention to compute.
          capability: A GPU's compute capability, such as `9.0`; None = unknown.
        """
        return None

    @abc.abstractmethod
    def attend(self, operands: Operands, demand: Demand) -> Context:
        """Attention in training and evaluation, with a float32 softmax; the demand has the sizes of the operands."""


class FusedKernel(AttentionBackend):
    """A flash-attention kernel, which runs on each device's queries and heads: XLA partitions no kernels."""

    names_context = True

    def refusal(self, demand: Demand, capability: str | None = None) -> str | None:
        if demand.drop is not identity:
            return "it has no dropout of attention probabilities, which it never stores"
        return "it does not support a learned bias of the logits" if demand.biased else None

    @abc.abstractmethod
    def attend_on_device(self, operands: Operands, demand: Demand, context_axes: tuple[str, ...] = ()) -> Context:
        """The attention of one device's rows and heads; the demand has the sizes of all devices' together.

        Args:
          operands: Its share of the arrays: T is its part of each row, N and K are its heads.
          demand: The attention to compute.
          context_axes: The mesh axes that shard the rows, inside `shard_map`.
        """

    @jax.named_scope(ATTENTION_CORE)
    def attend(self, operands: Operands, demand: Demand) -> Context:
        query, key, value = operands[:3]
        sharded = layout(query.shape, *HEADS)
        if sharded is None:
            return self.attend_on_device(operands, demand)
        rows, heads, length, _ = sharded
        ways, group = split(query.shape, *HEADS)[1], query.shape[1] // key.shape[1]
        # With fewer key/value heads than devices, each device gets a copy of the one that its queries read.
        copies = next(n for n in range(1, group + 1) if group % n == 0 == key.shape[1] * n % ways)
        if copies > 1:
            operands = operands._replace(key=jnp.repeat(key, copies, axis=1), value=jnp.repeat(value, copies, axis=1))
        by_head = PartitionSpec(rows, heads, length)
        specs: list[Any] = [by_head] * 3 + [PartitionSpec(rows, length), None, PartitionSpec(heads)]
        kernel = functools.partial(self.attend_on_device, demand=demand, context_axes=axes_of(length))
        return jax.shard_map(kernel, in_specs=(Operands(*specs),), out_specs=by_head, check_vma=False)(operands)
