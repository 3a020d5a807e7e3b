"""Prompts written in the recipe."""

from __future__ import annotations

import dataclasses

from paxcli.config.configurable import Configurable


@dataclasses.dataclass(kw_only=True)
class Prompts(Configurable):
    """What `pax decode` continues when it is given no prompt.

    Attributes:
      prompts: The texts.
    """

    prompts: list[str] = dataclasses.field(default_factory=list)
