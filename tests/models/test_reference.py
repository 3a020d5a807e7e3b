"""Against arrays that real paxml computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.models.decoding import Sampling, generate
from tests import reference


@pytest.fixture(scope="module")
def gradients():
    model, batch = reference.model(), reference.batch()

    def loss(params):
        metrics, per_example = model.apply({"params": params}, batch)
        return metrics["loss"][0], (metrics, per_example)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(reference.params("param"))


def test_logits():
    predictions = reference.model().apply(
        {"params": reference.params("param")}, reference.batch(), method="compute_predictions"
    )
    np.testing.assert_allclose(predictions.logits, reference.ARRAYS["out/logits"], atol=2e-5)


def test_loss(gradients):
    (loss, (metrics, per_example)), _ = gradients
    np.testing.assert_allclose(loss, reference.ARRAYS["out/total_loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["log_pplx"][0], reference.ARRAYS["out/avg_xent"], rtol=1e-6)
    np.testing.assert_allclose(metrics["log_pplx"][1], reference.ARRAYS["out/total_weight"])
    np.testing.assert_allclose(per_example.xent, reference.ARRAYS["out/per_example_xent"], atol=1e-5)
    np.testing.assert_allclose(-per_example.scores, reference.ARRAYS["out/per_sequence_xent"], rtol=1e-5)


def test_every_gradient(gradients):
    _, grads = gradients
    expected = reference.params("grad")
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=1e-4), grads, expected)


def test_greedy_decode():
    arrays = reference.ARRAYS
    lengths = (1 - arrays["decode/prompt_paddings"]).sum(axis=1).astype(np.int32)
    for row, length in enumerate(lengths):
        prompt = arrays["decode/prompt_ids"][row, :length]
        result = jax.jit(generate, static_argnums=(0, 5, 6, 7))(
            reference.model(),
            reference.params("const/param5"),
            jnp.asarray(prompt[None]),
            jnp.asarray([length]),
            jax.random.key(0),
            24 - int(length),
            1,
            Sampling(),
        )
        np.testing.assert_array_equal(result.ids[0], arrays["decode/output_ids"][row, 0])
        np.testing.assert_allclose(result.log_probs[0, 1:], arrays["decode/logprobs"][row, 0, 1:], atol=2e-5)
