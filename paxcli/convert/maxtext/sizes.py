"""The size of a MaxText model: its scaling rules, parameters, and FLOPs by the formula of the date."""

from __future__ import annotations

import dataclasses

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.settings import Settings
from paxcli.errors import ConfigError
from paxcli.layers.flops import visible_pairs

_TRAINING = 3  # Forward, and twice as much backward.


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model's dimensions after scaling: L, D, F, N, K, H, V, and the width of an expert."""

    layers: int
    emb: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    moe_mlp: int


def sizes_of(settings: Settings) -> Sizes:
    """Dimensions after `scale` or `global_parameter_scale`, by the rule of the date. Pairs of layers count twice.

    Raises:
      ConfigError: A scale that MaxText rejects, or a size out of range.
    """
    heads, emb, layers = _factors(settings)
    moe = settings["base_moe_mlp_dim"]
    sizes = Sizes(
        layers=settings["base_num_decoder_layers"] * layers * (2 if settings["decoder_block"] == "gemma2" else 1),
        emb=settings["base_emb_dim"] * emb,
        mlp=settings["base_mlp_dim"] * heads,
        heads=settings["base_num_query_heads"] * heads,
        kv_heads=settings["base_num_kv_heads"] * heads,
        head_dim=sum(settings[key] for key in head_keys(settings)),
        vocab=settings["vocab_size"],
        moe_mlp=(moe if moe > 0 else settings["base_mlp_dim"]) * heads,
    )
    for name, value in dataclasses.asdict(sizes).items():
        if not 1 <= value <= 1 << 32:
            raise ConfigError(f"The model has {name}={value}.", "Sizes are integers from 1 to 2^32.")
    return sizes


def _factors(settings: Settings) -> tuple[int, int, int]:
    """The factors for heads and MLP, for the embedding, and for the layers."""
    if settings.is_set("scale"):
        scale = settings["scale"]
        return scale, scale, scale
    scale = settings["global_parameter_scale"]
    power = scale.bit_length() - 1
    if scale < 1 or scale != 1 << power:
        hint = f"MaxText accepts {1 << max(power, 0)}."
        raise ConfigError(f"global_parameter_scale={scale} is not a power of two.", hint)
    thirds, rest = divmod(power, 3)
    first, second = thirds + (rest > 0), thirds + (rest > 1)
    heads_first = settings.date >= tables.day_of("heads_scaled_first")
    exponents = (first, second, thirds) if heads_first else (second, first, thirds)
    is_number = settings.date < tables.day_of("scale_is_power")
    heads, emb, layers = (exponent + 1 if is_number else 1 << exponent for exponent in exponents)
    return heads, emb, layers


def num_parameters(settings: Settings) -> int:
    """The number of parameters, from the model's dimensions."""
    s, block = sizes_of(settings), settings["decoder_block"]
    branches, experts, dense = len(settings["mlp_activations"]), settings["num_experts"], num_dense(settings)
    layer = _projections(settings, s) + s.heads * settings["attention_sink"]
    layer += s.emb * (1 if block == "default" else 2)
    layer += s.emb * (bool(settings["use_post_attn_norm"]) + bool(settings["use_post_ffw_norm"]))
    if is_latent(settings):
        layer += settings["q_lora_rank"] + settings["kv_lora_rank"]
    elif has(settings, "qk_norm") and tables.blocks()[block].get("qk_norm_scale", True):
        layer += s.head_dim * (s.heads + s.kv_heads if settings["_qk_norm_joint"] else 2)
    if has(settings, "biases"):
        layer += s.head_dim * (s.heads + 2 * s.kv_heads) + s.emb * tables.blocks()[block].get("output_bias", True)
    final_norm = s.emb
    if block == "gpt3":  # biases of the feed-forward and of norms
        layer += branches * s.mlp + 3 * s.emb
        final_norm *= 2
    if settings["_position"] == "relative_bias" and block == "default":
        layer += 32 * s.heads
    of_experts = experts * (branches * s.moe_mlp + s.emb) * settings["mlp_bias"] + experts * settings["routed_bias"]
    feed_forward = _feed_forwards(settings, s, dense, experts) + (s.layers - dense) * of_experts
    embeddings = s.vocab * s.emb * (1 if settings["logits_via_embedding"] else 2)
    embeddings += max(settings["trainable_position_size"], 0) * s.emb
    # A layer of multi-token prediction: one more like the last, a projection and two norms.
    mtp = layer + _last_feed_forward(settings, s, experts) + (dense < s.layers) * of_experts + 2 * s.emb * (s.emb + 1)
    return s.layers * layer + feed_forward + final_norm + embeddings + settings["mtp_num_layers"] * mtp


def _projections(settings: Settings, s: Sizes) -> int:
    """The weights of one layer's attention."""
    if not is_latent(settings):
        return s.emb * s.head_dim * 2 * (s.heads + s.kv_heads)
    latent, of_query, value = settings["kv_lora_rank"], settings["q_lora_rank"], settings["v_head_dim"]
    query = of_query * (s.emb + s.heads * s.head_dim) if of_query else s.emb * s.heads * s.head_dim
    keys = s.emb * (latent + settings["qk_rope_head_dim"])
    return query + keys + latent * s.heads * (settings["qk_nope_head_dim"] + value) + s.heads * value * s.emb


