"""Muon."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from paxcli.config.fields import DecayRate, NonNegativeFloat, PositiveFloat, PositiveInt
from paxcli.mesh.weights import Weight
from paxcli.optim.base import Optimizer


@dataclasses.dataclass(frozen=True)
class Muon(Optimizer):
    """Momentum whose matrices are orthogonalized by Newton-Schulz iterations (Jordan et al., 2024); Adam for the rest.

    A weight counts as the matrix [contracted, produced] of its matmul: a query projection [D, N, H] as [D, N * H]. Each
    stacked layer and each expert is a matrix of its own. Embeddings, output heads, norms and biases get Adam, without
    decay. Both use the learner's learning rate.

    Attributes:
      beta: Decay of the momentum.
      nesterov: Whether to use Nesterov momentum, in Adam too (NAdam), as optax does.
      num_iterations: Newton-Schulz iterations.
      epsilon: Added to the norm of a momentum matrix, and to the root of Adam's second moment.
      consistent_rms: Root-mean-square of a matrix's update, whatever its shape: 0.2 is about that of AdamW, whose
        learning rate and decay then fit (Liu et al., 2025). None = scale by sqrt(max(1, produced / contracted)).
      weight_decay: Weight decay of the matrices, multiplied by the learning rate; 0 = none.
      adam_beta1: Decay of Adam's first moment.
      adam_beta2: Decay of Adam's second moment.
    """

    beta: DecayRate = 0.95
    nesterov: bool = True
    num_iterations: PositiveInt = 5
    epsilon: NonNegativeFloat = 1e-8
    consistent_rms: PositiveFloat | None = 0.2
    weight_decay: NonNegativeFloat = 0.1
    adam_beta1: DecayRate = 0.9
    adam_beta2: DecayRate = 0.95

    def transformation(self, weights: Any) -> optax.GradientTransformation:
        return optax.contrib.muon(
            learning_rate=-1.0,  # optax subtracts here already; the learner multiplies by its rate and subtracts
            ns_steps=self.num_iterations,
            beta=self.beta,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            adam_b1=self.adam_beta1,
            adam_b2=self.adam_beta2,
            muon_weight_dimension_numbers=jax.tree.map(_matrix, weights),
            consistent_rms=self.consistent_rms,
        )


def _matrix(weight: Weight) -> optax.contrib.MuonDimensionNumbers | None:
    """The row and column dimensions of the matrix that Muon orthogonalizes; None if Adam updates the parameter."""
    if not weight.is_matrix or weight.is_table or "vocab" in weight.axes:
        return None
    rows, columns = (tuple(weight.num_stacked + dim for dim in dims) for dims in (weight.contracts, weight.produces))
    return optax.contrib.MuonDimensionNumbers(reduction_axis=rows, output_axis=columns)
