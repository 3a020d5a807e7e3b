"""Reads the state of TPU VMs and queued resources, creates them, and waits until they are ready.

States are those of the Cloud TPU API (`QueuedResourceState`, `Node`). An unknown state counts as waiting, since Google
adds and renames states (ACCEPTED became WAITING_FOR_RESOURCES).
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
from paxcli.cloud.gcloud import Gcloud, is_not_found
from paxcli.errors import ConfigError, RemoteError

_MIN_INTERVAL, _MAX_INTERVAL, _REMINDER = 2.0, 60.0, 600.0
_STOPPING_NODE = {"DELETING", "STOPPING", "STOPPED", "HIDING", "HIDDEN"}


class Phase(enum.StrEnum):
    """The phase of a TPU's life that a state belongs to."""

    READY = "ready"
    WAITING = "waiting"
    FAILED = "failed"
    PREEMPTED = "preempted"
    DELETING = "deleting"
    GONE = "gone"


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of a target at one time.

    Args:
      phase: The phase of `state`.
      state: The Cloud TPU API's name.
      detail: The reason, if any.
      workers: Number of TPU VMs of each slice, if they are running.
    """

    phase: Phase
    state: str
    detail: str = ""
    workers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.state + (f" ({self.detail})" if self.detail else "")


def nodes_of(described: Mapping[str, Any], name: str) -> list[str]:
    """The node names of a queued resource's slices; if pax did not create it, they may differ from its `name`."""
    nodes = []
    for spec in (described.get("tpu") or {}).get("nodeSpec") or []:
        if params := spec.get("multisliceParams"):
            nodes += [f"{params.get('nodeIdPrefix') or name}-{index}" for index in range(int(params["nodeCount"]))]
        else:
            nodes.append(spec.get("nodeId") or name)
    return nodes or [name]


def types_of(described: Mapping[str, Any]) -> set[str]:
    """The accelerator types of a queued resource's nodes, or of a TPU VM, as far as Google names them."""
    specs = (described.get("tpu") or {}).get("nodeSpec") or []
    nodes = [described, *(spec.get("node") or {} for spec in specs)]
    return {str(node["acceleratorType"]).rpartition("/")[2] for node in nodes if node.get("acceleratorType")}


def look(target: Target, gcloud: Gcloud) -> Status:
    """Queries the current state.

    Raises:
      RemoteError: gcloud failed.
    """
    return _status(target, gcloud.find(commands.describe(target)), gcloud)


def _status(target: Target, described: Mapping[str, Any] | None, gcloud: Gcloud) -> Status:
    if described is None:
        return Status(Phase.GONE, "not found")
    if not target.queued:
        return _combine_nodes([described])
    status = queued_status(described)
    if status.phase is not Phase.READY:
        return status
    nodes = [gcloud.find(commands.describe_node(target, node)) for node in nodes_of(described, target.name)]
    return _combine_nodes([node or {"state": "CREATING"} for node in nodes])


def queued_status(described: Mapping[str, Any]) -> Status:
    """The status of a queued resource, without its nodes. An active one is ready once its nodes are."""
    details = described.get("state") or {}
    state = str(details.get("state", "UNKNOWN"))
    if state == "ACTIVE":
        return Status(Phase.READY, state)
    if state == "FAILED":
        reason = ((details.get("failedData") or {}).get("error") or {}).get("message", "")
        return Status(Phase.FAILED, state, str(reason))
    if state in ("SUSPENDING", "SUSPENDED"):
        by_user = details.get("stateInitiator") == "USER"
        return Status(Phase.PREEMPTED, state, "by a user" if by_user else "preempted by Google Cloud")
    return Status(Phase.DELETING if state == "DELETING" else Phase.WAITING, state)


def _combine_nodes(nodes: list[Mapping[str, Any]]) -> Status:
    """The status of all slices: ready if all are, otherwise the worst one."""
    statuses = [_node_status(node, f"slice {index}: " if len(nodes) > 1 else "") for index, node in enumerate(nodes)]
    for phase in (Phase.PREEMPTED, Phase.FAILED, Phase.DELETING, Phase.WAITING):
        for status in statuses:
            if status.phase is phase:
                return status
    return Status(Phase.READY, "READY", workers=tuple(len(node.get("networkEndpoints") or [1]) for node in nodes))


def _node_status(node: Mapping[str, Any], where: str) -> Status:
    state, health = str(node.get("state", "UNKNOWN")), str(node.get("health", "HEALTHY"))
    if state in ("PREEMPTED", "TERMINATED"):
        return Status(Phase.PREEMPTED, f"{where}{state}", "preempted by Google Cloud")
    if state in _STOPPING_NODE:
        return Status(Phase.DELETING if state == "DELETING" else Phase.FAILED, f"{where}{state}")
    if state != "READY":
        return Status(Phase.WAITING, f"{where}{state}")
    if health not in ("HEALTHY", "HEALTH_UNSPECIFIED"):
        return Status(Phase.WAITING, f"{where}{state}, {health}", str(node.get("healthDescription", "")))
    return Status(Phase.READY, state)


