"""Against arrays that real paxml computed, and the other family against its math written out in numpy."""

from __future__ import annotations

import json
import math
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.convert.paxml import from_paxml, to_paxml
from paxcli.errors import DataError
from paxcli.nested_map import NestedMap
from tests.convert.paxml_comparison import compare, model_of

DATA = pathlib.Path(__file__).parents[1] / "data"
L, D, F, N, H, V, T, B = 4, 16, 24, 2, 8, 20, 12, 2


@pytest.fixture(scope="module")
def comparison():
    with np.load(DATA / "c4_1b.npz") as arrays:
        return compare(dict(arrays), json.loads((DATA / "c4_1b.json").read_text()))


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


@pytest.mark.parametrize(
    ("layout", "num_stages", "repeats", "name", "shape"),
    [
        ("repeat", 1, 1, "repeat/sub/x_layers_0", (L, D)),
        ("unrolled", 1, 1, "x_layers_3", (D,)),
        ("pipeline", 2, 1, "pipeline/body/x_layers_1", (2, D)),
        ("pipeline", 1, 1, "pipeline/body/x_layers_3", (1, D)),
        ("pipeline", 2, 2, "pipeline/body/x_layers_0", (2, 2, D)),
    ],
)
def test_layouts_there_and_back(layout, num_stages, repeats, name, shape):
    params = from_paxml(_family_m())
    arrays = to_paxml(params, layout, num_stages, repeats)
    assert arrays[f"lm/transformer/{name}/layer_norm/scale"].shape == shape
    jax.tree.map(np.testing.assert_array_equal, from_paxml(arrays), params)


def test_to_paxml_gives_their_arrays_back():
    with np.load(DATA / "c4_1b.npz") as arrays:
        theirs = {name.removeprefix("param/"): array for name, array in arrays.items() if name.startswith("param/")}
    ours = to_paxml(from_paxml(theirs))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array)


def test_an_unknown_name_is_an_error():
    with pytest.raises(DataError, match="no_such"):
        from_paxml({"lm/no_such/w": np.zeros(2)})
