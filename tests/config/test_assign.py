from __future__ import annotations

import math
import pathlib

import fiddle as fdl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxcli.config.assign import Text, assign, fit_types, split_assignment
from paxcli.config.classes import is_of_another_class
from paxcli.config.load import load
from paxcli.config.tree import find
from paxcli.config.values import plain_values
from paxcli.errors import ConfigError
from paxcli.optim.curves import LinearSchedule
from paxcli.optim.schedules import NoamSchedule
from paxcli.training.learner import Learner


def test_texts_set_in_python_are_those_of_set() -> None:
    texts = {"bprop_variable_inclusion": "embedding", "learning_rate": "1e-3", "optimizer": "Adam"}
    in_python, by_set = load("tiny").config, load("tiny").config
    for name, text in texts.items():
        setattr(in_python.task.train.learner, name, text)
        assign(by_set, f"task.train.learner.{name}", Text(text))
    fit_types(in_python)
    assert in_python == by_set
    assert in_python.task.train.learner.bprop_variable_inclusion == ("embedding",)


@pytest.mark.parametrize(("name", "cls"), [("Linear", LinearSchedule), ("Transformer", NoamSchedule)])
def test_a_class_is_named_by_its_name_in_pax_too(name: str, cls: type) -> None:
    config = Learner.config()
    for either in (name, cls.__name__):
        assign(config, "schedule", Text(either))
        assert fdl.get_callable(config.schedule) is cls


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("num_layers", "4", 4),
        ("learning_rate", "1e-3", 1e-3),
        ("learning_rate", "2", 2.0),
        ("dropout", "0", 0.0),
        ("dropout", "null", None),
        ("dropout", "None", None),
        ("verbose", "true", True),
        ("act", "gelu", "gelu"),
        ("betas", "[0.5, 1e-2]", (0.5, 0.01)),
        ("1.files", "[a, 'b c']", ["a", "b c"]),
        ("1.files", "my.txt", ["my.txt"]),
        ("files.0", "y", ["y"]),
        ("0.name", "on", "on"),
        ("0.name", "12", "12"),
        ("0.name", "'12'", "12"),
        ("0.name", "gs://x/y=z", "gs://x/y=z"),
        ("0.name", "[half", "[half"),
        ("ici_mesh_shape", "{fsdp: 8}", {"fsdp": 8}),
        ("ici_mesh_shape", "[1, 8, 1]", [1, 8, 1]),
        ("ici_mesh_shape.fsdp", "8", {"fsdp": 8}),
        ("inputs", "[]", []),
    ],
)
def test_values_are_typed_by_the_field(mine: pathlib.Path, path: str, text: str, value: object) -> None:
    config = load(f"{mine}:small").config
    (full,) = assign(config, path, Text(text))
    stored = find(config, full)[0].value
    assert stored == value and type(stored) is type(value)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("num_layers", "abc", "expected int, got 'abc'"),
        ("num_layers", "true", "expected int"),
        ("num_layers", "1.5", "expected int"),
        ("num_layers", "null", "expected int"),
        ("learning_rate", "fast", "expected float"),
        ("dropout", "x", "expected float or null"),
        ("verbose", "1", "expected bool"),
        ("act", "gelo", "expected one of gelu, relu"),
        ("color", "green", "expected one of red, blue"),
        ("betas", "[1, 2, 3]", "expected list of 2"),
        ("1.files", "[1]", "expected str"),
        ("ici_mesh_shape", "{fsdp: x}", "expected int"),
        ("train", "3", "expected Train"),
    ],
)
def test_wrong_types_are_refused_and_change_nothing(mine: pathlib.Path, path: str, text: str, expected: str) -> None:
    config, untouched = load(f"{mine}:small").config, load(f"{mine}:small").config
    with pytest.raises(ConfigError, match=expected) as caught:
        assign(config, path, Text(text))
    assert caught.value.exit_code == 2
    assert plain_values(config) == plain_values(untouched)


def test_enums_are_named_by_value(mine: pathlib.Path) -> None:
    config = load(f"{mine}:small").config
    assign(config, "color", "blue")
    assert fdl.build(config).train.color.name == "BLUE"


def test_the_class_defaults_are_not_changed(mine: pathlib.Path) -> None:
    config, other = load(f"{mine}:small").config, load(f"{mine}:small").config
    assign(config, "ici_mesh_shape.data", 2)
    assign(config, "ici_mesh_shape.fsdp", 4)
    assert fdl.build(config).mesh.ici_mesh_shape == {"data": 2, "fsdp": 4}
    assert fdl.build(other).mesh.ici_mesh_shape is None


