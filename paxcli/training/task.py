"""The task: a model, its loss and metrics, and how it is trained."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from paxcli.config import fields
from paxcli.config.configurable import Configurable, part
from paxcli.config.fields import NotCompiled, SafeOnResume
from paxcli.errors import ConfigError
from paxcli.layers.lora import REFERENCE
from paxcli.layers.scopes import NOISE
from paxcli.layers.summaries import ActivationSums
from paxcli.mesh.weights import match_parameters, parameter_names
from paxcli.models.base import Model, WeightedScalars
from paxcli.nested_map import NestedMap
from paxcli.training.early_stopping import EarlyStopping
from paxcli.training.learner import Learner
from paxcli.training.summaries import ACTIVATIONS, strict_accuracy


def _check_names(field: str, names: tuple[str, ...], metrics: dict[str, Any]) -> None:
    if unknown := [name for name in names if name not in metrics]:
        raise ConfigError(f"{field}: the model has no metric `{unknown[0]}`.", f"It has {', '.join(metrics)}.")


@dataclasses.dataclass(frozen=True)
class LossAggregator(Configurable):
    """Computes the loss as a weighted sum of metrics (Pax: `LossAggregator`, `MultiLossAggregator`).

    Attributes:
      loss_keys: Names of the metrics to sum.
      loss_weights: The factor of each; None = 1.
    """

    loss_keys: tuple[str, ...] = ("loss",)
    loss_weights: tuple[fields.AnyFloat, ...] | None = None

    def __call__(self, metrics: WeightedScalars) -> tuple[jax.Array, jax.Array]:
        """The loss in float32, and the weight of the first of its metrics.

        Raises:
          ConfigError: The model has no metric of that name, or the number of weights differs.
        """
        factors = self.loss_weights or (1.0,) * len(self.loss_keys)
        if len(factors) != len(self.loss_keys):
            problem = f"task.loss_aggregator: {len(self.loss_keys)} loss_keys, {len(factors)} loss_weights."
            raise ConfigError(problem, "Give one weight for each key.")
        _check_names("task.loss_aggregator", self.loss_keys, metrics)
        values = [factor * metrics[key][0] for key, factor in zip(self.loss_keys, factors, strict=True)]
        return sum(values[1:], values[0]).astype(jnp.float32), metrics[self.loss_keys[0]][1]


@dataclasses.dataclass(frozen=True)
class Metrics(Configurable):
    """The metrics that are reported besides `loss`, in training and evaluation (Pax: `SingleTask.metrics`).

    Attributes:
      names: Names of the metrics, besides `maxima`; None = all that the model has.
      maxima: Metrics whose maximum over batches an evaluation reports, instead of the weighted mean.
    """

    names: tuple[str, ...] | None = None
    maxima: tuple[str, ...] = ()

    def select_reported(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Those of `metrics` that are reported.

        Raises:
          ConfigError: The model has no metric of that name.
        """
        _check_names("task.metrics", (*(self.names or ()), *self.maxima), metrics)
        names = metrics if self.names is None else ("loss", *self.names, *self.maxima)
        return {name: value for name, value in metrics.items() if name in names}

    def of_batch(self, metrics: WeightedScalars) -> WeightedScalars:
        """The reported metrics of a batch as (sum, weight); for maxima (value, 1), without weights (-inf, 0)."""

        def one(name: str, value: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
            value = value.astype(jnp.float32)
            maximum = jnp.where(weight > 0, value, -jnp.inf), jnp.sign(weight)
            return maximum if name in self.maxima else (value * weight, weight)

        return {name: one(name, *pair) for name, pair in self.select_reported(metrics).items()}

    def combine(self, batches: list[WeightedScalars]) -> dict[str, tuple[float, float]]:
        """Combines the results of `of_batch` for several batches, in float64: a long sum in float32 loses digits."""
        combine = {name: np.max if name in self.maxima else np.sum for name in batches[0]}
        values = {name: np.array([batch[name] for batch in batches], np.float64) for name in combine}
        return {name: tuple(combine[name](pairs, axis=0).tolist()) for name, pairs in values.items()}


@dataclasses.dataclass(frozen=True)
class VariationalNoise(Configurable):
    """Gaussian noise added to the parameters in training, drawn again at each step (Graves, 2011; Pax: `vn`).

    Attributes:
      scale: Standard deviation.
      regex: Selects the parameters whose path it is found in; None = all. Pax matches it from the path's start. The
        frozen copy that DPO compares with never has noise.
      start_step: First step with noise, from 0.
    """

    scale: fields.NonNegativeFloat = 0.0
    regex: str | None = None
    start_step: fields.StepNumber = 0

    @jax.named_scope(NOISE)
    def add_to(self, params: dict, step: jax.Array, key: jax.Array) -> dict:
        """The parameters with noise.

        Raises:
          ConfigError: The regex matches no parameter.
        """
        values, structure = jax.tree.flatten(params)
        names = parameter_names(params)
        matches = match_parameters("vn.regex", self.regex or "", names)
        chosen = [bool(use) and not name.startswith(f"{REFERENCE}/") for use, name in zip(matches, names, strict=True)]
        scale = jnp.where(step >= self.start_step, self.scale, 0.0)

        def add(value: jax.Array, use: bool, key: jax.Array) -> jax.Array:
            return value + scale * jax.random.normal(key, value.shape, value.dtype) if use else value

        return jax.tree.unflatten(structure, map(add, values, chosen, jax.random.split(key, len(values))))


@dataclasses.dataclass(frozen=True)
class Train(Configurable):
    r"""How the task is trained.

    Attributes:
      learner: Turns gradients into new parameters.
      num_train_steps: Total number of optimizer steps; None = those of `num_train_epochs`.
      num_train_epochs: Set instead of `num_train_steps`: how often each row of the training data is read. A run counts
        the rows when it starts, and then has `num_train_steps`.
      global_batch_size: Examples per step over all devices; set this or `percore_batch_size`.
      percore_batch_size: Examples per step and device.
      num_microbatches: Gradient accumulation: slices of the batch that run one at a time, to save memory.
      summary_interval_steps: Steps between reports.
      eval_interval_steps: Steps between evaluations; None = only after the last step.
      random_seed: Seed of parameters and noise, and of the data unless `train_input.input_random_seed` is set; None =
        a run draws one and records it.
      step_timeout_seconds: Longest time for a batch, a step or a save. A run that takes longer prints the stacks of its
        threads and exits with code 75; None = no limit.
      init_rename: Parameters that have another name in the checkpoint of `--from`: regular expression of the full path
        here, such as `encoder/(.*)` → path there, such as `stack/\1`, with the groups of the expression; None = none.
      init_ignore: Regular expressions. Parameters whose path matches one of them are not loaded by `--from`: they start
        at random values.
    """

    learner: SafeOnResume[Learner] = part(Learner)
    num_train_steps: SafeOnResume[fields.Steps | None] = 1000
    num_train_epochs: SafeOnResume[NotCompiled[Annotated[fields.PositiveFloat, fields.Unit("epochs")] | None]] = None
    global_batch_size: fields.Examples | None = None
    percore_batch_size: Annotated[fields.PositiveFloat, fields.Unit("examples")] | None = None
    num_microbatches: SafeOnResume[fields.PositiveInt] = 1
    summary_interval_steps: SafeOnResume[NotCompiled[fields.Steps]] = 10
    eval_interval_steps: SafeOnResume[NotCompiled[fields.Steps | None]] = None
    random_seed: NotCompiled[fields.Seed | None] = 1234
    step_timeout_seconds: SafeOnResume[NotCompiled[fields.Seconds | None]] = 1800.0
    init_rename: NotCompiled[dict[str, str] | None] = None
    init_ignore: NotCompiled[tuple[str, ...]] = ()


@dataclasses.dataclass(frozen=True)
class SingleTask(Configurable):
    """A model and how to train it (Pax: `paxml.tasks_lib.SingleTask`).

    Attributes:
      model: The network.
      train: How to train it.
      loss_aggregator: Computes the loss from the model's metrics.
      metrics: Selects the metrics to report.
      vn: Noise on the parameters; None = off.
      early_stopping_fn: Ends the run by a metric of its evaluations; off unless it has a target or a patience.
      summary_verbosity: Level of the summaries that are logged besides the metrics; each includes those below it: 1 =
        counts, and the norm of the update; 2 = norms of each parameter, its gradient and its update; 3 = statistics of
        each layer's input.
      name: Shown in reports.
    """

    model: Model
    train: Train = part(Train)
    loss_aggregator: LossAggregator = part(LossAggregator)
    metrics: Metrics = part(Metrics)
    vn: VariationalNoise | None = None
    early_stopping_fn: SafeOnResume[NotCompiled[EarlyStopping]] = part(EarlyStopping)
    summary_verbosity: SafeOnResume[Annotated[int, fields.Range(min=0, max=3)]] = 0
    name: SafeOnResume[NotCompiled[str]] = "task"

    def loss(
        self, params: dict, batch: NestedMap, key: jax.Array, fp8: Any = None
    ) -> tuple[jax.Array, tuple[jax.Array, WeightedScalars, dict[str, ActivationSums]]]:
        """The loss of a training batch, its weight, the metrics, and the activations that `summary_verbosity` asks for.

        The arguments are those of `Model.loss_and_metrics`.
        """
        metrics, examples = self.loss_and_metrics(params, batch, key, fp8, self.summary_verbosity >= ACTIVATIONS)
        loss, weight = metrics["loss"]
        return loss, (weight, metrics, examples.get("activations", {}))

    def loss_and_metrics(self, *arguments: Any) -> tuple[WeightedScalars, NestedMap]:
        """What `Model.loss_and_metrics` returns, with the task's own `loss` and what `summary_verbosity` adds."""
        metrics, examples = self.model.loss_and_metrics(*arguments)
        if arrays := [name for name, pair in metrics.items() if any(map(jnp.ndim, pair))]:
            hint = "Return its weighted mean, and the sum of the weights."
            raise ConfigError(f"The value or weight of the model's metric `{arrays[0]}` is not a scalar.", hint)
        more = strict_accuracy(examples) if self.summary_verbosity else {}
        return metrics | more | {"loss": self.loss_aggregator(metrics)}, examples
