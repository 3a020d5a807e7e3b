"""Adapters of frozen weights compute what the merged weights compute."""

from __future__ import annotations

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from flax.core import meta

from paxcli.inputs.base_input import language_spec
from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.lora import A, B, Lora, adapted_weights, without_adapters
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.output_head import OutputHead
from paxcli.mesh.weights import weights_of
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap


def model(lora: Lora | None, **fields) -> LanguageModel:
    config = LanguageModel.config(
        vocab_size=31, max_seq_len=8, model_dims=16, hidden_dims=24, num_layers=2, num_heads=4, num_kv_heads=2
    )
    config.head = OutputHead.partial()
    config.stack.block.attention.rotary = Rotary.partial()
    config.stack.block.feed_forward.gated = True
    for path, value in fields.items():
        setattr(config.stack if path == "scan" else config.stack.block, path, value)
    config.lora = lora
    return fdl.build(config)


def batch() -> NestedMap:
    ids = jax.random.randint(jax.random.key(5), (2, 8), 0, 31)
    ones = jnp.ones_like(ids)
    return NestedMap(ids=ids, labels=ids, weights=ones * 1.0, segment_ids=ones, segment_pos=jnp.arange(8) + 0 * ids)


def random_params(network: LanguageModel) -> tuple[dict, dict, dict]:
    """Parameters with random adapters, and flat: name -> array, and name -> facts."""
    boxed = jax.jit(network.init)(jax.random.key(0), batch())["params"]
    facts = traverse_util.flatten_dict(weights_of(boxed), sep=".")
    flat = traverse_util.flatten_dict(meta.unbox(boxed), sep=".")
    for number, name in enumerate(flat):
        if "_lora_" in name and not name.endswith(A):
            flat[name] = 0.1 * jax.random.normal(jax.random.key(number), flat[name].shape)
    return traverse_util.unflatten_dict(flat, sep="."), flat, facts


@pytest.mark.parametrize(
    ("use_dora", "fields"),
    [
        (True, {"scan": False}),
        pytest.param(True, {"feed_forward": MoeFeedForward.partial(num_experts=4)}, marks=pytest.mark.slow),
    ],
)
def test_merged_equals_unmerged(use_dora: bool, fields: dict) -> None:
    lora = Lora(rank=3, alpha=12.0, targets="attention/|feed_forward/|head", use_dora=use_dora)
    network = model(lora, **fields)
    params, flat, facts = random_params(network)
    assert any(name == "head.w" + A for name in flat)
    adapted = adapted_weights(flat, facts, lora)
    merged = without_adapters(flat) | {name: weight.merge() for name, weight in adapted.items()}
    plain = network.clone(lora=None)

    def distance(params: dict) -> float:
        """Relative distance of the logits from those with adapters."""
        logits = jax.jit(lambda params: plain.apply({"params": params}, batch(), method="compute_predictions").logits)
        return float(np.linalg.norm(logits(params) - found) / np.linalg.norm(found))

    found = jax.jit(lambda: network.apply({"params": params}, batch(), method="compute_predictions").logits)()
    assert distance(traverse_util.unflatten_dict(merged, sep=".")) < 1e-6
    assert distance(params) > 0.01  # without its adapters, the model is the base


def test_gradients_are_those_of_the_merged_weights() -> None:
    """For a batch as large as the weights, and for a smaller one, of adapters and bases alike."""
    lora = Lora(rank=3, alpha=12.0, targets="attention/|feed_forward/")
    network = model(lora)
    _, flat, facts = random_params(network)
    plain = network.clone(lora=None)

    def loss(flat: dict, merges: bool) -> jax.Array:
        if merges:
            adapted = adapted_weights(flat, facts, lora)
            flat = without_adapters(flat) | {name: weight.merge() for name, weight in adapted.items()}
        params = traverse_util.unflatten_dict(flat, sep=".")
        return (plain if merges else network).loss_and_metrics(params, batch())[0]["loss"][0]

    found, expected = (jax.jit(jax.grad(loss), static_argnums=1)(flat, merges) for merges in (False, True))
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-6 * float(jnp.max(jnp.abs(x))), err_msg=name)


@pytest.mark.slow
def test_the_scale_of_rslora() -> None:
    assert Lora(rank=4, alpha=3.0, use_rslora=True).scale == Lora(rank=4, alpha=6.0).scale == 1.5


def test_a_new_adapter_changes_nothing() -> None:
    """Neither does DoRA's: its magnitude is the difference from the base, whatever the base is."""
    network = model(Lora(targets=".", use_dora=True))
    params = meta.unbox(jax.jit(network.init)(jax.random.key(0), batch())["params"])
    params = jax.tree.map(lambda w: 3 * w, params)  # as if loaded from a checkpoint
    found, expected = (
        jax.jit(one.loss_and_metrics)(params, batch())[0]["loss"][0] for one in (network, network.clone(lora=None))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_adapters_are_sharded_like_their_weight() -> None:
    network = model(Lora(rank=3, targets="(query|post|w_out)$"))
    boxed = jax.eval_shape(lambda: network.init(jax.random.key(0), batch()))["params"]["stack"]["layers"]
    names = {
        name: box.names for name, box in {**boxed["attention"], **boxed["feed_forward"]}.items() if "_lora" in name
    }
    assert names == {
        "query" + A: ("layers", "embed", None),
        "query" + B: ("layers", None, "heads", "head_dim"),
        "post" + A: ("layers", "heads", "head_dim", None),
        "post" + B: ("layers", None, "embed"),
        "w_out" + A: ("layers", "mlp", None),
        "w_out" + B: ("layers", None, "embed"),
    }


def test_dropout_is_drawn_for_each_layer_and_only_in_training() -> None:
    lora = Lora(rank=3, alpha=300.0, dropout=0.5, targets="feed_forward/")
    network = model(lora)
    params, _, _ = random_params(network)

    def loss(key: int | None) -> float:
        rng = None if key is None else jax.random.key(key)
        return float(jax.jit(network.loss_and_metrics)(params, batch(), rng)[0]["loss"][0])

    assert loss(1) == loss(1) != loss(2)
    without = network.clone(lora=Lora(rank=3, alpha=300.0, targets="feed_forward/"))
    assert loss(None) == float(jax.jit(without.loss_and_metrics)(params, batch(), jax.random.key(1))[0]["loss"][0])


def test_flops_of_a_step_without_gradients_of_frozen_matrices() -> None:
    spec = language_spec(2, 8)
    forward, step = model(None).forward_flops(spec), model(Lora()).step_flops(spec)
    assert (step.weights, step.attention) == (2 * forward.weights, 3 * forward.attention)
