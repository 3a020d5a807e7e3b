"""gcloud command lines, as argument lists. Nothing is run here, and nothing is ever a shell string.

Grammar: `gcloud compute tpus tpu-vm` and `queued-resources`, release track GA.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from paxcli.accelerators import Accelerator
from paxcli.cloud.values import check, check_labels, check_resource_name, check_until
from paxcli.errors import ConfigError

_TPUS = ("gcloud", "compute", "tpus")


@dataclasses.dataclass(frozen=True)
class Target:
    """TPU VMs under one name: what is needed to reach them.

    Args:
      name: Of the TPU VM, or of the queued resource.
      zone: Such as us-central2-b.
      project: None = gcloud's own.
      queued: A queued resource; else a TPU VM.
      slices: How many TPUs the name stands for.
      accelerator: Its type, where it is known.
      internal_ips: The machines have no address of their own on the internet.
    """

    name: str
    zone: str
    project: str | None = None
    queued: bool = False
    slices: int = 1
    accelerator: str | None = None
    internal_ips: bool = False

    def __post_init__(self) -> None:
        check_resource_name(self.name, self.slices)
        check("zone", self.zone)
        if self.project is not None:
            check("project", self.project)

    def node(self, index: int) -> str:
        """The name of one slice."""
        return f"{self.name}-{index}" if self.slices > 1 else self.name

    def place(self) -> list[str]:
        """The options that say where it is."""
        return [f"--zone={self.zone}"] + ([f"--project={self.project}"] if self.project else [])


@dataclasses.dataclass(frozen=True)
class Order:
    """What to create, and on what terms. Checked when made; see `pax provision create --help` for the fields.

    Raises:
      ConfigError: A value is not valid, or two exclude each other.
    """

    target: Target
    accelerator: Accelerator
    spot: bool = False
    reserved: bool = False
    valid_until: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    service_account: str | None = None
    labels: str | None = None
    runtime_version: str | None = None

    def __post_init__(self) -> None:
        if self.accelerator.runtime is None:
            raise ConfigError(
                f"{self.accelerator.type} is offered through GKE only.",
                f"pax provision emit RECIPE --target gke --accelerator {self.accelerator.type}",
            )
        if self.spot and self.reserved:
            raise ConfigError("Capacity is either spot or reserved.", "Leave out --spot or --reserved.")
        for kind in ("network", "subnetwork", "service_account", "runtime_version"):
            value = getattr(self, kind)
            if value is not None:
                check(kind.replace("_", " "), value)
        if self.labels is not None:
            check_labels(self.labels)
        if self.valid_until is not None:
            check_until(self.valid_until)
            if not self.target.queued:
                raise ConfigError("Only a queued request can expire.", "Add --queued.")


def create(order: Order) -> list[str]:
    """Creates a TPU VM, or asks for a queued resource and does not wait for it."""
    target, kind = order.target, order.accelerator.type
    runtime = order.runtime_version or order.accelerator.runtime
    if target.queued:
        argv = [*_TPUS, "queued-resources", "create", target.name, f"--accelerator-type={kind}"]
        argv += [f"--runtime-version={runtime}"]
        several = [f"--node-count={target.slices}", f"--node-prefix={target.name}"]
        argv += several if target.slices > 1 else [f"--node-id={target.name}"]
    else:
        argv = [*_TPUS, "tpu-vm", "create", target.name, f"--accelerator-type={kind}", f"--version={runtime}"]
    argv += target.place()
    if order.valid_until is not None:
        form, value = check_until(order.valid_until)
        argv.append(f"--valid-until-{form}={value}")
    for flag, wanted in (("spot", order.spot), ("reserved", order.reserved), ("internal-ips", target.internal_ips)):
        argv += [f"--{flag}"] if wanted else []
    for flag in ("network", "subnetwork", "service_account", "labels"):
        value = getattr(order, flag)
        argv += [f"--{flag.replace('_', '-')}={value}"] if value is not None else []
    return argv + (["--async"] if target.queued else []) + ["--quiet"]


def describe(target: Target) -> list[str]:
    """The TPU VM or queued resource, as JSON."""
    return [*_TPUS, _kind(target), "describe", target.name, *target.place(), "--format=json"]


def describe_node(target: Target, node: str) -> list[str]:
    """One TPU VM, as JSON."""
    return [*_TPUS, "tpu-vm", "describe", check("name", node), *target.place(), "--format=json"]


def list_all(kind: str, zone: str, project: str | None) -> list[str]:
    """All of a kind ("tpu-vm" or "queued-resources") in a zone, as JSON."""
    where = [f"--zone={check('zone', zone)}"] + ([f"--project={check('project', project)}"] if project else [])
    return [*_TPUS, kind, "list", *where, "--format=json"]


def delete(target: Target) -> list[str]:
    """Deletes the TPU VM, or the queued resource with its nodes."""
    force = ["--force"] if target.queued else []
    return [*_TPUS, _kind(target), "delete", target.name, *target.place(), *force, "--quiet"]


def ssh(
    target: Target,
    node: str = "0",
    worker: str = "0",
    script: str | None = None,
    ssh_args: Sequence[str] = (),
    forwards: Sequence[str] = (),
) -> list[str]:
    """A shell on a worker, or a script run by bash on one or `all`; the script travels as one quoted argument.

    Args:
      target: Which TPU VMs.
      node: Slice: a number or `all`.
      worker: A number or `all`.
      script: What bash runs there. None = an interactive shell.
      ssh_args: Given to ssh as they are.
      forwards: Ports of the worker to reach from here, as HERE:THERE; no shell is opened then.
    """
    argv = [*_TPUS, _kind(target), "ssh", target.name, *_options(target, node, worker)]
    if forwards:
        argv.append("--ssh-flag=-N")
    for ports in forwards:
        here, _, there = check("port", ports).partition(":")
        argv.append(f"--ssh-flag=-L {here}:localhost:{there or here}")
    if script is not None:
        argv.append(f"--command=bash -lc {shlex.quote(script)}")
    return argv + (["--", *ssh_args] if ssh_args else [])


def scp(target: Target, sources: Sequence[str], destination: str, node: str = "0", worker: str = "0") -> list[str]:
    """Copies files. What is on the TPU VM is written `NAME:PATH`, all else is here."""
    paths = [_path(target, path) for path in (*sources, destination)]
    return [*_TPUS, _kind(target), "scp", *paths, "--recurse", *_options(target, node, worker)]


def pasteable(argv: Sequence[str]) -> str:
    """One line for a shell that means `argv`."""
    return shlex.join(argv)


def _kind(target: Target) -> str:
    return "queued-resources" if target.queued else "tpu-vm"


def _options(target: Target, node: str, worker: str) -> list[str]:
    """Which worker, where, and how to reach it. `tpu-vm ssh` has no tunnel in GA."""
    if not target.queued and node not in ("0", "all"):
        raise ConfigError(f"{target.name} is one slice: there is no slice {node}.", "Slices count from 0.")
    route = "--tunnel-through-iap" if target.queued else "--internal-ip"
    which = ([f"--node={node}"] if target.queued else []) + [f"--worker={worker}"]
    return [*([route] if target.internal_ips else []), "--quiet", *which, *target.place()]


def _path(target: Target, path: str) -> str:
    if path.startswith(f"{target.name}:"):
        check("remote path", path.partition(":")[2])
        return path
    if "\n" in path or "\0" in path or not path:
        raise ConfigError(f"{path!r} is no path.")
    return path if path.startswith("/") else f"./{path}"
