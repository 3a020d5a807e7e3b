"""Against arrays that real paxml computed, and the other family against its math written out in numpy."""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
from typing import Any

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore

import paxcli as pax
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.convert.paxml import PaxmlCheckpoint
from paxcli.errors import ConfigError, DataError
from paxcli.layers.pipeline import to_layers
from paxcli.nested_map import NestedMap
from paxcli.training.session import state_shapes
from tests.convert.paxml_comparison import from_paxml, model_of, to_paxml

DATA = pathlib.Path(__file__).parents[1] / "data"
L, D, F, N, H, V, T, B = 4, 16, 24, 2, 8, 20, 12, 2


@pytest.fixture(scope="module")
def comparison():
    """Compiled as users do: with XLA's older code generator, the rounding of six updates is another."""
    command = [sys.executable, "-m", "tests.convert.paxml_comparison", str(DATA / "c4_1b")]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return json.loads(subprocess.run(command, cwd=DATA.parents[1], env=env, stdout=subprocess.PIPE, check=True).stdout)


def test_forward_pass(comparison):
    assert comparison["logits"] <= 2e-5
    assert comparison["loss"] <= 1e-6


def test_every_gradient(comparison):
    assert len(comparison["gradients"]) == 17
    assert max(comparison["gradients"].values()) <= 1e-5


@pytest.mark.parametrize("run", ["recipe", "const"])
def test_six_updates(comparison, run):
    for name in ("loss", "learning_rate", "raw_grad_norm"):
        assert comparison[run][name] <= 1e-6, name
    # The gradient of one value is nothing but rounding, which Adam divides by its own size: its sign is chance.
    assert comparison[run]["params_after_5_but_one"] <= 1e-5
    assert comparison[run]["params_after_5"] <= 1e-4


def test_greedy_decode(comparison):
    assert comparison["decode"]["ids_equal"]
    assert comparison["decode"]["log_probs"] <= 1e-5


def _family_m(seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters under paxml's names, repeated layers, with biases and learned positions."""
    random = np.random.RandomState(seed)
    layer = "lm/transformer/repeat/sub/x_layers_0"
    shapes = {
        "lm/softmax/logits_ffn/linear/w": (D, V),
        "lm/position_emb/emb_var": (T + 4, D),
        "lm/final_ln/scale": (D,),
        "lm/final_ln/bias": (D,),
        f"{layer}/layer_norm/scale": (L, D),
        f"{layer}/layer_norm/bias": (L, D),
        f"{layer}/self_attention/combined_qkv/w": (L, 3, D, N, H),
        f"{layer}/self_attention/combined_qkv/b": (L, 3, N, H),
        f"{layer}/self_attention/post/w": (L, D, N, H),
        f"{layer}/self_attention/post/b": (L, D),
        f"{layer}/ff_layer/layer_norm/scale": (L, D),
        f"{layer}/ff_layer/layer_norm/bias": (L, D),
        f"{layer}/ff_layer/ffn_layer1/linear/w": (L, D, F),
        f"{layer}/ff_layer/ffn_layer1/bias/b": (L, F),
        f"{layer}/ff_layer/ffn_layer2/linear/w": (L, F, D),
        f"{layer}/ff_layer/ffn_layer2/bias/b": (L, D),
    }
    return {name: (0.2 * random.randn(*shape)).astype(np.float32) for name, shape in shapes.items()}


def _numpy_logits(p: dict[str, np.ndarray], batch: NestedMap) -> np.ndarray:
    """Family M in float64, from the description of its math."""

    def norm(x, name, i=...):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * (1 + p[f"{name}/scale"][i]) + p[f"{name}/bias"][i]

    ids, positions, segments = (np.asarray(batch[name]) for name in ("ids", "segment_pos", "segment_ids"))
    table = p["lm/softmax/logits_ffn/linear/w"].astype(np.float64)
    h = table.T[ids] + p["lm/position_emb/emb_var"][positions]
    seen = (segments[:, :, None] == segments[:, None, :]) & np.tril(np.ones((T, T), bool))
    present = (segments != 0)[..., None]
    layer = "lm/transformer/repeat/sub/x_layers_0"
    for i in range(L):
        y = norm(h, f"{layer}/layer_norm", i)
        qkv = np.einsum("btd,cdnh->cbtnh", y, p[f"{layer}/self_attention/combined_qkv/w"][i])
        q, k, v = qkv + p[f"{layer}/self_attention/combined_qkv/b"][i][:, None, None]
        scores = np.where(seen[:, None], np.einsum("btnh,bsnh->bnts", q / math.sqrt(H), k), -1e30)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        context = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
        h = h + np.einsum("btnh,dnh->btd", context, p[f"{layer}/self_attention/post/w"][i])
        h = h + p[f"{layer}/self_attention/post/b"][i]
        y = norm(h, f"{layer}/ff_layer/layer_norm", i) @ p[f"{layer}/ff_layer/ffn_layer1/linear/w"][i]
        y = y + p[f"{layer}/ff_layer/ffn_layer1/bias/b"][i]
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        y = y @ p[f"{layer}/ff_layer/ffn_layer2/linear/w"][i] + p[f"{layer}/ff_layer/ffn_layer2/bias/b"][i]
        h = h + y * present
    return norm(h, "lm/final_ln") @ table


def _packed() -> NestedMap:
    random = np.random.RandomState(1)
    segments = np.array([[1] * 5 + [2] * 5 + [0] * 2, [1] * T])
    positions = np.array([[*range(5), *range(5), 0, 1], [*range(T)]])
    ids = random.randint(0, V, (B, T))
    weights = (segments > 0).astype(np.float32)
    arrays = {"ids": ids, "labels": ids, "weights": weights, "segment_ids": segments, "segment_pos": positions}
    return NestedMap({name: jnp.asarray(array) for name, array in arrays.items()})


def test_family_m_equals_its_math():
    arrays, batch = _family_m(), _packed()
    params = jax.tree.map(jnp.asarray, from_paxml(arrays))
    model = model_of(params)
    predictions = model.apply({"params": params}, batch, method="compute_predictions")
    np.testing.assert_allclose(predictions.logits, _numpy_logits(arrays, batch), atol=2e-5, rtol=1e-5)
    # Its parameters are the model's own, to the last one.
    fresh = jax.eval_shape(lambda: nn.meta.unbox(model.init(jax.random.key(0), batch)["params"]))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, fresh)


def _in_layout(arrays: dict[str, np.ndarray], kind: str, stages: int, rounds: int) -> dict[str, np.ndarray]:
    """Repeated layers as paxml's unrolled or pipelined ones, from the description of its names."""
    found = {}
    for name, x in arrays.items():
        before, repeated, after = name.partition("repeat/sub/x_layers_0")
        if not repeated:
            found[name] = x
        elif kind == "unrolled":
            found |= {f"{before}x_layers_{i}{after}": x[i] for i in range(L)}
        else:
            each = x.reshape(rounds, stages, L // stages // rounds, *x.shape[1:])
            each = each if rounds > 1 else each[0]
            axis = 1 + (rounds > 1)
            parts = np.moveaxis(each, axis, 0)
            found |= {f"{before}pipeline/body/x_layers_{k}{after}": part for k, part in enumerate(parts)}
    return found


@pytest.mark.parametrize(
    ("kind", "stages", "rounds", "name", "shape"),
    [
        ("unrolled", 1, 1, "x_layers_3", (D,)),
        ("pipeline", 2, 1, "pipeline/body/x_layers_1", (2, D)),
        ("pipeline", 1, 1, "pipeline/body/x_layers_3", (1, D)),
        ("pipeline", 2, 2, "pipeline/body/x_layers_0", (2, 2, D)),
    ],
)
def test_every_layout_of_layers_is_read_and_written(kind, stages, rounds, name, shape):
    repeated = _family_m()
    arrays = _in_layout(repeated, kind, stages, rounds)
    assert arrays[f"lm/transformer/{name}/layer_norm/scale"].shape == shape
    params = from_paxml(arrays)
    jax.tree.map(np.testing.assert_array_equal, params, from_paxml(repeated))
    assert_same(to_paxml(params, arrays), arrays)


def test_to_paxml_gives_their_arrays_back():
    with np.load(DATA / "c4_1b.npz") as arrays:
        theirs = {name.removeprefix("param/"): array for name, array in arrays.items() if name.startswith("param/")}
    assert_same(to_paxml(from_paxml(theirs), theirs), theirs)


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


# Checkpoints.

SIZES = {"num_layers": 2, "model_dims": 48, "hidden_dims": 192, "num_heads": 4, "task.model.vocab_size": 97}
SIZES |= {"max_seq_len": 16, "task.model.fprop_dtype": "float32", "mesh.ici_mesh_shape": [1, 1, 1]}
TRAINING = {"learning_rate": 1e-2, "schedule.warmup_steps": 2, "schedule.decay_start": 3, "schedule.decay_end": 12}
TRAINING |= {"schedule.min_ratio": 0.1, "task.train.percore_batch_size": 4}


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> pathlib.Path:
    """Checkpoints as paxml wrote them, and what it computed."""
    folder = tmp_path_factory.mktemp("paxml")
    with tarfile.open(DATA / "paxml_checkpoint.tar.xz") as file:
        file.extractall(folder, filter="data")
    as_zarr(folder / "c4/checkpoint_00000003", folder / "c4_zarr/checkpoint_00000003")
    return folder


def as_zarr(database: pathlib.Path, folder: pathlib.Path) -> None:
    """The arrays of a database in folders of their own, with the names that paxml gives these."""
    store = tensorstore.KvStore.open(f"file://{database}/state/|ocdbt:").result()
    for key in store.list().result():
        name, _, file = key.decode().rpartition("/")
        prefix = name.replace("opt_states.0.", "opt_states_0.").replace("no_prefix.", "no_prefix_")
        path = folder / "state" / prefix.replace("i-1.", "i-1_") / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.read(key).result().value)


