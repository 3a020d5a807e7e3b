"""Converts a recipe to the keys of a MaxText launch."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxcli.config.values import plain_values
from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.launch import Launch, Pair
from paxcli.convert.maxtext.launch_to_recipe import BASE_RECIPE, convert
from paxcli.convert.maxtext.remat_map import remat_keys
from paxcli.convert.maxtext.settings import LAST_DAY
from paxcli.convert.maxtext.training_map import PAIR
from paxcli.convert.runs import recipe_with
from paxcli.errors import ConfigError
from paxcli.mesh.mesh import axis_sizes
from paxcli.training.experiment import num_devices

_MODEL, _TRAIN = "task.model", "task.train"
_BLOCK = f"{_MODEL}.stack.block"
_LEARNER = f"{_TRAIN}.learner"
_NUM_KINDS, _LOCAL_TIMESCALE = "number of layer kinds", "local timescale"
_AXES = ("data", "fsdp", "tensor", "context", "expert")
_DECAY_START = f"{_LEARNER}.schedule.decay_start"


def to_maxtext(config: fdl.Config) -> tuple[dict[str, str], list[str]]:
    """Keys with which MaxText of `LAST_DAY` trains what a recipe does, and the paths that it has no key for.

    Raises:
      ConfigError: MaxText cannot express the model or its learner.
    """
    values = plain_values(config)
    values[f"{_MODEL}.dims_per_head"] = _head_dim(values)
    if values.get(_DECAY_START, ...) == values.get(f"{_LEARNER}.schedule.warmup_steps"):
        values[_DECAY_START] = None  # means the same
    found = _keys(_in_one_block(values), num_devices(config))
    groups = {alias["now"][0]: key for key, alias in tables.part("aliases").items() if "." in key}  # as `dpo.dpo_beta`
    keys = {groups.get(key, key): _text(value) for key, value in found.items() if value is not None}
    launch = Launch(1, pairs=[Pair(key, value, 1) for key, value in keys.items()])
    again = plain_values(recipe_with(BASE_RECIPE, convert(launch, "maxtext", date=LAST_DAY).values))
    parts = {name: tuple(paths) for name, paths in tables.part("back").items()}
    differing = [path for path in {**values, **again} if values.get(path, ...) != again.get(path, ...)]
    differing = [p for p in differing if not p.startswith(parts["ignored"]) and not p.endswith(parts["may_differ"])]
    if refused := [p for p in differing if p.startswith(parts["needed"]) and not p.endswith(parts["reported"])]:
        path = refused[0]
        problem = f"MaxText cannot express {len(refused)} values of this recipe: {', '.join(refused[:6])}."
        raise ConfigError(problem, f"For example `{path}` is {values.get(path)!r}; MaxText's is {again.get(path)!r}.")
    return keys, differing


def command_line(keys: Mapping[str, str]) -> str:
    """A command that starts MaxText with these keys."""
    program = next(name for key, name in tables.part("trainers").items() if not key or keys.get(key) == "true")
    words = (f"{key}={shlex.quote(value) if value else ''}" for key, value in keys.items())
    return " \\\n  ".join([f"python3 -m maxtext.trainers.{program}", *words])


def decoder_block(config: fdl.Config) -> str:
    """The `decoder_block` of MaxText that computes what a recipe's model does."""
    return _block(_in_one_block(plain_values(config)))


def _head_dim(values: Mapping[str, Any]) -> int:
    dims, heads = values.get(f"{_MODEL}.model_dims", 0), values.get(f"{_MODEL}.num_heads", 1)
    return values.get(f"{_MODEL}.dims_per_head") or dims // heads


