"""The checkpoints of one run: written in the background, committed whole or not at all, restored on any mesh."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from paxcli.checkpoint.array_differences import compare_arrays
from paxcli.checkpoint.fingerprint import in_host_memory
from paxcli.checkpoint.manifest import Manifest, describe_state, to_json
from paxcli.checkpoint.policy import Checkpoint, parse_duration
from paxcli.checkpoint.reading import (
    MANIFEST,
    STATE,
    named_leaves,
    nested,
    read_arrays,
    read_manifest,
)
from paxcli.config.paths import located
from paxcli.errors import DataError, MissingError, PaxError, first_line

# Steps past retention are renamed into here, at once, and removed later: a kill amid a removal shows half a step.
_TRASH = "deleted"

_MACHINE_FAULTS = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
}


class CheckpointStore:
    """The checkpoints under `directory`, one directory a step.

    Every process of a job calls every method, at the same steps. Saving goes on in the background; an error of it is
    raised by the next call of any method but `steps` and `latest_step`.

    Args:
      directory: `RUN_DIR/checkpoints`, local or on a bucket. Made by the first save.
      policy: Cadence and retention. None is for a reader, which never writes nor cleans up here.
    """

    def __init__(self, directory: str | os.PathLike[str], policy: Checkpoint | None = None):
        self.directory = epath.Path(located(directory))
        self._policy = policy
        self._open: Any = None
        self._sweeper: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The committed steps, oldest first, as they are on disk now."""
        if not self.directory.exists() or not any(path.name.isdigit() for path in self.directory.iterdir()):
            return []
        import orbax.checkpoint as ocp

        return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(self.directory))

    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        return max(self.steps(), default=None)

    def should_save(self, step: int) -> bool:
        """Whether the policy wants a checkpoint after `step`. Cheap enough for every step."""
        assert self._policy is not None
        if self._open is not None and not self._open.is_saving_in_progress():
            self.wait()
        return step > 0 and step % self._policy.save_interval_steps == 0

    def save(self, step: int, state: Any, input_state: dict[str, Any], force: bool = False) -> bool:
        """Saves when the policy wants it, or always with `force`; a step that is already there is left alone.

        Returns once the arrays are copied, so that the next step may donate them.

        Args:
          step: Steps done.
          state: A tree of arrays. Random keys as `jax.random.key_data`.
          input_state: What `BaseInput.get_state()` returned in this process.
          force: Save whatever the policy says.

        Returns:
          Whether it saved.

        Raises:
          MissingError: The directory cannot be written: no space, no permission.
          DataError: Any other failure of this save or of the one before.
        """
        if not (self.should_save(step) or force):
            return False
        with self._reported():
            self._manager.wait_until_finished()
            if step in self.steps():
                return False
            self._sweep()
            import orbax.checkpoint as ocp

            arrays = named_leaves(state)
            manifest = describe_state(step, arrays, _of_all_processes(input_state))
            items = {
                STATE: ocp.args.PyTreeSave(nested(_safe_from_donation(arrays))),
                MANIFEST: ocp.args.JsonSave(to_json(manifest)),
            }
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        return True

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """The state and this process's input state, as saved at `step`, bit for bit.

        Args:
          step: One of `steps()`.
          abstract_state: The state's tree, of arrays or of `jax.ShapeDtypeStruct`s with shardings: any mesh will do.

        Raises:
          DataError: The checkpoint does not hold this state, or is damaged.
        """
        if self._open is not None:
            self.wait()
        if step not in self.steps():
            raise DataError(f"There is no checkpoint of step {step} in {self.directory}.", self._others(step))
        step_dir = self.directory / str(step)
        wanted = named_leaves(abstract_state)
        with self._unusable(step):
            manifest = read_manifest(step_dir)
        _check_same_state(step, wanted, manifest)
        with self._unusable(step):
            arrays = read_arrays(step_dir, manifest, wanted)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted])
        return state, _of_this_process(step, manifest.input_states)

    def wait(self) -> None:
        """Returns when the save under way, if any, is committed."""
        if self._open is not None:
            with self._reported():
                self._open.wait_until_finished()

    def close(self) -> None:
        """Waits, then lets go of everything. Call it on every way out, also after an error."""
        manager, self._open = self._open, None
        if manager is not None:
            with self._reported():
                manager.close()
                self._sweep()
                if self._sweeper is not None:
                    self._sweeper.join()

    def _sweep(self) -> None:
        """Starts to remove, in the background, what retention has dropped."""
        trash = self.directory / _TRASH
        if self._sweeper is not None:
            self._sweeper.join()
        if jax.process_index() == 0 and trash.exists():
            self._sweeper = threading.Thread(target=_empty, args=(trash,), name="checkpoint-sweep")
            self._sweeper.start()

    @property
    def _manager(self) -> Any:
        """Orbax's manager, made at the first save. Making it removes what a killed save left behind."""
        if self._open is None:
            assert self._policy is not None
            import orbax.checkpoint as ocp

            logging.getLogger("absl").addFilter(_not_reported_here)
            arrays = ocp.PyTreeCheckpointHandler(use_compression=False)  # weights hardly shrink, and cores are busy
            registry = ocp.DefaultCheckpointHandlerRegistry()
            registry.add(STATE, ocp.args.PyTreeSave, arrays)
            self._open = ocp.CheckpointManager(
                self.directory,
                handler_registry=registry,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_preservation(self._policy),
                    cleanup_tmp_directories=True,
                    todelete_subdir=_TRASH,
                    enable_async_checkpointing=self._policy.async_save,
                ),
            )
        return self._open

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Turns what Orbax raises, in this call or in the background before it, into an error with a next step."""
        try:
            yield
        except PaxError:
            raise
        except Exception as error:
            kept = f"Complete checkpoints there: {listing_of_steps(self.steps())}."
            fault = _machine_fault(error)
            if fault:
                hint = f"Mend that and run the same command again: it resumes. {kept}"
                raise MissingError(f"Cannot write a checkpoint to {self.directory}: {fault}.", hint) from error
            message = f"Saving a checkpoint to {self.directory} failed: {first_line(error)}"
            raise DataError(message, f"Run the same command again: it resumes. {kept}") from error

    @contextlib.contextmanager
    def _unusable(self, step: int) -> Iterator[None]:
        """Says of damage which checkpoint it is in, and what is left."""
        try:
            yield
        except DataError as error:
            message = f"The checkpoint of step {step} in {self.directory} is unusable: {error.message}."
            raise DataError(message, self._others(step)) from error

    def _others(self, step: int) -> str:
        others = [other for other in self.steps() if other != step]
        if not others:
            return "There is no other checkpoint here; start a new run, or bring this one back from a copy."
        older = [other for other in others if other < step]
        hint = f"Also here: {listing_of_steps(others)}."
        return hint + (f" To go on from {older[-1]}, move {self.directory / str(step)} away." if older else "")


def _empty(trash: epath.Path) -> None:
    for path in trash.iterdir():
        shutil.rmtree(path, ignore_errors=True)


def _not_reported_here(record: logging.LogRecord) -> bool:
    """False for the stacks that Orbax logs of errors that it also raises."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def listing_of_steps(steps: list[int]) -> str:
    """The steps, the newest ten of them when there are many."""
    return ("… " if len(steps) > 10 else "") + ", ".join(map(str, steps[-10:])) if steps else "none"


