"""MaxText's model as fields of pax's `LanguageModel`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.settings import Settings
from paxcli.convert.maxtext.sizes import has, head_keys, is_latent, layer_traits, num_dense, num_dense_first, sizes_of
from paxcli.errors import ConfigError

_MODEL = "task.model"
_STACK = f"{_MODEL}.stack"


def set_model(draft: Conversion) -> None:
    """Sets everything about the network.

    Raises:
      ConfigError: The model has a part that pax does not have; the hint names the nearest.
    """
    _set_sizes(draft)
    _set_tables(draft)
    _set_pipeline(draft)
    _set_layers(draft)
    _set_norm(draft, f"{_MODEL}.final_norm", "decoder_block")
    _set_losses(draft)
    _note_differences(draft)


def _set_layers(draft: Conversion) -> None:
    """Sets the kinds of layers: one, several that alternate, and dense ones before those with experts."""
    settings = draft.settings
    kinds, first, scan = layer_traits(settings), num_dense_first(settings), settings["scan_layers"]
    layer = tables.blocks()[settings["decoder_block"]]["layer"]
    plain = ["window"] if settings["attention_type"] == "local_sliding" else []
    if not kinds and not first:
        draft.set(f"{_STACK}.scan", scan, "scan_layers")
        draft.set(f"{_STACK}.block", layer, "decoder_block")
        return _set_block(draft, f"{_STACK}.block", plain)
    kinds, layers = kinds or [plain], sizes_of(settings).layers - first
    draft.set(_STACK, "PatternedStack", "decoder_block")
    draft.set(f"{_STACK}.scan", scan and layers % len(kinds) == 0, "scan_layers")
    if scan and layers % len(kinds):
        draft.approximate(f"scan_layers: {layers} layers are not a multiple of {len(kinds)}, so they are unrolled.")
    draft.set(f"{_STACK}.turns", [layer] * len(kinds), "decoder_block")
    for turn, traits in enumerate(kinds):
        _set_block(draft, f"{_STACK}.turns.{turn}", traits)
    if first:
        draft.set(f"{_STACK}.num_first", first, "first_num_dense_layers")
        draft.set(f"{_STACK}.first", layer, "first_num_dense_layers")
        _set_block(draft, f"{_STACK}.first", ["dense"])


def _set_block(draft: Conversion, path: str, traits: Collection[str]) -> None:
    """Sets a layer template."""
    settings = draft.settings
    if settings["use_post_attn_norm"] and not settings["use_post_ffw_norm"]:
        raise ConfigError("use_post_attn_norm without use_post_ffw_norm.", "Pax has both, or the second.")
    if settings["use_post_ffw_norm"]:
        post_norms = settings["use_post_attn_norm"] or "feed_forward"
        draft.set(f"{path}.post_norms", post_norms, "use_post_attn_norm", "use_post_ffw_norm")
    if _is_fp8(settings):
        draft.set(f"{path}.precision", "fp8", "quantization")
    _set_norm(draft, f"{path}.norm", "decoder_block")
    _set_attention(draft, f"{path}.attention", "window" in traits)
    _set_feed_forward(draft, f"{path}.feed_forward", settings["num_experts"] > 1 and "dense" not in traits)
    for name, value in tables.blocks()[settings["decoder_block"]].get("sets", {}).items():
        draft.set(f"{path}.{name}", value, "decoder_block")


def _set_sizes(draft: Conversion) -> None:
    settings, s = draft.settings, sizes_of(draft.settings)
    draft.set(f"{_MODEL}.num_layers", s.layers, "base_num_decoder_layers", scaled=s.layers)
    draft.set(f"{_MODEL}.model_dims", s.emb, "base_emb_dim", scaled=s.emb)
    hidden, *keys = (s.mlp,) if num_dense(settings) else (s.moe_mlp, "base_moe_mlp_dim")
    draft.set(f"{_MODEL}.hidden_dims", hidden, *keys, "base_mlp_dim", scaled=hidden)
    draft.set(f"{_MODEL}.num_heads", s.heads, "base_num_query_heads", scaled=s.heads)
    kv_heads = s.kv_heads if s.kv_heads != s.heads else None
    draft.set(f"{_MODEL}.num_kv_heads", kv_heads, "base_num_kv_heads", scaled=s.kv_heads)
    draft.set(f"{_MODEL}.dims_per_head", s.head_dim, *head_keys(settings))
    draft.copy(_MODEL, "vocab_size", "max_seq_len", "fprop_dtype", "z_loss_weight")


def _set_losses(draft: Conversion) -> None:
    """Sets multi-token prediction, and the weights of the losses beside that of the next token."""
    settings, keys = draft.settings, {}
    if settings["num_experts"] > 1 and settings["load_balance_loss_weight"]:
        keys["load_balance_loss"] = "load_balance_loss_weight"
    if settings["mtp_num_layers"]:
        draft.copy(_MODEL, "mtp_num_layers")
        keys["mtp_loss"] = "mtp_loss_scaling_factor"
    if keys:
        draft.set("task.loss_aggregator.loss_keys", ["loss", *keys], *keys.values())
        draft.set("task.loss_aggregator.loss_weights", [1.0, *(settings[key] for key in keys.values())], *keys.values())


def _set_tables(draft: Conversion) -> None:
    """Sets absolute positions, the embedding table and the output head."""
    settings = draft.settings
    rows, sinusoid = settings["trainable_position_size"], settings["use_untrainable_positional_embedding"]
    kind = "LearnedPositions" if rows > 0 else "SinusoidPositions" if sinusoid else None
    draft.set(f"{_MODEL}.position", kind, "trainable_position_size", "use_untrainable_positional_embedding")
    if rows > 0:
        draft.set(f"{_MODEL}.position.num_positions", rows, "trainable_position_size")
    if not settings["logits_via_embedding"]:
        draft.set(f"{_MODEL}.head", "OutputHead", "logits_via_embedding")
    draft.copy(f"{_MODEL}.{'embedding' if settings['logits_via_embedding'] else 'head'}", "logit_cap")
    keys = ("logits_via_embedding", "normalize_embedding_logits")
    if all(settings[key] for key in keys):
        draft.set(f"{_MODEL}.embedding.scale_logits_sqrt_depth", True, *keys)


def _set_pipeline(draft: Conversion) -> None:
    settings = draft.settings
    stages = max(settings["ici_pipeline_parallelism"], 1) * max(settings["dcn_pipeline_parallelism"], 1)
    if stages == 1:
        return
    if layer_traits(settings) or num_dense_first(settings):
        raise ConfigError("Several kinds of layers cannot be pipelined.", "Set *_pipeline_parallelism to 1.")
    per_stage, repeats = settings["num_layers_per_pipeline_stage"], settings["num_pipeline_repeats"]
    if repeats < 1:
        repeats = max(sizes_of(settings).layers // (stages * per_stage), 1)
    microbatches = settings["num_pipeline_microbatches"]
    draft.set(_STACK, "PipelinedStack", "ici_pipeline_parallelism")
    draft.set(f"{_STACK}.num_stages", stages, "ici_pipeline_parallelism", "dcn_pipeline_parallelism")
    draft.set(f"{_STACK}.circular_repeat", repeats, "num_pipeline_repeats", "num_layers_per_pipeline_stage")
    draft.set(f"{_STACK}.num_microbatches", microbatches if microbatches > 0 else stages, "num_pipeline_microbatches")


def _is_fp8(settings: Settings) -> bool:
    """Whether MaxText computes matmuls as pax's `precision: fp8` does. Its experts do not."""
    return settings["quantization"] == "fp8" and settings["num_experts"] == 1


