"""The size of a MaxText model: its scaling rules, parameters, and FLOPs by the formula of the date."""

from __future__ import annotations

import dataclasses
import datetime

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.settings import Settings
from paxcli.errors import ConfigError

_POWERS = datetime.date(2023, 7, 31)
_HEADS_FIRST = datetime.date(2023, 9, 8)
_COUNTS_ATTENTION = datetime.date(2023, 6, 6)
_CAUSAL = datetime.date(2023, 11, 30)
_MATMULS = datetime.date(2024, 5, 10)
_CAUSAL_AGAIN = datetime.date(2025, 7, 22)
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
    pairs = 2 if settings["decoder_block"] == "gemma2" else 1
    sizes = Sizes(
        layers=settings["base_num_decoder_layers"] * layers * pairs,
        emb=settings["base_emb_dim"] * emb,
        mlp=settings["base_mlp_dim"] * heads,
        heads=settings["base_num_query_heads"] * heads,
        kv_heads=settings["base_num_kv_heads"] * heads,
        head_dim=settings["head_dim"],
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
    scale = settings["global_parameter_scale"] if settings.is_set("global_parameter_scale") else 1
    power = scale.bit_length() - 1
    if scale < 1 or scale != 1 << power:
        hint = f"MaxText accepts {1 << max(power, 0)}."
        raise ConfigError(f"global_parameter_scale={scale} is not a power of two.", hint)
    thirds, rest = divmod(power, 3)
    first, second = thirds + (rest > 0), thirds + (rest > 1)
    exponents = (first, second, thirds) if settings.date >= _HEADS_FIRST else (second, first, thirds)
    is_number = settings.date < _POWERS  # the first rule multiplied by a number where it meant a power of two
    heads, emb, layers = (exponent + 1 if is_number else 1 << exponent for exponent in exponents)
    return heads, emb, layers


def parameters(settings: Settings) -> int:
    """The number of parameters, from the model's dimensions."""
    s, block = sizes_of(settings), settings["decoder_block"]
    branches = len(settings["mlp_activations"])
    experts = settings["num_experts"]
    attention = s.emb * s.head_dim * 2 * (s.heads + s.kv_heads)
    feed_forward = s.emb * s.mlp * (branches + 1)
    if experts > 1:
        feed_forward = experts * s.emb * s.moe_mlp * (branches + 1) + s.emb * experts
    is_parallel = block == "default"
    norms = s.emb * (1 if is_parallel else 2)
    norms += s.emb * (bool(settings["use_post_attn_norm"]) + bool(settings["use_post_ffw_norm"]))
    if has_qk_norm(settings):
        norms += s.head_dim * (s.heads + s.kv_heads if is_qk_norm_joint(settings) else 2)
    if has_biases(settings):
        attention += s.head_dim * (s.heads + 2 * s.kv_heads) + s.emb * tables.blocks()[block].get("output_bias", True)
    final_norm = s.emb
    if block == "gpt3":
        norms, final_norm = 2 * norms, 2 * final_norm
        feed_forward += branches * s.mlp + s.emb
    relative = 32 * s.heads if _has_relative_bias(settings) else 0
    embeddings = s.vocab * s.emb * (1 if settings["logits_via_embedding"] else 2)
    embeddings += max(settings["trainable_position_size"], 0) * s.emb
    return s.layers * (attention + feed_forward + norms + relative) + final_norm + embeddings


def has_qk_norm(settings: Settings) -> bool:
    """Whether queries and keys are normalized."""
    return _has(settings, "qk_norm")


def has_biases(settings: Settings) -> bool:
    """Whether attention's projections have biases."""
    return _has(settings, "biases")


def is_qk_norm_joint(settings: Settings) -> bool:
    """Whether a norm of queries or keys is over all heads together."""
    return settings.model_name.startswith("olmo3")


def _has(settings: Settings, part: str) -> bool:
    """Whether the block has an optional part: always, or by a key."""
    key = tables.blocks().get(settings["decoder_block"], {}).get(part)
    return key == "always" or bool(key and settings[key])


def _has_relative_bias(settings: Settings) -> bool:
    return settings["_position"] == "relative_bias" and settings["decoder_block"] == "default"


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


def flops(settings: Settings, batch: float | None = None, length: int | None = None) -> StepFlops:
    """The TFLOPs per step and device that MaxText of that date prints.

    Args:
      settings: The launch.
      batch: Rows per device; None = the launch's.
      length: T; None = the launch's.
    """
    s, date = sizes_of(settings), settings.date
    batch = settings["per_device_batch_size"] * settings["gradient_accumulation_steps"] if batch is None else batch
    length = settings["max_target_length"] if length is None else length
    tokens = batch * length
    full = 4 * batch * length**2 * s.heads * s.head_dim * s.layers * _TRAINING
    by_parameters = date < _MATMULS
    weights = 6 * parameters(settings) * tokens if by_parameters else _TRAINING * _matmuls(settings, s, tokens)
    attention, formula = full, "and attention as if it were not causal"
    if date < _COUNTS_ATTENTION:
        attention, formula = 0, "attention not counted"
    elif date >= _CAUSAL_AGAIN or _CAUSAL <= date < _MATMULS:
        share = 1 if by_parameters else _window_fraction(settings, length)
        attention, formula = full / 2 * share, "and causal attention"
    what = "6 · parameters · tokens" if by_parameters else "matmuls"
    return StepFlops(weights / 1e12, attention / 1e12, f"{what}, {formula}")


def _matmuls(settings: Settings, s: Sizes, tokens: float) -> float:
    branches, experts = len(settings["mlp_activations"]), settings["num_experts"]
    mlp = 2 * tokens * (s.moe_mlp if experts > 1 else s.mlp) * s.emb * (branches + 1)
    if experts > 1:
        mlp = mlp * settings["num_experts_per_tok"] + 2 * tokens * s.emb * experts
    projections = 2 * tokens * s.emb * s.head_dim * 2 * (s.heads + s.kv_heads)
    return s.layers * (mlp + projections) + 2 * tokens * s.emb * s.vocab


def _window_fraction(settings: Settings, length: int) -> float:
    """The fraction of causal attention that sliding windows leave, averaged over layers."""
    window = settings["sliding_window_size"]
    local = tables.local_layers(settings["decoder_block"]) or [settings["attention_type"] != "global"]
    if not 0 < window < length:
        return 1.0
    share = (length * window - window**2 / 2) / (length**2 / 2)
    return sum(share if has_window else 1 for has_window in local) / len(local)
