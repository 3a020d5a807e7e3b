"""Writes jobs for other schedulers: a GKE JobSet, a Slurm script, a SkyPilot task, an image. Runs nothing.

Each starts one pax process per TPU host, GPU (Slurm) or machine (SkyPilot). JAX finds the coordinator from variables
of the platform: GKE, Cloud TPU and Slurm set them; SkyPilot's are converted in the task.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from paxcli.cloud.accelerators import Accelerator, find_accelerator
from paxcli.cloud.package import SOURCES, git_requirement, require_checkout
from paxcli.cloud.values import check
from paxcli.errors import ConfigError

# Exit codes for which a restart does not help: usage, something missing, data, divergence (paxcli/errors.py).
_FINAL_CODES = [2, 3, 5, 6]
_STOP_SECONDS = 120
_RESTARTS = 20
_PORT = 8476
# JobSet labels each Job with its coordinator, NAME-slice-0-0.NAME, and a label has at most 63 characters.
_JOBSET_NAME = 26
_CODE_SAVED = 75

# A process of a Slurm job: an error of its own counts more than that of a process which only lost the others (75).
_SLURM_PROCESS = """\
trap : TERM INT  # pax gets these signals too, and saves
"$@"
code=$?
if [ "$code" -gt 0 ] && [ "$code" -lt 75 ]; then code=$((code + 100)); fi
exit "$code"
"""

# SkyPilot's machines may have a Python that is too old, so uv installs one.
_SETUP = """\
set -e
python3 -m pip install --quiet uv
[ -e ~/.pax/venv ] || python3 -m uv venv --quiet --seed --python 3.12 ~/.pax/venv
~/.pax/venv/bin/python -m pip install --quiet {install}
"""
_USE_VENV = 'export PATH="$HOME/.pax/venv/bin:$PATH"'


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The GPUs of one machine: `h100:8`."""

    type: str
    count: int


@dataclasses.dataclass(frozen=True)
class Task:
    """A job: its command and its hardware.

    Args:
      name: Name of the job.
      command: pax and its arguments.
      machine: A TPU slice, or the GPUs of one machine.
      count: Number of slices or machines.
      image: For GKE: a container image with pax installed.
      run_dir: The run directory of the command; None = below the working directory.
      source: Where pax is installed from: `local`, this checkout, or `git:REF` or `git:ADDRESS@REF`.
    """

    name: str
    command: Sequence[str]
    machine: Accelerator | Gpus
    count: int
    image: str | None = None
    run_dir: str | None = None
    source: str = "local"

    def __post_init__(self) -> None:
        check("name", self.name)
        if self.image is not None:
            check("image", self.image)

    @property
    def devices(self) -> int:
        """The number of JAX devices of the job."""
        per_machine = self.machine.count if isinstance(self.machine, Gpus) else self.machine.devices
        return per_machine * self.count

    @property
    def extra(self) -> str:
        """The extra of pax that the machine needs."""
        return "cuda13" if isinstance(self.machine, Gpus) else "tpu"


def find_machine(text: str) -> Accelerator | Gpus:
    """Parses a TPU slice (`v4-128`) or the GPUs of one machine (`h100:8`)."""
    match = re.fullmatch(r"([a-zA-Z][-a-zA-Z0-9]{0,31}):([1-9][0-9]?)", text, re.ASCII)
    return Gpus(match[1], int(match[2])) if match else find_accelerator(text)


def job_name(recipe: str) -> str:
    """A recipe's name as a job's: `gpt2-1-5b` for `gpt2-1.5b`."""
    return re.sub("[^a-z0-9]+", "-", recipe.lower()).strip("-")


def gke(task: Task) -> str:
    """A JobSet manifest: one Job per slice, one pod per host.

    A pod that exits with one of `_FINAL_CODES` fails the JobSet at once, without using up its restarts.
    Fields: JobSet API v1alpha2, and GKE's documentation of TPU Multislice.
    """
    slice_ = task.machine
    if isinstance(slice_, Gpus) or slice_.row.gke is None:
        raise ConfigError("--target gke requires a TPU v4 or newer.", "For GPUs, use --target slurm or skypilot.")
    if len(task.name) > _JOBSET_NAME:
        raise ConfigError(
            f"{task.name!r} is too long for a JobSet.", f"Set --name, of at most {_JOBSET_NAME} characters."
        )
    if task.image is None:
        raise ConfigError("GKE needs a container image with pax.", "Set --image; --target image writes a Dockerfile.")
    if "://" not in (task.run_dir or ""):
        hint = "Set --run-dir gs://BUCKET/RUN"
        raise ConfigError("The run directory would be on a pod's own disk, which ends with the pod.", hint)
    container = {
        "name": "pax",
        "image": task.image,
        "command": list(task.command),
        "ports": [{"containerPort": 8471}, {"containerPort": 8482}],
        "resources": {"limits": {"google.com/tpu": str(slice_.chips_per_host)}},
    }
    pod = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": _STOP_SECONDS,
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": slice_.row.gke,
            "cloud.google.com/gke-tpu-topology": slice_.topology,
        },
        "containers": [container],
    }
    final = {"action": "FailJob", "onExitCodes": {"containerName": "pax", "operator": "In", "values": _FINAL_CODES}}
    job = {
        "parallelism": slice_.hosts,
        "completions": slice_.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [final]},
        "template": {"spec": pod},
    }
    return _yaml(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {
                "name": task.name,
                "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
            },
            "spec": {
                "coordinator": {"replicatedJob": "slice", "jobIndex": 0, "podIndex": 0},
                "failurePolicy": {
                    "maxRestarts": _RESTARTS,
                    "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
                },
                "replicatedJobs": [{"name": "slice", "replicas": task.count, "template": {"spec": job}}],
            },
        }
    )