def _set_norm(draft: Conversion, path: str, *keys: str) -> None:
    norm = "LayerNorm" if draft.settings["decoder_block"] == "gpt3" else "RmsNorm"
    draft.set(path, norm, *keys)
    draft.copy(path, "epsilon")
    if norm == "RmsNorm":
        draft.set(f"{path}.direct_scale", True, *keys)


def _set_attention(draft: Conversion, path: str, has_window: bool) -> None:
    settings, facts = draft.settings, tables.blocks()[draft.settings["decoder_block"]]
    if is_latent(settings):
        return _set_latent_attention(draft, path)
    draft.set(f"{path}.use_bias", has(settings, "biases"), "decoder_block", facts.get("biases", ""))
    if has(settings, "biases") and "output_bias" in facts:
        draft.set(f"{path}.output_bias", facts["output_bias"], "decoder_block")
    draft.copy(path, "logit_cap")
    _set_rotary(draft, path, has_window)
    if has(settings, "qk_norm") and (has_window or settings["decoder_block"] != "llama4"):
        _set_norm(draft, f"{path}.qk_norm", "use_qk_norm", "decoder_block")
        if "qk_norm_scale" in facts:
            draft.set(f"{path}.qk_norm.has_scale", facts["qk_norm_scale"], "decoder_block")
        draft.set(f"{path}.qk_norm_joint", settings["_qk_norm_joint"], "model_name")
    if not facts.get("scales_queries"):
        draft.set(f"{path}.query_scale", 1.0, "decoder_block")
    elif settings["_query_dims"]:
        draft.set(f"{path}.query_scale", settings["_query_dims"] ** -0.5, "model_name")
    # Without norms of queries and keys, the recipe has nothing else that Qwen's blocks have and Llama's lacks.
    elif settings["decoder_block"].startswith("qwen") and not has(settings, "qk_norm"):
        draft.set(f"{path}.query_scale", settings["head_dim"] ** -0.5, "decoder_block")
    if has_window and 0 < settings["sliding_window_size"] < settings["max_target_length"]:
        draft.copy(path, "window")
    if settings["attention_sink"]:
        draft.set(f"{path}.sinks", True, "attention_sink")
    if settings["decoder_block"] == "llama4" and has_window and settings["chunk_attn_window_size"] > 0:
        draft.set(f"{path}.window", settings["chunk_attn_window_size"], "chunk_attn_window_size")
        draft.set(f"{path}.chunked", True, "chunk_attn_window_size")
    if settings["decoder_block"] == "llama4" and not has_window and settings["temperature_tuning"]:
        draft.set(f"{path}.temperature_growth", 0.1, "temperature_tuning")