def _safe_from_donation(arrays: dict[str, Any]) -> dict[str, Any]:
    """Copies of what lies in host memory: Orbax would lend it to the writer, and a step that donates it would wait.

    No step donates an array of numpy's.
    """
    return {name: jnp.copy(x) if isinstance(x, jax.Array) and in_host_memory(x) else x for name, x in arrays.items()}


def _preservation(policy: Checkpoint) -> Any:
    from orbax.checkpoint import checkpoint_managers as ocm

    kept: list[Any] = [ocm.LatestN(policy.save_max_to_keep)]
    if policy.save_keep_interval_steps is not None:
        kept.append(ocm.EveryNSteps(policy.save_keep_interval_steps))
    if policy.save_keep_interval_duration is not None:
        kept.append(ocm.EveryNSeconds(int(parse_duration(policy.save_keep_interval_duration).total_seconds())))
    return ocm.AnyPreservationPolicy(kept)


def _machine_fault(error: BaseException | None) -> str | None:
    """What this machine lacks, when that is why a write failed."""
    while error is not None:
        for number, fault in _MACHINE_FAULTS.items():
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                return fault
        error = error.__cause__ or error.__context__
    return None


def _check_same_state(step: int, wanted: dict[str, Any], manifest: Manifest) -> None:
    differences = compare_arrays(wanted, manifest.arrays)
    if differences:
        raise DataError(
            f"The checkpoint of step {step} is not of this model and optimizer: {differences.text()}.",
            "Undo the change of the recipe, or start another run: --run-dir NEW, with --from for these weights.",
        )


def _of_all_processes(input_state: dict[str, Any]) -> list[dict[str, Any]]:
    """The input states by process, or one when all are alike."""
    if jax.process_count() == 1:
        return [input_state]
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(input_state).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.asarray(text.size)).reshape(-1)
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    states = [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]
    return states[:1] if all(state == states[0] for state in states) else states


def _of_this_process(step: int, states: list[dict[str, Any]]) -> dict[str, Any]:
    if len(states) == 1:
        return states[0]
    if len(states) != jax.process_count():
        raise DataError(
            f"The checkpoint of step {step} holds the input's position for {len(states)} processes, and this job has "
            f"{jax.process_count()}.",
            "Resume with as many processes, or start another run from these weights with --from.",
        )
    return states[jax.process_index()]
