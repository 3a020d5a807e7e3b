"""MaxText's model as fields of pax's `LanguageModel`."""

from __future__ import annotations

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.settings import Settings
from paxcli.convert.maxtext.sizes import has_biases, has_qk_norm, is_qk_norm_joint, sizes_of
from paxcli.errors import ConfigError

_MODEL = "task.model"
_STACK = f"{_MODEL}.stack"

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "swish": "silu", "tanh": "tanh", "sigmoid": "sigmoid"}


def set_model(draft: Conversion) -> None:
    """Sets everything about the network.

    Raises:
      ConfigError: The model has a part that pax does not have; the hint names the nearest.
    """
    settings = draft.settings
    _refuse(settings)
    _set_sizes(draft)
    _set_tables(draft)
    block, local = tables.blocks()[settings["decoder_block"]]["layer"], tables.local_layers(settings["decoder_block"])
    if _is_pipelined(settings):
        _set_pipeline(draft)
    if local is None:
        draft.set(f"{_STACK}.scan", settings["scan_layers"], "scan_layers")
        draft.set(f"{_STACK}.block", block, "decoder_block")
        _set_block(draft, f"{_STACK}.block", settings["attention_type"] != "global")
    else:
        _set_interleaved(draft, block, local)
    _set_norm(draft, f"{_MODEL}.final_norm")
    _note_differences(draft)


def _is_pipelined(settings: Settings) -> bool:
    return settings["ici_pipeline_parallelism"] > 1 or settings["dcn_pipeline_parallelism"] > 1


def _set_interleaved(draft: Conversion, block: str, local: list[bool]) -> None:
    settings = draft.settings
    draft.set(_STACK, "PatternedStack", "decoder_block")
    layers = sizes_of(settings).layers
    scan = settings["scan_layers"] and layers % len(local) == 0
    draft.set(f"{_STACK}.scan", scan, "scan_layers")
    if scan != settings["scan_layers"]:
        draft.note_approximation(
            f"scan_layers: {layers} layers are not a multiple of {len(local)}, so they are unrolled."
        )
    draft.set(f"{_STACK}.turns", [block] * len(local), "decoder_block")
    for turn, has_window in enumerate(local):
        _set_block(draft, f"{_STACK}.turns.{turn}", has_window)


def _set_block(draft: Conversion, path: str, has_window: bool) -> None:
    """Sets a layer template."""
    for name, value in tables.blocks()[draft.settings["decoder_block"]].get("sets", {}).items():
        draft.set(f"{path}.{name}", value, "decoder_block")
    if draft.settings["use_post_attn_norm"]:
        draft.set(f"{path}.post_norms", True, "use_post_attn_norm", "use_post_ffw_norm")
    if _is_fp8(draft.settings):
        draft.set(f"{path}.precision", "fp8", "quantization")
    _set_norm(draft, f"{path}.norm")
    _set_attention(draft, f"{path}.attention", has_window)
    _set_feed_forward(draft, f"{path}.feed_forward")


def _refuse(settings: Settings) -> None:
    block = settings["decoder_block"]
    if block not in tables.blocks():
        name = f"model {settings.model_name}" if settings.model_name != "default" else "the launch"
        nearest = tables.nearest_block(block)
        hint = f"The nearest is decoder_block={nearest}." if nearest else f"Pax has {', '.join(tables.blocks())}."
        raise ConfigError(f"decoder_block={block} of {name} is not a block that pax has.", hint)
    if tables.local_layers(block) and _is_pipelined(settings):
        hint = "Set *_pipeline_parallelism to 1."
        raise ConfigError(f"decoder_block={block}: interleaved kinds of layers cannot be pipelined.", hint)
    if settings["use_post_attn_norm"] != settings["use_post_ffw_norm"]:
        raise ConfigError("use_post_attn_norm and use_post_ffw_norm differ.", "Pax has both or neither.")