def _in_one_block(values: Mapping[str, Any]) -> dict[str, Any]:
    """Interleaved layers as one block: the last kind, with what differs in the first under keys of its own."""
    turns = [path for path in values if re.fullmatch(rf"{_MODEL}\.stack\.turns\.\d+", path)]
    if not turns:
        return dict(values)
    last = {path.replace(turns[-1], _BLOCK): value for path, value in values.items() if path.startswith(turns[-1])}
    first = f"{turns[0]}.attention"
    own = {
        f"{_BLOCK}.attention.window": values.get(f"{first}.window"),
        _NUM_KINDS: len(turns),
        _LOCAL_TIMESCALE: values.get(f"{first}.rotary.max_timescale"),
    }
    return {**values, **last, **own}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # some of MaxText's numbers have to be integers, and all of them may be
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _keys(values: Mapping[str, Any], devices: int) -> dict[str, Any]:
    get = values.get
    table = tables.table("recipe_keys").items()
    keys = {key: _their_value(get(path), *more) for path, (key, *more) in table if path in values}
    keys["base_num_kv_heads"] = get(f"{_MODEL}.num_kv_heads") or get(f"{_MODEL}.num_heads")
    keys["decoder_block"] = _block(values)
    if keys["decoder_block"] == "gemma2":
        keys["base_num_decoder_layers"] = get(f"{_MODEL}.num_layers", 0) // 2  # counted in pairs
    keys["local_rope_max_timescale"] = get(_LOCAL_TIMESCALE) if keys["decoder_block"] == "gemma3" else None
    if keys["decoder_block"] in ("gemma3", "olmo3"):
        keys["model_name"] = _named_model(keys)
    if keys["opt_type"] == "muon" and keys["decoder_block"] not in tables.part("blocks_with_muon"):
        keys["opt_type"] = "adamw"  # another optimizer, which `to_maxtext` refuses
    fields = tables.part("optimizers")[keys["opt_type"]][1]
    keys |= {key: get(f"{_LEARNER}.optimizer.{field}") for field, key in fields.items()}
    return keys | _parts(values) | _learning(values) | remat_keys(values) | _mesh(values) | _batch(values, devices)


def _their_value(value: Any, off: Any = None, kinds: Mapping[str, Any] | None = None) -> Any:
    """MaxText's value: `off` where the recipe has null, or none of the `kinds`."""
    theirs = value if kinds is None else kinds.get(value)
    return off if theirs is None else theirs


def _named_model(keys: Mapping[str, Any]) -> str | None:
    """The MaxText model of these sizes: MaxText supports some blocks only by a model's name."""
    sizes = ("base_num_decoder_layers", "base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim")
    wanted = {key: keys[key] for key in ("decoder_block", *sizes)}
    return next((name for name, model in tables.table("models").items() if wanted.items() <= model.items()), None)


def _block(values: Mapping[str, Any]) -> str:
    is_qwen = values.get(f"{_BLOCK}.attention.qk_norm") is not None
    is_qwen = is_qwen or values.get(f"{_BLOCK}.attention.query_scale") == _head_dim(values) ** -0.5
    if _NUM_KINDS in values:
        kinds = ((name, tables.turns(name) or []) for name in tables.blocks())
        return next((name for name, turns in kinds if len(turns) == values[_NUM_KINDS]), "gemma2")
    blocks = [
        ("default", values.get(_BLOCK) == "ParallelBlock"),
        ("gpt3", values.get(f"{_BLOCK}.norm") == "LayerNorm"),
        ("qwen2", values.get(f"{_BLOCK}.attention.use_bias")),
        ("qwen3_moe" if is_qwen else "mixtral", values.get(f"{_BLOCK}.feed_forward.num_experts") is not None),
        ("qwen3", is_qwen),
        ("gemma", values.get(f"{_BLOCK}.feed_forward.activation") == "gelu"),
    ]
    return next((block for block, fits in blocks if fits), "llama2")


