"""Classifiers against Flax and optax."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxcli.errors import ConfigError
from paxcli.inputs.synthetic import SyntheticImages, SyntheticInput
from paxcli.layers.mlp import Mlp
from paxcli.layers.vision_transformer import VisionTransformer
from paxcli.models.classification_model import ClassificationMlpModel, ClassificationModel
from paxcli.nested_map import NestedMap
from tests.models import transformer_in_numpy as plain
from tests.tolerances import FLOAT32

CLASSES = 11


class _FlaxMlp(nn.Module):
    """Three dense layers, and the activation after the last one too if asked."""

    widths: tuple[int, ...]
    activate_final: bool = False

    @nn.compact
    def __call__(self, x):
        for width in self.widths[:-1]:
            x = nn.relu(nn.Dense(width)(x))
        x = nn.Dense(self.widths[-1])(x)
        return nn.relu(x) if self.activate_final else x


def _as_flax(params: dict) -> dict:
    return {f"Dense_{i}": {"kernel": p["w"], "bias": p["b"]} for i, p in enumerate(params.values())}


def test_classifier_equals_flax_and_optax():
    model = ClassificationModel(
        num_classes=CLASSES, input_field="features", network=functools.partial(Mlp, input_dims=6, hidden_dims=13)
    )
    chance = np.random.default_rng(0)
    batch = NestedMap(
        features=jnp.asarray(chance.standard_normal((50, 6)), jnp.float32),
        labels=jnp.asarray(chance.integers(0, CLASSES, 50), jnp.int32),
        weights=jnp.asarray(chance.integers(0, 3, 50) / 2, jnp.float32),
    )
    params = plain.random_params(model, batch)
    metrics, per_example = model.apply({"params": params}, batch)
    logits = _FlaxMlp((13, 13, CLASSES)).apply({"params": _as_flax(params["network"])}, batch.features)
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    ranks = np.argsort(np.argsort(-np.asarray(logits), axis=-1), axis=-1)[np.arange(50), batch.labels]
    for name, values in (("loss", xent), ("accuracy", ranks < 1), ("accuracy_top5", ranks < 5)):
        np.testing.assert_allclose(metrics[name][0], np.average(values, weights=batch.weights), rtol=1e-5)
        assert metrics[name][1] == batch.weights.sum()
    np.testing.assert_allclose(per_example.xent, xent, **FLOAT32)
    np.testing.assert_allclose(per_example.scores, -xent, **FLOAT32)


def test_token_mlp_equals_flax_and_optax():
    model = ClassificationMlpModel(vocab_size=30, model_dims=8, hidden_dims=12, num_layers=4)
    batch = jax.tree.map(jnp.asarray, SyntheticInput(batch_size=3, seq_len=9, vocab_size=30).get_next())
    params = plain.random_params(model, batch)
    table, bias = params["embedding"]["table"], params["embedding"]["bias"]
    mlp = _FlaxMlp((12, 12, 12, 8), activate_final=True)
    logits = mlp.apply({"params": _as_flax(params["mlp"])}, table[batch.ids]) @ table.T + bias
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()
    np.testing.assert_allclose(model.apply({"params": params}, batch)[0]["loss"][0], expected, rtol=1e-5)


def test_vision_transformer_equals_numpy():
    network = VisionTransformer(
        output_dims=CLASSES, image_size=12, patch_size=4, model_dims=16, hidden_dims=32, num_layers=2, num_heads=4
    )
    images = np.random.default_rng(1).standard_normal((2, 12, 12, 3)).astype(np.float32)
    params = plain.random_params(network, jnp.asarray(images))
    p = jax.tree.map(np.asarray, params)
    for image, logits in zip(images, network.apply({"params": params}, jnp.asarray(images)), strict=True):
        patches = [image[y : y + 4, x : x + 4].reshape(-1) for y in (0, 4, 8) for x in (0, 4, 8)]
        tokens = np.stack(patches) @ p["patches"]["w"] + p["patches"]["b"] + p["position"]["table"]
        mean = plain.norm(plain.encode(tokens, p["stack"], np.ones((9, 9), bool)), p["norm"]).mean(axis=0)
        np.testing.assert_allclose(logits, mean @ p["head"]["w"] + p["head"]["b"], **FLOAT32)


def test_images_that_do_not_fit_are_named():
    fields = dict(output_dims=CLASSES, model_dims=16, hidden_dims=32, num_layers=1, num_heads=4)
    with pytest.raises(ConfigError, match="does not divide"):
        VisionTransformer(**fields, image_size=12, patch_size=5).init(jax.random.key(0), jnp.ones((1, 12, 12, 3)))
    with pytest.raises(ConfigError, match="the input makes"):
        VisionTransformer(**fields, image_size=12, patch_size=4).init(jax.random.key(0), jnp.ones((1, 16, 16, 3)))
    with pytest.raises(ConfigError, match="num_heads=5 does not divide model_dims=16"):
        network = VisionTransformer(**fields | {"num_heads": 5}, image_size=12, patch_size=4)
        network.init(jax.random.key(0), jnp.ones((1, 12, 12, 3)))


def test_a_class_is_seen_under_the_noise():
    """The nearest mean of other images of a class tells the class of fresh images."""
    source = SyntheticImages(batch_size=200, image_size=8, num_classes=4, is_training=True)
    seen, fresh = source.get_next(), source.get_next()
    means = np.stack([seen.image[seen.labels == label].mean(axis=0) for label in range(4)])
    distances = np.square(fresh.image[:, None] - means[None]).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == fresh.labels).mean() > 0.95
    assert np.bincount(fresh.labels).min() > 30
