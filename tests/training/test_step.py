"""The train step against plain JAX and optax, and against itself cut into microbatches."""

from __future__ import annotations

import dataclasses

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pax_recipes.tiny import tiny_synthetic
from paxcli.errors import ConfigError
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.models.dpo import Dpo
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from paxcli.optim.adamw import AdamW
from paxcli.optim.dp_sgd import DpSgd
from paxcli.optim.schedules import Constant
from paxcli.optim.sgd import Sgd
from paxcli.training.evaluate import evaluate
from paxcli.training.experiment import summarize, tokens_in
from paxcli.training.session import build_session
from paxcli.training.step import make_eval_step, make_train_step
from paxcli.training.task import LossAggregator, Metrics, VariationalNoise


def _small():
    config = tiny_synthetic()
    model = config.task.model
    model.num_layers, model.model_dims, model.hidden_dims, model.max_seq_len = 2, 32, 64, 16
    config.task.train.learner.learning_rate = 0.01
    return config


def _run(config, steps: int = 3):
    """Losses, and the state at the end."""
    with build_session(config).active() as session:
        state = session.new_state()
        step = make_train_step(session.experiment.task, session.abstract)
        metrics = []
        for _ in range(steps):
            state, report = step(state, session.experiment.train_input.get_next())
            metrics.append(jax.device_get(report))
    return metrics, jax.device_get(state)


def test_equals_a_plain_loop():
    config = _small()
    config.task.train.learner.optimizer = AdamW.config(beta2=0.98)
    metrics, state = _run(config)
    with build_session(config).active() as session:
        task, source = session.experiment.task, session.experiment.train_input
        params = session.new_state().params
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(0.9, 0.98))
        opt_state = jax.jit(optimizer.init)(params)

        @jax.jit
        @jax.value_and_grad
        def loss_and_gradients(params, batch):
            logits = task.model.apply({"params": params}, batch, method="compute_predictions").logits
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            return jnp.average(losses, weights=batch.weights)

        @jax.jit
        def update(params, opt_state, grads, number):
            updates, opt_state = optimizer.update(grads, opt_state)
            rate = task.train.learner.learning_rate * task.train.learner.schedule(number)
            params = jax.tree_util.tree_map_with_path(
                lambda path, p, u: p - rate * (u + 0.1 * p * _decays(path)), params, updates
            )
            return params, opt_state, optax.tree.norm(grads)

        for number in range(3):
            value, grads = loss_and_gradients(params, jax.tree.map(jnp.asarray, source.get_next()))
            params, opt_state, norm = update(params, opt_state, grads, jnp.int32(number))
            np.testing.assert_allclose(metrics[number]["loss"], value, rtol=1e-5)
            np.testing.assert_allclose(metrics[number]["grad_norm"], norm, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), state.params, jax.device_get(params))


def _decays(path) -> bool:
    return path[-1].key in ("table", "query", "key", "value", "post", "w_in", "w_out")


@pytest.fixture(scope="module")
def uncut():
    return _run(_small())


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_microbatches_change_nothing(uncut, num_microbatches):
    whole, whole_state = uncut
    config = _small()
    config.task.train.num_microbatches = num_microbatches
    cut, cut_state = _run(config)
    for a, b in zip(whole, cut, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
        np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), whole_state.params, cut_state.params)


