# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write a layer, a loss, an input, an optimizer
#
# Each part is a class with typed fields, in a file that a recipe imports. [Your own parts](../own-parts.md) states the
# contract of each; here they are put together, and the model is trained.

# %%
import paxcli as pax

# %%
# %%writefile parts.py
"""A recipe made of parts of its own."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from pax_recipes.tiny import tiny
from paxcli.config.fields import DecayRate, NonNegativeFloat, PositiveInt, Tokens
from paxcli.config.recipe import recipe
from paxcli.inputs.base_input import RandomAccessInput
from paxcli.layers.base import Layer
from paxcli.layers.flops import matrix_flops
from paxcli.layers.init import Init, Xavier
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from paxcli.optim.base import Optimizer, decay_mask


class GatedRelu(Layer):
    """`(relu(x W_gate) * x W_in) W_out`."""

    model_dims: PositiveInt
    hidden_dims: PositiveInt
    params_init: Init = Xavier()

    def setup(self):
        weight = functools.partial(self.weight, init=self.params_init, contracts=(0,), produces=(1,))
        wide, axes = (self.model_dims, self.hidden_dims), ("embed", "mlp")
        self.w_gate = weight("w_gate", shape=wide, axes=axes)
        self.w_in = weight("w_in", shape=wide, axes=axes)
        self.w_out = weight("w_out", shape=wide[::-1], axes=axes[::-1])

    @nn.nowrap
    def matmul_flops(self, *shape):
        return matrix_flops(shape, 3 * self.model_dims * self.hidden_dims)

    def __call__(self, x):
        return (jax.nn.relu(x @ self.w_gate) * (x @ self.w_in)) @ self.w_out


class ConfidentModel(LanguageModel):
    """A language model whose loss rewards confidence: `loss = log_pplx + entropy_weight · entropy`."""

    entropy_weight: NonNegativeFloat = 0.1

    def compute_loss(self, predictions, batch):
        metrics, per_example = super().compute_loss(predictions, batch)
        log_probs = jax.nn.log_softmax(predictions.logits.astype(jnp.float32))
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        weight = jnp.sum(batch.weights)
        mean = jnp.sum(entropy * batch.weights) / jnp.maximum(weight, 1)
        loss, _ = metrics["loss"]
        return {**metrics, "entropy": (mean, weight), "loss": (loss + self.entropy_weight * mean, weight)}, per_example


@dataclasses.dataclass(kw_only=True)
class Counting(RandomAccessInput):
    """Row n counts from a random start in steps of `stride`, modulo the vocabulary."""

    seq_len: Tokens | None = None
    vocab_size: PositiveInt | None = None
    stride: PositiveInt = 3

    def num_rows(self):
        return None

    def rows(self, numbers):
        starts = [np.random.default_rng([self.seed, max(number, 0)]).integers(self.vocab_size) for number in numbers]
        tokens = (np.array(starts)[:, None] + self.stride * np.arange(self.seq_len + 1)) % self.vocab_size
        is_token = np.broadcast_to(numbers[:, None] >= 0, (len(numbers), self.seq_len))
        return NestedMap(
            ids=np.where(is_token, tokens[:, :-1], 0).astype(np.int32),
            labels=np.where(is_token, tokens[:, 1:], 0).astype(np.int32),
            weights=is_token.astype(np.float32),
            segment_ids=is_token.astype(np.int32),
            segment_pos=np.where(is_token, np.arange(self.seq_len), 0).astype(np.int32),
        )


@dataclasses.dataclass(frozen=True)
class Signum(Optimizer):
    """The sign of the momentum, and decoupled weight decay."""

    beta: DecayRate = 0.9
    weight_decay: NonNegativeFloat = 0.1

    def transformation(self, weights):
        decay = optax.add_decayed_weights(self.weight_decay, decay_mask(weights))
        return optax.chain(optax.trace(self.beta), optax.scale_by_sign(), decay)


@recipe()
def counter():
    """A language model that learns to count."""
    config = tiny()
    model = config.task.model
    config.task.model = ConfidentModel.config(vocab_size=model.vocab_size, model_dims=64, hidden_dims=128)
    config.task.model.num_layers, config.task.model.num_heads, config.task.model.max_seq_len = 1, 2, 32
    config.task.model.stack.block.feed_forward = GatedRelu.partial()
    config.task.model.loss_chunk = None
    config.train_input, config.eval_inputs, config.decode_inputs = Counting.config(), [], []
    learner = config.task.train.learner
    learner.optimizer, learner.learning_rate = Signum.config(), 2e-3
    return config


# %% [markdown]
# The fields of these parts are fields of the recipe: `set` changes them, with ranges and shortest paths.

# %%
changes = {"stride": 5, "num_train_steps": 60, "summary_interval_steps": 10, "global_batch_size": 8}
recipe = pax.load("./parts.py:counter", set=changes)
recipe.sizes()

# %%
run = pax.train(recipe, run_dir="runs/counter")
run.plot(metrics=["log_pplx", "entropy"])

# %% [markdown]
# An error in a part names its file and line, and a value out of range its field:

# %%
try:
    pax.load("./parts.py:counter", set={"stride": 0}).validate()
except pax.ConfigError as error:
    print(error.message)
