"""What the learner does besides asking the optimizer."""

from __future__ import annotations

import dataclasses
import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pax_recipes.tiny import tiny_synthetic
from paxcli.errors import ConfigError
from paxcli.mesh.weights import Weight
from paxcli.optim.adafactor import ShardedAdafactor
from paxcli.optim.adam import Adam
from paxcli.optim.adamw import AdamW
from paxcli.optim.base import ParameterGroup
from paxcli.optim.lion import Lion
from paxcli.optim.schedules import LinearRampupPolynomialDecay
from paxcli.optim.sgd import Sgd
from paxcli.optim.trust_ratio import Lamb
from paxcli.training.learner import Learner
from paxcli.training.validate import validate


def _params() -> dict:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "stack": {"w_in": jax.random.normal(keys[0], (3, 4)), "b_in": jax.random.normal(keys[1], (4,))},
        "norm": {"scale": jax.random.normal(keys[2], (4,))},
    }


MATRIX = Weight(("embed", "mlp"), (0,), (1,))
WEIGHTS = {"stack": {"w_in": MATRIX, "b_in": Weight(("mlp",))}, "norm": {"scale": Weight(("norm",))}}


def _grads(number: int) -> dict:
    return jax.tree.map(lambda p: jnp.sin(p * (number + 2)), _params())


def _run(learner: Learner, steps: int = 4, scale=lambda number: 1.0) -> tuple[list[dict], dict, list[dict]]:
    """The parameters before each step and after the last, the state, and the reports."""
    params = [_params()]
    state = learner.init(params[0], WEIGHTS)
    update, reports = jax.jit(functools.partial(learner.update, weights=WEIGHTS)), []
    for number in range(steps):
        grads = jax.tree.map(lambda g, n=number: g * scale(n), _grads(number))
        new, state, report = update(grads, state, params[-1], jnp.int32(number))
        params.append(new)
        reports.append(report)
    return params, state, reports


def _assert_close(ours, theirs) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), ours, theirs)


@pytest.mark.parametrize(
    "choice", [dict(bprop_variable_exclusion=("^stack/b", "norm")), dict(bprop_variable_inclusion=("stack/w_in",))]
)
def test_parameters_left_out_stay_and_have_no_state(choice):
    learner = Learner(optimizer=AdamW(), learning_rate=0.01, ema_decay=0.9, **choice)
    params, state, reports = _run(learner)
    for name in ("stack.b_in", "norm.scale"):
        group, leaf = name.split(".")
        np.testing.assert_array_equal(params[-1][group][leaf], _params()[group][leaf])
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state))
    assert shapes == [(), (3, 4), (3, 4), (3, 4)]  # a count, two moments and an average
    # The gradients of the others count for nothing, not even for the clip.
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01, b2=0.95, weight_decay=0.1))
    alone = {"w_in": _params()["stack"]["w_in"]}
    opt_state = theirs.init(alone)
    for number in range(4):
        grads = {"w_in": _grads(number)["stack"]["w_in"]}
        np.testing.assert_allclose(reports[number]["grad_norm"], optax.tree.norm(grads), rtol=1e-6)
        updates, opt_state = theirs.update(grads, opt_state, alone)
        alone = optax.apply_updates(alone, updates)
    _assert_close(params[-1]["stack"]["w_in"], alone["w_in"])
    evaluated = learner.eval_params(params[-1], state)
    np.testing.assert_array_equal(evaluated["norm"]["scale"], _params()["norm"]["scale"])
    assert not np.allclose(evaluated["stack"]["w_in"], params[-1]["stack"]["w_in"])


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (dict(bprop_variable_inclusion=("stack", "lora")), "'lora' matches no parameter"),
        (dict(parameter_groups=(ParameterGroup("stack/w_im"),)), "parameter_groups.0.regex: 'stack/w_im' matches no"),
        (dict(parameter_groups=(ParameterGroup("w"), ParameterGroup("stack"))), "match `stack/w_in`: 'w' and 'stack'"),
        (dict(bprop_variable_exclusion=(".",)), "no parameter to train"),
    ],
)
def test_expressions_that_choose_nothing_are_refused(choice, message):
    with pytest.raises(ConfigError, match=message):
        Learner(**choice).init(_params(), WEIGHTS)


def test_a_regex_without_a_match_names_near_parameters_before_any_device():
    config = tiny_synthetic()
    config.task.train.learner.parameter_groups = [ParameterGroup.config(regex="layers/atention/query")]
    with pytest.raises(ConfigError, match="matches no parameter") as error:
        validate(config)
    assert "`stack/layers/attention/query`" in error.value.hint


