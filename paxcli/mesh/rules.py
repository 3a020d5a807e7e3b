"""Sharding rules: the table that maps logical axes to mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from jax.sharding import PartitionSpec

from paxcli.errors import ConfigError, did_you_mean, names_hint
from paxcli.mesh.axes import MESH_AXES

Rules = Mapping[str, tuple[str, ...]]

_TABLE = yaml.safe_load((Path(__file__).parent / "data" / "sharding_rules.yaml").read_text())
DEFAULT_RULES: Rules = {name: tuple(axes) for name, axes in _TABLE.items()}

# If a recipe overrides the axis on the right, the one on the left takes the same mesh axes, without `stage`.
_FOLLOWS = {"activation_residual": "activation_embed", "activation_microbatch": "activation_batch"}


def merge_rules(overrides: Mapping[str, str | Sequence[str] | None] | None) -> Rules:
    """The default rules updated with `overrides`; None replicates a dimension.

    Raises:
      ConfigError: A logical or mesh axis does not exist.
    """
    overrides, rules = overrides or {}, dict(DEFAULT_RULES)
    for name, mesh_axes in overrides.items():
        if name not in DEFAULT_RULES:
            hint = names_hint(name, DEFAULT_RULES)
            raise ConfigError(f"`mesh.logical_axis_rules`: there is no logical axis `{name}`.", hint)
        axes = (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes or ())
        for axis in axes:
            check_mesh_axis(axis, f"mesh.logical_axis_rules.{name}")
        rules[name] = tuple(str(axis) for axis in axes)
    for name, leader in _FOLLOWS.items():
        if leader in overrides and name not in overrides:
            rules[name] = tuple(axis for axis in rules[leader] if axis != "stage")
    return rules


def check_mesh_axis(name: str, where: str) -> None:
    """Raises a ConfigError unless `name` is a mesh axis."""
    if name not in MESH_AXES:
        known = f"Mesh axes: {', '.join(MESH_AXES)}. Pax's replica, data, mdl are data, fsdp, tensor here."
        raise ConfigError(f"`{where}`: there is no mesh axis `{name}`.", did_you_mean(name, MESH_AXES) or known)


def spec(logical_axes: Sequence[str | None], rules: Rules = DEFAULT_RULES) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes; None is a replicated dimension.

    A mesh axis shards at most one dimension: the leftmost one whose rule names it.
    """
    used: set[str] = set()
    entries: list[tuple[str, ...] | None] = []
    for name in logical_axes:
        if name is not None and name not in rules:
            hint = names_hint(name, rules)
            raise ConfigError(f"A layer uses the logical axis `{name}`, which has no sharding rule.", hint)
        axes = tuple(axis for axis in (rules[name] if name is not None else ()) if axis not in used)
        used.update(axes)
        entries.append(axes or None)
    return PartitionSpec(*entries)
