"""When checkpoints are saved, and which are kept."""

from __future__ import annotations

import dataclasses
import datetime
import re
from typing import Literal

from paxcli.config.configurable import Configurable
from paxcli.config.fields import PositiveFloat, PositiveInt, Steps
from paxcli.errors import ConfigError

OnCorrupt = Literal["refuse", "previous"]

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclasses.dataclass
class Checkpoint(Configurable):
    """Checkpoint interval and retention.

    Args:
      save_interval_steps: Steps between checkpoints.
      save_max_to_keep: How many of the most recent checkpoints to keep; None = all.
      save_keep_interval_steps: Also keep every checkpoint whose step is a multiple of this.
      save_keep_interval_duration: Also keep one checkpoint per interval of time, such as "12h".
      async_save: Whether to write in the background while training continues.
      on_corrupt: What to do when the newest checkpoint is damaged: refuse to resume, or resume from the newest earlier
        one that is sound. Damaged ones are renamed to STEP.damaged and never deleted.
      local_directory: A directory on a disk of each machine for checkpoints between those of the run directory. A run
        resumes from the newest that is complete in either place; None = the run directory only.
      local_save_interval_steps: Steps between checkpoints in `local_directory`, which keeps the latest two.
      storage_timeout_seconds: How long operations on a bucket that fails are repeated before the run ends with exit
        code 4.
    """

    save_interval_steps: Steps = 1000
    save_max_to_keep: PositiveInt | None = 10
    save_keep_interval_steps: Steps | None = None
    save_keep_interval_duration: str | None = None
    async_save: bool = True
    on_corrupt: OnCorrupt = "refuse"
    local_directory: str | None = None
    local_save_interval_steps: Steps | None = None
    storage_timeout_seconds: PositiveFloat = 600.0

    def validate(self) -> None:
        """Raises ConfigError when a duration cannot be read, or half of the local tier is missing."""
        if (self.local_directory is None) != (self.local_save_interval_steps is None):
            fields = "checkpoint.local_directory and checkpoint.local_save_interval_steps"
            raise ConfigError(f"{fields} need each other.", "Set both, or none of them.")
        if self.save_keep_interval_duration is not None:
            parse_duration(self.save_keep_interval_duration)


def parse_duration(text: str) -> datetime.timedelta:
    """Parses `30s`, `15m`, `2h`, `1d`, or a number of seconds.

    Raises:
      ConfigError: Anything else, or a duration of zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", str(text))
    if match and (duration := datetime.timedelta(**{_UNITS[match[2] or "s"]: float(match[1])})):
        return duration
    raise ConfigError(f"`{text}` is not a duration.", "Write a number and a unit: 30s, 15m, 2h or 1d.")
