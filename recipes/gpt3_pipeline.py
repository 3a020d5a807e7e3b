"""Pax's GPT-3 family on C4, with pipeline parallelism: MLPerf's sizes, and GPT3-XL of Pax's README.

As in `gpt3.py`; the layers within a stage are unrolled, and only the input of the stage is saved for the backward pass.
Where memory allows, a stage gathers its weights once a step; Pax gathered them for each microbatch.
"""

from __future__ import annotations

import math

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.training.experiment import Experiment

from .families import gpt3_lm, split_into_stages
from .gpt3 import c4_gpt3_175b_bs1536


@recipe(pax_name="C4SpmdPipelineGpt3AdamOrgHPBS1p5k768Replicas")
def c4_gpt3_pipeline_bs1536() -> fdl.Config[Experiment]:
    """175 billion parameters (174.79) with the settings of the GPT-3 paper, in 8 stages on 768 chips, in float32.

    Global batch 1,536 rows of 2,048 in 192 microbatches of 8: 3,145,728 tokens a step. Pax intended the same, but
    misspelt the field and ran 768 microbatches of 2, which do not divide over its mesh: `fsdp` is 8.
    """
    config = c4_gpt3_175b_bs1536()
    split_into_stages(config, num_stages=8, microbatch_size=8, gather_weights_once=True)
    config.task.train.percore_batch_size = 2
    config.checkpoint.save_interval_steps = 50
    config.mesh.ici_mesh_shape = [8, 1, 8, 12]
    return config


@recipe(pax_name="C4SpmdPipelineGpt3AdamMLPerfHPBS1p5k768Replicas")
def c4_gpt3_mlperf_bs1536() -> fdl.Config[Experiment]:
    """175 billion parameters (174.79) with MLPerf's settings for a batch of 1,536, in 8 stages on 768 chips.

    Global batch 1,536 rows of 2,048 in 192 microbatches of 8: 3,145,728 tokens a step. Learning rate 2e-5, in
    float32.
    """
    config = c4_gpt3_pipeline_bs1536()
    _mlperf_learning_rate(config, global_batch_size=1536)
    config.task.train.eval_interval_steps = 16
    config.checkpoint.save_interval_steps = 32
    return config


@recipe(pax_name="C4SpmdPipelineGpt3AdamMLPerfHPBS2k512Replicas")
def c4_gpt3_mlperf_bs2048() -> fdl.Config[Experiment]:
    """175 billion parameters (174.79) with MLPerf's settings for a batch of 2,048, in 8 stages on 512 chips.

    Global batch 2,048 rows of 2,048 in 256 microbatches of 8: 4,194,304 tokens a step. Learning rate 2e-5, in
    float32.
    """
    config = c4_gpt3_pipeline_bs1536()
    split_into_stages(config, num_stages=8, microbatch_size=8, stream_io=True, gather_weights_once=True)
    _mlperf_learning_rate(config, global_batch_size=2048)
    config.task.train.percore_batch_size = 4
    config.task.train.eval_interval_steps = 12
    config.checkpoint.save_interval_steps = 24
    config.mesh.ici_mesh_shape = [8, 1, 8, 8]
    return config


@recipe(pax_name="C4SpmdPipelineGpt3AdamMLPerfHPBS3k768Replicas")
def c4_gpt3_mlperf_bs3072() -> fdl.Config[Experiment]:
    """175 billion parameters (174.79) with MLPerf's settings for a batch of 3,072, in 4 stages on 768 chips.

    Global batch 3,072 rows of 2,048 in 192 microbatches of 16: 6,291,456 tokens a step. Learning rate 2e-5, in
    float32.
    """
    config = c4_gpt3_pipeline_bs1536()
    split_into_stages(config, num_stages=4, microbatch_size=16, stream_io=True, gather_weights_once=True)
    _mlperf_learning_rate(config, global_batch_size=3072)
    config.task.train.percore_batch_size = 4
    config.task.train.eval_interval_steps = 8
    config.checkpoint.save_interval_steps = 16
    config.mesh.ici_mesh_shape = [4, 1, 16, 12]
    return config


