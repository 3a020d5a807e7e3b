from __future__ import annotations

import pathlib

import fiddle as fdl
import pytest
from etils.epath import backend
from etils.epath.testing import mock_epath

from paxcli.config.load import find_entry, load
from paxcli.config.paths import resolve_path
from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError


@pytest.mark.parametrize("name", ["tiny-synthetic", "tiny_synthetic"])
def test_by_name(name: str) -> None:
    from pax_recipes.tiny import tiny_synthetic

    assert load(name).config == tiny_synthetic()


def test_from_a_file(mine: pathlib.Path) -> None:
    loaded = load(f"{mine}:shared_4")
    assert (loaded.name, loaded.pax_name, loaded.target) == ("shared-4", "Pax4Small", f"{mine}:shared_4")
    built = fdl.build(loaded.config)
    assert built.model.head is built.model.tied
    assert load(loaded.target).config is not loaded.config


def test_the_only_recipe_of_a_file_needs_no_name(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("import fiddle as fdl\nfrom paxcli.config.recipe import recipe\nimport near\n\n"
                    "@recipe()\ndef only():\n    return fdl.Config(near.f, 7)\n")  # fmt: skip
    (tmp_path / "near.py").write_text("def f(x):\n    return x\n")
    assert fdl.build(load(str(path)).config) == 7


@pytest.mark.parametrize(
    ("target", "message", "hint"),
    [
        ("tinny", "no recipe `tinny`", "`tiny`"),
        ("{mine}", "4 recipes", "mine.py:small"),
        ("{mine}:smal", "no recipe `smal`", "`small`"),
        ("{mine}:broken", r"mine\.py:\d+: recipe `broken` fails: .*num_layer", None),
        ("{mine}:_hidden", "no recipe `_hidden`", None),
        ("/nowhere/x.py:f", "/nowhere/x.py", None),
    ],
)
def test_mistakes(mine: pathlib.Path, target: str, message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(target.format(mine=mine))
    assert hint is None or hint in (caught.value.hint or "")


def test_the_line_of_a_mistake_is_the_recipes_own(mine: pathlib.Path) -> None:
    line = next(i for i, text in enumerate(mine.read_text().splitlines(), 1) if "num_layer = 3" in text)
    with pytest.raises(ConfigError, match=rf"mine\.py:{line}:"):
        load(f"{mine}:broken")


def test_a_class_name_of_pax(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pax_extra_three.py").write_text("@recipe('C4Foo')\ndef c4_foo():\n    pass\n")
    metadata = tmp_path / "pax_extra_three-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: pax_extra_three\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pax.recipes]\nx = pax_extra_three\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_entry("C4Foo").name == find_entry("tasks.lm.params.c4.C4Foo").name == "c4-foo"
    with pytest.raises(ConfigError) as caught:
        find_entry("C4Fo")
    assert "`C4Foo`" in (caught.value.hint or "")


def test_a_folder_of_a_bucket_is_none_of_this_machine() -> None:
    assert str(resolve_path("gs://bucket/run")) == "gs://bucket/run"
    assert resolve_path("~/run") == pathlib.Path.home() / "run"


def test_the_recipe_of_a_run_in_a_bucket(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("recipe: tiny\nset: {num_layers: 3}\n")

    def here(original, path, *args):
        return original(str(path).replace("gs://bucket", str(tmp_path)), *args)

    monkeypatch.setattr("etils.epath.gpath._is_tf_installed", lambda: False)
    monkeypatch.setattr("etils.epath.gpath._PREFIX_TO_BACKEND", {"gs": backend.os_backend, None: backend.os_backend})
    with mock_epath(exists=here, isdir=here, open=here):
        resolved = resolve("gs://bucket/run")
    assert resolved.values["task.model.num_layers"].value == 3
    assert resolved.target == "gs://bucket/run/recipe.yaml"
