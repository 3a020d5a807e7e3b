"""The size of the fault suite, and its counts."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator

import pytest

from tests.faults.processes import train


class Counts:
    """Counts of faults, by kind; printed as JSON at the end."""

    def __init__(self) -> None:
        self.numbers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, kind: str, what: str, number: int = 1, seconds: float | None = None) -> None:
        """Counts a fault; `seconds`: from the fault to the end of the process."""
        self.numbers[kind][what] += number
        if seconds is not None:
            self.seconds[f"{kind}, {what}"].append(seconds)

    def text(self) -> str:
        """One JSON object."""
        seconds = {
            kind: {"median": round(sorted(times)[len(times) // 2], 2), "max": round(max(times), 2)}
            for kind, times in self.seconds.items()
        }
        return json.dumps({"counts": self.numbers, "seconds": seconds})


_COUNTS = Counts()


@pytest.fixture
def counts() -> Counts:
    return _COUNTS


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The directory of an uninterrupted run of 60 steps, with checkpoints at 40, 50 and 60."""
    folder = tmp_path_factory.mktemp("straight")
    with train(folder) as process:
        code, report = process.end()
    assert code == 0, report
    return folder / "run"


@pytest.fixture
def scale(pytestconfig: pytest.Config):
    """The number of repetitions: the given one times `--faults-scale`, and at least 1."""
    return lambda number: max(1, round(number * pytestconfig.getoption("--faults-scale")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None] | None:
    if _COUNTS.numbers:
        terminalreporter.write_line(_COUNTS.text())
