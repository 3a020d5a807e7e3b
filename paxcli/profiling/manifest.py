"""The manifest of a profile: the conditions under which it was made. Under other conditions it is stale."""

from __future__ import annotations

import importlib.metadata
import json
import os
from typing import Any

import fiddle as fdl
import jax
from etils import epath

from paxcli.config.paths import replace_text
from paxcli.errors import DataError
from paxcli.programs.executable import compiled_values, list_changes
from paxcli.training.experiment import Experiment

NAME = "manifest.json"
COLLECT_AGAIN = "Collect it again: `pax pgle collect RECIPE`."


def conditions(config: fdl.Config[Experiment]) -> dict[str, Any]:
    """Everything that the cost of an instruction depends on, in this process: recipe, flags, versions and devices."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "xla": device.client.platform_version,
        "device_kind": device.device_kind,
        "num_devices": jax.device_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "config": compiled_values(config),
    }


def write_manifest(directory: epath.Path, made_with: dict[str, Any], settings: dict[str, Any]) -> None:
    """Writes `manifest.json`.

    Args:
      directory: Of the profile.
      made_with: What `conditions` returned when the profile was made.
      settings: Settings of the collection, such as `steps` and `percentile`.
    """
    replace_text(directory / NAME, json.dumps({**settings, **made_with}, indent=2) + "\n")


def require_fresh(directory: epath.Path, now: dict[str, Any]) -> None:
    """Rejects a profile that was made under other conditions than `now`.

    Raises:
      DataError: The conditions differ, and it names how; or there is no manifest.
    """
    path = directory / NAME
    if not path.exists():
        raise DataError(f"There is no profile in {directory}.", "Collect one: `pax pgle collect RECIPE`.")
    others = now.keys() - {"config"}
    try:
        then = json.loads(path.read_text())
        before, after = (one["config"] | {name: one[name] for name in others & one.keys()} for one in (then, now))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error}.", COLLECT_AGAIN) from None
    if changes := list_changes(before, after):
        raise DataError(f"The profile in {directory} is stale. Changed since it was made:\n{changes}", COLLECT_AGAIN)
