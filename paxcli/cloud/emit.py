"""Writes job files for other schedulers: a GKE JobSet, a Slurm batch script, a SkyPilot task. Runs nothing.

Each starts one pax process per TPU host, GPU (Slurm) or machine (SkyPilot). JAX finds the coordinator from variables
of the platform: GKE, Cloud TPU and Slurm set them; SkyPilot's are converted in the task.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from paxcli.accelerators import Accelerator, find_accelerator
from paxcli.cloud.values import check
from paxcli.errors import ConfigError

# Exit codes for which a restart does not help: usage, something missing, data, divergence (paxcli/errors.py).
_FINAL_CODES = [2, 3, 5, 6]
_STOP_SECONDS = 120
_RESTARTS = 20
_PORT = 8476
_CODE_SAVED = 75


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
    """

    name: str
    command: Sequence[str]
    machine: Accelerator | Gpus
    count: int
    image: str | None = None

    def __post_init__(self) -> None:
        check("name", self.name)
        if self.image is not None:
            check("image", self.image)

    @property
    def devices(self) -> int:
        """The number of JAX devices of the job."""
        per_machine = self.machine.count if isinstance(self.machine, Gpus) else self.machine.devices
        return per_machine * self.count


def find_machine(text: str) -> Accelerator | Gpus:
    """Parses a TPU slice (`v4-128`) or the GPUs of one machine (`h100:8`)."""
    match = re.fullmatch(r"([a-zA-Z][-a-zA-Z0-9]{0,31}):([1-9][0-9]?)", text, re.ASCII)
    return Gpus(match[1], int(match[2])) if match else find_accelerator(text)


def gke(task: Task) -> str:
    """A JobSet manifest: one Job per slice, one pod per host.

    A pod that exits with one of `_FINAL_CODES` fails the JobSet at once, without using up its restarts.
    Fields: JobSet API v1alpha2, and GKE's documentation of TPU Multislice.
    """
    slice_ = task.machine
    if isinstance(slice_, Gpus) or slice_.gke is None:
        raise ConfigError("--target gke requires a TPU v4 or newer.", "For GPUs, use --target slurm or skypilot.")
    if task.image is None:
        raise ConfigError("GKE needs a container image with pax.", "Set --image REGISTRY/IMAGE:TAG")
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
            "cloud.google.com/gke-tpu-accelerator": slice_.gke,
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
    """A batch script with one process per GPU, as JAX expects under Slurm. A stopped and saved run is requeued."""
    if not isinstance(task.machine, Gpus):
        raise ConfigError(
            "--target slurm requires GPUs.", "Example, 4 machines of 8 GPUs: --accelerator h100:8 --slices 4"
        )
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
srun --kill-on-bad-exit=0 --wait={_STOP_SECONDS} --label {shlex.join(task.command)}
code=$?
# Stopped by a signal after saving a checkpoint: resume.
if [ "$code" -eq {_CODE_SAVED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def skypilot(task: Task) -> str:
    """A SkyPilot task: GPU machines with one process each, or one TPU slice."""
    resources: dict[str, Any]
    command = shlex.join(task.command)
    if isinstance(task.machine, Gpus):
        resources = {"accelerators": f"{task.machine.type}:{task.machine.count}"}
        extra = "cuda13"
        coordinator = f'export JAX_COORDINATOR_ADDRESS="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{_PORT}"'
        process = 'export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES" JAX_PROCESS_ID="$SKYPILOT_NODE_RANK"'
        command = f"{coordinator}\n{process}\n{command}"
    elif task.machine.runtime is None:
        raise ConfigError(f"{task.machine.type} is available through GKE only.", "--target gke")
    elif task.count > 1:
        raise ConfigError(
            "--target skypilot does not support several slices.", "Use pax provision create --slices, or --target gke"
        )
    else:
        resources = {
            "infra": "gcp",
            "accelerators": f"tpu-{task.machine.type}",
            "accelerator_args": {"runtime_version": task.machine.runtime, "tpu_vm": True},
        }
        extra = "tpu"
    setup = f"pip install --quiet 'paxcli[{extra}]'"
    nodes = {"num_nodes": task.count} if task.count > 1 else {}
    return _yaml({"name": task.name, "resources": resources, **nodes, "setup": setup, "run": command + "\n"})


TARGETS = {"gke": gke, "slurm": slurm, "skypilot": skypilot}


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as YAML block literals."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
