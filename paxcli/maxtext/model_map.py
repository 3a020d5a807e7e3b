"""MaxText's model as fields of pax's `LanguageModel`."""

from __future__ import annotations

import dataclasses

from paxcli.errors import ConfigError
from paxcli.maxtext.draft import Draft
from paxcli.maxtext.settings import Settings
from paxcli.maxtext.sizes import sizes_of

_MODEL = "task.model"
_STACK = f"{_MODEL}.stack"
_BLOCK = f"{_STACK}.block"
_ATTENTION = f"{_BLOCK}.attention"
_FEED_FORWARD = f"{_BLOCK}.feed_forward"

BLOCKS = {
    "default": "ParallelBlock",
    "llama2": "TransformerBlock",
    "mistral": "TransformerBlock",
    "mixtral": "TransformerBlock",
    "gemma": "TransformerBlock",
    "gemma2": "TransformerBlock",
    "gpt3": "TransformerBlock",
    "qwen3": "TransformerBlock",
    "qwen3_moe": "TransformerBlock",
}
"""MaxText's `decoder_block` -> the block of pax."""

_NEAREST = {
    "deepseek": "mixtral",
    "deepseek4": "mixtral",
    "llama4": "mixtral",
    "gpt_oss": "mixtral",
    "envy": "mixtral",
    "gemma3": "gemma2",
    "gemma4": "gemma2",
    "gemma4_small": "gemma2",
    "qwen2": "qwen3",
    "qwen3_5": "qwen3_moe",
    "qwen3_next": "qwen3_moe",
    "qwen3_custom_moe": "qwen3_moe",
    "multimodal": "qwen3",
    "olmo3": "llama2",
    "simple": "llama2",
    "simple_mlp": "llama2",
}
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "swish": "silu", "tanh": "tanh", "sigmoid": "sigmoid"}


def put_model(draft: Draft) -> None:
    """Everything about the network.

    Raises:
      ConfigError: The model has a part that pax lacks; the hint names the nearest.
    """
    settings = draft.settings
    _refuse(settings)
    _put_sizes(draft)
    _put_tables(draft)
    block = BLOCKS[settings["decoder_block"]]
    pipelined = settings["ici_pipeline_parallelism"] > 1 or settings["dcn_pipeline_parallelism"] > 1
    if pipelined and _has_turns(settings):
        raise ConfigError(
            "Layers of which every other one has a window cannot be pipelined.",
            f"With max_target_length={settings['sliding_window_size']} no layer reaches its window.",
        )
    if pipelined:
        _put_pipeline(draft)
    elif _has_turns(settings):
        draft.put(_STACK, "PatternedStack", "decoder_block")
    draft.put(f"{_STACK}.scan", settings["scan_layers"], "scan_layers")
    draft.put(_BLOCK, block, "decoder_block")
    if settings["use_post_attn_norm"]:
        draft.put(f"{_BLOCK}.post_norms", True, "use_post_attn_norm", "use_post_ffw_norm")
    _put_norms(draft)
    _put_attention(draft)
    _put_feed_forward(draft)
    if _has_turns(settings):
        _take_turns(draft)
    _note_differences(draft)


def _refuse(settings: Settings) -> None:
    block = settings["decoder_block"]
    if block not in BLOCKS:
        name = f"model {settings.model_name}" if settings.model_name != "default" else "the launch"
        nearest = _NEAREST.get(block)
        hint = f"The nearest that pax has is decoder_block={nearest}." if nearest else f"Pax has {', '.join(BLOCKS)}."
        raise ConfigError(f"decoder_block={block} of {name} is not a block that pax has.", hint)
    kind = settings["attention_type"]
    if kind not in ("global", "local_sliding"):
        raise ConfigError(f"attention_type={kind} is not one that pax has.", "Pax has global and local_sliding.")
    if settings["shared_experts"] or settings["first_num_dense_layers"]:
        raise ConfigError(
            "shared_experts and first_num_dense_layers: pax has no layers of several kinds in a model.",
            "The nearest is decoder_block=mixtral, in which each layer has the same experts.",
        )
    if settings["use_post_attn_norm"] != settings["use_post_ffw_norm"]:
        raise ConfigError("use_post_attn_norm and use_post_ffw_norm differ.", "Pax has both or neither.")


def _put_sizes(draft: Draft) -> None:
    settings, s = draft.settings, sizes_of(draft.settings)
    draft.put(f"{_MODEL}.num_layers", s.layers, "base_num_decoder_layers", scaled=s.layers)
    draft.put(f"{_MODEL}.model_dims", s.emb, "base_emb_dim", scaled=s.emb)
    if settings["num_experts"] > 1:
        draft.put(f"{_MODEL}.hidden_dims", s.moe_mlp, "base_moe_mlp_dim", "base_mlp_dim", scaled=s.moe_mlp)
    else:
        draft.put(f"{_MODEL}.hidden_dims", s.mlp, "base_mlp_dim", scaled=s.mlp)
    draft.put(f"{_MODEL}.num_heads", s.heads, "base_num_query_heads", scaled=s.heads)
    kv_heads = s.kv_heads if s.kv_heads != s.heads else None
    draft.put(f"{_MODEL}.num_kv_heads", kv_heads, "base_num_kv_heads", scaled=s.kv_heads)
    draft.put(f"{_MODEL}.dims_per_head", s.head_dim, "head_dim")
    draft.put(f"{_MODEL}.vocab_size", s.vocab, "vocab_size")
    draft.put(f"{_MODEL}.max_seq_len", settings["max_target_length"], "max_target_length")
    if settings["dtype"] not in ("bfloat16", "float32"):
        raise ConfigError(
            f"dtype={settings['dtype']} is not one that pax computes in.", "Pax has bfloat16 and float32."
        )
    draft.put(f"{_MODEL}.fprop_dtype", settings["dtype"], "dtype")


def _put_tables(draft: Draft) -> None:
    """Positions that are added, the table of tokens, and what scores them."""
    settings = draft.settings
    if settings["trainable_position_size"] > 0:
        draft.put(f"{_MODEL}.position", "LearnedPositions", "trainable_position_size")
        draft.put(f"{_MODEL}.position.num_positions", settings["trainable_position_size"], "trainable_position_size")
    elif settings["use_untrainable_positional_embedding"]:
        draft.put(f"{_MODEL}.position", "SinusoidPositions", "use_untrainable_positional_embedding")
    else:
        draft.put(f"{_MODEL}.position", None, "trainable_position_size", "use_untrainable_positional_embedding")
    cap = settings["final_logits_soft_cap"] or None
    if not settings["logits_via_embedding"]:
        draft.put(f"{_MODEL}.head", "OutputHead", "logits_via_embedding")
        draft.put(f"{_MODEL}.head.logit_cap", cap, "final_logits_soft_cap")
        return
    draft.put(f"{_MODEL}.embedding.logit_cap", cap, "final_logits_soft_cap")
    if settings["normalize_embedding_logits"]:
        draft.put(
            f"{_MODEL}.embedding.scale_logits_sqrt_depth", True, "logits_via_embedding", "normalize_embedding_logits"
        )
        draft.near(
            "The table of tokens starts with a standard deviation of 1 / sqrt(D), not of 1: the loss falls later."
        )


