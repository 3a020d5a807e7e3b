"""What state TPU VMs are in, and waiting for the one that is wanted.

States: the enumerations of the Cloud TPU API, `QueuedResourceState` and `Node`. A state that is not known here is
one to wait in, since Google adds and renames them (ACCEPTED became WAITING_FOR_RESOURCES).
"""

from __future__ import annotations

import dataclasses
import enum
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from paxcli.cloud import commands
from paxcli.cloud.commands import Order, Target
from paxcli.cloud.gcloud import Gcloud
from paxcli.errors import RemoteError

_FIRST_LOOK, _LONGEST_LOOK, _SILENCE = 2.0, 60.0, 600.0
_DYING_NODE = {"DELETING", "STOPPING", "STOPPED", "HIDING", "HIDDEN"}


class Phase(enum.StrEnum):
    """What a state means for who waits."""

    READY = "ready"
    WAITING = "waiting"
    FAILED = "failed"
    PREEMPTED = "preempted"
    DELETING = "deleting"
    GONE = "gone"


@dataclasses.dataclass(frozen=True)
class Status:
    """One look.

    Args:
      phase: What it means.
      state: Google's word for it.
      detail: The reason, where there is one.
      workers: TPU VMs of each slice, as Google counts them; known when they run.
    """

    phase: Phase
    state: str
    detail: str = ""
    workers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.state + (f" ({self.detail})" if self.detail else "")


def slices_of(described: Mapping[str, Any]) -> int:
    """How many slices a queued resource asked for."""
    specs = (described.get("tpu") or {}).get("nodeSpec") or []
    counts = [int((spec.get("multisliceParams") or {}).get("nodeCount", 0)) for spec in specs]
    return max([len(specs), *counts, 1])


def look(target: Target, gcloud: Gcloud) -> Status:
    """The state now.

    Raises:
      RemoteError: gcloud failed.
    """
    described = gcloud.find(commands.describe(target))
    if described is None:
        return Status(Phase.GONE, "not there")
    if not target.queued:
        return _slices([described])
    status = queued_status(described)
    if status.phase is not Phase.READY:
        return status
    nodes = [gcloud.find(commands.describe_node(target, target.node(index))) for index in range(target.slices)]
    return _slices([node or {"state": "CREATING"} for node in nodes])


def queued_status(described: Mapping[str, Any]) -> Status:
    """Of a queued resource by itself; when it is active its nodes say the rest."""
    held = described.get("state") or {}
    state = str(held.get("state", "UNKNOWN"))
    if state == "ACTIVE":
        return Status(Phase.READY, state)
    if state == "FAILED":
        reason = ((held.get("failedData") or {}).get("error") or {}).get("message", "")
        return Status(Phase.FAILED, state, str(reason))
    if state in ("SUSPENDING", "SUSPENDED"):
        by_user = held.get("stateInitiator") == "USER"
        return Status(Phase.PREEMPTED, state, "by a user" if by_user else "taken back by Google Cloud")
    return Status(Phase.DELETING if state == "DELETING" else Phase.WAITING, state)


def _slices(nodes: list[Mapping[str, Any]]) -> Status:
    """Of all slices together: that of the one which is worst off."""
    each = [_node(node, f"slice {index}: " if len(nodes) > 1 else "") for index, node in enumerate(nodes)]
    for phase in (Phase.PREEMPTED, Phase.FAILED, Phase.DELETING, Phase.WAITING):
        for status in each:
            if status.phase is phase:
                return status
    return Status(Phase.READY, "READY", workers=tuple(len(node.get("networkEndpoints") or [1]) for node in nodes))


