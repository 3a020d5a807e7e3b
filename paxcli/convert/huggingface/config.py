"""Converts a Hugging Face `config.json` to the values of a recipe's model, and back."""

from __future__ import annotations

import copy
import dataclasses
import importlib.resources
from collections.abc import Collection, Mapping
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
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models; `data/families.yaml` describes the fields."""

    architecture: str
    recipe: str
    traits: tuple[str, ...]
    sizes: Mapping[str, str]
    defaults: Mapping[str, Any]
    required: Mapping[str, list[Any]]
    pattern: tuple[bool, ...] | None = None


def read_data(name: str) -> dict[str, Any]:
    """The content of a file in `data/`."""
    package = importlib.resources.files("paxcli.convert.huggingface")
    return yaml.safe_load((package / "data" / name).read_text("utf-8"))


FAMILIES = {kind: Family(**fields) for kind, fields in read_data("families.yaml").items()}


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a `config.json`, a key of `FAMILIES`.

    Raises:
      ConfigError: Pax does not import this architecture; names what it lacks.
    """
    kind = config.get("model_type")
    if kind in FAMILIES:
        return str(kind)
    architectures = config.get("architectures") or [f"model_type {kind!r}"]
    lacks = read_data("unsupported.yaml").get(str(kind), "a conversion for it")
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
    full = {**family.defaults, **config}
    for key, allowed in family.required.items():
        if full.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"{key}={full[key]!r} is not supported in {kind}.", f"Supported: {allowed[0]!r}.")
    try:
        values = {field: full[key] for key, field in family.sizes.items()}
        values |= _gpt2_values(full) if kind == "gpt2" else _llama_values(kind, full)
    except KeyError as error:
        raise DataError(f"config.json has no {error}.", "Use the file that belongs to the weights.") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise DataError(f"config.json is not that of a {kind}: {error}.", "Download it again.") from None
    dtype = config.get("dtype", config.get("torch_dtype"))
    return values | {"fprop_dtype": "float32" if dtype == "float32" else "bfloat16"}


def _llama_values(kind: str, c: Mapping[str, Any]) -> dict[str, Any]:
    traits = FAMILIES[kind].traits
    heads, dims, gemma = c["num_attention_heads"], c["hidden_size"], "gemma" in traits
    size = c.get("head_dim") or dims // heads
    kv_heads = c.get("num_key_value_heads") or heads
    table = "embedding" if c["tie_word_embeddings"] else "head"
    values: dict[str, Any] = {
        "max_seq_len": min(c["max_position_embeddings"], _LONGEST),
        "hidden_dims": c.get("moe_intermediate_size") or c["intermediate_size"],
        "num_kv_heads": kv_heads if kv_heads != heads else None,
        "dims_per_head": size if size * heads != dims else None,
        "position": None,
        "embedding.scale_sqrt_depth": gemma,
        "head": None if c["tie_word_embeddings"] else "OutputHead",
    }
    if "final_logit_softcapping" in c:
        values[f"{table}.logit_cap"] = c["final_logit_softcapping"]
    norm = {"": "RmsNorm", ".epsilon": c["rms_norm_eps"], ".direct_scale": not gemma}
    values |= {f"final_norm{field}": value for field, value in norm.items()}
    windows = _windows(kind, c)
    blocks = [f"stack.turns.{i}" for i in range(len(windows))] if len(windows) > 1 else ["stack.block"]
    if len(windows) > 1:
        values |= {"stack": "PatternedStack", "stack.turns": ["TransformerBlock"] * len(windows)}
        values["stack.scan"] = c["num_hidden_layers"] % len(windows) == 0
    else:
        values |= {"stack": "Stack", "stack.block": "TransformerBlock"}
    values["stack.remat_policy"] = "nothing"
    for block, window in zip(blocks, windows, strict=True):
        attention = f"{block}.attention"
        values |= {f"{block}.norm{field}": value for field, value in norm.items()}
        values |= {f"{block}.post_norms": "post_norms" in traits, f"{attention}.window": window}
        if "no_pre_norms" in traits:
            values[f"{block}.pre_norms"] = False
        if "query_pre_attn_scalar" in c:
            scalar = c["query_pre_attn_scalar"]
            values[f"{attention}.query_scale"] = scalar**-0.5 if scalar != size else None
            values[f"{attention}.logit_cap"] = c["attn_logit_softcapping"]
        if "qkv_bias" in traits:
            values |= {f"{attention}.use_bias": True, f"{attention}.output_bias": False}
        if "qk_norm" in traits:
            values |= {f"{attention}.qk_norm{field}": value for field, value in norm.items()}
            values[f"{attention}.qk_norm_joint"] = "qk_norm_joint" in traits
        is_local = len(windows) > 1 and window is not None
        values |= {f"{attention}.rotary{field}": value for field, value in _rotary(c, is_local).items()}
        values |= {f"{block}.feed_forward{field}": value for field, value in _feed_forward(traits, c).items()}
    return values


def _windows(kind: str, c: Mapping[str, Any]) -> list[int | None]:
    """The sliding window of each of the interleaved kinds of layers."""
    family, types, window = FAMILIES[kind], c.get("layer_types"), c["sliding_window"]
    if family.pattern is not None:
        windows = [window if is_local else None for is_local in family.pattern]
    elif types:
        windows = [window if types[0] == _LOCAL else None]
    else:
        windows = [window if "window" in family.traits else None]
    if types and types != _layer_types(windows, c["num_hidden_layers"]):
        raise ConfigError(f"layer_types={types} of {kind} is not a pattern that pax has.")
    return windows