def test_a_shared_object_changes_once(mine: pathlib.Path) -> None:
    config = load(f"{mine}:shared_4").config
    assign(config, "model.head.dims", 5)
    assert fdl.build(config).model.tied.dims == 5


CHOICES = [("optimizer", "Adam"), ("schedule", "Constant"), ("train_input", "SyntheticInput")]


@pytest.mark.parametrize(("path", "name"), CHOICES)
def test_a_class_is_chosen_by_name(path: str, name: str) -> None:
    config = load("tiny").config
    (full,) = assign(config, path, Text(name))
    chosen = find(config, full)[0].value
    assert isinstance(chosen, fdl.Config) and chosen == fdl.get_callable(chosen).config()
    assert fdl.get_callable(chosen).__name__ == name


def test_a_class_without_others_of_its_kind_is_named_too() -> None:
    config = load("tiny").config
    assign(config, "early_stopping_fn", "EarlyStopping")
    assert plain_values(config)["task.early_stopping_fn"] == "EarlyStopping"
    with pytest.raises(ConfigError, match="expected EarlyStopping, got 'EarlyStoping'") as error:
        assign(config, "early_stopping_fn", "EarlyStoping")
    assert error.value.hint == "Did you mean `EarlyStopping`?"


def test_a_layer_stays_a_template() -> None:
    from paxcli.layers.rms_norm import RmsNorm

    config = load("tiny").config
    assign(config, "final_norm", "RmsNorm")
    assert config.task.model.final_norm == RmsNorm.partial()
    assign(config, "position", None)
    assert config.task.model.position is None
    assign(config, "position", "LearnedPositions")
    assert isinstance(config.task.model.position, fdl.Partial)


@pytest.mark.parametrize("name", ["os.system", "Adm", "SyntheticInput", "Optimizer"])
def test_only_classes_of_the_closed_list_can_be_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected one of (\w+, )*AdamW, .*got"):
        assign(load("tiny").config, "optimizer", Text(name))


KINDS = [
    ("task.model.stack", "TiedEmbedding", "Decoder, Encoder, PatternedStack, PipelinedStack, Stack"),
    ("block", "Attention", "DecoderBlock, EncoderBlock, ParallelBlock, TransformerBlock"),
    ("feed_forward", "RmsNorm", "FeedForward, MoeFeedForward"),
    ("attention", "SelfAttention", "Attention, CrossAttention, LatentAttention"),
    ("final_norm", "FeedForward", "LayerNorm, RmsNorm"),
    ("position", "Rotary", "LearnedPositions, SinusoidPositions or null"),
    ("embedding", "Head", "OutputHead, TiedEmbedding"),
]


@pytest.mark.parametrize(("path", "name", "allowed"), KINDS)
def test_a_layer_is_replaced_by_one_of_its_kind(path: str, name: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"expected one of {allowed}, got '{name}'"):
        assign(load("tiny").config, path, Text(name))


def test_a_layer_of_the_users_own_is_replaced_by_those_of_the_field() -> None:
    from paxcli.layers.base import Layer

    class Own(Layer):
        pass

    config = load("tiny").config
    config.task.model.stack.block.feed_forward = Own.partial()
    path = "task.model.stack.block.feed_forward"
    assert is_of_another_class(config, f"{path}.num_experts") and is_of_another_class(config, f"{path}.hidden_dims")
    assert not is_of_another_class(config, f"{path}.num_stages")
    assign(config, "feed_forward", "MoeFeedForward")
    assert fdl.get_callable(config.task.model.stack.block.feed_forward).__name__ == "MoeFeedForward"


def test_an_abstract_class_cannot_be_named() -> None:
    with pytest.raises(ConfigError, match=r"expected one of [^.]*TextInput, got 'RandomAccessInput'"):
        assign(load("tiny").config, "train_input", Text("RandomAccessInput"))


@pytest.mark.parametrize("text", ["num_layers", "=4", "num_layers=", " = "])
def test_what_is_no_assignment(text: str) -> None:
    with pytest.raises(ConfigError, match="not PATH=VALUE"):
        split_assignment(text)


def _typed(x: float = 0.0, n: int = 0, s: str = "", b: bool = False) -> tuple:
    return x, n, s, b


@given(st.floats(), st.integers(), st.booleans())
def test_what_python_prints_is_read_back(x: float, n: int, b: bool) -> None:
    config = fdl.Config(_typed)
    for path, value in (("x", x), ("n", n), ("b", b)):
        assign(config, path, Text(repr(value)))
    got = fdl.build(config)
    assert (got[0] == x or math.isnan(x)) and got[1:] == (n, "", b)
