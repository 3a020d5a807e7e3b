"""One device against eight: the same losses and gradients, and parameters that are really split."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tolerances import PARALLEL
from tests.training.runs import on_meshes

# ICI, DCN, and the part of a parameter [2, 64, 128] on one device.
MESHES = [("{fsdp: 4, tensor: 2}", "null", (2, 16, 64)), ("{fsdp: 2, tensor: 2}", "{data: 2}", (2, 32, 64))]
MORE_MESHES = [("{data: 8}", "null", (2, 64, 128)), ("{fsdp: 8}", "null", (2, 8, 128))]

SMALL = ["num_layers=2", "task.model.model_dims=64", "task.model.hidden_dims=128", "max_seq_len=32"]


def _case(ici: str, dcn: str = "null", steps: int = 20, more: tuple[str, ...] = ()) -> dict:
    sets = [*SMALL, f"mesh.ici_mesh_shape={ici}", f"mesh.dcn_mesh_shape={dcn}", *more]
    return {"recipe": "tiny-synthetic", "sets": sets, "steps": steps}


@pytest.fixture(
    scope="module", params=[MESHES, pytest.param(MORE_MESHES, marks=pytest.mark.slow)], ids=["some", "more"]
)
def results(request, tmp_path_factory):
    """What one device computes, and eight on each of the meshes."""
    folder = tmp_path_factory.mktemp("meshes")
    adam = ("optimizer=AdamW",)
    eight = [_case(ici, dcn, more=adam) for ici, dcn, _ in request.param]
    (one,) = on_meshes(folder, 1, [_case("{data: 1}", more=adam)])
    return one, list(zip(on_meshes(folder, 8, eight), request.param, strict=True))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """What one device and eight compute with Adafactor and averages, with Muon, and in FP8."""
    folder = tmp_path_factory.mktemp("others")
    choices = (("optimizer=ShardedAdafactor", "ema_decay=0.9"), ("optimizer=Muon",), ("precision=fp8",))
    cases = [[_case(ici, steps=5, more=more) for more in choices] for ici in ("{data: 1}", "{fsdp: 4, tensor: 2}")]
    return on_meshes(folder, 1, cases[0]), on_meshes(folder, 8, cases[1])


@pytest.mark.parametrize("index", range(2))
def test_eight_devices_compute_the_same(results, index):
    one, (eight, (*_, part)) = results[0], results[1][index]
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=PARALLEL)
    gradients = [name for name in one if name.startswith("gradient")]
    assert len(gradients) > 10
    for name in gradients:
        assert np.linalg.norm(eight[name] - one[name]) <= PARALLEL * np.linalg.norm(one[name]), name
    assert [tuple(eight[f"shard{i}"]) for i in range(3)] == [part] * 3  # the parameter, and its moments


def test_accumulated_gradients_are_those_of_one_device(tmp_path):
    """On a mesh where XLA computes wrong gradients of matmuls without constraints, in the loop over microbatches."""
    predicted = ["mtp_num_layers=1", "loss_aggregator.loss_keys=[loss,mtp_loss]", "num_microbatches=2"]
    mlp = [
        "num_layers=3",
        "task.model.model_dims=32",
        "task.model.hidden_dims=64",
        "vocab_size=32",
        "num_microbatches=2",
    ]
    mlp += ["train_input.seq_len=16", "percore_batch_size=null", "global_batch_size=16"]

    def cases(mesh: str) -> list[dict]:
        small = {"recipe": "small-mlp", "sets": [*mlp, f"mesh.ici_mesh_shape={mesh}"], "steps": 1}
        sets = ["num_layers=2", "num_microbatches=4", f"mesh.ici_mesh_shape={mesh}"]
        encoder_decoder = {"recipe": "sequence-synthetic", "sets": sets, "steps": 1}
        return [_case(mesh, steps=1, more=(*predicted, "optimizer=AdamW")), small, encoder_decoder]

    found = on_meshes(tmp_path, 8, cases("{data: 2, fsdp: 2, tensor: 2}"))
    for eight, one in zip(found, on_meshes(tmp_path, 1, cases("{data: 1}")), strict=True):
        np.testing.assert_allclose(eight["losses"], one["losses"], rtol=PARALLEL)
        np.testing.assert_allclose(eight["norms"], one["norms"], rtol=PARALLEL)


@pytest.mark.slow
def test_accumulated_gradients_of_other_models_are_those_of_one_device(tmp_path):
    def cases(mesh: str) -> list[dict]:
        sets = ["num_microbatches=2", "global_batch_size=16", "task.train.random_seed=3"]
        sets += [f"mesh.ici_mesh_shape={mesh}", "mesh.dcn_mesh_shape=null"]
        text = {"overlays": ["cpu", "synthetic-data"], "sets": [*sets, "max_seq_len=32", "vocab_size=512"], "steps": 1}
        models = ("bert-adam-l4-h128", "c4-1b", "c4-adam", "gpt2-124m", "llama-1b", "lm-cloud-transformer")
        images = {"recipe": "vit-synthetic", "overlays": ["cpu"], "sets": sets, "steps": 1}
        return [*({"recipe": model, **text} for model in models), images]

    found = on_meshes(tmp_path, 8, cases("{data: 2, fsdp: 2, tensor: 2}"))
    for eight, one in zip(found, on_meshes(tmp_path, 1, cases("{data: 1}")), strict=True):
        np.testing.assert_allclose(eight["norms"], one["norms"], rtol=PARALLEL)


@pytest.mark.slow
def test_factored_moments_and_averages_are_split_too(others):
    one, eight = (found[0] for found in others)
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=PARALLEL)
    # Momentum, row and column of the second moment, average of the parameters.
    assert [eight[f"shard{i}"].tolist() for i in range(1, 5)] == [[2, 16, 64], [2, 16], [2, 64], [2, 16, 64]]


@pytest.mark.slow
def test_the_momentum_of_muon_is_split_too(others):
    one, eight = (found[1] for found in others)
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=PARALLEL)
    assert [tuple(eight[f"shard{i}"]) for i in range(2)] == [(2, 16, 64)] * 2  # the parameter, and its momentum


@pytest.mark.slow
def test_fp8_is_scaled_by_the_largest_values_of_all_devices(others):
    """A sum in another order may round the other way in 8 bits."""
    one, eight = (found[2] for found in others)
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=1e-4)
