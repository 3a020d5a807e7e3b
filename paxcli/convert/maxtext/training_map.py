"""MaxText's batch, optimizer, schedule, data and checkpoints as fields of a pax recipe."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.remat_map import set_remat
from paxcli.convert.maxtext.settings import Settings
from paxcli.convert.maxtext.yml import read_text
from paxcli.errors import ConfigError

_TRAIN = "task.train"
_LEARNER = f"{_TRAIN}.learner"
_SCHEDULE = f"{_LEARNER}.schedule"
_OPTIMIZER = f"{_LEARNER}.optimizer"
_GPT3_ROWS = 1536
_MIXTURE = "grain_train_mixture_config_path"
_INPUTS = {"use_sft": "ChatInput", "use_dpo": "PreferenceInput"}
PAIR = ("prompt", "chosen", "rejected")


def set_training(draft: Conversion) -> None:
    """Sets everything except the model and the mesh.

    Raises:
      ConfigError: Pax does not have the optimizer, the schedule or the remat policy; or a value makes no sense.
    """
    set_remat(draft)
    _set_batch(draft)
    settings, steps = draft.settings, draft.settings["steps"]
    steps = steps if steps > 0 else settings["learning_rate_schedule_steps"]
    if steps < 1:
        raise ConfigError(f"steps={settings['steps']} is not a number of steps.", "Give `steps`.")
    draft.set(f"{_TRAIN}.num_train_steps", steps, "steps")
    _set_schedule(draft, steps)
    _set_optimizer(draft)
    _set_data(draft)
    _set_run(draft, steps)


def _set_batch(draft: Conversion) -> None:
    settings = draft.settings
    rows, slices = settings["per_device_batch_size"], settings["gradient_accumulation_steps"]
    if rows <= 0 or slices < 1:
        problem = f"per_device_batch_size={rows} with gradient_accumulation_steps={slices} is not a batch size."
        raise ConfigError(problem, "Both have to be positive.")
    keys = ("per_device_batch_size", "gradient_accumulation_steps")
    if rows * slices == int(rows * slices):
        draft.set(f"{_TRAIN}.percore_batch_size", float(rows * slices), *keys)
    elif not draft.global_batch:
        problem = f"per_device_batch_size={rows} on {draft.num_devices or 'unknown'} devices is not a number of rows."
        raise ConfigError(problem, "Increase it, or give the devices: `--topology v4-128`, and `--slices`.")
    else:
        draft.values[f"{_TRAIN}.percore_batch_size"] = None
        draft.set(f"{_TRAIN}.global_batch_size", draft.global_batch, *keys)
    draft.copy(_TRAIN, "num_microbatches")
    if (tiles := settings["num_vocab_tiling"]) > 1:
        tokens = int(rows * settings["max_target_length"] / tiles)
        draft.set("task.model.loss_chunk", max(tokens, 1), "num_vocab_tiling")


def _set_schedule(draft: Conversion, steps: int) -> None:
    settings, batch = draft.settings, draft.global_batch
    era, new_parser = settings.era, tables.day_of("new_parser")
    if settings.model_name == "gpt3-175b" and era.first < new_parser <= era.last:
        draft.ask(f"The date: before {new_parser} MaxText's code fixed the schedule of gpt3-175b; give `--date`.")
    if settings.model_name == "gpt3-175b" and settings.date < new_parser:
        if batch is not None:
            return _set_gpt3_schedule(draft, batch, steps)
        draft.ask("The schedule: MaxText derives that of gpt3-175b from the global batch; give `--topology`.")
    draft.copy(_LEARNER, "learning_rate")
    if settings["lr_schedule_type"] == "rsqrt":
        draft.set(_SCHEDULE, "LinearRampupSqrtDecay")
        return draft.set(f"{_SCHEDULE}.warmup_steps", settings["warmup_steps"], "warmup_steps")
    length = settings["learning_rate_schedule_steps"] if settings["learning_rate_schedule_steps"] > 0 else steps
    warmup, is_wsd = int(length * settings["warmup_steps_fraction"]), settings["lr_schedule_type"] == "wsd"
    decay = int(length * settings["wsd_decay_steps_fraction"]) if is_wsd else length - warmup
    if warmup + decay > length:
        raise ConfigError(f"Warmup and decay are {warmup + decay} of {length} steps.", "Decrease their fractions.")
    return _set_decay(draft, warmup, decay, length, steps)


def _set_decay(draft: Conversion, warmup: int, decay: int, length: int, steps: int) -> None:
    """Linear warmup, decay in the last `decay` steps of the schedule, constant between, and 0 after the schedule.

    MaxText's decay reaches its final value one step after the schedule's last; since January 2026, at the last.
    """
    settings = draft.settings
    last = length if settings.date < tables.day_of("cosine_to_last_step") else max(length - 1, 1)
    keys = ("learning_rate_schedule_steps", "steps")
    chosen = ("lr_schedule_type", "wsd_decay_style") if settings["lr_schedule_type"] == "wsd" else ()
    is_linear = bool(chosen) and settings["wsd_decay_style"] == "linear"
    kind = "LinearRampupPolynomialDecay" if is_linear else "LinearRampupCosineDecay"
    path = f"{_SCHEDULE}.schedules.0" if steps > length else _SCHEDULE
    if steps > length:
        draft.set(_SCHEDULE, "PiecewiseSchedule", *keys)
        draft.set(f"{_SCHEDULE}.schedules", [kind, "PiecewiseConstant"], *chosen, *keys)
        draft.set(f"{_SCHEDULE}.boundaries", [length], *keys)
        draft.set(f"{_SCHEDULE}.schedules.1.values", [0.0], *keys)
    else:
        draft.set(_SCHEDULE, kind, *chosen)
    draft.set(f"{path}.warmup_steps", warmup, "warmup_steps_fraction", *keys)
    if length - decay > warmup:
        draft.set(f"{path}.decay_start", length - decay, "wsd_decay_steps_fraction", *keys)
    draft.set(f"{path}.decay_end", max(last, length - decay), *keys)
    # A linear decay of one step stays at its first value, in MaxText.
    ratio = settings["learning_rate_final_fraction"] if decay > is_linear else 1.0
    draft.set(f"{path}.min_ratio", ratio, "learning_rate_final_fraction")


def _set_gpt3_schedule(draft: Conversion, batch: int, steps: int) -> None:
    """The learning rate and schedule that MaxText's code fixed for this model until November 2025."""
    draft.set(f"{_LEARNER}.learning_rate", 2e-5 if batch <= 3584 else 3e-5, "model_name", "per_device_batch_size")
    warmup, length = math.ceil(265 * _GPT3_ROWS / batch), math.ceil(108_600 * _GPT3_ROWS / batch)
    _set_decay(draft, warmup, length - warmup, length, steps)


