"""A fake cloud for tests: a fake `gcloud` on PATH that keeps its state in a directory."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import pytest

from tests.jobs import free_port

SITE = [path for path in sys.path if path.endswith("site-packages")]
# The Python of a worker: it makes virtual environments that see what is installed here, so that nothing is fetched.
PYTHON = """#!{python}
import os, pathlib, subprocess, sys
args = sys.argv[1:]
if args[:2] == ["-m", "venv"]:
    subprocess.run([{python!r}, "-m", "venv", "--without-pip", args[-1]], check=True)
    (site,) = pathlib.Path(args[-1]).glob("lib/python3*/site-packages")
    (site / "tests.pth").write_text({site!r})
else:
    os.execv({python!r}, [{python!r}, *args])
"""


class FakeCloud:
    """The state of the fake gcloud, and a log of its calls."""

    def __init__(self, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
        self.root = root
        for folder in ("bin", "remote-bin", "workers"):
            (root / folder).mkdir(parents=True)
        fake = pathlib.Path(__file__).with_name("fake_gcloud.py")
        self._script("bin/gcloud", f'#!/bin/sh\nexec {sys.executable} -S -E {fake} "$@"\n')
        text = PYTHON.format(python=sys.executable, site="\n".join(SITE))
        for name in ("python3.12", "python3.11", "python3"):
            self._script(f"remote-bin/{name}", text)
        (root / "port").write_text(str(free_port()))
        self.write(resources={}, states=[], workers=1, plays=[])
        monkeypatch.setenv("FAKE_CLOUD", str(root))
        monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
        monkeypatch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
        for name in ("CLOUDSDK_COMPUTE_ZONE", "CLOUDSDK_CORE_PROJECT", "GOOGLE_CLOUD_PROJECT"):
            monkeypatch.delenv(name, raising=False)

    def _script(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)
        (self.root / name).chmod(0o755)

    def write(self, **values: object) -> None:
        """Sets parts of the state."""
        file = self.root / "cloud.json"
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | values))

    def play(self, match: str, stderr: str = "", code: int = 1, times: int = 1, late: bool = False) -> None:
        """Makes calls that contain `match` fail."""
        plays = json.loads((self.root / "cloud.json").read_text())["plays"]
        self.write(plays=[*plays, {"match": match, "stderr": stderr, "code": code, "times": times, "late": late}])

    @property
    def calls(self) -> list[list[str]]:
        """All calls so far."""
        file = self.root / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def calls_with(self, *words: str) -> list[list[str]]:
        """The calls that contain all of these words."""
        return [call for call in self.calls if all(word in call for word in words)]
