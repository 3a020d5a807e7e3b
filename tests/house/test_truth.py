"""Checks statements of the documentation: numbers, names, paths, links, pages, dependencies."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import pathlib
import re
import tomllib
from typing import Any

import pytest
import typer.main
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paxcli.cli.main import app

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
ENGINE = ("config", "mesh", "layers", "models", "optim", "inputs", "checkpoint", "metrics", "training")
CODE = re.compile(r"`([^`\n]+)`")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def constant(test: str, name: str) -> Any:
    """The literal that a house test assigns to `name`, or raises KeyError."""
    for node in ast.parse(read(f"tests/house/{test}.py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(ast.unparse(node.value).replace("ENGINE", repr(ENGINE)))
    raise KeyError(name)


def prose(path: pathlib.Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of each row of the table whose first heading is `heading`."""
    found = re.search(rf"^\| {heading} \|.*\n\|[-:| ]+\n((?:\|.*\n)+)", read(page), re.MULTILINE)
    assert found, f"{page} has no table that begins with `{heading}`"
    rows = (re.split(r"(?<!\\)\|", row.strip().strip("|")) for row in found[1].splitlines())
    return [[cell.strip() for cell in row] for row in rows]


# Numbers.


def test_contributing_states_the_limits_that_are_tested() -> None:
    text = " ".join(read("CONTRIBUTING.md").split())
    budgets = {"+".join(rooms): f"{lines:,}" for rooms, lines in constant("test_source", "BUDGETS").items()}
    stated = {"+".join(CODE.findall(row[0])): row[1] for row in table("CONTRIBUTING.md", "packages")}
    assert stated == budgets
    assert f"at most {constant('test_source', 'MAX_FILE_LINES')} lines" in text
    assert f"at most {constant('test_cli_surface', 'MAX_OPTIONS')} options" in text
    for verb, options in constant("test_cli_surface", "WIDE").items():
        assert f"`pax {' '.join(verb)}` ({options})" in text


def test_contributing_states_where_shapes_are_checked() -> None:
    (option,) = [
        option
        for option in PYPROJECT["tool"]["pytest"]["ini_options"]["addopts"]
        if option.startswith("--jaxtyping-packages=")
    ]
    packages = [name.removeprefix("paxcli.") for name in option.partition("=")[2].split(",")[:-1]]
    *names, last = (f"`{name}`" for name in packages)
    assert f"at run time in {', '.join(names)} and {last}" in " ".join(read("CONTRIBUTING.md").split())


def test_contributing_states_the_pinned_jax() -> None:
    pins = dict(re.findall(r"^jax==(\d+\.\d+).*; python_version (<|>=)", read("constraints.txt"), re.MULTILINE))
    assert pins, "constraints.txt pins one JAX for each Python"
    by_sign = {sign: version for version, sign in pins.items()}
    stated = f"{by_sign['<']} on 3.11, {by_sign['>=']} on 3.12 and 3.13"
    assert stated in " ".join(read("CONTRIBUTING.md").split())


def test_the_readme_has_the_range_of_the_steps_beside_maxtext() -> None:
    rows = json.loads(read("benchmarks/results/tpu_peers.json"))["rows"]
    ratios = [row["maxtext"]["seconds"] / row["pax"]["seconds"] for row in rows]
    assert f"[{min(ratios):.2f} to {max(ratios):.2f}](docs/compile.md#beside-maxtext)" in read("README.md")


def test_the_page_on_goodput_has_the_cadences_that_were_simulated() -> None:
    plans = json.loads(read("benchmarks/results/goodput_simulation.json"))["plans"]
    found = [
        [
            f"{plan['chips']:,}",
            f"{plan['bucket_alone']['bucket_interval_steps']} steps",
            str(plan["formula_interval_steps"]["bucket_alone_young"]),
            f"{plan['bucket_alone']['goodput']:.1%}".replace("%", " %"),
            f"{plan['two_tiers']['local_interval_steps']}, {plan['two_tiers']['bucket_interval_steps']}",
            f"{plan['two_tiers']['goodput']:.1%}".replace("%", " %"),
        ]
        for plan in plans
        if plan["chips"] >= 128
    ]
    assert [[row[0], *row[2:]] for row in table("docs/goodput.md", "chips")] == found


