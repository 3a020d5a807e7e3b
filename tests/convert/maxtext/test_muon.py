"""MaxText's launches with Muon: updates against those of optax with MaxText's arguments, in MaxText's layout."""

from __future__ import annotations

from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxcli.checkpoint.reading import named_leaves
from paxcli.convert.layout import from_pax
from paxcli.convert.maxtext.checkpoint_layout import MaxTextLayout, layout_of
from paxcli.convert.maxtext.launch import Launch, Pair
from paxcli.convert.maxtext.launch_to_recipe import BASE_RECIPE, convert
from paxcli.convert.maxtext.recipe_to_launch import to_maxtext
from paxcli.convert.runs import recipe_with
from paxcli.errors import ConfigError
from paxcli.training.session import state_shapes
from tests.convert.maxtext.test_schedules import of_keys

TINY = {"model_name": "default", "decoder_block": "llama2", "base_emb_dim": 16, "base_mlp_dim": 24, "head_dim": 8}
TINY |= {"base_num_query_heads": 2, "base_num_kv_heads": 1, "base_num_decoder_layers": 3, "vocab_size": 40}
TINY |= {"max_target_length": 8, "steps": 5, "opt_type": "muon", "dataset_type": "synthetic"}


def matrix_of(name: str) -> optax.contrib.MuonDimensionNumbers | None:
    """The dimensions that MaxText names to Muon, by the name of a parameter; those left out are a batch."""
    if any(part in name for part in ("scale", "embedding", "logits_dense")):
        return None
    if ".self_attention.out." in name:
        return optax.contrib.MuonDimensionNumbers((0, -2), (-1,))
    return optax.contrib.MuonDimensionNumbers((0,), (-2, -1) if ".self_attention." in name else (-1,))


@pytest.mark.parametrize(
    "keys",
    [
        {"adam_weight_decay": 0},
        {"adam_weight_decay": 0, "muon_beta": 0.8, "muon_weight_decay": 0.3, "muon_consistent_rms": 0.2}
        | {"adam_b1": 0.7, "adam_b2": 0.9, "adam_eps": 1e-5},
    ],
)
def test_updates_are_those_of_maxtext(keys: dict[str, float]) -> None:
    converted = of_keys(**TINY, **keys)
    config = recipe_with(BASE_RECIPE, converted.values)
    shapes = state_shapes(config)
    rules = layout_of(MaxTextLayout("llama2", 3), named_leaves(shapes.params))
    leaves, structure = jax.tree.flatten(shapes.params)
    seeds = jax.random.split(jax.random.key(0), len(leaves))
    params = structure.unflatten([jax.random.normal(key, x.shape) for key, x in zip(seeds, leaves, strict=True)])
    optimizer = fdl.build(config.task.train.learner.optimizer)
    ours = optimizer.transformation(structure.unflatten(shapes.weights))

    def in_maxtext(tree: Any) -> dict[str, jax.Array]:
        return {name: jnp.asarray(x) for name, x in from_pax(rules, named_leaves(jax.device_get(tree)))}

    theirs_params = in_maxtext(params)
    theirs = optax.contrib.muon(
        0.1,
        ns_coeffs=(3.4445, -4.7750, 2.0315),
        ns_steps=5,
        eps=keys.get("adam_eps", 1e-8),
        mu_dtype=None,
        beta=keys.get("muon_beta", 0.95),
        weight_decay=keys.get("muon_weight_decay", 0),
        consistent_rms=keys.get("muon_consistent_rms"),
        muon_weight_dimension_numbers={name: matrix_of(name) for name in theirs_params},
        adam_b1=keys.get("adam_b1", 0.9),
        adam_b2=keys.get("adam_b2", 0.95),
        adam_eps_root=0.0,
        adam_weight_decay=0.0,
    )
    assert {matrix_of(name) is None for name in theirs_params} == {True, False}
    state, their_state = ours.init(params), theirs.init(theirs_params)
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for step in range(3):
        grads = jax.tree.map(lambda x, step=step: jnp.sin(x * (step + 2)), params)
        their_updates, their_state = their_update(in_maxtext(grads), their_state, theirs_params)
        updates, state = update(grads, state, params)
        params = jax.tree.map(lambda x, change: x - 0.1 * change, params, updates)
        theirs_params = optax.apply_updates(theirs_params, their_updates)
    for name, x in in_maxtext(params).items():
        np.testing.assert_allclose(x, theirs_params[name], rtol=5e-5, atol=5e-6, err_msg=name)
    assert not [dropped for dropped in converted.settings.dropped if dropped.line]
    assert not any(text.startswith("adam_") for text in converted.approximated)


def test_what_pax_computes_otherwise_is_reported() -> None:
    def keys_of(**keys: object) -> set[str]:
        return {text.partition("=")[0] for text in of_keys(**TINY, **keys).approximated}

    assert "adam_weight_decay" in keys_of() and "fused_qkv" not in keys_of()
    found = of_keys(**TINY, fused_qkv=True, mu_dtype="bfloat16", adam_eps_root=1e-9)
    wanted = {"adam_weight_decay", "fused_qkv", "mu_dtype", "adam_eps_root"}
    assert wanted <= {text.partition("=")[0] for text in found.approximated}
    assert not wanted & {dropped.key for dropped in found.settings.dropped}
    latent = of_keys(model_name="deepseek3-tiny", opt_type="muon").approximated
    assert any(text.startswith("opt_type=muon") for text in latent)


@pytest.mark.parametrize("keys", [{}, {"muon_beta": 0.8, "muon_consistent_rms": 0.2, "adam_b1": 0.7, "adam_eps": 1e-5}])
def test_a_recipe_with_muon_becomes_a_command(keys: dict[str, float]) -> None:
    wanted = {"adam_weight_decay": 0, "muon_weight_decay": 0.3, **keys}
    config = recipe_with(BASE_RECIPE, of_keys(**TINY, **wanted).values)
    back, left = to_maxtext(config)
    assert back["opt_type"] == "muon" and not [path for path in left if "optimizer" in path]
    assert {key: float(back[key]) for key in wanted} == wanted
    again = recipe_with(BASE_RECIPE, convert(Launch(1, pairs=[Pair(*one, 1) for one in back.items()]), "back").values)
    assert fdl.build(again.task.train.learner.optimizer) == fdl.build(config.task.train.learner.optimizer)


@pytest.mark.parametrize(
    ("keys", "fields", "problem"),
    [
        ({}, {"num_iterations": 4}, "optimizer.num_iterations"),
        ({}, {"nesterov": False}, "optimizer.nesterov"),
        ({"decoder_block": "gemma", "mlp_activations": "gelu,linear"}, {}, "optimizer"),  # which MaxText refuses
    ],
)
def test_a_muon_that_maxtext_does_not_have_is_refused(keys: dict, fields: dict, problem: str) -> None:
    config = recipe_with(BASE_RECIPE, of_keys(**{**TINY, **keys}).values)
    for field, value in fields.items():
        setattr(config.task.train.learner.optimizer, field, value)
    with pytest.raises(ConfigError, match=rf"MaxText cannot express .* task\.train\.learner\.{problem}"):
        to_maxtext(config)
