"""Out of memory: turns XLA's error into one that names what to change."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import jax
from etils import epath

from paxcli.errors import ConfigError, first_line
from paxcli.log import log
from paxcli.mesh.axes import BATCH_AXES
from paxcli.training.session import Session
from paxcli.training.state import bytes_per_device

_GIB = 2**30
SNAPSHOT = "out_of_memory.prof"


@contextlib.contextmanager
def explain_out_of_memory(session: Session, profile_dir: epath.Path) -> Iterator[None]:
    """Turns XLA's out-of-memory error into one that names what to change, and saves a memory profile.

    Raises:
      ConfigError: The recipe does not fit into the memory of its devices. Their profile is in `profile_dir`, for
        `pprof`.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        snapshot = _save_snapshot(profile_dir)
        device = session.mesh.devices.flat[0]
        reason = first_line(error).removeprefix("RESOURCE_EXHAUSTED: ")
        message = f"This recipe does not fit into the memory of {device.device_kind}: {reason}"
        capacity = (device.memory_stats() or {}).get("bytes_limit")
        raise ConfigError(f"{message}{snapshot}", " ".join(advice(session, capacity))) from error


def advice(session: Session, capacity: int | None) -> list[str]:
    """Ways to use less memory, the most promising first.

    Args:
      session: The session of the run.
      capacity: Memory of one device in bytes; None = unknown.
    """
    config, abstract = session.config, session.abstract
    state = bytes_per_device(abstract)
    train, model = config.task.train, session.experiment.task.model
    fixes = "shard them over more (`fsdp` or `tensor` in `mesh.ici_mesh_shape`), or use `optimizer=ShardedAdafactor`"
    smaller_state = f"Parameters and optimizer take {state / _GIB:.1f} GiB of each device: {fixes}."
    if capacity and state > 0.8 * capacity:
        return [smaller_state]
    ways = []
    rows = session.global_batch_size // train.num_microbatches
    if rows > math.prod(session.mesh.shape[axis] for axis in BATCH_AXES):
        option = f"--set num_microbatches={2 * train.num_microbatches}"
        ways.append(f"Accumulate gradients over microbatches: `{option}` gives the same update.")
    for path, stack in model.stacks().items():
        if stack.remat_policy != "nothing":
            ways.append(f"Recompute more: `--set {path}.remat_policy=nothing` (now {stack.remat_policy}).")
    shape = model.unchunked_logits(session.spec)
    logits = 4 * rows * math.prod(shape[1:]) // session.mesh.size if shape else 0  # float32
    if logits > state / 4:
        size = f"The logits take up to {logits / _GIB:.1f} GiB per device"
        ways.append(f"{size}: `--set loss_chunk=1024` computes them for so many tokens at a time.")
    return [*ways, smaller_state]


def _save_snapshot(profile_dir: epath.Path) -> str:
    """Writes the memory profile of process 0; returns a line that names the file."""
    if jax.process_index() != 0:
        return ""
    path = profile_dir / SNAPSHOT
    try:
        profile_dir.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jax.profiler.device_memory_profile())
    except (OSError, RuntimeError) as error:
        log.warning("The memory profile could not be written: %s", error)
        return ""
    return f"\nMemory profile: {path} (view it with `pprof`)."
