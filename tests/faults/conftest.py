"""The size of the fault suite, and the table of its counts."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator

import pytest

from tests.faults.processes import train


class Counts:
    """What was done to runs and how each ended; printed at the end as the table of docs/reliability.md."""

    def __init__(self) -> None:
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, fault: str, outcome: str, seconds: float | None = None) -> None:
        """Counts a fault; `seconds`: from the fault to the end of the process."""
        self.outcomes[fault][outcome] += 1
        if seconds is not None:
            self.seconds[fault].append(seconds)

    def markdown(self) -> str:
        """A row for each kind of fault."""
        rows = ["| fault | number | outcome | seconds to the end: median, p95, largest |", "|---|---|---|---|"]
        for fault, outcomes in self.outcomes.items():
            listed = [f"{number} × {outcome}" for outcome, number in sorted(outcomes.items())]
            ended = next(iter(outcomes)) if len(outcomes) == 1 else ", ".join(listed)
            times = self.seconds[fault]
            shown = (
                ", ".join(f"{x:.1f}" for x in (percentile(times, 0.5), percentile(times, 0.95), max(times)))
                if times
                else ""
            )
            rows.append(f"| {fault} | {outcomes.total()} | {ended} | {shown} |")
        return "\n".join(rows)


def percentile(times: list[float], share: float) -> float:
    """The smallest of `times` that this share of them does not exceed."""
    return sorted(times)[math.ceil(share * len(times)) - 1]


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
    if _COUNTS.outcomes:
        terminalreporter.write_line("")
        terminalreporter.write_line(_COUNTS.markdown())
