"""Two sets of arrays are compared by name, shape and dtype."""

from __future__ import annotations

import numpy as np

from paxcli.checkpoint.array_differences import compare_arrays


def test_each_difference_is_named_once() -> None:
    model = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32), "c": np.zeros(1), "d": np.zeros((2, 3))}
    saved = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float16), "d": np.zeros((3, 2)), "e": np.zeros(1)}
    found = compare_arrays(model, saved)
    assert found and (found.matched, found.missing, found.unexpected) == (["a"], ["c"], ["e"])
    assert list(found.mismatched) == ["b", "d"]
    assert found.mismatched["b"] == "`b` is float16[2] there, float32[2] here"
    assert found.text().endswith("; it lacks `c`; only it has `e`")
    assert compare_arrays(model, saved, dtypes=False).matched == ["a", "b"]
    assert not compare_arrays(model, model) and compare_arrays(model, model).text() == ""


def test_long_lists_are_cut() -> None:
    model = {f"x{i}": np.zeros(2) for i in range(8)}
    text = compare_arrays(model, {name: np.zeros(3) for name in model}).text()
    assert text.count("there") == 5 and text.endswith("and 3 more")
