"""MaxText's batch, optimizer, schedule, data and run as fields of pax's recipe."""

from __future__ import annotations

import datetime
import math

from paxcli.convert.maxtext.draft import Draft
from paxcli.convert.maxtext.remat_map import put_remat
from paxcli.errors import ConfigError

_TRAIN = "task.train"
_LEARNER = f"{_TRAIN}.learner"
_SCHEDULE = f"{_LEARNER}.schedule"
_OPTIMIZER = f"{_LEARNER}.optimizer"
_NEW_PARSER = datetime.date(2025, 11, 14)
_PACKED_ROWS = datetime.date(2023, 9, 12)
_GPT3_ROWS = 1536


def put_training(draft: Draft) -> None:
    """All but the model and the mesh.

    Raises:
      ConfigError: The optimizer or remat policy is none that pax has.
    """
    put_remat(draft)
    _put_batch(draft)
    steps = _put_steps(draft)
    _put_schedule(draft, steps)
    _put_optimizer(draft)
    _put_data(draft)
    _put_run(draft, steps)


def _put_batch(draft: Draft) -> None:
    settings = draft.settings
    rows, slices = settings["per_device_batch_size"], settings["gradient_accumulation_steps"]
    if rows <= 0 or slices < 1:
        raise ConfigError(
            f"per_device_batch_size={rows} with gradient_accumulation_steps={slices} is no batch.", "Both are positive."
        )
    keys = ("per_device_batch_size", "gradient_accumulation_steps")
    if draft.num_devices is not None and rows * slices != int(rows * slices):
        whole = int(draft.num_devices * rows) * slices
        if not whole:
            raise ConfigError(
                f"per_device_batch_size={rows} on {draft.num_devices} devices is not one row.", "Raise it."
            )
        draft.values[f"{_TRAIN}.percore_batch_size"] = None
        draft.put(f"{_TRAIN}.global_batch_size", whole, *keys)
    else:
        draft.put(f"{_TRAIN}.percore_batch_size", float(rows * slices), *keys)
    draft.put(f"{_TRAIN}.num_microbatches", slices, "gradient_accumulation_steps")


def global_batch(draft: Draft) -> int | None:
    """Rows of a step over all devices; None when their number is unknown."""
    if draft.num_devices is None:
        return None
    settings = draft.settings
    return int(draft.num_devices * settings["per_device_batch_size"]) * settings["gradient_accumulation_steps"]


def _put_steps(draft: Draft) -> int:
    settings = draft.settings
    steps = settings["steps"] if settings["steps"] > 0 else settings["learning_rate_schedule_steps"]
    if steps < 1:
        raise ConfigError(f"steps={settings['steps']} is no number of steps.", "Give `steps`.")
    draft.put(f"{_TRAIN}.num_train_steps", steps, "steps")
    return steps


def _put_schedule(draft: Draft, steps: int) -> None:
    settings, batch = draft.settings, global_batch(draft)
    era = settings.era
    if settings.model_name == "gpt3-175b" and not era.is_given and era.first < _NEW_PARSER <= era.last:
        draft.ask(f"The date: before {_NEW_PARSER} MaxText itself set the schedule of gpt3-175b; say `--date`.")
    if settings.model_name == "gpt3-175b" and settings.date < _NEW_PARSER:
        if batch is not None:
            return _put_gpt3_schedule(draft, batch)
        draft.ask("The schedule: MaxText derives that of gpt3-175b from the global batch; say `--topology`.")
    draft.put(f"{_LEARNER}.learning_rate", settings["learning_rate"], "learning_rate")
    if settings["lr_schedule_type"] == "rsqrt":
        draft.put(_SCHEDULE, "LinearRampupSqrtDecay")
        return draft.put(f"{_SCHEDULE}.warmup_steps", settings["warmup_steps"], "warmup_steps")
    if settings["lr_schedule_type"] != "cosine":
        raise ConfigError(f"lr_schedule_type={settings['lr_schedule_type']} cannot be carried over.", "Pax has cosine.")
    length = settings["learning_rate_schedule_steps"]
    length = length if length > 0 else steps
    warmup = int(length * settings["warmup_steps_fraction"])
    return _put_cosine(draft, warmup, length, steps)


