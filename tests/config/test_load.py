from __future__ import annotations

import contextvars
import pathlib

import fiddle as fdl
import pytest
from etils.epath import backend
from etils.epath.testing import mock_epath

import paxcli as pax
from paxcli.cli.main import app
from paxcli.cli.output import run
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


@pytest.mark.parametrize("decorator", ["@recipe()", "@recipe", '@recipe("Only")'])
def test_the_only_recipe_of_a_file_needs_no_name(decorator: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("import fiddle as fdl\nfrom paxcli.config.recipe import recipe\nimport near\n\n"
                    f"{decorator}\ndef only():\n    return fdl.Config(near.f, 7)\n")  # fmt: skip
    (tmp_path / "near.py").write_text("def f(x):\n    return x\n")
    assert fdl.build(load(str(path)).config) == 7


@pytest.mark.parametrize(
    ("target", "message", "hint"),
    [
        ("tinny", "no recipe `tinny`", "`tiny`"),
        ("runs/tinny", "no recipe or run directory `runs/tinny`", None),
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


def test_modules_beside_a_recipe_are_its_own_and_imported_again(tmp_path: pathlib.Path) -> None:
    recipe = """
from paxcli.config.recipe import recipe
from pax_recipes.tiny import tiny
import parts

@recipe()
def mine():
    config = tiny()
    config.task.train.learner.learning_rate = parts.RATE
    return config
"""
    for name, rate in (("a", 0.125), ("b", 0.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(recipe)
        (tmp_path / name / "parts.py").write_text(f"RATE = {rate}")

    def rates() -> list[float]:
        found = (load(str(tmp_path / name / "mine.py")).config for name in ("a", "b", "a"))
        return [config.task.train.learner.learning_rate for config in found]

    assert rates() == [0.125, 0.5, 0.125]
    (tmp_path / "a" / "parts.py").write_text("RATE = 0.25  # edited")
    assert rates() == [0.25, 0.5, 0.25]


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


def test_a_bare_word_is_a_recipe_or_else_a_run_directory(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "tiny"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text("recipe: tiny\nset: {num_layers: 3}\n")
    layers = {
        name: resolve(name).values["task.model.num_layers"].value for name in ("mine", "./mine", "./tiny", "tiny")
    }
    assert layers == {"mine": 3, "./mine": 3, "./tiny": 3, "tiny": 4}


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


@pytest.fixture
def run_with_code(tmp_path):
    """A run directory whose recipe is a function in a file, through another YAML recipe; running it leaves a mark."""
    (tmp_path / "code.py").write_text(
        "import pathlib\n"
        "from paxcli.config.recipe import recipe\n"
        "from pax_recipes.tiny import tiny\n"
        "pathlib.Path(__file__).with_name('ran').touch()\n"
        "@recipe()\n"
        "def mine():\n"
        "    return tiny()\n"
    )
    (tmp_path / "base.yaml").write_text("recipe: ./code.py:mine\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("recipe: ../base.yaml\nset: {num_layers: 3}\n")
    return tmp_path / "run"


def test_code_that_a_run_directory_names_needs_consent(run_with_code, caplog):
    ran = run_with_code.parent / "ran"
    for target in (run_with_code, run_with_code / "recipe.yaml"):
        with pytest.raises(ConfigError, match=r"run/recipe.yaml names Python code: .*/code.py:mine") as caught:
            pax.load(target)
        assert "--trust-code" in caught.value.hint and not ran.exists()
    with pytest.raises(ConfigError, match="names Python code"):
        _ = pax.Run(run_with_code).config
    assert not ran.exists()
    assert pax.load(run_with_code, trust_code=True).config.task.model.num_layers == 3
    assert ran.exists() and "Running Python code that" in caplog.text
    with pytest.raises(ConfigError, match="names Python code"):  # consent was for one call
        pax.load(run_with_code)


def test_code_that_the_user_names_needs_none(run_with_code):
    assert pax.load(run_with_code.parent / "base.yaml").config.task.model.num_layers == 4
    assert pax.load(f"{run_with_code.parent / 'code.py'}:mine").config.task.model.num_layers == 4


def test_on_the_command_line_code_is_refused_unless_trusted(run_with_code, capsys, monkeypatch):
    def pax_command(*arguments: str) -> int:
        return contextvars.copy_context().run(run, app, [*arguments, str(run_with_code)])

    for verb in (["train"], ["eval"], ["decode"], ["recipes", "show"], ["inspect-input"]):
        assert pax_command(*verb) == 2
        assert "pax --trust-code" in capsys.readouterr().err
    assert pax_command("--trust-code", "recipes", "show", "--json") == 0
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda question, err: "names Python code" in question)
    assert pax_command("recipes", "show", "--json") == 0