def _set_sizes(draft: Conversion) -> None:
    settings, s = draft.settings, sizes_of(draft.settings)
    draft.set(f"{_MODEL}.num_layers", s.layers, "base_num_decoder_layers", scaled=s.layers)
    draft.set(f"{_MODEL}.model_dims", s.emb, "base_emb_dim", scaled=s.emb)
    if settings["num_experts"] > 1:
        draft.set(f"{_MODEL}.hidden_dims", s.moe_mlp, "base_moe_mlp_dim", "base_mlp_dim", scaled=s.moe_mlp)
    else:
        draft.set(f"{_MODEL}.hidden_dims", s.mlp, "base_mlp_dim", scaled=s.mlp)
    draft.set(f"{_MODEL}.num_heads", s.heads, "base_num_query_heads", scaled=s.heads)
    kv_heads = s.kv_heads if s.kv_heads != s.heads else None
    draft.set(f"{_MODEL}.num_kv_heads", kv_heads, "base_num_kv_heads", scaled=s.kv_heads)
    draft.set(f"{_MODEL}.dims_per_head", s.head_dim, "head_dim")
    draft.set(f"{_MODEL}.vocab_size", s.vocab, "vocab_size")
    draft.copy(_MODEL, "max_seq_len", "fprop_dtype")
    if settings["z_loss_multiplier"]:
        draft.copy(_MODEL, "z_loss_weight")


def _set_tables(draft: Conversion) -> None:
    """Sets absolute positions, the embedding table and the output head."""
    settings = draft.settings
    if settings["trainable_position_size"] > 0:
        draft.set(f"{_MODEL}.position", "LearnedPositions", "trainable_position_size")
        draft.set(f"{_MODEL}.position.num_positions", settings["trainable_position_size"], "trainable_position_size")
    elif settings["use_untrainable_positional_embedding"]:
        draft.set(f"{_MODEL}.position", "SinusoidPositions", "use_untrainable_positional_embedding")
    else:
        draft.set(f"{_MODEL}.position", None, "trainable_position_size", "use_untrainable_positional_embedding")
    if not settings["logits_via_embedding"]:
        draft.set(f"{_MODEL}.head", "OutputHead", "logits_via_embedding")
        return draft.copy(f"{_MODEL}.head", "logit_cap")
    draft.copy(f"{_MODEL}.embedding", "logit_cap")
    if settings["normalize_embedding_logits"]:
        draft.set(
            f"{_MODEL}.embedding.scale_logits_sqrt_depth", True, "logits_via_embedding", "normalize_embedding_logits"
        )
    return None


def _set_pipeline(draft: Conversion) -> None:
    settings = draft.settings
    stages = max(settings["ici_pipeline_parallelism"], 1) * max(settings["dcn_pipeline_parallelism"], 1)
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


def _set_norm(draft: Conversion, path: str) -> None:
    norm = "LayerNorm" if draft.settings["decoder_block"] == "gpt3" else "RmsNorm"
    draft.set(path, norm, "decoder_block")
    draft.copy(path, "epsilon")
    if norm == "RmsNorm":
        draft.set(f"{path}.direct_scale", True, "decoder_block")


