"""LoRA and DoRA: trained low-rank adapters of frozen weights (parameter-efficient fine-tuning, PEFT)."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxcli.config.configurable import Configurable
from paxcli.config.fields import DropoutRate, PositiveFloat, PositiveInt
from paxcli.layers import matmul
from paxcli.layers.activations import identity
from paxcli.layers.shared_weights import multiply_by_scale
from paxcli.mesh.weights import Weight

A, B, MAGNITUDE = "_lora_a", "_lora_b", "_lora_magnitude"
# Regular expression of the adapters' parameters.
ADAPTERS = f"({A}|{B}|{MAGNITUDE})$"

# Subtree of the parameters with their frozen copy from the start of the run, if the loss compares with it (DPO).
REFERENCE = "reference"

# Letters of dimensions in einsum equations: those of a weight, and the rank.
_LETTERS, _RANK = "abcdefgh", "R"


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
      use_rslora: rsLoRA (Kalajdzievski, 2023): multiplied by alpha / sqrt(rank) instead, for large ranks.
      use_dora: DoRA (Liu et al., 2024): the adapted weight's norm for each output is trained as well, in
        `w_lora_magnitude`, as the difference from the norm of `W`.
    """

    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    dropout: DropoutRate = 0.0
    targets: str = "attention/(query|value)$"
    use_rslora: bool = False
    use_dora: bool = False

    @property
    def scale(self) -> float:
        """What `A B` is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


# The adapters of the model that is initialized or applied; None = none.
active_lora: contextvars.ContextVar[Lora | None] = contextvars.ContextVar("lora", default=None)


@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A weight and its adapter. Arrays may have further leading dimensions, which stack layers.

    Attributes:
      facts: Those of the base.
      scale: What `A B` is multiplied by.
      base: The frozen weight.
      a: [inputs, rank], with the contracted dimensions of the weight as inputs.
      b: [rank, outputs], with the produced dimensions as outputs. Other dimensions, such as `expert`, lead in both.
      magnitude: DoRA's [outputs]; None = LoRA.
      dropout: Applied to the inputs of `A`.
    """

    facts: Weight
    scale: float
    base: jax.Array
    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None = None
    dropout: Callable[[jax.Array], jax.Array] = dataclasses.field(default=identity, kw_only=True)

    def merge(self) -> jax.Array:
        """The weight that computes the same in evaluation, in the dtype of the base."""
        merged, with_gain = self._sum(), self.magnitude is not None
        return (merged * jnp.expand_dims(self._gain(), self._inputs) if with_gain else merged).astype(self.base.dtype)

    def multiply(self, einsum: Callable[..., jax.Array], equation: str, x: jax.Array) -> jax.Array:
        """`einsum(equation, x, weight)`. The outputs are the result's last dimensions.

        In float32, a batch of more numbers than the weight is multiplied by the sum `W + A B`, which costs less than
        two more matmuls of the batch. In fewer bits, a sum would round small adapters away.
        """
        inputs, letters, result = matmul.letters(equation)
        a, b = _factors(letters, self.facts)
        hidden = "".join(letter for letter in inputs if letter not in a) + _RANK

        def adapt(x: jax.Array, a_matrix: jax.Array, b_matrix: jax.Array) -> jax.Array:
            low_rank = self.scale * matmul.einsum(f"{inputs},{a}->{hidden}", x, a_matrix)
            return matmul.einsum(f"{hidden},{b}->{result}", low_rank, b_matrix)

        @jax.custom_gradient
        def multiply_by_sum(x: jax.Array, w: jax.Array, *ab: jax.Array) -> tuple[jax.Array, Callable]:
            def product(x: jax.Array, w: jax.Array) -> jax.Array:
                return jnp.einsum(equation, x, w + self.scale * jnp.einsum(f"{a},{b}->{letters}", *ab))

            def backward(grad: jax.Array) -> tuple[jax.Array, ...]:  # no gradient of the sum for those of `A` and `B`
                return *jax.vjp(product, x, w)[1](grad), *jax.vjp(functools.partial(adapt, x), *ab)[1](grad)

            return product(x, w), backward

        if einsum is matmul.einsum and self.dropout is identity and x.dtype == jnp.float32 and x.size >= self.base.size:
            y = multiply_by_sum(x, self.base, self.a, self.b)
        else:
            y = einsum(equation, x, self.base) + adapt(self.dropout(x), self.a, self.b)
        return y if self.magnitude is None else multiply_by_scale(y, self._gain().astype(y.dtype))

    def norm(self, w: jax.Array) -> jax.Array:
        """The norm of `w` for each output, float32; that of the base is DoRA's magnitude before training."""
        return jnp.sqrt(jnp.sum(jnp.square(w.astype(jnp.float32)), axis=self._inputs))

    def _sum(self) -> jax.Array:
        letters = _LETTERS[: len(self.facts.axes)]
        a, b = _factors(letters, self.facts)
        product = jnp.einsum(f"...{a},...{b}->...{letters}", self.a, self.b, preferred_element_type=jnp.float32)
        return self.base.astype(jnp.float32) + self.scale * product

    def _gain(self) -> jax.Array:
        """DoRA's factor of each output. As in the paper, norms are constants in the backward pass."""
        assert self.magnitude is not None
        base, adapted = jax.lax.stop_gradient((self.norm(self.base), self.norm(self._sum())))
        return (base + self.magnitude) / adapted

    @property
    def _inputs(self) -> tuple[int, ...]:
        return tuple(axis - len(self.facts.axes) for axis in self.facts.contracts)