def test_zarr_folders_have_the_arrays_of_the_database(references, tmp_path, caplog):
    folders, database = PaxmlCheckpoint(references / "c4_zarr"), PaxmlCheckpoint(references / "c4")
    assert (folders.step, folders.count) == (database.step, database.count) == (3, 3)
    for kind in ("params", "mu", "nu"):
        names = database.arrays(kind)
        assert folders.arrays(kind).keys() == names.keys() and len(names) == 15
        assert_same(*({name: one.reader(kind)[name] for name in names} for one in (folders, database)))
    assert not caplog.messages
    copy = shutil.copytree(references / "c4_zarr", tmp_path / "copy")
    (copy / "checkpoint_00000003/state/mdl_vars.params.lm.final_ln.scale/0").unlink()
    PaxmlCheckpoint(copy)
    assert "has no data for parts of `mdl_vars.params.lm.final_ln.scale`: read as zeros" in caplog.text


@pytest.mark.parametrize("family", ["c4", "lm_cloud"])
def test_training_goes_on_where_paxml_stopped(family, references, tmp_path):
    expected = json.loads((references / "runs.json").read_text())[family]
    recipe = pax.load(expected["recipe"], set=SIZES | TRAINING)
    done = pax.import_weights(references / family, tmp_path / "run", recipe=recipe)
    assert (done.step, done.with_optimizer, done.num_bytes) == (3, True, 3 * 4 * done.parameters)
    assert not done.tensors and len(done.tensors.matched) == {"c4": 15, "lm_cloud": 30}[family]
    shapes = state_shapes(recipe.config)
    state, _ = CheckpointStore(tmp_path / "run/checkpoints").restore(3, shapes)
    model, learner = fdl.build(recipe.config.task.model), fdl.build(recipe.config.task.train.learner)
    weights = jax.tree.unflatten(jax.tree.structure(state.params), shapes.weights)
    params, opt_state = state.params, state.opt_state
    with np.load(references / "batches.npz") as file:
        batches = dict(file)

    @jax.jit
    def update(params, opt_state, batch, step):
        def loss(params):
            predictions: Any = model.apply({"params": params}, batch, method="compute_predictions")
            return model.apply({"params": params}, predictions, batch, method="compute_loss")[0]["loss"][0]

        loss, grads = jax.value_and_grad(loss)(params)
        return loss, *learner.update(grads, opt_state, params, step, weights)

    for i in range(3, 6):
        batch = NestedMap({name[2:]: jnp.asarray(batches[name]) for name in batches if name.startswith(f"{i}/")})
        np.testing.assert_allclose(optax.tree.norm(params), expected["var_norm"][i], rtol=1e-6)
        loss, params, opt_state, report = update(params, opt_state, batch, jnp.int32(i))
        np.testing.assert_allclose(loss, expected["loss"][i], rtol=1e-6)
        np.testing.assert_allclose(report["grad_norm"], expected["raw_grad_norm"][i], rtol=2e-6)


