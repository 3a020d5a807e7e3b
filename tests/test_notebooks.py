"""The notebooks of the documentation run from top to bottom, and their pages show their code."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import jupytext
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("notebooks", ROOT / ".ci" / "notebooks.py")
assert spec is not None and spec.loader is not None
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)
NOTEBOOKS = sorted(notebooks.NOTEBOOKS.glob("*.py"))
FIGURES = {"first_run", "fine_tune_llama", "own_parts", "your_data", "evaluate", "pipeline_and_multislice"}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if path.stem == "predict_a_tpu_step" and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is for Linux on x86-64 only")
    notebook = notebooks.execute(path, tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = [output.get("text", "") for output in outputs]
    assert not any("\x1b" in text for text in printed) or path.stem == "sharding"
    errors = [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert [text for text in errors if notebooks.SLOW_DISK not in text] == []
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) == (path.stem in FIGURES)
    if path.stem == "first_run":
        assert any("step 20 · loss" in text for text in printed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_of_a_notebook_is_current(path: pathlib.Path) -> None:
    cells = jupytext.read(path).cells
    page = notebooks.page_path(path).read_text()
    assert "jupytext" not in page  # the header of the notebook
    code = re.findall(r"^```python\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert [text for cell in cells if cell.cell_type == "code" and (text := cell.source) not in code] == []
    assert [cell.source for cell in cells if cell.cell_type == "markdown" and cell.source not in page] == []
    pictures = re.findall(r"!\[[^]]*\]\(([\w-]+\.png)\)", page)
    assert len(pictures) == (path.stem in FIGURES)
    assert [name for name in pictures if not (notebooks.PAGES / name).exists()] == []


def test_there_is_a_page_for_each_notebook_and_no_other() -> None:
    written = [page for page in notebooks.PAGES.glob("*.md") if "Written by `make notebooks`" in page.read_text()]
    assert sorted(written) == sorted(map(notebooks.page_path, NOTEBOOKS))
