"""What a process does around its devices: joins the others of a multi-host job, and gives memory back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping

import jax

from paxcli.errors import ConfigError, RemoteError, first_line
from paxcli.log import log

_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_COUNT = ("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT")
_INDEX = ("JAX_PROCESS_ID", "JAX_PROCESS_INDEX")

# The job that each of these belongs to is one that `jax.distributed.initialize()` detects by itself.
_JOB_SIZES = {
    "MEGASCALE_NUM_SLICES": "a multislice TPU job",
    "TPU_PROCESS_ADDRESSES": "a TPU job",
    "TPU_WORKER_HOSTNAMES": "a TPU job",
    "SLURM_NTASKS": "a Slurm job step",
    "OMPI_COMM_WORLD_SIZE": "an Open MPI job",
}


def start_distributed(timeout_seconds: int = 300, libtpu: str = "") -> None:
    """Joins the other processes of this job, when there are any, and hands libtpu its arguments.

    A job is announced by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, by Slurm, by Open MPI, or by
    Cloud TPU (GKE, multislice, or a TPU VM of several hosts). Call it before anything touches a device.

    Raises:
      ConfigError: The environment announces a job but leaves out a part of it, or contradicts itself.
      RemoteError: The other processes cannot be reached in time.
    """
    _give_cpu_devices_threads()
    hand_to_libtpu(libtpu)
    if jax.distributed.is_initialized():
        return
    explicit = _explicit(os.environ)
    if explicit is not None:
        address, count, index = explicit
        if count > 1:
            _initialize(f"process {index} of {count} at {address}", timeout_seconds, *explicit)
        return
    job = _detected(os.environ)
    if job:
        _initialize(job, timeout_seconds)


def hand_to_libtpu(arguments: str) -> None:
    """Adds to what libtpu reads when it is loaded. What the environment says counts more."""
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    if arguments and arguments not in given:
        os.environ["LIBTPU_INIT_ARGS"] = f"{arguments} {given}".strip()  # the last of two counts


def return_free_memory() -> None:
    """Gives the system what malloc keeps for later: after a compilation, hundreds of MB. Only glibc can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _explicit(env: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Address, process count and process index, or None when the environment leaves them to detection."""
    address = env.get(_ADDRESS)
    count, index = (next((env[name] for name in names if env.get(name)), None) for names in (_COUNT, _INDEX))
    if count is None and index is None and (address is None or _detected(env)):
        return None
    if count == "1" and address is None:
        return "", 1, 0
    parts = {_ADDRESS: address, _COUNT[0]: count, _INDEX[0]: index}
    missing = [name for name, value in parts.items() if not value]
    if missing:
        given = [name for name in parts if name not in missing]
        raise ConfigError(
            f"{' and '.join(given)} announce a multi-process job, but {' and '.join(missing)} is not set.",
            f"Set all of {', '.join(parts)} on every process, or none of them.",
        )
    assert address and count and index
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{_ADDRESS} is `{address}`; it takes host:port, such as 10.0.0.1:8476.")
    if not count.isdigit() or not index.isdigit() or not int(index) < int(count):
        raise ConfigError(
            f"{_INDEX[0]}={index} and {_COUNT[0]}={count} do not fit: the index runs from 0 to the count minus 1."
        )
    return address, int(count), int(index)


def _detected(env: Mapping[str, str]) -> str | None:
    """What kind of multi-process job this is, or None for one process."""
    for name, kind in _JOB_SIZES.items():
        if name == "SLURM_NTASKS" and "SLURM_STEP_NODELIST" not in env:  # inside sbatch or salloc, outside srun
            continue
        value = env.get(name, "")
        size = int(value) if value.isdigit() else len([part for part in value.split(",") if part])
        if size > 1:
            return f"{kind} ({name}={value})"
    # JAX sets this one on import, on a TPU VM only.
    if env.get("TPU_ML_PLATFORM") == "JAX" and "TPU_SKIP_MDS_QUERY" not in env and "TPU_WORKER_HOSTNAMES" not in env:
        hosts = _tpu_vm_hosts(env.get("GCE_METADATA_IP", "metadata.google.internal"))
        if hosts > 1:
            return f"a TPU VM of {hosts} hosts"
    return None


def _tpu_vm_hosts(metadata_server: str) -> int:
    """How many hosts all slices of this TPU VM's job have together."""
    try:
        hosts = len(_metadata(metadata_server, "worker-network-endpoints").split(","))
        slices = re.search(r"^MEGASCALE_NUM_SLICES: *'?(\d+)", _metadata(metadata_server, "tpu-env"), re.MULTILINE)
    except OSError as error:
        log.warning("This is a TPU VM, but its metadata server does not answer (%s): taken for a single host.", error)
        return 1
    return hosts * (int(slices[1]) if slices else 1)


def _metadata(server: str, key: str) -> str:
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.read().decode()
    except urllib.error.HTTPError:  # the machine has no such attribute
        return ""


def _initialize(
    job: str,
    timeout_seconds: int,
    address: str | None = None,
    count: int | None = None,
    index: int | None = None,
) -> None:
    """Runs JAX's start-up in a thread: on its own timeout JAX aborts the process, with a C++ stack for a message."""
    failure: list[BaseException] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(address, count, index, initialization_timeout=timeout_seconds + 60)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that waits
            failure.append(error)

    # On CPUs, programs in flight at once meet their peers' collectives in any order, and wait for each other for ever.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    log.info("Joining %s.", job)
    _keep_stdout()
    thread = threading.Thread(target=connect, name="distributed-start", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    hint = "See that every process was started, and that the coordinator's port is open between the hosts."
    if thread.is_alive():
        raise RemoteError(f"Joining {job}: not all processes came together within {timeout_seconds} s.", hint)
    if failure:
        raise RemoteError(f"Joining {job}: {first_line(failure[0])}", hint) from failure[0]


def _keep_stdout() -> None:
    """Leaves stdout to what Python prints: Gloo reports its connections there, between the lines of a result."""
    if sys.stdout.fileno() != 1:  # somebody else listens, or it is done
        return
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(ours, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def _give_cpu_devices_threads() -> None:
    """Tells XLA to have two threads for each CPU device; it has one.

    A program that waits for its collectives holds the threads of its devices. What a program after it waits with must
    not be the thread that the first still needs: both would wait for ever.
    """
    forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = int(forced[1]) if forced else jax.config.jax_num_cpu_devices  # pyrefly: ignore[missing-attribute]
    if devices > 1 and 2 * devices > (os.cpu_count() or 1):
        os.environ.setdefault("NPROC", str(2 * devices))
