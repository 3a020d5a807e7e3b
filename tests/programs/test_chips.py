"""The stated error of each TPU generation is that of the measured rows."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from paxcli.programs.chips import CHIPS
from tests.conftest import ROOT


def test_errors_are_the_largest_of_the_calibration() -> None:
    largest: dict[str, float] = defaultdict(float)
    for row in json.loads((ROOT / "benchmarks" / "results" / "calibration.json").read_text())["rows"]:
        generation = row["name"].rpartition(", ")[2].partition("-")[0]
        largest[generation] = max(largest[generation], abs(row["error"]))
    stated = {generation: chip.error for generation, chip in CHIPS.items() if chip.error is not None}
    assert stated == pytest.approx(dict(largest), abs=0.0051)  # in whole percent