def test_pipelined_layers_and_moving_averages_are_carried(tmp_path):
    """Four layers in two stages, unrolled in a stage, as paxml's GPT-3 recipes have them, into the same in pax."""
    arrays = _in_layout(_family_m(), "pipeline", 2, 1)
    sizes = {"num_layers": L, "model_dims": D, "hidden_dims": F, "num_heads": N, "task.model.vocab_size": V}
    sizes |= {"num_stages": 2, "num_positions": T + 4, "max_seq_len": T, "learner.ema_decay": 0.9}
    recipe = pax.load("C4SpmdPipelineGpt3SmallAdam8Replicas", set=sizes)
    checkpoint = tmp_path / "checkpoints/checkpoint_00000007/state"
    for name, array in arrays.items():
        group = "p#2#i0" if "pipeline" in name else "no_prefix"
        dotted = f"params.{name.replace('/', '.')}"
        write_array(checkpoint / f"mdl_vars.{dotted}", array)
        for link, moment, factor in ((1, "m", 0.5), (1, "v", 0.25), (3, "ema", 2.0)):
            write_array(checkpoint / f"opt_states_0.{group}_{link}.{moment}.{dotted}", factor * array)
    write_array(checkpoint / "opt_states_0.no_prefix_1.count", np.int32(7))
    write_array(checkpoint / "opt_states_0.p#2#i0_1.count", np.full((2,), 7, np.int32))
    write_array(checkpoint / "step", np.uint32(7))
    pax.import_weights(tmp_path, tmp_path / "run", recipe=recipe)
    state, _ = CheckpointStore(tmp_path / "run/checkpoints").restore(7, state_shapes(recipe.config))
    expected = from_paxml(arrays)
    for found, factor in (
        (state.params, 1.0),
        (state.opt_state.optimizer.first_moment, 0.5),
        (state.opt_state.optimizer.second_moment, 0.25),
        (state.opt_state.ema, 2.0),
    ):
        stack = to_layers(found["stack"])
        layers = jax.tree.map(lambda *x: np.stack(x), *(stack[f"layers_{i}"] for i in range(L)))
        jax.tree.map(
            lambda a, b, factor=factor: np.testing.assert_array_equal(a, factor * b),
            {**found, "stack": {"layers": layers}},
            expected,
        )


def write_array(folder: pathlib.Path, array: np.ndarray) -> None:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    array = np.asarray(array)
    tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result()[...] = array


def test_what_cannot_be_imported_is_refused(references, tmp_path):
    with pytest.raises(ConfigError, match="does not describe its model") as refused:
        pax.import_weights(references / "c4", tmp_path / "run")
    assert "--recipe C4Spmd1BAdam4Replicas" in str(refused.value.hint)
    recipe = pax.load("c4-1b", set=SIZES | {"hidden_dims": 100})
    found = pax.import_weights(references / "c4", tmp_path / "run", recipe=recipe, dry_run=True).tensors
    assert len(found.mismatched) == 3 and not found.missing and not found.unexpected
    with pytest.raises(DataError, match=r"ffn_layer1.linear.w` is \[2, 48, 192\] there, \[2, 48, 100\] here"):
        pax.import_weights(references / "c4", tmp_path / "run", recipe=recipe)
    with pytest.raises(DataError, match="holds no checkpoint that pax knows"):
        pax.import_weights(tmp_path, tmp_path / "run", recipe=recipe)
    broken = tmp_path / "checkpoint_00000001/state"
    broken.mkdir(parents=True)
    (broken / "checkpoint").write_bytes(b"not msgpack")
    with pytest.raises(DataError, match="cannot be read"):
        pax.import_weights(tmp_path, tmp_path / "run", recipe=recipe)
    assert not (tmp_path / "run").exists()
