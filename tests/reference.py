"""The arrays that real paxml computed, and the same model in pax's words."""

from __future__ import annotations

import pathlib

import fiddle as fdl
import jax.numpy as jnp
import numpy as np

from paxcli.inputs.nested_map import NestedMap
from paxcli.layers.positions import SinusoidPositions
from paxcli.models.language_model import LanguageModel

ARRAYS = np.load(pathlib.Path(__file__).parent / "data" / "c4_1b.npz")

_LAYER = "lm/transformer/repeat/sub/x_layers_0"
_NAMES = {
    "lm/softmax/logits_ffn/linear/w": "embedding/table",
    "lm/softmax/logits_ffn/bias/b": "embedding/bias",
    "lm/final_ln/scale": "final_norm/scale",
    "lm/final_ln/bias": "final_norm/bias",
    f"{_LAYER}/layer_norm/scale": "stack/layers/attention_norm/scale",
    f"{_LAYER}/layer_norm/bias": "stack/layers/attention_norm/bias",
    f"{_LAYER}/self_attention/combined_qkv/w": "stack/layers/attention/query key value",
    f"{_LAYER}/self_attention/per_dim_scale/per_dim_scale": "stack/layers/attention/per_dim_scale",
    f"{_LAYER}/self_attention/post/w": "stack/layers/attention/post",
    f"{_LAYER}/ff_layer/layer_norm/scale": "stack/layers/feed_forward_norm/scale",
    f"{_LAYER}/ff_layer/layer_norm/bias": "stack/layers/feed_forward_norm/bias",
    f"{_LAYER}/ff_layer/ffn_layer1/linear/w": "stack/layers/feed_forward/w_in",
    f"{_LAYER}/ff_layer/ffn_layer1/bias/b": "stack/layers/feed_forward/b_in",
    f"{_LAYER}/ff_layer/ffn_layer2/linear/w": "stack/layers/feed_forward/w_out",
    f"{_LAYER}/ff_layer/ffn_layer2/bias/b": "stack/layers/feed_forward/b_out",
}


def model() -> LanguageModel:
    """The model of the reference: every special term of the family switched on."""
    config = LanguageModel.config(
        vocab_size=64, max_seq_len=24, model_dims=32, hidden_dims=64, num_layers=2, num_heads=4
    )
    config.position = SinusoidPositions.partial()
    config.embedding.scale_sqrt_depth = True
    config.embedding.use_bias = True
    config.embedding.logit_cap = 30.0
    config.stack.block.attention.per_dim_scale = True
    config.stack.block.attention.logit_cap = 50.0
    config.stack.block.zero_padding = True
    return fdl.build(config)


def params(group: str) -> dict:
    """A group of arrays with paxml's names (`param`, `grad`, `const/param5`) as our parameters."""
    tree: dict = {}
    for theirs, ours in _NAMES.items():
        path, _, names = ours.rpartition("/")
        for name in names.split():
            node = tree
            for parent in path.split("/"):
                node = node.setdefault(parent, {})
            node[name] = jnp.asarray(_our_layout(name, ARRAYS[f"{group}/{theirs}"]))
    return tree


def _our_layout(name: str, array: np.ndarray) -> np.ndarray:
    if name == "table":
        return array.T
    if name == "w_out":
        return np.moveaxis(array, 1, 2)  # [L, F, D] -> [L, D, F]
    if name in ("query", "key", "value"):
        return array[:, ("query", "key", "value").index(name)]  # [L, 3, D, N, H]
    if name == "post":
        return np.moveaxis(array, 1, 3)  # [L, D, N, H] -> [L, N, H, D]
    return array


def batch() -> NestedMap:
    """The packed batch of the reference."""
    return NestedMap(
        {name: jnp.asarray(ARRAYS[f"in/{name}"]) for name in ("ids", "labels", "weights", "segment_ids", "segment_pos")}
    )
