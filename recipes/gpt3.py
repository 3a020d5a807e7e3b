"""Pax's GPT-3 family on C4: the paper's settings, MLPerf's, and smaller ones.

All have rows of 2,048 tokens, Adam with a weight decay of 0.1 on every parameter and a cosine schedule; a position
table of 16,384 rows as in Pax, although training uses the first 2,048 only; and an evaluation of the full validation
set. As in Pax, a run ends when its evaluation reaches a log perplexity of 2.69 (`early_stopping_fn`).
"""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.training.experiment import Experiment

from .families import gpt3_lm


@recipe(pax_name="C4SpmdGpt3AdamOrgHP")
def c4_gpt3_175b() -> fdl.Config[Experiment]:
    """175 billion parameters (174.78) with the settings of the GPT-3 paper, in float32.

    96 layers × 12288 × 96 heads. Pax's base class names 8 devices, which cannot hold it: a global batch of 8,
    16,384 tokens a step. The recipes derived from it have more.
    """
    config = gpt3_lm(num_layers=96, model_dims=12288, num_heads=96, vocab_size=50_257)
    config.task.train.percore_batch_size = 1
    config.mesh.ici_mesh_shape = [1, 4, 2]
    return config


@recipe(pax_name="C4SpmdGpt3AdamOrgHPBS1p5k1536Replicas")
def c4_gpt3_175b_bs1536() -> fdl.Config[Experiment]:
    """175 billion parameters (174.79) with the settings of the GPT-3 paper, on 1,536 chips, in float32.

    Global batch 1,536 rows of 2,048: 3,145,728 tokens a step. The vocabulary is padded to 51,200.
    """
    config = c4_gpt3_175b()
    config.task.model.vocab_size = 51_200
    config.task.train.eval_interval_steps = 25
    config.task.train.summary_interval_steps = 1
    config.checkpoint.save_max_to_keep = 100
    config.mesh.ici_mesh_shape = [1, 64, 24]
    return config


@recipe(pax_name="C4SpmdGpt3L16AdamOrgHP")
def c4_gpt3_l16() -> fdl.Config[Experiment]:
    """29.8 billion parameters: 16 of GPT-3's 96 layers, on 64 chips.

    Global batch 192 rows of 2,048: 393,216 tokens a step. In bfloat16.
    """
    config = c4_gpt3_175b()
    config.task.model.num_layers = 16
    config.task.model.fprop_dtype = "bfloat16"
    config.task.train.percore_batch_size = 3
    config.task.train.eval_interval_steps = 25_000
    config.mesh.ici_mesh_shape = [1, 16, 4]
    return config


@recipe(pax_name="C4SpmdGpt3AdamDataParallel2x16x16")
def c4_gpt3_175b_2x16x16() -> fdl.Config[Experiment]:
    """175 billion parameters (174.78), data-parallel over two slices of 256 chips, 100 steps.

    Global batch 256 rows of 2,048: 524,288 tokens a step. Half a row for each chip needs no padding, since the batch
    is sharded over `data` and `fsdp` only: 8 rows for each group of 16 chips. In bfloat16. Retains 20 checkpoints, as
    Pax intended: it misspelt the field and retained 10.
    """
    config = c4_gpt3_175b()
    config.task.model.fprop_dtype = "bfloat16"
    config.task.train.percore_batch_size = 0.5
    config.task.train.num_train_steps = 100
    config.checkpoint.save_interval_steps = 2000
    config.checkpoint.save_max_to_keep = 20
    config.mesh.ici_mesh_shape = [1, 16, 16]
    config.mesh.dcn_mesh_shape = [2, 1, 1]
    return config
