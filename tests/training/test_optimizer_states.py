"""Whatever the learner keeps survives a checkpoint, and evaluation uses the average that is in it."""

from __future__ import annotations

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest

from pax_recipes.tiny import tiny_synthetic
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.inference.trained import TrainedRun
from paxcli.optim.adafactor import ShardedAdafactor
from paxcli.optim.base import ParameterGroup
from paxcli.optim.from_optax import Optax
from paxcli.optim.muon import Muon
from paxcli.training.evaluate import evaluate
from paxcli.training.run_dir import RunDir
from paxcli.training.session import build_session
from paxcli.training.step import make_eval_step, make_train_step
from paxcli.training.validate import validate


def _shrink(config) -> None:
    model = config.task.model
    model.num_layers, model.model_dims, model.hidden_dims, model.max_seq_len = 2, 32, 64, 16


def _lion_with_clip(learning_rate, limit: float):
    return optax.chain(optax.clip(limit), optax.lion(learning_rate))


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [(Optax.config(factory=fdl.Partial(_lion_with_clip, limit=1.0)), "mu"), (Muon.config(), "muon")],
)
def test_an_optimizer_trains_with_parameters_left_out(optimizer, state):
    config = tiny_synthetic()
    _shrink(config)
    config.task.train.learner.optimizer = optimizer
    config.task.train.learner.bprop_variable_exclusion = ("_norm/",)
    validate(config)
    with build_session(config).active() as session:
        task = session.experiment.task
        step, start = make_train_step(task, session.abstract), session.new_state()
        names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(start.opt_state)}
        before = jax.device_get(start.params)
        after = start
        for _ in range(2):
            after, metrics = step(after, session.experiment.train_input.get_next())
        assert np.isfinite(metrics["loss"]) and int(after.step) == 2
    assert any(state in name for name in names) and not any("_norm" in name for name in names)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, jax.device_get(after.params))
    assert moved["embedding"]["table"] and moved["stack"]["layers"]["feed_forward"]["w_in"]
    assert not moved["final_norm"]["scale"]


def test_resumed_and_evaluated(tmp_path):
    config = tiny_synthetic()
    _shrink(config)
    learner = config.task.train.learner
    learner.optimizer = ShardedAdafactor.config(beta1=0.9, momentum_dtype="int8", weight_decay=0.1)
    learner.ema_decay, learner.learning_rate, learner.ewc_regularizer_weight = 0.9, 0.1, 0.5
    learner.bprop_variable_exclusion = ("_norm/", "embedding")
    learner.parameter_groups = [ParameterGroup.config(regex="attention/", optimizer=Muon.config())]
    source = config.eval_inputs[0]
    source.reset_for_eval, source.eval_loop_num_batches, source.num_examples = True, None, 16
    run_dir = RunDir(tmp_path)
    with build_session(config).active() as session:
        task = session.experiment.task
        step = make_train_step(task, session.abstract)
        batches = [session.experiment.train_input.get_next() for _ in range(6)]
        state = session.new_state()
        with CheckpointStore(run_dir.checkpoints, Checkpoint(save_interval_steps=1)) as store:
            for batch in batches[:3]:
                state, _ = step(state, batch)
            store.save(3, state, {})
            store.wait()
            averaged = task.train.learner.eval_params(state.params, state.opt_state)
            inputs = session.experiment.eval_inputs
            expected = evaluate(make_eval_step(task), averaged, inputs, session.mesh, task.metrics)
            assert expected != evaluate(make_eval_step(task), state.params, inputs, session.mesh, task.metrics)
            restored, _ = store.restore(3, session.abstract)
        for batch in batches[3:]:
            state, _ = step(state, batch)
            restored, _ = step(restored, batch)
        assert TrainedRun(session, run_dir).evaluate(3) == expected
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)}
    assert any("row" in name for name in names) and any("muon" in name for name in names)
    assert any("ema" in name for name in names) and any("anchor" in name for name in names)
    assert not any("norm" in name or "embedding" in name for name in names)
