from __future__ import annotations

import pytest

from paxcli.config.resolve import resolve
from paxcli.profiling import apply, runner
from tests.training.runs import small

SETS = [option.removeprefix("--set=") for option in small(eval_interval_steps=None)]


@pytest.fixture
def recipe(monkeypatch):
    """A small recipe, on devices that pass for ones that support profile-guided scheduling."""
    monkeypatch.setattr(runner, "require_profile_device", lambda config: None)
    monkeypatch.setattr(apply, "require_profile_device", lambda config: None)
    return resolve("tiny", (), SETS).config
