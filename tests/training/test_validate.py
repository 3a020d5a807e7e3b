"""Checks of a recipe that need no device."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import paxcli as pax
from pax_recipes.tiny import tiny_synthetic
from paxcli.errors import ConfigError, MeshError
from paxcli.layers.feed_forward import FeedForward
from paxcli.optim.adamw import AdamW
from paxcli.training.session import build_session
from paxcli.training.validate import validate


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train_input.num_infeed_hosts", 4),
        ("train_input.infeed_host_index", 1),
        ("train_input.is_training", False),
        ("eval_inputs.0.num_infeed_hosts", 2),
    ],
)
def test_values_that_a_run_overwrites_are_refused(path: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{path}={value} has no effect"):
        pax.load("tiny", set={path: value}).validate()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("task.train.learner.learning_rate", "fast", "expected float, got 'fast'"),
        ("task.train.learner.schedule", optax.cosine_decay_schedule(1.0, 10), "expected one of .*Cosine"),
        ("task.train.learner.optimizer", AdamW.partial(), r"is made by `.partial\(…\)`"),
        ("task.model", None, "expected one of .*LanguageModel"),
        ("task.model.stack.block.feed_forward", FeedForward, "expected one of FeedForward, MoeFeedForward"),
        ("task.model.stack.block.feed_forward", FeedForward.config(model_dims=1), r"is made by `.config\(…\)`"),
        ("train_input", [1], "expected one of .*TextInput"),
    ],
)
def test_values_of_python_recipes_have_the_types_of_their_fields(path: str, value: object, message: str) -> None:
    config = holder = tiny_synthetic()
    *names, field = path.split(".")
    for name in names:
        holder = getattr(holder, name)
    setattr(holder, field, value)
    with pytest.raises(ConfigError, match=f"{path}:? {message}"):
        validate(config)


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("feed_forward", FeedForward, "FeedForward.partial"),
        ("feed_forward", FeedForward(model_dims=1, hidden_dims=2), "FeedForward.partial"),
        ("optimizer", AdamW, "AdamW.config"),
    ],
)
def test_a_class_or_an_object_is_told_how_it_becomes_a_configuration(field: str, value: object, right: str) -> None:
    config = tiny_synthetic()
    holder = config.task.model.stack.block if field == "feed_forward" else config.task.train.learner
    setattr(holder, field, value)
    with pytest.raises(ConfigError, match="expected one of") as error:
        validate(config)
    assert error.value.hint == f"Make it by `{right}(…)`."


def test_numpy_scalars_are_numbers_in_python_recipes() -> None:
    config = tiny_synthetic()
    config.task.train.learner.learning_rate = np.float32(0.5)
    validate(config)


@pytest.mark.parametrize(("shape", "axes"), [([3, 2, 1], "data=3 × fsdp=2"), ([1, 3, 2], "fsdp=3 × tensor=2")])
def test_that_a_mesh_is_for_other_devices_is_said_before_that_it_divides_nothing(shape: list[int], axes: str) -> None:
    config = pax.load("tiny", set={"mesh.ici_mesh_shape": shape}).config
    with pytest.raises(ConfigError, match=f"mesh {axes} needs 6 devices, found 8"):
        build_session(config, jax.local_devices() * 8)
    with pytest.raises(MeshError, match="does not divide over"):
        build_session(config, jax.local_devices() * 6)


def test_without_a_shape_of_their_own_slices_divide_the_devices() -> None:
    config = pax.load("tiny-synthetic", set={"mesh.dcn_mesh_shape": {"data": 2}}).config
    validate(config, num_devices=8)  # 8 rows
    with pytest.raises(MeshError, match="8 does not divide over data=16 × fsdp=1 = 16"):
        validate(config, num_devices=16)


def test_a_batch_that_needs_a_mesh_names_it() -> None:
    config = tiny_synthetic()
    config.task.train.global_batch_size, config.task.train.percore_batch_size = None, 0.5
    with pytest.raises(ConfigError) as raised:
        validate(config)
    assert "mesh.ici_mesh_shape" in raised.value.hint
    config.mesh.ici_mesh_shape = {"data": 4, "tensor": 2}
    validate(config)


@pytest.mark.parametrize(("keys", "warns"), [(("loss",), True), (("loss", "mtp_loss"), False)])
def test_layers_that_no_loss_trains_are_mentioned(keys: tuple[str, ...], warns: bool, caplog) -> None:
    """Those of multi-token prediction cost their time, and only weight decay changed them."""
    config = tiny_synthetic()
    config.task.model.mtp_num_layers, config.task.loss_aggregator.loss_keys = 1, keys
    build_session(config)
    assert [record.message for record in caplog.records if "mtp_loss" in record.message] == warns * [
        "The layers of `mtp_num_layers` get no gradient: task.loss_aggregator.loss_keys lacks `mtp_loss`."
    ]


def test_two_inputs_with_the_same_name_are_refused() -> None:
    """One without a name is called `input`: the metrics of one of the two were lost."""
    changes = {"eval_inputs": ["SyntheticInput", "SyntheticInput"], "eval_inputs.1.name": "input"}
    with pytest.raises(ConfigError, match="Two evaluation inputs are called `input`"):
        pax.load("tiny-synthetic", set=changes).validate()
