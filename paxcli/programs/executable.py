"""Saves a compiled train step to a file, and loads it: the serialized executable with a manifest of its conditions.

The file is a zip archive of `manifest.json` and `executable`. Pytrees and shardings are not saved: they follow from the
recipe, which has to be the same. Load only files that you made yourself: an executable is machine code.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax

import paxcli
from paxcli.config.fields import Mark
from paxcli.config.paths import write_output
from paxcli.config.render import config_text
from paxcli.config.tree import is_at_or_below, marked_paths
from paxcli.config.values import changed_lines, diff, plain_values
from paxcli.errors import ConfigError, DataError, first_line
from paxcli.mesh.sharding import name_of
from paxcli.programs.own_code import find_own_code
from paxcli.programs.serialization import LoadedProgram, SerializedProgram
from paxcli.training.experiment import Experiment
from paxcli.training.instrument import Instrument
from paxcli.training.session import Session
from paxcli.training.step import TrainStep

_MANIFEST, _EXECUTABLE = "manifest.json", "executable"
# JAX's settings that a step computes with, and that the environment sets, as in `JAX_DEFAULT_MATMUL_PRECISION`.
_SETTINGS = ("jax_default_matmul_precision", "jax_default_prng_impl", "jax_enable_x64", "jax_threefry_partitionable")
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
      MissingError: The file cannot be written, and is unchanged.
    """
    program = SerializedProgram.of(compiled)
    manifest = {"made_for": list_dependencies(session), **program.facts, "recipe": config_text(session.config)}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(_MANIFEST, json.dumps(manifest, indent=1))
        file.writestr(_EXECUTABLE, program.executable)
    write_output(path, content.getvalue())


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
        before, program = dict(manifest["made_for"]), SerializedProgram.from_facts(manifest, executable)
    except UNREADABLE as error:
        hint = "Compile one: `pax compile … --save FILE`."
        raise DataError(f"{path} is not a compiled step: {error}.", hint) from error
    if program is None:
        raise DataError(f"{path} is damaged.", "Compile it again: `pax compile … --save FILE`.")
    now = json.loads(json.dumps(list_dependencies(session)))
    known = now["code"].keys() & before.get("code", {}).keys() - {"__main__"}  # what the step needs was loaded before
    before["code"] = now["code"] | {name: before["code"][name] for name in known}
    if changes := list_changes(before, now):
        hint = "Compile it again with `pax compile … --save FILE`, or train without `--compiled`."
        raise ConfigError(f"{path} was compiled for something else:\n{changes}", hint)
    try:
        return LoadedProgram(program, session)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        hint = "Compile it again on this machine."
        raise DataError(f"{path} cannot be loaded on this machine: {first_line(error)}.", hint) from error


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
    return {
        "pax": paxcli.__version__,
        "code": find_own_code(),
        "jax": jax.__version__,
        "libtpu": importlib.metadata.version("libtpu") if device.platform == "tpu" else None,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": session.mesh.size,
        "num_slices": len({getattr(one, "slice_index", None) for one in session.mesh.devices.flat}),
        **{name: jax.config.values[name] for name in _SETTINGS},
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
