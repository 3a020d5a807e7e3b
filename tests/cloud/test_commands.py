"""Command lines, compared with literal lists and checked by gcloud's own argument parser."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxcli.cloud import commands
from paxcli.cloud.accelerators import GENERATIONS, find_accelerator
from paxcli.cloud.commands import Order, Target
from paxcli.errors import ConfigError

ZONE = "us-central2-b"
VM = Target("demo", ZONE)
PROJECT = Target("demo", ZONE, project="my-project")
QUEUED = Target("demo", ZONE, project="my-project", queued=True)
TWO = Target("demo", ZONE, queued=True, slices=2)
HIDDEN = Target("demo", ZONE, queued=True, internal_ips=True)
V4 = find_accelerator("v4-128")
IN = "--zone=us-central2-b"
TPU = ["gcloud", "compute", "tpus", "tpu-vm"]
QR = ["gcloud", "compute", "tpus", "queued-resources"]


def create_command(target: Target, **terms) -> list[str]:
    return commands.create(Order(target, terms.pop("accelerator", V4), **terms))


CREATE_QUEUED = [*QR, "create", "demo", "--accelerator-type=v4-128", "--runtime-version=tpu-ubuntu2204-base"]
CREATE_ONE = [*CREATE_QUEUED, "--node-id=demo", IN, "--project=my-project"]
END = ["--async", "--quiet"]
SCRIPT = "echo \"$HOME\"; echo 'a b'"
GOLDEN = {
    "vm": (
        create_command(VM),
        [*TPU, "create", "demo", "--accelerator-type=v4-128", "--version=tpu-ubuntu2204-base", IN, "--quiet"],
    ),
    "two slices": (
        create_command(TWO, spot=True),
        [*CREATE_QUEUED, "--node-count=2", "--node-prefix=demo", IN, "--spot", *END],
    ),
    "reserved": (create_command(QUEUED, reserved=True), [*CREATE_ONE, "--reserved", *END]),
    "expires after": (create_command(QUEUED, valid_until="1h30m"), [*CREATE_ONE, "--valid-until-duration=1h30m", *END]),
    "expires at": (
        create_command(QUEUED, valid_until="2026-01-31T12:00:00Z"),
        [*CREATE_ONE, "--valid-until-time=2026-01-31T12:00:00Z", *END],
    ),
    "network": (
        create_command(
            HIDDEN, network="net", subnetwork="sub", service_account="a@b.iam.gserviceaccount.com", labels="a=b,c="
        ),
        [
            *CREATE_QUEUED,
            "--node-id=demo",
            IN,
            "--internal-ips",
            "--network=net",
            "--subnetwork=sub",
            "--service-account=a@b.iam.gserviceaccount.com",
            "--labels=a=b,c=",
            *END,
        ],
    ),
    "runtime": (
        create_command(VM, runtime_version="tpu-vm-v4-base"),
        [*TPU, "create", "demo", "--accelerator-type=v4-128", "--version=tpu-vm-v4-base", IN, "--quiet"],
    ),
    "describe": (commands.describe(PROJECT), [*TPU, "describe", "demo", IN, "--project=my-project", "--format=json"]),
    "describe queued": (commands.describe(TWO), [*QR, "describe", "demo", IN, "--format=json"]),
    "describe a node": (commands.describe_node(TWO, "demo-1"), [*TPU, "describe", "demo-1", IN, "--format=json"]),
    "list": (commands.list_all("tpu-vm", ZONE, None), [*TPU, "list", IN, "--format=json"]),
    "delete": (commands.delete(VM), [*TPU, "delete", "demo", IN, "--quiet"]),
    "delete queued": (commands.delete(TWO), [*QR, "delete", "demo", IN, "--force", "--quiet"]),
    "shell": (commands.ssh(VM), [*TPU, "ssh", "demo", "--quiet", "--worker=0", IN]),
    "script": (
        commands.ssh(TWO, "1", "all", SCRIPT),
        [*QR, "ssh", "demo", "--quiet", "--node=1", "--worker=all", IN, f"--command=bash -lc {shlex.quote(SCRIPT)}"],
    ),
    "tunnel": (
        commands.ssh(HIDDEN, "0", "3", "true"),
        [
            *QR,
            "ssh",
            "demo",
            "--tunnel-through-iap",
            "--quiet",
            "--node=0",
            "--worker=3",
            IN,
            "--command=bash -lc true",
        ],
    ),
    "inside": (
        commands.ssh(Target("demo", ZONE, internal_ips=True), worker="all", script="true"),
        [*TPU, "ssh", "demo", "--internal-ip", "--quiet", "--worker=all", IN, "--command=bash -lc true"],
    ),
    "forward": (
        commands.ssh(VM, forwards=["8080", "6007:6006"]),
        [
            *[*TPU, "ssh", "demo", "--quiet", "--worker=0", IN, "--ssh-flag=-N"],
            *["--ssh-flag=-L 8080:localhost:8080", "--ssh-flag=-L 6007:localhost:6006"],
        ],
    ),
    "copy": (
        commands.scp(VM, ["-x.yaml", "/tmp/a b"], "demo:in/", worker="all"),
        [*TPU, "scp", "./-x.yaml", "/tmp/a b", "demo:in/", "--recurse", "--quiet", "--worker=all", IN],
    ),
    "fetch": (
        commands.scp(TWO, ["demo:out.txt"], ".", "1", "0"),
        [*QR, "scp", "demo:out.txt", "./.", "--recurse", "--quiet", "--node=1", "--worker=0", IN],
    ),
}
EVERY_GENERATION = [
    create_command(target, accelerator=find_accelerator(f"{row.prefix}-8"))
    for row in GENERATIONS.values()
    if row.runtime
    for target in (VM, QUEUED, TWO)
]


@pytest.mark.parametrize("case", GOLDEN)
def test_command_lines_match_literal_lists(case):
    made, golden = GOLDEN[case]
    assert made == golden


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud's own parser is not on this machine")
def test_gclouds_own_parser_accepts_every_command_line(tmp_path):
    lines = [shlex.join(argv) for argv in [*(made for made, _ in GOLDEN.values()), *EVERY_GENERATION]]
    wrong = ["gcloud compute tpus tpu-vm create demo --nonsense=1"]
    file = tmp_path / "commands.json"
    file.write_text(json.dumps([{"command_string": line} for line in lines + wrong]))
    lint = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={file}"]
    done = subprocess.run(lint, capture_output=True, text=True, timeout=300, check=True)
    results = json.loads(done.stdout)
    # A command that is taken although it is wrong would make the rest worthless.
    assert [result["success"] for result in results] == [True] * len(lines) + [False], [
        (result["command_string"], result["error_message"]) for result in results if not result["success"]
    ]


@pytest.mark.parametrize(
    "terms",
    [
        {"accelerator": find_accelerator("tpu7x-8")},
        {"spot": True, "reserved": True},
        {"valid_until": "6h"},
        {"labels": "A=b"},
        {"labels": "a"},
    ],
    ids=str,
)
def test_impossible_orders_are_errors(terms):
    with pytest.raises(ConfigError):
        create_command(VM, **terms)


def test_ssh_arguments_of_the_user_come_last_and_unchanged():
    assert commands.ssh(VM, ssh_args=["-v", "a b"])[-4:] == [IN, "--", "-v", "a b"]


def test_names_of_slices_stay_short_enough():
    Target("a" * 63, ZONE)
    with pytest.raises(ConfigError, match="too long"):
        Target("a" * 62, ZONE, queued=True, slices=2)


HOSTILE = ["a; touch x", "$(id)", "a\nb", "--flags-file=x", "a" * 200, "ünïcode", "", "a ", "-a", "a\n"]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    "field", ["network", "subnetwork", "service_account", "labels", "runtime_version", "valid_until"]
)
def test_hostile_options_are_errors(field, value):
    if field in ("network", "subnetwork") and value == "a" * 200:
        return  # a valid one
    with pytest.raises(ConfigError):
        create_command(QUEUED, **{field: value})


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_names_zones_and_paths_are_errors(value):
    with pytest.raises(ConfigError):
        Target(value, ZONE)
    with pytest.raises(ConfigError):
        Target("demo", value)
    with pytest.raises(ConfigError):
        Target("demo", ZONE, project=value)
    with pytest.raises(ConfigError):
        commands.scp(VM, ["a"], f"demo:{value} ")


@given(st.text())
def test_any_text_is_an_error_or_one_inert_argument(text):
    """A name that is taken adds one argument; a script arrives as one argument, which a shell reads back unchanged."""
    try:
        argv = commands.describe(Target(text, ZONE))
    except ConfigError:
        pass
    else:
        assert argv[5] == text and not text.startswith("-") and shlex.quote(text) == text
    *_, command = commands.ssh(VM, script=text)
    assert shlex.split(command.removeprefix("--command=")) == ["bash", "-lc", text]
