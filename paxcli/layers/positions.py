"""Absolute position embeddings, added to the token embedding."""

from __future__ import annotations

import jax.numpy as jnp

from paxcli.config.fields import PositiveFloat, PositiveInt, Tokens
from paxcli.errors import ConfigError
from paxcli.layers.base import HiddenStates, Ids, Positions
from paxcli.layers.init import Gaussian, Init
from paxcli.layers.shared_weights import look_up
from paxcli.mesh.sharding import constrain


class SinusoidPositions(Positions):
    """Sinusoidal positions: sines, then cosines, over geometric time scales (Pax: `praxis.layers.PositionalEmbedding`).

    Attributes:
      model_dims: D, even.
      max_seq_len: Unused: every position has an embedding.
      min_timescale: Period / 2π of the fastest feature.
      max_timescale: Period / 2π of the slowest feature.
    """

    model_dims: PositiveInt
    max_seq_len: Tokens | None = None
    min_timescale: PositiveFloat = 1.0
    max_timescale: PositiveFloat = 10_000.0
    params_init: Init = Gaussian()

    def __call__(self, positions: Ids) -> HiddenStates:
        n, odd = divmod(self.model_dims, 2)
        if odd:
            hint = "Make it even, or use `LearnedPositions`."
            raise ConfigError(f"SinusoidPositions: model_dims={self.model_dims} is odd.", hint)
        # n - 1 intervals between n time scales: the last is exactly max_timescale.
        step = jnp.log(self.max_timescale / self.min_timescale) / max(n - 1, 1)
        angles = positions[..., None].astype(jnp.float32) * (jnp.exp(-step * jnp.arange(n)) / self.min_timescale)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class LearnedPositions(Positions):
    """One learned vector per position (Pax: `praxis.layers.TrainablePositionalEmbedding`).

    Attributes:
      model_dims: D.
      max_seq_len: Longest sequence. Validation refuses longer inputs.
      num_positions: Rows of the table; None = `max_seq_len`. Rows beyond `max_seq_len` are never read.
    """

    model_dims: PositiveInt
    max_seq_len: Tokens
    num_positions: PositiveInt | None = None
    params_init: Init = Gaussian()

    def setup(self) -> None:
        rows = self.max_seq_len if self.num_positions is None else self.num_positions
        if rows < self.max_seq_len:
            hint = "Raise `num_positions`, or set it to null."
            raise ConfigError(f"num_positions={rows} is less than max_seq_len={self.max_seq_len}.", hint)
        self.table = self.lookup_table("table", self.params_init, (rows, self.model_dims), (None, "embed"))

    def __call__(self, positions: Ids) -> HiddenStates:
        # Sharded like the vectors: otherwise XLA may replicate the gradients of all rows to sum them.
        return look_up(constrain(self.table, None, "activation_residual"), positions)
