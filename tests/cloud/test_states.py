"""Status, creation and waiting, on a fake cloud."""

from __future__ import annotations

import dataclasses
import time

import pytest

from paxcli.cloud import states
from paxcli.cloud.accelerators import find_accelerator
from paxcli.cloud.commands import Order, Target
from paxcli.cloud.gcloud import Gcloud
from paxcli.cloud.states import Phase
from paxcli.errors import ConfigError, RemoteError

TWO = Target("demo", "us-central2-b", "my-project", queued=True, slices=2)
ONE = Target("demo", "us-central2-b", "my-project")
ORDER = Order(TWO, find_accelerator("v4-16"))


class Clock:
    """A `sleep` that records pauses instead of sleeping."""

    def __init__(self):
        self.pauses = []

    def __call__(self, seconds: float) -> None:
        self.pauses.append(seconds)


def ensure(order=ORDER, recreate=False, gcloud=None, say=lambda _: None):
    return states.ensure(order, gcloud or Gcloud(Clock()), recreate, say, time.monotonic() + 60)


def test_waiting_reports_each_state_once_and_polls_less_and_less_often(cloud):
    cloud.write(states=[["CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", *["NEW_WORD"] * 5, "PROVISIONING", "ACTIVE"]])
    cloud.write(workers=2)
    clock, messages = Clock(), []
    gcloud = Gcloud(clock)
    ensure(gcloud=gcloud)
    status = states.wait(TWO, gcloud, time.monotonic() + 3600, messages.append)
    assert (status.phase, status.workers) == (Phase.READY, (2, 2))
    words = ["ACCEPTED", "WAITING_FOR_RESOURCES", "NEW_WORD", "PROVISIONING", "READY"]
    assert messages == [f"demo: {word}" for word in words]
    assert max(clock.pauses) > 3 * min(clock.pauses)


def test_a_failed_request_reports_googles_reason(cloud):
    cloud.write(states=[["CREATING", "FAILED"]])
    ensure()
    with pytest.raises(RemoteError, match=r"FAILED \(no quota\)") as error:
        states.wait(TWO, Gcloud(Clock()), time.monotonic() + 60, lambda _: None)
    assert "--recreate" in error.value.hint


def test_an_interrupted_request_may_have_reached_google(cloud):
    def run(self, argv, *_, **__):
        if "create" in argv:
            raise KeyboardInterrupt
        return Gcloud.run(self, argv)

    messages = []
    with pytest.raises(KeyboardInterrupt):
        ensure(gcloud=type("Interrupted", (Gcloud,), {"run": run})(Clock()), say=messages.append)
    assert messages[-1].endswith("To delete it: pax provision delete demo --zone us-central2-b")


def test_preemption_is_an_error_or_recreates(cloud):
    cloud.write(states=[["ACCEPTED", "SUSPENDED"], ["ACCEPTED", "ACTIVE"]])
    gcloud = Gcloud(Clock())
    ensure()
    with pytest.raises(RemoteError, match="preempted by Google Cloud"):
        states.wait(TWO, gcloud, time.monotonic() + 60, lambda _: None)
    assert states.wait(TWO, gcloud, time.monotonic() + 60, lambda _: None, ORDER).phase is Phase.READY
    assert len(cloud.calls_with("create")) == 2 and len(cloud.calls_with("delete", "--force")) == 1


def test_creating_twice_creates_once_and_waits_for_a_deletion(cloud):
    cloud.write(states=[["ACTIVE"]])
    ensure()
    assert ensure().phase is Phase.READY
    assert len(cloud.calls_with("create")) == 1
    cloud.write(
        resources={"demo": {"kind": "queued-resources", "slices": 2, "states": ["DELETING", "GONE"], "type": "v4-16"}}
    )
    ensure()
    assert len(cloud.calls_with("create")) == 2


