"""What is trained: a model, its loss, and how long and by what rule it learns."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxcli.config.configurable import Configurable, part
from paxcli.errors import ConfigError
from paxcli.models.base import Model, WeightedScalars
from paxcli.nested_map import NestedMap
from paxcli.training.learner import Learner


@dataclasses.dataclass(frozen=True)
class LossAggregator(Configurable):
    """Sums some of a model's metrics into the loss (Pax: `LossAggregator`, `MultiLossAggregator`).

    Attributes:
      loss_keys: Names of the metrics to sum.
      loss_weights: What each is multiplied by; None = 1.
    """

    loss_keys: tuple[str, ...] = ("loss",)
    loss_weights: tuple[float, ...] | None = None

    def __call__(self, metrics: WeightedScalars) -> tuple[jax.Array, jax.Array]:
        """The loss, and the weight of the first of its metrics.

        Raises:
          ConfigError: The model has no metric of such a name, or the weights are not as many.
        """
        factors = self.loss_weights or (1.0,) * len(self.loss_keys)
        if len(factors) != len(self.loss_keys):
            raise ConfigError(f"task.loss_aggregator: {len(self.loss_keys)} loss_keys, {len(factors)} loss_weights.")
        for key in self.loss_keys:
            if key not in metrics:
                raise ConfigError(
                    f"task.loss_aggregator: the model has no metric `{key}`.", f"It has {', '.join(metrics)}."
                )
        values = [
            metrics[key][0] if factor == 1 else factor * metrics[key][0]
            for key, factor in zip(self.loss_keys, factors, strict=True)
        ]
        return sum(values[1:], values[0]), metrics[self.loss_keys[0]][1]


@dataclasses.dataclass(frozen=True)
class Metrics(Configurable):
    """Which of a model's metrics are reported beside `loss`, in training and evaluation (Pax: `SingleTask.metrics`).

    Attributes:
      names: The metrics; None = all.
      maxima: Those of which an evaluation reports the largest value of a batch; of others it is the mean by weight.
    """

    names: tuple[str, ...] | None = None
    maxima: tuple[str, ...] = ()

    def reported(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The reported ones of `metrics`.

        Raises:
          ConfigError: The model has no metric of such a name.
        """
        for name in (*(self.names or ()), *self.maxima):
            if name not in metrics:
                raise ConfigError(f"task.metrics: the model has no metric `{name}`.", f"It has {', '.join(metrics)}.")
        names = metrics if self.names is None else ("loss", *self.names)
        return {name: value for name, value in metrics.items() if name in names}

    def of_batch(self, metrics: WeightedScalars) -> WeightedScalars:
        """Reported metrics of a batch as (sum, weight), or (value, 1) for maxima."""

        def one(name: str, value: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
            value = value.astype(jnp.float32)
            return (value, jnp.ones_like(weight)) if name in self.maxima else (value * weight, weight)

        return {name: one(name, *pair) for name, pair in self.reported(metrics).items()}

    def combined(self, one: WeightedScalars, other: WeightedScalars) -> WeightedScalars:
        """What `of_batch` would be for two batches together."""
        combine = {name: jnp.maximum if name in self.maxima else jnp.add for name in one}
        return {name: jax.tree.map(combine[name], one[name], other[name]) for name in one}


@dataclasses.dataclass(frozen=True)
class VariationalNoise(Configurable):
    """Gaussian noise added to the parameters in training, fresh at each step (Graves, 2011; Pax: `vn`).

    Attributes:
      scale: Its standard deviation.
      regex: Which parameters get it, by their path; None = all.
      start_step: First step with noise.
    """

    scale: float = 0.0
    regex: str | None = None
    start_step: int = 0


@dataclasses.dataclass(frozen=True)
class Train(Configurable):
    """How the task is trained.

    Attributes:
      learner: From gradients to new parameters.
      num_train_steps: Optimizer steps in all.
      global_batch_size: Examples in a step, over all devices; this or `percore_batch_size`.
      percore_batch_size: Examples in a step for each device.
      num_microbatches: Slices of the batch whose gradients are summed one after the other, to save memory.
      summary_interval_steps: Steps between reports.
      eval_interval_steps: Steps between evaluations; None = only after the last step.
      random_seed: Root of the randomness of parameters and noise; `train_input.input_random_seed` is that of the data.
    """

    learner: Learner = part(Learner)
    num_train_steps: int = 1000
    global_batch_size: int | None = None
    percore_batch_size: float | None = None
    num_microbatches: int = 1
    summary_interval_steps: int = 10
    eval_interval_steps: int | None = None
    random_seed: int = 1234


@dataclasses.dataclass(frozen=True)
class SingleTask(Configurable):
    """A model and how it is trained (Pax: `paxml.tasks_lib.SingleTask`).

    Attributes:
      model: The network.
      train: How it is trained.
      loss_aggregator: Which of the model's metrics make up the loss.
      metrics: Which of the model's metrics are reported.
      vn: Noise on the parameters; None = off.
      name: Shown in reports.
    """

    model: Model
    train: Train = part(Train)
    loss_aggregator: LossAggregator = part(LossAggregator)
    metrics: Metrics = part(Metrics)
    vn: VariationalNoise | None = None
    name: str = "task"

    def loss(
        self, params: dict, batch: NestedMap, key: jax.Array, fp8: Any = None
    ) -> tuple[jax.Array, tuple[jax.Array, WeightedScalars]]:
        """The loss of a training batch, its weight, and the metrics of the model; for `Model.loss_and_metrics`."""
        metrics, _ = self.model.loss_and_metrics(params, batch, key, fp8)
        loss, weight = self.loss_aggregator(metrics)
        loss = loss.astype(jnp.float32)
        return loss, (weight, metrics | {"loss": (loss, weight)})
