"""Sizes of a recipe, computed without any device."""

from __future__ import annotations

import math
from typing import Any

import fiddle as fdl

from paxcli.training.experiment import Experiment, global_batch_size, with_derived_sizes
from paxcli.training.state import abstract_params, count_parameters


def num_devices(config: fdl.Config[Experiment]) -> int:
    """Devices of the recipe's mesh; 1 if the mesh takes any number."""
    return fdl.build(config.mesh).num_devices() or 1


def tokens_in(spec: Any) -> int | None:
    """Tokens in a batch of these shapes; None if it has no `labels` [B, T]."""
    labels = spec.get("labels")
    return math.prod(labels.shape) if labels is not None and len(labels.shape) == 2 else None


def summarize(config: fdl.Config[Experiment]) -> dict[str, Any]:
    """Sizes of a recipe: `parameters`, `global_batch_size`, `tokens_per_step`, `flops_per_step`, `num_devices`."""
    devices = num_devices(config)
    experiment = fdl.build(with_derived_sizes(config, devices))
    spec = experiment.train_input.element_spec()
    parameters = count_parameters(abstract_params(experiment.task, spec))
    flops = experiment.task.model.step_flops(spec)
    return {
        "parameters": parameters,
        "global_batch_size": global_batch_size(config, devices),
        "tokens_per_step": tokens_in(spec),
        "flops_per_step": round(flops.total) if flops else None,
        "num_devices": devices,
    }
