"""The source stays small, safe and named for what it does."""

from __future__ import annotations

import ast
import io
import pathlib
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAXCLI = sorted(ROOT.glob("paxcli/**/*.py"))
SOURCE = PAXCLI + sorted(ROOT.glob("recipes/**/*.py"))
ALL = SOURCE + sorted(ROOT.glob("tests/**/*.py")) + sorted(ROOT.glob("benchmarks/**/*.py"))

MAX_FILE_LINES = 500

# Budgets of code lines: blank lines, comments and docstrings do not count. Files at the top belong to the engine.
ENGINE = ("config", "mesh", "layers", "models", "optim", "inputs", "checkpoint", "metrics", "training")
BUDGETS = {
    ENGINE: 13_000,
    ("api", "cli"): 2_800,
    ("programs", "profiling"): 2_600,
    ("inference", "report"): 1_200,
    ("convert",): 4_200,
    ("cloud",): 1_500,
}
DRAWERS = {"utils", "util", "common", "core", "misc", "helpers", "helper"}
UNSAFE_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "jax.experimental.serialize_executable")
UNSAFE_CALLS = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "os.system", "os.popen"}


def lines(path: pathlib.Path) -> int:
    return len(path.read_text().splitlines())


def code_lines(path: pathlib.Path) -> int:
    """Lines that hold code: not blank, not only a comment, not part of a docstring."""
    text = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        for number in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    unused = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in unused]
    held = {number for token in tokens for number in range(token.start[0], token.end[0] + 1)}
    return len(held - docstrings)


def name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def is_unsafe(module: str) -> bool:
    return f"{module}.".startswith(tuple(f"{one}." for one in UNSAFE_MODULES))


def unsafe(node: ast.AST) -> str | None:
    """The forbidden call or import that a node makes, or None."""
    match node:
        case ast.Import(names=names):
            return next((f"import {n.name}" for n in names if is_unsafe(n.name)), None)
        case ast.ImportFrom(module=str(module)) if is_unsafe(module):
            return f"from {module} import"
        case ast.Call(func=func, keywords=keywords):
            if ast.unparse(func) in UNSAFE_CALLS:
                return ast.unparse(func)
            if any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in keywords):
                return "shell=True"
            if any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in keywords):
                return "allow_pickle=True"
    return None


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from jax.experimental.serialize_executable import serialize",
        "yaml.load(f)",
        "run('ls', shell=True)",
        "np.load(f, allow_pickle=1)",
    ],
)
def test_the_check_sees_what_is_unsafe(source: str) -> None:
    assert any(unsafe(node) for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize("path", SOURCE, ids=name)
def test_no_unsafe_call(path: pathlib.Path) -> None:
    found = [f"line {node.lineno}: {what}" for node in ast.walk(ast.parse(path.read_text())) if (what := unsafe(node))]
    assert found == []


def test_no_file_is_long() -> None:
    assert [f"{name(path)}: {lines(path)} lines" for path in ALL if lines(path) > MAX_FILE_LINES] == []


def room(path: pathlib.Path) -> str:
    """The room of a file of paxcli: its folder, or for a file at the top its name, which is `api` or the engine's."""
    folder, *rest = path.relative_to(ROOT / "paxcli").parts
    return folder if rest else path.stem if path.stem == "api" else ENGINE[0]


@pytest.mark.parametrize("rooms", BUDGETS, ids="+".join)
def test_a_group_of_rooms_keeps_its_budget(rooms: tuple[str, ...]) -> None:
    used = {one: sum(code_lines(path) for path in PAXCLI if room(path) == one) for one in rooms}
    assert sum(used.values()) <= BUDGETS[rooms], f"{sum(used.values())} code lines of {BUDGETS[rooms]}: {used}"


def test_every_room_has_a_budget() -> None:
    assert {room(path) for path in PAXCLI} - {one for rooms in BUDGETS for one in rooms} == set()


def test_no_drawers() -> None:
    parts = {path: {path.stem, *path.relative_to(ROOT).parts[:-1]} for path in ALL}
    assert [name(path) for path, words in parts.items() if words & DRAWERS] == []


def test_every_file_says_what_it_is_for() -> None:
    texts = {path: path.read_text() for path in SOURCE}
    assert [name(path) for path, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))] == []