# Verbs and pages.


def verbs() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md"])
def test_each_verb_is_in_the_table(page: str) -> None:
    cells = " ".join(row[0] for row in table(page, "verb"))
    named = set(re.findall(r"`pax ([a-z-]+)", cells))
    assert {name for name, verb in verbs().items() if not verb.hidden} - named == set()
    assert named - set(verbs()) == set()


def test_the_index_lists_every_page() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in DOCS} - {"index.md"}
    of_verbs = {page for page in pages if page.startswith("verbs/")}
    linked = {name: set(re.findall(r"\]\(([\w/-]+\.md)\)", read(f"docs/{name}.md"))) for name in ("index", "cli")}
    assert pages - of_verbs - linked["index"] == set(), "docs/index.md links to every page"
    assert of_verbs - linked["cli"] == set(), "docs/cli.md links to the page of every verb"


def anchors(page: pathlib.Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_resolve(page: pathlib.Path) -> None:
    broken = []
    for link, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#]*)(?:#([^)]*))?\)", prose(page)):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{link}#{anchor}" if anchor else link)
    assert broken == []


# Paths and names.

TOP = ("paxcli/", "recipes/", "tests/", "benchmarks/", "docs/", ".ci/")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "pyproject.toml"], ids=lambda page: page.name)
def test_paths_that_are_named_exist(page: pathlib.Path) -> None:
    """Code spans that look like a path in the repository; `<name>` and `*` are placeholders."""
    named = {name for name in CODE.findall(prose(page)) if name.startswith(TOP) and not re.search(r"[<>*…{}\s]", name)}
    named |= {
        f"paxcli/{name}"
        for name in CODE.findall(prose(page))
        if re.fullmatch(r"[a-z_]+/[a-z_/]+\.py", name) and (ROOT / "paxcli" / name.split("/")[0]).is_dir()
    }
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_dotted_modules_that_are_named_exist() -> None:
    """`paxcli.…` in the prose of pages and in docstrings leads to a module, or to a name in one."""
    named = {name for page in PAGES for name in re.findall(r"\bpaxcli(?:\.\w+)+", page.read_text())}
    assert [name for name in sorted(named) if not resolves(name)] == []


def resolves(dotted: str) -> bool:
    words = dotted.split(".")
    for size in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:size]))
        except ModuleNotFoundError:
            continue
        for word in words[size:]:
            if not hasattr(found, word):
                return False
            found = getattr(found, word)
        return True
    return False


# Architecture.


def test_architecture_shows_the_order_that_import_linter_checks() -> None:
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    order = [{name.strip().removeprefix("paxcli.") for name in re.split(r"[|:]", layer)} for layer in layers]
    rows = [row[0] for row in table("docs/architecture.md", "package")]
    shown = [{re.sub(r"\.py$|/$", "", name) for name in CODE.findall(row)} for row in rows]
    shown = [{"pax_recipes" if name == "recipes" else name for name in row} for row in shown]
    assert shown == order


def test_the_reading_order_lists_each_file_of_the_engine_once() -> None:
    named = re.findall(r"^\| `(paxcli/[\w/]+\.py)`", read("docs/reading-order.md"), re.MULTILINE)
    files = {path for room in ENGINE for path in ROOT.glob(f"paxcli/{room}/**/*.py") if path.name != "__init__.py"}
    files |= {path for path in ROOT.glob("paxcli/*.py") if path.stem != "api"}
    wanted = {path.relative_to(ROOT).as_posix() for path in files}
    twice = sorted({name for name in named if named.count(name) > 1})
    difference = {"missing": sorted(wanted - set(named)), "extra": sorted(set(named) - wanted), "twice": twice}
    assert difference == {"missing": [], "extra": [], "twice": []}


