"""Families of models, as HF `transformers` computes them (tests/data/hf_families.py)."""

from __future__ import annotations

from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.inputs.base_input import language_spec
from paxcli.layers.feed_forward import FeedForward
from paxcli.nested_map import NestedMap
from tests.models import hf_families
from tests.tolerances import FLOAT32

LOGITS = dict(atol=1e-4, rtol=0)


def _case(family: str, **fields: Any) -> tuple[Any, dict, jax.Array, np.ndarray]:
    """Our model, its variables, the ids and HF's logits."""
    arrays = hf_families.arrays_of(family)
    config = getattr(hf_families, family)()
    for name, value in fields.items():
        setattr(config, name, value)
    params = hf_families.params_of(family, arrays)
    ids = jnp.asarray(arrays["in/ids"], jnp.int32)
    return fdl.build(config), {"params": jax.tree.map(jnp.asarray, params)}, ids, arrays["out/logits"]


def _positions(ids: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)


@pytest.mark.parametrize("family", ["llama2", "llama31", "mistral", "mixtral", "qwen3", "gemma2", "neox"])
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
    prompt, cache, found = 7, model.init_cache(*ids.shape), []
    for part in (slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, ids.shape[1]))):
        y, cache = extend(ids[:, part], jnp.ones_like(ids[:, part]), _positions(ids)[:, part], cache)
        found.append(y)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), logits, **LOGITS)


def test_experts_report_the_balance_that_transformers_computes():
    model, variables, ids, _ = _case("mixtral")
    batch = _whole(NestedMap(ids=ids, segment_ids=jnp.ones_like(ids), segment_pos=_positions(ids)))
    metrics, _ = jax.jit(model.loss_and_metrics)(variables["params"], batch)
    balance, weight = metrics["load_balance_loss"]
    expected = hf_families.arrays_of("mixtral")["out/load_balance_loss"]
    np.testing.assert_allclose(balance, expected, **FLOAT32)
    assert weight == ids.size


def test_flops_count_windows_in_turn_and_a_tokens_experts():
    spec = language_spec(2, 20)
    config = hf_families.gemma2()
    attentions = [turn.attention for turn in config.stack.turns]
    assert [attention.window for attention in attentions] == [6, None]
    alternating = fdl.build(config).forward_flops(spec).attention
    config.stack.turns[0].attention.window = None
    without = fdl.build(config).forward_flops(spec).attention
    config.stack.turns[0].attention.window = config.stack.turns[1].attention.window = 6
    assert alternating == (without + fdl.build(config).forward_flops(spec).attention) / 2
    config = hf_families.mixtral()
    experts = fdl.build(config).forward_flops(spec).weights
    config.stack.block.feed_forward = FeedForward.partial(gated=True)
    dense = fdl.build(config).forward_flops(spec).weights
    expert, router = 3 * 32 * 48, 32 * 4
    assert experts - dense == 2 * 40 * 2 * (expert + router)  # two experts a token, two layers
