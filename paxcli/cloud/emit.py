"""Files for those who schedule jobs themselves: a GKE JobSet, a Slurm batch script, a SkyPilot task. Nothing is run.

Each starts one pax process a host (TPU), a GPU (Slurm) or a machine (SkyPilot). Who coordinates them is
the platform's to say: GKE and Cloud TPU set what JAX reads, Slurm's own variables are enough, SkyPilot's are passed on.
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

# Starting again cannot help: usage, something missing, data, divergence (paxcli/errors.py).
_FINAL_CODES = [2, 3, 5, 6]
_STOP_SECONDS = 120
_RESTARTS = 20
_PORT = 8476
_CODE_SAVED = 75


@dataclasses.dataclass(frozen=True)
class Gpus:
    """A machine's GPUs: `h100:8`."""

    type: str
    count: int


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to run, and on what.

    Args:
      name: Of the job.
      command: pax and its arguments.
      machine: A TPU slice, or the GPUs of one machine.
      count: Slices, or machines.
      image: For GKE: a container image that holds pax.
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
        """JAX devices of the whole job."""
        each = self.machine.count if isinstance(self.machine, Gpus) else self.machine.devices
        return each * self.count


def find_machine(text: str) -> Accelerator | Gpus:
    """A TPU slice (`v4-128`) or GPUs of one machine (`h100:8`)."""
    match = re.fullmatch(r"([a-zA-Z][-a-zA-Z0-9]{0,31}):([1-9][0-9]?)", text, re.ASCII)
    return Gpus(match[1], int(match[2])) if match else find_accelerator(text)


def gke(task: Task) -> str:
    """A JobSet manifest: one Job a slice, one pod a host.

    A pod that exits with a code that a restart cannot mend fails the whole JobSet: a mistake uses up no restarts.
    Fields: the JobSet API v1alpha2 and GKE's page on TPU Multislice.
    """
    slice_ = task.machine
    if isinstance(slice_, Gpus) or slice_.gke is None:
        raise ConfigError("--target gke is for TPUs from v4 on.", "--target slurm or --target skypilot takes GPUs.")
    if task.image is None:
        raise ConfigError("GKE runs container images.", "Say which one holds pax: --image REGISTRY/IMAGE:TAG")
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
    """A batch script: a process a GPU, as JAX expects under Slurm; what was stopped and saved is queued again."""
    if not isinstance(task.machine, Gpus):
        raise ConfigError("Slurm has no TPUs.", "Say the GPUs of a machine: --accelerator h100:8 --slices 4")
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
srun --kill-on-bad-exit=1 --label {shlex.join(task.command)}
code=$?
# Stopped by a signal and saved: go on from there.
if [ "$code" -eq {_CODE_SAVED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def skypilot(task: Task) -> str:
    """A SkyPilot task: GPU machines with one process each, or one TPU slice."""
    resources: dict[str, Any]
    command = shlex.join(task.command)
    if isinstance(task.machine, Gpus):
        resources, extra = {"accelerators": f"{task.machine.type}:{task.machine.count}"}, "cuda13"
        coordinator = f'export JAX_COORDINATOR_ADDRESS="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{_PORT}"'
        who = 'export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES" JAX_PROCESS_ID="$SKYPILOT_NODE_RANK"'
        command = f"{coordinator}\n{who}\n{command}"
    elif task.machine.runtime is None:
        raise ConfigError(f"{task.machine.type} is offered through GKE only.", "--target gke")
    elif task.count > 1:
        raise ConfigError("SkyPilot starts no job of several slices.", "pax provision create --slices, or --target gke")
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
    """Writes text of several lines as lines."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
