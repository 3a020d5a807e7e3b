"""Pax's GShard-style language model on C4, with pipeline parallelism."""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.training.experiment import Experiment

from .c4 import c4_adam
from .families import split_into_stages


@recipe(pax_name="C4SpmdPipelineAdam")
def c4_pipeline_adam() -> fdl.Config[Experiment]:
    """`c4-adam`, 1.27 billion parameters, in 2 pipeline stages on 8 chips: the base of Pax's pipelined C4 recipes.

    Global batch 8 rows of 1,024 in 4 microbatches of 2: 8,192 tokens a step, in float32.
    """
    config = c4_adam()
    split_into_stages(config, num_stages=2, microbatch_size=2)
    config.mesh.ici_mesh_shape = [2, 1, 2, 2]
    return config
