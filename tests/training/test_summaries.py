"""What `summary_verbosity` adds to the metrics of a step, against numpy on the same arrays."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from pax_recipes.tiny import tiny_synthetic
from paxcli.errors import ConfigError
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.layers.positions import SinusoidPositions
from paxcli.metrics.meter import Meter
from paxcli.nested_map import NestedMap
from paxcli.training.session import build_session
from paxcli.training.step import make_eval_step, make_train_step
from paxcli.training.validate import validate
from tests.models import transformer_in_numpy as plain

B, T, D, V = 4, 12, 16, 30
ACTIVATIONS = ("activation_mean", "activation_std", "activation_abs_max")


def batch() -> NestedMap:
    """Rows of one, two and three packed sequences with padding behind, and a full row."""
    chance = np.random.default_rng(1)
    lengths = [(7,), (4, 5), (2, 3, 4), (12,)]
    segments = np.zeros((B, T), np.int32)
    positions = np.zeros((B, T), np.int32)
    for row, parts in enumerate(lengths):
        start = 0
        for number, length in enumerate(parts, start=1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            start += length
    ids, labels = (chance.integers(1, V, (B, T)).astype(np.int32) for _ in range(2))
    weights = ((segments != 0) * chance.choice([0.5, 1.0], (B, T))).astype(np.float32)
    return NestedMap(ids=ids, labels=labels, weights=weights, segment_ids=segments, segment_pos=positions)


def small(verbosity: int, microbatches: int = 1, scan: bool = True) -> Any:
    config = tiny_synthetic()
    model, task = config.task.model, config.task
    model.num_layers, model.model_dims, model.hidden_dims, model.max_seq_len, model.vocab_size = 2, D, 32, T, V
    model.position, model.stack.block.attention.rotary, model.stack.scan = SinusoidPositions.partial(), None, scan
    model.stack.unroll, model.num_heads = 1, 2
    task.train.global_batch_size, task.train.num_microbatches = B, microbatches
    task.train.learner.clip_gradient_norm_to_value = 0.1
    task.summary_verbosity = verbosity
    return config


@functools.cache
def one_step(verbosity: int, microbatches: int = 1, scan: bool = True) -> tuple[dict[str, Any], Any, Any]:
    """The logged values of one step, and the parameters before and after it."""
    with build_session(small(verbosity, microbatches, scan)).active() as session:
        task = session.experiment.task
        state = session.new_state()
        before = jax.device_get(state.params)
        state, metrics = make_train_step(task, session.abstract)(state, batch())
        meter = Meter(None, None, 1, None, 1)
        meter.record(1, metrics, 0.0)
        (record,) = meter.flush()
    return record.values, before, jax.device_get(state.params)


@functools.cache
def gradients() -> Any:
    with build_session(small(0)).active() as session:
        model = session.experiment.task.model
        gradient = jax.jit(jax.grad(lambda params, rows: model.loss_and_metrics(params, rows)[0]["loss"][0]))
        return jax.device_get(gradient(one_step(3)[1], batch()))


def by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(part.key for part in path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def layer_inputs(params: Any) -> list[np.ndarray]:
    """The input of each layer at the real tokens, [tokens, D]."""
    rows, found = batch(), [[], []]
    for ids, segments, positions in zip(rows.ids, rows.segment_ids, rows.segment_pos, strict=True):
        x = params["embedding"]["table"][ids].astype(np.float64) + plain.sinusoids(positions, D)
        visible = (segments[:, None] == segments) & np.tri(T, dtype=bool)
        for seen, layer in zip(found, plain.layers(params["stack"]), strict=True):
            seen.append(x[segments != 0])
            normed = plain.norm(x, layer["attention_norm"])
            x = x + plain.attend(normed, normed, layer["attention"], visible)
            x = x + plain.feed_forward(plain.norm(x, layer["feed_forward_norm"]), layer["feed_forward"])
    return [np.concatenate(seen) for seen in found]


def test_counts_and_the_applied_gradient() -> None:
    values, before, after = one_step(3)
    assert (values["num_examples"], values["num_tokens"]) == (7, 7 + 9 + 9 + 12)
    np.testing.assert_allclose(values["num_predictions"], batch().weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(values["ratio_unpadded_tokens"], 37 / (B * T), rtol=1e-6)
    np.testing.assert_allclose(values["grad_scale"], 0.1 / values["grad_norm"], rtol=1e-6)
    changes = [after - old for old, after in zip(by_path(before).values(), by_path(after).values(), strict=True)]
    np.testing.assert_allclose(
        values["applied_grad_norm"], np.sqrt(sum(np.square(change).sum() for change in changes)), rtol=1e-4
    )


@pytest.mark.parametrize("microbatches", [1, 2])
def test_norms_of_each_parameter(microbatches: int) -> None:
    values, before, after = one_step(3, microbatches)
    before, after, grads = by_path(before), by_path(after), by_path(gradients())
    assert len(before) > 10
    for path in before:
        np.testing.assert_allclose(values[f"grad_norm/{path}"], np.linalg.norm(grads[path]), rtol=1e-3, atol=1e-7)
        change = np.linalg.norm(after[path] - before[path])
        np.testing.assert_allclose(values[f"update_norm/{path}"], change, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(values[f"param_norm/{path}"], np.linalg.norm(after[path]), rtol=1e-5)


@pytest.mark.parametrize(("microbatches", "scan"), [(1, True), (2, True), (1, False)])
def test_activations_of_each_layer(microbatches: int, scan: bool) -> None:
    values, params, _ = one_step(3, microbatches, scan)
    if not scan:
        stacked = [params["stack"][f"layers_{i}"] for i in range(2)]
        params = params | {"stack": {"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *stacked)}}
    for index, x in enumerate(layer_inputs(params)):
        expected = (x.mean(), x.std(), np.abs(x).max())
        found = [values[f"{name}/stack/layers_{index}"] for name in ACTIVATIONS]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_summaries_change_no_number() -> None:
    for name, value in one_step(0)[0].items():
        if name in ("loss", "log_pplx", "accuracy", "grad_norm", "param_norm"):
            assert one_step(3)[0][name] == value


def test_each_level_includes_those_below() -> None:
    names = []
    for verbosity in (0, 1, 2, 3):
        with build_session(small(verbosity)).active() as session:
            step = make_train_step(session.experiment.task, session.abstract)
            names.append(jax.eval_shape(step, session.abstract, session.batch)[1].keys())
    assert names[0] < names[1] < names[2] < names[3]
    kinds = [{name.partition("/")[0] for name in more - fewer} for fewer, more in itertools.pairwise(names)]
    assert kinds[1:] == [{"grad_norm", "update_norm", "param_norm"}, set(ACTIVATIONS)]


def test_strict_accuracy_counts_rows_that_are_right_throughout() -> None:
    rows, params = batch(), one_step(3)[1]
    with build_session(small(1)).active() as session:
        task = session.experiment.task
        predict = jax.jit(lambda p, rows: task.model.apply({"params": p}, rows, method="compute_predictions").logits)
        rows.labels = np.asarray(predict(params, rows)).argmax(-1).astype(np.int32)
        rows.labels[0, 9] = 7  # padding
        rows.labels[1, 2] = (rows.labels[1, 2] + 1) % V
        rows.weights[3] = 0
        right, count = make_eval_step(task)(params, rows)[0]["accuracy_strict"]
    assert (float(right), float(count)) == (2, 3)


def test_pipeline_stages_report_no_activations() -> None:
    config = tiny_synthetic()
    config.task.model.stack = PipelinedStack.partial(block=config.task.model.stack.block, num_stages=2)
    config.task.model.stack.num_microbatches = 2
    config.task.summary_verbosity = 2
    validate(config)
    config.task.summary_verbosity = 3
    with pytest.raises(ConfigError, match="pipeline stages do not report"):
        validate(config)
