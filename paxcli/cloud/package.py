"""The package that `pax install` installs: pax from a checkout or from git, with pinned dependencies."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import paxcli
from paxcli.cloud.values import check
from paxcli.errors import ConfigError, MissingError

EXTRAS = ("tpu", "cuda12", "cuda13", "cpu")
_CHECKOUT = Path(paxcli.__file__).resolve().parents[1]
SOURCES = ("paxcli", "recipes", "pyproject.toml", "README.md", "LICENSE")
# PCI device ids of TPUs v2 to 7x, as in `jax._src.hardware_utils`; Google's network cards have the same vendor id.
_PCI, _GOOGLE = Path("/sys/bus/pci/devices"), "0x1ae0"
_TPUS = {"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
# The oldest NVIDIA driver for each CUDA version.
_DRIVERS = (("cuda13", 580), ("cuda12", 525))
_SETUPTOOLS = 77


@dataclasses.dataclass(frozen=True)
class Package:
    """A pip requirement and the files it needs.

    Args:
      requirement: Argument of `pip install`; `{ship}` is the folder of `files`.
      files: The constraints file and, for a local source, a wheel.
    """

    requirement: str
    files: tuple[Path, ...]

    @property
    def hash(self) -> str:
        """A hash of the requirement and of the contents of the files."""
        digest = hashlib.sha256(self.requirement.encode())
        for file in self.files:
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()[:16]


def make_package(source: str, extra: str, folder: Path, dry_run: bool = False) -> Package:
    """Writes the files of an installation to `folder`.

    Args:
      source: `git:REF`, `git:ADDRESS@REF`, or `local`: this checkout.
      extra: One of `EXTRAS`.
      folder: An empty folder for the wheel and the constraints file.
      dry_run: Do not build the wheel.

    Raises:
      ConfigError: The source is invalid.
      MissingError: The wheel cannot be built on this machine.
    """
    constraints = folder / "constraints.txt"
    constraints.write_text(_constraints())
    if source != "local":
        return Package(git_requirement(source, extra, pin=not dry_run), (constraints,))
    require_checkout()
    extras = "" if extra == "cpu" else f"[{extra}]"
    wheel = folder / f"paxcli-{paxcli.__version__}-py3-none-any.whl"
    if dry_run:
        wheel.touch()
    else:
        wheel = _wheel(folder)
    return Package(f"{{ship}}/{wheel.name}{extras}", (constraints, wheel))


def git_requirement(source: str, extra: str, pin: bool = False) -> str:
    """The pip requirement of `git:REF` or `git:ADDRESS@REF`, or with `pin` of the commit that REF is now.

    Raises:
      ConfigError: The source is another, or invalid.
    """
    if not source.startswith("git:"):
        raise ConfigError(f"{source!r} is not a source.", "Use --from git:REF, git:https://…@REF or local.")
    address, separator, reference = source[4:].rpartition("@")
    address = check("git address", address if separator else _origin())
    check("git reference", reference)
    extras = "" if extra == "cpu" else f"[{extra}]"
    return f"paxcli{extras} @ git+{address}@{_find_commit(address, reference) if pin else reference}"


def _find_commit(address: str, reference: str) -> str:
    """The commit of a branch or tag, which may move. Any other reference is returned unchanged, for pip to find."""
    found = _git("ls-remote", address, f"refs/heads/{reference}", f"refs/tags/{reference}")
    return found.split()[0] if found else reference


def require_checkout() -> Path:
    """The checkout that pax runs from.

    Raises:
      ConfigError: pax was installed otherwise.
    """
    if not (_CHECKOUT / "pyproject.toml").exists():
        raise ConfigError("pax is not running from a checkout.", "Add --from git:https://HOST/PATH@REF")
    return _CHECKOUT


def detect_extra() -> str:
    """The extra for this machine's accelerator: `tpu`, `cuda13`, `cuda12` or `cpu`."""
    for vendor in _PCI.glob("*/vendor"):
        if vendor.read_text().strip() == _GOOGLE and vendor.with_name("device").read_text().strip() in _TPUS:
            return "tpu"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
        major = done.stdout.partition(".")[0].strip()
        if done.returncode == 0 and major.isdigit():
            return next((extra for extra, oldest in _DRIVERS if int(major) >= oldest), "cpu")
    return "cpu"


def local_commands(package: Package, venv: Path, ship: Path) -> list[list[str]]:
    """The commands that install a package into a local virtual environment, which is created if it does not exist."""
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    pip += ["--constraint", str(ship / "constraints.txt"), package.requirement.replace("{ship}", str(ship))]
    if python.exists():
        return [pip]
    return [[sys.executable, "-m", "venv", str(venv)], pip]


def lasting_commands(lines: list[list[str]], folder: Path) -> list[list[str]]:
    """The commands of a dry run, to be run by hand: with other files than those in its temporary folder.

    Commands before them build the wheel in the working directory, and write the constraints outside a checkout.
    """
    before, pins = [], _CHECKOUT / "constraints.txt"
    if not pins.exists():
        pins = Path("constraints.txt")
        before.append(["sh", "-c", f"{shlex.quote(sys.executable)} -m pip freeze --exclude paxcli > {pins}"])
    if any(f"{folder}/paxcli" in word for argv in lines for word in argv):
        before.append([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", ".", str(_CHECKOUT)])

    def lasting(word: str) -> str:
        return word.replace(f"{folder}/constraints.txt", str(pins)).replace(f"{folder}/", "./")

    return before + [[lasting(word) for word in argv] for argv in lines]


def _constraints() -> str:
    """The checkout's constraints.txt, or the versions of this installation."""
    file = _CHECKOUT / "constraints.txt"
    if file.exists():
        return file.read_text()
    found = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name != "paxcli"}
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


def _origin() -> str:
    if origin := _git("-C", str(_CHECKOUT), "remote", "get-url", "origin"):
        return origin
    raise ConfigError("This checkout has no git origin.", "Use --from git:https://HOST/PATH@REF")


def _git(*words: str) -> str:
    """The output of git; an empty text if it fails."""
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _wheel(folder: Path) -> Path:
    """Builds the checkout's wheel reproducibly, from a copy of its sources."""
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (_CHECKOUT / name).is_dir():
            shutil.copytree(_CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(_CHECKOUT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    if _has_setuptools():
        build.append("--no-build-isolation")
    env = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}
    try:
        subprocess.run(build, check=True, capture_output=True, text=True, timeout=600, env=env)
    except subprocess.CalledProcessError as error:
        hint = "Solve the problem that pip names."
        raise MissingError(f"The wheel of {_CHECKOUT} cannot be built: {error.stderr.strip()[-800:]}", hint) from None
    (wheel,) = folder.glob("paxcli-*.whl")
    return wheel


def _has_setuptools() -> bool:
    try:
        return int(importlib.metadata.version("setuptools").partition(".")[0]) >= _SETUPTOOLS
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
