"""Classification models."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from paxcli.config.configurable import part, template
from paxcli.config.fields import LayerCount, PositiveInt
from paxcli.layers.base import Layer, flops_of
from paxcli.layers.embedding import TiedEmbedding
from paxcli.layers.flops import Flops, sum_flops
from paxcli.layers.init import Init, Xavier
from paxcli.layers.mlp import Mlp
from paxcli.layers.stack import Stack
from paxcli.mesh.axes import Axis
from paxcli.models.base import InputSizes, Model, check_mesh_divides
from paxcli.models.losses import WeightedScalars, cross_entropy, token_metrics, weighted_mean
from paxcli.nested_map import NestedMap


class ClassificationModel(Model):
    """A network from an example to the logits of its classes (Pax: `praxis.layers.models.ClassificationModel`).

    Attributes:
      num_classes: Number of classes.
      input_field: The field of a batch that the network reads, [B, …].
      network: Template of a layer from that to logits [B, num_classes]; its `output_dims` is `num_classes`.
      params_init: Initializer of the weights.
    """

    num_classes: PositiveInt = 0
    input_field: str = "image"
    network: functools.partial = template(Mlp)
    params_init: Init = part(Xavier)

    def setup(self) -> None:
        self._network = self._network_template(name="network")

    @property
    def input_sizes(self) -> InputSizes:
        return InputSizes(num_classes=self.num_classes)

    def forward_flops(self, spec: NestedMap) -> Flops | None:
        return flops_of(self._network_template(parent=None), *spec[self.input_field].shape[:-1])

    def stacks(self) -> Mapping[str, Stack]:
        network = self._network_template(parent=None)
        found = network.stacks() if isinstance(network, Layer) else {}
        return {f"network.{path}": stack for path, stack in found.items()}

    @property
    def _network_template(self) -> functools.partial:
        return functools.partial(self.network, output_dims=self.num_classes, params_init=self.params_init)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Logits [B, num_classes]."""
        return NestedMap(logits=self._network(batch[self.input_field].astype(self.fprop_dtype)))

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        """Mean cross-entropy of `labels` by `weights`, both [B]; top-1 and top-5 accuracy."""
        xent, correct = cross_entropy(predictions.logits, batch.labels)
        label_logit = jnp.take_along_axis(predictions.logits, batch.labels[:, None], axis=-1)
        in_top5 = jnp.sum(predictions.logits > label_logit, axis=-1) < 5
        means = {"loss": xent, "accuracy": correct, "accuracy_top5": in_top5}
        weight = jnp.sum(batch.weights)
        metrics = {name: (weighted_mean(x.astype(jnp.float32), batch.weights), weight) for name, x in means.items()}
        return metrics, NestedMap(xent=xent, scores=-xent)


class ClassificationMlpModel(Model):
    """Predicts the label of a token from that token alone: embedding, MLP, and logits from the embedding's table.

    Pax: `praxis.layers.models.ClassificationMLPModel`; its loss was the accuracy, which has no gradient.

    Attributes:
      vocab_size: V.
      model_dims: D.
      hidden_dims: F.
      num_layers: Layers of the MLP.
      params_init: Initializer of the weights.
      embedding: Template of the token embedding, which also computes the logits.
      mlp: Template of the layers.
    """

    vocab_size: PositiveInt = 0
    model_dims: PositiveInt = 0
    hidden_dims: PositiveInt = 0
    num_layers: LayerCount = 0
    params_init: Init = part(Xavier)
    embedding: functools.partial = template(TiedEmbedding, use_bias=True)
    mlp: functools.partial = template(Mlp, activate_final=True)

    def setup(self) -> None:
        self._embedding = self._embedding_template(name="embedding")
        self._mlp = self._mlp_template(name="mlp")

    @property
    def input_sizes(self) -> InputSizes:
        return InputSizes(vocab_size=self.vocab_size)

    def validate(self, mesh: Mapping[str, int]) -> None:
        check_mesh_divides(mesh, Axis.TENSOR, hidden_dims=self.hidden_dims)
        check_mesh_divides(mesh, Axis.FSDP, model_dims=self.model_dims)

    def forward_flops(self, spec: NestedMap) -> Flops | None:
        layers = (self._mlp_template(parent=None), self._embedding_template(parent=None))
        return sum_flops(flops_of(layer, *spec.ids.shape) for layer in layers)

    @property
    def _embedding_template(self) -> functools.partial:
        return functools.partial(self.embedding, **self.named_fields("vocab_size", "model_dims", "params_init"))

    @property
    def _mlp_template(self) -> functools.partial:
        same = self.named_fields("hidden_dims", "num_layers", "params_init")
        return functools.partial(self.mlp, input_dims=self.model_dims, output_dims=self.model_dims, **same)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Logits [B, T, V] of `ids` [B, T]."""
        return NestedMap(logits=self._embedding.logits(self._mlp(self._embedding.embed(batch.ids))))

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        """Mean cross-entropy of `labels` by `weights`, both [B, T]."""
        return token_metrics(predictions.logits, batch.labels, batch.weights)