def _node(node: Mapping[str, Any], where: str) -> Status:
    state, health = str(node.get("state", "UNKNOWN")), str(node.get("health", "HEALTHY"))
    if state in ("PREEMPTED", "TERMINATED"):
        return Status(Phase.PREEMPTED, f"{where}{state}", "taken back by Google Cloud")
    if state in _DYING_NODE:
        return Status(Phase.DELETING if state == "DELETING" else Phase.FAILED, f"{where}{state}")
    if state != "READY":
        return Status(Phase.WAITING, f"{where}{state}")
    if health not in ("HEALTHY", "HEALTH_UNSPECIFIED"):
        return Status(Phase.WAITING, f"{where}{state}, {health}", str(node.get("healthDescription", "")))
    return Status(Phase.READY, state)


def ensure(order: Order, gcloud: Gcloud, recreate: bool, say: Callable[[str], None], deadline: float) -> Status:
    """Creates what is ordered unless it is there already, so that a second call is harmless.

    Raises:
      RemoteError: gcloud failed, or what is there has failed or was preempted and `recreate` is not wanted.
    """
    target = order.target
    status = look(target, gcloud)
    if status.phase in (Phase.FAILED, Phase.PREEMPTED):
        _require(status, target, recreate)
        say(f"{target.name}: {status}; deleting it to create it anew")
        gcloud.run(commands.delete(target), timeout=1800)
        status = Status(Phase.DELETING, "DELETING")
    if status.phase is Phase.DELETING:
        _until(target, gcloud, {Phase.GONE}, say, deadline)
        status = Status(Phase.GONE, "not there")
    if status.phase is not Phase.GONE:
        say(f"{target.name} is there already: {status}")
        return status
    # Creating a TPU VM lasts until it runs. What is sent twice would say it exists, so nothing is.
    say(f"creating {target.name}: {target.slices} x {order.accelerator.type} in {target.zone}")
    gcloud.run(commands.create(order), timeout=max(60.0, deadline - time.monotonic()), tries=1)
    return look(target, gcloud)


def wait(
    target: Target,
    gcloud: Gcloud,
    timeout: float,
    say: Callable[[str], None],
    order: Order | None = None,
) -> Status:
    """Waits until every slice runs. With an `order`, what is preempted on the way is created anew.

    Raises:
      RemoteError: It failed, was preempted, is gone, or `timeout` seconds have passed.
    """
    deadline = time.monotonic() + timeout
    final = {Phase.READY, Phase.FAILED, Phase.PREEMPTED, Phase.GONE}
    while True:
        status = _until(target, gcloud, final, say, deadline)
        if status.phase is Phase.READY:
            return status
        if order is None or status.phase is Phase.FAILED:
            _require(status, target, recreate=False)
        assert order is not None
        ensure(order, gcloud, True, say, deadline)


def _until(target: Target, gcloud: Gcloud, phases: set[Phase], say: Callable[[str], None], deadline: float) -> Status:
    """Looks again and again, ever less often; says each change, and from time to time that there is none."""
    interval, said, said_at = _FIRST_LOOK, "", time.monotonic()
    while True:
        status = look(target, gcloud)
        if str(status) != said:
            say(f"{target.name}: {status}")
            said, said_at, interval = str(status), time.monotonic(), _FIRST_LOOK
        elif time.monotonic() - said_at > _SILENCE:
            say(f"{target.name}: still {status}")
            said_at = time.monotonic()
        if status.phase in phases:
            return status
        if time.monotonic() + interval > deadline:
            hint = f"It goes on by itself; wait again with: pax provision wait {target.name}"
            raise RemoteError(f"{target.name} is still {status} when time is up.", hint)
        gcloud.sleep(interval * random.uniform(0.8, 1.2))
        interval = min(_LONGEST_LOOK, interval * 1.6)


def _require(status: Status, target: Target, recreate: bool) -> None:
    if recreate:
        return
    hints = {
        Phase.FAILED: "See the zone, the type and the quota; pax provision create with --recreate makes it anew.",
        Phase.PREEMPTED: "pax provision create with --recreate deletes it and creates it anew.",
        Phase.GONE: "It was deleted, or was never created: pax provision list",
    }
    raise RemoteError(f"{target.name} is {status}.", hints[status.phase])