# A weight of a matmul: an array, one with an adapter, or one stored in another order.
Matrix = jax.Array | AdaptedWeight | matmul.OutputFirst


def adapter_arrays(facts: Weight, shape: tuple[int, ...], lora: Lora) -> dict[str, tuple[tuple[int, ...], Weight]]:
    """Suffix → shape and facts of an adapter's parameters: sharded like the weight, the rank unsharded.

    Args:
      facts: Those of the weight.
      shape: The shape of the weight.
      lora: Rank and kind.
    """
    letters = _LETTERS[: len(shape)]
    known: dict[str, Any] = {_RANK: (lora.rank, None)}
    known |= zip(letters, zip(shape, facts.axes, strict=True), strict=True)
    fan_in, fan_out = ("".join(letters[dim] for dim in dims) for dims in (facts.contracts, facts.produces))

    def declare(dims: str, contracts: str = "", produces: str = "") -> tuple[tuple[int, ...], Weight]:
        sizes, axes = zip(*(known[dim] for dim in dims), strict=True)
        return sizes, Weight(axes, tuple(map(dims.index, contracts)), tuple(map(dims.index, produces)))

    a, b = _factors(letters, facts)
    found = {A: declare(a, fan_in, _RANK), B: declare(b, _RANK, fan_out)}
    outputs = "".join(letter for letter in letters if letter not in fan_in)
    return found | ({MAGNITUDE: declare(outputs)} if lora.use_dora else {})


def kaiming_uniform(facts: Weight) -> Callable[..., jax.Array]:
    """PEFT's initializer of `A`: uniform in ± 1 / sqrt(inputs)."""
    fan_in, fan_out = facts.contracts, facts.produces
    return jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", fan_in, fan_out, tuple(range(fan_in[0])))


def adapted_weights(params: Mapping[str, Any], facts: dict[str, Weight], lora: Lora | None) -> dict[str, AdaptedWeight]:
    """The weights that have an adapter, by name.

    Args:
      params: Name → parameter, adapters included; stacked ones have leading dimensions.
      facts: Name → its facts.
      lora: The model's.
    """
    if lora is None:
        return {}
    suffixes = ("", A, B, *((MAGNITUDE,) if lora.use_dora else ()))
    found = {name: [jnp.asarray(params[name + suffix]) for suffix in suffixes] for name in params if name + A in params}
    return {name: AdaptedWeight(facts[name], lora.scale, *arrays) for name, arrays in found.items()}


def without_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the model without adapters and without the copy of them, by name."""
    return {name: x for name, x in params.items() if not re.search(rf"^{REFERENCE}\.|{ADAPTERS}", name)}


def _factors(letters: str, facts: Weight) -> tuple[str, str]:
    """The letters of `A` and `B` in einsum equations, given those of the weight."""
    fan_in, fan_out = ("".join(letters[dim] for dim in dims) for dims in (facts.contracts, facts.produces))
    others = "".join(letter for letter in letters if letter not in fan_in + fan_out)
    return others + fan_in + _RANK, others + _RANK + fan_out