def _set_optimizer(draft: Conversion) -> None:
    settings = draft.settings
    name, fields, fixed = tables.part("optimizers")[settings["opt_type"]]
    draft.set(_OPTIMIZER, name, "opt_type")
    draft.copy(_LEARNER, "clip_gradient_norm_to_value")
    for field, key in fields.items():
        draft.set(f"{_OPTIMIZER}.{field}", settings[key], key)
    for field, value in fixed.items():
        draft.set(f"{_OPTIMIZER}.{field}", value, "opt_type")
    if name == "AdamW" and settings["mu_dtype"] == "bfloat16":
        draft.copy(_OPTIMIZER, "mu_dtype")
    elif name != "Sgd" and settings["mu_dtype"] not in ("", "float32"):
        draft.approximate(f"mu_dtype={settings['mu_dtype']}: pax keeps the first moment in float32.")


def _set_data(draft: Conversion) -> None:
    settings = draft.settings
    if settings["use_dpo"]:
        _set_dpo(draft)
    _set_input(draft, "train_input", "train")
    draft.copy(_TRAIN, "random_seed")
    draft.copy("train_input", "input_random_seed")
    if settings.date < tables.day_of("packed_rows") and settings["dataset_type"] != "synthetic":
        draft.approximate("The loss: MaxText of early 2023 counted padding as tokens; pax divides by real tokens.")


def _set_evaluation(draft: Conversion) -> None:
    draft.set("eval_inputs", ["TextInput"], "eval_interval")
    _set_input(draft, "eval_inputs.0", "eval")
    if draft.settings["eval_steps"] <= 0 and draft.values["eval_inputs.0"] == "SyntheticInput":
        return draft.ask(
            "The evaluation: set eval_steps. Synthetic data has no end; pax evaluates one batch each time."
        )
    draft.set("eval_inputs.0.reset_for_eval", draft.settings["eval_steps"] <= 0, "eval_steps")
    return draft.copy("eval_inputs.0", "eval_loop_num_batches")


