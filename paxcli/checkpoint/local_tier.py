"""The local tier of a run's checkpoints: each process saves its own shards, often, to a disk of its machine."""

from __future__ import annotations

import collections
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from paxcli.checkpoint.fingerprint import fingerprints
from paxcli.checkpoint.manifest import InputState, Manifest, Recipe, describe_arrays, from_json, to_json
from paxcli.config.paths import rename_durably, replace_text, resolve_path
from paxcli.errors import DataError, first_line
from paxcli.log import log

RECORD, _SHARDS, _MANIFEST = "local.txt", "shards.npz", "manifest.json"
_KEPT = 2  # when a process dies, the others may be one save ahead of it


class LocalTier:
    """Checkpoints in `DIRECTORY/RUN/process-I-of-N/STEP/`. Every process of a job calls every method.

    Only a step that every process has can be restored, and only on the mesh that it was saved from. RUN is a hash of
    the run's path, so that a copy of a run does not continue from the original's steps. Local checkpoints count if
    `checkpoints/local.txt` names DIRECTORY: one deletes them with the run directory. A run that starts from another
    checkpoint deletes them too.

    Args:
      checkpoints: Directory of the run's own checkpoints.
      directory: The recipe's `checkpoint.local_directory`.

    Attributes:
      steps: The steps that every process had when this job started, oldest first.

    Raises:
      DataError: All checkpoints of the run are local ones, of another number of processes.
    """

    def __init__(self, checkpoints: epath.Path, directory: str):
        self._record, self._directory = checkpoints / RECORD, directory
        self._root = _root(checkpoints, directory)
        self._folder = self._root / f"process-{jax.process_index()}-of-{jax.process_count()}"
        self._pool = ThreadPoolExecutor(1, "local-checkpoint")
        self._pending: Future[None] | None = None
        self._is_recorded = _recorded_root(checkpoints) == self._root
        if not self._is_recorded:  # what it has is older, or of another run
            shutil.rmtree(self._root, ignore_errors=True)
        rows = gather(np.resize(np.array([*reversed(_steps(self._folder)), 0], np.int32), 8))
        self.steps = sorted(set.intersection(*map(set, rows.tolist())) - {0})
        newest = max(_steps(checkpoints), default=0)
        local = {path.parent.name.rpartition("-")[2]: int(path.name) for path in find_local(checkpoints)}
        if local and str(jax.process_count()) not in local and not newest:
            problem = f"were saved locally with process count {min(local)}, and this job's is {jax.process_count()}"
            hint = f"Resume with as many processes, or delete {self._record} and start at step 0."
            raise DataError(f"All checkpoints of {checkpoints.parent} {problem}.", hint)
        if not self.steps and self._record.exists() and max([rows.max(), *local.values()]) >= newest:
            log.warning("No step has a local checkpoint of every process: training continues at step %d.", newest)

    def save(self, step: int, arrays: Mapping[str, Any], input_state: InputState, recipe: Recipe) -> None:
        """Copies this process's shards of `arrays`, and writes them in the background."""
        self.wait()
        gather(np.zeros(1, np.int32))  # the save before is now complete everywhere
        if jax.process_index() == 0 and not self._is_recorded:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._record, self._directory)
            self._is_recorded = True
        self._pending = self._pool.submit(self._write, step, _local_shards(arrays), input_state, recipe)

    def _write(self, step: int, shards: dict[str, np.ndarray], input_state: InputState, recipe: Recipe) -> None:
        partial, final = self._folder / f"{step}.tmp", self._folder / str(step)
        for leftover in (partial, final):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        # As bytes, since NumPy's format does not know all dtypes of JAX.
        contents = {key: shard.reshape(-1).view(np.uint8) for key, shard in shards.items()}
        np.savez(partial / _SHARDS, allow_pickle=False, **contents)
        manifest = Manifest(step, describe_arrays(shards, fingerprints(shards)), [input_state], recipe)
        (partial / _MANIFEST).write_text(json.dumps(to_json(manifest)))
        rename_durably(partial, final)
        saved = _steps(self._folder)
        kept = [each for each in saved if each <= step][-_KEPT:]
        for other in {*saved} - {*kept}:  # older ones, and newer ones of an abandoned start
            shutil.rmtree(self._folder / str(other))

    def wait(self) -> None:
        """Waits for the save in progress. Raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def restore_newest(
        self, wanted: Mapping[str, Any], after: int, announce: Callable[[str], object]
    ) -> tuple[int, dict[str, jax.Array], InputState] | None:
        """The newest state after step `after` that all processes can restore, with the inputs' positions, or None.

        Args:
          wanted: Name → shape, dtype and sharding.
          after: The newest step of the run's own checkpoints.
          announce: Receives a line for each step that cannot be used.
        """
        for step in [step for step in reversed(self.steps) if step > after]:
            found, problem = None, "another process cannot read it"
            try:
                found = self._read(step, wanted)
            except KeyError:
                problem = "it was saved on another mesh"
            except jax.errors.JaxRuntimeError:
                raise  # such as out of memory: the files are not at fault
            except Exception as error:  # NumPy and zipfile raise many types
                problem = first_line(error)
            if gather(np.array([found is not None])).all() and found is not None:
                return step, *found
            announce(f"The local checkpoint of step {step} cannot be used: {problem}.")
            self.steps.remove(step)
        return None

    def read_manifest(self, step: int) -> Manifest:
        """The manifest of one of `steps`."""
        return from_json(json.loads((self._folder / str(step) / _MANIFEST).read_text()))

    def _read(self, step: int, wanted: Mapping[str, Any]) -> tuple[dict[str, jax.Array], InputState]:
        manifest = self.read_manifest(step)
        with (self._folder / str(step) / _SHARDS).open("rb") as opened, np.load(opened) as file:
            found = {key: file[key].view(jnp.dtype(x.dtype)).reshape(x.shape) for key, x in manifest.arrays.items()}
        if fingerprints(found) != {key: x.fingerprint for key, x in manifest.arrays.items()}:
            raise DataError("it changed since it was saved")
        return {name: _assemble(name, x, found) for name, x in wanted.items()}, manifest.input_states[0]

    def close(self, newest: int) -> None:
        """Waits for the save in progress. Deletes the local checkpoints if the run's own reach step `newest`."""
        self.wait()
        self._pool.shutdown()
        if max(_steps(self._folder), default=0) <= newest:
            shutil.rmtree(self._folder, ignore_errors=True)