def _put_cosine(draft: Draft, warmup: int, length: int, steps: int) -> None:
    """Up, down along a cosine, and after the schedule's end nothing: MaxText's rate is 0 there."""
    keys = ("learning_rate_schedule_steps", "steps")
    values = {
        "warmup_steps": (warmup, ("warmup_steps_fraction", *keys)),
        "decay_start": (warmup, ("warmup_steps_fraction", *keys)),
        "decay_end": (length, keys),
        "min_ratio": (draft.settings["learning_rate_final_fraction"], ("learning_rate_final_fraction",)),
    }
    path = _SCHEDULE
    if steps > length:
        draft.put(_SCHEDULE, "PiecewiseSchedule", *keys)
        draft.put(f"{_SCHEDULE}.schedules", ["LinearRampupCosineDecay", "PiecewiseConstant"], *keys)
        draft.put(f"{_SCHEDULE}.boundaries", [length], *keys)
        draft.put(f"{_SCHEDULE}.schedules.1.values", [0.0], *keys)
        path = f"{_SCHEDULE}.schedules.0"
    else:
        draft.put(_SCHEDULE, "LinearRampupCosineDecay")
    for name, (value, from_keys) in values.items():
        draft.put(f"{path}.{name}", value, *from_keys)


def _put_gpt3_schedule(draft: Draft, batch: int) -> None:
    """The rate and schedule that MaxText's code, until November 2025, gave this one model."""
    draft.put(f"{_LEARNER}.learning_rate", 2e-5 if batch <= 3584 else 3e-5, "model_name", "per_device_batch_size")
    steps = draft.values[f"{_TRAIN}.num_train_steps"]
    warmup, length = math.ceil(265 * _GPT3_ROWS / batch), math.ceil(108_600 * _GPT3_ROWS / batch)
    _put_cosine(draft, warmup, length, steps)


def _put_optimizer(draft: Draft) -> None:
    settings, kind = draft.settings, draft.settings["opt_type"]
    if kind not in ("adam", "adamw", "adam_pax", "sgd"):
        raise ConfigError(f"opt_type={kind} is not an optimizer that can be carried over.", "The nearest is adamw.")
    draft.put(_OPTIMIZER, {"adam_pax": "Adam", "sgd": "Sgd"}.get(kind, "AdamW"), "opt_type")
    threshold = settings["gradient_clipping_threshold"]
    draft.put(f"{_LEARNER}.clip_gradient_norm_to_value", threshold or None, "gradient_clipping_threshold")
    if kind == "sgd":
        return
    fields = {"beta1": "adam_b1", "beta2": "adam_b2", "epsilon": "adam_eps", "weight_decay": "adam_weight_decay"}
    if kind == "adam_pax":
        fields["epsilon_root"] = "adam_eps_root"
        draft.put(f"{_OPTIMIZER}.clip_threshold", None, "opt_type")
    elif settings["adam_eps_root"]:
        draft.near(f"adam_eps_root={settings['adam_eps_root']}: pax's AdamW has none.")
    for field, key in fields.items():
        draft.put(f"{_OPTIMIZER}.{field}", settings[key], key)
    if kind != "adam_pax" and settings["mu_dtype"] == "bfloat16":
        draft.put(f"{_OPTIMIZER}.mu_dtype", "bfloat16", "mu_dtype")
    elif settings["mu_dtype"] not in ("", "float32"):
        draft.near(f"mu_dtype={settings['mu_dtype']}: pax keeps the first moment in float32.")
    draft.put(f"{_OPTIMIZER}.decay_norms_and_biases", True, "adamw_mask")
    if settings["adamw_mask"]:
        draft.near(f"adamw_mask={settings['adamw_mask']}: pax decays every parameter, or all but norms and biases.")


