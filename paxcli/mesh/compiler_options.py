"""What the compiler is asked for on each platform: pax's own options, the recipe's over them, and none that is unknown.

They go with each compilation, not by the environment, where an option that XLA has dropped ends the process.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from paxcli.errors import ConfigError
from paxcli.log import log

Options = dict[str, str | int | float | bool]

_PACKAGE = {"tpu": "libtpu", "gpu": "jaxlib", "cpu": "jaxlib"}
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def compiler_options(
    platform: str,
    device_kind: str,
    user_options: Mapping[str, str | int | float | bool | None] | None = None,
    num_devices: int = 2,
) -> Options:
    """The options to compile with: `lowered.compile(compiler_options=…)`.

    An option that the environment sets (`XLA_FLAGS`, `LIBTPU_INIT_ARGS`) is the environment's.

    Args:
      platform: `cpu`, `gpu` or `tpu`.
      device_kind: The kind of the devices, as JAX names it.
      user_options: Laid over pax's own; None leaves an option at XLA's default.
      num_devices: How many the program runs on.

    Raises:
      ConfigError: XLA does not know an option of the user's, or not with this value.
    """
    given = dict(user_options or {})
    elsewhere = _in_environment()
    own = {
        name: value
        for name, value in _presets(platform, device_kind, num_devices).items()
        if name not in given and name not in elsewhere
    }
    theirs: Options = {name: value for name, value in given.items() if value is not None}
    errors = _errors(platform, own | theirs)
    for name in theirs:
        if errors[name]:
            raise ConfigError(
                f"mesh.compiler_options: {name}={theirs[name]!r}: {errors[name]}",
                f"{_package(platform)} does not take it. Set it to null, or look for its new name.",
            )
    unknown = [name for name in own if errors[name]]
    if unknown:
        log.warning("Left out: %s (%s: %s).", ", ".join(unknown), _package(platform), errors[unknown[0]])
    return {name: value for name, value in (own | theirs).items() if not errors[name]}


def _presets(platform: str, device_kind: str, num_devices: int) -> Options:
    """What pax asks for by itself."""
    options: Options = {}
    for group in _groups():
        fits = (
            group["platform"] == platform
            and _begins(device_kind, group.get("kinds", [""]))
            and not _begins(device_kind, group.get("but", []))
            and num_devices >= group.get("devices", 1)
        )
        if fits and _numbers(group["from"]) <= _version(platform) < _numbers(group.get("below", "9999")):
            options |= group["options"]
    return options


@functools.cache
def _groups() -> list[dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "data" / "compiler_options.yaml").read_text())


def _begins(kind: str, beginnings: list[str]) -> bool:
    return any(kind.startswith(beginning) for beginning in beginnings)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _version(platform: str) -> tuple[int, ...]:
    return _numbers(_package(platform).split()[-1])


@functools.cache
def _package(platform: str) -> str:
    """Whose options these are: `libtpu 0.0.42`."""
    name = _PACKAGE[platform]
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:  # libtpu of a TPU image, say
        return f"{name} 0"


def _in_environment() -> set[str]:
    """Names that the environment sets for every compilation."""
    return {name for variable in _ENVIRONMENT for name in re.findall(r"--([a-z]\w*)", os.environ.get(variable, ""))}


def _errors(platform: str, options: Options) -> dict[str, str | None]:
    """Why XLA does not take an option, or None, for each; asked once for each version, in a process of its own."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pax" / "compiler_options"
    path /= f"{_package(platform).replace(' ', '-')}.json"
    try:
        known: dict[str, str | None] = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    keys = {name: f"{name}={value}" for name, value in options.items()}
    missing = {name: options[name] for name, key in keys.items() if key not in known}
    failure = None
    if missing:
        found, failure = _ask(platform, missing)
        known |= {keys[name]: failure or found[name] for name in missing}
    if missing and not failure:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(known, indent=1))
        except OSError as error:
            log.debug("Not kept for the next time: %s", error)
    return {name: known[key] for name, key in keys.items()}


def _ask(platform: str, options: Options) -> tuple[dict[str, str | None], str | None]:
    """Why XLA does not take an option, for each; and why that cannot be found out, if it cannot."""
    command = [sys.executable, "-m", "paxcli.mesh.option_check", platform]
    environment = {name: value for name, value in os.environ.items() if name not in _ENVIRONMENT}
    done = subprocess.run(command, input=json.dumps(options), capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), None
    lines = done.stderr.strip().splitlines() or ["no reason given"]
    return {}, f"it cannot be tried here: {lines[-1]}"
