"""Every command in the documentation parses, and the quick ones run.

Commands follow `$ ` in `console` blocks. The commands of a block after `<!-- run -->` are run, in order. Those after
`<!-- cloud -->` need a cloud or a bucket, and are only parsed here; `tests/cloud` and `tests/training` run such
commands against an emulated cloud and bucket.
"""

from __future__ import annotations

import pathlib
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
import yaml

from paxcli.cli.main import app

ROOT = pathlib.Path(__file__).resolve().parents[2]


def pages_of(nav: Any) -> list[str]:
    """The pages of the navigation, in order: an entry is a page, or has a title and a page or more entries."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in nav for page in pages_of(entry if isinstance(entry, str) else [*entry.values()][0])]


NAV = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
PAGES = [ROOT / "README.md", *(ROOT / "docs" / page for page in NAV)]
BLOCK = re.compile(
    r"^(<!-- (?:run|cloud) -->\n)?```(\w*)(?: title=\"([^\"\n]*)\")?[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL
)

# Limits each training when the whole documentation is run, except where steps are traced.
BRIEF = ("num_train_steps=2", "eval_inputs.0.reset_for_eval=false", "eval_inputs.0.eval_loop_num_batches=1")


def commands(block: str) -> Iterator[list[str]]:
    """The arguments of each `pax` command of a console block."""
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            first, *arguments = shlex.split(line[2:])
            assert first == "pax", f"a console block holds pax commands only: {line}"
            yield arguments


def blocks(page: pathlib.Path, kind: str = "console") -> list[tuple[bool, str]]:
    """Each block of one kind: whether it is to be run, and its text."""
    return [("run" in mark, text) for mark, found, _, text in BLOCK.findall(page.read_text()) if found == kind]


WRITTEN = {(page.name, *words): words for page in PAGES for _, block in blocks(page) for words in commands(block)}
TO_RUN = {page: [words for run, block in blocks(page) if run for words in commands(block)] for page in PAGES}


def test_every_page_is_in_the_navigation_and_read() -> None:
    assert sorted(PAGES) == sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    assert sum(map(len, TO_RUN.values())) >= 5


@pytest.mark.parametrize("arguments", WRITTEN.values(), ids=[" ".join(words) for words in WRITTEN])
def test_a_command_parses(arguments: list[str]) -> None:
    command, path, rest = typer.main.get_command(app), ["pax"], list(arguments)
    while hasattr(command, "commands"):
        if rest and rest[0] not in command.commands and hasattr(command, "default"):
            rest.insert(0, command.default)
        assert rest and rest[0] in command.commands, f"`{' '.join([*path, *rest[:1]])}` is not a verb"
        path.append(rest.pop(0))
        command = command.commands[path[-1]]
    command.make_context(" ".join(path), rest).close()


@pytest.mark.parametrize("page", [page for page in PAGES if TO_RUN[page]], ids=lambda page: page.name)
def test_the_quick_commands_of_a_page_run(page: pathlib.Path, pax_here) -> None:
    for arguments in TO_RUN[page]:
        done = pax_here(*arguments)
        assert done.returncode == 0, f"pax {shlex.join(arguments)}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_whole_documentation_runs(pax, tmp_path: pathlib.Path) -> None:
    """All files and commands, in the order of the navigation and in one directory, with short trainings."""
    for page in PAGES:
        for mark, kind, title, text in BLOCK.findall(page.read_text()):
            if title:
                (tmp_path / title).write_text(text)
            for words in commands(text) if kind == "console" and "cloud" not in mark else ():
                shortened = words[0] == "train" and "--profile-steps" not in words
                shortened |= words[0] == "compile" and "--save" in words  # a step of the same training
                given = {word.partition("=")[0] for word in words}  # a value that is set twice is an error
                if "num_train_epochs" in given:  # the other way to set the length
                    given.add("num_train_steps")
                brief = [value for value in BRIEF if shortened and value.partition("=")[0] not in given]
                done = pax(*words, *(f"--set={value}" for value in brief))
                assert done.returncode == 0, f"{page.name}: pax {shlex.join(words)}\n{done.stdout}{done.stderr}"


def test_no_command_hides_in_another_kind_of_block() -> None:
    """A `pax` command in a shell block, or in one without a kind, would be checked by nothing."""
    shell = [(page.name, text) for page in PAGES for kind in ("", "sh", "bash") for _, text in blocks(page, kind)]
    assert len(shell) > 5 and [name for name, text in shell if re.search(r"^(\$ )?pax ", text, re.MULTILINE)] == []


def test_links_between_pages_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())]
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []
    docs = ROOT / "docs"  # all that the site has
    outside = [
        link for page, link in links if docs in page.parents and docs not in (page.parent / link).resolve().parents
    ]
    assert outside == []
