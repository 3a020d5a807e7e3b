"""Reads written pages: without a browser, and in headless Chromium."""

from __future__ import annotations

import html.parser
import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(html.parser.HTMLParser):
    """The elements of a page: `tags` counts them, `scripts` has the text of each script by its id."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: dict[str, int] = {}
        self.links: list[str] = []
        self.scripts: dict[str | None, str] = {}
        self.texts: list[str] = []
        self._script: str | None = ""
        self._in: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        found = dict(attrs)
        self.links += [found[name] or "" for name in ("src", "href") if name in found]
        if tag in ("script", "style"):
            self._in.append(tag)
            self._script = found.get("id")
        if tag == "script":
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._in.remove(tag)

    def handle_data(self, data: str) -> None:
        if "script" in self._in:
            self.scripts[self._script] += data
        elif not self._in and data.strip():
            self.texts.append(data)

    @property
    def data(self) -> Any:
        return json.loads(self.scripts["data"])


def open_in_browser(path: pathlib.Path, scratch: pathlib.Path, width: int = 1280) -> tuple[str, list[str]]:
    """The DOM of a page after its scripts have run, and the messages of the console."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: the page was opened in no browser")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    flags += ["--enable-logging=stderr", "--dump-dom", f"--window-size={width},2000", f"--user-data-dir={scratch}"]
    done = subprocess.run([CHROMIUM, *flags, path.as_uri()], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)
