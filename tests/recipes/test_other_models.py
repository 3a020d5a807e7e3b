"""Recipes of models that are no decoder-only language models: their sizes, and that they learn."""

from __future__ import annotations

import fiddle as fdl
import flax.linen as nn
import jax
import numpy as np
import pytest

from pax_recipes import bert, classification, sequence
from paxcli.inputs.base_input import language_spec
from paxcli.training.session import build_session
from paxcli.training.state import example_batch
from paxcli.training.step import make_train_step
from tests.tolerances import PARALLEL
from tests.training.runs import on_meshes


def test_bert_does_not_count_half_of_its_attention():
    config = bert.bert_adam_l4_h128().task.model
    full = fdl.build(config).step_flops(language_spec(2, 128))
    config.stack.block.attention.causal = True
    causal = fdl.build(config).step_flops(language_spec(2, 128))
    assert full.attention == 2 * causal.attention and full.weights == causal.weights


def _losses(config: fdl.Config, steps: int = 20) -> np.ndarray:
    with build_session(config).active() as session:
        state = session.new_state()
        step = make_train_step(session.experiment.task, session.abstract)
        losses = []
        for _ in range(steps):
            state, metrics = step(state, session.experiment.train_input.get_next())
            losses.append(jax.device_get(metrics["loss"]))
    return np.array(losses)


def test_one_recipe_of_bert_has_query_key_and_value_apart():
    """Pax ran it with pmap, whose layers do not combine them."""
    limit = (6 / (128 * (8 + 16))) ** 0.5  # of a variable [D, N, H] in praxis
    for make, expected in ((bert.bert_adam_l4_h128, limit), (bert.bert_spmd_l4_h128, limit / 3**0.5)):
        model = make().task.model
        model.vocab_size, model.num_layers = 64, 2
        init = fdl.build(model).init(jax.random.key(0), example_batch(language_spec(1, 8), 1))
        attention = nn.meta.unbox(init["params"])["stack"]["layers"]["attention"]
        for name in ("query", "key", "value"):
            np.testing.assert_allclose(np.abs(attention[name]).max(), expected, rtol=0.01)


@pytest.mark.parametrize(
    "make", [bert.bert_adam_l4_h128, bert.bert_spmd_l66_h12k_bigger_batch_8x8x8, classification.small_mlp]
)
def test_the_settings_are_pax_defaults(make):
    config = make()
    assert config.checkpoint.save_keep_interval_duration == "12h"
    assert config.task.train.eval_interval_steps == 100


def _small_bert() -> fdl.Config:
    config = bert.bert_spmd_l4_h128()
    config.mesh.ici_mesh_shape = None
    model, train = config.task.model, config.task.train
    model.vocab_size, model.max_seq_len, model.num_layers, model.fprop_dtype = 64, 32, 2, "float32"
    train.percore_batch_size = 16
    train.learner.learning_rate, train.learner.schedule.warmup_steps = 1e-3, 1
    return config


def _small_mlp() -> fdl.Config:
    config = classification.small_mlp()
    config.mesh.ici_mesh_shape = None
    model = config.task.model
    model.vocab_size, model.model_dims, model.hidden_dims, model.num_layers = 64, 32, 32, 3
    config.train_input.seq_len = config.eval_inputs[0].seq_len = 32
    config.task.train.learner.learning_rate = 1e-2
    return config


def _small_vit() -> fdl.Config:
    config = classification.vit_synthetic()
    network = config.task.model.network
    network.num_layers, network.model_dims, network.hidden_dims = 1, 32, 64
    return config


def _small_sequence() -> fdl.Config:
    config = sequence.sequence_synthetic()
    model = config.task.model
    model.num_layers, model.model_dims, model.hidden_dims, model.max_seq_len = 1, 32, 64, 8
    return config


@pytest.mark.parametrize("make", [_small_bert, _small_mlp, _small_vit, _small_sequence])
def test_the_loss_falls_in_20_steps(make):
    losses = _losses(make())
    assert np.isfinite(losses).all()
    # Means of five steps, further apart than batches differ.
    assert losses[-5:].mean() < losses[:5].mean() - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("make", [_small_bert, _small_vit, _small_sequence])
def test_microbatches_change_nothing(make):
    """In BERT too: which tokens of a row are masked does not depend on the rows beside it."""
    whole, cut = make(), make()
    cut.task.train.num_microbatches = 2
    np.testing.assert_allclose(_losses(whole, 3), _losses(cut, 3), rtol=1e-5)


@pytest.mark.slow
def test_one_device_is_eight(tmp_path):
    """Data 2 × fsdp 2 × tensor 2 computes what one device computes."""
    small = {
        "BertSpmdL4H128": ["task.model.vocab_size=64", "max_seq_len=32", "warmup_steps=1", "fprop_dtype=float32"],
        "sequence-synthetic": ["task.model.num_layers=1", "model_dims=32", "hidden_dims=64", "max_seq_len=8"],
        "vit-synthetic": ["model_dims=32", "hidden_dims=64", "task.model.network.num_layers=1"],
    }
    one, eight = (
        on_meshes(
            tmp_path,
            devices,
            [
                {"recipe": name, "sets": [*sets, "global_batch_size=16", f"mesh.ici_mesh_shape={mesh}"], "steps": 5}
                for name, sets in small.items()
            ],
        )
        for devices, mesh in ((1, "[1,1,1]"), (8, "[2,2,2]"))
    )
    for a, b in zip(one, eight, strict=True):
        np.testing.assert_allclose(b["losses"], a["losses"], rtol=PARALLEL)