def _feed_forwards(settings: Settings, s: Sizes, dense: int, experts: int) -> int:
    """The weights of all layers' feed-forwards: of `dense` ones, and of those with `experts` and shared experts."""
    matrices = s.emb * (len(settings["mlp_activations"]) + 1)
    if settings["num_experts"] > 1 and "experts" in tables.blocks()[settings["decoder_block"]]:
        experts += settings["shared_experts"]
    with_experts = matrices * s.moe_mlp * experts + s.emb * settings["num_experts"]
    return dense * matrices * s.mlp + (s.layers - dense) * with_experts


def _last_feed_forward(settings: Settings, s: Sizes, experts: int) -> int:
    """The weights of the last layer's feed-forward."""
    return _feed_forwards(settings, dataclasses.replace(s, layers=1), int(num_dense(settings) == s.layers), experts)


def head_keys(settings: Settings) -> tuple[str, ...]:
    """The keys of the parts of a query's head."""
    return ("qk_nope_head_dim", "qk_rope_head_dim") if is_latent(settings) else ("head_dim",)


def is_latent(settings: Settings) -> bool:
    """Whether attention is multi-head latent attention (MLA)."""
    return settings["attention_type"] == "mla"


def num_dense_first(settings: Settings) -> int:
    """The number of dense layers before those with experts."""
    has_router = "experts" in tables.blocks()[settings["decoder_block"]]
    return settings["first_num_dense_layers"] if has_router and settings["num_experts"] > 1 else 0


def num_dense(settings: Settings) -> int:
    """The number of layers whose feed-forward has no experts."""
    kinds, first, layers = layer_traits(settings) or [[]], num_dense_first(settings), sizes_of(settings).layers
    if settings["num_experts"] <= 1:
        return layers
    return first + sum(len(range(first + i, layers, len(kinds))) for i, one in enumerate(kinds) if "dense" in one)


def layer_traits(settings: Settings) -> list[list[str]]:
    """The traits of each of the interleaved kinds of layers, with `dense` for those without experts; [] = one kind."""
    step = settings["interleave_moe_layer_step"]
    found = enumerate(tables.turns(settings["decoder_block"]) or [], 1)
    return [traits if number % step == 0 else [*traits, "dense"] for number, traits in found]


def has(settings: Settings, part: str) -> bool:
    """Whether the block has `qk_norm` (norms of queries and keys) or `biases` (of attention's projections)."""
    key = tables.blocks()[settings["decoder_block"]].get(part)
    return key == "always" or bool(key and settings[key])


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """TFLOPs per step and device, and the formula that counts them."""

    weights: float
    attention: float
    formula: str

    @property
    def total(self) -> float:
        """Both kinds together."""
        return self.weights + self.attention


def flops(settings: Settings) -> StepFlops:
    """The TFLOPs per step and device that MaxText of that date prints."""
    s, length = sizes_of(settings), settings["max_target_length"]
    tokens = settings["per_device_batch_size"] * settings["gradient_accumulation_steps"] * length
    counted_by, share, formula = settings["_flops"]
    value_dim = settings["v_head_dim"] if is_latent(settings) else s.head_dim
    mtp_layers = settings["mtp_num_layers"] if settings.date >= tables.day_of("flops_count_mtp") else 0
    attention = 2 * tokens * length * s.heads * (s.head_dim + value_dim) * (s.layers + mtp_layers) * _TRAINING * share
    if counted_by == "parameters":
        weights = 6 * num_parameters(settings) * tokens
    else:
        weights = _TRAINING * _matmuls(settings, s, tokens, mtp_layers)
        attention *= _window_fraction(settings, length) if share < 1 else 1
    return StepFlops(weights / 1e12, attention / 1e12, formula)


def _matmuls(settings: Settings, s: Sizes, tokens: float, mtp_layers: int) -> float:
    """FLOPs of a forward pass. MaxText counts experts in all layers but `num_dense_first`, but for Llama 4."""
    has_first = settings["num_experts"] > 1 and settings["decoder_block"] != "llama4"
    dense = num_dense_first(settings) if has_first else num_dense(settings)
    feed_forward = _feed_forwards(settings, s, dense, settings["num_experts_per_tok"])
    feed_forward += mtp_layers * _last_feed_forward(settings, s, settings["num_experts_per_tok"])
    return 2 * tokens * ((s.layers + mtp_layers) * _projections(settings, s) + feed_forward + s.emb * s.vocab)


def _window_fraction(settings: Settings, length: int) -> float:
    """The fraction of causal attention that sliding windows or chunks leave, averaged over layers."""
    chunked = settings["decoder_block"] == "llama4"
    window = settings["chunk_attn_window_size" if chunked else "sliding_window_size"]
    local = ["window" in one for one in layer_traits(settings)] or [settings["attention_type"] == "local_sliding"]
    share = visible_pairs(length, True, max(window, 0) or None, chunked) / visible_pairs(length, True)
    return sum(share if has_window else 1 for has_window in local) / len(local)
