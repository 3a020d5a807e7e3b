"""Scripts with random mistakes: a recipe or an error with a hint, soon, and nothing is run."""

from __future__ import annotations

import datetime
import os
import pathlib
import random
import re
import time

import pytest
import yaml

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.launch_to_recipe import convert
from paxcli.convert.maxtext.render import recipe_yaml, report
from paxcli.convert.maxtext.source import read_file
from paxcli.errors import ConfigError

SCRIPTS = sorted((pathlib.Path(__file__).parent / "scripts").glob("*.sh"))
CANARY = "pax-canary"
PIECES = [
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"; touch {CANARY};",
    "$X",
    "${Y:-1}",
    "'",
    '"',
    "\\",
    "\n",
    "${",
    "$((",
    "))",
]
PIECES += [
    "if [ -n $X ]; then ",
    " fi ",
    " && ",
    " || ",
    "<<EOF\n",
    "=",
    "==",
    " = ",
    "$@",
    "(",
    ")",
    "{",
    "}",
    "é\u2028",
    "\t",
    "=-1",
    "=1e400",
]
MOST_SECONDS = 2.0  # of this process's own time


def mutated(text: str, random_numbers: random.Random) -> str:
    """A script with a few characters or lines removed, doubled, swapped or inserted."""
    for _ in range(random_numbers.randint(1, 6)):
        at, length = random_numbers.randrange(len(text) + 1), random_numbers.randint(1, 30)
        end = min(at + length, len(text))
        match random_numbers.randrange(5):
            case 0:
                text = text[:at] + text[end:]
            case 1:
                text = text[:end] + text[at:]
            case 2:
                text = text[:at] + random_numbers.choice(PIECES) + text[at:]
            case 3:
                lines = text.split("\n")
                random_numbers.shuffle(lines)
                text = "\n".join(lines)
            case 4:
                text = text[:at] + text[at:end].swapcase() + text[end:]
    return text


def check(number: int, folder: pathlib.Path) -> bool:
    """Whether script number `number` gives a recipe."""
    random_numbers = random.Random(number)
    original = random_numbers.choice(SCRIPTS)
    script = folder / original.name
    script.write_text(mutated(original.read_text(), random_numbers), errors="surrogatepass")
    start, done = time.process_time(), False
    try:
        for launch in read_file(script).launches:
            words = {pair.key for pair in (*launch.pairs, *launch.overrides)} | {
                pair.key.lower() for pair in launch.overrides
            }
            converted = convert(launch, script.name, date=datetime.date(2025, 3, 1))
            recipe = yaml.safe_load(recipe_yaml(converted))
            assert recipe["set"] and report(converted)
            known = any(key in tables.known_keys() or tables.drop_reason(key) for key in words)
            assert known or not (launch.pairs or launch.diagnostics), f"no key of {sorted(words)} is known"
            done = True
    except ConfigError as error:
        assert error.hint and not re.search(r"[\x00-\x08\x1b]", error.message)
    assert time.process_time() - start < MOST_SECONDS, f"script {number} took long"
    assert not os.path.exists(CANARY)
    return done


@pytest.mark.parametrize(
    "numbers", [range(150), pytest.param(range(150, 3000), marks=pytest.mark.slow)], ids=["150", "3000"]
)
def test_mutated_scripts(numbers: range, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipes = sum(check(number, tmp_path) for number in numbers)
    assert len(numbers) / 5 < recipes < len(numbers)  # the mistakes are neither harmless nor fatal
