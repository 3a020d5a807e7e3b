"""Executes the notebooks of the documentation; writes each, with outputs and pictures, as a page of `docs/learn`.

    python .ci/notebooks.py            all of them
    python .ci/notebooks.py sharding   some of them

A test compares the code of a page with its notebook. Pictures are written beside the page.
"""

from __future__ import annotations

import base64
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

import jupytext
import nbclient

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "docs" / "notebooks"
PAGES = ROOT / "docs" / "learn"
SLOW_DISK = "Waiting for previous save"  # a warning of Orbax where the disk or the machine is slow
LEFT_OUT = SLOW_DISK, "spmd_partitioner.cc"  # the second is the source file of a long warning of XLA
OUTPUT_LINES = 60  # of a cell, in a page


def page_path(notebook: pathlib.Path) -> pathlib.Path:
    """The page of a notebook."""
    return PAGES / f"{notebook.stem.replace('_', '-')}.md"


def execute(path: pathlib.Path, folder: pathlib.Path, timeout: int = 900) -> Any:
    """The notebook of a script, executed in `folder`."""
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def render(path: pathlib.Path, notebook: Any) -> None:
    """Writes an executed notebook as a page, and its figures beside it."""
    page = page_path(path)
    for old in page.parent.glob(f"{page.stem}-*.png"):
        old.unlink()
    source = f"<!-- Written by `make notebooks` from docs/notebooks/{path.name}: do not edit. -->\n"
    link = f"This page is an executed notebook: [{path.name}](../notebooks/{path.name}).\n"
    parts: list[str] = []
    pictures = 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source + "\n")
            if link:
                parts.append(link)
                link = ""
            continue
        parts.append(f"```python\n{cell.source}\n```\n")
        shown = []
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                pictures += 1
                name = f"{page.stem}-{pictures}.png"
                (page.parent / name).write_bytes(base64.b64decode(data["image/png"]))
                parts += [text_block(shown), f"![The figure that this cell draws]({name})\n"]
                shown = []
            else:
                shown.append(output.get("text") or data.get("text/plain", ""))
        parts.append(text_block(shown))
    page.write_text("\n".join(part for part in [*parts, source] if part))


def text_block(texts: list[str]) -> str:
    """Outputs as a block of text, without control codes and without paths of this machine."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(text.rstrip("\n") for text in texts)).rstrip()
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+/", "", text)
    lines = [line for line in text.splitlines() if not any(warning in line for warning in LEFT_OUT)]
    if len(lines) > OUTPUT_LINES:
        lines = [*lines[:OUTPUT_LINES], "…"]
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n" if text else ""


def main() -> None:
    """Executes and renders the notebooks that the command line names, or all."""
    wanted = sys.argv[1:]
    PAGES.mkdir(exist_ok=True)
    for path in sorted(NOTEBOOKS.glob("*.py")):
        if wanted and path.stem not in wanted:
            continue
        folder = pathlib.Path(tempfile.mkdtemp())
        render(path, execute(path, folder))
        shutil.rmtree(folder)
        print(page_path(path).relative_to(ROOT))


if __name__ == "__main__":
    main()