def _layer_types(windows: list[int | None], num_layers: int) -> list[str]:
    return [_GLOBAL if windows[i % len(windows)] is None else _LOCAL for i in range(num_layers)]


def _rotary(c: Mapping[str, Any], is_local: bool) -> dict[str, Any]:
    scaling = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if _GLOBAL in scaling:
        scaling = scaling[_LOCAL if is_local else _GLOBAL]
    elif is_local and "rope_local_base_freq" in c:  # as transformers 4 writes it
        scaling = {"rope_theta": c["rope_local_base_freq"]}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    values = {"": "Rotary", ".max_timescale": float(scaling.get("rope_theta", c["rope_theta"]))}
    fraction = scaling.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    if fraction != 1:
        values[".fraction"] = fraction
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


def _feed_forward(traits: Collection[str], c: Mapping[str, Any]) -> dict[str, Any]:
    if "experts" in traits:
        experts = c["num_local_experts"] if "num_local_experts" in c else c["num_experts"]
        return {"": "MoeFeedForward", ".num_experts": experts, ".num_experts_per_token": c["num_experts_per_tok"]}
    return {
        "": "FeedForward",
        ".activation": "gelu" if "gemma" in traits else "silu",
        ".gated": True,
        ".use_bias": False,
    }


def _gpt2_values(c: Mapping[str, Any]) -> dict[str, Any]:
    block = "stack.block"
    norm = {"": "LayerNorm", ".epsilon": c["layer_norm_epsilon"], ".direct_scale": True}
    return {
        "hidden_dims": c["n_inner"] or 4 * c["n_embd"],
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
    unrelated = read_data("unrelated_fields.yaml")
    a, b = ({p: x for p, x in plain_values(one).items() if p.startswith(MODEL)} for one in (ours, theirs))
    return [
        f"{path.removeprefix(MODEL + '.')} is {a.get(path)!r}, not {b.get(path)!r}"
        for path in sorted(a.keys() | b.keys())
        if path.rpartition(".")[2] not in unrelated and ".params_init." not in path and a.get(path) != b.get(path)
    ]


def _new_config(model: fdl.Config) -> dict[str, Any]:
    """The keys of the family that is nearest to a model."""
    patterned = issubclass(fdl.get_callable(model.stack), PatternedStack)  # pyrefly: ignore
    blocks = model.stack.turns if patterned else [model.stack.block]
    attention, feed_forward = blocks[-1].attention, blocks[0].feed_forward
    if model.position is not None and fdl.get_callable(model.position) is LearnedPositions:
        return _new_gpt2(model)
    has_experts = fdl.get_callable(feed_forward) is MoeFeedForward
    window = blocks[0].attention.window
    kind = _nearest(model, blocks[0], patterned, has_experts)
    size = model.dims_per_head or model.model_dims // model.num_heads
    found = _named_sizes(kind, model) | {
        "intermediate_size": model.hidden_dims,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "head_dim": size,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.final_norm.epsilon,
        "tie_word_embeddings": model.head is None,
        "hidden_act": "gelu_pytorch_tanh" if "gemma" in FAMILIES[kind].traits else "silu",
    }
    if attention.rotary is not None:
        found |= _new_rope(attention.rotary)
    if "sliding_window" in FAMILIES[kind].defaults:
        found["sliding_window"] = window
    if has_experts:
        found |= {"num_experts": feed_forward.num_experts, "num_local_experts": feed_forward.num_experts}
        found["num_experts_per_tok"] = feed_forward.num_experts_per_token
    if kind == "qwen3_moe":
        found |= {"moe_intermediate_size": model.hidden_dims, "norm_topk_prob": True}
    if patterned:
        found["hidden_activation"] = found["hidden_act"]
        found["layer_types"] = _layer_types([one.attention.window for one in blocks], model.num_layers)
        found["attn_logit_softcapping"] = attention.logit_cap
        found["final_logit_softcapping"] = (model.embedding if model.head is None else model.head).logit_cap
        scale = attention.query_scale
        found["query_pre_attn_scalar"] = size if scale is None else round(scale**-2)
    if kind == "gemma3_text":
        found["rope_local_base_freq"] = blocks[0].attention.rotary.max_timescale
    return found


def _nearest(model: fdl.Config, block: fdl.Config, patterned: bool, has_experts: bool) -> str:
    attention = block.attention
    if patterned:
        return "gemma2" if attention.qk_norm is None else "gemma3_text"
    if not block.pre_norms:
        return "olmo2"
    if model.embedding.scale_sqrt_depth:
        return "gemma"
    if attention.qk_norm is not None:
        return "qwen3_moe" if has_experts else "qwen3"
    if attention.use_bias:
        return "qwen2"
    return "mixtral" if has_experts else "llama" if attention.window is None else "mistral"


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


def _named_sizes(kind: str, model: fdl.Config) -> dict[str, Any]:
    family = FAMILIES[kind]
    sizes = {key: getattr(model, field) for key, field in family.sizes.items()}
    return {"architectures": [family.architecture], "model_type": kind, **sizes}


def _new_gpt2(model: fdl.Config) -> dict[str, Any]:
    return _named_sizes("gpt2", model) | {
        "n_positions": model.position.num_positions or model.max_seq_len,
        "n_inner": model.hidden_dims,
        "layer_norm_epsilon": model.final_norm.epsilon,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }
