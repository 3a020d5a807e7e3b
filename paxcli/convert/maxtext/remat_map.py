"""MaxText's rematerialization (activation checkpointing) as pax's policies and activations, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.settings import Settings
from paxcli.errors import ConfigError, names_hint

_STACK = "task.model.stack"
_CUSTOM = "custom"
_INPUT = "layer_input"
_FIELDS = ("save", "offload")
_ATTENTION = ("query", "key", "value")


def set_remat(draft: Conversion) -> None:
    """Sets the policy, and the activations that are saved or offloaded besides.

    Raises:
      ConfigError: A policy or a memory space that MaxText does not have, or pax does not know.
    """
    settings = draft.settings
    name, policies = settings["remat_policy"], tables.table("remat")["policies"]
    tensors: dict[str, str] = {}
    if name == _CUSTOM:
        tensors = _tensors(settings["fused_qkv"], settings["fused_mlp"] or len(settings["mlp_activations"]) == 1)
        policy, *more, differs = _custom_policy(tensors, settings)
    elif name in policies:
        policy, *more, differs = policies[name]
    else:
        raise ConfigError(f"remat_policy={name} is unknown to pax.", names_hint(name, [*policies, _CUSTOM]))
    keys = dict.fromkeys(tensors.values())
    draft.set(f"{_STACK}.remat_policy", policy, "remat_policy", *(key for key in keys if settings[key] != "offload"))
    for field, names in zip(_FIELDS, more, strict=True):
        if names:
            found = dict.fromkeys(tensors[name] for name in names if tensors)
            draft.set(f"{_STACK}.{field}", list(names), *(found or ["remat_policy"]))
    if differs:
        draft.approximate(f"remat_policy={name}: `{policy}` is nearest; {differs}.")
    for key in dict.fromkeys(key for fused in (True, False) for key in _tensors(fused, fused).values()):
        if key not in keys:
            draft.drop(key, "MaxText ignores it here")


def remat_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """MaxText's keys for the remat policy of a recipe; empty if MaxText has no equivalent.

    Args:
      values: Path -> plain value.
    """
    policy, more = values.get(f"{_STACK}.remat_policy"), [list(values.get(f"{_STACK}.{f}") or ()) for f in _FIELDS]
    policies, saved = (tables.table("remat")[part] for part in ("policies", "saved_on_device"))
    named = next((name for name, ours in policies.items() if ours == [policy, *more, ""]), None)
    if named or policy not in saved:
        return {"remat_policy": named} if named else {}
    keys = {"remat_policy": _CUSTOM}
    wide = f"{_STACK}.block.feed_forward"
    single = not values.get(f"{wide}.gated") and values.get(f"{wide}.num_experts") is None
    on_device = (*saved[policy], *more[0])
    for activation, key in _tensors(fused_qkv=False, single=single).items():
        place = "offload" if activation in more[1] else "device" if activation in on_device else "remat"
        keys |= {key: place} if place != ("device" if activation == _INPUT else "remat") else {}
    return keys


def _custom_policy(tensors: Mapping[str, str], settings: Settings) -> list[Any]:
    """As in the table `remat`, for `custom`, which has a memory space for each tensor."""
    offload, device = ([name for name, key in tensors.items() if settings[key] == at] for at in ("offload", "device"))
    saved = tables.table("remat")["saved_on_device"]
    # Of the policies that save nothing else in device memory, the one that saves most of these.
    fitting = [policy for policy, kept in saved.items() if {*kept} & {*tensors} <= {*device, *offload}]
    best = max(fitting, key=lambda policy: len({*device} & {*saved[policy]}))
    return [best, [name for name in device if name not in (_INPUT, *saved[best])], offload, ""]


def _tensors(fused_qkv: bool, single: bool) -> dict[str, str]:
    """Pax's name of each activation of a layer -> MaxText's."""
    names: dict[str, str] = {**tables.table("remat")["activations"]}
    if fused_qkv:
        names |= dict.fromkeys(_ATTENTION, "qkv_proj")
    if single:
        names["feed_forward_in"] = "mlpwi"
        del names["feed_forward_gate"]
    return names
