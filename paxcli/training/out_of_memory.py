"""What to do when a device's memory does not hold the train step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from etils import epath

from paxcli.errors import ConfigError, first_line
from paxcli.log import log
from paxcli.training.session import Session
from paxcli.training.state import bytes_per_device

_GIB = 2**30
SNAPSHOT = "out_of_memory.prof"


@contextlib.contextmanager
def out_of_memory_explained(session: Session, profile_dir: epath.Path) -> Iterator[None]:
    """Turns an XLA error for want of memory into one that says what to change, and keeps what the memory held.

    Raises:
      ConfigError: The recipe is too large for its devices. What they held is in `profile_dir`, for `pprof`.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        kept = _keep_snapshot(profile_dir)
        device = session.mesh.devices.flat[0]
        said = first_line(error).removeprefix("RESOURCE_EXHAUSTED: ")
        message = f"The memory of {device.device_kind} does not hold this recipe: {said}"
        raise ConfigError(f"{message}{kept}", " ".join(advice(session, _capacity(device)))) from error


def advice(session: Session, capacity: int | None) -> list[str]:
    """What takes less memory, the likeliest first.

    Args:
      session: The run's.
      capacity: Bytes of one device; None = not known.
    """
    config, abstract = session.config, session.abstract
    state = bytes_per_device(abstract)
    train, stack = config.task.train, getattr(config.task.model, "stack", None)
    smaller_state = (
        f"Parameters and optimizer take {state / _GIB:.1f} GiB of each device: shard them over more "
        "(`fsdp` or `tensor` in `mesh.ici_mesh_shape`), or take `optimizer=ShardedAdafactor`."
    )
    if capacity and state > 0.8 * capacity:
        return [smaller_state]
    ways = []
    rows = session.global_batch_size // train.num_microbatches
    if rows > session.mesh.shape["data"] * session.mesh.shape["fsdp"]:
        ways.append(f"Cut the batch: `--set num_microbatches={2 * train.num_microbatches}` gives the same update.")
    remat = getattr(stack, "remat_policy", "nothing")
    if remat != "nothing":
        ways.append(f"Recompute more: `--set remat_policy=nothing` (now {remat}).")
    logits = _logits_bytes(session, rows)
    if logits > state / 4 and not isinstance(getattr(config.task.model, "loss_chunk", 0), int):
        ways.append(
            f"The logits take up to {logits / _GIB:.1f} GiB a device: `--set loss_chunk=1024` makes those of so many"
            " tokens at a time."
        )
    return [*ways, smaller_state]


def _logits_bytes(session: Session, rows: int) -> int:
    """Of the rows that pass at once, in float32; 0 for a model without a vocabulary."""
    labels, vocab = session.spec.get("labels"), getattr(session.config.task.model, "vocab_size", None)
    if labels is None or not vocab or len(labels.shape) != 2:
        return 0
    return 4 * rows * labels.shape[1] * vocab // session.mesh.size


def _capacity(device: jax.Device) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")


def _keep_snapshot(profile_dir: epath.Path) -> str:
    """Writes what the devices of the first process hold; returns how to say so."""
    if jax.process_index() != 0:
        return ""
    path = profile_dir / SNAPSHOT
    try:
        profile_dir.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jax.profiler.device_memory_profile())
    except (OSError, RuntimeError) as error:
        log.warning("The snapshot of the memory could not be written: %s", error)
        return ""
    return f"\nWhat it held: {path} (look with `pprof`)."
