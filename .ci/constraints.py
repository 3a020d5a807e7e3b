"""Writes constraints.txt: the versions that a fresh install of pax[dev,docs] resolves to on each Python given."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = """\
# The versions that pax is tested with, including transitive dependencies. Written by `make constraints`.
# Use: pip install --constraint constraints.txt .
"""


def resolve(python: str) -> tuple[str, dict[str, str]]:
    """The version (`3.11`) of `python`, and package name → version of a fresh install there."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--upgrade", "pip"], check=True)
        subprocess.run([*pip, "install", "--quiet", f"{ROOT}[dev,docs]"], check=True)
        frozen = subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout
        probe = [f"{folder}/bin/python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        version = subprocess.run(probe, check=True, capture_output=True, text=True).stdout.strip()
    pins = dict(line.split("==") for line in frozen.splitlines() if "==" in line)
    return version, {name: pin for name, pin in pins.items() if name not in ("pip", "paxcli")}


def merge(versions: dict[str, dict[str, str]]) -> list[str]:
    """One line a pin, with a marker where the Pythons differ. Later Pythons use the pins of the newest one."""
    oldest, newest = sorted(versions, key=lambda version: int(version.split(".")[1]))
    markers = {oldest: f'python_version < "{newest}"', newest: f'python_version >= "{newest}"'}
    lines = []
    for name in sorted(set(versions[oldest]) | set(versions[newest]), key=str.lower):
        pins = {version: versions[version][name] for version in (oldest, newest) if name in versions[version]}
        if len(pins) == 2 and len(set(pins.values())) == 1:
            lines.append(f"{name}=={pins[oldest]}")
        else:
            lines += [f"{name}=={pin} ; {markers[version]}" for version, pin in pins.items()]
    return lines


if __name__ == "__main__":
    resolved = dict(resolve(python) for python in sys.argv[1:])
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(merge(resolved)) + "\n")
