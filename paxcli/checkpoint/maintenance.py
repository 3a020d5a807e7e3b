"""Manages the checkpoints of a run from outside of it: list, verify, delete, copy."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from etils import epath

from paxcli.checkpoint.local_tier import find_local
from paxcli.checkpoint.manager import COMMITTED, CheckpointStore, delete_step, find_steps, format_steps
from paxcli.checkpoint.reading import read_arrays, read_manifest
from paxcli.config.paths import copy_file, rename_durably, resolve_path, size_and_time
from paxcli.errors import ConfigError, DataError

_CHUNK_BYTES = 1 << 30  # host memory that verifying takes at a time
_CHECKPOINTS = "checkpoints"
_RUN_FILES = ("config.txt", "environment.json", "tokenizers.json", "tokenizers", "huggingface", "recipe*.yaml")
# Copied last: a step directory without these does not count as a checkpoint.
_COMMIT_FILES = ("_CHECKPOINT_METADATA", COMMITTED)


class CheckpointInfo(NamedTuple):
    """One committed checkpoint on disk.

    Attributes:
      step: Training steps done when it was saved.
      bytes: Size of its files.
      saved_at: Modification time, in seconds since 1970; None where the file system has none.
      path: Its directory.
    """

    step: int
    bytes: int
    saved_at: float | None
    path: str


class Verified(NamedTuple):
    """Result of reading one checkpoint completely.

    Attributes:
      step: Training steps done when it was saved.
      arrays: Number of arrays.
      bytes: Size of the arrays in memory.
      problem: Why it cannot be used; None if every array has the fingerprint that was recorded when it was saved.
    """

    step: int
    arrays: int
    bytes: int
    problem: str | None


def list_checkpoints(run_dir: str) -> list[CheckpointInfo]:
    """The committed checkpoints of a run in its directory, oldest first.

    Raises:
      DataError: The run has no checkpoint, in its directory or in its local tier on this machine.
    """
    if list_local_checkpoints(run_dir) and not CheckpointStore(resolve_path(run_dir) / _CHECKPOINTS).steps():
        return []
    return [_info(_step_dir(run_dir, step)) for step in find_steps(run_dir)]


def list_local_checkpoints(run_dir: str) -> list[CheckpointInfo]:
    """The checkpoints of a run's local tier that are on this machine; each process has its own part of a step."""
    return [_info(path) for path in find_local(epath.Path(resolve_path(run_dir)) / _CHECKPOINTS)]


def verify_checkpoints(run_dir: str, steps: Sequence[int] = ()) -> Iterator[Verified]:
    """Reads every array of the given checkpoints (default: all), and compares its fingerprint with the manifest's.

    Arrays are read onto the CPU, about 1 GiB at a time, so that a checkpoint larger than this host can be verified.

    Raises:
      DataError: There is no such checkpoint.
    """
    for step in find_steps(run_dir, steps):
        try:
            yield _verify(_step_dir(run_dir, step))
        except DataError as error:
            if step in steps or _step_dir(run_dir, step).exists():  # else training deleted it meanwhile
                yield Verified(step, 0, 0, error.message)


def delete_checkpoints(run_dir: str, steps: Sequence[int], dry_run: bool = False) -> list[CheckpointInfo]:
    """Deletes checkpoints, or with `dry_run` only returns them. The caller holds the lock of the run directory.

    Whether those that stay are damaged is not checked: `verify_checkpoints` would read them completely.

    Raises:
      DataError: There is no such checkpoint.
      ConfigError: No checkpoint would be left.
    """
    chosen = find_steps(run_dir, steps)
    if chosen == find_steps(run_dir):
        hint = "Leave at least one, or delete the run directory itself."
        raise ConfigError(f"That would delete every checkpoint of {resolve_path(run_dir)}.", hint)
    deleted = [_info(_step_dir(run_dir, step)) for step in chosen]
    for info in () if dry_run else deleted:
        delete_step(epath.Path(info.path))
    return deleted


