"""Saves and restores the checkpoints of one run: asynchronous and atomic saves, restore on any mesh."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from paxcli.checkpoint.array_differences import compare_arrays
from paxcli.checkpoint.fingerprint import in_host_memory, start_fingerprints
from paxcli.checkpoint.local_tier import RECORD, LocalTier, discard_local, gather
from paxcli.checkpoint.manifest import InputState, Manifest, Recipe, describe_arrays
from paxcli.checkpoint.policy import Checkpoint, parse_duration
from paxcli.checkpoint.reading import MANIFEST, STATE, named_leaves, nest_by_name, read_arrays, read_manifest
from paxcli.config.bucket import deadline, exit_when_stuck
from paxcli.config.paths import resolve_path
from paxcli.errors import DataError, MissingError, PaxError, RemoteError, Stopped, exit_now, first_line, machine_fault

# In the errors of a bucket that cannot be reached: its files are not at fault.
_NO_ANSWER = re.compile(r"[A-Z]+_(EXCEEDED|EXHAUSTED)|UNA[A-Z]+|PERMISSION_DENIED|HttpError|[Tt]imed? ?out|onnection")
# Checkpoints dropped by the retention policy are first renamed into this directory, then deleted in the background: a
# process killed during a deletion must not leave a partial checkpoint among the valid ones.
_TRASH = "deleted"
COMMITTED = "commit_success.txt"  # Orbax writes it last; in a bucket, a directory without it is not a checkpoint
_CLOCK_SECONDS = 60  # a change of the clock from which on it explains a timeout


class DamagedCheckpoint(DataError):
    """The files of a checkpoint were changed or lost after it was saved."""


class CheckpointStore(contextlib.AbstractContextManager["CheckpointStore"]):
    """The checkpoints under `directory`, one subdirectory per step.

    Every process of a job must call every method, at the same steps. Saves run in the background; their errors are
    raised by the next call of any method except `steps` and `latest_step`.

    Args:
      directory: `RUN_DIR/checkpoints`, local or on a bucket. Created by the first save.
      policy: Save interval and retention. None: read-only, never writes or deletes anything.
    """

    def __init__(self, directory: str | os.PathLike[str], policy: Checkpoint | None = None):
        self.directory = epath.Path(resolve_path(directory))
        self._policy = policy or Checkpoint()
        self._open: Any = None
        self._cleanup: threading.Thread | None = None
        local = self._policy.local_directory
        self._local = LocalTier(self.directory, local) if local is not None else None
        self._is_remote = "://" in os.fspath(self.directory)
        self._timeout = policy.storage_timeout_seconds if policy is not None and self._is_remote else None
        self._clock = time.time() - time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps with a committed checkpoint on disk, oldest first."""
        if not self.directory.exists() or not any(path.name.isdigit() for path in self.directory.iterdir()):
            return []
        import orbax.checkpoint as ocp

        return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(self.directory))

    def latest_step(self) -> int | None:
        """The newest committed step, or None; with a local tier, the newest of both."""
        return max([*self.steps(), *(self._local.steps if self._local is not None else ())], default=None)

    def should_save(self, step: int) -> bool:
        """Whether the policy requires a checkpoint after `step`. Cheap enough to call at every step."""
        if self._open is not None and not self._open.is_saving_in_progress():
            self.wait()
        local = self._policy.local_save_interval_steps
        return step > 0 and (step % self._policy.save_interval_steps == 0 or (local is not None and step % local == 0))

    def save(
        self, step: int, state: Any, input_state: InputState, force: bool = False, recipe: Mapping[str, Any] = {}
    ) -> bool:
        """Saves if the policy requires it or `force` is set. An existing checkpoint of this step is not overwritten.

        Returns once the arrays are copied, so the next train step may donate them.

        Args:
          step: Number of completed steps.
          state: A tree of arrays, with random keys as `jax.random.key_data`.
          input_state: `BaseInput.get_state()` of this process's inputs, by split.
          force: Save regardless of the policy.
          recipe: Path → plain value of the resolved recipe, to resume without `config.txt`; empty = not recorded.

        Returns:
          Whether a checkpoint was saved.

        Raises:
          MissingError: The directory is not writable: no space, no permission.
          RemoteError: A bucket does not answer.
          Stopped: The clock was changed, so that the save timed out.
          DataError: Any other failure of this save or of the previous one.
        """
        if not (self.should_save(step) or force):
            return False
        arrays = named_leaves(state)
        with self._translate_write_errors():
            if self._local is not None and not force and step % self._policy.save_interval_steps:
                self._local.save(step, arrays, input_state, recipe)
                return True
            self._manager.wait_until_finished()
            if step in self.steps():
                return False
            self._start_cleanup()
            import orbax.checkpoint as ocp

            copied = _copy_host_arrays(arrays)
            fingerprints, states = start_fingerprints(copied), _gather_input_states(input_state)

            def manifest() -> Manifest:
                return Manifest(step, describe_arrays(copied, fingerprints()), states, recipe)

            # In files of limited size, Orbax would split arrays above 2 GB, which copies them.
            limit = 0 if all(isinstance(x, np.ndarray) for x in arrays.values()) else None
            items = {
                STATE: ocp.args.PyTreeSave(nest_by_name(copied), ocdbt_target_data_file_size=limit),
                MANIFEST: ocp.args.JsonSave(manifest),  # pyrefly: ignore
            }
            with deadline(self._timeout):
                self._manager.save(step, args=ocp.args.Composite(**items), force=True)
            exit_when_stuck(self._timeout, self._manager.is_saving_in_progress)
        return True

    def restore_newest(self, abstract_state: Any, announce: Callable[[str], object]) -> tuple[int, Any, InputState]:
        """Restores the newest checkpoint, or, with `on_corrupt="previous"`, the newest one that is sound.

        In a job of several processes only some may notice the damage. Each that does renames the checkpoint and exits
        with code 75, which ends the others; started again, all resume from an earlier one.

        Args:
          abstract_state: As for `restore`.
          announce: Receives a line for each checkpoint that is skipped.

        Returns:
          The step, and what `restore` returns for it.

        Raises:
          DataError: As for `restore`; also if there is no checkpoint, or the oldest is damaged too.
        """
        steps, wanted = self.steps(), named_leaves(abstract_state)
        for step in steps[::-1] or [0]:
            if self._local is not None and (found := self._local.restore_newest(wanted, step, announce)):
                newest, arrays, positions = found
                return newest, _like(abstract_state, arrays), positions
            if not steps:
                break
            try:
                restored = self.restore(step, abstract_state)
                discard_local(self.directory)  # also if the recipe no longer has a local tier: it may have one again
                return step, *restored
            except DamagedCheckpoint as error:
                if self._policy.on_corrupt == "refuse" or step == steps[0]:
                    raise
                announce(f"{error.message} It is now {self._set_aside(step)}, and an earlier one takes its place.")
                if jax.process_count() > 1:
                    exit_now(Stopped(error.message, "Start the job again: it resumes from an earlier one."))
        hint = f"Undo that change, such as another mesh, or delete {self.directory / RECORD} to start at step 0."
        raise DataError(f"{self.directory} has no checkpoint, and the local ones cannot be used.", hint)

    def _set_aside(self, step: int) -> str:
        """Gives a damaged checkpoint a name that is not a step, and returns it."""
        aside = self.directory / f"{step}.damaged"
        while aside.exists() and step in self.steps():
            aside = aside.with_name(f"{aside.name}+")
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # another process was faster
            (self.directory / str(step)).rename(aside)
        return aside.name

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, InputState]:
        """Restores the state and this process's input states, bit for bit as saved at `step`.

        Args:
          step: One of `steps()`.
          abstract_state: The state's tree of arrays or of `jax.ShapeDtypeStruct`s with shardings, on any mesh.

        Raises:
          DamagedCheckpoint: The checkpoint cannot be read, was changed since it was saved, or is gone: another process
            may have set it aside.
          DataError: Its arrays differ from `abstract_state`.
          MissingError: This machine cannot read the files, as without permission.
        """
        self.wait()
        if step not in self.steps():
            raise DamagedCheckpoint(f"{self.directory} has no checkpoint of step {step}.", self._hint_other_steps(step))
        step_dir = self.directory / str(step)
        wanted = named_leaves(abstract_state)
        with self._translate_read_errors(step):
            manifest = read_manifest(step_dir)
        if differences := compare_arrays(wanted, manifest.arrays):
            problem = f"does not match this model and optimizer: {differences.text()}"
            hint = "Undo the change of the recipe, or start another run: --run-dir NEW, with --from for these weights."
            raise DataError(f"The checkpoint of step {step} {problem}.", hint)
        with self._translate_read_errors(step), deadline(self._timeout):
            arrays = read_arrays(step_dir, manifest, wanted)
        states = manifest.input_states
        if len(states) not in (1, jax.process_count()):
            has = f"has input positions for {len(states)} processes, and this job has {jax.process_count()}"
            hint = "Resume with the same number of processes, or start another run from these weights with --from."
            raise DataError(f"The checkpoint of step {step} {has}.", hint)
        return _like(abstract_state, arrays), states[jax.process_index() if len(states) > 1 else 0]

    def recipe(self, step: int) -> Recipe:
        """Path → plain value of the recipe that the checkpoint of a step was saved with; empty if not recorded.

        Raises:
          DataError: The checkpoint's manifest is damaged.
        """
        if self._local is not None and step not in self.steps():
            return self._local.read_manifest(step).recipe
        with self._translate_read_errors(step):
            return read_manifest(self.directory / str(step)).recipe

    def wait(self) -> None:
        """Blocks until the save in progress, if any, is committed."""
        if self._open is not None:
            with self._translate_write_errors():
                self._open.wait_until_finished()

    def close(self) -> None:
        """Waits for the save in progress and releases all resources. Call it also after an error."""
        manager, self._open = self._open, None
        with self._translate_write_errors():
            if manager is not None:
                manager.close()
                if self._cleanup is not None:
                    self._cleanup.join()
                if jax.process_index() == 0:
                    shutil.rmtree(self.directory / _TRASH, ignore_errors=True)
            if self._local is not None:
                self._local.close(max(self.steps(), default=0))

    def _start_cleanup(self) -> None:
        """Starts to delete, in the background, the checkpoints that the retention policy dropped."""
        trash = self.directory / _TRASH
        if self._cleanup is not None:
            self._cleanup.join()
        if jax.process_index() == 0 and trash.exists():
            self._cleanup = threading.Thread(target=_empty_directory, args=(trash,), name="checkpoint-cleanup")
            self._cleanup.start()

    @property
    def _manager(self) -> Any:
        """Orbax's manager, created at the first save. Creating it deletes the remains of an interrupted save."""
        if self._open is None:
            import orbax.checkpoint as ocp

            from paxcli.checkpoint.orbax_parts import DurableRename, ManifestHandler, silence_writes

            silence_writes()
            # NumPy arrays are written from their own memory, without a copy.
            types = ocp.type_handlers.create_type_handler_registry(
                (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
                (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),
            )
            # Weights hardly compress.
            arrays = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=types)
            registry = ocp.DefaultCheckpointHandlerRegistry()
            registry.add(STATE, ocp.args.PyTreeSave, arrays)
            registry.add(MANIFEST, ocp.args.JsonSave, ManifestHandler())
            self._open = ocp.CheckpointManager(
                self.directory,
                handler_registry=registry,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_preservation_policy(self._policy),
                    cleanup_tmp_directories=True,
                    todelete_subdir=_TRASH,
                    temporary_path_class=None if self._is_remote else DurableRename,
                    enable_async_checkpointing=self._policy.async_save,
                ),
            )
        return self._open

    @contextlib.contextmanager
    def _translate_write_errors(self) -> Iterator[None]:
        """Turns Orbax's exceptions, of this call or of the background save before it, into errors with a hint."""
        try:
            yield
        except PaxError:
            raise
        except Exception as error:
            kept = f"Complete checkpoints there: {format_steps(self.steps())}."
            if fault := machine_fault(error):
                written = " or ".join(filter(None, (os.fspath(self.directory), self._policy.local_directory)))
                place = getattr(error, "filename", None) or written  # a full disk has no name
                hint = f"Fix that and run the same command again: it resumes. {kept}"
                raise MissingError(f"Cannot write a checkpoint to {place}: {fault}.", hint) from error
            message = f"Saving a checkpoint to {self.directory} failed: {first_line(error)}"
            kind = RemoteError if self._is_remote else DataError
            jump = time.time() - time.monotonic() - self._clock
            if isinstance(error, TimeoutError) and abs(jump) > _CLOCK_SECONDS:
                message, kind = f"{message} The clock of this machine changed by {jump:,.0f} s.", Stopped
            raise kind(message, f"Run the same command again: it resumes. {kept}") from error

    @contextlib.contextmanager
    def _translate_read_errors(self, step: int) -> Iterator[None]:
        """Adds the damaged checkpoint's step and directory to a DataError, with a hint at the other checkpoints."""
        try:
            yield
        except DataError as error:
            which = f"checkpoint of step {step} in {self.directory}"
            if fault := machine_fault(error):
                hint = "Fix that and run the same command again."
                raise MissingError(f"Cannot read the {which}: {fault}.", hint) from error
            if self._is_remote and _NO_ANSWER.search(error.message):
                hint = "Run the same command again when the bucket answers."
                raise RemoteError(f"Cannot read the {which}: {error.message}.", hint) from error
            message = f"The {which} is unusable: {error.message}."
            raise DamagedCheckpoint(message, self._hint_other_steps(step)) from error

    def _hint_other_steps(self, step: int) -> str:
        if not (others := [other for other in self.steps() if other != step]):
            return "There is no other checkpoint; start a new run, or restore this one from a backup."
        hint = f"Other checkpoints: {format_steps(others)}."
        if older := [other for other in others if other < step]:
            hint += f" To resume from {older[-1]}: `--on-corrupt previous`."
        return hint


