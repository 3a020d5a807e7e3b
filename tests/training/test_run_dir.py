"""Which changes of a recipe a run directory accepts."""

from __future__ import annotations

import pathlib

import fiddle as fdl
import pytest

from pax_recipes.tiny import tiny_synthetic
from paxcli.config.assign import assign
from paxcli.config.render import config_text
from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError, MissingError
from paxcli.inputs.text import TextInput
from paxcli.layers.block import TransformerBlock
from paxcli.layers.patterned_stack import PatternedStack
from paxcli.training.run_dir import RunDir


def _alternating() -> fdl.Config:
    config = tiny_synthetic()
    turns = (TransformerBlock.partial(), TransformerBlock.partial())
    config.task.model.stack = PatternedStack.partial(turns=turns, block=None)
    return config


def _started(path: pathlib.Path, config: str) -> RunDir:
    """A run directory that has this config and a checkpoint."""
    (path / "config.txt").write_text(config)
    (path / "checkpoints/10").mkdir(parents=True, exist_ok=True)
    return RunDir(path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("stack.turns.0.attention.kernel", "xla"),
        ("stack.remat_policy", "nothing"),
        ("learner.optimizer.beta", 0.8),
        ("mesh.ici_mesh_shape", {"data": 1}),
        ("eval_inputs.0.batch_size", 2),
    ],
)
def test_what_may_change_with_consent(tmp_path, path, value):
    run_dir = _started(tmp_path, config_text(_alternating()))
    changed = _alternating()
    (full,) = assign(changed, path, value)
    with pytest.raises(ConfigError, match=full) as caught:
        run_dir.check_same_recipe(changed, allow_changed=False)
    assert "--allow-changed" in caught.value.hint
    run_dir.check_same_recipe(changed, allow_changed=True)


@pytest.mark.parametrize(("path", "value"), [("files", ["new/*.txt"]), ("num_workers", 2), ("cache_dir", "/tmp/c")])
def test_where_and_how_text_is_read_may_change(tmp_path, path, value):
    config = tiny_synthetic()
    config.train_input = TextInput.config(files=["old/*.txt", "more.txt"])
    run_dir = _started(tmp_path, config_text(config))
    assign(config, f"train_input.{path}", value)
    run_dir.check_same_recipe(config, allow_changed=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [("num_layers", 2), ("random_seed", 5), ("train_input.batch_size", 2), ("turns.1.attention.logit_cap", 50.0)],
)
def test_what_may_not(tmp_path, path, value):
    run_dir = _started(tmp_path, config_text(_alternating()))
    changed = _alternating()
    (full,) = assign(changed, path, value)
    with pytest.raises(ConfigError, match=full):
        run_dir.check_same_recipe(changed, allow_changed=True)


def test_a_run_of_an_earlier_version_resumes(tmp_path):
    """Its config lacks the fields that are newer than it, and has those that were removed since."""
    config, run_dir = resolve("tiny").config, _started(tmp_path, "")
    lines = config_text(config).splitlines()
    newer = "task.model.stack.block.attention.qk_norm = null"
    assert newer in lines
    (tmp_path / "config.txt").write_text("\n".join(line for line in lines if line != newer) + "\n")
    run_dir.check_same_recipe(config, allow_changed=False)
    (tmp_path / "config.txt").write_text("\n".join([*lines, "task.model.stack.block.attention.removed = 3"]) + "\n")
    with pytest.raises(ConfigError, match="removed: 3 → unset") as error:
        run_dir.check_same_recipe(config, allow_changed=False)
    assert "--allow-changed" in error.value.hint
    run_dir.check_same_recipe(config, allow_changed=True)


def test_a_newer_field_that_the_recipe_sets_is_a_change(tmp_path):
    text = config_text(resolve("tiny").config)
    line = "task.model.stack.block.attention.window = null\n"
    run_dir = _started(tmp_path, text.replace(line, ""))
    with pytest.raises(ConfigError, match="window: unset → 8"):
        run_dir.check_same_recipe(resolve("tiny", (), ["window=8"]).config, allow_changed=True)


def test_a_link_to_checkpoints_that_are_not_mounted_is_refused(tmp_path):
    """The run started again at step 0, and its metrics were replaced."""
    (tmp_path / "checkpoints").symlink_to(tmp_path / "mounted")
    run_dir = RunDir(tmp_path)
    with pytest.raises(MissingError, match="checkpoints is a broken link"):
        run_dir.has_checkpoints()
    (tmp_path / "mounted").mkdir()
    assert not run_dir.has_checkpoints()


def test_a_run_without_a_checkpoint_takes_any_recipe(tmp_path):
    (tmp_path / "config.txt").write_text(config_text(_alternating()))
    RunDir(tmp_path).check_same_recipe(resolve("tiny").config, allow_changed=False)


@pytest.mark.parametrize("name", ["lr=[1e-3]", "a*", "a?"])
def test_a_path_that_checkpoints_would_lose_their_arrays_in_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"has one of \* \? \["):
        RunDir(tmp_path / name / "run").create()
    assert not [*tmp_path.iterdir()]


def test_other_odd_names_are_usable(tmp_path):
    for name in ("a b", "a#b", "%s", "{a}", "é😀", "a\nb"):
        RunDir(tmp_path / name).create()