def copy_checkpoints(run_dir: str, out: str, steps: Sequence[int] = (), dry_run: bool = False) -> list[CheckpointInfo]:
    """Copies checkpoints (default: the newest), and recipe and tokenizers of their run, into another run directory.

    The copy can be resumed, evaluated and decoded from. Directories may be local or in a bucket (`gs://…`). Until
    `recipe.yaml` is copied, at the end, `out` is not a run. A copy that was interrupted can be repeated: it skips the
    checkpoints that `out` already has.

    Returns:
      The checkpoints in `out`; with `dry_run`, those that would be copied.

    Raises:
      DataError: There is no such checkpoint.
      ConfigError: `out` is another run, or has another checkpoint of one of these steps.
    """
    target = epath.Path(resolve_path(out))
    chosen = find_steps(run_dir, steps) if steps else find_steps(run_dir)[-1:]
    hint = "Copy to another directory."
    pairs = [(_step_dir(run_dir, step), _step_dir(out, step)) for step in chosen]
    if others := [int(new.name) for old, new in pairs if new.exists() and read_manifest(new) != read_manifest(old)]:
        raise ConfigError(f"{target} already has other checkpoints of steps {format_steps(others)}.", hint)
    source = resolve_path(run_dir)  # the glob of epath would take wildcards in its name for a pattern
    paths = [epath.Path(path) for pattern in _RUN_FILES for path in sorted(source.glob(pattern))]
    files = [(file, target / file.relative_to(source)) for path in paths for file in files_in(path)]
    for old, new in files:
        if old.name != "environment.json" and new.exists() and new.read_bytes() != old.read_bytes():
            raise ConfigError(f"{target} is another run: its {old.relative_to(source)} differs.", hint)
    if dry_run:
        return [_info(old) for old, _ in pairs]
    for old, new in sorted([*files, *pairs], key=lambda pair: pair[0].suffix == ".yaml"):  # the recipes last
        _copy(old, new)
    return [_info(new) for _, new in pairs]


def _step_dir(run_dir: str, step: int) -> epath.Path:
    return epath.Path(resolve_path(run_dir)) / _CHECKPOINTS / str(step)


def files_in(path: epath.Path) -> list[epath.Path]:
    """A file itself, or all files below a directory; buckets have no recursive glob."""
    return [file for inner in path.iterdir() for file in files_in(inner)] if path.is_dir() else [path]


def _info(directory: epath.Path) -> CheckpointInfo:
    stats = [size_and_time(path) for path in files_in(directory)]
    saved_at = max([time for _, time in stats if time], default=None)
    return CheckpointInfo(int(directory.name), sum(size for size, _ in stats), saved_at, os.fspath(directory))


def _verify(directory: epath.Path) -> Verified:
    manifest = read_manifest(directory)
    on_cpu = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    wanted = {name: entry.abstract(on_cpu) for name, entry in manifest.arrays.items()}
    for chunk in _chunks(wanted):
        read_arrays(directory, manifest, chunk)
    return Verified(manifest.step, len(wanted), sum(map(_bytes, wanted.values())), None)


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize


def _chunks(arrays: dict[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Splits `arrays` into groups that end at about each multiple of `_CHUNK_BYTES`."""
    ends = itertools.accumulate(map(_bytes, arrays.values()))
    groups = {name: end // _CHUNK_BYTES for name, end in zip(arrays, ends, strict=True)}
    for _, names in itertools.groupby(arrays, groups.__getitem__):
        yield {name: arrays[name] for name in names}


def _copy(old: epath.Path, new: epath.Path) -> None:
    """Copies a file, or a checkpoint if it is not there yet.

    An interrupted copy of a checkpoint leaves a directory that is not taken for one.
    """
    if not old.is_dir():
        return copy_file(old, new)
    if not new.exists():
        partial = new.with_name(f".copying-{new.name}")
        partial.rmtree(missing_ok=True)
        for path in sorted(files_in(old), key=lambda path: path.name in _COMMIT_FILES):
            copy_file(path, partial / path.relative_to(old))
        rename_durably(partial, new)