def _set_latent_attention(draft: Conversion, path: str) -> None:
    settings, scale = draft.settings, sizes_of(draft.settings).head_dim ** -0.5
    draft.set(path, "LatentAttention", "attention_type")
    for field, key in tables.blocks()[settings["decoder_block"]]["latent"].items():
        draft.set(f"{path}.{field}", settings[key] or None, key)
    draft.copy(path, "latent_norm.epsilon")
    draft.set(f"{path}.latent_norm.direct_scale", True, "decoder_block")
    if settings["max_position_embeddings"] > settings["original_max_position_embeddings"]:
        scale *= (0.1 * settings["mscale"] * math.log(settings["rope_factor"]) + 1) ** 2
    keys = ("mscale", "rope_factor", "max_position_embeddings", "original_max_position_embeddings")
    draft.set(f"{path}.query_scale", scale, *keys)
    _set_rotary(draft, path, has_window=False)


def _set_rotary(draft: Conversion, attention: str, has_window: bool) -> None:
    settings, path = draft.settings, f"{attention}.rotary"
    if settings["decoder_block"] == "gpt3" or settings["decoder_block"] == "llama4" and not has_window:
        return draft.set(path, None, "decoder_block")
    if settings["_position"] == "relative_bias" and settings["decoder_block"] == "default":
        draft.set(path, None, "_position")
        return draft.set(f"{attention}.relative_bias", "RelativeBias", "_position")
    draft.set(path, "Rotary", "_position")
    is_local = settings["decoder_block"] == "gemma3" and has_window and settings["local_rope_max_timescale"] > 0
    theta = "local_rope_max_timescale" if is_local else "rope_max_timescale"
    draft.set(f"{path}.max_timescale", float(settings[theta]), theta)
    draft.set(f"{path}.min_timescale", float(settings["rope_min_timescale"]), "rope_min_timescale")
    factor = settings["rope_linear_scaling_factor"]
    if settings["rope_type"] == "llama3.1":
        if settings["rope_use_scale"]:
            draft.set(f"{path}.scaling", "Llama31Scaling", "rope_type")
    elif settings["rope_type"] == "yarn":
        draft.set(f"{path}.scaling", "YarnScaling", "rope_type")
        draft.copy(f"{path}.scaling", "factor", "beta_fast", "beta_slow", "original_max_seq_len", "truncate")
        attention_factor = None if settings["rope_attention_scaling"] else 1.0
        draft.set(f"{path}.scaling.attention_factor", attention_factor, "rope_attention_scaling")
    elif factor != 1 and not is_local:
        draft.set(f"{path}.scaling", "LinearScaling", "rope_linear_scaling_factor")
        draft.set(f"{path}.scaling.factor", factor, "rope_linear_scaling_factor")


