"""The model FLOPs of a transformer's training step, counted from its shapes."""

from __future__ import annotations

from collections.abc import Sequence
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
    sliding_window: int | None | Sequence[int | None] = None,
    num_experts: int = 0,
) -> Flops:
    """Counts a training step on `batch` rows of `seq_len` tokens: matrix products only, forward and backward.

    Recomputation, the optimizer, norms and embedding look-ups do not count, as is usual for MFU.

    Args:
      num_gate_activations: Matrices into the hidden layer: 1 for a plain MLP, 2 for a gated one.
      causal: Whether a token attends to earlier ones only, which halves the products that are needed.
      sliding_window: How many tokens back a token sees; all when None. Several are those of layers that take turns.
        Needs `causal`.
      num_experts: Columns of a router's matrix in each layer. `hidden_dims` is then that of a token's experts together.
    """
    windows = sliding_window if isinstance(sliding_window, Sequence) else (sliding_window,)
    if not causal and any(window is not None for window in windows):
        raise ValueError("a sliding window is counted for causal attention only")
    tokens = batch * seq_len
    mlp = model_dims * hidden_dims * (num_gate_activations + 1)
    projections = model_dims * dims_per_head * 2 * (num_heads + num_kv_heads)
    weights = 2 * tokens * (num_layers * (mlp + projections + model_dims * num_experts) + model_dims * vocab_size)
    pairs = batch * sum(_attended_pairs(seq_len, causal, window) for window in windows) / len(windows)
    attention = 4 * pairs * num_layers * num_heads * dims_per_head
    return Flops(_TRAINING_OVER_FORWARD * weights, _TRAINING_OVER_FORWARD * attention)


def _attended_pairs(seq_len: int, causal: bool, sliding_window: int | None) -> float:
    """Query and key positions that meet in one row."""
    if not causal:
        return seq_len**2
    window = seq_len if sliding_window is None else min(sliding_window, seq_len)
    return seq_len * window - window**2 / 2
