"""Models that choose one of several classes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from paxcli.config.configurable import part, template
from paxcli.config.fields import PositiveInt
from paxcli.layers.embedding import TiedEmbedding
from paxcli.layers.init import Init, Xavier
from paxcli.layers.mlp import Mlp
from paxcli.models.base import Model
from paxcli.models.losses import WeightedScalars, cross_entropy, token_metrics, weighted_mean
from paxcli.nested_map import NestedMap


class ClassificationModel(Model):
    """A network that scores the classes of an example (Pax: `praxis.layers.models.ClassificationModel`).

    Attributes:
      num_classes: How many classes there are.
      input_field: The field of a batch that the network reads, [B, …].
      network: Template of a layer from that to logits [B, num_classes]; its `output_dims` is `num_classes`.
      params_init: How weights start.
    """

    num_classes: PositiveInt = 0
    input_field: str = "image"
    network: functools.partial = template(Mlp)
    params_init: Init = part(Xavier)

    def setup(self) -> None:
        self._network = self.network(name="network", output_dims=self.num_classes, params_init=self.params_init)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Logits [B, num_classes]."""
        return NestedMap(logits=self._network(batch[self.input_field].astype(self.fprop_dtype)))

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        """Mean cross-entropy of `labels` by `weights`, both [B]; accuracy of the best class and of the best five."""
        xent, correct = cross_entropy(predictions.logits, batch.labels)
        label_logit = jnp.take_along_axis(predictions.logits, batch.labels[:, None], axis=-1)
        in_top5 = jnp.sum(predictions.logits > label_logit, axis=-1) < 5
        means = {"loss": xent, "accuracy": correct, "accuracy_top5": in_top5}
        weight = jnp.sum(batch.weights)
        metrics = {
            name: (weighted_mean(value.astype(jnp.float32), batch.weights), weight) for name, value in means.items()
        }
        return metrics, NestedMap(xent=xent, scores=jax.nn.log_softmax(predictions.logits.astype(jnp.float32)))


class ClassificationMlpModel(Model):
    """Predicts the label of a token from that token alone: embedding, MLP, and logits from the embedding's table.

    Pax: `praxis.layers.models.ClassificationMLPModel`, whose loss was the accuracy, which has no gradient.

    Attributes:
      vocab_size: V.
      model_dims: D.
      hidden_dims: F.
      num_layers: Layers of the MLP.
      params_init: How weights start.
      embedding: Template of the token table, which also scores the tokens.
      mlp: Template of the layers.
    """

    vocab_size: PositiveInt = 0
    model_dims: PositiveInt = 0
    hidden_dims: PositiveInt = 0
    num_layers: PositiveInt = 0
    params_init: Init = part(Xavier)
    embedding: functools.partial = template(TiedEmbedding, use_bias=True)
    mlp: functools.partial = template(Mlp, activate_final=True)

    def setup(self) -> None:
        dims = self.model_dims
        self._embedding = self.embedding(
            name="embedding", vocab_size=self.vocab_size, model_dims=dims, params_init=self.params_init
        )
        self._mlp = self.mlp(
            name="mlp",
            input_dims=dims,
            output_dims=dims,
            hidden_dims=self.hidden_dims,
            num_layers=self.num_layers,
            params_init=self.params_init,
        )

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Logits [B, T, V] of `ids` [B, T]."""
        return NestedMap(logits=self._embedding.logits(self._mlp(self._embedding.embed(batch.ids))))

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        """Mean cross-entropy of `labels` by `weights`, both [B, T]."""
        return token_metrics(predictions.logits, batch.labels, batch.weights)