# Dependencies.


def imported() -> set[str]:
    """Top-level modules that the package and the recipes import, also inside functions."""
    found = set()
    for path in [*ROOT.glob("paxcli/**/*.py"), *ROOT.glob("recipes/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                found |= {str(node.args[0].value)}  # by name, such as import_module("tokenizers")
    return found


def test_every_dependency_is_imported() -> None:
    modules: dict[str, set[str]] = {}
    for module, distributions in importlib.metadata.packages_distributions().items():
        for name in distributions:
            modules.setdefault(canonicalize_name(name), set()).add(module)
    modules["protobuf"] = {"google.protobuf"}  # `google` is a namespace that many distributions share
    used = imported()
    wanted = {canonicalize_name(Requirement(line).name) for line in PYPROJECT["project"]["dependencies"]}
    unused = [
        name
        for name in sorted(wanted)
        if not any(one == module or one.startswith(f"{module}.") for module in modules.get(name, set()) for one in used)
    ]
    assert unused == []


# Changelog.


def test_the_changelog_has_no_entry_twice() -> None:
    text = read("CHANGELOG.md")
    entries = [" ".join(entry.split()) for entry in re.findall(r"^- (.*(?:\n  .*)*)", text, re.MULTILINE)]
    assert [entry for entry in entries if entries.count(entry) > 1] == []
    _, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    assert sections[0].startswith("[Unreleased]")
    for section in sections:
        headings = re.findall(r"^### (.*)$", section, re.MULTILINE)
        kinds = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
        allowed = [name for name in kinds if name in headings]
        assert headings == allowed, f"{section.splitlines()[0]}: headings once each, in the order {allowed}"


def test_the_changelog_knows_the_version() -> None:
    assert re.search(rf"^## \[{re.escape(importlib.metadata.version('paxcli'))}\]", read("CHANGELOG.md"), re.MULTILINE)


# Glossary.


def identifiers() -> set[str]:
    """Classes, fields, functions, verbs, options, metrics and choices that a reader can type."""
    found = set(verbs())
    for path in ROOT.glob("paxcli/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            if isinstance(node, ast.arg):
                found.add(node.arg)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.-]+", node.value):
                found.add(node.value)
    return found


def test_names_of_ours_in_the_glossary_exist() -> None:
    known = identifiers()
    unknown = {}
    for path, rows in glossary().items():
        for row in rows:
            names = [re.split(r"[=: ]", name)[0].split(".")[-1].lstrip("-") for name in CODE.findall(row[0])]
            names = [name.removeprefix("pax ") for name in names]
            if missing := [name for name in names if name and name not in known]:
                unknown[f"{path}: {row[0]}"] = missing
    assert unknown == {}


def glossary() -> dict[str, list[list[str]]]:
    """The rows of each table of the glossary, by its section."""
    sections = re.split(r"^## ", read("docs/glossary.md"), flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        rows = [row for row in section.splitlines() if row.startswith("| ") and not row.startswith("| pax |")]
        found[section.splitlines()[0]] = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert sum(map(len, found.values())) >= 60
    return found


def test_fields_of_ours_in_the_glossary_are_fields() -> None:
    """`LanguageModel.model_dims` in the glossary is a field of that class."""
    classes = {}
    for path in ROOT.glob("paxcli/**/*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                classes[node.name] = module
    wrong = []
    for rows in glossary().values():
        for row in rows:
            for name, field in re.findall(r"`([A-Z]\w+)\.(\w+)`", row[0]):
                cls = getattr(importlib.import_module(classes[name]), name)
                fields = {one.name for one in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
                if field not in fields | set(inspect.signature(cls).parameters):
                    wrong.append(f"{name}.{field}")
    assert wrong == []
