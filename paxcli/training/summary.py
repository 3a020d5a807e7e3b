"""What follows from a recipe, computed without any device."""

from __future__ import annotations

import math
from typing import Any

import fiddle as fdl

from paxcli.metrics.flops import Flops, transformer_flops_per_step
from paxcli.training.experiment import Experiment, global_batch_size, prepared
from paxcli.training.state import abstract_params, count_parameters


def num_devices(config: fdl.Config[Experiment]) -> int:
    """Devices that the recipe's mesh names; 1 when it takes whatever it finds."""
    return fdl.build(config.mesh).num_devices() or 1


def tokens_in(spec: Any) -> int | None:
    """Tokens in a batch of this shape; None when it has no `labels`."""
    labels = spec.get("labels")
    return math.prod(labels.shape) if labels is not None and len(labels.shape) == 2 else None


def model_flops(model: Any, spec: Any) -> Flops | None:
    """FLOPs of a training step on a batch of this shape; None for a model that has no formula."""
    if not hasattr(model, "matmul_shape") or tokens_in(spec) is None:
        return None
    batch, seq_len = spec["labels"].shape
    return transformer_flops_per_step(batch, seq_len, **model.matmul_shape())


def summarize(config: fdl.Config[Experiment]) -> dict[str, Any]:
    """Sizes of a recipe: `parameters`, `global_batch_size`, `tokens_per_step`, `flops_per_step`, `num_devices`."""
    devices = num_devices(config)
    experiment = fdl.build(prepared(config, devices))
    spec = experiment.train_input.element_spec()
    flops = model_flops(experiment.task.model, spec)
    return {
        "parameters": count_parameters(abstract_params(experiment.task, spec)),
        "global_batch_size": global_batch_size(config, devices),
        "tokens_per_step": tokens_in(spec),
        "flops_per_step": round(flops.total) if flops else None,
        "num_devices": devices,
    }
