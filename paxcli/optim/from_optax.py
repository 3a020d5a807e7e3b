"""Any optimizer of optax, or written for it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from paxcli.config.fields import AnyFloat, AnyInt
from paxcli.errors import ConfigError, names_hint
from paxcli.optim.base import Optimizer

_EXAMPLE = {"w": jax.ShapeDtypeStruct((8, 8), jax.numpy.float32)}


@dataclasses.dataclass(frozen=True)
class Optax(Optimizer):
    """An optax optimizer, such as `Optax.config(factory="lion", arguments={"b1": 0.95})`.

    A stack of layers is one tensor to it: norms and clipping, as of `lamb` and `adafactor`, are over all layers. Those
    of `Lamb`, `Lars` and `ShardedAdafactor` are per layer.

    Evaluation uses the trained parameters: with a schedule-free optimizer, not the average that it derives from them.

    Attributes:
      factory: Makes the transformation from `learning_rate=`, which the learner gives it: the name of an optimizer of
        optax or `optax.contrib`, or a function, such as your own that returns an `optax.chain`.
      arguments: Further arguments of the factory.
    """

    factory: Callable[..., optax.GradientTransformation] | str
    arguments: dict[str, bool | AnyInt | AnyFloat | str | None] = dataclasses.field(default_factory=dict)

    def validate(self) -> None:
        """Raises a ConfigError when optax has no such optimizer, or it needs more than gradients and the arguments."""
        if isinstance(self.factory, str) and self.factory not in (names := _factories()):
            raise ConfigError(f"optax has no optimizer `{self.factory}`.", names_hint(self.factory, names))
        try:
            inspect.signature(self._function).bind(learning_rate=0.0, **self.arguments)
            state = jax.eval_shape(self._first_state, _EXAMPLE) if isinstance(self.factory, str) else ()
        except (TypeError, ValueError) as error:
            problem = f"optimizer.factory: {error} (arguments: learning_rate, {self.arguments})."
            raise ConfigError(problem, "Correct `arguments`, or choose another factory.") from None
        if any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)):
            raise ConfigError(f"{self.factory} keeps a PRNG key, which checkpoints do not hold.", "Choose another one.")
        if self._function in (optax.rprop, optax.scale_by_rprop):
            problem = "Rprop's first step is the learning rate, but the learner has none before its first update"
            raise ConfigError(f"optimizer.factory: {problem}.", "Choose another one.")

    def with_learning_rate(self, weights: Any) -> optax.GradientTransformationExtraArgs:
        def init(params: Any) -> Any:
            return self._function(learning_rate=0.0, **self.arguments).init(params)

        def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
            optimizer = self._function(learning_rate=extra_args["learning_rate"], **self.arguments)
            updates, state = optimizer.update(updates, state, params)
            return jax.tree.map(jax.numpy.negative, updates), state  # optax adds updates, the learner subtracts them

        return optax.GradientTransformationExtraArgs(init, update)

    @property
    def _function(self) -> Callable[..., optax.GradientTransformation]:
        return _factories()[self.factory] if isinstance(self.factory, str) else self.factory

    def _first_state(self, params: Any) -> Any:
        """The state after an update by the parameters themselves."""
        optimizer = self.with_learning_rate(None)
        return optimizer.update(params, optimizer.init(params), params, learning_rate=0.0)[1]


@functools.cache
def _factories() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """The optimizers of optax and `optax.contrib` by name."""
    functions = {name: x for name, x in {**vars(optax.contrib), **vars(optax)}.items() if inspect.isfunction(x)}
    return {name: x for name, x in functions.items() if "learning_rate" in inspect.signature(x).parameters}
