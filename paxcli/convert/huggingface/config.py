"""Converts a Hugging Face `config.json` to the values of a recipe's model, and back."""

from __future__ import annotations

import copy
import importlib.resources
import math
import operator
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import fiddle as fdl
import yaml

from paxcli.config.assign import assign
from paxcli.config.values import plain_values
from paxcli.convert.runs import layer_kinds
from paxcli.errors import ConfigError, DataError
from paxcli.layers.attention.latent_attention import LatentAttention
from paxcli.layers.block import ParallelBlock
from paxcli.layers.feed_forward import FeedForward
from paxcli.layers.layer_norm import LayerNorm
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.positions import LearnedPositions

MODEL = "task.model"
_LONGEST = 8192  # rows of a model with a longer context are this long, unless the user sets `max_seq_len`
_LOCAL, _CHUNKED, _GLOBAL = "sliding_attention", "chunked_attention", "full_attention"
_SAME_FOR_TEXT = {"qwen3_vl_text": "qwen3"}  # `model_type` of a text decoder -> of one that computes the same
_ABOVE_TEXT = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")  # keys beside `text_config`
_LATENT_EPSILON = 1e-6  # of the norms of DeepSeek's latents, whatever `rms_norm_eps` is


def read_data(name: str) -> dict[str, Any]:
    """The content of a file in `data/`."""
    return yaml.safe_load((importlib.resources.files("paxcli.convert.huggingface") / "data" / name).read_text("utf-8"))


FAMILIES = {kind: SimpleNamespace(**fields) for kind, fields in read_data("families.yaml").items()}
"""Families of models by `model_type`; `data/families.yaml` describes the fields."""

_SCALINGS = read_data("rope_scalings.yaml")