def test_each_group_follows_its_own_optimizer_schedule_and_rate():
    learner = Learner(
        optimizer=AdamW(weight_decay=0.0),
        learning_rate=0.1,
        schedule=LinearRampupPolynomialDecay(warmup_steps=2, decay_end=6),
        parameter_groups=(
            ParameterGroup("w_in", Sgd(momentum=0.9), 0.5, LinearRampupPolynomialDecay(decay_end=10)),
            ParameterGroup("^norm", learning_rate_multiplier=0.1),
        ),
        ema_decay=0.9,
    )
    params, state, reports = _run(learner)
    main, decay = (lambda step: 0.1 * learner.schedule(step)), (lambda step: 0.05 * (1 - 0.09 * step))
    adam = functools.partial(optax.adam, b2=0.95)
    theirs = optax.chain(
        optax.clip_by_global_norm(1.0),  # of all gradients together, as in Pax
        optax.partition(
            {"main": adam(main), "slow": adam(lambda step: 0.1 * main(step)), "sgd": optax.sgd(decay, momentum=0.9)},
            {"stack": {"w_in": "sgd", "b_in": "main"}, "norm": {"scale": "slow"}},
        ),
    )
    expected = _params()
    their_state, update = theirs.init(expected), jax.jit(theirs.update)
    for number in range(4):
        updates, their_state = update(_grads(number), their_state, expected)
        expected = optax.apply_updates(expected, updates)
        _assert_close(params[number + 1], expected)
        np.testing.assert_allclose(reports[number]["learning_rate"], main(jnp.int32(number)), rtol=1e-6)
    sizes = [leaf.shape for leaf in jax.tree.leaves(state.optimizer)]
    assert sorted(sizes) == [(), (), (3, 4), (4,), (4,), (4,), (4,)]  # two counts, a momentum, twice two moments


@pytest.mark.parametrize("optimizer", [Adam(), Lamb(), ShardedAdafactor()])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_optimizer_may_have_no_parameters(optimizer, frozen):
    """Of the learner, if groups have them all; or of a group whose parameters are all frozen. It was a TypeError."""
    if frozen:
        groups, exclusion = (ParameterGroup("norm", optimizer),), ("norm",)
        learner = Learner(AdamW(), parameter_groups=groups, bprop_variable_exclusion=exclusion)
        plain = Learner(AdamW(), bprop_variable_exclusion=exclusion)
    else:
        learner, plain = Learner(optimizer, parameter_groups=(ParameterGroup(".", AdamW()),)), Learner(AdamW())
    _assert_close(_run(learner)[0][-1], _run(plain)[0][-1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(clip_gradient_single_norm_to_value=1.0), "not both"),
        (dict(clip_gradient_norm_to_value=None, clip_each_microbatch=True), "gradients are not clipped"),
        (dict(bprop_variable_exclusion=("a",), bprop_variable_inclusion=("b",)), "Both"),
        (dict(bprop_variable_exclusion=("a(",)), "not a regular expression"),
        (dict(optimizer=fdl.Partial(optax.lion)), "is a partial, which is not an Optimizer"),
        (dict(skip_step_gradient_norm_value=1.0, skip_invalid_gradients=False), "no effect"),
        (dict(schedule=LinearRampupPolynomialDecay.config(decay_end=5)), None),
    ],
)
def test_fields_that_do_not_fit_are_refused_before_any_device(changes, message):
    config = tiny_synthetic()
    for name, value in changes.items():
        setattr(config.task.train.learner, name, value)
    if message is None:
        validate(config)
        return
    with pytest.raises(ConfigError, match=message):
        validate(config)


@pytest.mark.parametrize("included", [False, True])
def test_penalties_add_their_gradients_after_clipping(included):
    learner = Learner(
        optimizer=Adam(weight_decay=0.0),
        learning_rate=0.1,
        l1_regularizer_weight=0.2,
        l2_regularizer_weight=0.3,
        regularize_norms_and_biases=included,
    )
    params, _, reports = _run(learner)
    plain = Learner(optimizer=Adam(weight_decay=0.0), learning_rate=0.1, clip_gradient_norm_to_value=None)
    expected, state = _params(), plain.init(_params(), WEIGHTS)
    update = jax.jit(functools.partial(plain.update, weights=WEIGHTS))

    @jax.jit
    @jax.grad
    def of_penalty(params):
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(WEIGHTS), strict=True)
        leaves = [value for value, weight in pairs if included or weight.is_matrix]
        return sum(0.2 * jnp.sum(jnp.abs(value)) + 0.3 / 2 * jnp.sum(value**2) for value in leaves)

    for number in range(4):
        norm = optax.tree.norm(_grads(number))
        np.testing.assert_allclose(reports[number]["grad_norm"], norm, rtol=1e-6)
        grads = jax.tree.map(lambda g, p, n=norm: g / max(1, n) + p, _grads(number), of_penalty(expected))
        expected, state, _ = update(grads, state, expected, jnp.int32(number))
        _assert_close(params[number + 1], expected)