def _put_pipeline(draft: Draft) -> None:
    settings = draft.settings
    stages = max(settings["ici_pipeline_parallelism"], 1) * max(settings["dcn_pipeline_parallelism"], 1)
    per_stage, repeats = settings["num_layers_per_pipeline_stage"], settings["num_pipeline_repeats"]
    if repeats < 1:
        repeats = max(sizes_of(settings).layers // (stages * per_stage), 1)
    microbatches = settings["num_pipeline_microbatches"]
    draft.put(_STACK, "PipelinedStack", "ici_pipeline_parallelism")
    draft.put(f"{_STACK}.num_stages", stages, "ici_pipeline_parallelism", "dcn_pipeline_parallelism")
    draft.put(f"{_STACK}.circular_repeat", repeats, "num_pipeline_repeats", "num_layers_per_pipeline_stage")
    draft.put(f"{_STACK}.num_microbatches", microbatches if microbatches > 0 else stages, "num_pipeline_microbatches")


def _put_norms(draft: Draft) -> None:
    norm = "LayerNorm" if draft.settings["decoder_block"] == "gpt3" else "RmsNorm"
    for path in (f"{_BLOCK}.norm", f"{_MODEL}.final_norm"):
        draft.put(path, norm, "decoder_block")
        draft.put(f"{path}.epsilon", draft.settings["normalization_layer_epsilon"], "normalization_layer_epsilon")


def _put_attention(draft: Draft) -> None:
    settings = draft.settings
    draft.put(f"{_ATTENTION}.use_bias", settings["decoder_block"] == "gpt3", "decoder_block")
    draft.put(f"{_ATTENTION}.logit_cap", settings["attn_logits_soft_cap"] or None, "attn_logits_soft_cap")
    _put_rotary(draft)
    if settings["use_qk_norm"]:
        draft.put(f"{_ATTENTION}.qk_norm", "RmsNorm", "use_qk_norm")
        draft.put(
            f"{_ATTENTION}.qk_norm.epsilon", settings["normalization_layer_epsilon"], "normalization_layer_epsilon"
        )
    if settings["query_pre_attn_scalar"] > 0:
        draft.put(f"{_ATTENTION}.query_scale", settings["query_pre_attn_scalar"] ** -0.5, "query_pre_attn_scalar")
    window = settings["sliding_window_size"]
    if 0 < window < settings["max_target_length"]:
        draft.put(f"{_ATTENTION}.window", window, "sliding_window_size")


def _put_rotary(draft: Draft) -> None:
    settings, path = draft.settings, f"{_ATTENTION}.rotary"
    if settings["decoder_block"] == "gpt3":
        return draft.put(path, None, "decoder_block")
    if settings["_position"] == "relative_bias" and settings["decoder_block"] == "default":
        draft.put(path, None, "_position")
        return draft.put(f"{_ATTENTION}.relative_bias", "RelativeBias", "_position")
    draft.put(path, "Rotary", "_position")
    draft.put(f"{path}.max_timescale", float(settings["rope_max_timescale"]), "rope_max_timescale")
    if settings["rope_min_timescale"] != 1:
        draft.put(f"{path}.min_timescale", float(settings["rope_min_timescale"]), "rope_min_timescale")
    kind, factor = settings["rope_type"] or "default", settings["rope_linear_scaling_factor"]
    if kind not in ("default", "llama3.1"):
        raise ConfigError(f"rope_type={kind} cannot be carried over.", "Pax carries over default and llama3.1.")
    if kind == "llama3.1":
        draft.put(f"{path}.scaling", "Llama31Scaling", "rope_type")
    elif factor != 1:
        draft.put(f"{path}.scaling", "LinearScaling", "rope_linear_scaling_factor")
        draft.put(f"{path}.scaling.factor", factor, "rope_linear_scaling_factor")
    return None


def _put_feed_forward(draft: Draft) -> None:
    settings = draft.settings
    names = [str(name) for name in settings["mlp_activations"]]
    plain = [name for name in names if name != "linear"]
    if len(names) > 2 or len(plain) != 1 or plain[0] not in _ACTIVATIONS:
        raise ConfigError(
            f"mlp_activations={names} is not a feed-forward that pax has.",
            f"Pax has one of {', '.join(_ACTIVATIONS)}, alone or beside `linear`.",
        )
    experts = settings["num_experts"] > 1
    draft.put(_FEED_FORWARD, "MoeFeedForward" if experts else "FeedForward", "num_experts")
    draft.put(f"{_FEED_FORWARD}.activation", _ACTIVATIONS[plain[0]], "mlp_activations")
    if not experts:
        draft.put(f"{_FEED_FORWARD}.gated", len(names) == 2, "mlp_activations")
        draft.put(f"{_FEED_FORWARD}.use_bias", settings["decoder_block"] == "gpt3", "decoder_block")
        return
    if len(names) != 2:
        raise ConfigError(f"mlp_activations={names}: pax's experts are gated.", "For example silu,linear.")
    draft.put(f"{_FEED_FORWARD}.num_experts", settings["num_experts"], "num_experts")
    draft.put(f"{_FEED_FORWARD}.num_experts_per_token", settings["num_experts_per_tok"], "num_experts_per_tok")
    factor = settings["capacity_factor"]
    draft.put(f"{_FEED_FORWARD}.capacity_factor", factor if factor > 0 else None, "capacity_factor")
    weight = settings["load_balance_loss_weight"]
    if weight:
        draft.put("task.loss_aggregator.loss_keys", ["loss", "load_balance_loss"], "load_balance_loss_weight")
        draft.put("task.loss_aggregator.loss_weights", [1.0, weight], "load_balance_loss_weight")
        draft.near(
            f"load_balance_loss_weight={weight}: the loss is that of Fedus et al., 2021, the mean of all layers."
        )


def _has_turns(settings: Settings) -> bool:
    """Whether every other layer has a window that rows reach beyond."""
    return settings["decoder_block"] == "gemma2" and 0 < settings["sliding_window_size"] < settings["max_target_length"]


def _take_turns(draft: Draft) -> None:
    """What was put on the block, put on a pair of layers, of which the first alone has the window."""
    values, rows = draft.values, draft.rows
    draft.values = {path: value for path, value in values.items() if not path.startswith(_BLOCK)}
    draft.rows = [row for row in rows if not row.pax.startswith(_BLOCK)]
    draft.put(f"{_STACK}.turns", [values[_BLOCK]] * 2, "decoder_block")
    for row in rows:
        inside = row.pax.removeprefix(f"{_BLOCK}.")
        for turn in (0, 1) if inside != row.pax else ():
            path, value = f"{_STACK}.turns.{turn}.{inside}", row.pax_value
            value = None if turn and inside == "attention.window" else value
            draft.values[path] = value
            draft.rows.append(dataclasses.replace(row, pax=path, pax_value=value))


def _note_differences(draft: Draft) -> None:
    settings = draft.settings
    if settings["dropout_rate"] and settings["enable_dropout"]:
        draft.near(f"dropout_rate={settings['dropout_rate']}: pax's layers have no dropout.")
    if settings["quantization"]:
        draft.near(
            f"quantization={settings['quantization']}: pax does not quantize; it multiplies in {settings['dtype']}."
        )
    if settings["weight_dtype"] != "float32":
        draft.near(f"weight_dtype={settings['weight_dtype']}: pax keeps parameters in float32.")
    draft.near("Weights start by pax's rule of initialization, and a norm's weight decays to 1, not to 0.")
    for key in ("fused_qkv", "fused_mlp", "use_iota_embed", "attention", "num_vocab_tiling"):
        draft.drop(key, "how it is computed, not what: pax chooses for itself")
