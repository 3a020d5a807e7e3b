"""LoRA and DoRA: trained low-rank adapters of frozen weights (parameter-efficient fine-tuning, PEFT)."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxcli.config.configurable import Configurable
from paxcli.config.fields import DecayRate, PositiveFloat, PositiveInt
from paxcli.layers.init import Initializer
from paxcli.mesh.weights import Weight

A, B, MAGNITUDE = "_lora_a", "_lora_b", "_lora_magnitude"
ADAPTERS = f"({A}|{B}|{MAGNITUDE})$"
"""Regular expression of the adapters' parameters."""

_RANK = "R"  # the letter of the rank dimension in einsum equations


@dataclasses.dataclass(frozen=True)
class Lora(Configurable):
    """Adapters of the weights that a regular expression names: `y = x W + alpha / rank * dropout(x) A B`.

    LoRA (Hu et al., 2021; PEFT: `LoraConfig`). A weight `w` gets the parameters `w_lora_a` [inputs, rank], uniform in
    ± 1 / sqrt(inputs) as in PEFT, and `w_lora_b` [rank, outputs], initially 0. Unless the learner says otherwise, only
    adapters are trained.

    Attributes:
      rank: Rank of `A B`.
      alpha: The product is multiplied by alpha / rank.
      dropout: Share of the inputs of `A` that training drops. Only attention and feed-forward layers support it.
      targets: Regular expression. Every matrix whose path, such as `stack/layers/attention/query`, matches it anywhere
        has an adapter. In a pipelined stack, paths begin at `layers/`.
      use_dora: DoRA (Liu et al., 2024): the adapted weight's norm for each output is trained as well, in
        `w_lora_magnitude`, as the difference from the norm of `W`.
    """

    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    dropout: DecayRate = 0.0
    targets: str = "attention/(query|value)$"
    use_dora: bool = False

    @property
    def scale(self) -> float:
        """What `A B` is multiplied by."""
        return self.alpha / self.rank


_lora: contextvars.ContextVar[Lora | None] = contextvars.ContextVar("lora", default=None)


@contextlib.contextmanager
def use_lora(lora: Lora | None) -> Iterator[None]:
    """Within this context, layers that are initialized or applied have these adapters; None = none."""
    token = _lora.set(lora)
    try:
        yield
    finally:
        _lora.reset(token)


def current_lora() -> Lora | None:
    """The adapters of the model that is initialized or applied."""
    return _lora.get()


@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A weight and its adapter. Arrays may have further leading dimensions, which stack layers.

    Attributes:
      base: The frozen weight.
      a: [inputs, rank], with the contracted dimensions of the weight as inputs.
      b: [rank, outputs], with the produced dimensions as outputs. Other dimensions, such as `expert`, lead in both.
      magnitude: DoRA's [outputs]; None = LoRA.
      facts: Those of the base.
      scale: What `A B` is multiplied by.
      dropout: Applied to the inputs of `A`.
    """

    base: jax.Array
    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None
    facts: Weight
    scale: float
    dropout: Callable[[jax.Array], jax.Array] = lambda x: x

    def merge(self) -> jax.Array:
        """The weight that computes the same in evaluation, in the dtype of the base."""
        letters = _letters(self.facts)
        merged = self._sum()
        if self.magnitude is not None:
            merged = jnp.einsum(f"...{letters},...{_outputs(letters, self.facts)}->...{letters}", merged, self._gain())
        return merged.astype(self.base.dtype)

    def multiply(self, einsum: Callable[..., jax.Array], equation: str, x: jax.Array) -> jax.Array:
        """`einsum(equation, x, weight)`, without the product `A B`."""
        operands, result = equation.split("->")
        inputs, letters = operands.split(",")
        a, b = factor_letters(letters, self.facts)
        hidden = "".join(letter for letter in inputs if letter not in a) + _RANK
        low_rank = jnp.einsum(f"{inputs},{a}->{hidden}", self.dropout(x), self.a)
        y = einsum(equation, x, self.base) + self.scale * jnp.einsum(f"{hidden},{b}->{result}", low_rank, self.b)
        if self.magnitude is None:
            return y
        return jnp.einsum(f"{result},{_outputs(letters, self.facts)}->{result}", y, self._gain().astype(y.dtype))

    def norm(self) -> jax.Array:
        """The norm of the base for each output, float32: DoRA's magnitude before training."""
        return self._norm_of(self.base)

    def _sum(self) -> jax.Array:
        letters = _letters(self.facts)
        a, b = factor_letters(letters, self.facts)
        product = jnp.einsum(f"...{a},...{b}->...{letters}", self.a, self.b, preferred_element_type=jnp.float32)
        return self.base.astype(jnp.float32) + self.scale * product

    def _gain(self) -> jax.Array:
        """DoRA's factor of each output. As in the paper, norms are constants in the backward pass."""
        assert self.magnitude is not None
        magnitude = jax.lax.stop_gradient(self.norm()) + self.magnitude
        return magnitude / jax.lax.stop_gradient(self._norm_of(self._sum()))

    def _norm_of(self, w: jax.Array) -> jax.Array:
        axes = tuple(axis - len(self.facts.axes) for axis in self.facts.contracts)
        return jnp.sqrt(jnp.sum(jnp.square(w.astype(jnp.float32)), axis=axes))


