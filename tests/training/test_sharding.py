"""One device against eight: the same losses and gradients, and parameters that are really split."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.tolerances import PARALLEL

ROOT = pathlib.Path(__file__).resolve().parents[2]

# ICI, DCN, and the part of a parameter [2, 64, 128] on one device.
MESHES = [
    ({"data": 8}, None, (2, 64, 128)),
    ({"fsdp": 8}, None, (2, 8, 128)),
    ({"fsdp": 4, "tensor": 2}, None, (2, 16, 64)),
    ({"fsdp": 2, "tensor": 2}, {"data": 2}, (2, 32, 64)),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What one device and eight compute: the cases of MESHES, and one with Adafactor and averaged parameters."""
    folder = tmp_path_factory.mktemp("meshes")
    plain = [{"ici": ici, "dcn": dcn, "steps": 20, "factored": False} for ici, dcn, _ in MESHES]
    factored = {"ici": {"fsdp": 4, "tensor": 2}, "dcn": None, "steps": 5, "factored": True}
    one = [{**case, "ici": {"data": 1}} for case in (plain[0], factored)]
    return _run(folder, 1, one), _run(folder, 8, [*plain, factored])


def _run(folder: pathlib.Path, devices: int, cases: list[dict]) -> list[dict[str, np.ndarray]]:
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.on_meshes", folder / "cases.json", folder / "out.npz"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(folder / "out.npz") as arrays:
        return [
            {name.partition("/")[2]: arrays[name] for name in arrays if name.startswith(f"{i}/")}
            for i in range(len(cases))
        ]


@pytest.mark.parametrize("index", range(len(MESHES)), ids=lambda index: f"{MESHES[index][0]}{MESHES[index][1] or ''}")
def test_eight_devices_compute_the_same(results, index):
    one, eight = results[0][0], results[1][index]
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=PARALLEL)
    gradients = [name for name in one if name.startswith("gradient")]
    assert len(gradients) > 10
    for name in gradients:
        assert np.linalg.norm(eight[name] - one[name]) <= PARALLEL * np.linalg.norm(one[name]), name
    assert [tuple(eight[f"shard{i}"]) for i in range(3)] == [MESHES[index][2]] * 3  # the parameter, and its moments


def test_factored_moments_and_averages_are_split_too(results):
    (_, one), (*_, eight) = results
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=PARALLEL)
    # Momentum, row and column of the second moment, average of the parameters.
    assert [eight[f"shard{i}"].tolist() for i in range(1, 5)] == [[2, 16, 64], [2, 16], [2, 64], [2, 16, 64]]
