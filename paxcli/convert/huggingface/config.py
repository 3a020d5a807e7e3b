"""Converts a Hugging Face `config.json` to the values of a recipe's model, and back."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.resources
from collections.abc import Mapping
from typing import Any

import fiddle as fdl
import yaml

from paxcli.config.assign import assign
from paxcli.config.values import plain_values
from paxcli.errors import ConfigError, DataError
from paxcli.layers.attention.rotary_scaling import LinearScaling, Llama31Scaling
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.patterned_stack import PatternedStack
from paxcli.layers.positions import LearnedPositions

MODEL = "task.model"
_LONGEST = 8192  # rows of a model with a longer context are this long, unless the user sets `max_seq_len`
_GELU = ("gelu_pytorch_tanh", "gelu_new")


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
      architecture: The class in `transformers`.
      recipe: The recipe whose training settings imported models get.
      defaults: Values of keys that a `config.json` may leave out.
      required: Values that a key must have, if it is present; the first one is the default.
    """

    architecture: str
    recipe: str
    defaults: Mapping[str, Any]
    required: Mapping[str, tuple[Any, ...]]


_NO_BIAS = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}
_LLAMA = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "sliding_window": None}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama-1b", _LLAMA, _NO_BIAS),
    "mistral": Family("MistralForCausalLM", "llama-1b", {**_LLAMA, "sliding_window": 4096}, _NO_BIAS),
    "mixtral": Family(
        "MixtralForCausalLM",
        "llama-1b",
        {**_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
        _NO_BIAS,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", "llama-1b", {**_LLAMA, "head_dim": 128}, {**_NO_BIAS, "use_sliding_window": (False,)}
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "llama-1b",
        {
            **_LLAMA,
            "tie_word_embeddings": True,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        {"hidden_activation": _GELU, "attention_bias": (False,)},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "gpt2-124m",
        {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
    ),
}

# Fields that do not change what the parameters compute, or that a `config.json` has no key for.
_UNRELATED = {
    "fprop_dtype", "params_init", "loss_chunk", "label_smoothing", "z_loss_weight", "max_seq_len", "num_positions",
    "direct_scale", "reductions_in_fp32", "segmented", "kernel", "precision", "remat_policy", "unroll", "scan",
    "capacity_factor", "table_stddev", "stddev",
}  # fmt: skip


@functools.cache
def _missing_parts() -> dict[str, str]:
    package = importlib.resources.files("paxcli.convert.huggingface")
    return yaml.safe_load((package / "data" / "unsupported.yaml").read_text("utf-8"))


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a `config.json`, a key of `FAMILIES`.

    Raises:
      ConfigError: Pax does not import this architecture; names what it lacks.
    """
    kind = config.get("model_type")
    if kind in FAMILIES:
        return str(kind)
    architectures = config.get("architectures") or [f"model_type {kind!r}"]
    lacks = _missing_parts().get(str(kind), "a conversion for it")
    raise ConfigError(f"Pax cannot import {architectures[0]}: it lacks {lacks}.", f"It imports {', '.join(FAMILIES)}.")


def model_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Paths below `task.model` → plain values, to be assigned in order to the family's recipe.

    Raises:
      ConfigError: The model has a part that pax does not have.
      DataError: A size is missing.
    """
    kind = family_of(config)
    family = FAMILIES[kind]
    if config.get("quantization_config"):
        raise ConfigError(
            "Its weights are quantized, and pax imports weights in float32, bfloat16 or float16.",
            "Import the weights that it was quantized from.",
        )
    for key, allowed in family.required.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"{key}={config[key]!r} is not supported in {kind}.", f"Supported: {allowed[0]!r}.")
    full = {**family.defaults, **config}
    try:
        values = _gpt2_values(full) if kind == "gpt2" else _llama_values(kind, full)
    except KeyError as error:
        raise DataError(f"config.json has no {error}.", "Use the file that belongs to the weights.") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise DataError(f"config.json is not that of a {kind}: {error}.", "Download it again.") from None
    dtype = config.get("dtype", config.get("torch_dtype"))
    return values | {"fprop_dtype": "float32" if dtype == "float32" else "bfloat16"}


def _llama_values(kind: str, c: Mapping[str, Any]) -> dict[str, Any]:
    heads, dims, gemma = c["num_attention_heads"], c["hidden_size"], kind == "gemma2"
    size = c.get("head_dim") or dims // heads
    kv_heads = c.get("num_key_value_heads") or heads
    table = "embedding" if c["tie_word_embeddings"] else "head"
    values: dict[str, Any] = {
        "vocab_size": c["vocab_size"],
        "max_seq_len": min(c["max_position_embeddings"], _LONGEST),
        "model_dims": dims,
        "hidden_dims": c["intermediate_size"],
        "num_layers": c["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": kv_heads if kv_heads != heads else None,
        "dims_per_head": size if size * heads != dims else None,
        "position": None,
        "embedding.scale_sqrt_depth": gemma,
        "head": None if c["tie_word_embeddings"] else "OutputHead",
    }
    if gemma:
        values[f"{table}.logit_cap"] = c["final_logit_softcapping"]
    norm = {"": "RmsNorm", ".epsilon": c["rms_norm_eps"], ".direct_scale": not gemma}
    values |= {f"final_norm{field}": value for field, value in norm.items()}
    windows = _windows(kind, c)
    blocks = [f"stack.turns.{i}" for i in range(len(windows))] if len(windows) > 1 else ["stack.block"]
    values |= {"stack": "PatternedStack", "stack.turns": ["TransformerBlock"] * len(windows)} if gemma else {
        "stack": "Stack",
        "stack.block": "TransformerBlock",
    }  # fmt: skip
    values["stack.remat_policy"] = "nothing"
    for block, window in zip(blocks, windows, strict=True):
        values |= {f"{block}.norm{field}": value for field, value in norm.items()}
        values |= {f"{block}.post_norms": gemma, f"{block}.attention.window": window}
        if gemma:
            scalar = c["query_pre_attn_scalar"]
            values[f"{block}.attention.query_scale"] = scalar**-0.5 if scalar != size else None
            values[f"{block}.attention.logit_cap"] = c["attn_logit_softcapping"]
        if kind == "qwen3":
            values |= {f"{block}.attention.qk_norm{field}": value for field, value in norm.items()}
        values |= {f"{block}.attention.rotary{field}": value for field, value in _rotary(c).items()}
        values |= {f"{block}.feed_forward{field}": value for field, value in _feed_forward(kind, c).items()}
    return values


def _windows(kind: str, c: Mapping[str, Any]) -> list[int | None]:
    """The sliding window of each of the interleaved kinds of layers."""
    types, window, layers = c.get("layer_types"), c["sliding_window"], c["num_hidden_layers"]
    pattern = {"gemma2": ["sliding_attention", "full_attention"]}.get(kind)
    if pattern is None and types:
        window = window if types[0] == "sliding_attention" else None
        pattern = [types[0]]
    if types and types != (pattern * layers)[:layers]:
        raise ConfigError(f"layer_types={types} of {kind} is not a pattern that pax has.")
    if kind == "gemma2":
        return [window, None]
    return [None if kind in ("llama", "qwen3") else window]


def _rotary(c: Mapping[str, Any]) -> dict[str, Any]:
    scaling = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    values = {"": "Rotary", ".max_timescale": float(scaling.get("rope_theta", c["rope_theta"]))}
    if kind == "llama3":
        return values | {
            ".scaling": "Llama31Scaling",
            ".scaling.factor": float(scaling["factor"]),
            ".scaling.low_freq_factor": float(scaling["low_freq_factor"]),
            ".scaling.high_freq_factor": float(scaling["high_freq_factor"]),
            ".scaling.original_max_seq_len": scaling["original_max_position_embeddings"],
        }
    if kind == "linear":
        return values | {".scaling": "LinearScaling", ".scaling.factor": float(scaling["factor"])}
    if kind != "default":
        raise ConfigError(f"rope_type={kind} is not supported.", "Supported are default, linear and llama3.")
    return values


def _feed_forward(kind: str, c: Mapping[str, Any]) -> dict[str, Any]:
    if kind != "mixtral":
        activation = "gelu" if kind == "gemma2" else "silu"
        return {"": "FeedForward", ".activation": activation, ".gated": True, ".use_bias": False}
    return {
        "": "MoeFeedForward",
        ".num_experts": c["num_local_experts"],
        ".num_experts_per_token": c["num_experts_per_tok"],
    }


def _gpt2_values(c: Mapping[str, Any]) -> dict[str, Any]:
    dims, block = c["n_embd"], "stack.block"
    norm = {"": "LayerNorm", ".epsilon": c["layer_norm_epsilon"], ".direct_scale": True}
    return {
        "vocab_size": c["vocab_size"],
        "max_seq_len": c["n_positions"],
        "model_dims": dims,
        "hidden_dims": c["n_inner"] or 4 * dims,
        "num_layers": c["n_layer"],
        "num_heads": c["n_head"],
        "num_kv_heads": None,
        "dims_per_head": None,
        "position": "LearnedPositions",
        "position.num_positions": c["n_positions"],
        "head": None,
        **{f"final_norm{field}": value for field, value in norm.items()},
        "stack": "Stack",
        block: "TransformerBlock",
        "stack.remat_policy": "nothing",
        **{f"{block}.norm{field}": value for field, value in norm.items()},
        f"{block}.attention.use_bias": True,
        f"{block}.feed_forward": "FeedForward",
        f"{block}.feed_forward.activation": "gelu",
        f"{block}.feed_forward.use_bias": True,
    }


def config_json(config: fdl.Config, carried: Mapping[str, Any] | None, dtype: str) -> dict[str, Any]:
    """The `config.json` of a recipe's model.

    Args:
      config: The recipe.
      carried: The `config.json` that the model was imported with; it is used if it still is of this model.
      dtype: Of the weights.

    Raises:
      ConfigError: No family computes what this model computes; names the fields that differ.
    """
    if carried is not None and not differing_fields(config, carried):
        key = "torch_dtype" if "torch_dtype" in carried else "dtype"
        return {**carried, key: dtype}
    found = _new_config(config.task.model) | {"torch_dtype": dtype}
    if differences := differing_fields(config, found):
        raise ConfigError(
            f"{found['architectures'][0]}, the nearest architecture, differs from this model: "
            f"{'; '.join(differences[:5])}.",
            f"Pax exports {', '.join(FAMILIES)}.",
        )
    return found


def differing_fields(config: fdl.Config, huggingface: Mapping[str, Any]) -> list[str]:
    """The fields in which a recipe's model differs from that of a `config.json`."""
    ours, theirs = copy.deepcopy(config), copy.deepcopy(config)
    model = ours.task.model
    model.num_kv_heads = model.num_kv_heads if model.num_kv_heads != model.num_heads else None
    size = model.dims_per_head
    model.dims_per_head = size if size is not None and size * model.num_heads != model.model_dims else None
    for path, value in model_values(huggingface).items():
        assign(theirs, f"{MODEL}.{path}", value)
    a, b = ({p: x for p, x in plain_values(one).items() if p.startswith(MODEL)} for one in (ours, theirs))
    return [
        f"{path.removeprefix(MODEL + '.')} is {a.get(path)!r}, not {b.get(path)!r}"
        for path in sorted(a.keys() | b.keys())
        if path.rpartition(".")[2] not in _UNRELATED and ".params_init." not in path and a.get(path) != b.get(path)
    ]


def _new_config(model: fdl.Config) -> dict[str, Any]:
    """The keys of the family that is nearest to a model."""
    patterned = issubclass(fdl.get_callable(model.stack), PatternedStack)  # pyrefly: ignore
    block = model.stack.turns[0] if patterned else model.stack.block
    attention, feed_forward = block.attention, block.feed_forward
    has_experts = fdl.get_callable(feed_forward) is MoeFeedForward
    if model.position is not None and fdl.get_callable(model.position) is LearnedPositions:
        return _new_gpt2(model)
    kind = "llama" if attention.window is None else "mistral"
    kind = "qwen3" if attention.qk_norm is not None else "mixtral" if has_experts else kind
    kind = "gemma2" if patterned else kind
    size = model.dims_per_head or model.model_dims // model.num_heads
    found = {
        "architectures": [FAMILIES[kind].architecture],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dims,
        "intermediate_size": model.hidden_dims,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "head_dim": size,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.final_norm.epsilon,
        "tie_word_embeddings": model.head is None,
        "hidden_act": "silu",
    }
    if attention.rotary is not None:
        found |= _new_rope(attention.rotary)
    if kind in ("mistral", "mixtral", "gemma2"):
        found["sliding_window"] = attention.window
    if has_experts:
        found["num_local_experts"] = feed_forward.num_experts
        found["num_experts_per_tok"] = feed_forward.num_experts_per_token
    if kind == "gemma2":
        found["hidden_act"] = found["hidden_activation"] = _GELU[0]
        found["attn_logit_softcapping"] = attention.logit_cap
        found["final_logit_softcapping"] = (model.embedding if model.head is None else model.head).logit_cap
        scale = attention.query_scale
        found["query_pre_attn_scalar"] = size if scale is None else round(scale**-2)
    return found


def _new_rope(rotary: fdl.Partial) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": rotary.max_timescale}
    scaling = rotary.scaling
    if scaling is None:
        return found
    if fdl.get_callable(scaling) is LinearScaling:
        return found | {"rope_scaling": {"rope_type": "linear", "factor": scaling.factor}}
    if fdl.get_callable(scaling) is Llama31Scaling:
        factors = {key: getattr(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        length = {"original_max_position_embeddings": scaling.original_max_seq_len}
        return found | {"rope_scaling": {"rope_type": "llama3", **factors, **length}}
    return found


def _new_gpt2(model: fdl.Config) -> dict[str, Any]:
    return {
        "architectures": [FAMILIES["gpt2"].architecture],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.position.num_positions or model.max_seq_len,
        "n_embd": model.model_dims,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.hidden_dims,
        "layer_norm_epsilon": model.final_norm.epsilon,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }
