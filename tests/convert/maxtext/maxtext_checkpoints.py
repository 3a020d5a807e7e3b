"""Checkpoints in MaxText's layout, of HF models: what MaxText documents of its converters, in numpy.

Queries carry the attention's scale in their weights where the block does not apply it; pairs of Llama 3.1's rotation
are neighbours; a Gemma's norms are stored plus 1, and its table times the root of its width; layers are stacked second.
"""

from __future__ import annotations

import pathlib
from typing import Any

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath

from tests.models import hf_families

Hf = dict[str, np.ndarray]

HEADS, HEAD_DIM = 4, {"qwen3": 12, "gemma2": 12}
SIZES = dict(
    base_emb_dim=32,
    base_num_query_heads=HEADS,
    base_mlp_dim=48,
    vocab_size=61,
    base_num_decoder_layers=2,
    max_target_length=64,
    mlp_activations="[silu,linear]",
    logits_via_embedding="false",
    normalization_layer_epsilon=1e-6,
    dtype="float32",
    dataset_type="synthetic",
    ici_fsdp_parallelism=1,
    per_device_batch_size=2,
    steps=4,
    run_name="tiny",
)
# What each family's launch says besides.
KEYS: dict[str, dict[str, Any]] = {
    "llama2": dict(decoder_block="llama2", base_num_kv_heads=4, head_dim=8, normalization_layer_epsilon=1e-5),
    "llama31": dict(
        decoder_block="llama2", base_num_kv_heads=2, head_dim=8, rope_type="llama3.1", rope_max_timescale=1000
    ),
    "mistral": dict(
        decoder_block="mistral", base_num_kv_heads=2, head_dim=8, attention_type="local_sliding", sliding_window_size=5
    ),
    "mixtral": dict(
        decoder_block="mixtral",
        base_num_kv_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        base_moe_mlp_dim=48,
        normalization_layer_epsilon=1e-5,
        rope_max_timescale=1_000_000,
    ),
    "qwen3": dict(decoder_block="qwen3", base_num_kv_heads=2, head_dim=12, use_qk_norm="true"),
    "gpt2": dict(
        decoder_block="gpt3",
        base_num_decoder_layers=3,
        base_num_kv_heads=4,
        head_dim=8,
        base_mlp_dim=80,
        max_target_length=24,
        mlp_activations="[gelu]",
        logits_via_embedding="true",
        normalize_embedding_logits="false",
        normalization_layer_epsilon=1e-5,
        trainable_position_size=24,
        fused_qkv="true",
        opt_type="adam_pax",
    ),
    "gemma2": dict(
        decoder_block="gemma2",
        base_num_decoder_layers=2,  # of pairs
        base_num_kv_heads=2,
        head_dim=12,
        mlp_activations="[gelu,linear]",
        logits_via_embedding="true",
        use_post_attn_norm="true",
        use_post_ffw_norm="true",
        sliding_window_size=6,
        attn_logits_soft_cap=5.0,
        final_logits_soft_cap=3.0,
    ),
}


def arrays_of(family: str) -> Hf:
    """What HF's model of this family holds and computes."""
    if family != "gpt2":
        return hf_families.arrays_of(family)
    with np.load(hf_families.DATA.with_name("hf_gpt2.npz")) as file:
        return dict(file)


def params_of(family: str, arrays: Hf, scanned: bool) -> dict[str, Any]:
    """HF's weights as the `params` of a MaxText state."""
    hf = {name.removeprefix("param/"): x for name, x in arrays.items() if name.startswith("param/")}
    if family == "gpt2":
        return _gpt2(hf, scanned)
    is_gemma, dims = family == "gemma2", hf["model.embed_tokens.weight"].shape[1]
    count = 1 + max(int(name.split(".")[2]) for name in hf if name.startswith("model.layers."))
    layers = [_layer(family, hf, f"model.layers.{i}.", HEAD_DIM.get(family, 8)) for i in range(count)]
    if is_gemma:
        pairs = zip(layers[::2], layers[1::2], strict=True)
        layers = [
            {f"{name}_local": x for name, x in local.items()} | {f"{name}_global": x for name, x in whole.items()}
            for local, whole in pairs
        ]
    decoder: dict[str, Any] = {"decoder_norm": {"scale": hf["model.norm.weight"] + is_gemma}}
    decoder |= _stacked(layers, scanned)
    if not is_gemma:
        decoder["logits_dense"] = {"kernel": hf["lm_head.weight"].T}
    table = hf["model.embed_tokens.weight"] * (np.float32(dims**0.5) if is_gemma else 1)
    return {"decoder": decoder, "token_embedder": {"embedding": table}}


def _stacked(layers: list[dict[str, Any]], scanned: bool) -> dict[str, Any]:
    if scanned:
        return {"layers": jax.tree.map(lambda *parts: np.stack(parts, axis=1), *layers)}
    return {f"layers_{i}": layer for i, layer in enumerate(layers)}