def find_local(checkpoints: epath.Path) -> list[epath.Path]:
    """The local checkpoints on this machine, `process-I-of-N/STEP`, of the run whose own are in `checkpoints`."""
    root = _recorded_root(checkpoints)
    folders = sorted(root.glob("process-*")) if root is not None else []
    return [folder / str(step) for folder in folders for step in _steps(folder)]


def _recorded_root(checkpoints: epath.Path) -> epath.Path | None:
    """The directory of the run on each machine's local disk; None if it has saved nothing there."""
    record = checkpoints / RECORD
    try:
        return _root(checkpoints, record.read_text()) if record.exists() else None
    except ValueError:  # not text, or not a path
        hint = "Write `checkpoint.local_directory` of the recipe into it; or delete it, and those checkpoints with it."
        raise DataError(f"{record} is damaged.", hint) from None


def discard_local(checkpoints: epath.Path) -> None:
    """Deletes the local checkpoints of a run, which resumes from one of its own."""
    if (root := _recorded_root(checkpoints)) is not None:
        shutil.rmtree(root, ignore_errors=True)


def local_steps(checkpoints: epath.Path, directory: str | None) -> list[int]:
    """The local steps that are complete on this machine; none unless the run's local tier is in `directory`."""
    if directory is None or _recorded_root(checkpoints) != _root(checkpoints, directory):
        return []
    parts = collections.Counter((path.parent.name.rpartition("-")[2], path.name) for path in find_local(checkpoints))
    return [int(step) for (count, step), found in parts.items() if found == int(count)]


def _root(checkpoints: epath.Path, directory: str) -> epath.Path:
    run = hashlib.sha256(str(resolve_path(checkpoints)).encode()).hexdigest()[:16]
    return resolve_path(directory) / run  # pyrefly: ignore - epath's glob would take wildcards in its name for a pattern


def _steps(folder: epath.Path) -> list[int]:
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def _key(name: str, x: Any, index: tuple[slice, ...] | None) -> str:
    """Name of a shard: what it is a part of, and which part."""
    assert index is not None
    bounds = [part.indices(size)[:2] for part, size in zip(index, x.shape, strict=True)]
    return f"{name} {x.dtype}{list(x.shape)} {bounds}"


def _local_shards(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A copy in host memory of each distinct shard on this process's devices."""
    shards = [(name, x, shard) for name, x in arrays.items() for shard in jnp.asarray(x).addressable_shards]
    distinct = {_key(name, x, shard.index): shard for name, x, shard in shards}
    return {key: np.array(shard.data) for key, shard in distinct.items()}


def _assemble(name: str, x: Any, shards: Mapping[str, np.ndarray]) -> jax.Array:
    return jax.make_array_from_callback(x.shape, x.sharding, lambda index: shards[_key(name, x, index)])


def gather(row: np.ndarray) -> np.ndarray:
    """The rows of all processes."""
    return multihost_utils.process_allgather(row) if jax.process_count() > 1 else row[None]
