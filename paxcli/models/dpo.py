"""Direct preference optimization (DPO): the loss of pairs of answers, one preferred to the other."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.configurable import Configurable
from paxcli.config.fields import PositiveFloat, Range
from paxcli.models.losses import WeightedScalars, weighted_mean
from paxcli.nested_map import NestedMap

# The field of a batch with the other answers, a batch as well.
REJECTED = "rejected"


@dataclasses.dataclass(frozen=True)
class Dpo(Configurable):
    """DPO with the sigmoid loss (Rafailov et al., 2023; TRL: `DPOConfig`).

    The loss of a pair is `-log sigmoid(beta * margin)`. The margin is the log-probability of the chosen answer minus
    that of the rejected one, minus the same of the reference: the model at the start of the run. With LoRA this is the
    model without its adapters; otherwise, a frozen copy of all parameters, which takes as much memory again. It is
    computed as in evaluation: with `precision=fp8` its matmuls are not in FP8, and margins do not start at 0 exactly.

    Attributes:
      beta: How strongly the model is held to the reference.
      label_smoothing: Probability that a preference is wrong (conservative DPO: Mitchell, 2023).
    """

    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Range(min=0, below=0.5)] = 0.0

    def metrics(
        self, scores: Float[jax.Array, "B 2"], reference: Float[jax.Array, "B 2"], weights: Float[jax.Array, " B"]
    ) -> WeightedScalars:
        """Means over pairs: `loss`, `reward_margin`, and `reward_accuracy`, the share of pairs with a positive margin.

        Args:
          scores: Log-probabilities of the chosen and the rejected answer.
          reference: Those of the reference.
          weights: 1 for pairs, 0 for padding.
        """
        margin = self.beta * ((scores[:, 0] - scores[:, 1]) - (reference[:, 0] - reference[:, 1]))
        smoothing = self.label_smoothing
        loss = -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)
        values = {"loss": loss, "reward_margin": margin, "reward_accuracy": (margin > 0).astype(jnp.float32)}
        return {name: (weighted_mean(value, weights), jnp.sum(weights)) for name, value in values.items()}


def interleave_pairs(batch: NestedMap) -> NestedMap:
    """Rows [2B, T] of a batch of pairs: each chosen answer, then the rejected one. No row moves to another device."""
    stacked = {name: jnp.stack([batch[name], rejected], 1) for name, rejected in batch[REJECTED].items()}
    return NestedMap({name: pairs.reshape(-1, *pairs.shape[2:]) for name, pairs in stacked.items()})
