"""Ranges are checked for every field, at assignment and for a whole recipe; marks are found by path."""

from __future__ import annotations

import fiddle as fdl
import pytest

from pax_recipes.tiny import tiny_synthetic
from paxcli.config.assign import assign
from paxcli.config.fields import Mark
from paxcli.config.tree import check_fields, check_ranges, find, is_at_or_below, marked_paths
from paxcli.errors import ConfigError
from paxcli.layers.block import TransformerBlock
from paxcli.layers.init import Gaussian
from paxcli.layers.patterned_stack import PatternedStack
from paxcli.models.sampling import Sampling
from paxcli.optim.adamw import AdamW
from paxcli.optim.schedules import LinearRampupCosineDecay
from paxcli.training.learner import Learner

OUT_OF_RANGE = [
    ("num_kv_heads", 0, "at least 1 or null"),
    ("dims_per_head", 0, "at least 1 or null"),
    ("model.vocab_size", 0, "at least 1"),
    ("num_layers", -1, "at least 1 and at most 10000"),
    ("label_smoothing", -1, "at least 0 and at most 1"),
    ("attention.window", 0, r"at least 1 \(tokens\) or null"),
    ("optimizer.beta1", 2, "at least 0 and below 1"),
    ("optimizer.epsilon", -1e-8, "at least 0"),
    ("learning_rate", -1, "at least 0"),
    ("learning_rate", float("nan"), "finite and at least 0"),
    ("learning_rate", float("inf"), "finite and at least 0"),
    ("clip_gradient_norm_to_value", -1, "above 0 or null"),
    ("ema_decay", 1.0, "above 0 and below 1 or null"),
    ("schedule.warmup_steps", -5, r"at least 0 and at most 2147483647 \(steps\)"),
    ("schedule.min_ratio", -3, "at least 0 and at most 1"),
    ("params_init.stddev", -1, "at least 0 or null"),
    ("num_train_steps", 0, r"at least 1 and at most 2147483647 \(steps\) or null"),
    ("num_train_steps", 3_000_000_000, r"at least 1 and at most 2147483647 \(steps\) or null"),
    ("num_microbatches", 0, "at least 1"),
    ("percore_batch_size", -1, r"above 0 \(examples\) or null"),
    ("random_seed", -1, "at least 0 and at most 4294967295 or null"),
    ("save_interval_steps", 0, r"at least 1 and at most 2147483647 \(steps\)"),
    ("save_max_to_keep", 0, "at least 1 or null"),
    ("peak_tflops", 0, r"above 0 \(TFLOP/s\) or null"),
    ("ici_mesh_shape", {"data": 0}, "at least 1"),
    ("ici_mesh_shape", [1, 0, 1], "at least 1"),
    ("train_input.batch_size", 0, r"at least 1 \(examples\) or null"),
]


def _config() -> fdl.Config:
    config = tiny_synthetic()
    config.task.model.params_init = Gaussian.config()
    config.task.train.learner.schedule = LinearRampupCosineDecay.config()
    config.task.train.learner.optimizer = AdamW.config()
    return config


@pytest.mark.parametrize(("path", "value", "allowed"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused_at_assignment_and_in_a_recipe(path, value, allowed):
    says = rf"{path}(\.\w+)? must be {allowed}, not "
    with pytest.raises(ConfigError, match=says):
        assign(_config(), path, value)
    config = _config()
    holder = config
    *heads, field = find(config, path)[0].path.split(".")
    for name in heads:
        holder = getattr(holder, name)
    setattr(holder, field, value)
    with pytest.raises(ConfigError, match=says) as caught:
        check_ranges(config)
    assert caught.value.exit_code == 2


def test_an_object_is_checked_too():
    check_fields(Learner(learning_rate=0.0))
    with pytest.raises(ConfigError, match="learner.ema_decay must be above 0 and below 1 or null, not 1"):
        check_fields(Learner(ema_decay=1.0), "learner.")
    Sampling(temperature=0.0, top_k=1, top_p=1.0)
    for fields in (dict(temperature=-0.1), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.1)):
        with pytest.raises(ConfigError, match=f"{next(iter(fields))} must be"):
            Sampling(**fields)


def test_marks_hold_below_their_field_and_in_every_stack():
    config = _config()
    local = TransformerBlock.partial()
    config.task.model.stack = PatternedStack.partial(turns=(local, TransformerBlock.partial()), block=None)
    safe = marked_paths(config, Mark.SAFE_ON_RESUME)
    for path in (
        "task.model.stack.turns.0.attention.kernel",
        "task.model.stack.turns.1.attention.kernel",
        "task.model.stack.remat_policy",
        "task.train.learner.optimizer.beta1",
        "eval_inputs.3.name",
        "mesh.ici_mesh_shape",
    ):
        assert is_at_or_below(path, safe), path
    for path in ("task.model.num_layers", "task.train.random_seed", "train_input.seq_len", "task.model.stack.turns.0"):
        assert not is_at_or_below(path, safe), path
    outside = marked_paths(config, Mark.NOT_COMPILED)
    assert is_at_or_below("checkpoint.save_interval_steps", outside) and is_at_or_below("train_input.name", outside)
    assert not is_at_or_below("mesh.ici_mesh_shape", outside)


@pytest.mark.parametrize(("path", "value"), [("remat_policy", "all"), ("optimizer.mu_dtype", None)])
def test_a_word_that_a_field_does_not_allow_is_refused_in_a_recipe(path, value):
    config = _config()
    node, _ = find(config, path)
    setattr(node.parent, node.key, value)
    with pytest.raises(ConfigError, match=rf"{path} must be one of .*, not {value}"):
        check_ranges(config)
