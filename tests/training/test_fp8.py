"""Training with products in FP8, which the CPU emulates: its state under everything that a training step does."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pax_recipes.tiny import tiny_synthetic
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.training.session import build_session
from paxcli.training.step import make_train_step
from tests.training.runs import evals, losses


def _small(precision: str | None = "fp8"):
    config = tiny_synthetic()
    model = config.task.model
    model.num_layers, model.model_dims, model.hidden_dims, model.max_seq_len = 1, 32, 64, 16
    model.stack.block.precision = precision
    config.train_input.input_random_seed = 5
    config.eval_inputs = []
    return config


def _run(config, steps: int = 3):
    """Losses, and the states before and after."""
    with build_session(config).active() as session:
        state = session.new_state()
        before, found = jax.device_get(state), []
        step = make_train_step(session.experiment.task, session.abstract)
        for _ in range(steps):
            state, metrics = step(state, session.experiment.train_input.get_next())
            found.append(float(metrics["loss"]))
    return found, before, jax.device_get(state)


def _histories(state, operand: str) -> dict[str, np.ndarray]:
    found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state.fp8)}
    return {name: leaf for name, leaf in found.items() if f"{operand}_amax_history" in name}


def test_only_the_state_is_more_than_without_fp8():
    """Neither the optimizer, nor the moving average, nor the embedding knows of it."""
    plain, config = _small(precision=None), _small()
    config.task.train.learner.ema_decay = plain.task.train.learner.ema_decay = 0.9
    with build_session(plain).active() as session:
        without = session.abstract
    with build_session(config).active() as session:
        state = session.abstract
    assert without.fp8 == {} and state.replace(fp8={}) == without
    products = {jax.tree_util.keystr(path[:-1]) for path, _ in jax.tree.leaves_with_path(state.fp8)}
    attention = [f"['attention']['{name}_product']" for name in ("key", "post", "query", "value")]
    feed_forward = [f"['feed_forward']['{name}_product']" for name in ("in", "out")]
    assert products == {f"['stack']['layers']{name}" for name in attention + feed_forward}


@pytest.mark.slow
def test_microbatches_count_together():
    config = _small()
    whole, _, state = _run(config)
    config.task.train.num_microbatches = 4
    cut, _, cut_state = _run(config)
    np.testing.assert_allclose(cut, whole, rtol=1e-4)
    for operand in ("input", "kernel"):
        found, expected = _histories(cut_state, operand), _histories(state, operand)
        for name in expected:
            assert np.count_nonzero(expected[name]) == 3
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-3)


def test_a_skipped_step_teaches_it_nothing():
    config = _small()
    config.task.train.learner.skip_step_gradient_norm_value = 1e-30
    _, before, after = _run(config, 2)
    assert after.skipped_steps == 2
    jax.tree.map(np.testing.assert_array_equal, after.fp8, before.fp8)


def test_it_resumes_bit_for_bit(tmp_path):
    with build_session(_small()).active() as session:
        task, source = session.experiment.task, session.experiment.train_input
        state, step = session.new_state(), make_train_step(task, session.abstract)
        batches = [source.get_next() for _ in range(6)]
        with CheckpointStore(tmp_path, Checkpoint(save_interval_steps=3)) as store:
            for number, batch in enumerate(batches, start=1):
                state, _ = step(state, batch)
                store.save(number, state, {})
            resumed, _ = store.restore(3, session.abstract)
        assert all(np.count_nonzero(leaf) == 3 for leaf in _histories(resumed, "output_grad").values())
        for batch in batches[3:]:
            resumed, _ = step(resumed, batch)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed), jax.device_get(state))


@pytest.mark.slow
def test_200_steps_of_tiny_end_as_in_bfloat16(tmp_path, pax):
    """By the mean loss of the last 20 steps, and by that on files it has not seen."""
    sets = [
        "fprop_dtype=bfloat16",
        "num_train_steps=200",
        "summary_interval_steps=1",
        "train_input.input_random_seed=5",
    ]
    means, unseen = [], []
    for precision in ("null", "fp8"):
        options = [f"--set={assignment}" for assignment in (*sets, f"precision={precision}")]
        done = pax("train", "tiny", *options, "--run-dir", precision, timeout=3000)
        assert done.returncode == 0, done.stderr
        found = losses(tmp_path / precision)
        means.append(np.mean([found[step] for step in range(181, 201)]))
        unseen.append(evals(tmp_path / precision)[200]["loss"])
    print("training loss, bfloat16 and FP8:", *means, "unseen:", *unseen)
    assert means[1] == pytest.approx(means[0], rel=0.02)
    assert unseen[1] == pytest.approx(unseen[0], rel=0.02)