def text_decoder(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The family of a model, and its `config.json`; for a multimodal model, those of its text decoder.

    Raises:
      ConfigError: Pax does not import this architecture; names what it lacks.
    """
    text: dict[str, Any] = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
    kind = str(text.get("model_type"))
    kind = _SAME_FOR_TEXT.get(kind, kind)
    if kind not in FAMILIES:
        return family_of(config), config
    above = {key: config[key] for key in _ABOVE_TEXT if key in config}
    return kind, {**text, **above, "model_type": kind, "architectures": [FAMILIES[kind].architecture]}


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
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        problem = f"Its weights are quantized ({method}), and pax imports weights in float32, bfloat16 or float16."
        hint = "Import the original weights, or save these in bfloat16: see the page Weights of Hugging Face."
        raise ConfigError(problem, hint)
    theirs, ignored = _renamed_and_ignored(family)
    given = {family.names.get(key, key): value for key, value in config.items() if key not in ignored}
    full = {**family.defaults, **given}
    if "num_local_experts" in config:  # as transformers 5 writes `num_experts`
        full["num_experts"] = config["num_local_experts"]
    for key, allowed in {"is_causal": [True], "hidden_act": [*family.activations], **family.required}.items():
        if full.setdefault(key, allowed[0]) not in allowed:
            problem = f"{theirs.get(key, key)}={full[key]!r} is not supported in {kind}."
            raise ConfigError(problem, f"Supported: {allowed[0]!r}.")
    try:
        if kind == "gpt2":
            full["intermediate_size"] = full["intermediate_size"] or 4 * full["hidden_size"]
        values = {field: full[key] for key, field in family.sizes.items()} | _values(kind, full)
    except KeyError as error:
        missing = theirs.get(error.args[0], error.args[0])
        raise DataError(f"config.json has no {missing!r}.", "Use the file that belongs to the weights.") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        raise DataError(f"config.json is not that of a {kind}: {error}.", "Download it again.") from None
    dtype = config.get("dtype", config.get("torch_dtype"))
    return values | {"fprop_dtype": "float32" if dtype in (None, "float32") else "bfloat16"}


def _renamed_and_ignored(family: SimpleNamespace) -> tuple[dict[str, str], set[str]]:
    """Llama's keys → the family's, where they differ; and the keys that `transformers` does not read for the family."""
    theirs = {ours: key for key, ours in family.names.items()}
    return theirs, {*read_data("keys_of_some_families.yaml")} - family.defaults.keys()


def _values(kind: str, c: Mapping[str, Any]) -> dict[str, Any]:
    family = FAMILIES[kind]
    traits, latent = family.traits, bool(family.attention)
    heads, dims, gemma = c["num_attention_heads"], c["hidden_size"], "gemma" in traits
    size = c["qk_nope_head_dim"] + c["qk_rope_head_dim"] if latent else c.get("head_dim") or dims // heads
    kv_heads = c.get("num_key_value_heads") or heads
    norm = {"": family.norm, "epsilon": c["rms_norm_eps"], "direct_scale": not gemma}
    dense = {"": "FeedForward", "activation": family.activations[c["hidden_act"]], "gated": True, "use_bias": False}
    switched = {path: c[key] for key, paths in family.switches.items() for path in paths}
    of_block = family.of_block | switched | (family.parallel if c.get("use_parallel_residual") else {})

    def block(window: int | None, is_sparse: bool, rotates: bool) -> dict[str, Any]:
        attention = _latent_attention(family, c) if latent else _attention(family, c, window, rotates, norm)
        attention["rotary"] = _rotary(family, c, is_local=window is not None) if rotates else None
        feed_forward = _experts(family, c) if is_sparse else dense
        return {"norm": norm, "attention": attention, "feed_forward": feed_forward, **of_block}

    kinds, first = _interleaved_kinds(kind, c), c.get("first_k_dense_replace") or 0
    if first >= c["num_hidden_layers"]:
        kinds, first = [(None, False, True)], 0  # all are dense
    if first or len(kinds) > 1:
        turns = {str(i): block(*one) for i, one in enumerate(kinds)}
        stack = {"": "PatternedStack", "turns": {"": ["TransformerBlock"] * len(kinds), **turns}}
        stack["scan"] = (c["num_hidden_layers"] - first) % len(kinds) == 0
    else:
        stack = {"": "Stack", "block": {"": "TransformerBlock", **block(*kinds[0])}}
    if first:
        stack |= {"num_first": first, "first": {"": "TransformerBlock", **block(None, False, True)}}
    cap = {"logit_cap": c["final_logit_softcapping"]} if "final_logit_softcapping" in c else {}
    is_tied, of_head, positions = c["tie_word_embeddings"], family.of_head | cap, c["max_position_embeddings"]
    of_logits = {"scale_logits_sqrt_depth": False, "logit_cap": None} | of_head if is_tied else {}
    model = {
        "max_seq_len": min(positions, _LONGEST),
        "num_kv_heads": kv_heads if kv_heads != heads else None,
        "dims_per_head": size if size * heads != dims else None,
        "position": {"": "LearnedPositions", "num_positions": positions} if "positions" in traits else None,
        "embedding": {"scale_sqrt_depth": gemma} | of_logits,
        "head": None if is_tied else {"": "OutputHead"} | of_head,
        "final_norm": norm,
        "stack": stack | {"remat_policy": "nothing"},
    }
    return _by_path(model)


def _by_path(template: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Path → plain value of nested templates; the name of a template's class is under its empty key."""
    values: dict[str, Any] = {}
    for field, value in template.items():
        path = ".".join(filter(None, (at, field)))
        values |= _by_path(value, path) if isinstance(value, Mapping) else {path: value}
    return values


def _attention(
    family: SimpleNamespace, c: Mapping[str, Any], window: int | None, rotates: bool, norm: Mapping[str, Any]
) -> dict[str, Any]:
    traits, values = family.traits, {"window": window, **family.of_attention}
    if "query_pre_attn_scalar" in c:
        scalar, size = c["query_pre_attn_scalar"], c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        values["query_scale"] = scalar**-0.5 if scalar != size else None
        values["logit_cap"] = c["attn_logit_softcapping"]
    if "qk_norm" in traits:
        values["qk_norm"] = norm
    if "chunks" in traits and rotates:
        values["chunked"] = window is not None
        if c["use_qk_norm"]:
            values["qk_norm"] = {**norm, "has_scale": False}
    elif "chunks" in traits and c["attn_temperature_tuning"]:
        values |= {"temperature_growth": c["attn_scale"], "temperature_length": c["floor_scale"]}
    return values


def _latent_attention(family: SimpleNamespace, c: Mapping[str, Any]) -> dict[str, Any]:
    scaling, size = _rope(c), c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    sharper = scaling.get("mscale_all_dim") if _rope_type(scaling) != "default" else None
    return {
        "": "LatentAttention",
        **{field: c[key] for key, field in family.attention.items()},
        "latent_norm": {"": "RmsNorm", "epsilon": _LATENT_EPSILON, "direct_scale": True},
        "query_scale": size**-0.5 * _yarn_factor(scaling["factor"], sharper) ** 2 if sharper else None,
    }


def _interleaved_kinds(kind: str, c: Mapping[str, Any]) -> list[tuple[int | None, bool, bool]]:
    """The window of each of the interleaved kinds of layers, whether it has experts, and whether it has RoPE."""
    family, types, window = FAMILIES[kind], c.get("layer_types"), c["sliding_window"]
    layers, step = range(c["num_hidden_layers"]), c.get("interleave_moe_layer_step", 1)
    sparse = c.get("moe_layers") if family.experts else ()
    sparse = layers[step - 1 :: step] if sparse is None else sparse
    period = c.get("sliding_window_pattern")  # as transformers 4 writes Gemma 3's, where it has no `layer_types`
    pattern = [(i + 1) % period > 0 for i in layers] if period else family.pattern or ["window" in family.traits]
    local = [one == _LOCAL for one in types] if types else pattern
    every = c.get("no_rope_layer_interval")
    rope = "positions" not in family.traits
    rotated = [rope] * len(layers) if every is None else c["no_rope_layers"] or [(i + 1) % every for i in layers]
    if "chunks" in family.traits:
        window, local = c["attention_chunk_size"], rotated
    kinds = [(window if local[i % len(local)] else None, i in sparse, bool(rotated[i])) for i in layers]
    if types and types != _layer_types(family, [window for window, *_ in kinds]):
        hint = "Import a model whose pattern of layers repeats."
        raise ConfigError(f"layer_types={types} of {kind} is not a pattern that pax has.", hint)
    sizes = range(len(family.pattern or (1,)), len(kinds))
    return next((kinds[:n] for n in sizes if all(x == kinds[i % n] for i, x in enumerate(kinds))), kinds)


def _layer_types(family: SimpleNamespace, windows: list[int | None]) -> list[str]:
    return [_GLOBAL if window is None else _CHUNKED if "chunks" in family.traits else _LOCAL for window in windows]


def _rope(c: Mapping[str, Any]) -> dict[str, Any]:
    return c.get("rope_parameters") or c.get("rope_scaling") or {}


def _rope_type(scaling: Mapping[str, Any]) -> str:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _yarn_factor(factor: float, sharpness: float = 1.0) -> float:
    return 0.1 * sharpness * math.log(factor) + 1 if factor > 1 else 1.0


def _rotary(family: SimpleNamespace, c: Mapping[str, Any], is_local: bool) -> dict[str, Any]:
    traits, scaling = family.traits, _rope(c)
    if _GLOBAL in scaling:
        scaling = scaling[_LOCAL if is_local else _GLOBAL]
    elif is_local and "global_scaling" in traits:  # as transformers 4 writes it
        scaling = {"rope_theta": c.get("rope_local_base_freq", c["rope_theta"])}
    kind = _rope_type(scaling)
    values: dict[str, Any] = {"": "Rotary", "max_timescale": float(scaling.get("rope_theta", c["rope_theta"]))}
    fraction = scaling.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    if fraction != 1 and "partial_rotary_factor" not in family.defaults:
        hint = "Remove it from config.json, if the model was trained without."
        raise ConfigError(f"transformers ignores partial_rotary_factor={fraction} in {c['model_type']}.", hint)
    values["fraction"] = fraction
    if kind == "default":
        return values
    if kind not in _SCALINGS:
        raise ConfigError(f"rope_type={kind} is not supported.", f"Supported are default, {', '.join(_SCALINGS)}.")
    fields = _SCALINGS[kind]["fields"]
    given = {field: scaling[key] for key, field in fields.items() if scaling.get(key) is not None}
    if "original_max_position_embeddings" in fields:
        inside = given.get("original_max_seq_len", c["max_position_embeddings"])
        given["original_max_seq_len"] = c.get("original_max_position_embeddings") or inside  # as transformers reads it
    if kind == "yarn" and "attention_factor" not in given and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        factor, divisor = (_yarn_factor(scaling["factor"], scaling[key]) for key in ("mscale", "mscale_all_dim"))
        given["attention_factor"] = factor / divisor
    if "chunks" in traits and c["use_qk_norm"] and "attention_factor" in fields:
        given["attention_factor"] = 1.0  # transformers normalizes what it has rotated, which cancels any factor
    numbers = {field: x if field in ("original_max_seq_len", "truncate") else float(x) for field, x in given.items()}
    return values | {"scaling": {"": _SCALINGS[kind]["class"], **numbers}}


def _experts(family: SimpleNamespace, c: Mapping[str, Any]) -> dict[str, Any]:
    values = {"": "MoeFeedForward"} | {field: c[key] for key, field in family.experts.items()} | family.of_experts
    if c.get("topk_method") == "greedy":
        values |= {"num_groups": 1, "groups_per_token": 1}
    if family.shared is not None:
        values["shared_dims"] = c[family.shared] * (c.get("n_shared_experts", 1) or 0) or None
    return values


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
        return {**carried, ("torch_dtype" if "torch_dtype" in carried else "dtype"): dtype}
    found = _new_config(config.task.model) | {"torch_dtype": dtype}
    if differences := differing_fields(config, found):
        nearest, listed = found["architectures"][0], "; ".join(differences[:5])
        problem = f"{nearest}, the nearest architecture, differs from this model: {listed}."
        raise ConfigError(problem, f"Pax exports {', '.join(FAMILIES)}.")
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
    a = {path: "Stack" if value == "PipelinedStack" else value for path, value in a.items()}  # they compute the same
    return [
        f"{path.removeprefix(MODEL + '.')} is {a.get(path)!r}, not {b.get(path)!r}"
        for path in sorted(a.keys() | b.keys())
        if path.rpartition(".")[2] not in unrelated and ".params_init." not in path and a.get(path) != b.get(path)
    ]


def is_latent(attention: fdl.Buildable) -> bool:
    """Whether this is the template of latent attention."""
    return fdl.get_callable(attention) is LatentAttention


def has_experts(block: fdl.Buildable) -> bool:
    """Whether this is the template of a layer with experts."""
    return fdl.get_callable(block.feed_forward) is MoeFeedForward


def _new_config(model: fdl.Config) -> dict[str, Any]:
    """The keys of the family that is nearest to a model."""
    blocks, num_first = layer_kinds(model)
    rotated = [one.attention for one in blocks if one.attention.rotary is not None] or [blocks[0].attention]
    feed_forward = next((one.feed_forward for one in blocks if has_experts(one)), blocks[0].feed_forward)
    latent, alternating, sparse = is_latent(rotated[0]), len(blocks) > 1, any(map(has_experts, blocks))
    attention = next((one for one in rotated if latent or one.window is None), rotated[0])
    local = next((one for one in blocks if not latent and one.attention.window is not None), blocks[0])
    kind = _nearest(model, local, alternating, sparse)
    family = FAMILIES[kind]
    unused = family.defaults["sliding_window"] if family.pattern else None  # transformers needs one with `layer_types`
    size = fdl.build(model).head_dims
    # The default of transformers' config class may be outside the vocabulary; the model would not load.
    found: dict[str, Any] = {"architectures": [family.architecture], "model_type": kind, "pad_token_id": None}
    found |= {key: allowed[0] for key, allowed in family.required.items()}
    found |= {key: getattr(model, field) for key, field in family.sizes.items()}
    found |= {key: operator.attrgetter(paths[0])(local) for key, paths in family.switches.items()}
    acts = (key for key, name in family.activations.items() if name == feed_forward.activation)
    found |= {
        "hidden_act": next(acts, [*family.activations][0]),
        "use_parallel_residual": fdl.get_callable(local) is ParallelBlock,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "head_dim": size,
        "max_position_embeddings": kind == "gpt2" and model.position.num_positions or model.max_seq_len,
        "rms_norm_eps": model.final_norm.epsilon,
        "tie_word_embeddings": model.head is None,
        "sliding_window": None if latent else local.attention.window or unused,
    }
    if attention.rotary is not None:
        found |= _new_rope(attention.rotary)
        rotary = next((one.rotary for one in rotated if not latent and one.window is not None), attention.rotary)
        sliding, full = ({"rope_type": "default", "rope_theta": x.max_timescale} for x in (rotary, attention.rotary))
        full |= found.get("rope_scaling", {})
        if "global_scaling" in family.traits:  # transformers 5 ignores it in sliding windows
            found["rope_parameters"] = {_LOCAL: sliding, _GLOBAL: full}
        found["rope_local_base_freq"] = rotary.max_timescale
        if "partial_rotary_factor" in family.defaults:
            found["partial_rotary_factor"] = rotary.fraction
        if "rope_scaling" in family.defaults:  # without one, transformers uses its default
            found = {"rope_scaling": None, **found, "rope_parameters": full}
    if sparse:
        found |= {key: getattr(feed_forward, field) for key, field in family.experts.items()}
    if latent:
        found |= _new_latent(model, attention, feed_forward, size)
        found["first_k_dense_replace"] = num_first if sparse else model.num_layers
    if sparse and "shared_expert_intermediate_size" in family.defaults:
        found["shared_expert_intermediate_size"] = feed_forward.shared_dims or model.hidden_dims
    layers = [blocks[i % len(blocks)] for i in range(model.num_layers)]
    if alternating or family.pattern:
        found["layer_types"] = _layer_types(family, [one.attention.window for one in layers])
    found["no_rope_layers"] = [int(one.attention.rotary is not None) for one in layers]
    if "chunks" in family.traits:
        found |= _new_chunks(layers, local.attention)
    if "query_pre_attn_scalar" in family.defaults:
        found["attn_logit_softcapping"] = attention.logit_cap
        found["final_logit_softcapping"] = (model.embedding if model.head is None else model.head).logit_cap
        scale = attention.query_scale
        found["query_pre_attn_scalar"] = size if scale is None else round(scale**-2)
    theirs, ignored = _renamed_and_ignored(family)
    return {theirs.get(key, key): value for key, value in found.items() if key not in ignored}


def _new_chunks(layers: list[fdl.Config], chunked: fdl.Partial) -> dict[str, Any]:
    """Llama 4's keys for its chunks, and for layers with and without experts."""
    tuned = next((one.attention for one in layers if one.attention.temperature_growth is not None), None)
    found = {} if tuned is None else {"attn_scale": tuned.temperature_growth, "floor_scale": tuned.temperature_length}
    return found | {
        "attention_chunk_size": chunked.window,
        "attn_temperature_tuning": tuned is not None,
        "moe_layers": [i for i, one in enumerate(layers) if has_experts(one)],
        "use_qk_norm": chunked.qk_norm is not None,
    }


def _nearest(model: fdl.Config, block: fdl.Config, alternating: bool, sparse: bool) -> str:
    attention = block.attention
    if model.position is not None and fdl.get_callable(model.position) is LearnedPositions:
        return "gpt2"
    if is_latent(attention):
        return "deepseek_v3" if sparse and block.feed_forward.scoring == "sigmoid" else "deepseek_v2"
    layer_norm = fdl.get_callable(block.norm) is LayerNorm and fdl.get_callable(block.feed_forward) is FeedForward
    is_parallel = fdl.get_callable(block) is ParallelBlock
    is_partial = attention.rotary is not None and attention.rotary.fraction != 1
    kinds = [
        ("stablelm", layer_norm and block.feed_forward.gated),
        ("phi", layer_norm and is_parallel and block.shared_norm),
        ("gpt_neox", layer_norm and (is_parallel or is_partial or attention.use_bias != block.feed_forward.use_bias)),
        ("starcoder2", layer_norm),
        ("olmo2" if attention.window is None else "olmo3", not block.pre_norms),
        ("gpt_oss", attention.sinks),
        ("llama4_text", attention.chunked),
        ("gemma2" if attention.qk_norm is None else "gemma3_text", block.post_norms),
        ("smollm3", alternating),
        ("gemma", model.embedding.scale_sqrt_depth),
        ("olmoe", attention.qk_norm_joint),
        ("qwen3_moe" if sparse else "qwen3", attention.qk_norm is not None),
        ("qwen2_moe" if sparse else "qwen2", attention.use_bias),
        ("mixtral", sparse),
        ("phi3", is_partial),
        ("mistral", attention.window is not None),
    ]
    return next((kind for kind, fits in kinds if fits), "llama")


def _new_latent(model: fdl.Config, attention: fdl.Config, feed_forward: fdl.Config, size: int) -> dict[str, Any]:
    found = {key: getattr(attention, field) for key, field in FAMILIES["deepseek_v3"].attention.items()}
    found |= {"qk_nope_head_dim": size - attention.rotary_dims, "head_dim": attention.rotary_dims}
    found["v_head_dim"] = attention.value_dims_per_head or found["qk_nope_head_dim"]
    scaling = attention.rotary.scaling
    if attention.query_scale is not None and scaling is not None:
        mscale = ((attention.query_scale * size**0.5) ** 0.5 - 1) / (0.1 * math.log(scaling.factor))
        found["rope_scaling"] = _new_rope(attention.rotary)["rope_scaling"] | {"mscale_all_dim": round(mscale, 6)}
    if fdl.get_callable(feed_forward) is MoeFeedForward:  # in all kinds of layers but the first ones
        dims = feed_forward.expert_dims or model.hidden_dims
        found |= {"moe_intermediate_size": dims, "n_shared_experts": (feed_forward.shared_dims or 0) // dims}
        if feed_forward.scoring != "sigmoid":
            found["topk_method"] = "greedy" if feed_forward.num_groups == 1 else "group_limited_greedy"
    return found


def _new_rope(rotary: fdl.Partial) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": rotary.max_timescale}
    for kind, known in _SCALINGS.items():
        if rotary.scaling is not None and fdl.get_callable(rotary.scaling).__name__ == known["class"]:
            values = {key: getattr(rotary.scaling, field) for key, field in known["fields"].items()}
            found["rope_scaling"] = {"rope_type": kind} | {k: x for k, x in values.items() if x is not None}
    return found
