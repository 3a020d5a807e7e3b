"""XLA compiler options: pax's presets for each platform, overridden by the recipe, without options XLA does not know.

They are passed with each compilation and not in XLA_FLAGS, where an option that XLA has removed aborts the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from paxcli.errors import ConfigError
from paxcli.log import log
from paxcli.mesh.option_check import compile_with_each, run_check

Option = str | int | float | bool
Options = dict[str, Option]

_PACKAGE = {"tpu": "libtpu", "gpu": "jaxlib", "cpu": "jaxlib"}
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_PRESETS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "data" / "compiler_options.yaml").read_text())


def compiler_options(
    platform: str, device_kind: str, user_options: Mapping[str, Option | None] | None = None, num_devices: int = 2
) -> Options:
    """The options for `lowered.compile(compiler_options=…)`.

    Options set in the environment (`XLA_FLAGS`, `LIBTPU_INIT_ARGS`) take precedence over pax's presets.

    Args:
      platform: `cpu`, `gpu` or `tpu`.
      device_kind: JAX's `device_kind` of the devices.
      user_options: Override pax's presets; None leaves an option at XLA's default.
      num_devices: Number of devices that the executable runs on.

    Raises:
      ConfigError: XLA rejects a user's option or its value.
    """
    overrides = dict(user_options or {})
    environment = " ".join(os.environ.get(variable, "") for variable in _ENVIRONMENT)
    decided = {*overrides, *re.findall(r"--([a-z]\w*)", environment)}
    found = _presets(platform, device_kind, num_devices)
    presets = {name: value for name, value in found.items() if name not in decided}
    user: Options = {name: value for name, value in overrides.items() if value is not None}
    errors = _option_errors(platform, presets | user)
    for name in user:
        if errors[name]:
            hint = f"{_package(platform)} does not accept it. Set it to null, or look up its new name."
            raise ConfigError(f"mesh.compiler_options: {name}={user[name]!r}: {errors[name]}", hint)
    if unknown := [name for name in presets if errors[name]]:
        names = ", ".join(unknown)
        log.warning("Skipped compiler options: %s (%s: %s).", names, _package(platform), errors[unknown[0]])
    return {name: value for name, value in (presets | user).items() if not errors[name]}


def _presets(platform: str, device_kind: str, num_devices: int) -> Options:
    """pax's options for this platform, device kind and number of devices."""
    options: Options = {}
    version = _parse_version(_package(platform).split()[-1])
    for group in _PRESETS:
        matches = (
            group["platform"] == platform
            and device_kind.startswith(tuple(group.get("kinds", [""])))
            and not device_kind.startswith(tuple(group.get("but", [])))
            and num_devices >= group.get("devices", 1)
        )
        oldest, newest = _parse_version(group["from"]), _parse_version(group.get("below", "9999"))
        if matches and oldest <= version < newest:
            options |= group["options"]
    return options


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


@functools.cache
def _package(platform: str) -> str:
    """Name and version of the package with the platform's compiler: `libtpu 0.0.42`."""
    name = _PACKAGE[platform]
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:  # e.g. a libtpu that is part of a TPU VM image
        return f"{name} 0"


def _option_errors(platform: str, options: Options) -> dict[str, str | None]:
    """XLA's error message for each option, or None if it accepts it.

    Checked once for each version of the compiler; cached in a file.
    """
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pax" / "compiler_options"
    path /= f"{_package(platform).replace(' ', '-')}.json"
    try:
        known: dict[str, str | None] = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    keys = {name: f"{name}={value}" for name, value in options.items()}
    if missing := {name: options[name] for name, key in keys.items() if key not in known}:
        found, is_checked = _try_options(platform, missing)
        known |= {keys[name]: error for name, error in found.items()}
        with contextlib.suppress(OSError):
            if is_checked:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(known, indent=1))
    return {name: known[key] for name, key in keys.items()}


def _try_options(platform: str, options: Options) -> tuple[dict[str, str | None], bool]:
    """Compiles with each option: the error or None for each, and whether they could be checked.

    In a subprocess, except on a CPU, where this process has the compiler and starts sooner.
    """
    if platform == "cpu":
        return compile_with_each(platform, options), True
    done = run_check(platform, options, {name: os.environ[name] for name in os.environ if name not in _ENVIRONMENT})
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), True
    lines = done.stderr.strip().splitlines() or ["no reason given"]
    return dict.fromkeys(options, f"cannot be checked on this machine: {lines[-1]}"), False