def ensure(order: Order, gcloud: Gcloud, recreate: bool, say: Callable[[str], None], deadline: float) -> Status:
    """Creates the ordered target unless it exists, so a second call changes nothing.

    Raises:
      ConfigError: The name is that of a target of another kind, accelerator type or number of slices.
      RemoteError: gcloud failed, or the existing target failed or was preempted and `recreate` is False.
    """
    target = order.target
    described = gcloud.find(commands.describe(target))
    _check_kind(target, described, gcloud)
    status = _status(target, described, gcloud)
    if status.phase in (Phase.FAILED, Phase.PREEMPTED):
        if not recreate:
            raise not_usable(status, target)
        say(f"{target.name}: {status}; deleting and recreating it")
        delete(target, gcloud)
    elif status.phase not in (Phase.DELETING, Phase.GONE):
        _check_shape(order, described or {})
        say(f"{target.name} already exists: {status}")
        return status
    if status.phase is not Phase.GONE:
        _wait_for_phase(target, gcloud, {Phase.GONE}, say, deadline)
    # `tpu-vm create` returns when the TPU VM is running. A retry would fail with ALREADY_EXISTS, hence one try.
    say(f"creating {target.name}: {target.slices} x {order.accelerator.type} in {target.zone}")
    try:
        gcloud.run(commands.create(order), timeout=max(60.0, deadline - time.monotonic()), tries=1)
    except KeyboardInterrupt:
        say(f"Google may create it all the same. To delete it: pax provision delete {target.name} --zone {target.zone}")
        raise
    return look(target, gcloud)


def wait(
    target: Target, gcloud: Gcloud, deadline: float, say: Callable[[str], None], order: Order | None = None
) -> Status:
    """Waits until every slice is running. With an `order`, a target that is preempted meanwhile is recreated.

    Raises:
      RemoteError: The target failed, was preempted or deleted, or `time.monotonic()` has passed `deadline`.
    """
    final = {Phase.READY, Phase.FAILED, Phase.PREEMPTED, Phase.GONE}
    while True:
        status = _wait_for_phase(target, gcloud, final, say, deadline)
        if status.phase is Phase.READY:
            return status
        if order is None or status.phase is Phase.FAILED:
            raise not_usable(status, target)
        ensure(order, gcloud, True, say, deadline)


def _wait_for_phase(
    target: Target, gcloud: Gcloud, phases: set[Phase], say: Callable[[str], None], deadline: float
) -> Status:
    """Polls with growing intervals until one of `phases`; reports each change, and every 10 minutes without one."""
    interval = _MIN_INTERVAL
    reported, reported_at = "", time.monotonic()
    while True:
        status = look(target, gcloud)
        if str(status) != reported:
            say(f"{target.name}: {status}")
            reported, reported_at = str(status), time.monotonic()
            interval = _MIN_INTERVAL
        elif time.monotonic() - reported_at > _REMINDER:
            say(f"{target.name}: still {status}")
            reported_at = time.monotonic()
        if status.phase in phases:
            return status
        if time.monotonic() + interval > deadline:
            hint = f"The request stays active; wait again with: pax provision wait {target.name}"
            raise RemoteError(f"{target.name} is still {status} after the timeout.", hint)
        gcloud.sleep(interval * random.uniform(0.8, 1.2))
        interval = min(_MAX_INTERVAL, interval * 1.6)


def delete(target: Target, gcloud: Gcloud) -> None:
    """Deletes the target. One that does not exist is deleted: a lost answer may have hidden an earlier success."""
    try:
        gcloud.run(commands.delete(target), timeout=1800)
    except RemoteError as error:
        if not is_not_found(error):
            raise


def _check_kind(target: Target, described: Mapping[str, Any] | None, gcloud: Gcloud) -> None:
    """A queued resource and a TPU VM may have the same name; pax could then delete only one of them."""
    other = dataclasses.replace(target, queued=not target.queued, slices=1)
    # The TPU VM of a queued resource may have its name.
    if not (target.queued and described) and gcloud.find(commands.describe(other)) is not None:
        kind = "queued resource" if other.queued else "TPU VM"
        raise ConfigError(f"{target.name} already exists in {target.zone}, as a {kind}.", _other_name(target))


def _check_shape(order: Order, described: Mapping[str, Any]) -> None:
    target, slices, types = order.target, len(nodes_of(described, order.target.name)), types_of(described)
    if slices != target.slices or types - {order.accelerator.type}:
        exists = f"{slices} x {', '.join(sorted(types)) or 'a type that Google does not name'}"
        wanted = f"{target.slices} x {order.accelerator.type}"
        raise ConfigError(f"{target.name} already exists, as {exists}, not {wanted}.", _other_name(target))


def _other_name(target: Target) -> str:
    return f"Choose another name, or delete it first: pax provision delete {target.name} --zone {target.zone}"


def not_usable(status: Status, target: Target) -> RemoteError:
    """The error for a target that is not running."""
    hints = {
        Phase.FAILED: "Check zone, accelerator type and quota; pax provision create --recreate recreates it.",
        Phase.PREEMPTED: "pax provision create --recreate deletes and recreates it.",
        Phase.GONE: "It was deleted, or never created: pax provision list",
    }
    return RemoteError(f"{target.name} is {status}.", hints.get(status.phase, f"pax provision wait {target.name}"))
