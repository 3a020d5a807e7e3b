"""Pax's GShard-style language models on synthetic rows, with pipeline parallelism.

As in `lm_cloud.py`; the layers within a stage are unrolled, and only the input of the stage is saved for the backward
pass.
"""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.training.experiment import Experiment

from .families import cloud_lm, split_into_stages
from .lm_cloud import lm_cloud_2b


@recipe(pax_name="LmCloudSpmdPipeline9B")
def lm_cloud_pipeline_9b() -> fdl.Config[Experiment]:
    """9.80 billion parameters on synthetic rows, in 16 stages on 64 chips, in float32.

    48 layers × 4096 × 32 heads. Global batch 512 rows of 1,024 in 128 microbatches of 4: 524,288 tokens a step.
    """
    config = cloud_lm(num_layers=48, model_dims=4096, num_heads=32)
    split_into_stages(config, num_stages=16, microbatch_size=4)
    config.task.model.fprop_dtype = "float32"
    config.task.train.percore_batch_size = 8
    config.mesh.ici_mesh_shape = [16, 4, 1, 1]
    return config


@recipe(pax_name="LmCloudSpmdPipeline175B")
def lm_cloud_pipeline_175b() -> fdl.Config[Experiment]:
    """174 billion parameters on synthetic rows, in 8 stages on 8 hosts of 16 GPUs (A100).

    96 layers × 12288 × 96 heads. Global batch 96 rows of 2,048 in 48 microbatches of 2: 196,608 tokens a step. 0.75
    rows for each device need no padding, since the batch is sharded over `data` and `fsdp`, of size 1, and not over
    stages.
    """
    config = cloud_lm(num_layers=96, model_dims=12288, num_heads=96)
    split_into_stages(config, num_stages=8, microbatch_size=2)
    config.task.model.max_seq_len = 2048
    config.task.train.percore_batch_size = 0.75
    config.mesh.ici_mesh_shape = [1, 1, 1, 16]
    config.mesh.dcn_mesh_shape = [8, 1, 1, 1]
    return config


@recipe(pax_name="LmCloudSpmdPipelineMultislice2B")
def lm_cloud_pipeline_multislice_2b() -> fdl.Config[Experiment]:
    """2.14 billion parameters on synthetic rows, in 2 stages over two slices of 4 chips.

    18 layers × 3072 × 24 heads. Global batch 128 rows of 1,024 in 32 microbatches of 4: 131,072 tokens a step.
    Stages stream their inputs and outputs.
    """
    config = lm_cloud_2b()
    split_into_stages(config, num_stages=2, microbatch_size=4, stream_io=True)
    config.task.train.percore_batch_size = 16
    config.mesh.ici_mesh_shape = [1, 4, 1, 1]
    config.mesh.dcn_mesh_shape = [2, 1, 1, 1]
    return config


@recipe(pax_name="LmCloudSpmdPipelineMultislice2BCircular")
def lm_cloud_pipeline_multislice_2b_circular() -> fdl.Config[Experiment]:
    """`lm-cloud-pipeline-multislice-2b`, 2.14 billion parameters, with each row passing through both stages 3 times.

    Global batch 128 rows of 1,024 in 16 microbatches of 8: 131,072 tokens a step.
    """
    config = lm_cloud_pipeline_multislice_2b()
    config.task.model.stack.microbatch_size = 8
    config.task.model.stack.circular_repeat = 3
    return config
