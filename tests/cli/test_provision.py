"""`pax provision` against a gcloud that plays a cloud."""

from __future__ import annotations

import json

import pytest

IN = ["--zone", "us-central2-b", "--project", "my-project"]


@pytest.fixture
def pax_here(pax_here):
    """Runs a command line in this process; returns exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        done = pax_here(*words)
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("paxcli.cloud.gcloud.Gcloud.__init__.__defaults__", (lambda _: None,))


def test_from_nothing_to_gone(cloud, pax_here):
    cloud.write(states=[["ACCEPTED", "PROVISIONING", "ACTIVE"]], workers=2)
    code, out, err = pax_here("provision", "demo", "--accelerator", "v5e-8", "--slices", "2", *IN, "--wait")
    assert code == 0 and out == "demo: READY\nNext: pax install --on demo\n"
    assert "v5e-8 is called v5litepod-8" in err and "demo: PROVISIONING" in err
    code, out, _ = pax_here("provision", "describe", "demo", "--json")
    found = json.loads(out)
    assert (found["zone"], found["slices"], found["workers"], found["phase"]) == ("us-central2-b", 2, [2, 2], "ready")
    assert json.loads(pax_here("provision", "list", *IN, "--json")[1])["resources"][0]["name"] == "demo"
    assert pax_here("provision", "wait", "demo")[0] == 0
    assert pax_here("provision", "ssh", "demo", "--worker", "all", "--command", "pwd > here")[0] == 0
    assert sorted(path.parent.name for path in cloud.root.glob("workers/*/here")) == [
        f"demo-{n}-w{w}" for n in (0, 1) for w in (0, 1)
    ]
    assert pax_here("provision", "delete", "demo")[0] == 2 and cloud.calls_with("delete") == []
    assert pax_here("provision", "delete", "demo", "--yes")[0] == 0
    assert pax_here("provision", "describe", "demo")[0] == 2


def test_deleting_in_another_zone_keeps_the_record(cloud, pax_here):
    assert pax_here("provision", "demo", "--accelerator", "v4-8", *IN)[0] == 0
    assert pax_here("provision", "delete", "demo", "--zone", "europe-west4-a", "--yes")[0] == 0
    cloud.write(resources={"demo": {"kind": "tpu-vm", "slices": 1, "states": ["READY"], "type": "v4-8"}})
    found = json.loads(pax_here("provision", "describe", "demo", "--json")[1])
    assert (found["zone"], found["accelerator"]) == ("us-central2-b", "v4-8")
    asked = cloud.calls_with("config")
    assert pax_here("provision", "delete", "demo", "--yes")[0] == 0 and cloud.calls_with("config") == asked


def test_a_request_that_fails_at_once_is_a_failure(cloud, pax_here):
    cloud.write(states=[["FAILED"]])
    code, out, err = pax_here("provision", "demo", "--accelerator", "v4-8", "--queued", *IN)
    assert (code, out) == (4, "") and "demo is FAILED (no quota)" in err and "--recreate" in err


def test_zone_and_project_come_from_somewhere_and_it_is_said(cloud, pax_here, monkeypatch):
    words = ("provision", "demo", "--accelerator", "v4-8", "--dry-run")
    code, out, err = pax_here(*words)
    assert code == 0 and "--zone=us-central2-b --project=my-project" in out
    assert "zone us-central2-b, from gcloud's configuration" in err
    monkeypatch.setenv("CLOUDSDK_COMPUTE_ZONE", "europe-west4-a")
    code, out, err = pax_here(*words)
    assert "--zone=europe-west4-a" in out and "from $CLOUDSDK_COMPUTE_ZONE" in err
    assert cloud.calls_with("compute") == []


def test_a_dry_run_is_argument_lists_and_runs_nothing(cloud, pax_here):
    code, out, _ = pax_here("provision", "demo", "--accelerator", "v4-128", "--slices", "2", *IN, "--dry-run", "--json")
    (argv,) = json.loads(out)["commands"]
    assert code == 0 and argv[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "demo"]
    for words in (["ssh", "demo", "--", "-v"], ["scp", "a", "demo:b"], ["forward", "demo", "6006"], ["delete", "demo"]):
        at = words.index("--") if "--" in words else len(words)
        code, out, _ = pax_here("provision", *words[:at], *IN, "--dry-run", *words[at:])
        assert code == 0 and out.startswith("gcloud compute tpus queued-resources ")
    assert cloud.calls == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["lst"], 2, "Did you mean 'list'?"),
        (["demo"], 2, "--accelerator"),
        (["a; touch x", "--accelerator", "v4-8"], 2, "is not a valid name"),
        (["demo", "--accelerator", "v4-9"], 2, "v4-8"),
        (["demo", "--accelerator", "tpu7x-8"], 2, "GKE"),
        (["demo", "--accelerator", "v4-8", "--timeout", "soon"], 2, "not a duration"),
        (["ssh", "demo", "--worker", "1;id"], 2, "is not a worker"),
        (["ssh", "demo", "--worker", "all"], 2, "--command"),
        (["forward", "demo", "80 -o x"], 2, "is not a valid port"),
        (["scp", "a", "b"], 2, "NAME:PATH"),
        (["describe", "demo"], 2, "neither a queued resource nor a TPU VM"),
        (["attach", "demo"], 2, "neither a queued resource nor a TPU VM"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_names_the_way_out(cloud, pax_here, words, code, said):
    found, _, err = pax_here("provision", *words)
    assert found == code and said in err and "Traceback" not in err
    assert cloud.calls_with("create") == [] and cloud.calls_with("ssh") == []


def test_without_gcloud_is_3_and_a_failure_of_gcloud_is_4(cloud, pax_here, monkeypatch):
    cloud.play("create", "ERROR: (gcloud) Quota 'TPUS' exceeded")
    code, out, _ = pax_here("provision", "demo", "--accelerator", "v4-8", *IN, "--json")
    assert code == 4 and "Quota 'TPUS' exceeded" in json.loads(out)["error"]["message"]
    monkeypatch.setenv("PATH", "/nonexistent")
    assert pax_here("provision", "demo", "--accelerator", "v4-8", *IN)[0] == 3