def test_each_microbatch_can_be_clipped():
    """As paxml's static accumulation: the mean of clipped gradients, whatever the number of tokens of each."""
    config = _small()
    config.task.train.num_microbatches = 2
    learner = config.task.train.learner
    learner.optimizer, learner.schedule = Sgd.config(), Constant.config()
    learner.clip_gradient_norm_to_value, learner.clip_each_microbatch = 0.5, True
    clip = optax.clip_by_global_norm(0.5)
    with build_session(config).active() as session:
        task, batch = session.experiment.task, session.experiment.train_input.get_next()
        batch.weights = np.float32(batch.weights * np.asarray([1.0, 0.1] * 4)[:, None])
        state = session.new_state()
        params = jax.device_get(state.params)

        @jax.jit
        def clipped_gradient(params, rows):
            grads = jax.grad(lambda params: task.loss(params, rows, jax.random.key(0))[0])(params)
            return clip.update(grads, clip.init(grads))[0], optax.tree.norm(grads)

        parts = [jax.tree.map(lambda x, m=number: x[m::2], batch) for number in range(2)]
        clipped, norms = zip(*(jax.device_get(clipped_gradient(params, rows)) for rows in parts), strict=True)
        after, _ = make_train_step(task, session.abstract)(state, batch)
    assert max(norms) > 0.5
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *clipped)
    jax.tree.map(lambda p, g, new: np.testing.assert_allclose(new, p - 0.01 * g, atol=1e-6), params, mean, after.params)


def test_layers_without_gradients_by_example_are_refused():
    config = _small()
    config.task.model.stack.block.feed_forward = MoeFeedForward.partial(num_experts=2)
    config.task.train.learner.stochastic_gradient = DpSgd.config()
    with build_session(config).active() as session, pytest.raises(ConfigError, match="DP-SGD: .*vmap") as refused:
        make_train_step(session.experiment.task, session.abstract).lower(session.abstract, session.batch)
    assert "capacity_factor" in refused.value.hint


def test_private_gradients_equal_a_loop_over_examples():
    """Pairs of examples, two pairs in each microbatch; the noise by itself has its standard deviation."""
    config = _small()
    config.task.train.num_microbatches = 2
    learner = config.task.train.learner
    learner.optimizer, learner.schedule, learner.learning_rate = Sgd.config(), Constant.config(), 1.0
    learner.clip_gradient_norm_to_value = None
    learner.stochastic_gradient = DpSgd.config(l2_norm_clip=2.2, noise_multiplier=0.5, microbatch_size=2)
    with build_session(config).active() as session:
        task, batch = session.experiment.task, session.experiment.train_input.get_next()
        batch.weights = np.float32(batch.weights * np.linspace(0, 1, batch.weights.size).reshape(8, -1))
        state = session.new_state()
        params, key = jax.device_get((state.params, state.key))
        loss_and_grads = jax.jit(jax.value_and_grad(lambda *args: task.loss(*args, jax.random.key(0)), has_aux=True))
        total, norms, losses, weights = jax.tree.map(np.zeros_like, params), [], [], []
        for group in ([0, 2], [4, 6], [1, 3], [5, 7]):
            rows = jax.tree.map(lambda x, g=group: jnp.asarray(x[g], x.dtype), batch)
            (loss, (weight, _, _)), grads = jax.device_get(loss_and_grads(params, rows))
            losses.append(loss)
            weights.append(weight)
            norms.append(np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads))))
            total = jax.tree.map(lambda t, g, n=norms[-1]: t + g * min(1.0, 2.2 / n), total, grads)
        after, report = make_train_step(task, session.abstract)(state, batch)
    assert min(norms) < 2.2 < max(norms)
    np.testing.assert_allclose(report["loss"], np.average(losses, weights=weights), rtol=1e-5)
    noise_key = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(key), 0), 3)[2]
    private = task.train.learner.stochastic_gradient
    noise = private.add_noise(jax.tree.map(np.zeros_like, params), 8, noise_key)
    expected = jax.tree.map(lambda p, t, n: p - (t / 4 + n), params, total, noise)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after.params, expected)
    drawn = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(noise)])
    np.testing.assert_allclose(np.std(drawn), 0.5 * 2.2 / 4, rtol=0.01)
    assert abs(np.mean(drawn)) < 0.005 and drawn.size > 10_000
    unit = dataclasses.replace(private, normalize_gradients=True).add_noise(total, 8, noise_key)
    jax.tree.map(lambda u, t, n: np.testing.assert_allclose(u, (t + n) / 2.2, rtol=1e-5, atol=1e-6), unit, total, noise)


