"""The messages that the page on troubleshooting explains are those of the source."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ROWS = re.findall(r"^\| ((?!message|--).*?) \| ", PAGE, re.MULTILINE)
MESSAGES = [message for row in ROWS for message in re.findall(r"`([^`]+)`", row)]


def strings() -> list[str]:
    """Every string of the package; a value in an f-string is `§`."""
    found = []
    for path in ROOT.glob("paxcli/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(one.value) if isinstance(one, ast.Constant) else "§" for one in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


STRINGS = strings()


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) >= 25


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_source(message: str) -> None:
    assert any(message in text for text in STRINGS)
