"""Emitted files, checked by their consumers: bash, JAX, JobSet's schema, kubernetes, and if installed SkyPilot."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jsonschema
import pytest
import yaml

from paxcli.cloud.emit import Task, find_machine, gke, image, skypilot, slurm
from paxcli.cloud.package import SOURCES
from paxcli.errors import ConfigError
from paxcli.mesh.startup import _explicit_job

COMMAND = ["pax", "train", "--set=task.name=it's", "--run-dir=gs://b/r", "--", "tiny"]
IMAGE = "us-docker.pkg.dev/p/r/pax:1"
BUCKET = "gs://b/r"
ROOT = pathlib.Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "tests" / "data" / "jobset_v1alpha2.json.gz"
# Keeps what it was called with, and what it sees of the job.
PAX = """#!{python}
import json, os, sys
found = {{"words": sys.argv[1:], "env": dict(os.environ)}}
open(os.path.join({folder!r}, f"call-{{os.getpid()}}.json"), "w").write(json.dumps(found))
codes = os.environ.get("PAX_CODE", "0").split(",")
sys.exit(int(codes[int(os.environ.get("SLURM_PROCID", 0)) % len(codes)]))
"""
# As Slurm does: each task of the script's own directives is a process that knows its place.
SRUN = """#!{python}
import os, subprocess, sys
command = sys.argv[next(i for i, word in enumerate(sys.argv) if i and not word.startswith("--")):]
nodes, tasks = int(os.environ["NODES"]), int(os.environ["TASKS"])
place = {{"SLURM_STEP_NODELIST": f"node[001-00{{nodes}}]", "SLURM_NTASKS": str(nodes * tasks)}}
codes = []
for number in range(nodes * tasks):
    own = {{"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number % tasks)}}
    codes.append(subprocess.run(command, env={{**os.environ, **place, **own}}).returncode)
sys.exit(max(codes))
"""


def run_bash(script: str, folder, **env: str) -> tuple[int, list[dict]]:
    """Runs a script with a `pax` and an `srun` that only take note; returns its code and the calls of pax."""
    for name, text in {
        "pax": PAX,
        "srun": SRUN,
        "scontrol": "#!/bin/sh\n[ \"$*\" = 'requeue 77' ] && touch {folder}/scontrol.log\n",
    }.items():
        (folder / name).write_text(text.format(python=sys.executable, folder=str(folder)))
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": path, "HOME": str(folder), **env}, cwd=folder, timeout=600
    )
    calls = [json.loads(file.read_text()) for file in folder.glob("call-*.json")]
    for file in folder.glob("call-*.json"):
        file.unlink()
    return done.returncode, calls


def test_slurm_starts_a_process_per_gpu_that_jax_detects(tmp_path, monkeypatch):
    from jax._src.clusters.slurm_cluster import SlurmCluster

    script = slurm(Task("tiny", COMMAND, find_machine("h100:2"), 2))
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script, re.MULTILINE))
    assert directives["gpus-per-node"] == "h100:2" and directives["signal"] == "TERM@120"
    job = {"NODES": directives["nodes"], "TASKS": directives["ntasks-per-node"], "SLURM_JOB_ID": "77"}
    code, calls = run_bash(script, tmp_path, **job)
    assert code == 0 and [call["words"] for call in calls] == [COMMAND[1:]] * 4
    places = set()
    for call in calls:
        for name in [key for key in os.environ if key.startswith("SLURM_")]:
            monkeypatch.delenv(name)
        for name, value in call["env"].items():
            if name.startswith("SLURM_"):
                monkeypatch.setenv(name, value)
        assert SlurmCluster.is_env_present() and SlurmCluster.get_process_count() == 4
        places.add((SlurmCluster.get_coordinator_address(None, None), SlurmCluster.get_process_id()))
    assert {number for _, number in places} == {0, 1, 2, 3} and {address for address, _ in places} == {"node001:61517"}
    for codes, restarts, code, requeued in [
        ("75", "0", 75, True),
        ("137", "3", 137, True),
        ("75", "20", 75, False),
        ("6", "0", 6, False),
        ("75,75,137,75", "0", 137, True),
        ("2,75,75,75", "0", 2, False),  # the others lost the process that refused the recipe
        ("0,0,0,1", "0", 1, False),
    ]:
        (tmp_path / "scontrol.log").unlink(missing_ok=True)
        assert run_bash(script, tmp_path, **job, PAX_CODE=codes, SLURM_RESTART_COUNT=restarts)[0] == code
        assert (tmp_path / "scontrol.log").exists() == requeued


def test_gke_starts_a_pod_per_host_and_a_job_per_slice():
    task = Task("tiny", COMMAND, find_machine("v4-128"), 2, IMAGE, BUCKET)
    manifest = yaml.safe_load(gke(task))
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (job["replicas"], spec["completions"], spec["parallelism"], task.devices) == (2, 16, 16, 128)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == COMMAND and container["resources"] == {"limits": {"google.com/tpu": "4"}}
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4x4"
    assert manifest["spec"]["coordinator"] == {"replicatedJob": job["name"], "jobIndex": 0, "podIndex": 0}
    assert not any("MEGASCALE" in text for text in gke(task).splitlines())
    # A pod failure policy needs pods that are never restarted in place, and the rule that stops a crash loop needs it.
    assert pod["restartPolicy"] == "Never" and spec["backoffLimit"] == 0
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    (final,) = spec["podFailurePolicy"]["rules"]
    assert 2 in final["onExitCodes"]["values"] and 75 not in final["onExitCodes"]["values"]


def strict(schema):
    """A schema of Kubernetes under which an unknown field is an error, as it is for `kubectl --validate=strict`."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return closed | {key: strict(value) for key, value in schema.items()}


@pytest.mark.parametrize(("machine", "count"), [("v4-128", 2), ("v6e-8", 1)])
def test_the_jobset_is_valid_under_its_own_schema(machine, count):
    schema = strict(json.loads(gzip.decompress(SCHEMA.read_bytes())))
    manifest = yaml.safe_load(gke(Task("tiny", COMMAND, find_machine(machine), count, IMAGE, BUCKET)))
    jsonschema.validate(manifest, schema)
    (job,) = manifest["spec"]["replicatedJobs"]
    for broken in (job | {"replica": 1}, job | {"replicas": "2"}, {"name": "slice"}):
        manifest["spec"]["replicatedJobs"] = [broken]
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(manifest, schema)


def test_names_that_jobset_makes_of_its_own_stay_valid():
    """As JobSet's webhook checks them: `validateCoordinatorLabelValue`, and the longest names of Jobs and pods."""
    for name, fits in (("a" * 26, True), ("a" * 27, False)):
        task = Task(name, COMMAND, find_machine("v4-4096"), 1024, IMAGE, BUCKET)
        assert (len(f"{name}-slice-0-0.{name}") <= 63) is fits
        if fits:
            spec = yaml.safe_load(gke(task))["spec"]
            (job,) = spec["replicatedJobs"]
            pods = job["template"]["spec"]["completions"]
            assert len(f"{name}-{job['name']}-{job['replicas'] - 1}-{pods - 1}-abcde") <= 63
            assert spec["coordinator"] == {"replicatedJob": "slice", "jobIndex": 0, "podIndex": 0}
        else:
            with pytest.raises(ConfigError, match="too long for a JobSet"):
                gke(task)


@pytest.mark.parametrize("run_dir", [None, "runs/a", "/shared/a"])
def test_gke_needs_a_run_directory_that_outlives_a_pod(run_dir):
    with pytest.raises(ConfigError, match="pod's own disk"):
        gke(Task("tiny", COMMAND, find_machine("v4-8"), 1, IMAGE, run_dir))


def test_the_image_has_all_that_an_installation_needs():
    text = image(Task("tiny", COMMAND, find_machine("v4-8"), 1, IMAGE))
    lines = [line.partition(" ")[::2] for line in text.splitlines() if not line.startswith("#")]
    copied = [name for verb, rest in lines if verb == "COPY" for name in shlex.split(rest)[:-1]]
    assert sorted(copied) == sorted([*SOURCES, "constraints.txt"]) and all((ROOT / name).exists() for name in copied)
    assert dict(lines)["RUN"] == "pip install --no-cache-dir --constraint constraints.txt '.[tpu]'"
    assert json.loads(dict(lines)["CMD"]) == COMMAND and f"--tag {IMAGE} {ROOT}" in text


def test_every_field_of_the_job_is_one_of_kubernetes():
    client = pytest.importorskip("kubernetes.client")
    (job,) = yaml.safe_load(gke(Task("tiny", COMMAND, find_machine("v6e-8"), 1, IMAGE, BUCKET)))["spec"][
        "replicatedJobs"
    ]

    def check(value, kind: str) -> None:
        model = getattr(client, kind.removeprefix("list[").removesuffix("]"), None)
        for item in value if isinstance(value, list) else [value]:
            if model is None:
                continue
            names = {there: here for here, there in model.attribute_map.items()}
            model(**{names[key]: field for key, field in item.items()})  # raises where a required one is missing
            for key, field in item.items():
                check(field, model.openapi_types[names[key]])

    check(job["template"], "V1JobTemplateSpec")


@pytest.mark.parametrize(("machine", "count"), [("h100:8", 2), ("v4-8", 1)])
@pytest.mark.parametrize("source", ["local", "git:https://example.com/pax.git@v1"])
def test_skypilot_reads_its_task(machine, count, source, tmp_path):
    sky = pytest.importorskip("sky")
    file = tmp_path / "task.yaml"
    file.write_text(skypilot(Task("tiny", COMMAND, find_machine(machine), count, source=source)))
    task = sky.Task.from_yaml(str(file))
    assert task.num_nodes == count and len(task.resources) == 1


PYTHON3 = """#!/bin/sh
echo "$@" >> "$HOME/log"
[ "$2" = uv ] && [ "$3" = venv ] && mkdir -p "$HOME/.pax/venv/bin" && cp "$0" "$HOME/.pax/venv/bin/python"
exit 0
"""


@pytest.mark.parametrize(
    ("source", "install"),
    [
        ("local", "--constraint constraints.txt .[cuda13]"),
        ("git:https://example.com/pax.git@v1", "paxcli[cuda13] @ git+https://example.com/pax.git@v1"),
    ],
)
def test_skypilot_installs_pax_from_where_it_is(source, install, tmp_path):
    task = yaml.safe_load(skypilot(Task("tiny", COMMAND, find_machine("h100:8"), 1, source=source)))
    assert task.get("workdir") == (str(ROOT) if source == "local" else None)
    (tmp_path / "python3").write_text(PYTHON3)
    (tmp_path / "python3").chmod(0o755)
    for _ in range(2):  # SkyPilot sets a machine up again at every launch
        assert run_bash(task["setup"], tmp_path)[0] == 0
    uv, venv, pip, _, again = (tmp_path / "log").read_text().splitlines()
    assert uv == "-m pip install --quiet uv" and venv.startswith("-m uv venv ")
    assert pip == again == f"-m pip install --quiet {install}"


def test_skypilots_variables_give_jax_the_coordinator(tmp_path):
    task = yaml.safe_load(skypilot(Task("tiny", COMMAND, find_machine("h100:8"), 2)))
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": "h100:8"})
    there = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    places = []
    for rank in ("0", "1"):
        code, (call,) = run_bash(task["run"], tmp_path, **there, SKYPILOT_NODE_RANK=rank)
        assert code == 0 and call["words"] == COMMAND[1:]
        places.append(_explicit_job(call["env"]))
    assert places == [("10.0.0.1:8476", 2, 0), ("10.0.0.1:8476", 2, 1)]


@pytest.mark.parametrize(
    ("emit", "machine", "count", "image"),
    [
        (gke, "h100:8", 1, IMAGE),
        (gke, "v3-8", 1, IMAGE),
        (gke, "v4-8", 1, None),
        (slurm, "v4-8", 1, None),
        (skypilot, "v4-8", 2, None),
        (skypilot, "tpu7x-8", 1, None),
    ],
)
def test_unsupported_targets_are_errors(emit, machine, count, image):
    with pytest.raises(ConfigError):
        emit(Task("tiny", COMMAND, find_machine(machine), count, image))


@pytest.mark.parametrize("value", ["a;b", "a\nb", "$(id)", "-x", ""])
def test_hostile_names_and_images_are_errors(value):
    with pytest.raises(ConfigError):
        Task(value, COMMAND, find_machine("v4-8"), 1)
    with pytest.raises(ConfigError):
        Task("tiny", COMMAND, find_machine("v4-8"), 1, value)


def test_hostile_arguments_stay_arguments(tmp_path):
    words = [f"--set=a=$(touch {tmp_path}/x)", "--", "a;b", "#SBATCH --x", "new\nline"]
    task = Task("tiny", ["pax", "train", *words], find_machine("h100:1"), 1)
    _, calls = run_bash(slurm(task), tmp_path, NODES="1", TASKS="1", SLURM_JOB_ID="1")
    _, more = run_bash(
        yaml.safe_load(skypilot(task))["run"],
        tmp_path,
        SKYPILOT_NODE_IPS="::1",
        SKYPILOT_NUM_NODES="1",
        SKYPILOT_NODE_RANK="0",
    )
    assert [call["words"] for call in calls + more] == [["train", *words]] * 2
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set=num_heads=3"], "num_heads=3"),
        (["--set=global_batch_size=6", "--set=percore_batch_size=null"], "A global batch of 6 does not divide"),
        (["--set=mesh.ici_mesh_shape={data: 3}"], "mesh needs 3 devices, but 1 x h100:4 has 4"),
    ],
)
def test_a_job_that_can_only_fail_is_refused(words, message, capsys):
    from paxcli.cli.main import app, run

    command = ["provision", "emit", "tiny", "--target=slurm", "--accelerator=h100:4", "--json"]
    assert run(app, [*command, *words]) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--set=global_batch_size=16", "--accelerator=v4-8", "--slices=2"], "mesh has 1 slice, not 2"),
        (["c4-22b-2xv4-128", "--accelerator=v4-256"], "mesh has 2 slices, not 1"),
        (["c4-22b-2xv4-128", "--accelerator=v4-128", "--slices=2"], None),
    ],
)
def test_a_job_on_other_slices_than_those_of_the_mesh_is_refused(words, message, capsys):
    from paxcli.cli.main import app, run

    job = ["--target=gke", "--image=registry/pax:1", "--run-dir=gs://bucket/run", "--json"]
    assert run(app, ["provision", "emit", *words, *job]) == (2 if message else 0)
    assert message is None or message in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_job_of_a_recipe_whose_name_no_scheduler_takes(tmp_path, capsys):
    from paxcli.cli.main import app, run

    (tmp_path / "My_run.v2.yaml").write_text("recipe: tiny\n")
    job = ["--target=slurm", "--accelerator=h100:4", "--run-dir=/shared/run"]
    for recipe, name in (("gpt2-1.5b", "gpt2-1-5b"), (f"{tmp_path}/My_run.v2.yaml", "my-run-v2")):
        assert run(app, ["provision", "emit", recipe, *job]) == 0
        assert f"#SBATCH --job-name={name}\n" in capsys.readouterr().out


def test_files_that_a_job_reads_are_named(tmp_path, caplog, capsys):
    from paxcli.cli.main import app, run

    (tmp_path / "mine.yaml").write_text("recipe: tiny\n")
    command = ["provision", "emit", f"{tmp_path}/mine.yaml", "--accelerator=h100:4", "--target"]
    with caplog.at_level("WARNING", "pax"):
        assert run(app, [*command, "slurm"]) == 0 and not caplog.text
        assert run(app, [*command, "skypilot"]) == 0
    assert "mine.yaml: it has to be in the image, or in the directory of the task" in caplog.text