def delete_step(step_dir: epath.Path) -> None:
    """Deletes one checkpoint as retention does: if the process dies meanwhile, the next training deletes the rest.

    In a bucket, where a rename would copy every array, what is left is not a checkpoint: its marker goes first.
    """
    if "://" in os.fspath(step_dir):
        (step_dir / COMMITTED).unlink(missing_ok=True)
        return step_dir.rmtree()
    trash = step_dir.parent / _TRASH
    shutil.rmtree(trash, ignore_errors=True)  # the rest of an earlier deletion
    trash.mkdir(exist_ok=True)
    step_dir.rename(trash / step_dir.name)
    shutil.rmtree(trash, ignore_errors=True)


def _like(abstract_state: Any, arrays: Mapping[str, Any]) -> Any:
    """A tree like `abstract_state` with arrays of these names."""
    names = named_leaves(abstract_state)
    return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in names])


def _empty_directory(trash: epath.Path) -> None:
    for path in trash.iterdir():
        shutil.rmtree(path, ignore_errors=True)


def find_steps(run_dir: str | os.PathLike[str], steps: Collection[int] = ()) -> list[int]:
    """Steps of a run that have a checkpoint, oldest first: the given ones, or all.

    Raises:
      DataError: There is no such checkpoint.
    """
    present = CheckpointStore(epath.Path(run_dir) / "checkpoints").steps()
    missing = sorted({*steps} - {*present})
    if missing or not present:
        problem = f"no checkpoint of step {format_steps(missing)}" if present else "no checkpoint"
        hint = f"It has: {format_steps(present)}." if present else "Train in it first, or `pax import` weights into it."
        raise DataError(f"{os.fspath(run_dir)} has {problem}.", hint)
    return [step for step in present if step in steps] or present


