"""Groups of parameters with an optimizer or a learning rate of their own."""

from __future__ import annotations

import dataclasses

from paxcli.config.configurable import Configurable
from paxcli.config.fields import PositiveFloat
from paxcli.optim.base import Optimizer
from paxcli.optim.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class ParameterGroup(Configurable):
    """Parameters that the learner updates in a way of their own (Pax: an entry of `MultiOptimizerLearner`).

    Attributes:
      regex: Regular expression. The group has the parameters whose path, such as `stack/layers/attention/query`,
        matches anywhere.
      optimizer: Their optimizer; None = the learner's, with a state of its own.
      learning_rate_multiplier: Multiplies the learner's `learning_rate`.
      schedule: Their schedule; None = the learner's.
    """

    regex: str
    optimizer: Optimizer | None = None
    learning_rate_multiplier: PositiveFloat = 1.0
    schedule: Schedule | None = None
