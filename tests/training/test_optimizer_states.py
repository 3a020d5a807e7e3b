"""Whatever the learner keeps survives a checkpoint, and evaluation uses the average that is in it."""

from __future__ import annotations

import jax
import numpy as np

from pax_recipes.tiny import tiny_synthetic
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.optim.adafactor import ShardedAdafactor
from paxcli.training.evaluate import evaluate
from paxcli.training.run_dir import RunDir
from paxcli.training.session import open_session
from paxcli.training.state import create_state
from paxcli.training.step import make_eval_step, make_train_step
from paxcli.training.trained import TrainedRun


def test_resumed_and_evaluated(tmp_path):
    config = tiny_synthetic()
    model, learner = config.task.model, config.task.train.learner
    model.num_layers, model.model_dims, model.hidden_dims, model.max_seq_len = 2, 32, 64, 16
    learner.optimizer = ShardedAdafactor.config(beta1=0.9, weight_decay=0.1)
    learner.ema_decay, learner.learning_rate = 0.9, 0.1
    learner.bprop_variable_exclusion = ("_norm/", "embedding")
    source = config.eval_inputs[0]
    source.reset_for_eval, source.eval_loop_num_batches, source.num_examples = True, None, 16
    run_dir = RunDir(tmp_path)
    with open_session(config) as session:
        task = session.experiment.task
        step = make_train_step(task, session.abstract)
        batches = [session.experiment.train_input.get_next() for _ in range(6)]
        state = create_state(task, session.spec, session.abstract)
        with CheckpointStore(run_dir.checkpoints, Checkpoint(save_interval_steps=1)) as store:
            for batch in batches[:3]:
                state, _ = step(state, batch)
            store.save(3, state, {})
            store.wait()
            averaged = task.train.learner.evaluated(state.params, state.opt_state)
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
    assert any("row" in name for name in names) and any("ema" in name for name in names)
    assert not any("norm" in name or "embedding" in name for name in names)