@pytest.mark.parametrize(
    ("there", "wanted", "message"),
    [
        (ORDER, Order(TWO, find_accelerator("v4-32")), "already exists, as 2 x v4-16, not 2 x v4-32"),
        (ORDER, Order(dataclasses.replace(TWO, slices=3), find_accelerator("v4-16")), "as 2 x v4-16, not 3 x v4-16"),
        (ORDER, Order(ONE, find_accelerator("v4-16")), "as a queued resource"),
        (Order(ONE, find_accelerator("v4-8")), ORDER, "as a TPU VM"),
        (Order(ONE, find_accelerator("v4-8")), Order(ONE, find_accelerator("v4-128")), "as 1 x v4-8, not 1 x v4-128"),
    ],
)
def test_a_name_of_something_else_is_an_error(cloud, there, wanted, message):
    ensure(there)
    with pytest.raises(ConfigError, match=message) as error:
        ensure(wanted)
    assert "pax provision delete demo" in error.value.hint
    assert len(cloud.calls_with("create")) == 1 and not cloud.calls_with("delete")


def test_deleting_what_is_gone_is_no_error(cloud):
    ensure()
    cloud.play("queued-resources delete", "ERROR: UNAVAILABLE: connection reset", late=True)
    states.delete(TWO, Gcloud(Clock()))
    assert len(cloud.calls_with("delete")) == 2 and states.look(TWO, Gcloud()).phase is Phase.GONE


def test_what_may_not_be_deleted_is_not_gone(cloud):
    refused = "PERMISSION_DENIED: Permission denied on 'projects/p/locations/z/queuedResources/run-404'"
    cloud.play("delete run-404", f"ERROR: (gcloud.compute.tpus.queued-resources.delete) {refused}")
    with pytest.raises(RemoteError, match="PERMISSION_DENIED"):
        states.delete(Target("run-404", "us-central2-b", queued=True), Gcloud())


def test_waits_for_every_slice():
    ready = {"state": "READY", "networkEndpoints": [{}, {}]}
    assert states._combine_nodes([ready, ready]).workers == (2, 2)
    for node, phase in {
        "CREATING": Phase.WAITING,
        "REPAIRING": Phase.WAITING,
        "PREEMPTED": Phase.PREEMPTED,
        "TERMINATED": Phase.PREEMPTED,
        "DELETING": Phase.DELETING,
        "STOPPED": Phase.FAILED,
    }.items():
        status = states._combine_nodes([ready, {"state": node}])
        assert (status.phase, status.state) == (phase, f"slice 1: {node}")
    assert states._combine_nodes([ready | {"health": "UNHEALTHY_MAINTENANCE"}]).phase is Phase.WAITING


@pytest.mark.parametrize(
    "spec, nodes",
    [
        ({"nodeId": "my-node"}, {"my-node"}),
        ({"multisliceParams": {"nodeCount": 2, "nodeIdPrefix": "part"}}, {"part-0", "part-1"}),
        ({"multisliceParams": {"nodeCount": 2}}, {"demo-0", "demo-1"}),
    ],
)
def test_nodes_have_the_names_that_google_has(spec, nodes):
    """In Google's documentation, the name of a queued resource and that of its node differ."""

    class Named(Gcloud):
        def find(self, argv):
            if "queued-resources" in argv:
                return {"state": {"state": "ACTIVE"}, "tpu": {"nodeSpec": [spec]}}
            return {"state": "READY"} if argv[5] in nodes else None

    status = states.look(Target("demo", "us-central2-b", queued=True, slices=len(nodes)), Named())
    assert (status.phase, len(status.workers)) == (Phase.READY, len(nodes))


def test_a_timeout_is_an_error(cloud):
    cloud.write(states=[["ACCEPTED"]])
    ensure()
    with pytest.raises(RemoteError, match="still ACCEPTED") as error:
        states.wait(TWO, Gcloud(Clock()), time.monotonic() + 1, lambda _: None)
    assert "pax provision wait demo" in error.value.hint
