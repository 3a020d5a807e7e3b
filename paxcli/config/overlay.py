"""YAML files: overlays, which map paths to values, and YAML recipes, which name a base recipe as well."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from paxcli.config.index import find_overlays
from paxcli.config.paths import read_text, resolve_path
from paxcli.config.yaml_text import parse_yaml
from paxcli.errors import ConfigError, did_you_mean

YAML_SUFFIXES = (".yaml", ".yml")
# Suffix of a key in an overlay: assign the value only if the recipe's class has such a field.
OPTIONAL = "?"


class Assignments(NamedTuple):
    """Path → value assignments from one source: `recipe`, `overlay cpu` or `--set`."""

    source: str
    values: Mapping[str, Any]


def read_overlay(name_or_path: str) -> Assignments:
    """Reads an overlay by its name in `recipes/overlays/`, or from a file.

    Raises:
      ConfigError: There is no such overlay, or it is not a mapping of paths to values.
    """
    is_file = Path(name_or_path).suffix in YAML_SUFFIXES
    overlays = {name_or_path: resolve_path(name_or_path)} if is_file else find_overlays()
    if name_or_path not in overlays:
        known = f"Overlays are: {', '.join(sorted(overlays)) or 'none'}; or give a .yaml file."
        raise ConfigError(f"There is no overlay `{name_or_path}`.", did_you_mean(name_or_path, overlays) or known)
    return Assignments(f"overlay {name_or_path}", _read_mapping(overlays[name_or_path]))


def read_yaml_recipe(path: Path) -> tuple[str, list[str], dict[str, Any]]:
    """Base recipe, overlays and values of a YAML recipe: `recipe: NAME`, optionally `overlays: [...]` and `set: {…}`.

    Raises:
      ConfigError: The file cannot be read, or is not a YAML recipe.
    """
    content = _read_mapping(path)
    keys = ("recipe", "overlays", "set")
    if unknown := [key for key in content if key not in keys]:
        hint = f"A YAML recipe has {', '.join(keys)}. `pax maxtext-convert` makes one of a config of MaxText."
        raise ConfigError(f"{path}: unknown key `{unknown[0]}`.", did_you_mean(unknown[0], keys) or hint)
    recipe, overlays, values = content.get("recipe"), content.get("overlays") or [], content.get("set") or {}
    if not isinstance(recipe, str):
        raise ConfigError(f"{path} does not name its base recipe.", "Begin it with a line such as `recipe: tiny`.")
    if not isinstance(overlays, list) or not all(isinstance(overlay, str) for overlay in overlays):
        raise ConfigError(f"{path}: `overlays` is not a list of names.", "Write `overlays: [cpu]`.")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: `set` is not a mapping of paths to values.", "Write `set: {num_layers: 4}`.")
    return recipe, overlays, values


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(read_text(path, ConfigError))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: {error.problem}.", "Fix the YAML on this line.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: {error}.", "Correct its YAML.") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path} is not a mapping of names to values.", "Write one `path: value` on each line.")
    return content