def _gpt2(hf: Hf, scanned: bool) -> dict[str, Any]:
    """A norm's scale less 1; query, key and value in one array."""

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": hf[f"{name}.weight"] - 1, "bias": hf[f"{name}.bias"]}

    def dense(name: str, *shape: int) -> dict[str, np.ndarray]:
        return {"kernel": hf[f"{name}.weight"].reshape(shape), "bias": hf[f"{name}.bias"].reshape(shape[1:])}

    layers = [
        {
            "pre_self_attention_norm": norm(f"h.{i}.ln_1"),
            "self_attention": {
                "qkv_proj": dense(f"h.{i}.attn.c_attn", 32, 3, 4, 8),
                "out": {
                    "kernel": hf[f"h.{i}.attn.c_proj.weight"].reshape(4, 8, 32),
                    "bias": hf[f"h.{i}.attn.c_proj.bias"],
                },
            },
            "mlp": {
                "mlp_layer_norm": norm(f"h.{i}.ln_2"),
                "wi": dense(f"h.{i}.mlp.c_fc", 32, 80),
                "wo": dense(f"h.{i}.mlp.c_proj", 80, 32),
            },
        }
        for i in range(3)
    ]
    position = {"embedding": hf["wpe.weight"]}
    decoder = {"decoder_norm": norm("ln_f"), "position_embedder": position, **_stacked(layers, scanned)}
    return {"decoder": decoder, "token_embedder": {"embedding": hf["wte.weight"]}}


def _layer(family: str, hf: Hf, prefix: str, size: int) -> dict[str, Any]:
    is_gemma = family == "gemma2"
    names = ("pre_self_attention_layer_norm", "post_self_attention_layer_norm")
    of_hf = ("input_layernorm", "post_attention_layernorm")
    if is_gemma:
        names = ("pre_self_attention_norm", "post_self_attention_norm", "pre_ffw_norm", "post_ffw_norm")
        of_hf = (*of_hf, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    layer: dict[str, Any] = {
        name: {"scale": hf[f"{prefix}{theirs}.weight"] + is_gemma} for name, theirs in zip(names, of_hf, strict=True)
    }
    query, key, value = (
        np.ascontiguousarray(hf[f"{prefix}self_attn.{x}_proj.weight"].T).reshape(32, -1, size) for x in "qkv"
    )
    if family != "qwen3":
        query = query * np.float32(10**-0.5 if is_gemma else size**-0.5)
    if family == "llama31":
        query, key = _as_neighbours(query), _as_neighbours(key)
    out = np.ascontiguousarray(hf[f"{prefix}self_attn.o_proj.weight"].T).reshape(-1, size, 32)
    attention = {"query": query, "key": key, "value": value, "out": out}
    layer["self_attention"] = {name: {"kernel": x} for name, x in attention.items()}
    if family == "qwen3":
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            layer["self_attention"][ours] = {"scale": hf[f"{prefix}self_attn.{theirs}.weight"]}
    if family == "mixtral":
        gate_up, down = hf[f"{prefix}mlp.experts.gate_up_proj"], hf[f"{prefix}mlp.experts.down_proj"]
        wi_0, wi_1 = np.split(gate_up.swapaxes(1, 2), 2, axis=-1)
        gate = {"kernel": hf[f"{prefix}mlp.gate.weight"].T}
        layer["MoeBlock_0"] = {"gate": gate, "wi_0": wi_0, "wi_1": wi_1, "wo": down.swapaxes(1, 2)}
        return layer
    parts = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    layer["mlp"] = {name: {"kernel": hf[f"{prefix}mlp.{theirs}.weight"].T} for name, theirs in parts.items()}
    return layer


def _as_neighbours(x: np.ndarray) -> np.ndarray:
    """A head's features i and i + H/2 next to each other."""
    turned, half = np.empty_like(x), x.shape[-1] // 2
    turned[..., ::2], turned[..., 1::2] = x[..., :half], x[..., half:]
    return turned


def save(folder: pathlib.Path, params: dict[str, Any], step: int = 0, with_optimizer: bool = False) -> pathlib.Path:
    """Saves as MaxText does; the folder of the tree. Moments are made up, from the parameters."""
    params = {"params": jax.tree.map(jnp.asarray, params)}
    schedule = optax.constant_schedule(1e-3)
    state = flax.training.train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(schedule))
    if with_optimizer:
        adam, decay, scheduled = state.opt_state
        adam = adam._replace(
            count=jnp.int32(step),
            mu=jax.tree.map(lambda x: 0.01 * x[::-1], params),
            nu=jax.tree.map(lambda x: 1e-4 * x**2, params),
        )
        state = state.replace(step=step, opt_state=(adam, decay, scheduled._replace(count=jnp.int32(step))))
    else:
        state = state.replace(opt_state={})
    with ocp.CheckpointManager(folder, item_names=("items",)) as manager:
        manager.save(step, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
    return folder / str(step) / "items"


def read(folder: pathlib.Path | str) -> dict[str, Any]:
    """All arrays of a tree, as Orbax itself restores them."""
    folder, handler = epath.Path(folder), ocp.PyTreeCheckpointHandler()
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(folder).tree)
    return handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=arguments))