def _set_attention(draft: Conversion, path: str, has_window: bool) -> None:
    settings, facts = draft.settings, tables.blocks()[draft.settings["decoder_block"]]
    draft.set(f"{path}.use_bias", has_biases(settings), "decoder_block")
    if has_biases(settings) and "output_bias" in facts:
        draft.set(f"{path}.output_bias", facts["output_bias"], "decoder_block")
    draft.copy(path, "logit_cap")
    _set_rotary(draft, path, has_window)
    if has_qk_norm(settings):
        draft.set(f"{path}.qk_norm", "RmsNorm", "use_qk_norm", "decoder_block")
        draft.copy(path, "qk_norm.epsilon")
        draft.set(f"{path}.qk_norm.direct_scale", True, "use_qk_norm", "decoder_block")
    if has_qk_norm(settings) and is_qk_norm_joint(settings):
        draft.set(f"{path}.qk_norm_joint", True, "model_name")
    if not facts.get("scales_queries"):
        draft.set(f"{path}.query_scale", 1.0, "decoder_block")
    elif settings.model_name == "gemma3-27b":
        s = sizes_of(settings)
        draft.set(f"{path}.query_scale", (s.emb // s.heads) ** -0.5, "model_name")
    # Without norms of queries and keys, the recipe has nothing else that Qwen's blocks have and Llama's lacks.
    elif settings["decoder_block"].startswith("qwen") and not has_qk_norm(settings):
        draft.set(f"{path}.query_scale", settings["head_dim"] ** -0.5, "decoder_block")
    if has_window and 0 < settings["sliding_window_size"] < settings["max_target_length"]:
        draft.copy(path, "window")


def _set_rotary(draft: Conversion, attention: str, has_window: bool) -> None:
    settings, path = draft.settings, f"{attention}.rotary"
    if settings["decoder_block"] == "gpt3":
        return draft.set(path, None, "decoder_block")
    if settings["_position"] == "relative_bias" and settings["decoder_block"] == "default":
        draft.set(path, None, "_position")
        return draft.set(f"{attention}.relative_bias", "RelativeBias", "_position")
    draft.set(path, "Rotary", "_position")
    is_local = settings["decoder_block"] == "gemma3" and has_window and settings["local_rope_max_timescale"] > 0
    theta = "local_rope_max_timescale" if is_local else "rope_max_timescale"
    draft.set(f"{path}.max_timescale", float(settings[theta]), theta)
    if settings["rope_min_timescale"] != 1:
        draft.set(f"{path}.min_timescale", float(settings["rope_min_timescale"]), "rope_min_timescale")
    factor = settings["rope_linear_scaling_factor"]
    if settings["rope_type"] == "llama3.1":
        if settings["rope_use_scale"]:
            draft.set(f"{path}.scaling", "Llama31Scaling", "rope_type")
    elif settings["rope_type"] == "yarn":
        draft.set(f"{path}.scaling", "YarnScaling", "rope_type")
        draft.copy(f"{path}.scaling", "beta_fast", "beta_slow", "original_max_seq_len", "truncate")
        draft.set(f"{path}.scaling.factor", settings["rope_factor"], "rope_factor")
        if not settings["rope_attention_scaling"]:
            draft.set(f"{path}.scaling.attention_factor", 1.0, "rope_attention_scaling")
    elif factor != 1 and not is_local:
        draft.set(f"{path}.scaling", "LinearScaling", "rope_linear_scaling_factor")
        draft.set(f"{path}.scaling.factor", factor, "rope_linear_scaling_factor")
    return None


def _set_feed_forward(draft: Conversion, path: str) -> None:
    settings = draft.settings
    names = [str(name) for name in settings["mlp_activations"]]
    plain = [name for name in names if name != "linear"]
    if len(names) > 2 or len(plain) != 1 or plain[0] not in _ACTIVATIONS:
        hint = f"Pax has one of {', '.join(_ACTIVATIONS)}, alone or beside `linear`."
        raise ConfigError(f"mlp_activations={names} is not a feed-forward that pax has.", hint)
    experts = settings["num_experts"] > 1
    draft.set(path, "MoeFeedForward" if experts else "FeedForward", "num_experts")
    draft.set(f"{path}.activation", _ACTIVATIONS[plain[0]], "mlp_activations")
    if not experts:
        draft.set(f"{path}.gated", len(names) == 2, "mlp_activations")
        draft.set(f"{path}.use_bias", settings["decoder_block"] == "gpt3", "decoder_block")
        return
    if len(names) != 2:
        raise ConfigError(f"mlp_activations={names}: pax's experts are gated.", "For example silu,linear.")
    draft.copy(path, "num_experts", "num_experts_per_token", "capacity_factor")
    weight = settings["load_balance_loss_weight"]
    if weight:
        draft.set("task.loss_aggregator.loss_keys", ["loss", "load_balance_loss"], "load_balance_loss_weight")
        draft.set("task.loss_aggregator.loss_weights", [1.0, weight], "load_balance_loss_weight")
        draft.note_approximation(
            f"load_balance_loss_weight={weight}: the loss is that of Fedus et al., 2021, averaged over layers."
        )


def _note_differences(draft: Conversion) -> None:
    settings = draft.settings
    if settings["use_multimodal"]:
        draft.note_approximation("use_multimodal: the text decoder only, without the encoders of images and audio.")
    if settings["dropout_rate"] and settings["enable_dropout"]:
        draft.note_approximation(f"dropout_rate={settings['dropout_rate']}: pax's layers have no dropout.")
    if settings["quantization"] and not _is_fp8(settings):
        draft.note_approximation(
            f"quantization={settings['quantization']}: pax computes matmuls in {settings['dtype']}."
        )
    if settings["weight_dtype"] != "float32":
        draft.note_approximation(f"weight_dtype={settings['weight_dtype']}: pax keeps parameters in float32.")
    draft.note_approximation(
        "Weights are initialized from normal distributions with MaxText's deviations; MaxText truncates MLP and head "
        "weights at two deviations."
    )
    if settings["logits_via_embedding"] and settings["dtype"] == "float32":
        draft.note_approximation(
            "logits_via_embedding: MaxText rounds the table to bfloat16 for the logits, also in float32; pax does not."
        )
