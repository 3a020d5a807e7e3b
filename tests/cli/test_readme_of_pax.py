"""The gcloud lines of Pax's README come out of `--dry-run`; docs/provision.md says in what they differ."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from paxcli.cli.main import app
from paxcli.cloud.commands import Target
from paxcli.cloud.targets import remember

IN = ["--zone=us-central2-b", "--project=my-project"]
VM = Target("paxml", "us-central2-b", "my-project", accelerator="v4-8")
SLICES = Target("demo", "us-central2-b", "my-project", queued=True, slices=2, accelerator="v4-128")
ALL = ["--quiet", "--node=all", "--worker=all", *IN]
START = 'exec "$HOME/.pax/venv/bin/python" -m paxcli.cloud.supervisor start '

# What Pax's README does: what one types here, the command lines, and the script that they run there, or its start.
README = {
    "create a TPU VM": (
        "provision paxml --accelerator v4-8 --zone us-central2-b --project my-project --runtime-version tpu-vm-v4-base",
        ["tpu-vm create paxml --accelerator-type=v4-8 --version=tpu-vm-v4-base", *IN, "--quiet"],
        None,
    ),
    "run commands on a pod": (
        "provision ssh paxml --worker all --command 'pip list'",
        ["tpu-vm ssh paxml --quiet --worker=all", *IN],
        "pip list",
    ),
    "ssh": ("provision ssh paxml", ["tpu-vm ssh paxml --quiet --worker=0", *IN], None),
    "forward a notebook's port": (
        "provision forward paxml 8080",
        ["tpu-vm ssh paxml --quiet --worker=0", *IN, "--ssh-flag=-N", "--ssh-flag=-L 8080:localhost:8080"],
        None,
    ),
    "copy notebooks": (
        "provision scp paxml:notebooks here",
        ["tpu-vm scp paxml:notebooks ./here --recurse --quiet --worker=0", *IN],
        None,
    ),
    "queue for two slices of C4Spmd22BAdam2xv4_128": (
        "provision demo --accelerator v4-128 --slices 2 --zone us-central2-b --project my-project "
        "--runtime-version tpu-vm-v4-base",
        [
            "queued-resources create demo --accelerator-type=v4-128 --runtime-version=tpu-vm-v4-base",
            *["--node-count=2", "--node-prefix=demo", *IN, "--async", "--quiet"],
        ],
        None,
    ),
    "install on all workers of all slices": (
        "install --on demo --from git:https://example.com/pax.git@main",
        ["queued-resources ssh demo", *ALL],
        "set -eu",
    ),
    "train C4Spmd22BAdam2xv4_128 from one terminal per slice": (
        "train C4Spmd22BAdam2xv4_128 --on demo --run-dir gs://bucket/run",
        ["queued-resources ssh demo", *ALL],
        START,
    ),
}


@pytest.fixture
def dry_run(cloud):
    """The command lines of a dry run; that nothing was called is checked too."""
    for target in (VM, SLICES):
        remember(target)

    def call(words: str) -> list[list[str]]:
        result = CliRunner().invoke(app, [*shlex.split(words), "--dry-run", "--json"])
        assert result.exit_code == 0, (result.output, result.exception)
        assert cloud.calls == []
        return json.loads(result.stdout)["commands"]

    return call


@pytest.mark.parametrize("case", README)
def test_a_line_of_the_readme(case, dry_run):
    words, parts, script = README[case]
    argv = dry_run(words)[-1]
    golden = ["gcloud", "compute", "tpus", *parts[0].split(" "), *parts[1:]]
    assert argv[: len(golden)] == golden
    if script is None:
        assert len(argv) == len(golden)
        return
    (command,) = argv[len(golden) :]
    shell, option, found = shlex.split(command.removeprefix("--command="))
    assert (shell, option) == ("bash", "-lc") and found.startswith(script)


def test_what_a_job_starts_is_one_json_argument(dry_run):
    words = [
        "train",
        "C4Spmd22BAdam2xv4_128",
        "--on",
        "demo",
        "--run-dir",
        "gs://bucket/run",
        "--set",
        "task.name=it's",
    ]
    (argv,) = dry_run(shlex.join(words))
    script = shlex.split(argv[-1].removeprefix("--command="))[-1]
    spec = json.loads(shlex.split(script)[-1])
    assert spec["arguments"] == [
        *["train", "--set=task.name=it's", "--run-dir=gs://bucket/run", "--json", "--", "C4Spmd22BAdam2xv4_128"]
    ]
    assert "LIBTPU" not in script and "MEGASCALE" not in script


def test_a_recipe_for_other_tpus_is_refused_here(cloud):
    remember(SLICES)
    result = CliRunner().invoke(app, ["train", "c4-22b-1xv4-128", "--on", "demo"])
    assert "needs 64 devices, but demo has 128" in result.exception.message and cloud.calls == []
    one_slice = ["--set", "mesh.ici_mesh_shape=[1,128,1]", "--set", "mesh.dcn_mesh_shape=null"]
    result = CliRunner().invoke(app, ["train", "c4-22b-2xv4-128", *one_slice, "--on", "demo"])
    assert "mesh has 1 slice, not 2" in result.exception.message and cloud.calls == []


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud's own parser is not on this machine")
def test_gclouds_own_parser_takes_what_installs_and_trains(dry_run, tmp_path):
    lines = [shlex.join(argv) for words, _, _ in README.values() for argv in dry_run(words)]
    file = tmp_path / "commands.json"
    file.write_text(json.dumps([{"command_string": line} for line in lines]))
    real = os.environ["PATH"].partition(":")[2]  # behind the one that plays
    lint = [str(shutil.which("gcloud", path=real)), "meta", "lint-gcloud-commands", f"--commands-file={file}"]
    done = subprocess.run(lint, capture_output=True, text=True, timeout=300)
    failed = [(r["command_string"], r["error_message"]) for r in json.loads(done.stdout) if not r["success"]]
    assert failed == [] and len(lines) == 10