Matrix = jax.Array | AdaptedWeight
"""A weight of a matmul, with or without an adapter."""


def factor_letters(letters: str, facts: Weight) -> tuple[str, str]:
    """The einsum letters of `A` and `B`, given those of the weight."""
    others, fan_in, fan_out = _fans(letters, facts)
    return others + fan_in + _RANK, others + _RANK + fan_out


def adapter_arrays(facts: Weight, shape: tuple[int, ...], lora: Lora) -> dict[str, tuple[tuple[int, ...], Weight]]:
    """Suffix → shape and facts of an adapter's parameters: sharded like the weight, the rank unsharded.

    Args:
      facts: Those of the weight.
      shape: The shape of the weight.
      lora: Rank and kind.
    """
    letters = _letters(facts)
    sizes = dict(zip(letters, shape, strict=True)) | {_RANK: lora.rank}
    axes = dict(zip(letters, facts.axes, strict=True)) | {_RANK: None}
    _, fan_in, fan_out = _fans(letters, facts)

    def declare(dims: str, contracts: str = "", produces: str = "") -> tuple[tuple[int, ...], Weight]:
        places = tuple(map(dims.index, contracts)), tuple(map(dims.index, produces))
        return tuple(sizes[dim] for dim in dims), Weight(tuple(axes[dim] for dim in dims), *places)

    a, b = factor_letters(letters, facts)
    found = {A: declare(a, fan_in, _RANK), B: declare(b, _RANK, fan_out)}
    return found | ({MAGNITUDE: declare(_outputs(letters, facts))} if lora.use_dora else {})


def init_a(facts: Weight) -> Initializer:
    """PEFT's initializer of `A`: uniform within 1 / sqrt(inputs) (Kaiming-uniform with a = sqrt(5))."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        inputs = math.prod(shape[dim] for dim in facts.contracts)
        return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

    return init


def adapted_weights(
    params: Mapping[str, Any], facts: Mapping[str, Weight], lora: Lora | None
) -> dict[str, AdaptedWeight]:
    """The weights that have an adapter, by name.

    Args:
      params: Name → parameter, adapters included; stacked ones have leading dimensions.
      facts: Name → its facts.
      lora: The model's.
    """

    def one(name: str) -> AdaptedWeight:
        assert lora is not None
        base, a, b = (jnp.asarray(params[name + suffix]) for suffix in ("", A, B))
        magnitude = jnp.asarray(params[name + MAGNITUDE]) if lora.use_dora else None
        return AdaptedWeight(base, a, b, magnitude, facts[name], lora.scale)

    return {name: one(name) for name in params if name + A in params}


def without_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the model without adapters, by name."""
    return {name: x for name, x in params.items() if not re.search(ADAPTERS, name)}


def _letters(facts: Weight) -> str:
    return "abcdefgh"[: len(facts.axes)]


def _fans(letters: str, facts: Weight) -> tuple[str, str, str]:
    """The letters of dimensions that are neither contracted nor produced, of the contracted, and of the produced."""
    fan_in, fan_out = ("".join(letters[i] for i in dims) for dims in (facts.contracts, facts.produces))
    return "".join(letter for letter in letters if letter not in fan_in + fan_out), fan_in, fan_out


def _outputs(letters: str, facts: Weight) -> str:
    return "".join(letter for i, letter in enumerate(letters) if i not in facts.contracts)
