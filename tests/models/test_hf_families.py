"""Families of models, as HF `transformers` computes them (tests/data/hf_families.py)."""

from __future__ import annotations

from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.inputs.nested_map import NestedMap
from tests.models import hf_families

LOGITS = dict(atol=1e-4, rtol=0)


def _case(family: str, **fields: Any) -> tuple[Any, dict, jax.Array, np.ndarray]:
    """Our model, its variables, the ids and HF's logits."""
    arrays = hf_families.arrays_of(family)
    config = getattr(hf_families, family)()
    for name, value in fields.items():
        setattr(config, name, value)
    params = hf_families.params_of(family, arrays, config.num_layers)
    ids = jnp.asarray(arrays["in/ids"], jnp.int32)
    return fdl.build(config), {"params": jax.tree.map(jnp.asarray, params)}, ids, arrays["out/logits"]


def _positions(ids: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)


@pytest.mark.parametrize("family", ["llama2", "llama31", "mistral", "qwen3", "gemma2", "neox"])
def test_logits_are_those_of_transformers(family):
    model, variables, ids, logits = _case(family)
    batch = NestedMap(ids=ids, segment_ids=jnp.ones_like(ids), segment_pos=_positions(ids))
    found = jax.jit(lambda v: model.apply(v, batch, method="compute_predictions"))(variables)
    np.testing.assert_allclose(found.logits, logits, **LOGITS)
    assert np.abs(logits).max() > 1
    initial = jax.eval_shape(model.init, jax.random.key(0), _whole(batch))["params"]
    shapes = jax.tree.map(lambda box: box.value.shape, initial, is_leaf=lambda leaf: hasattr(leaf, "names"))
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, variables["params"])


def _whole(batch: NestedMap) -> NestedMap:
    weights = jnp.ones(batch.ids.shape, jnp.float32)
    return NestedMap(**batch, labels=batch.ids, weights=weights)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_decoding_with_a_window_is_the_full_pass(family):
    model, variables, ids, logits = _case(family)
    extend = jax.jit(lambda *args: model.apply(variables, *args, method="extend"))
    prompt, cache, found = 7, model.empty_cache(*ids.shape), []
    for part in (slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, ids.shape[1]))):
        y, cache = extend(ids[:, part], jnp.ones_like(ids[:, part]), _positions(ids)[:, part], cache)
        found.append(y)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), logits, **LOGITS)
