"""What `pax maxtext-convert` makes of the launch scripts in a clone of MaxText's repository, as JSON.

    python benchmarks/maxtext_scripts.py CLONE [--days 2023-06-01 2024-06-01 …] [--details FILE]

For each day (default: the newest commit only), the scripts and configs of the last commit before it are unpacked into
a temporary directory. Every launch of every script is converted with the defaults of that day. Nothing of them is run.
The result counts scripts without a training, conversions, and refusals by their message, with numbers left out;
`--details` also writes, for each launch, the recipe's values or the refusal.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import pathlib
import re
import subprocess
import tempfile
import time

from paxcli.convert.maxtext.launch_to_recipe import convert
from paxcli.convert.maxtext.sizes import num_parameters
from paxcli.convert.maxtext.source import read_file
from paxcli.errors import ConfigError

SUFFIXES = (".sh", ".yml", ".yaml")


def git(clone: pathlib.Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(clone), *words], check=True, capture_output=True).stdout


def commit_before(clone: pathlib.Path, day: str | None) -> tuple[str, str]:
    """The commit, and its day."""
    before = [f"--before={day}T00:00:00Z"] if day else []
    return tuple(git(clone, "log", "-1", "--format=%H %cs", *before).decode().split())


def unpack(clone: pathlib.Path, commit: str, folder: pathlib.Path) -> None:
    """Writes the scripts and configs of a commit. Other files may be missing from the clone."""
    entries = git(clone, "ls-tree", "-r", "-z", commit).decode().rstrip("\0").split("\0")
    for mode_type_hash, path in (entry.split("\t") for entry in entries):
        mode, _, object_hash = mode_type_hash.split()
        if path.endswith(SUFFIXES) and mode != "120000":
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(git(clone, "cat-file", "blob", object_hash))


def kind_of(error: ConfigError) -> str:
    """An error without what differs between launches."""
    text = re.sub(r"/\S+/", "", f"{error.message} {error.hint}")
    return re.sub(r"[0-9][0-9.,_]*", "#", text)[:160]


def convert_all(folder: pathlib.Path, day: str) -> dict[str, list]:
    """Script -> its launches: the values of each recipe, or a refusal."""
    found: dict[str, list] = {}
    date = datetime.date.fromisoformat(day)
    for path in sorted(folder.rglob("*.sh")):
        name, began = str(path.relative_to(folder)), time.perf_counter()
        results = found[name] = []
        try:
            launches = read_file(path).launches
        except ConfigError as error:
            no_training = "starts no MaxText training" in error.message
            results.append({"none" if no_training else "refused": "no training" if no_training else kind_of(error)})
            continue
        for launch in launches:
            try:
                converted = convert(launch, path.name, date=date)
                results.append({"values": converted.values, "parameters": num_parameters(converted.settings)})
            except ConfigError as error:
                results.append({"refused": kind_of(error), "line": launch.line})
        results.append({"seconds": time.perf_counter() - began})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=pathlib.Path)
    parser.add_argument("--days", nargs="*", default=[None])
    parser.add_argument("--details", type=pathlib.Path)
    options = parser.parse_args()
    counts: dict[str, dict] = {}
    details: dict[str, dict] = {}
    for asked in options.days:
        commit, day = commit_before(options.clone, asked)
        with tempfile.TemporaryDirectory() as name:
            unpack(options.clone, commit, pathlib.Path(name))
            found = convert_all(pathlib.Path(name), day)
        results = [result for results in found.values() for result in results]
        refused = collections.Counter(result["refused"] for result in results if "refused" in result)
        counts[day] = {
            "commit": commit,
            "scripts": len(found),
            "without_training": sum("none" in result for result in results),
            "converted": sum("values" in result for result in results),
            "refused": sum(refused.values()),
            "slowest_seconds": round(max((result.get("seconds", 0) for result in results), default=0), 2),
            "reasons": dict(refused.most_common()),
        }
        details[day] = found
    if options.details:
        options.details.write_text(json.dumps(details, indent=1, default=str))
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()
