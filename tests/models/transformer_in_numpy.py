"""A transformer of pre-norm blocks in plain numpy, row by row and head by head, to compare with."""

from __future__ import annotations

import jax
import numpy as np


def random_params(model, batch, seed: int = 0) -> dict:
    """Parameters of a model, every one moved off where it starts."""
    params = jax.jit(model.init)(jax.random.key(seed), batch)["params"]
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda box: box.value, params, is_leaf=lambda x: hasattr(x, "names")))
    chance = np.random.default_rng(seed)
    return tree.unflatten([leaf + 0.1 * chance.standard_normal(leaf.shape, np.float32) for leaf in leaves])


def norm(x, p):
    """Layer norm with the scale stored less 1."""
    deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return (x - x.mean(-1, keepdims=True)) / deviation * (1 + p["scale"]) + p["bias"]


def attend(x, source, p, visible):
    """Attention of each position of `x` [T, D] to the positions of `source` [S, D] that `visible` [T, S] allows."""
    y = np.zeros_like(x)
    for head in range(p["query"].shape[1]):
        query, key, value = x @ p["query"][:, head], source @ p["key"][:, head], source @ p["value"][:, head]
        logits = np.where(visible, query @ key.T / np.sqrt(query.shape[-1]), -1e30)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        y += weights / weights.sum(-1, keepdims=True) @ value @ p["post"][head]
    return y


def feed_forward(x, p):
    """Two matrices around the tanh form of GELU."""
    hidden = x @ p["w_in"] + p["b_in"]
    hidden = hidden * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    return hidden @ p["w_out"].T + p["b_out"]


def layers(p):
    """The parameters of each of a stack's layers."""
    count = len(jax.tree.leaves(p)[0])
    return [jax.tree.map(lambda leaf, i=i: np.asarray(leaf[i], np.float64), p["layers"]) for i in range(count)]


def encode(x, p, visible):
    """A stack of blocks on one row [T, D]."""
    for layer in layers(p):
        normed = norm(x, layer["attention_norm"])
        x = x + attend(normed, normed, layer["attention"], visible)
        x = x + feed_forward(norm(x, layer["feed_forward_norm"]), layer["feed_forward"])
    return x


def decode(x, source, p, own_visible, source_visible):
    """A stack of decoder blocks on one row [T, D] and its encoded source [S, D]."""
    for layer in layers(p):
        normed = norm(x, layer["attention_norm"])
        x = x + attend(normed, normed, layer["attention"], own_visible)
        x = x + attend(norm(x, layer["cross_attention_norm"]), source, layer["cross_attention"], source_visible)
        x = x + feed_forward(norm(x, layer["feed_forward_norm"]), layer["feed_forward"])
    return x


def sinusoids(positions, dims):
    """All sines, then all cosines."""
    count = dims // 2
    angles = positions[:, None] * 10_000.0 ** (-np.arange(count) / (count - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def cross_entropy(logits, label):
    """Of one position [V]."""
    return np.log(np.sum(np.exp(logits - logits.max()))) + logits.max() - logits[label]
