"""The devices of a launch, and the mesh over them."""

from __future__ import annotations

import math
import re

from paxcli.cloud.accelerators import find_accelerator
from paxcli.convert.maxtext.conversion import Conversion, Topology
from paxcli.errors import ConfigError

_IN_FILE = re.compile(r"(?:^|[^a-z0-9])(?:([0-9]{1,3})x)?(v4|v5e|v5p|v6e|tpu7x)[-_]([0-9]{1,6})(?![0-9])")
_PLAIN_AXES = {"data": ("data",), "fsdp": ("fsdp", "fsdp_transpose"), "tensor": ("tensor",)}
_SEQUENCE = ("context", "context_usp_ulysses", "sequence")
_AXES = _PLAIN_AXES | {"stage": ("pipeline",), "context": _SEQUENCE, "expert": ("expert",)}


def devices_of(name: str) -> int:
    """The number of devices of a slice such as `v4-128`, `v5e-256` or `a3`.

    Raises:
      ConfigError: The name is unknown.
    """
    return 8 if name == "a3" else find_accelerator(name).devices


def topology_of(draft: Conversion, given: str | None, slices: int | None) -> Topology:
    """The topology given by the user, the keys, the flags of a wrapper, or the file name, in this order."""
    settings, launch = draft.settings, draft.launch
    counts = [slices, launch.num_slices, *(settings[key] for key in ("compile_topology_num_slices", "num_slices"))]
    count = next((n for n in counts if n is not None and n > 0), None)
    for name, source in (
        (given, "--topology"),
        (settings["compile_topology"], "compile_topology"),
        (launch.topology, "the command that wraps it"),
    ):
        try:
            if name:
                return Topology(devices_of(name), count or 1, f"{name}, from {source}")
        except ConfigError:
            if given:
                raise
            draft.ask(f"The devices: pax does not know `{name}`, from {source}; give `--topology`.")
    if match := _IN_FILE.search(draft.name.lower()):
        name = f"{match[2]}-{match[3]}"
        return Topology(devices_of(name), count or int(match[1] or 1) or 1, f"{name}, from the file name")
    return Topology(None, count)


def set_mesh(draft: Conversion) -> None:
    """Sets the shapes of the mesh, and with them the number of devices.

    Raises:
      ConfigError: The axes do not fit the devices, or pax does not have one of them.
    """
    topology = draft.topology
    ici = _group(draft, "ici", topology.devices)
    one_slice = topology.slices == 1 and topology.devices is not None
    dcn = None if one_slice else _group(draft, "dcn", topology.slices)
    if ici is None:
        draft.ask(
            "The mesh: an axis is -1, all remaining devices, and their number is unknown. All devices are used for "
            "`data`; give `--topology v4-128`, and `--slices` if there are several."
        )
        return draft.set("mesh.ici_mesh_shape", None, *_keys("ici"))
    if dcn is None and not one_slice and any(draft.settings.is_set(key) for key in _keys("dcn")):
        draft.ask("The slices: a DCN axis is -1, and their number is unknown. One is assumed; give `--slices`.")
    dcn = dcn or dict.fromkeys(_AXES, 1)
    draft.set("mesh.ici_mesh_shape", _shape(ici), *_keys_to_show(draft, "ici"))
    draft.set("mesh.dcn_mesh_shape", _shape(dcn) if math.prod(dcn.values()) > 1 else None, *_keys_to_show(draft, "dcn"))
    draft.num_devices = math.prod(ici.values()) * math.prod(dcn.values())


def _keys(group: str) -> list[str]:
    return [f"{group}_{name}_parallelism" for names in _AXES.values() for name in names]


def _keys_to_show(draft: Conversion, group: str) -> list[str]:
    """The keys to show: the three of every mesh, and those that are set."""
    plain = [f"{group}_{axis}_parallelism" for axis in _PLAIN_AXES]
    return [key for key in _keys(group) if key in plain or draft.settings[key] != 1]


def _group(draft: Conversion, group: str, total: int | None) -> dict[str, int] | None:
    """Axis -> size, of the ICI or the DCN mesh; None if the size of a -1 axis is unknown."""
    sizes = {key: draft.settings[key] for key in _keys(group)}
    free = [key for key, size in sizes.items() if size == -1]
    if group == "dcn" and total is None and len(free) == 1 and not draft.settings.is_set(free[0]):
        if any(size > 1 for size in sizes.values()):  # the other axes make all slices: nothing remains for the default
            sizes[free.pop()] = 1
    wrong = next((key for key, size in sizes.items() if size < 1 and size != -1), None)
    if wrong or len(free) > 1:
        problem = f"{wrong}={sizes[wrong]}" if wrong else f"{' and '.join(free)} are all -1"
        hint = "; with one slice, give `--topology v4-128 --slices 1`." if group == "dcn" else "."
        raise ConfigError(f"{problem}.", f"A size is a positive integer, or -1 for one axis of a group{hint}")
    known = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if total is None:
            return None
        if total % known:
            raise ConfigError(f"{group}_*: {total} is not divisible by {known}.", "Change the axes, or `--topology`.")
        sizes[free[0]] = total // known
    elif total is not None and known != total:
        problem = f"The {group}_* axes make {known}, but there are {total} {'devices' if group == 'ici' else 'slices'}."
        raise ConfigError(problem, "Change the axes, or give `--topology` and `--slices`.")
    return {axis: math.prod(sizes[f"{group}_{name}_parallelism"] for name in names) for axis, names in _AXES.items()}


def _shape(sizes: dict[str, int]) -> list[int] | dict[str, int]:
    if all(sizes[axis] == 1 for axis in sizes if axis not in _PLAIN_AXES):
        return [sizes[axis] for axis in _PLAIN_AXES]
    return {axis: size for axis, size in sizes.items() if size > 1}
