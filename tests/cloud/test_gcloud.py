"""Errors and retries of gcloud commands."""

from __future__ import annotations

import pytest

from paxcli.cloud import commands
from paxcli.cloud.commands import Target
from paxcli.cloud.gcloud import Gcloud, read_setting
from paxcli.errors import MissingError, RemoteError

DESCRIBE = commands.describe(Target("demo", "us-central2-b", "my-project"))


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
    cloud.play("describe", f"WARNING: chatter\nERROR: (gcloud.compute.tpus.tpu-vm.describe) {stderr}")
    with pytest.raises(RemoteError) as error:
        Gcloud().run(DESCRIBE)
    assert stderr in error.value.message and "chatter" not in error.value.message
    assert hint in error.value.hint and error.value.exit_code == 4


def test_a_transient_failure_is_retried_with_jitter(cloud):
    cloud.write(resources={"demo": {"kind": "tpu-vm", "slices": 1, "states": ["READY"], "type": "v4-16"}})
    cloud.play("describe", "ERROR: UNAVAILABLE: 503 backend", times=3)
    pauses = []
    assert Gcloud(pauses.append).json(DESCRIBE)["state"] == "READY"
    assert len(set(pauses)) == 3
    cloud.play("describe", "ERROR: UNAVAILABLE: 503 backend", times=9)
    with pytest.raises(RemoteError, match="UNAVAILABLE"):
        Gcloud(pauses.append).run(DESCRIBE)


@pytest.mark.parametrize("text", ["garbage", "#!/there/is/no/sh\n"])
def test_a_gcloud_that_cannot_be_started_is_missing(cloud, text):
    (cloud.root / "bin" / "gcloud").write_text(text)
    for call in (lambda: Gcloud().run(["gcloud", "info"]), lambda: read_setting("compute/zone")):
        with pytest.raises(MissingError, match="bin/gcloud cannot be started") as error:
            call()
        assert "cloud.google.com/sdk" in error.value.hint


def test_without_gcloud_the_error_has_the_install_page(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingError, match="gcloud") as error:
        Gcloud().run(DESCRIBE)
    assert "https://cloud.google.com/sdk" in error.value.hint
