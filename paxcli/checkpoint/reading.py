"""Reads arrays of a checkpoint onto any mesh, and verifies their fingerprints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from flax import traverse_util

from paxcli.checkpoint.fingerprint import fingerprints
from paxcli.checkpoint.manifest import MANIFEST_FILE, Manifest, from_json
from paxcli.errors import DataError, first_line
from paxcli.mesh.sharding import name_of

STATE, MANIFEST = "state", "manifest"


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by dotted name, for any container types."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def nest_by_name(named: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries from dotted names: the structure on disk."""
    return traverse_util.unflatten_dict(dict(named), sep=".")


def read_manifest(step_dir: epath.Path) -> Manifest:
    """Reads the manifest of one checkpoint. Raises DataError if it is missing, damaged, or that of another step."""
    file = step_dir / MANIFEST / MANIFEST_FILE
    try:
        found = from_json(json.loads(file.read_text()))
    except FileNotFoundError:
        raise DataError(f"it has no {MANIFEST}/{file.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"its manifest cannot be read: {error}") from error
    if str(found.step) != step_dir.name:
        raise DataError(f"it is a copy of the checkpoint of step {found.step}")
    return found


def read_arrays(step_dir: epath.Path, manifest: Manifest, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads the arrays named by `wanted`, with its shardings.

    Args:
      step_dir: The directory of one committed checkpoint.
      manifest: Its manifest.
      wanted: Name to array or `jax.ShapeDtypeStruct`, with the shapes and dtypes of the manifest.

    Raises:
      DataError: An array cannot be read, or its fingerprint differs from the saved one.
    """
    import orbax.checkpoint as ocp

    from paxcli.checkpoint.orbax_parts import ArrayHandler

    item, here = nest_by_name(wanted), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda leaf: leaf.sharding or here, item)
    arguments = ocp.checkpoint_utils.construct_restore_args(item, shardings)
    restore = ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
    types = ocp.type_handlers.create_type_handler_registry((jax.Array, ArrayHandler()))
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=types)) as reader:
            arrays = named_leaves(reader.restore(step_dir / STATE, args=restore))
    except jax.errors.JaxRuntimeError:
        raise  # such as out of memory: the files are not at fault
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise DataError(f"its arrays cannot be read: {first_line(cause)}") from error
    found = fingerprints(arrays)
    if damaged := [name for name in wanted if found[name] != manifest.arrays[name].fingerprint]:
        raise DataError(f"{listing(damaged)} changed since {'it was' if len(damaged) == 1 else 'they were'} saved")
    return arrays


def listing(names: list[str], most: int = 5) -> str:
    """Names as text, at most the first `most`: "`a`, `b` and 7 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more