def _parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the model and of its data whose values are not those of one field."""
    position, attention, feed_forward = f"{_MODEL}.position", f"{_BLOCK}.attention", f"{_BLOCK}.feed_forward"
    window, post_norms = values.get(f"{attention}.window"), values.get(f"{_BLOCK}.post_norms")
    scaling, factor = (values.get(f"{attention}.rotary.{name}") for name in ("scaling", "scaling.factor"))
    is_sft, is_dpo = (values.get("train_input") == name or None for name in ("ChatInput", "PreferenceInput"))
    names, files = values.get("train_input.column_map") or {}, values.get("train_input.files") or []
    names = names or ({name: name for name in PAIR} if is_dpo else {"": values.get("train_input.text_field")})
    columns = [names[name] for name in ("", *PAIR, "completion") if name in names]
    experts, dims = values.get(f"{feed_forward}.num_experts") is not None, values.get(f"{_MODEL}.hidden_dims")
    is_gated = experts or values.get(f"{feed_forward}.gated")
    rows = values.get(f"{position}.num_positions") or values.get(f"{_MODEL}.max_seq_len")
    return {
        "trainable_position_size": rows if values.get(position) == "LearnedPositions" else -1,
        "attention_type": "local_sliding" if window and _NUM_KINDS not in values else "global",
        "rope_factor": factor if scaling == "YarnScaling" else None,
        "rope_attention_scaling": values.get(f"{attention}.rotary.scaling.attention_factor", 1.0) is None or None,
        "attention_bias": values.get(f"{attention}.use_bias") if values.get(f"{_BLOCK}.norm") != "LayerNorm" else None,
        "rope_linear_scaling_factor": factor if scaling == "LinearScaling" else None,
        "use_post_attn_norm": post_norms is True,
        "base_mlp_dim": dims,
        "mlp_activations": [values.get(f"{feed_forward}.activation"), *["linear"] * bool(is_gated)],
        "base_moe_mlp_dim": dims if experts else None,
        "train_data_columns": columns if is_sft or is_dpo else None,
        "hf_train_files": files[0] if (is_sft or is_dpo) and len(files) == 1 else None,
        "use_sft": is_sft,
        "sft_train_on_completion_only": is_sft,
        "use_tunix_gradient_accumulation": is_dpo,  # else it reads a full batch for each microbatch
    }


def _learning(values: Mapping[str, Any]) -> dict[str, Any]:
    schedule, steps = f"{_LEARNER}.schedule", values.get(f"{_TRAIN}.num_train_steps") or 1
    schedule += ".schedules.0" if values.get(schedule) == "PiecewiseSchedule" else ""  # then MaxText's rate is 0
    aggregator = (values.get(f"task.loss_aggregator.loss_{name}") or [] for name in ("keys", "weights"))
    weights = dict(zip(*aggregator, strict=False))
    keys: dict[str, Any] = {"mtp_loss_scaling_factor": weights.get("mtp_loss")}
    keys["load_balance_loss_weight"] = weights.get("load_balance_loss")
    keys["learning_rate_final_fraction"] = values.get(f"{schedule}.min_ratio")
    if values.get(schedule) == "LinearRampupSqrtDecay":
        return {**keys, "lr_schedule_type": "rsqrt", "warmup_steps": values.get(f"{schedule}.warmup_steps")}
    length = (values.get(f"{schedule}.decay_end") or steps) + 1  # MaxText's last step has the final rate
    warmup = values.get(f"{schedule}.warmup_steps") or 0
    decay = length - (values.get(f"{schedule}.decay_start") or warmup)
    # MaxText rounds down to steps: half a step more gives the same numbers.
    fractions = [(part + 0.5) / length if 0 < part < length else part / length for part in (warmup, decay)]
    keys |= {"learning_rate_schedule_steps": length, "warmup_steps_fraction": fractions[0]}
    style = "linear" if values.get(schedule) == "LinearRampupPolynomialDecay" else "cosine"
    if style == "linear" or decay < length - warmup:
        keys |= {"lr_schedule_type": "wsd", "wsd_decay_style": style, "wsd_decay_steps_fraction": fractions[1]}
    return keys


def _mesh(values: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for group in ("ici", "dcn"):
        shape = values.get(f"mesh.{group}_mesh_shape")
        if shape is None and group == "ici":
            return {"ici_data_parallelism": -1, "ici_fsdp_parallelism": 1}
        sizes = axis_sizes(shape, None)
        keys |= {f"{group}_{axis}_parallelism": sizes[axis] for axis in _AXES}
        keys |= {f"{group}_pipeline_parallelism": sizes["stage"]} if sizes["stage"] > 1 else {}
    return keys


def _batch(values: Mapping[str, Any], devices: int) -> dict[str, Any]:
    slices, batch = values.get(f"{_TRAIN}.num_microbatches", 1), values.get(f"{_TRAIN}.global_batch_size") or 1
    rows = values.get(f"{_TRAIN}.percore_batch_size") or batch / devices
    tokens = int(rows / slices * values.get(f"{_MODEL}.max_seq_len", 0))
    chunk = values.get(f"{_MODEL}.loss_chunk")
    # The fewest tiles of at most `chunk` tokens; all are of one size, as in MaxText. None = one, its default.
    counts = range(math.ceil(tokens / chunk), tokens + 1) if isinstance(chunk, int) and chunk < tokens else ()
    tiles = next((count for count in counts if tokens % count == 0), None)
    return {"per_device_batch_size": rows / slices, "num_vocab_tiling": tiles}
