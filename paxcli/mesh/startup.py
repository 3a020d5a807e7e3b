"""Process start-up: joins a multi-host job, configures libtpu and CPU threads, and releases free memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxcli.errors import ConfigError, RemoteError, Stopped, exit_now, first_line
from paxcli.log import log

_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_COUNT = ("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT")
_INDEX = ("JAX_PROCESS_ID", "JAX_PROCESS_INDEX")

# Environment variables of jobs that `jax.distributed.initialize()` detects without arguments.
_JOB_SIZES = {
    "MEGASCALE_NUM_SLICES": "a multislice TPU job",
    "TPU_PROCESS_ADDRESSES": "a TPU job",
    "TPU_WORKER_HOSTNAMES": "a TPU job",
    "SLURM_NTASKS": "a Slurm job step",
    "OMPI_COMM_WORLD_SIZE": "an Open MPI job",
}


# Errors that a computation over several processes raises when one of them is gone.
_COMPUTATION = (ValueError, jax.errors.JaxRuntimeError)
_LOST = re.compile("Gloo|NCCL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED")
_PROBE_SECONDS = 2.0


def start_distributed(timeout_seconds: float = 300, libtpu: str = "", heartbeat_timeout_seconds: int = 100) -> None:
    """Joins the other processes of this job, if any, and sets libtpu's arguments.

    The job is found from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, from Slurm, Open MPI, or Cloud
    TPU (GKE, multislice, or a TPU VM with several hosts). Call this before JAX initializes its devices.

    Args:
      timeout_seconds: How long to wait for the other processes.
      libtpu: Arguments of libtpu.
      heartbeat_timeout_seconds: After this time without a sign of life from a process, the others exit with code 75.

    Raises:
      ConfigError: The environment variables are incomplete or contradictory.
      Stopped: Not all processes connected in time.
      RemoteError: The job cannot be joined for another reason.
    """
    _set_cpu_threads()
    set_libtpu_arguments(libtpu)
    if jax.distributed.is_initialized():
        return
    address, count, index = place = _explicit_job(os.environ) or (None, None, None)
    job = _detect_job(os.environ) if count is None else f"process {index} of {count} at {address}"
    if not job or count == 1:
        return
    limits = dict(initialization_timeout=int(timeout_seconds) + 60, heartbeat_timeout_seconds=heartbeat_timeout_seconds)
    # On CPUs, executables that run concurrently may start their collectives in different orders, and deadlock.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    log.info("Joining %s.", job)
    _redirect_native_stdout()
    # In a thread: on its own timeout, JAX aborts the process with a C++ stack.
    ends = _try_for(timeout_seconds, lambda: jax.distributed.initialize(*place, **limits))
    hint = "Check that every process was started, and that the coordinator's port is open between the hosts."
    if not ends:
        raise Stopped(f"Joining {job}: not all processes connected within {timeout_seconds} s.", hint)
    if isinstance(ends[0], BaseException):
        raise RemoteError(f"Joining {job}: {first_line(ends[0])}", hint) from ends[0]
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)
    if threading.current_thread() is threading.main_thread():  # again, since JAX's own handler ends no process
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def agree(value: int) -> int:
    """`value` of process 0, in every process of this job."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(value))) if jax.distributed.is_initialized() else value


def find_different(text: str) -> list[int]:
    """Indices of the processes of this job whose `text` is not that of process 0."""
    own = np.uint32(zlib.crc32(text.encode()))
    checksums = np.ravel(multihost_utils.process_allgather(own) if jax.distributed.is_initialized() else own)
    return np.flatnonzero(checksums != checksums[0]).tolist()


def set_libtpu_arguments(arguments: str) -> None:
    """Adds `arguments` to LIBTPU_INIT_ARGS. Arguments that are already there take precedence."""
    existing = os.environ.get("LIBTPU_INIT_ARGS", "")
    if arguments and arguments not in existing:
        os.environ["LIBTPU_INIT_ARGS"] = f"{arguments} {existing}".strip()  # libtpu uses the last one


def return_free_memory() -> None:
    """Returns malloc's free memory to the operating system (glibc only): hundreds of MB after a compilation."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _explicit_job(env: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Coordinator address, process count and process index from JAX's variables, or None if they are not set."""
    address = env.get(_ADDRESS)
    count = next((env[name] for name in _COUNT if env.get(name)), None)
    index = next((env[name] for name in _INDEX if env.get(name)), None)
    if count is None and index is None and (address is None or _detect_job(env)):
        return None
    if count == "1" and address is None:
        return "", 1, 0
    parts = {_ADDRESS: address, _COUNT[0]: count, _INDEX[0]: index}
    if missing := [name for name, value in parts.items() if not value]:
        given = " and ".join(name for name in parts if name not in missing)
        hint = f"Set all of {', '.join(parts)} on every process, or none of them."
        raise ConfigError(f"{given} set up a multi-process job, but {' and '.join(missing)} is not set.", hint)
    assert address and count and index
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        hint = "Set it to the address of process 0."
        raise ConfigError(f"{_ADDRESS} is `{address}`; expected host:port, such as 10.0.0.1:8476.", hint)
    if not count.isdigit() or not index.isdigit() or not int(index) < int(count):
        place = f"{_INDEX[0]}={index} does not match {_COUNT[0]}={count}"
        raise ConfigError(f"{place}: the index must be from 0 to the count minus 1.", "Correct the two variables.")
    return address, int(count), int(index)


