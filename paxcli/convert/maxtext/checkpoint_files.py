"""Reads MaxText's Orbax checkpoints one array at a time, and writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from paxcli.checkpoint.array_differences import ArrayType
from paxcli.checkpoint.orbax_parts import silence_writes
from paxcli.checkpoint.reading import named_leaves
from paxcli.config.paths import resolve_path
from paxcli.convert.layout import Kind, LastKept, Source
from paxcli.convert.runs import PathLike
from paxcli.errors import ConfigError, DataError, MissingError, first_line, machine_fault

_MARKS = ("_METADATA", "manifest.ocdbt", "checkpoint")  # files in a directory that holds an Orbax tree
_ITEMS = ("items", "default")
_PARAMETER = re.compile(r"(?:(?P<before>.+)\.)?(?P<name>(?:decoder|token_embedder)\..+?)(?:\.value)?")
_COUNT = re.compile(r"opt_state\.(?:\d+\.)?count(?:\.value)?")


class MaxTextCheckpoint:
    """A checkpoint that MaxText, or one of its converters, wrote: a `ForeignCheckpoint`.

    Attributes:
      path: The directory of the tree.
      step: The step; 0 without optimizer state.
      count: The number of optimizer updates; None without optimizer state.
      optimizer: `adamw`, `adam_pax` or `sgd`, inferred from the optimizer state; None without one.

    Args:
      directory: The directory of the tree itself (`…/0/items`), of a step, of all steps, or of the run.

    Raises:
      DataError: There is no checkpoint, or it is not one of a MaxText decoder.
    """

    def __init__(self, directory: PathLike):
        if (path := find_maxtext(directory)) is None:
            exists = epath.Path(resolve_path(directory)).is_dir()
            problem = f"{directory} holds no checkpoint." if exists else f"There is no directory {directory}."
            raise DataError(problem, "Give the directory of a MaxText checkpoint, such as …/checkpoints/0/items.")
        self.path = path
        self._handler = ocp.PyTreeCheckpointHandler()
        try:
            self._tree = self._handler.metadata(self.path).tree
        except Exception as error:
            hint = "Check that the directory is complete, as MaxText wrote it."
            raise DataError(f"{self.path} cannot be read: {first_line(error)}", hint) from error
        self._leaves = named_leaves(self._tree)
        self._names: dict[Kind, dict[str, str]] = {"params": {}, "ema": {}, "mu": {}, "nu": {}}
        for full_name in self._leaves:
            found = _PARAMETER.fullmatch(full_name)
            before = (found["before"] or "").split(".") if found else []
            if found and "nnx_aux" not in before:
                kind: Kind = "mu" if "mu" in before else "nu" if "nu" in before else "params"
                self._names[kind][found["name"]] = full_name
        if not self._names["params"]:
            hint = f"It has {', '.join(list(self._leaves)[:4])}, …" if self._leaves else "It is empty."
            raise DataError(f"{self.path} holds no parameters of a MaxText decoder.", hint)
        self.step, self.count, self.optimizer = 0, None, None
        if count := min((name for name in self._leaves if _COUNT.fullmatch(name)), default=None):
            self.step = int(np.asarray(self._read("step")).item()) if "step" in self._leaves else 0
            self.count = int(np.asarray(self._read(count)).item())
            with_moments = "adam_pax" if count.startswith("opt_state.count") else "adamw"
            self.optimizer = with_moments if self._names["mu"] else "sgd"

    def arrays(self, kind: Kind = "params") -> dict[str, ArrayType]:
        """Shape and dtype of each parameter, or of its moment `mu` or `nu`, by its name from `decoder` on."""
        return {name: self._leaves[full_name] for name, full_name in self._names[kind].items()}

    def reader(self, kind: Kind = "params") -> Source:
        """Reads parameters or moments one at a time into host memory, by the same names."""
        return LastKept(lambda name: self._read(self._names[kind][name]))

    def _read(self, full_name: str) -> np.ndarray:
        wanted = self._leaves[full_name]
        item = jax.tree.map(lambda leaf: leaf if leaf is wanted else ocp.PLACEHOLDER, self._tree)
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), self._tree)
        try:
            tree = self._handler.restore(self.path, args=ocp.args.PyTreeRestore(item=item, restore_args=arguments))
        except Exception as error:
            hint = "Restore it from a copy."
            raise DataError(f"`{full_name}` in {self.path} cannot be read: {first_line(error)}", hint) from error
        return named_leaves(tree)[full_name]


def maxtext_folder(directory: PathLike, step: int) -> str:
    """The directory of the tree that a checkpoint of this step would be written to, for MaxText's keys.

    Raises:
      ConfigError: It exists.
    """
    folder = epath.Path(resolve_path(directory)) / str(step)
    if folder.exists():
        raise ConfigError(f"{folder} already exists.", "Choose another directory.")
    return str(folder / _ITEMS[0])


def write_maxtext(directory: PathLike, step: int, state: Mapping[str, Any]) -> None:
    """Writes a state as MaxText's own checkpoint manager does.

    Args:
      directory: The directory of all steps, created if necessary.
      step: The step.
      state: `params`, `opt_state` and `step`, as numpy arrays.

    Raises:
      MissingError: The directory cannot be written.
    """
    silence_writes()
    folder = epath.Path(resolve_path(directory))
    options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
    try:
        with ocp.CheckpointManager(folder, item_names=_ITEMS[:1], options=options) as manager:
            manager.save(step, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
    except (OSError, ValueError) as error:
        fault = machine_fault(error) or first_line(error)
        raise MissingError(f"{folder} cannot be written: {fault}.", "Choose another directory.") from error


def find_maxtext(directory: PathLike) -> epath.Path | None:
    """The directory of an Orbax tree: this one, or that of the latest step in it; None if there is none."""
    folder = epath.Path(resolve_path(directory))
    below = [folder / "checkpoints", folder]
    steps = [path for parent in below if parent.is_dir() for path in parent.iterdir() if path.name.isdigit()]
    newest = [max(steps, key=lambda path: int(path.name))] if steps else []
    for candidate in (folder, *(parent / item for parent in (folder, *newest) for item in _ITEMS), *newest):
        if any((candidate / mark).exists() for mark in _MARKS):
            return candidate
    return None
