"""One device against eight: the same losses and gradients, and parameters that are really split."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tolerances import PARALLEL
from tests.training.runs import on_meshes

# ICI, DCN, and the part of a parameter [2, 64, 128] on one device.
MESHES = [
    ("{data: 8}", "null", (2, 64, 128)),
    ("{fsdp: 8}", "null", (2, 8, 128)),
    ("{fsdp: 4, tensor: 2}", "null", (2, 16, 64)),
    ("{fsdp: 2, tensor: 2}", "{data: 2}", (2, 32, 64)),
]

SMALL = ["num_layers=2", "task.model.model_dims=64", "task.model.hidden_dims=128", "max_seq_len=32"]


def _case(ici: str, dcn: str = "null", steps: int = 20, more: tuple[str, ...] = ()) -> dict:
    sets = [*SMALL, f"mesh.ici_mesh_shape={ici}", f"mesh.dcn_mesh_shape={dcn}", *more]
    return {"recipe": "tiny-synthetic", "sets": sets, "steps": steps}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What one device and eight compute: the cases of MESHES, and Adafactor with averages, Muon, and FP8."""
    folder = tmp_path_factory.mktemp("meshes")
    factored = {"steps": 5, "more": ("optimizer=ShardedAdafactor", "ema_decay=0.9")}
    muon = {"steps": 5, "more": ("optimizer=Muon",)}
    fp8 = {"steps": 5, "more": ("precision=fp8",)}
    others = (factored, muon, fp8)
    one = [_case("{data: 1}"), *(_case("{data: 1}", **other) for other in others)]
    eight = [_case(ici, dcn) for ici, dcn, _ in MESHES]
    eight += [_case("{fsdp: 4, tensor: 2}", **other) for other in others]
    return on_meshes(folder, 1, one), on_meshes(folder, 8, eight)


@pytest.mark.parametrize("index", range(len(MESHES)), ids=lambda index: " ".join(MESHES[index][:2]))
def test_eight_devices_compute_the_same(results, index):
    one, eight = results[0][0], results[1][index]
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=PARALLEL)
    gradients = [name for name in one if name.startswith("gradient")]
    assert len(gradients) > 10
    for name in gradients:
        assert np.linalg.norm(eight[name] - one[name]) <= PARALLEL * np.linalg.norm(one[name]), name
    assert [tuple(eight[f"shard{i}"]) for i in range(3)] == [MESHES[index][2]] * 3  # the parameter, and its moments


def test_factored_moments_and_averages_are_split_too(results):
    (_, one, _, _), (*_, eight, _, _) = results
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=PARALLEL)
    # Momentum, row and column of the second moment, average of the parameters.
    assert [eight[f"shard{i}"].tolist() for i in range(1, 5)] == [[2, 16, 64], [2, 16], [2, 64], [2, 16, 64]]


def test_the_momentum_of_muon_is_split_too(results):
    (_, _, one, _), (*_, eight, _) = results
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=PARALLEL)
    assert [tuple(eight[f"shard{i}"]) for i in range(2)] == [(2, 16, 64)] * 2  # the parameter, and its momentum


def test_fp8_is_scaled_by_the_largest_values_of_all_devices(results):
    """A sum in another order may round the other way in 8 bits."""
    (*_, one), (*_, eight) = results
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=1e-4)