def _set_dpo(draft: Conversion) -> None:
    draft.set("task.model.dpo", "Dpo", "use_dpo")
    draft.copy("task.model.dpo", "beta", "label_smoothing")
    draft.set("task.model.loss_chunk", None, "use_dpo")
    if draft.settings.date < tables.day_of("plain_dpo_beta"):
        beta = draft.settings["dpo_beta"]
        draft.set("task.model.dpo.beta", beta**2, "dpo_beta")
        draft.approximate(f"dpo_beta={beta}: MaxText of that date uses its square, as does `beta`.")


def _set_input(draft: Conversion, at: str, part: str) -> None:
    settings = draft.settings
    kind = "synthetic" if settings["reuse_example_batch"] and part == "train" else settings["dataset_type"]
    if settings["use_dpo"] or kind in tables.part("format_keys"):
        _set_records(draft, at, part)
    elif kind in ("c4", "tfds"):
        draft.set(at, "C4Input", "dataset_type")
        draft.copy(at, "c4.tfds_name", "c4.path", "c4.tokenizer_path", *["split_name"] * (part == "eval"))
        if lacks := [key for key in ("dataset_path", "tokenizer_path") if not settings[key]]:
            draft.ask(f"The data: set {' and '.join(lacks)}, or train with `--overlay synthetic-data`.")
    else:
        draft.set(at, "SyntheticInput", "dataset_type")
        if kind != "synthetic":
            draft.ask(f"The data: dataset_type={kind} is not supported: rows are synthetic. Set `{at}`.")


def _set_records(draft: Conversion, at: str, part: str) -> None:
    """Documents, conversations or pairs in files, of several patterns as a mixture."""
    settings, loader = draft.settings, draft.settings["dataset_type"]
    uses = [key for key in _INPUTS if settings[key]]
    name = _INPUTS[uses[0]] if uses else "TextInput"
    format_key = tables.part("format_keys").get(loader, "dataset_type")
    files_key = "dataset_path" if format_key == "dataset_type" else f"{loader}_{part}_files"
    files_key = _MIXTURE if files_key == "grain_train_files" and settings[_MIXTURE] else files_key
    keys = [files_key, *(["hf_eval_split"] if part == "eval" and settings["hf_eval_split"] else [])]
    kind = tables.part("formats").get(settings[format_key])
    files, is_dataset = settings[files_key], "/" in settings["hf_path"]
    if is_dataset and (loader == "hf") == bool(files):  # with `grain`, all files of the split
        files, keys = _files_in_dataset(settings, part, files), ["hf_path", *keys]
    sources = _weighted_files(files_key, files) if kind or "hf_path" in keys else []
    sources = [(f"{x.rstrip('/')}/*" if x.endswith("/") or Path(x).is_dir() else x, weight) for x, weight in sources]
    draft.set(at, "MixtureInput" if len(sources) > 1 else name, "dataset_type", *uses)
    paths = [f"{at}.inputs.{number}" for number in range(len(sources))] if len(sources) > 1 else [at]
    if len(sources) > 1:
        draft.set(f"{at}.inputs", [name] * len(sources), files_key)
        draft.set(f"{at}.weights", [weight for _, weight in sources], files_key)
        draft.approximate(f"{files_key}: MaxText's weights are shares of the documents, and pax's of the rows.")
    for path, (pattern, _) in zip(paths, sources or [(None, 0)], strict=True):
        draft.set(f"{path}.files", [pattern] if pattern else None, *keys)
        draft.set(f"{path}.format", kind, format_key)
        _set_texts(draft, path, f"{part}_data_columns")
    if not sources:
        named = ", ".join(f"{key}={settings[key]}" for key in keys if settings[key])
        instead = f" in place of {named}, which pax cannot read" if named else ""
        if is_dataset and loader == "hf":
            instead = f", such as `--set {at}.files='[{_files_in_dataset(settings, part)}]'`"
        synthetic = "" if settings["use_dpo"] else ", or train with `--overlay synthetic-data`"
        draft.ask(f"The data: set `{at}.files`{instead}{synthetic}.")
    if draft.values[f"{paths[0]}.tokenizer"] == "HuggingFaceTokenizer":
        draft.ask(f"The tokenizer: `--set tokenizer=hf:{settings['tokenizer_path'] or 'DIR'}`.")
    if uses:
        draft.ask("The start: give the trained model, with `pax train --from`.")


def _files_in_dataset(settings: Settings, part: str, files: str = "") -> str:
    """A pattern of files, or that of a split, in the dataset `hf_path`: of the Hub, or a local directory."""
    split = settings["train_split" if part == "train" else "hf_eval_split"] or "validation"
    split = files or f"**/*{split}*{'.parquet' * (settings['dataset_type'] == 'grain')}"
    root = "" if re.match(r"[./~]|\w+://", settings["hf_path"]) else "hf://datasets/"
    return files if re.match(r"/|\w+://", files) else f"{root}{settings['hf_path'].rstrip('/')}/{split}"


