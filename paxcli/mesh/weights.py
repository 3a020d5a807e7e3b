"""Facts about a weight that its layer declares: what optimizers, initializers and shardings read."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import flax.linen as nn
import flax.struct
import jax

from paxcli.errors import ConfigError, did_you_mean
from paxcli.mesh.sharding import is_partitioned, path_of


@dataclasses.dataclass(frozen=True)
class Weight:
    """Meaning of the dimensions of a weight. Dimensions are numbered without the stacked ones.

    Attributes:
      axes: The logical axis of each dimension, or None.
      contracts: Dimensions that a matmul with the activations sums over (fan-in). Empty for scales and biases.
      produces: Dimensions of the matmul's result (fan-out). A dimension in neither is a batch dimension, as `expert`.
      is_table: Whether rows are looked up by ids, which is a matmul with one-hot vectors.
      group: Weights of one layer with the same group, such as `qkv`, have one shape, and count in the statistics of
        optimizers as one weight that stacks them.
      num_stacked: Number of leading dimensions that stack layers: `layers`, pipeline stages and their repeats.
      init_scale: Scale of the initial values: standard deviation of a normal distribution, limit of a uniform one. None
        = unknown.
      any_order: Whether its layer also takes it as `OutputFirst`.
    """

    axes: tuple[str | None, ...] = ()
    contracts: tuple[int, ...] = ()
    produces: tuple[int, ...] = ()
    is_table: bool = False
    group: str | None = None
    num_stacked: int = 0
    init_scale: float | None = None
    any_order: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is contracted with activations, unlike a scale or a bias."""
        return bool(self.contracts)


class WeightBox(nn.LogicallyPartitioned):
    """Flax's box of an array and its logical axes, with the declared facts. Transforms add stacked dimensions to it."""

    weight: Weight = flax.struct.field(pytree_node=False, default=Weight())


def weights_of(params: Any) -> Any:
    """The facts of each parameter.

    Args:
      params: Abstract parameters as `Model.init` returns them, with their boxes.

    Returns:
      A tree like `params` without its boxes. A parameter of plain Flax declares nothing: one with two or more
      dimensions counts as a kernel whose last dimension is produced and whose other dimensions are contracted.
    """

    def facts(leaf: Any) -> Weight:
        if isinstance(leaf, WeightBox):
            return dataclasses.replace(leaf.weight, num_stacked=len(leaf.names) - len(leaf.weight.axes))
        axes = leaf.names if is_partitioned(leaf) else (None,) * leaf.ndim
        last = len(axes) - 1
        return Weight(axes, tuple(range(last)), (last,)) if last > 0 else Weight(axes)

    return jax.tree.map(facts, params, is_leaf=is_partitioned)


def groups_of(weights: Any) -> list[tuple[int, ...]]:
    """The numbers of the leaves that count as one weight in statistics: of one layer and group, or a leaf alone.

    Args:
      weights: A tree like the parameters of the `Weight` of each.
    """
    groups: dict[Any, list[int]] = {}
    for number, (path, weight) in enumerate(jax.tree_util.tree_leaves_with_path(weights)):
        groups.setdefault((path[:-1], weight.group) if weight.group else path, []).append(number)
    return [tuple(numbers) for numbers in groups.values()]


def parameter_names(params: Any) -> list[str]:
    """The path of each parameter, such as `stack/layers/attention/query`, in the order of the leaves."""
    return ["/".join(path_of(path)) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def match_parameters(field: str, regex: str, names: list[str], match: Any = re.search) -> list[re.Match[str] | None]:
    """The match of a regular expression in each parameter name, by default anywhere in it; None = it does not match.

    Args:
      field: The recipe field of the expression, for errors.
      regex: The expression.
      names: The names, from `parameter_names`.
      match: `re.search` or `re.fullmatch`.

    Raises:
      ConfigError: `regex` is not a regular expression, or matches no name.
    """
    try:
        matches = [match(regex, name) for name in names]
    except re.error as error:
        raise ConfigError(f"{field}: {regex!r} is not a regular expression: {error}.", "Correct it.") from None
    if not any(matches):
        near = did_you_mean(regex, [*names, *dict.fromkeys(part for name in names for part in name.split("/"))])
        raise ConfigError(f"{field}: {regex!r} matches no parameter.", near or f"Parameters: {', '.join(names[:8])}, …")
    return matches
