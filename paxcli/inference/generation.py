"""The result of decoding one prompt."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Generation:
    """A continuation of one prompt.

    Attributes:
      prompt: The prompt.
      text: The continuation.
      ids: Its token ids.
      log_probs: The log-probability of each id, in nats.
      score: Their sum, or the length-normalized score of beam search.
      finish_reason: `eos`, `stop` at a stop text, `length` at the limit on tokens, or `given` for a given continuation.
      input: The name of the decode input that the prompt came from, if any.
      example_id: The example's number in that input.
    """

    prompt: str
    text: str
    ids: list[int]
    log_probs: list[float]
    score: float
    finish_reason: Literal["eos", "stop", "length", "given"]
    input: str | None = None
    example_id: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields that have a value: a line of `pax decode --json`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
