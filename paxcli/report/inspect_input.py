"""A recipe's batches as one host of a job would read them."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import fiddle as fdl

from paxcli.errors import ConfigError
from paxcli.inputs.base_input import BaseInput, tokenizer_of
from paxcli.report.inspection import Inspection, count_shared_rows, inspect_batches
from paxcli.training.experiment import Experiment, data_of, with_derived_sizes

Split = Literal["train", "eval", "decode"]


class InspectedInputs(NamedTuple):
    """The inputs of one split.

    Attributes:
      inputs: A description of each input, with its batches.
      prompts: The prompts among the decode inputs: `prompt` and `ids`.
    """

    inputs: list[Inspection]
    prompts: list[dict[str, Any]]


def inspect_input(
    config: fdl.Config[Experiment], split: Split = "train", batches: int = 1, hosts: int = 1, host_index: int = 0
) -> InspectedInputs:
    """Reads batches as one of several simulated hosts would. Starts no device.

    Args:
      config: The recipe.
      split: Which inputs to read.
      batches: How many batches to read of each input.
      hosts: How many hosts share the data.
      host_index: The host whose batches are returned.

    Raises:
      ConfigError: The recipe has no such input, the host does not exist, or no batch is asked for.
      DataError: The data cannot be read.
    """
    if batches < 1:
        raise ConfigError(f"The number of batches must be at least 1, not {batches}.", "Ask for one batch or more.")
    if not 0 <= host_index < hosts:
        hint = f"Hosts count from 0: --hosts {host_index + 1}" if host_index >= hosts else "Hosts count from 0."
        raise ConfigError(f"There is no host {host_index} of {hosts}.", hint)
    if split == "decode" and hosts > 1:
        raise ConfigError("Every host decodes all decode inputs.", "Leave out --hosts.")
    sources = _sources(config, split)
    numbers = [number for number, source in enumerate(sources) if data_of([source])]
    prompts = [prompt for source in sources if not data_of([source]) for prompt in source.prompts]
    inputs = [_inspect(config, split, number, batches, hosts, host_index) for number in numbers]
    return InspectedInputs(inputs, _with_ids(config, prompts) if prompts else [])


def _sources(config: fdl.Config[Experiment], split: Split) -> list[Any]:
    sources = {"train": [config.train_input], "eval": config.eval_inputs, "decode": config.decode_inputs}
    if not sources.get(split):
        there = " or ".join(f"--split {name}" for name in sources if sources[name])
        raise ConfigError(f"The recipe has no {split} inputs.", f"Try {there}.")
    return sources[split]


def _inspect(
    config: fdl.Config[Experiment], split: Split, number: int, batches: int, hosts: int, host_index: int
) -> Inspection:
    host_input = functools.partial(_input, config, split, number, hosts)
    found = inspect_batches(host_input(host_index), batches, _argument(config.task.model, "vocab_size"))
    if hosts > 1:
        found.shared_rows = count_shared_rows([functools.partial(host_input, host) for host in range(hosts)], batches)
    if found.shared_rows:
        found.warnings.append(f"{found.shared_rows} rows are in the batches of more than one of {hosts} hosts.")
    if _argument(_sources(config, split)[number], "tokenizer") != _argument(config.train_input, "tokenizer"):
        found.warnings.append("Its tokenizer is not the training input's.")
    return found


def _input(config: fdl.Config[Experiment], split: Split, number: int, hosts: int, host_index: int) -> BaseInput:
    """An input as that host would build it, with its data checked."""
    num_devices = fdl.build(config.mesh).num_devices() or hosts
    data = fdl.build(_sources(with_derived_sizes(config, num_devices, hosts, host_index), split)[number])
    data.validate()
    data.check_data()
    return data


def _with_ids(config: fdl.Config[Experiment], prompts: list[str]) -> list[dict[str, Any]]:
    """Prompts with the token ids that the model reads."""
    tokenizer = tokenizer_of(_input(config, "train", 0, 1, 0))
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return [{"prompt": prompt, "ids": [*bos, *tokenizer.encode(prompt).tolist()]} for prompt in prompts]


def _argument(config: fdl.Config, name: str) -> Any:
    """The value of a config's field; None if its class has no such field."""
    return fdl.ordered_arguments(config, include_defaults=True).get(name)