@recipe(pax_name="C4SpmdPipelineGpt3AdamMLPerfHPBS4k1024Replicas")
def c4_gpt3_mlperf_bs4096() -> fdl.Config[Experiment]:
    """175 billion parameters (174.79) with MLPerf's settings for a batch of 4,096, in 8 stages on 1,024 chips.

    Global batch 4,096 rows of 2,048 in 512 microbatches of 8: 8,388,608 tokens a step. Learning rate 3e-5, in
    float32.
    """
    config = c4_gpt3_pipeline_bs1536()
    split_into_stages(config, num_stages=8, microbatch_size=8, stream_io=True, gather_weights_once=True)
    _mlperf_learning_rate(config, global_batch_size=4096)
    config.task.train.percore_batch_size = 4
    config.task.train.eval_interval_steps = 6
    config.checkpoint.save_interval_steps = 12
    config.mesh.ici_mesh_shape = [8, 1, 8, 16]
    return config


@recipe(pax_name="C4SpmdPipelineGpt3AdamMLPerfHPBS8k1024Replicas")
def c4_gpt3_mlperf_bs8192() -> fdl.Config[Experiment]:
    """175 billion parameters (174.79) with MLPerf's settings for a batch of 8,192, in 4 stages on 1,024 chips.

    Global batch 8,192 rows of 2,048 in 512 microbatches of 16: 16,777,216 tokens a step. Learning rate 3e-5, in
    float32.
    """
    config = c4_gpt3_pipeline_bs1536()
    split_into_stages(config, num_stages=4, microbatch_size=16, stream_io=True)
    _mlperf_learning_rate(config, global_batch_size=8192)
    config.task.train.percore_batch_size = 8
    config.task.train.eval_interval_steps = 3
    config.checkpoint.save_interval_steps = 6
    config.mesh.ici_mesh_shape = [4, 1, 16, 16]
    return config


@recipe(pax_name="C4SpmdPipelineGpt3SmallAdam8Replicas")
def c4_gpt3_xl_8() -> fdl.Config[Experiment]:
    """2.93 billion parameters in 2 stages on 8 chips: Pax's small GPT-3, which it called 1.3B.

    24 layers × 3072 × 24 heads, where GPT-3 XL is 2048 wide. Global batch 512 rows of 2,048 in 64 microbatches of
    8: 1,048,576 tokens a step. Learning rate 2e-4, bfloat16.
    """
    config = gpt3_lm(num_layers=24, model_dims=3072, num_heads=24, vocab_size=51_200)
    split_into_stages(config, num_stages=2, microbatch_size=8)
    config.task.model.fprop_dtype = "bfloat16"
    config.task.train.percore_batch_size = 64
    config.task.train.learner.learning_rate = 2e-4
    config.task.train.eval_interval_steps = 10
    config.task.train.summary_interval_steps = 5
    config.checkpoint.save_interval_steps = 200
    config.checkpoint.save_max_to_keep = 1000
    config.mesh.ici_mesh_shape = [2, 1, 2, 2]
    return config


@recipe(pax_name="C4SpmdPipelineGpt3SmallAdam64Replicas")
def c4_gpt3_xl() -> fdl.Config[Experiment]:
    """2.92 billion parameters in 4 stages on 64 chips (TPU v4-128): GPT3-XL of Pax's README.

    24 layers × 3072 × 24 heads, where GPT-3 XL is 2048 wide. Global batch 512 rows of 2,048 in 32 microbatches of
    16: 1,048,576 tokens a step. Pax intended the same, but misspelt the field and ran a batch of 64. Its run,
    repeated by `--set percore_batch_size=1`, reached a log perplexity of about 3.6 at 4,000 steps, 3.3 at 9,000 and
    3.08 at 19,000.
    """
    config = c4_gpt3_xl_8()
    split_into_stages(config, num_stages=4, microbatch_size=16, gather_weights_once=True)
    config.task.model.vocab_size = 50_257
    config.task.train.percore_batch_size = 8
    config.task.train.eval_interval_steps = 100
    config.task.train.summary_interval_steps = 1
    config.mesh.ici_mesh_shape = [4, 1, 4, 4]
    return config


def _mlperf_learning_rate(config: fdl.Config[Experiment], global_batch_size: int) -> None:
    """MLPerf's rule for batches up to 8,192: the schedule shrinks as the batch grows from 1,536."""
    shrink = 1536 / global_batch_size
    learner = config.task.train.learner
    learner.learning_rate = 2e-5 if global_batch_size <= 3584 else 3e-5
    learner.schedule.warmup_steps = math.ceil(265 * shrink)
    learner.schedule.decay_start = learner.schedule.warmup_steps + 1
    learner.schedule.decay_end = math.ceil(108_600 * shrink)
