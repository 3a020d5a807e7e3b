"""Experts on one device against experts spread over eight."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tests.tolerances import PARALLEL
from tests.training.runs import on_meshes

SMALL = ["num_layers=2", "model_dims=32", "hidden_dims=64", "max_seq_len=32", "num_heads=2", "dims_per_head=16"]
SMALL += [
    "feed_forward=MoeFeedForward",
    "num_experts=4",
    "loss_keys=[loss, load_balance_loss]",
    "loss_weights=[1, 0.1]",
]

# ICI, and the part of the experts' first matrix [2, 4, 32, 64] on one device.
MESHES = [("{data: 2, expert: 4}", (2, 1, 32, 64)), ("{fsdp: 2, expert: 2, tensor: 2}", (2, 2, 16, 32))]
ROUTINGS = {"dropless": "null", "capacity": "1.0"}
SOME = [("dropless", MESHES[1]), ("capacity", MESHES[0])]
MORE = [("dropless", MESHES[0]), ("capacity", MESHES[1])]


# Chunks of less than a row, and the weights of inputs, as in Llama 4.
LLAMA4 = ["attention.window=12", "attention.chunked=true", "attention.temperature_growth=0.5", "temperature_length=5"]
LLAMA4 += ["scoring=sigmoid", "normalize_weights=false", "scale_inputs=true", "shared_dims=48"]


@pytest.fixture(scope="module", params=[SOME, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def results(request, tmp_path_factory):
    """Of each routing, what one device and a mesh of eight compute, and the part of a matrix on a device."""

    def case(ici: str, routing: str) -> dict:
        sets = [*SMALL, "optimizer=AdamW", f"capacity_factor={ROUTINGS[routing]}", f"mesh.ici_mesh_shape={ici}"]
        return {"recipe": "tiny-synthetic", "sets": sets, "steps": 5}

    folder = tmp_path_factory.mktemp("experts")
    one = on_meshes(folder, 1, [case("{data: 1}", routing) for routing, _ in request.param])
    eight = on_meshes(folder, 8, [case(ici, routing) for routing, (ici, _) in request.param])
    return [(*both, part) for *both, (_, (_, part)) in zip(one, eight, request.param, strict=True)]


@pytest.mark.parametrize("routing", range(len(ROUTINGS)), ids=list(ROUTINGS))
def test_eight_devices_compute_the_same(results, routing):
    one, eight, part = results[routing]
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=PARALLEL)
    gradients = [name for name in one if name.startswith("gradient")]
    assert any("router" in name for name in gradients)
    for name in gradients:
        assert np.linalg.norm(eight[name] - one[name]) <= PARALLEL * np.linalg.norm(one[name]), name
    assert [tuple(eight[f"shard{i}"]) for i in range(3)] == [part] * 3


@pytest.mark.slow
def test_eight_devices_compute_llama_4_as_one_does(tmp_path: pathlib.Path):
    cases = [
        {"recipe": "tiny-synthetic", "sets": [*SMALL, *LLAMA4, f"mesh.ici_mesh_shape={ici}"], "steps": 5}
        for ici in ("{data: 1}", *(ici for ici, _ in MESHES))
    ]
    (one,), eight = on_meshes(tmp_path, 1, cases[:1]), on_meshes(tmp_path, 8, cases[1:])
    for found in eight:
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=PARALLEL)
        for name in (name for name in one if name.startswith("gradient")):
            assert np.linalg.norm(found[name] - one[name]) <= PARALLEL * np.linalg.norm(one[name]), name


def test_the_balance_is_part_of_the_loss(results):
    """At the first step, tokens are routed by chance: `load_balance_loss` is near the 2 experts that each chooses."""
    assert results[0][0]["losses"][0] == pytest.approx(np.log(259) + 0.1 * 2, abs=0.1)