def test_ewc_pulls_back_to_the_start():
    """praxis's own example: SGD at a rate of 1, a weight of 1, and the gradients 1, 2, 3."""
    learner = Learner(optimizer=Sgd(), learning_rate=1.0, clip_gradient_norm_to_value=None, ewc_regularizer_weight=1.0)
    weights = {"var": Weight(("norm",))}
    update = jax.jit(functools.partial(learner.update, weights=weights))
    for start in (0.0, 5.0):
        params = {"var": jnp.full(1, start)}
        state = learner.init(params, weights)
        seen = []
        for number in range(3):
            params, state, _ = update({"var": jnp.full(1, number + 1.0)}, state, params, jnp.int32(number))
            seen.append(float(params["var"][0]) - start)
        assert seen == [-1.0, -2.5, -4.25]


def test_ewc_follows_its_formula_in_each_group():
    learner = Learner(
        optimizer=AdamW(weight_decay=0.0),
        learning_rate=0.1,
        schedule=LinearRampupPolynomialDecay(decay_end=10),
        parameter_groups=(ParameterGroup("b_in", learning_rate_multiplier=0.5),),
        bprop_variable_exclusion=("norm",),
        ema_decay=0.5,
    )
    start, factors = _params(), {"w_in": 1.0, "b_in": 0.5}
    pulled = dataclasses.replace(learner, ewc_regularizer_weight=0.3)
    states = learner.init(start, WEIGHTS), pulled.init(start, WEIGHTS)
    updates = [jax.jit(functools.partial(one.update, weights=WEIGHTS)) for one in (learner, pulled)]
    params = start
    for number in range(3):
        without, plain_state, _ = updates[0](_grads(number), states[0], params, jnp.int32(number))
        params, state, report = updates[1](_grads(number), states[1], before := params, jnp.int32(number))
        states = plain_state, state
        for name, factor in factors.items():
            rate = factor * report["learning_rate"]
            pull = rate * 0.3 / 2 * (before["stack"][name] - start["stack"][name])
            _assert_close(params["stack"][name], without["stack"][name] - pull)
    _assert_close(params["norm"], start["norm"])


def test_updates_can_be_scaled_by_the_initial_norm():
    weights = jax.tree.map(lambda weight: dataclasses.replace(weight, init_scale=0.02), WEIGHTS)
    learner = Learner(optimizer=AdamW(weight_decay=0.1), learning_rate=0.1)
    start, state = _params(), learner.init(_params(), weights)
    plain, _, _ = learner.update(_grads(0), state, start, jnp.int32(0), weights)
    scaled = dataclasses.replace(learner, scale_update_by_var_norm=True)
    found, _, _ = scaled.update(_grads(0), state, start, jnp.int32(0), weights)
    matrix = start["stack"]["w_in"] + 0.02 * (plain["stack"]["w_in"] - start["stack"]["w_in"])
    _assert_close(found, plain | {"stack": plain["stack"] | {"w_in": matrix}})
    with pytest.raises(ConfigError, match="of `stack/w_in` is unknown"):
        scaled.update(_grads(0), state, start, jnp.int32(0), WEIGHTS)


def test_each_gradient_can_be_clipped_alone():
    learner = Learner(
        optimizer=Adam(), clip_gradient_norm_to_value=None, clip_gradient_single_norm_to_value=0.5, learning_rate=0.1
    )
    clipped = jax.tree.map(lambda g: g * min(1.0, 0.5 / float(jnp.linalg.norm(g))), _grads(0))
    plain = dataclasses.replace(learner, clip_gradient_single_norm_to_value=None)
    state = learner.init(_params(), WEIGHTS)
    ours, our_state, report = learner.update(_grads(0), state, _params(), jnp.int32(0), WEIGHTS)
    theirs, their_state, _ = plain.update(clipped, state, _params(), jnp.int32(0), WEIGHTS)
    _assert_close((ours, our_state), (theirs, their_state))
    np.testing.assert_allclose(report["grad_norm"], optax.tree.norm(_grads(0)), rtol=1e-6)