def _set_texts(draft: Conversion, path: str, key: str) -> None:
    """The columns of a text, a conversation, or a prompt and its answers; chat template, packing and tokenizer."""
    settings, columns = draft.settings, draft.settings[key]
    counts = "2 or 3" if settings["use_dpo"] else "1 or 2" if settings["use_sft"] else "1"
    if str(len(columns)) not in counts.split(" or "):
        raise ConfigError(f"{key} has {len(columns)} names, not {counts}.", "Name the columns to read.")
    if settings["use_dpo"]:
        draft.set(f"{path}.column_map", dict(zip(PAIR[-len(columns) :], columns, strict=False)), key)
        if len(columns) == 2:
            draft.ask("The prompt: MaxText takes what both texts of a pair begin with; pax reads a column `prompt`.")
        begin, end = "{{ bos_token }}" * settings["add_bos"], "{{ eos_token }}" * settings["add_eos"]
        template = tables.part("pair_template").replace("BEGIN", begin).replace("END", end)
        draft.set(f"{path}.chat_template", template, "add_bos", "add_eos")
    elif settings["use_sft"] and len(columns) == 2:
        ordered = sorted(columns, key=("completion", "answer").__contains__)
        draft.set(f"{path}.column_map", dict(zip(("prompt", "completion"), ordered, strict=True)), key)
    else:
        draft.set(f"{path}.text_field", columns[0], key)
    if settings["use_sft"] and settings["chat_template"]:
        draft.set(f"{path}.chat_template", settings["chat_template"], "chat_template")
    packs = settings["packing"] and not settings["use_dpo"]
    draft.set(f"{path}.packing", "first_fit" if packs else "one_per_row", "packing")
    kind = "huggingface" if settings["dataset_type"] == "hf" else settings["tokenizer_type"]
    draft.set(f"{path}.tokenizer", tables.part("tokenizers")[kind], "dataset_type", "tokenizer_type")
    if kind != "huggingface":
        draft.set(f"{path}.tokenizer.path", settings["tokenizer_path"] or None, "tokenizer_path")


def _weighted_files(key: str, value: str) -> list[tuple[str, float]]:
    """The patterns of files that a key gives, with their weights; none if it has none, or they cannot be read here."""
    if key != _MIXTURE and ";" not in value:
        return [(value, 1.0)] if value else []
    try:
        if key == _MIXTURE:
            text = read_text(Path(value)) if Path(value).is_file() else ""
            found = [(each["path"], each["weight"]) for each in json.loads(text).values()]
        else:  # `a*,0.3;b*,0.7`, and until November 2025 `a*:0.3;b*:0.7`
            found = [re.split("[,:](?=[^,:]*$)", part) for part in value.split(";")]
        return [(str(pattern), float(weight)) for pattern, weight in found if float(weight) > 0]
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _set_run(draft: Conversion, steps: int) -> None:
    settings = draft.settings
    draft.set(f"{_TRAIN}.summary_interval_steps", max(settings["log_period"], 1), "log_period")
    draft.copy(_TRAIN, "eval_interval_steps")
    if settings["eval_interval"] > 0:
        _set_evaluation(draft)
    saves = settings["enable_checkpointing"]
    interval = max(settings["checkpoint_period"], 1) if saves else steps
    draft.set("checkpoint.save_interval_steps", interval, "checkpoint_period" if saves else "enable_checkpointing")
    draft.copy("checkpoint", "save_max_to_keep", "async_save")
    draft.set("task.name", settings["run_name"] or "maxtext", "run_name")
    known = {key.strip() for row in draft.rows for key in row.maxtext.split(",")}
    known |= {text.partition("=")[0] for text in draft.approximated}
    for why, keys in tables.part("unused").items():
        for key in (key for key in keys if key not in known):
            draft.drop(key, why)
    reported = known | {*tables.part("silent")} | {dropped.key for dropped in settings.dropped}
    for key, setting in list(settings.values.items()):
        usual = [tables.default(key, settings.date)] if key in tables.part("defaults") else ("", [], False, -1, 1, 0)
        exact = tables.part("approximated").get(key, {}).get("exact", ())
        is_given = setting.origin in ("script", "environment")
        if is_given and key not in reported and setting.value not in (*usual, *exact):
            draft.drop(key, "has no equivalent in this recipe")
