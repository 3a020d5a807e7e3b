"""Checks docs/coming-from-pax.md: it covers the names that Pax documents, and the names of ours exist."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pathlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

import paxcli
from paxcli.cli.main import app

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "coming-from-pax.md").read_text()
CODE = re.compile(r"`([^`\n]+)`")
DEFAULT = re.compile(r"`(\w+)\.(\w+)` = (.+)")
PACKAGES = ("config", "layers", "optim", "inputs", "models", "checkpoint", "training", "mesh", "nested_map")

# The flags that paxml's main.py defines, and the classes and functions that its README and its documentation name.
FLAGS = """exp job_log_dir mode eval_on_test decode_during_train eval_during_decode maybe_use_persistence_checkpointing
jax_fully_async_checkpoint exit_after_ondemand_checkpoint tensorstore_use_ocdbt async_timeout_secs
startup_random_jitter_max_secs jax_traceback_filtering_option decode_output_pickle checkpoint_todelete_subdir
restore_checkpoint_dir restore_checkpoint_step globally_use_hardware_rng jax_profiler_port enable_auto_sharding
enable_checkpoint_saving enforce_restore_shape_check study controller_mode tuner_group metrics_from num_trials
pythia_port tfds_data_dir multiprocess_gpu server_addr num_hosts host_idx fdl fdl_config fdl_config_file fiddler fdl_set
enable_summary_writer pmap_use_tensorstore xla_gpu_pgle_profile_file_or_directory_path""".split()
MODES = "train eval decode decode_once infer tf_data_service_dispatcher tf_data_service_worker".split()
NAMES = """BaseInput SeqIOInput LingvoInputAdaptor LingvoInputAdaptorNewBatchSize LingvoEvalAdaptor BaseLayer HParams
BaseHParams sub_config_field create_variable create_child add_summary WeightHParams WeightInit NestedMap Linear ReLU
FeedForward BaseModel LanguageModel SequenceModel ClassificationModel BaseTask SingleTask BaseMetrics LossAggregator vn
Learner clu.metrics GlobalDeviceArray""".split()


def rows() -> list[list[str]]:
    cells = [
        [cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)
    ]
    return [row for row in cells if row[0] != "Pax" and not row[0].startswith("---")]


def parts() -> dict[str, Any]:
    """The public classes and functions of the packages that a recipe uses, by name."""
    found = {}
    for package in PACKAGES:
        root = importlib.import_module(f"{paxcli.__name__}.{package}")
        names = [one.name for one in pkgutil.walk_packages(getattr(root, "__path__", []), f"{root.__name__}.")]
        for module in (root, *map(importlib.import_module, names)):
            found |= {
                name: one for name, one in vars(module).items() if inspect.isclass(one) or inspect.isfunction(one)
            }
    return found


def commands(command: Any) -> Iterator[Any]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from commands(inner)


CLI = typer.main.get_command(app)
OPTIONS = {name for command in commands(CLI) for parameter in command.params for name in parameter.opts}
PARTS = parts()


def exists(name: str) -> bool:
    """Whether a name of ours is a verb, an option, a part, a field of a part, or a method or field of any part."""
    if name.startswith("pax "):
        command: Any = CLI
        for word in name.split()[1:]:
            command = getattr(command, "commands", {}).get(word)
        return command is not None
    if name.startswith("--"):
        return name in OPTIONS
    if "." in name:
        part, field = name.split(".")
        return part in PARTS and has_member(PARTS[part], field)
    return name in PARTS or (name[0].islower() and any(has_member(part, name) for part in PARTS.values()))


def has_member(part: Any, name: str) -> bool:
    fields = {field.name for field in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else set()
    return name in fields or callable(getattr(part, name, None))


@pytest.mark.parametrize("name", ["pax fly", "--fly", "Flyer", "Learner.fly", "fly"])
def test_the_check_sees_a_name_that_does_not_exist(name):
    assert not exists(name)


def test_names_of_ours_exist():
    assert len(rows()) > 80
    assert [name for row in rows() for name in CODE.findall(row[1]) if not exists(name)] == []


def test_each_row_has_a_place_or_a_reason():
    assert [row for row in rows() if len(row) != 3 or not (row[1] or row[2])] == []


def default_of(part: str, name: str) -> str:
    field = next(field for field in dataclasses.fields(PARTS[part]) if field.name == name)
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    return value.func.__name__ if isinstance(value, functools.partial) else str(value)


def test_defaults_of_ours_are_those_of_the_page():
    found = [match.groups() for row in rows() if (match := DEFAULT.fullmatch(row[1]))]
    assert len(found) > 30
    assert [(default_of(*names), value) for *names, value in found if default_of(*names) != value] == []


def test_every_name_that_pax_documents_has_a_row():
    named = {name for row in rows() for name in CODE.findall(row[0])}
    flags = {f"--{flag}" for flag in FLAGS if flag != "mode"} | {f"--mode={mode}" for mode in MODES}
    assert sorted((flags | set(NAMES)) - named) == []
