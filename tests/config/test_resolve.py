from __future__ import annotations

import pathlib
import re

import fiddle as fdl
import pytest

from paxcli.config.load import load
from paxcli.config.resolve import Resolved, resolve
from paxcli.config.values import ABSENT, diff, plain_values
from paxcli.errors import ConfigError


def sources(resolved: Resolved) -> dict[str, tuple[object, str]]:
    return {path: (value.value, value.source) for path, value in resolved.values.items()}


def test_alone_it_is_the_recipe(mine: pathlib.Path) -> None:
    resolved = resolve(f"{mine}:small")
    assert plain_values(resolved.config) == plain_values(load(f"{mine}:small").config)
    assert sources(resolved)["model.num_layers"] == (2, "recipe")
    assert sources(resolved)["model.dropout"] == (None, "default")
    assert sources(resolved)["model.block.act"] == ("relu", "default")
    assert sources(resolved)["train"] == ("Train", "default")


def test_precedence(mine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("num_layers: 3\nmodel_dims: 32\ndropout: 0.1\n")
    two.write_text("num_layers: 4\nmodel_dims: 64\n")
    resolved = resolve(f"{mine}:small", [str(one), str(two)], ["NUM_LAYERS=5"])
    assert sources(resolved)["model.num_layers"] == (5, "--set")
    assert sources(resolved)["model.model_dims"] == (64, f"overlay {two}")
    assert sources(resolved)["model.dropout"] == (0.1, f"overlay {one}")
    assert resolved.sets == {"model.num_layers": 5}
    model = fdl.build(resolved.config).model
    assert (model.num_layers, model.model_dims, model.dropout) == (5, 64, 0.1)


def test_a_yaml_recipe_is_a_recipe(mine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "over.yaml").write_text("dropout: 0.2\nnum_layers: 7\n")
    base, top = tmp_path / "base.yaml", tmp_path / "sub" / "top.yaml"
    top.parent.mkdir()
    base.write_text("recipe: mine.py:small\noverlays: [over.yaml]\nset: {num_layers: 8, learning_rate: 1e-2}\n")
    top.write_text("recipe: ../base.yaml\nset: {num_layers: 9}\n")
    resolved = resolve(str(top), sets=["verbose=true"])
    assert resolved.name == "top"
    assert sources(resolved)["model.num_layers"] == (9, "recipe")
    assert sources(resolved)["train.learning_rate"] == (0.01, "recipe")
    assert sources(resolved)["train.verbose"] == (True, "--set")
    assert resolved.values["model.dropout"].source.startswith("overlay ")


def test_a_yaml_recipe_on_itself_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text("recipe: b.yaml\n")
    (tmp_path / "b.yaml").write_text("recipe: a.yaml\n")
    with pytest.raises(ConfigError, match="based on itself"):
        resolve(str(tmp_path / "a.yaml"))


def test_one_batch_size_switches_off_the_other(mine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    overlay = tmp_path / "o.yaml"
    overlay.write_text("percore_batch_size: 2\n")
    resolved = resolve(f"{mine}:shared_4", sets=["global_batch_size=64"])
    assert sources(resolved)["train.global_batch_size"] == (64, "--set")
    assert sources(resolved)["train.percore_batch_size"] == (None, "--set")
    resolved = resolve(f"{mine}:shared_4", [str(overlay)], ["global_batch_size=8"])
    assert sources(resolved)["train.percore_batch_size"] == (None, "--set")


@pytest.mark.parametrize(("recipe", "rows"), [("c4-gpt3-xl", 32), ("tiny", None)])
def test_an_optional_value_goes_where_a_class_has_the_field(recipe: str, rows: int | None, tmp_path: pathlib.Path):
    overlay = tmp_path / "o.yaml"
    overlay.write_text("task.model.position.num_positions?: 32\ntask.model.position.min_timescale?: 2.0\n")
    resolved = resolve(recipe, [str(overlay)])
    assert sources(resolved).get("task.model.position.num_positions") == (rows and (rows, f"overlay {overlay}"))
    for path in ("num_positions?", "position.num_positions?"):
        overlay.write_text(f"{path}: 32\n")
        with pytest.raises(ConfigError, match=f"`{re.escape(path)}` is not a full path"):
            resolve(recipe, (str(overlay),))
    overlay.write_text("task.model.position.num_position?: 32\n")
    with pytest.raises(ConfigError, match=r"no field `task\.model\.position\.num_position`"):
        resolve(recipe, [str(overlay)])


OWN_STACK = """
from paxcli.config.recipe import recipe
from paxcli.layers.base import Layer
from pax_recipes.tiny import tiny

class OwnStack(Layer):
    pass

@recipe()
def own():
    config = tiny()
    config.task.model.stack = OwnStack.partial()
    return config
"""


@pytest.mark.parametrize("overlay", ["cpu", "gpu-1", "tpu"])
def test_overlays_leave_out_what_a_stack_of_the_users_own_has_not(overlay: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "own.py").write_text(OWN_STACK)
    found = sources(resolve(str(tmp_path / "own.py"), [overlay]))
    assert found["task.model.stack"][0] == "OwnStack" and "task.model.stack.num_stages" not in found


def test_two_batch_sizes_of_one_layer_both_stay(mine: pathlib.Path) -> None:
    resolved = resolve(f"{mine}:small", sets=["global_batch_size=64", "percore_batch_size=2"])
    train = fdl.build(resolved.config).train
    assert (train.global_batch_size, train.percore_batch_size) == (64, 2.0)


def test_a_new_class_starts_from_its_defaults() -> None:
    resolved = resolve("tiny", sets=["optimizer=Adam", "optimizer.beta1=0.8"])
    ours = {path: value for path, value in sources(resolved).items() if ".optimizer" in path}
    assert ours.pop("task.train.learner.optimizer") == ("Adam", "--set")
    assert ours.pop("task.train.learner.optimizer.beta1") == (0.8, "--set")
    assert {source for _, source in ours.values()} == {"default"}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["num_layers=2", "num_layers=3"], "given twice"),
        (["num_layers=2", "model.num_layers=3"], r"`model\.num_layers` twice"),
        (["files.0=y", "1.files=[z]"], r"after `inputs\.1\.files\.0`"),
        (["num_layer=2"], "no field"),
    ],
)
def test_mistakes_in_sets(mine: pathlib.Path, sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(f"{mine}:small", sets=sets)


def test_an_overlays_mistake_names_the_overlay(mine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "o.yaml"
    path.write_text("num_layers: many\n")
    with pytest.raises(ConfigError, match=r"o\.yaml: model\.num_layers: expected int"):
        resolve(f"{mine}:small", [str(path)])


def test_a_recipe_that_lacks_a_value(mine: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"`model\.num_layers` has no value"):
        resolve(f"{mine}:unfinished")
    assert fdl.build(resolve(f"{mine}:unfinished", sets=["num_layers=3"]).config).model.num_layers == 3


def test_diff_names_only_what_differs(mine: pathlib.Path) -> None:
    one = {path: value.value for path, value in resolve(f"{mine}:small").values.items()}
    two = {path: value.value for path, value in resolve(f"{mine}:shared_4").values.items()}
    assert diff(one, one) == []
    assert diff(one, two)[:2] == [("model.tied", None, "Norm"), ("model.head", None, "Norm, the one of model.tied")]
    assert ("train.percore_batch_size", None, 0.5) in diff(one, two)
    assert ("model.tied.dims", ABSENT, 3) in diff(one, two)
    assert diff({"x": 1}, {"x": True}) == [("x", 1, True)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.eval_inputs = config.eval_inputs[0]", "eval_inputs: expected list, got <class '.*StdlibInput'>"),
        ("config.train_input = None", "train_input: expected one of .*, got None"),
        ("config.train_input.input_random_seed = 'x'", "input_random_seed: expected int or null, got 'x'"),
    ],
)
def test_a_wrong_type_in_a_python_recipe_is_found_before_any_verb_uses_it(line, message, tmp_path):
    code = "from pax_recipes.tiny import tiny\nfrom paxcli.config.recipe import recipe\n\n\n@recipe()\ndef typed():\n"
    (tmp_path / "typed.py").write_text(f"{code}    config = tiny()\n    {line}\n    return config\n")
    with pytest.raises(ConfigError, match=message):
        resolve(f"{tmp_path}/typed.py:typed")