def _put_data(draft: Draft) -> None:
    settings = draft.settings
    kind = settings["dataset_type"]
    if kind == "synthetic" or settings["reuse_example_batch"]:
        draft.put("train_input", "SyntheticInput", "dataset_type")
        if kind != "synthetic":
            draft.near("reuse_example_batch: MaxText repeats one batch of its data; rows here are made up.")
    elif kind in ("c4", "tfds"):
        draft.put("train_input", "C4Input", "dataset_type")
        draft.put("train_input.c4.tfds_name", settings["dataset_name"], "dataset_name")
        draft.put("train_input.c4.path", settings["dataset_path"] or None, "dataset_path")
        draft.put("train_input.c4.tokenizer_path", settings["tokenizer_path"] or None, "tokenizer_path")
        lacks = [key for key in ("dataset_path", "tokenizer_path") if not settings[key]]
        if lacks:
            draft.ask(
                f"The data: nothing says {' and '.join(lacks)}. Until then train with `--overlay synthetic-data`."
            )
    else:
        draft.put("train_input", "SyntheticInput", "dataset_type")
        draft.ask(f"The data: dataset_type={kind} is not carried over; rows are made up until you set `train_input`.")
    for key in ("hf_path", "hf_train_files", "grain_train_files", "hf_data_dir"):
        draft.drop(key, "set `train_input` to TextInput, and its `files`")
    draft.put(f"{_TRAIN}.random_seed", settings["init_weights_seed"], "init_weights_seed")
    draft.put("train_input.input_random_seed", settings["data_shuffle_seed"], "data_shuffle_seed")
    if settings.date < _PACKED_ROWS and kind != "synthetic":
        draft.near("The loss: MaxText of early 2023 divided by all positions, padding too; pax by those that count.")


def _put_run(draft: Draft, steps: int) -> None:
    settings = draft.settings
    draft.put(f"{_TRAIN}.summary_interval_steps", max(settings["log_period"], 1), "log_period")
    interval = settings["eval_interval"]
    draft.put(f"{_TRAIN}.eval_interval_steps", interval if interval > 0 else None, "eval_interval")
    if interval > 0:
        draft.ask("The evaluation: its data is not carried over; set `eval_inputs`.")
    if settings["enable_checkpointing"]:
        draft.put("checkpoint.save_interval_steps", max(settings["checkpoint_period"], 1), "checkpoint_period")
    else:
        draft.put("checkpoint.save_interval_steps", steps, "enable_checkpointing")
        draft.near("enable_checkpointing=false: pax always saves at the end of a run, and here only then.")
    kept = settings["max_num_checkpoints_to_keep"]
    draft.put("checkpoint.save_max_to_keep", kept if kept > 0 else None, "max_num_checkpoints_to_keep")
    draft.put("checkpoint.async_save", settings["async_checkpointing"], "async_checkpointing")
    draft.put("task.name", settings["run_name"] or "maxtext", "run_name")
    draft.drop("base_output_directory", "say it as `pax train --run-dir`")
    draft.drop("profiler", "say it as `pax train --profile-steps`")
    for key in ("load_parameters_path", "load_full_state_path"):
        draft.drop(key, "say it as --checkpoint, to begin a run with it")
    known = {key.strip() for row in draft.rows for key in row.maxtext.split(",")}
    silent = {
        "scale",
        "global_parameter_scale",
        "model_name",
        "override_model_config",
        "ici_fsdp_transpose_parallelism",
        "param_scan_axis",
    }
    silent |= {"enable_dropout", "compile_topology", "compile_topology_num_slices", "num_slices", "attention_type"}
    said = known | silent | {dropped.key for dropped in settings.dropped}
    for key in list(settings.values):
        setting = settings.values[key]
        if setting.origin in ("script", "environment") and key not in said and not _is_said(draft, key):
            draft.drop(key, "has no place in this recipe")


def _is_said(draft: Draft, key: str) -> bool:
    return any(text.startswith(key) for text in draft.approximated) or draft.settings[key] in ("", [], False, -1, 1, 0)