def test_query_key_and_value_can_be_clipped_together_over_all_layers():
    """praxis clips the variable [L, 3, D, N, H] of a scanned stack, before it takes its layers apart."""
    names = ("key", "query", "value")
    grads = {name: np.random.default_rng(number).normal(size=(2, 4, 2, 3)) for number, name in enumerate(names)}
    post = np.random.default_rng(3).normal(size=(2, 2, 3, 4))
    weight = Weight(("embed", "heads", "head_dim"), (0,), (1, 2), num_stacked=1)
    weights = dict.fromkeys(names, dataclasses.replace(weight, group="qkv")) | {"post": weight}
    learner = Learner(
        optimizer=Sgd(), clip_gradient_norm_to_value=None, clip_gradient_single_norm_to_value=0.5, learning_rate=1.0
    )
    tree = jax.tree.map(jnp.asarray, {**grads, "post": post})
    zeros = jax.tree.map(jnp.zeros_like, tree)
    clipped, _, _ = learner.update(tree, learner.init(zeros, weights), zeros, jnp.int32(0), weights)
    norm = np.linalg.norm(np.stack(list(grads.values())))
    expected = {name: -grad * 0.5 / norm for name, grad in grads.items()} | {"post": -post * 0.5 / np.linalg.norm(post)}
    _assert_close(clipped, expected)


def test_a_gradient_at_the_largest_norm_is_skipped():
    learner = Learner(optimizer=Sgd(), skip_step_gradient_norm_value=2.0)  # paxml: `<`
    params, weights = {"w": jnp.zeros(4)}, {"w": Weight(("norm",))}
    for scale, valid in ((1.0, False), (0.999, True)):
        grads = {"w": jnp.full(4, scale)}
        _, _, report = learner.update(grads, learner.init(params, weights), params, jnp.int32(0), weights)
        assert bool(report["valid"]) == valid


def test_a_step_with_a_large_gradient_is_skipped():
    learner = Learner(ema_decay=0.9, skip_step_gradient_norm_value=10.0)
    params, state, reports = _run(learner, 3, scale=lambda n: 100.0 if n == 2 else 1.0)
    assert [bool(report["valid"]) for report in reports] == [True, True, False]
    before, state_before, _ = _run(learner, 2)
    jax.tree.map(np.testing.assert_array_equal, (params[3], state), (before[2], state_before))


@pytest.mark.parametrize("skips", [True, False])
def test_an_update_that_is_made_does_not_count_as_skipped(skips):
    """Infinite gradients still have a sign. A run of Lion ended, after 100 such updates, as if they were skipped."""
    learner = Learner(Lion(), clip_gradient_norm_to_value=None, skip_invalid_gradients=skips)
    params, _, reports = _run(learner, 1, scale=lambda number: jnp.inf)
    moved = not np.array_equal(params[0]["norm"]["scale"], params[1]["norm"]["scale"])
    assert (moved, bool(reports[0]["valid"])) == (not skips, not skips)


def test_the_average_follows_the_parameters():
    params, state, _ = _run(Learner(learning_rate=0.1, ema_decay=0.25))
    average = params[0]
    for number in range(4):
        decay = min(0.25, (1 + number) / (10 + number))
        average = jax.tree.map(lambda a, p, d=decay: d * a + (1 - d) * p, average, params[number])
    _assert_close(state.ema, average)
    plain, plain_state, _ = _run(Learner(learning_rate=0.1))
    jax.tree.map(np.testing.assert_array_equal, (params[-1], state.optimizer), (plain[-1], plain_state))


def test_the_average_begins_anew_with_other_parameters():
    learner = Learner(ema_decay=0.9, bprop_variable_exclusion=("norm",))
    params, _, _ = _run(learner)
    begun = learner.init(params[-1], WEIGHTS)
    jax.tree.map(np.testing.assert_array_equal, learner.eval_params(params[-1], begun), params[-1])


def test_decay_can_spare_norms_and_biases():
    free = Adam(weight_decay=0.0, clip_threshold=None)
    plain = _run(Learner(optimizer=free), 1)[0][1]
    spared = _run(Learner(optimizer=dataclasses.replace(free, weight_decay=0.5, decay_norms_and_biases=False)), 1)[0][1]
    everything = _run(Learner(optimizer=dataclasses.replace(free, weight_decay=0.5)), 1)[0][1]
    start = _params()
    decayed = jax.tree.map(lambda p, s: p - 1e-3 * 0.5 * s, plain, start)
    _assert_close(everything, decayed)
    _assert_close(spared, plain | {"stack": plain["stack"] | {"w_in": decayed["stack"]["w_in"]}})
