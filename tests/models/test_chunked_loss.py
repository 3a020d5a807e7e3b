from __future__ import annotations

import functools
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.layers.embedding import TiedEmbedding
from paxcli.layers.output_head import OutputHead, Scorer
from paxcli.models import chunked_loss
from paxcli.models.chunked_loss import chunk_size, chunked_token_metrics
from paxcli.models.language_model import LanguageModel
from paxcli.models.losses import token_losses
from paxcli.nested_map import NestedMap
from tests.conftest import ROOT
from tests.tolerances import BFLOAT16, FLOAT32

B, T, V = 2, 12, 37
SIZES = dict(vocab_size=V, max_seq_len=T, model_dims=8, hidden_dims=8, num_layers=1, num_heads=2)


def _batch() -> NestedMap:
    ids = jax.random.randint(jax.random.key(1), (B, T), 0, V)
    ones = jnp.ones((B, T), jnp.int32)
    weights = (jnp.arange(B * T) % 5 > 0).astype(jnp.float32).reshape(B, T)
    return NestedMap(ids=ids, labels=(ids * 7 + 3) % V, weights=weights, segment_ids=ones, segment_pos=ones)


def _outcome(model: LanguageModel, params: dict, batch: NestedMap):
    """Metrics, results by example, and gradients of twice the loss."""

    def loss(params):
        metrics, examples = model.apply({"params": model.cast(params)}, batch)
        return 2 * metrics["loss"][0], (metrics, examples)

    return jax.jit(jax.grad(loss, has_aux=True))(params)


CASES = [
    (dict(embedding=functools.partial(TiedEmbedding, use_bias=True, logit_cap=2.0)), 8, "bfloat16"),
    (dict(head=functools.partial(OutputHead, use_bias=True), label_smoothing=0.1, z_loss_weight=0.01), 7, "float32"),
]


@pytest.mark.parametrize(("fields", "chunk", "dtype"), CASES)
def test_chunks_equal_all_logits_at_once(fields, chunk, dtype):
    """Also where the chunk does not divide the tokens."""
    model = LanguageModel(**SIZES, **fields, fprop_dtype=dtype)
    params = jax.jit(model.init)(jax.random.key(0), _batch())["params"]
    found = _outcome(model.clone(loss_chunk=chunk), params, _batch())
    expected = _outcome(model, params, _batch())
    tolerance = FLOAT32 if dtype == "float32" else BFLOAT16
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, **tolerance)


def test_z_loss_is_the_squared_log_of_the_sum():
    logits, labels = jax.random.normal(jax.random.key(0), (3, V)), jnp.arange(3)
    loss, xent, _ = token_losses(logits, labels, z_loss_weight=0.1)
    np.testing.assert_allclose(loss - xent, 0.1 * jnp.log(jnp.sum(jnp.exp(logits), -1)) ** 2, **FLOAT32)


def test_a_loss_of_another_metric_is_refused():
    scorer = Scorer(lambda params, x: x @ params["w"], {"w": jnp.ones((2, V))}, {"w": ("embed", "vocab")})

    def log_pplx(x):
        zeros = jnp.zeros((1, 4))
        return chunked_token_metrics(scorer, x, zeros.astype(int), zeros, 2, label_smoothing=0.1)[0]["log_pplx"][0]

    with pytest.raises(ConfigError, match="only the metric `loss`"):
        jax.grad(log_pplx)(jnp.ones((1, 4, 2)))


def test_chunks_are_taken_where_logits_are_large(monkeypatch):
    """On a CPU, where memory is the computer's own, sooner; but not below 256 tokens."""
    assert chunk_size("auto", (8, 256), 1024) is chunk_size(None, (32, 1024), 50304) is None
    assert chunk_size("auto", (4, 512), 8192) == 512
    assert chunk_size("auto", (8, 1024), 50304) == 256
    monkeypatch.setattr(chunked_loss, "current_device", lambda: types.SimpleNamespace(platform="gpu"))
    assert chunk_size("auto", (16, 1024), 50304) is None
    assert chunk_size("auto", (64, 1024), 50304) == 16384  # the sum of gradients, over the chunks, takes its time
    monkeypatch.setattr(chunked_loss, "current_device", lambda: types.SimpleNamespace(platform="tpu"))
    assert chunk_size("auto", (8, 2048), 50304) is None
    assert chunk_size("auto", (32, 1024), 50304) == 4096
    # Over 16 parts of the vocabulary the logits have 3 GiB, and their gradients, gathered over it, 25.
    monkeypatch.setattr(chunked_loss, "split", lambda *_: (1, 1, 16))
    assert chunk_size("auto", (128, 2048), 51200) == 8192
    assert chunk_size("auto", (16, 2048), 51200) is None


def test_memory_falls_with_the_chunk():
    """The peak of a gradient's temporaries, by XLA's own count: below the float32 logits, which alone are 8 MiB."""
    model = LanguageModel(**{**SIZES, "vocab_size": 4096, "max_seq_len": 256}, loss_chunk=64)
    shape = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    weights = jax.ShapeDtypeStruct((2, 256), jnp.float32)
    batch = NestedMap(ids=shape, labels=shape, weights=weights, segment_ids=shape, segment_pos=shape)
    params = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]

    def temporaries(model):
        loss = lambda params, batch: model.apply({"params": params}, batch)[0]["loss"][0]  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    chunked, plain = temporaries(model), temporaries(model.clone(loss_chunk=None))
    assert chunked < 8 * 2**20 < plain


def test_on_eight_devices():
    """Tokens and vocabulary over the mesh, in a process of its own."""
    command = [sys.executable, "-m", "tests.models.eight_devices"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
