"""Saves a compiled train step to a file, and loads it: the serialized executable with a manifest of its conditions.

The file is a zip archive of `manifest.json` and `executable`. It has no pytrees, shapes or shardings: they follow from
the recipe, which has to be the same. Load only files that you made yourself: an executable is machine code.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib import xla_client

import paxcli
from paxcli.config.diff import changed_lines, diff
from paxcli.config.facts import is_at_or_below, marked_paths
from paxcli.config.fields import Mark
from paxcli.config.render import config_text
from paxcli.config.values import plain_values
from paxcli.errors import ConfigError, DataError, first_line
from paxcli.mesh.sharding import name_of
from paxcli.nested_map import NestedMap
from paxcli.training.experiment import Experiment
from paxcli.training.instrument import Instrument
from paxcli.training.session import Session
from paxcli.training.state import TrainState
from paxcli.training.step import TrainStep, make_train_step

_MANIFEST, _EXECUTABLE = "manifest.json", "executable"
# What `zipfile` and the parts of a damaged file raise: RuntimeError includes "encrypted" and nesting too deep.
UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, LookupError, ValueError, TypeError, RuntimeError)


def save_executable(path: Path, session: Session, compiled: jax.stages.Compiled) -> None:
    """Saves a compiled train step.

    Args:
      path: The file.
      session: The session that the step was compiled in.
      compiled: The step.

    Raises:
      ConfigError: The step cannot be serialized.
    """
    runtime: Any = compiled.runtime_executable()
    _, metrics = compiled.output_shardings
    if not all(sharding.is_fully_replicated for sharding in jax.tree.leaves(metrics)):
        raise ConfigError("The step cannot be saved: one of its metrics is sharded.", "Compile without `--save`.")
    try:
        executable = runtime.serialize()
    except (jax.errors.JaxRuntimeError, ValueError, AttributeError) as error:
        hint = "Compile without `--save`."
        raise ConfigError(f"This platform cannot serialize executables: {error}", hint) from error
    # JAX drops the arguments that the step does not use. It has no public API for the indices of the others, and
    # `jax.experimental.serialize_executable` depends on pickle.
    private: Any = compiled._executable
    arguments = sorted(private._kept_var_idx)
    manifest = {
        "made_for": list_dependencies(session),
        "arguments": arguments,
        "sha256": _checksum(executable, arguments),
        "recipe": config_text(session.config),
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(_MANIFEST, json.dumps(manifest, indent=1))
        file.writestr(_EXECUTABLE, executable)


def load_executable(path: Path, session: Session) -> TrainStep:
    """Loads the train step of a file, ready to run in this session.

    Raises:
      DataError: The file is not a compiled step, or is damaged.
      ConfigError: It was compiled for another recipe, other devices or other software; names what differs.
    """
    try:
        with zipfile.ZipFile(path) as file:
            manifest = json.loads(file.read(_MANIFEST))
            executable = file.read(_EXECUTABLE)
        before, arguments, checksum = dict(manifest["made_for"]), manifest["arguments"], manifest["sha256"]
    except UNREADABLE as error:
        hint = "Compile one: `pax compile … --save FILE`."
        raise DataError(f"{path} is not a compiled step: {error}.", hint) from error
    if _checksum(executable, arguments) != checksum:
        raise DataError(f"{path} is damaged.", "Compile it again: `pax compile … --save FILE`.")
    if changes := list_changes(before, json.loads(json.dumps(list_dependencies(session)))):
        hint = "Compile it again with `pax compile … --save FILE`, or train without `--compiled`."
        raise ConfigError(f"{path} was compiled for something else:\n{changes}", hint)
    devices = tuple(session.mesh.devices.flat)
    try:
        loaded = devices[0].client.deserialize_executable(executable, executable_devices=xla_client.DeviceList(devices))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        hint = "Compile it again on this machine."
        raise DataError(f"{path} cannot be loaded on this machine: {first_line(error)}.", hint) from error
    return _loaded_step(loaded, arguments, session)


def _checksum(executable: bytes, arguments: list[int]) -> str:
    return hashlib.sha256(json.dumps(arguments).encode() + executable).hexdigest()


class Precompiled(Instrument):
    """Trains with the compiled step of a file."""

    def __init__(self, path: Path):
        self._path = path

    def prepare(self, session: Session) -> Callable[[], TrainStep]:
        """Raises what `load_executable` does."""
        step = load_executable(self._path, session)
        return lambda: step


def list_dependencies(session: Session) -> dict[str, Any]:
    """Everything that a compiled step depends on, by name: software, devices, mesh, options, fields of the recipe."""
    device = session.mesh.devices.flat[0]
    batch = jax.tree_util.tree_leaves_with_path(session.spec)
    slices = {getattr(one, "slice_index", None) or 0 for one in session.mesh.devices.flat}
    return {
        "pax": paxcli.__version__,
        "jax": jax.__version__,
        "libtpu": importlib.metadata.version("libtpu") if device.platform == "tpu" else None,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": session.mesh.size,
        "num_slices": len(slices),
        "mesh": dict(session.mesh.shape),
        "global_batch_size": session.global_batch_size,
        "batch": {name_of(path): [str(leaf.dtype), *leaf.shape[1:]] for path, leaf in batch},
        "compiler_options": session.compiler_options,
    } | compiled_values(session.config)


def compiled_values(config: fdl.Config[Experiment]) -> dict[str, Any]:
    """Path → value of the fields that a recipe's compiled step depends on."""
    outside = marked_paths(config, Mark.NOT_COMPILED)
    return {path: value for path, value in plain_values(config).items() if not is_at_or_below(path, outside)}


def list_changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """One line for each dependency that differs; empty if none does."""
    return changed_lines(before, now, sorted(path for path, _, _ in diff(before, now)))


def _loaded_step(executable: Any, arguments: list[int], session: Session) -> TrainStep:
    """A loaded executable, called like the jitted train step. It donates the old state's memory to the new one."""
    step = make_train_step(session.experiment.task, session.abstract)
    results, tree = jax.tree.flatten(jax.eval_shape(step, session.abstract, session.batch))
    shardings: list[Any] = [leaf.sharding for leaf in jax.tree.leaves(session.abstract)]
    shardings += [NamedSharding(session.mesh, PartitionSpec())] * (len(results) - len(shardings))  # of the metrics

    def call(state: TrainState, batch: NestedMap) -> tuple[TrainState, dict[str, jax.Array]]:
        leaves = jax.tree.leaves((state, batch))
        parts = executable.execute_sharded([leaves[index] for index in arguments])
        arrays = [
            jax.make_array_from_single_device_arrays(result.shape, sharding, on_devices)
            for result, sharding, on_devices in zip(
                results, shardings, parts.disassemble_into_single_device_arrays(), strict=True
            )
        ]
        return jax.tree.unflatten(tree, arrays)

    return call