def test_no_gradient_of_frozen_parameters_is_computed():
    """With only the last norm trained, backpropagation goes through the output projection alone."""
    flops, temporaries = [], []
    for inclusion in ((), ("final_norm",)):
        config = _small()
        config.task.train.num_microbatches = 2
        config.task.train.learner.bprop_variable_inclusion = inclusion
        with build_session(config).active() as session:
            lowered = make_train_step(session.experiment.task, session.abstract).lower(session.abstract, session.batch)
            flops.append(lowered.cost_analysis()["flops"])
            temporaries.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert flops[1] < 0.6 * flops[0]
    assert temporaries[1] < 0.6 * temporaries[0], temporaries


def test_bfloat16_keeps_float32_parameters():
    config = _small()
    config.task.model.fprop_dtype = "bfloat16"
    metrics, state = _run(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    np.testing.assert_allclose(metrics[0]["loss"], _run(_small(), 1)[0][0]["loss"], rtol=1e-2)


def test_variational_noise_is_of_its_scale_and_from_its_step_on():
    quiet, _ = _run(_small(), 2)
    config = _small()
    config.task.vn = VariationalNoise.config(scale=0.05, regex="feed_forward/w_", start_step=1)
    noisy, _ = _run(config, 2)
    assert quiet[0]["loss"] == noisy[0]["loss"]
    assert quiet[1]["loss"] != noisy[1]["loss"]
    config.task.vn.regex = "no_such_parameter"
    with pytest.raises(ConfigError, match="matches no parameter"):
        _run(config, 1)


def test_losses_can_be_summed():
    config = _small()
    config.task.loss_aggregator = LossAggregator.config(loss_keys=("log_pplx", "accuracy"))
    metrics, _ = _run(config, 1)
    np.testing.assert_allclose(metrics[0]["loss"], metrics[0]["log_pplx"] + metrics[0]["accuracy"], rtol=1e-6)


def test_evaluation_weighs_tokens_not_batches():
    """An epoch in batches of 8, the last one mostly padding, equals one big batch."""
    config = _small()
    source = config.eval_inputs[0]
    source.num_examples, source.reset_for_eval, source.eval_loop_num_batches = 19, True, None
    results = []
    for batch_size in (8, 19):
        source.batch_size = batch_size
        with build_session(config).active() as session:
            state = session.new_state()
            eval_step = make_eval_step(session.experiment.task)
            inputs, metrics = session.experiment.eval_inputs, session.experiment.task.metrics
            results.append(evaluate(eval_step, state.params, inputs, session.mesh, metrics)["synthetic"])
    assert results[0].keys() == results[1].keys()
    assert (results[0].pop("num_batches"), results[1].pop("num_batches")) == (3, 1)
    for name in results[0]:
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-5)


def test_metrics_are_chosen_and_combined():
    config = _small()
    config.task.metrics.names, config.task.metrics.maxima = ("log_pplx",), ("log_pplx",)
    reports, state = _run(config, 1)
    assert "loss" in reports[0] and "accuracy" not in reports[0] and "grad_norm" in reports[0]
    with build_session(config).active() as session:
        task, source = session.experiment.task, session.experiment.eval_inputs[0]
        eval_step, singly = make_eval_step(task), []

        def watched(params, batch):
            sums, examples = eval_step(params, batch)
            singly.append(sums)
            return sums, examples

        values = evaluate(watched, state.params, [source], session.mesh, task.metrics)["synthetic"]
    assert not {"accuracy", "bits_per_byte"} & values.keys()
    np.testing.assert_allclose(values["log_pplx"], max(float(batch["log_pplx"][0]) for batch in singly))
    sums = [[float(number) for number in batch["loss"]] for batch in singly]
    np.testing.assert_allclose(values["loss"], np.sum(sums, 0)[0] / np.sum(sums, 0)[1], rtol=1e-6)
    assert values["loss"] < values["log_pplx"]
    config.task.metrics.names = ("f1",)
    with pytest.raises(ConfigError, match="no metric `f1`"):
        _run(config, 1)