def slurm(task: Task) -> str:
    """A batch script with one process per GPU, as JAX expects under Slurm. A stopped or killed run is requeued."""
    if not isinstance(task.machine, Gpus):
        hint = "Example, 4 machines of 8 GPUs: --accelerator h100:8 --slices 4"
        raise ConfigError("--target slurm requires GPUs.", hint)
    process = ["bash", "-c", _SLURM_PROCESS, "process", *task.command]
    return f"""\
#!/bin/bash
#SBATCH --job-name={task.name}
#SBATCH --nodes={task.count}
#SBATCH --ntasks-per-node={task.machine.count}
#SBATCH --gpus-per-node={task.machine.type}:{task.machine.count}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={task.name}-%j.log
#SBATCH --signal=TERM@{_STOP_SECONDS}

set -u
# Processes that stop do not end at the same moment: the first one to exit must not get the others killed.
srun --kill-on-bad-exit=0 --wait={_STOP_SECONDS} --label {shlex.join(process)}
code=$?
# The code of srun is the highest of all processes. Resume what stopped after saving, or lost a process to a signal.
if [ "$code" -gt 100 ] && [ "$code" -lt 128 ]; then code=$((code - 100)); fi
if [ "$code" -eq {_CODE_SAVED} ] || [ "$code" -gt 128 ]; then
  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {_RESTARTS} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
fi
exit "$code"
"""


def skypilot(task: Task) -> str:
    """A SkyPilot task: GPU machines with one process each, or one TPU slice."""
    resources: dict[str, Any]
    command = shlex.join(task.command)
    if isinstance(task.machine, Gpus):
        resources = {"accelerators": f"{task.machine.type}:{task.machine.count}"}
        coordinator = f'export JAX_COORDINATOR_ADDRESS="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{_PORT}"'
        process = 'export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES" JAX_PROCESS_ID="$SKYPILOT_NODE_RANK"'
        command = f"{coordinator}\n{process}\n{command}"
    elif task.machine.row.runtime is None:
        raise ConfigError(f"{task.machine.type} is available through GKE only.", "--target gke")
    elif task.count > 1:
        hint = "Use pax provision create --slices, or --target gke"
        raise ConfigError("--target skypilot does not support several slices.", hint)
    else:
        resources = {
            "infra": "gcp",
            "accelerators": f"tpu-{task.machine.type}",
            "accelerator_args": {"runtime_version": task.machine.row.runtime, "tpu_vm": True},
        }
    if task.source == "local":  # SkyPilot copies the checkout, and setup starts in the copy
        workdir, install = {"workdir": str(require_checkout())}, f"--constraint constraints.txt '.[{task.extra}]'"
    else:
        workdir, install = {}, shlex.quote(git_requirement(task.source, task.extra))
    nodes = {"num_nodes": task.count} if task.count > 1 else {}
    setup, run = _SETUP.format(install=install), f"{_USE_VENV}\n{command}\n"
    return _yaml({"name": task.name, "resources": resources, **nodes, **workdir, "setup": setup, "run": run})


def image(task: Task) -> str:
    """A Dockerfile that installs this checkout; the container runs the task's command."""
    folders = [name for name in SOURCES if (require_checkout() / name).is_dir()]
    files = [name for name in SOURCES if name not in folders]
    copies = [f"COPY {' '.join([*files, 'constraints.txt'])} ./", *(f"COPY {name} {name}" for name in folders)]
    return f"""\
# docker build --file THIS_FILE --tag {task.image or task.name} {shlex.quote(str(require_checkout()))}
FROM python:3.12-slim
WORKDIR /pax
{chr(10).join(copies)}
RUN pip install --no-cache-dir --constraint constraints.txt '.[{task.extra}]'
CMD {json.dumps(list(task.command))}
"""


TARGETS = {"gke": gke, "slurm": slurm, "skypilot": skypilot, "image": image}


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as YAML block literals."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
