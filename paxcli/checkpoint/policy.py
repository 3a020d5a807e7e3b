"""When checkpoints are written and which of them are kept."""

from __future__ import annotations

import dataclasses
import datetime
import re

from paxcli.config.configurable import Configurable
from paxcli.config.fields import PositiveInt, Steps
from paxcli.errors import ConfigError

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclasses.dataclass
class Checkpoint(Configurable):
    """Cadence and retention.

    Args:
      save_interval_steps: A checkpoint is written whenever the step is a multiple of this.
      save_max_to_keep: The most recent ones that are kept; None keeps all.
      save_keep_interval_steps: Besides, every step that is a multiple of this is kept.
      save_keep_interval_duration: Besides, one for each such span of time is kept, such as "12h".
      async_save: Write in the background, while training goes on.
    """

    save_interval_steps: Steps = 1000
    save_max_to_keep: PositiveInt | None = 10
    save_keep_interval_steps: Steps | None = None
    save_keep_interval_duration: str | None = None
    async_save: bool = True

    def validate(self) -> None:
        """Raises ConfigError when a field makes no sense."""
        if self.save_keep_interval_duration is not None:
            parse_duration(self.save_keep_interval_duration)


def parse_duration(text: str) -> datetime.timedelta:
    """`30s`, `15m`, `2h`, `1d`, or a bare number of seconds.

    Raises:
      ConfigError: Anything else, or a duration of nothing.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", str(text))
    duration = datetime.timedelta(**{_UNITS[match[2] or "s"]: float(match[1])}) if match else datetime.timedelta(0)
    if not duration:
        raise ConfigError(f"`{text}` is not a duration.", "Write a number and a unit: 30s, 15m, 2h or 1d.")
    return duration