def _set_feed_forward(draft: Conversion, path: str, has_experts: bool) -> None:
    settings, facts = draft.settings, tables.blocks()[draft.settings["decoder_block"]]
    names = settings["mlp_activations"]
    plain = next(name for name in names if name != "linear")
    draft.set(path, "MoeFeedForward" if has_experts else "FeedForward", "num_experts")
    draft.set(f"{path}.activation", facts.get("activation", "silu" if plain == "swish" else plain), "mlp_activations")
    if not has_experts:
        draft.set(f"{path}.gated", len(names) == 2, "mlp_activations")
        return draft.set(f"{path}.use_bias", settings["decoder_block"] == "gpt3", "decoder_block")
    if len(names) != 2:
        raise ConfigError(f"mlp_activations={names}: pax's experts are gated.", "For example silu,linear.")
    draft.copy(path, "num_experts", "num_experts_per_token", "capacity_factor")
    if num_dense(settings) or settings["decoder_block"] == "llama4":
        draft.set(f"{path}.expert_dims", sizes_of(settings).moe_mlp, "base_moe_mlp_dim")
    if "experts" in facts:
        _set_router(draft, path, facts["experts"])


def _set_router(draft: Conversion, path: str, fields: Mapping[str, str]) -> None:
    """Sets the router of DeepSeek or Llama 4, and shared experts."""
    settings, shared = draft.settings, draft.settings["shared_experts"]
    for field, key in fields.items():
        draft.set(f"{path}.{field}", 1 if settings[key] == -1 else settings[key], key)
    for field, value in tables.blocks()[settings["decoder_block"]]["of_experts"].items():
        draft.set(f"{path}.{field}", value, "decoder_block")
    draft.set(f"{path}.normalize_weights", settings["routed_score_func"] == "sigmoid", "routed_score_func")
    draft.set(f"{path}.shared_dims", shared * sizes_of(settings).moe_mlp or None, "shared_experts", "base_moe_mlp_dim")
    if settings["routed_bias"] and not settings["routed_bias_update_rate"]:
        draft.set("task.train.learner.bprop_variable_exclusion", ["balance_bias$"], "routed_bias_update_rate")


def _note_differences(draft: Conversion) -> None:
    settings, scaled_queries = draft.settings, tables.day_of("scaled_latent_queries")
    if settings["quantization"] and not _is_fp8(settings):
        draft.approximate(f"quantization={settings['quantization']}: pax computes matmuls in {settings['dtype']}.")
    if settings["decoder_block"] == "deepseek" and settings.date < scaled_queries:
        draft.approximate(f"decoder_block=deepseek: as since {scaled_queries}; earlier ones scaled queries otherwise.")
