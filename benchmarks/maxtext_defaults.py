"""The values of MaxText's keys by date, from a clone of its repository, and where pax's tables differ, as JSON.

    python benchmarks/maxtext_defaults.py CLONE [--keys steps remat_policy …]

Reads base.yml in every commit of the main branch that changed it. `differences` are keys whose value in
`paxcli/convert/maxtext/data/keys.yaml` differs, with the first day of each; `--keys` prints the days of each value
of these keys, in the form of its `defaults`, to add a key or a year.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import subprocess
from typing import Any

import yaml

from paxcli.convert.maxtext import tables

PATHS = ("MaxText/configs/base.yml", "src/MaxText/configs/base.yml", "src/maxtext/configs/base.yml")


def git(clone: pathlib.Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(clone), *words], check=True, capture_output=True, text=True).stdout


def versions(clone: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Day -> base.yml at its end, for the days that changed it."""
    found = {}
    history = git(clone, "log", "--first-parent", "--reverse", "--format=%H %cs", "--", *PATHS)
    for commit, day in (line.split() for line in history.splitlines()):
        for path in PATHS:
            shown = subprocess.run(
                ["git", "-C", str(clone), "show", f"{commit}:{path}"], capture_output=True, text=True
            )
            if shown.returncode == 0:
                try:
                    found[day] = yaml.safe_load(shown.stdout)
                except yaml.YAMLError:
                    continue
    return found


def timeline(days: dict[str, dict[str, Any]], key: str) -> dict[str, Any]:
    """First day -> value, or `gone`."""
    found: dict[str, Any] = {}
    last: Any = "gone"
    for day, values in days.items():
        value = values.get(key, "gone")
        if value != last:
            found[day] = last = value
    return found


def differences(days: dict[str, dict[str, Any]]) -> list[list[Any]]:
    """Key, first day, MaxText's value and pax's, where they differ."""
    found = []
    for key in (key for key in tables.part("defaults") if not key.startswith("_")):
        before: tuple[Any, Any] | None = None
        for day, values in days.items():
            theirs = values.get(key, "gone")
            ours = tables.default(key, datetime.date.fromisoformat(day))
            now = (str(theirs), str(ours))
            if theirs != "gone" and theirs != ours and (theirs or ours) and now != before:
                found.append([key, day, theirs, ours])
            before = now
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=pathlib.Path)
    parser.add_argument("--keys", nargs="*", default=[])
    options = parser.parse_args()
    days = versions(options.clone)
    wanted = {key: timeline(days, key) for key in options.keys}
    first, last = min(days), max(days)
    found = {"first": first, "last": last, "days": len(days), "differences": differences(days), "keys": wanted}
    print(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
