from __future__ import annotations

import time

import pytest

from paxcli.accelerators import find_accelerator
from paxcli.cloud import states
from paxcli.cloud.commands import Order, Target
from paxcli.cloud.gcloud import Gcloud
from paxcli.cloud.states import Phase
from paxcli.errors import MissingError, RemoteError

TWO = Target("demo", "us-central2-b", "my-project", queued=True, slices=2)
ONE = Target("demo", "us-central2-b", "my-project")
ORDER = Order(TWO, find_accelerator("v4-16"))


class Clock:
    """Remembers pauses instead of making them."""

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
    status = states.wait(TWO, gcloud, 3600, messages.append)
    assert (status.phase, status.workers) == (Phase.READY, (2, 2))
    words = ["ACCEPTED", "WAITING_FOR_RESOURCES", "NEW_WORD", "PROVISIONING", "READY"]
    assert messages == [f"demo: {word}" for word in words]
    assert max(clock.pauses) > 3 * min(clock.pauses)


def test_a_failed_request_reports_googles_reason(cloud):
    cloud.write(states=[["CREATING", "FAILED"]])
    ensure()
    with pytest.raises(RemoteError, match=r"FAILED \(no quota\)") as error:
        states.wait(TWO, Gcloud(Clock()), 60, lambda _: None)
    assert "--recreate" in error.value.hint


def test_preemption_is_an_error_or_recreates(cloud):
    cloud.write(states=[["ACCEPTED", "SUSPENDED"], ["ACCEPTED", "ACTIVE"]])
    gcloud = Gcloud(Clock())
    ensure()
    with pytest.raises(RemoteError, match="preempted by Google Cloud"):
        states.wait(TWO, gcloud, 60, lambda _: None)
    assert states.wait(TWO, gcloud, 60, lambda _: None, ORDER).phase is Phase.READY
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


def test_a_slice_that_is_not_there_yet_is_waited_for():
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


def test_time_runs_out_without_an_end(cloud):
    cloud.write(states=[["ACCEPTED"]])
    ensure()
    with pytest.raises(RemoteError, match="still ACCEPTED") as error:
        states.wait(TWO, Gcloud(Clock()), 1, lambda _: None)
    assert "pax provision wait demo" in error.value.hint


@pytest.mark.parametrize(
    ("stderr", "hint"),
    [
        ("Quota limit 'TPUV4PodPerProjectPerZone' has been exceeded. Limit: 0", "quota"),
        ("PERMISSION_DENIED: Permission 'tpu.nodes.create' denied on resource", "roles/tpu.admin"),
        ("Cloud TPU API has not been used in project 1 before or it is disabled", "gcloud services enable"),
        ('There is no more capacity in the zone "us-central2-b"', "--queued"),
        ("INVALID_ARGUMENT: Accelerator type v4-16 is not available", "accelerator-types list --zone=us-central2-b"),
    ],
)
def test_a_failure_has_gclouds_message_and_the_likely_cause(cloud, stderr, hint):
    cloud.play("create", f"WARNING: chatter\nERROR: (gcloud.compute.tpus.tpu-vm.create) {stderr}")
    with pytest.raises(RemoteError) as error:
        ensure(Order(ONE, find_accelerator("v4-16")))
    assert stderr in error.value.message and "chatter" not in error.value.message
    assert hint in error.value.hint and error.value.exit_code == 4


def test_a_transient_failure_is_retried_with_jitter(cloud):
    cloud.write(states=[["READY"]])
    ensure(Order(ONE, find_accelerator("v4-16")))
    cloud.play("describe", "ERROR: UNAVAILABLE: 503 backend", times=3)
    clock = Clock()
    assert states.look(ONE, Gcloud(clock)).phase is Phase.READY
    assert len(set(clock.pauses)) == 3
    cloud.play("describe", "ERROR: UNAVAILABLE: 503 backend", times=9)
    with pytest.raises(RemoteError, match="UNAVAILABLE"):
        states.look(ONE, Gcloud(clock))


def test_without_gcloud_the_error_has_the_install_page(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingError, match="gcloud") as error:
        states.look(ONE, Gcloud())
    assert "https://cloud.google.com/sdk" in error.value.hint
