"""Scope names are constants, which profiling and prediction share with the code that they name."""

from __future__ import annotations

import pathlib
import re

PAXCLI = pathlib.Path(__file__).resolve().parents[2] / "paxcli"


def test_every_scope_is_a_constant() -> None:
    literal = re.compile(r"""(named_scope|TraceAnnotation)\(f?["']""")
    files = [path for path in PAXCLI.rglob("*.py") if literal.search(path.read_text())]
    assert [str(path.relative_to(PAXCLI)) for path in files] == []