def _detect_job(env: Mapping[str, str]) -> str | None:
    """A description of the multi-process job that this process belongs to, or None for a single process."""
    for name, kind in _JOB_SIZES.items():
        if name == "SLURM_NTASKS" and "SLURM_STEP_NODELIST" not in env:  # inside sbatch or salloc, outside srun
            continue
        value = env.get(name, "")
        if (int(value) if value.isdigit() else len([part for part in value.split(",") if part])) > 1:
            return f"{kind} ({name}={value})"
    # JAX sets TPU_ML_PLATFORM on import, on TPU VMs only.
    if env.get("TPU_ML_PLATFORM") == "JAX" and "TPU_SKIP_MDS_QUERY" not in env and "TPU_WORKER_HOSTNAMES" not in env:
        hosts = _count_tpu_vm_hosts(env.get("GCE_METADATA_IP", "metadata.google.internal"))
        if hosts > 1:
            return f"a TPU VM of {hosts} hosts"
    return None


def _count_tpu_vm_hosts(metadata_server: str) -> int:
    """The number of hosts in all slices of this TPU VM's job."""
    try:
        hosts = len(_read_metadata(metadata_server, "worker-network-endpoints").split(","))
        slices = re.search(r"^MEGASCALE_NUM_SLICES: *'?(\d+)", _read_metadata(metadata_server, "tpu-env"), re.MULTILINE)
    except OSError as error:
        log.warning("This is a TPU VM, but its metadata server does not answer (%s): assuming a single host.", error)
        return 1
    return hosts * (int(slices[1]) if slices else 1)


def _read_metadata(server: str, key: str) -> str:
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.read().decode()
    except urllib.error.HTTPError:  # the machine has no such attribute
        return ""


def _try_for(seconds: float, call: Callable[[], object]) -> list[object]:
    """The result of `call`, or its error, from a thread of its own; empty if that takes longer than `seconds`."""
    ends: list[object] = []

    def run() -> None:
        try:
            ends.append(call())
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            ends.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return ends


def _lost_process(cause: str) -> Stopped:
    hint = "Start all processes again: they resume from the latest checkpoint."
    return Stopped(f"Another process of this job ended or cannot be reached: {cause}", hint)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(_: int) -> None:
    """Handles SIGABRT in the thread that aborts: JAX's client aborts the process when it loses the job.

    Python's own handlers run in the main thread, which waits in a computation by then.
    """
    from jax._src.distributed import global_state as job

    # After an error, the client of JAX's coordination service never answers.
    ends = _try_for(_PROBE_SECONDS, lambda: job.client.key_value_try_get("pax/no-such-key"))  # pyrefly: ignore
    if not ends or "NOT_FOUND" not in str(ends[0]):
        exit_now(_lost_process("JAX's coordination service reports an error."))


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """In a job of several processes, ends this one at once on an error: clean-up would wait for the others."""
    try:
        yield
    except Exception as error:
        if not jax.distributed.is_initialized() or isinstance(error, Stopped):
            raise
        causes = [error, error.__cause__, error.__context__]
        lost = next((one for one in causes if isinstance(one, _COMPUTATION) and _LOST.search(str(one))), None)
        if lost is not None:
            exit_now(_lost_process(first_line(lost)))
        exit_now(error)


def _redirect_native_stdout() -> None:
    """Sends native code's stdout to stderr and keeps Python's: Gloo logs its connections to stdout."""
    if sys.stdout.fileno() != 1:  # stdout is captured, or already redirected
        return
    sys.stdout.flush()
    python_stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(python_stdout, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def _set_cpu_threads() -> None:
    """Gives XLA two threads for each CPU device, instead of one.

    An executable that waits in a collective blocks the threads of its devices. A second executable must not block the
    threads that the first one still needs, or both deadlock.
    """
    forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = int(forced[1]) if forced else jax.config.jax_num_cpu_devices  # pyrefly: ignore[missing-attribute]
    if devices > 1 and 2 * devices > (os.cpu_count() or 1):
        os.environ.setdefault("NPROC", str(2 * devices))
