"""Profiles: text and binary, percentiles, unusable files."""

from __future__ import annotations

import pytest
from etils import epath

from paxcli.errors import DataError, MissingError
from paxcli.profiling.costs import aggregate, decode, describe, encode, read_costs, write_costs

# As XLA's own tools print it (NVIDIA's JAX-Toolbox, `pgo_nsys_converter`).
TEXT = """costs { name: "all-gather-start.1" cost_us: 7040.5215 }
costs { name: "loop_convert_fusion.111" cost_us: 69.215 }
costs {
  name: "0123abcd::cublas-gemm.209.0"
  cost_us: 969.08
}
"""
COSTS = {"all-gather-start.1": 7040.5215, "loop_convert_fusion.111": 69.215, "0123abcd::cublas-gemm.209.0": 969.08}


def test_text_and_binary_have_the_same_costs(tmp_path):
    text = epath.Path(tmp_path / "given.pbtxt")
    text.write_text(TEXT)
    assert read_costs(text) == COSTS
    write_costs(encode(COSTS), epath.Path(tmp_path / "profile"))
    assert read_costs(epath.Path(tmp_path / "profile.pb")) == COSTS
    assert read_costs(epath.Path(tmp_path / "profile.pbtxt")) == COSTS


def test_describing_a_profile():
    found = describe(COSTS, top=2)
    assert found["instructions"] == 3 and found["fingerprints"] == ["0123abcd"]
    assert [one["name"] for one in found["costliest"]] == ["all-gather-start.1", "cublas-gemm.209.0"]


@pytest.mark.parametrize(("percentile", "expected"), [(50, 3), (90, 4), (100, 100)])
def test_the_percentile_is_over_the_steps(percentile, expected):
    profiles = [encode({"dot.1": cost, "copy.2": 7}) for cost in (1, 100, 3, 2, 4)]
    assert decode(aggregate(profiles, percentile)) == {"dot.1": expected, "copy.2": 7}


def test_a_step_without_costs_does_not_count():
    assert decode(aggregate([b"", encode({"dot.1": 2.0}), b""], 90)) == {"dot.1": 2.0}


def test_no_costs_at_all_is_an_error_that_names_causes():
    with pytest.raises(MissingError) as caught:
        aggregate([b"", b""], 90)
    assert "2 steps" in caught.value.message and "Nsight" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.pb", None, "no profile"),
        (".", None, "no profile"),
        ("empty.pb", b"", "empty"),
        ("empty.pbtxt", b"", "empty"),
        ("wrong.pb", b"\xff\xff\xff", "not a profile of"),
        ("wrong.pbtxt", b"costs { price: 3 }", "not a profile of"),
    ],
)
def test_unusable_files(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_costs(epath.Path(tmp_path / name))
