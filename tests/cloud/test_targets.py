from __future__ import annotations

import dataclasses

import pytest

from paxcli.cloud import targets
from paxcli.cloud.commands import Target
from paxcli.cloud.gcloud import Gcloud
from paxcli.errors import ConfigError

TARGET = Target("demo", "us-central2-b", "my-project", queued=True, slices=2, accelerator="v4-128", internal_ips=True)


def test_a_target_is_remembered_and_forgotten(cloud):
    targets.remember(TARGET)
    assert targets.find_target("demo", None, None, Gcloud(), lambda _: None) == TARGET
    assert cloud.calls == []
    targets.forget(dataclasses.replace(TARGET, zone="europe-west4-b"))
    assert targets.recall("demo") == TARGET
    targets.forget(TARGET)
    with pytest.raises(ConfigError, match="neither"):
        targets.find_target("demo", None, None, Gcloud(), lambda _: None)


def test_an_unknown_target_is_looked_up(cloud):
    resource = {"kind": "queued-resources", "slices": 3, "states": ["ACTIVE"], "type": "v4-8"}
    cloud.write(resources={"demo": resource, "one": resource | {"kind": "tpu-vm", "slices": 1, "states": ["READY"]}})
    place = ("europe-west4-b", "other-project", Gcloud(), lambda _: None)
    assert targets.find_target("demo", *place) == Target("demo", *place[:2], queued=True, slices=3, accelerator="v4-8")
    assert targets.find_target("one", *place) == Target("one", *place[:2], accelerator="v4-8")
    cloud.write(resources={"new": resource | {"kind": "tpu-vm", "slices": 1, "states": ["READY"], "type": "v99-8"}})
    assert targets.find_target("new", *place) == Target("new", *place[:2])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "other"}', '{"name": "demo", "zone": "$(id)"}', '{"x": 1}'])
def test_an_unreadable_remembered_target_is_none(cloud, text):
    targets.remember(TARGET)
    (file,) = cloud.root.glob("state/pax/targets/*.json")
    file.write_text(text)
    assert targets.recall("demo") is None


@pytest.mark.parametrize("name", ["../x", "a/b", "", "-x"])
def test_a_name_is_not_a_path(cloud, name):
    with pytest.raises(ConfigError):
        targets.recall(name)
