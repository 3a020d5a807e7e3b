"""Save interval and retention policy."""

from __future__ import annotations

import datetime

import pytest

from paxcli.checkpoint.policy import Checkpoint, parse_duration
from paxcli.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("15m", 900), ("2h", 7200), ("1d", 86400), ("90", 90), ("1.5h", 5400)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == datetime.timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "h", "12 weeks", "-1h", "0h", "1h30m"])
def test_invalid_durations(text):
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration(text)


def test_the_duration_is_validated():
    with pytest.raises(ConfigError, match="not a duration"):
        Checkpoint(save_keep_interval_duration="soon").validate()
    Checkpoint(save_max_to_keep=None, save_keep_interval_duration="12h").validate()
