"""The model FLOPs of a transformer's training step, counted from its shapes."""

from __future__ import annotations

from typing import NamedTuple

_TRAINING_OVER_FORWARD = 3  # the backward pass multiplies twice for every multiplication of the forward pass


class Flops(NamedTuple):
    """Floating-point operations of one step.

    Attributes:
      weights: Multiplications by learned matrices, the unembedding included.
      attention: Query times key, and probabilities times value.
    """

    weights: float
    attention: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.attention


def transformer_flops_per_step(
    batch: int,
    seq_len: int,
    model_dims: int,
    hidden_dims: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    dims_per_head: int,
    vocab_size: int,
    num_gate_activations: int = 1,
    causal: bool = True,
    sliding_window: int | None = None,
) -> Flops:
    """Counts a training step on `batch` rows of `seq_len` tokens: matrix products only, forward and backward.

    Recomputation, the optimizer, norms and embedding look-ups do not count, as is usual for MFU.

    Args:
      num_gate_activations: Matrices into the hidden layer: 1 for a plain MLP, 2 for a gated one.
      causal: Whether a token attends to earlier ones only, which halves the products that are needed.
      sliding_window: How many tokens back a token sees; all when None. Needs `causal`.
    """
    if sliding_window is not None and not causal:
        raise ValueError("a sliding window is counted for causal attention only")
    tokens = batch * seq_len
    mlp = model_dims * hidden_dims * (num_gate_activations + 1)
    projections = model_dims * dims_per_head * 2 * (num_heads + num_kv_heads)
    weights = 2 * tokens * (num_layers * (mlp + projections) + model_dims * vocab_size)
    pairs = batch * _attended_pairs(seq_len, causal, sliding_window)
    attention = 4 * pairs * num_layers * num_heads * dims_per_head
    return Flops(_TRAINING_OVER_FORWARD * weights, _TRAINING_OVER_FORWARD * attention)


def _attended_pairs(seq_len: int, causal: bool, sliding_window: int | None) -> float:
    """Query and key positions that meet in one row."""
    if not causal:
        return seq_len**2
    window = seq_len if sliding_window is None else min(sliding_window, seq_len)
    return seq_len * window - window**2 / 2