@pytest.mark.parametrize(
    ("name", "verbosity"),
    [("step", 0), ("grad_norm", 0), ("tokens_per_second", 0), ("perplexity", 0), ("grad_scale", 1)],
)
def test_a_metric_may_not_have_the_name_of_one_of_pax(name, verbosity, monkeypatch):
    """It was overwritten."""
    loss_and_metrics = LanguageModel.loss_and_metrics

    def with_another(self, *arguments, **options):
        metrics, examples = loss_and_metrics(self, *arguments, **options)
        return metrics | {name: metrics["loss"]}, examples

    monkeypatch.setattr(LanguageModel, "loss_and_metrics", with_another)
    config = _small()
    config.task.summary_verbosity = verbosity
    with pytest.raises(ConfigError, match=f"metric `{name}` has the name of a metric of pax"):
        _run(config)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_metric_with_a_shape_is_named(microbatches, monkeypatch):
    """The error was that only an array of size 1 can be converted to a scalar."""
    compute_loss = LanguageModel.compute_loss

    def with_rows(self, predictions, batch):
        metrics, examples = compute_loss(self, predictions, batch)
        return metrics | {"per_row": (batch.weights.mean(-1), batch.weights.sum(-1))}, examples

    monkeypatch.setattr(LanguageModel, "compute_loss", with_rows)
    config = _small()
    config.task.train.num_microbatches = microbatches
    with pytest.raises(ConfigError, match="metric `per_row` is not a scalar"):
        _run(config)


def test_a_config_used_twice_is_one_object():
    config = _small()
    config.eval_inputs = [config.train_input]
    experiment = fdl.build(config)
    assert experiment.eval_inputs[0] is experiment.train_input


def test_the_old_state_is_donated():
    config = _small()
    with build_session(config).active() as session:
        state = session.new_state()
        step = make_train_step(session.experiment.task, session.abstract)
        step(state, session.experiment.train_input.get_next())
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_the_state_says_what_it_counts():
    _, state = _run(_small(), 2)
    assert dataclasses.asdict(state)["step"] == 2
    assert state.skipped_steps == 0


def test_a_batch_without_weights_has_no_maximum():
    """It counted as 0, which is above a negative metric; and a maximum was reported only if `names` has it too."""
    metrics = Metrics(names=("accuracy",), maxima=("reward_margin",))

    def of_batch(margin: float, weight: float) -> dict:
        values = {"loss": 1.0, "accuracy": 0.5, "reward_margin": margin, "other": 0.0}
        return metrics.of_batch({name: (jnp.float32(x), jnp.float32(weight)) for name, x in values.items()})

    found = metrics.combine([of_batch(-3.0, 2.0), of_batch(0.0, 0.0), of_batch(-2.0, 0.5)])
    assert found == {"loss": (2.5, 2.5), "accuracy": (1.25, 2.5), "reward_margin": (-2.0, 1.0)}
    assert metrics.combine([of_batch(0.0, 0.0)])["reward_margin"][1] == 0


def test_the_reference_of_dpo_does_not_count_as_parameters():
    """Its copy of the parameters doubled their number, and their squared norm."""
    config = _small()
    parameters = summarize(config)["parameters"]
    config.task.model.dpo = Dpo.config()
    assert summarize(config)["parameters"] == parameters
    with build_session(config).active() as session:
        source, state = session.experiment.train_input, session.new_state()
        pairs = NestedMap({**source.get_next(), "rejected": source.get_next()})
        assert tokens_in(pairs) == 2 * tokens_in(pairs.rejected) == 2 * pairs.ids.size
        state, metrics = make_train_step(session.experiment.task, session.abstract)(state, pairs)
    own = {name: tree for name, tree in state.params.items() if name != "reference"}
    assert len(own) == len(state.params) - 1
    np.testing.assert_allclose(metrics["param_norm"], optax.tree.norm(own), rtol=1e-6)