def find_step(run_dir: str | os.PathLike[str], step: int | None) -> int:
    """A step of a run that has a checkpoint; None = the latest.

    Raises:
      DataError: There is no such checkpoint.
    """
    return find_steps(run_dir, () if step is None else (step,))[-1]


def format_steps(steps: list[int]) -> str:
    """The steps as text, at most the newest ten."""
    return ("… " if len(steps) > 10 else "") + ", ".join(map(str, steps[-10:])) or "none"


def _copy_host_arrays(arrays: dict[str, Any]) -> dict[str, Any]:
    """Copies JAX arrays in host memory: Orbax writes from their buffers, and a step that donates one would block.

    NumPy arrays are never donated, so they are not copied.
    """
    # `jnp.copy` would compile a program for each shape.
    copies = {name: x for name, x in arrays.items() if isinstance(x, jax.Array) and in_host_memory(x)}
    return arrays | {name: jax.device_put(x, x.sharding, may_alias=False) for name, x in copies.items()}


def _preservation_policy(policy: Checkpoint) -> Any:
    from orbax.checkpoint import checkpoint_managers as ocm

    kept: list[Any] = [ocm.LatestN(policy.save_max_to_keep)]
    if policy.save_keep_interval_steps is not None:
        kept.append(ocm.EveryNSteps(policy.save_keep_interval_steps))
    if policy.save_keep_interval_duration is not None:
        # Orbax takes fractions of a second too.
        kept.append(ocm.EveryNSeconds(parse_duration(policy.save_keep_interval_duration).total_seconds()))  # pyrefly: ignore
    return ocm.AnyPreservationPolicy(kept)


def _gather_input_states(input_state: InputState) -> list[InputState]:
    """The input state of every process, or a single one if they are all equal."""
    text = np.frombuffer(json.dumps(input_state).encode(), np.uint8)
    lengths = gather(np.array([text.size])).reshape(-1)
    rows = gather(np.pad(text, (0, lengths.max() - text.size)))
    states = [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]
    return states[:1] if all(state == states[0] for state in states) else states
