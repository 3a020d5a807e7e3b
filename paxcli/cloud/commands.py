"""Builds gcloud command lines as argument lists, never as shell strings. Runs nothing.

Commands: `gcloud compute tpus tpu-vm` and `queued-resources`, release track GA.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from paxcli.cloud.accelerators import Accelerator
from paxcli.cloud.values import check, check_resource_name, check_until
from paxcli.errors import ConfigError

_TPUS = ("gcloud", "compute", "tpus")


@dataclasses.dataclass(frozen=True)
class Target:
    """A TPU VM, or a queued resource with its TPU slices.

    Args:
      name: Name of the TPU VM or the queued resource.
      zone: Such as us-central2-b.
      project: None: gcloud's configured project.
      queued: Whether this is a queued resource rather than a TPU VM.
      slices: Number of TPU slices.
      accelerator: Accelerator type, if known.
      internal_ips: Whether the machines have no external IP address.
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

    def location_options(self) -> list[str]:
        """gcloud's options for the zone and project."""
        return [f"--zone={self.zone}"] + ([f"--project={self.project}"] if self.project else [])


@dataclasses.dataclass(frozen=True)
class Order:
    """A request for TPU capacity, validated on construction. `pax provision create --help` documents the fields.

    Raises:
      ConfigError: A value is invalid, or two options exclude each other.
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
        if self.accelerator.row.runtime is None:
            hint = f"pax provision emit RECIPE --target gke --accelerator {self.accelerator.type}"
            raise ConfigError(f"{self.accelerator.type} is available through GKE only.", hint)
        if self.spot and self.reserved:
            raise ConfigError("--spot and --reserved exclude each other.", "Leave out --spot or --reserved.")
        for kind in ("network", "subnetwork", "service_account", "runtime_version"):
            value = getattr(self, kind)
            if value is not None:
                check(kind.replace("_", " "), value)
        if self.labels is not None:
            for label in self.labels.split(","):
                check("label", label)
        if self.valid_until is not None:
            check_until(self.valid_until)
            if not self.target.queued:
                raise ConfigError("Only a queued request can expire.", "Add --queued.")


def create(order: Order) -> list[str]:
    """Creates a TPU VM, or requests a queued resource without waiting for it."""
    target = order.target
    kind = order.accelerator.type
    runtime = order.runtime_version or order.accelerator.row.runtime
    if target.queued:
        argv = [*_TPUS, "queued-resources", "create", target.name, f"--accelerator-type={kind}"]
        argv += [f"--runtime-version={runtime}"]
        if target.slices > 1:
            argv += [f"--node-count={target.slices}", f"--node-prefix={target.name}"]
        else:
            argv += [f"--node-id={target.name}"]
    else:
        argv = [*_TPUS, "tpu-vm", "create", target.name, f"--accelerator-type={kind}", f"--version={runtime}"]
    argv += target.location_options()
    if order.valid_until is not None:
        form, value = check_until(order.valid_until)
        argv.append(f"--valid-until-{form}={value}")
    for flag, enabled in (("spot", order.spot), ("reserved", order.reserved), ("internal-ips", target.internal_ips)):
        if enabled:
            argv.append(f"--{flag}")
    for flag in ("network", "subnetwork", "service_account", "labels"):
        value = getattr(order, flag)
        if value is not None:
            argv.append(f"--{flag.replace('_', '-')}={value}")
    if target.queued:
        argv.append("--async")
    return [*argv, "--quiet"]


def describe(target: Target) -> list[str]:
    """Describes the TPU VM or queued resource, as JSON."""
    return [*_TPUS, _kind(target), "describe", target.name, *target.location_options(), "--format=json"]


def describe_node(target: Target, node: str) -> list[str]:
    """Describes one TPU VM, as JSON."""
    return [*_TPUS, "tpu-vm", "describe", check("name", node), *target.location_options(), "--format=json"]


def list_all(kind: str, zone: str, project: str | None) -> list[str]:
    """Lists all resources of a kind ("tpu-vm" or "queued-resources") in a zone, as JSON."""
    where = [f"--zone={check('zone', zone)}"] + ([f"--project={check('project', project)}"] if project else [])
    return [*_TPUS, kind, "list", *where, "--format=json"]


def delete(target: Target) -> list[str]:
    """Deletes the TPU VM, or the queued resource and its nodes."""
    force = ["--force"] if target.queued else []
    return [*_TPUS, _kind(target), "delete", target.name, *target.location_options(), *force, "--quiet"]


def ssh(
    target: Target,
    node: str = "0",
    worker: str = "0",
    script: str | None = None,
    ssh_args: Sequence[str] = (),
    forwards: Sequence[str] = (),
) -> list[str]:
    """Opens a shell on a worker, or runs a bash script, passed as one quoted argument, on one or all workers.

    Args:
      target: The TPU VMs.
      node: Slice number or `all`.
      worker: Worker number or `all`.
      script: A bash script. None: an interactive shell.
      ssh_args: Arguments for ssh.
      forwards: Ports to forward from this machine to the worker, as LOCAL:REMOTE; opens no shell.
    """
    argv = [*_TPUS, _kind(target), "ssh", target.name, *_options(target, node, worker)]
    if forwards:
        argv.append("--ssh-flag=-N")
    for ports in forwards:
        local, _, remote = check("port", ports).partition(":")
        argv.append(f"--ssh-flag=-L {local}:localhost:{remote or local}")
    if script is not None:
        argv.append(f"--command=bash -lc {shlex.quote(script)}")
    return argv + (["--", *ssh_args] if ssh_args else [])


def scp(target: Target, sources: Sequence[str], destination: str, node: str = "0", worker: str = "0") -> list[str]:
    """Copies files. `NAME:PATH` is a path on the TPU VM; other paths are local."""
    paths = [_scp_path(target, path) for path in (*sources, destination)]
    return [*_TPUS, _kind(target), "scp", *paths, "--recurse", *_options(target, node, worker)]


def shell_line(argv: Sequence[str]) -> str:
    """`argv` as one line, quoted for a shell."""
    return shlex.join(argv)


def _kind(target: Target) -> str:
    return "queued-resources" if target.queued else "tpu-vm"


def _options(target: Target, node: str, worker: str) -> list[str]:
    """Options for the worker, the location and the network route."""
    if not target.queued and node not in ("0", "all"):
        raise ConfigError(f"{target.name} has one slice: there is no slice {node}.", "Slices are numbered from 0.")
    options = []
    if target.internal_ips:  # `tpu-vm ssh` has no IAP tunnel in GA
        options.append("--tunnel-through-iap" if target.queued else "--internal-ip")
    options.append("--quiet")
    if target.queued:
        options.append(f"--node={node}")
    return [*options, f"--worker={worker}", *target.location_options()]


def _scp_path(target: Target, path: str) -> str:
    if path.startswith(f"{target.name}:"):
        check("remote path", path.partition(":")[2])
        return path
    if "\n" in path or "\0" in path or not path:
        raise ConfigError(f"{path!r} is not a path.", "Name a file or a directory.")
    return path if path.startswith("/") else f"./{path}"
