"""A compiled train step as a file: the compiler's own bytes, and a manifest of all that they were made for.

The file is a zip of `manifest.json` and `executable`. Trees, shapes and shardings are not in it: they follow from the
recipe, which has to be the same one. Only load a file of your own: an executable is a program.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib import xla_client

import paxcli
from paxcli.config.diff import changed_lines
from paxcli.config.facts import is_at_or_below, marked_paths
from paxcli.config.fields import Mark
from paxcli.config.render import config_text
from paxcli.config.values import plain_values
from paxcli.errors import ConfigError, DataError, first_line
from paxcli.mesh.sharding import name_of
from paxcli.nested_map import NestedMap
from paxcli.training.instrument import Instrument
from paxcli.training.session import Session
from paxcli.training.state import TrainState
from paxcli.training.step import TrainStep, make_train_step

_MANIFEST, _EXECUTABLE = "manifest.json", "executable"
_MADE_FOR = "made_for"


def save_executable(path: Path, session: Session, compiled: jax.stages.Compiled) -> None:
    """Writes a compiled train step.

    Args:
      path: The file.
      session: What it was compiled in.
      compiled: The step.

    Raises:
      ConfigError: The step cannot be written on this platform.
    """
    runtime: Any = compiled.runtime_executable()
    executable: Any = compiled._executable
    _, metrics = compiled.output_shardings
    if not all(sharding.is_fully_replicated for sharding in jax.tree.leaves(metrics)):
        raise ConfigError("A metric of this step is spread over devices, so the step cannot be saved.")
    try:
        program = runtime.serialize()
    except (jax.errors.JaxRuntimeError, ValueError, AttributeError) as error:
        raise ConfigError(f"This platform's programs cannot be saved: {error}") from error
    manifest = {
        _MADE_FOR: made_for(session),
        "arguments": sorted(executable._kept_var_idx),  # those that the program has any use for
        "sha256": hashlib.sha256(program).hexdigest(),
        "recipe": config_text(session.config),
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(_MANIFEST, json.dumps(manifest, indent=1))
        file.writestr(_EXECUTABLE, program)


def load_executable(path: Path, session: Session) -> TrainStep:
    """The train step out of a file, ready to run in this session.

    Raises:
      DataError: The file is not one of these, or is damaged.
      ConfigError: It was made for another recipe, another machine or other software; names the fields that differ.
    """
    try:
        with zipfile.ZipFile(path) as file:
            manifest = json.loads(file.read(_MANIFEST))
            program = file.read(_EXECUTABLE)
        before, kept, checksum = manifest[_MADE_FOR], manifest["arguments"], manifest["sha256"]
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise DataError(f"{path} is no compiled step: {error}.", "Make one: `pax compile … --save FILE`.") from error
    if hashlib.sha256(program).hexdigest() != checksum:
        raise DataError(f"{path} is damaged.", "Make it again: `pax compile … --save FILE`.")
    now = json.loads(json.dumps(made_for(session)))
    changed = sorted(field for field in before.keys() | now.keys() if before.get(field) != now.get(field))
    if changed:
        raise ConfigError(
            f"{path} was compiled for something else:\n{changed_lines(before, now, changed)}",
            "Compile it again with `pax compile … --save FILE`, or train without `--compiled`.",
        )
    devices = tuple(session.mesh.devices.flat)
    try:
        loaded = devices[0].client.deserialize_executable(program, executable_devices=xla_client.DeviceList(devices))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise DataError(f"{path} cannot be loaded here: {first_line(error)}.") from error
    return _Loaded(loaded, kept, session)


class Precompiled(Instrument):
    """Takes the train step out of a file."""

    def __init__(self, path: Path):
        self._path = path

    def prepare(self, session: Session) -> Callable[[], TrainStep]:
        """Raises what `load_executable` does."""
        step = load_executable(self._path, session)
        return lambda: step


def made_for(session: Session) -> dict[str, Any]:
    """Everything that a compiled step depends on, by name."""
    device = session.mesh.devices.flat[0]
    batch = jax.tree_util.tree_leaves_with_path(session.spec)
    slices = {getattr(one, "slice_index", None) or 0 for one in session.mesh.devices.flat}
    outside = marked_paths(session.config, Mark.NOT_COMPILED)
    values = plain_values(session.config)
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
    } | {path: value for path, value in values.items() if not is_at_or_below(path, outside)}


class _Loaded:
    """A loaded program, called as the jitted train step is; the state's memory is reused for the new one."""

    def __init__(self, program: Any, arguments: list[int], session: Session):
        self._program, self._arguments = program, arguments
        step = make_train_step(session.experiment.task, session.abstract)
        state, metrics = jax.eval_shape(step, session.abstract, session.batch)
        whole = NamedSharding(session.mesh, PartitionSpec())
        shardings = jax.tree.map(lambda leaf: leaf.sharding, session.abstract), jax.tree.map(lambda _: whole, metrics)
        leaves, self._tree = jax.tree.flatten((state, metrics))
        self._outputs = list(zip([leaf.shape for leaf in leaves], jax.tree.leaves(shardings), strict=True))

    def __call__(self, state: TrainState, batch: NestedMap) -> tuple[TrainState, dict[str, jax.Array]]:
        leaves = jax.tree.leaves((state, batch))
        results = self._program.execute_sharded([leaves[index] for index in self._arguments])
        parts = results.disassemble_into_single_device_arrays()
        arrays = [
            jax.make_array_from_single_device_arrays(shape, sharding, on_devices)
            for (shape, sharding), on_devices in zip(self._outputs, parts, strict=True)
        ]
        return jax.tree.unflatten(self._tree, arrays)
