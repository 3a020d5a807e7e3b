from __future__ import annotations

import pathlib

import fiddle as fdl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxcli.config.load import load
from paxcli.config.tree import find, walk
from paxcli.config.values import plain_values
from paxcli.errors import ConfigError


def test_values_are_what_fiddle_has(mine: pathlib.Path) -> None:
    config = load(f"{mine}:small").config
    values = plain_values(config)
    assert list(values)[:4] == ["model", "model.num_layers", "model.model_dims", "model.dropout"]
    assert values["model"] == "Model" and values["model.block"] == "Block" and values["model.block.norm"] == "Norm"
    built = fdl.build(config)
    assert values["model.num_layers"] == built.model.num_layers == 2
    assert values["model.block.act"] == built.model.block(model_dims=1).act == "relu"
    assert values["train.betas"] == list(built.train.betas)
    assert values["train.color"] == built.train.color.value
    assert values["inputs.1.files"] == built.inputs[1].files
    assert values["mesh.ici_mesh_shape"] is None
    assert not {"inputs", "model.block.model_dims", "model.block.norm.dims"} & values.keys()


def test_one_object_in_two_places_shows(mine: pathlib.Path) -> None:
    values = plain_values(load(f"{mine}:shared_4").config)
    assert values["model.tied"] == "Norm"
    assert values["model.head"] == "Norm, the one of model.tied"


def test_a_name_means_the_field_that_recipes_set() -> None:
    config = load("tiny").config  # whose inputs have a `vocab_size` that is filled in when the run starts
    assert find(config, "vocab_size")[0].path == "task.model.vocab_size"
    assert find(config, "train_input.vocab_size")[0].path == "train_input.vocab_size"


def test_flax_fields_are_left_out() -> None:
    from paxcli.layers.linear import Linear

    values = plain_values(fdl.Config(dict, layer=Linear.partial()))
    assert values["layer"] == "Linear"
    assert not {"layer.name", "layer.parent"} & values.keys()


@pytest.mark.parametrize(
    ("path", "full"),
    [
        ("num_layers", "model.num_layers"),
        ("NUM_LAYERS", "model.num_layers"),
        ("model.num_layers", "model.num_layers"),
        ("model_dims", "model.model_dims"),
        ("norm.epsilon", "model.block.norm.epsilon"),
        ("1.name", "inputs.1.name"),
        ("inputs", "inputs"),
        ("model", "model"),
    ],
)
def test_paths(mine: pathlib.Path, path: str, full: str) -> None:
    assert find(load(f"{mine}:small").config, path)[0].path == full


def test_items_of_plain_containers(mine: pathlib.Path) -> None:
    config = load(f"{mine}:small").config
    for path, full, item in [("ici_mesh_shape.fsdp", "mesh.ici_mesh_shape", "fsdp"), ("files.0", "inputs.1.files", 0)]:
        node, key = find(config, path)
        assert (node.path, key) == (full, item)


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("num_layer", "no field `num_layer`", "`num_layers`"),
        ("model.num_layer", "no field", "`model.num_layers`"),
        ("name", r"ambiguous: `inputs\.0\.name`, `inputs\.1\.name`", ""),
        ("block.model_dims", "filled in from `model.model_dims`", "Set `model.model_dims`"),
        ("num_layers.x", "no field", ""),
        ("inputs.7.name", "no field", ""),
    ],
)
def test_paths_that_mean_nothing_or_too_much(mine: pathlib.Path, path: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        find(load(f"{mine}:small").config, path)
    assert hint in (caught.value.hint or "")


def test_a_shared_object_is_not_ambiguous(mine: pathlib.Path) -> None:
    config = load(f"{mine}:shared_4").config
    assert find(config, "dims")[0].parent is config.model.tied is config.model.head


def _tree(branching: list) -> fdl.Config:
    fields = {name: _tree(below) if isinstance(below, list) else below for name, below in branching}
    return fdl.Config(dict, **fields)


NAMES = st.sampled_from(["a", "b", "cc", "a_b"])
TREES = st.recursive(
    st.integers(),
    lambda inner: st.lists(st.tuples(NAMES, inner), min_size=1, max_size=3, unique_by=lambda field: field[0]),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, list))


@given(TREES, st.data())
def test_a_suffix_means_one_place_or_is_refused(branching: list, data: st.DataObject) -> None:
    config = _tree(branching)
    paths = [node.path for node in walk(config)]
    path = data.draw(st.sampled_from(paths))
    assert find(config, path)[0].path == path
    parts = path.split(".")
    suffix = ".".join(parts[data.draw(st.integers(0, len(parts) - 1)) :])
    same_end = [other for other in paths if f".{other}".endswith(f".{suffix}")]
    if len(same_end) == 1 or suffix in paths:
        assert find(config, suffix)[0].path == (suffix if suffix in paths else path)
    else:
        with pytest.raises(ConfigError, match="ambiguous"):
            find(config, suffix)
