"""The notebooks of the documentation run from top to bottom."""

from __future__ import annotations

import pathlib

import jupytext
import nbclient
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "docs" / "notebooks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    notebook = jupytext.read(path)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    printed = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("step 20 · loss" in text for text in printed)
    assert not any("\x1b" in text for text in printed)
    assert not any(output.get("name") == "stderr" for cell in notebook.cells for output in cell.get("outputs", []))
    images = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(images) == 1
