"""Pax's GShard-style language models on C4, one slice.

All use bfloat16 activations, a learning rate of 1e-3 with 4,000 steps of warm-up, an evaluation every 100 steps and a
checkpoint every 1,000. They differ from Pax where Pax did not do what its settings stated: an evaluation covers 5,662
rows of the validation set, the number in Pax's set, and not its first batch; the tokenizer has to fit the vocabulary;
and the remat policy applies to unrolled layers, too.
"""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.training.experiment import Experiment

from .families import c4_lm


@recipe(pax_name="C4Spmd1BAdam4Replicas")
def c4_1b() -> fdl.Config[Experiment]:
    """1.10 billion parameters on C4, on 4 chips (TPU v4-8).

    13 layers × 2560 × 20 heads. Global batch 128 rows of 1,024: 131,072 tokens a step. Pax's run reached a
    log perplexity of about 3.05 at 5,000 steps, 2.80 at 10,000, 2.68 at 20,000, 2.61 at 30,000 and 2.53 at 53,000. Its
    tokenizer had 50,257 ids for a vocabulary of 32,000, and ids beyond it did not contribute to the loss, so expect
    slightly higher values with a tokenizer that fits.
    """
    config = c4_lm(num_layers=13, model_dims=2560, num_heads=20)
    config.task.train.percore_batch_size = 32
    config.mesh.ici_mesh_shape = [1, 4, 1]
    return config


@recipe(pax_name="C4Spmd1BAdam4ReplicasLimitSteps")
def c4_1b_limit_steps() -> fdl.Config[Experiment]:
    """`c4-1b`, ended after 15,000 steps (2.0 billion tokens)."""
    config = c4_1b()
    config.task.train.num_train_steps = 15_000
    return config


@recipe(pax_name="C4Spmd2BAdam4Replicas")
def c4_2b() -> fdl.Config[Experiment]:
    """2.14 billion parameters on C4, on 4 chips (TPU v4-8).

    18 layers × 3072 × 24 heads. Global batch 128 rows of 1,024: 131,072 tokens a step.
    """
    config = c4_lm(num_layers=18, model_dims=3072, num_heads=24)
    config.task.train.percore_batch_size = 32
    config.mesh.ici_mesh_shape = [1, 4, 1]
    return config


@recipe(pax_name="C4Spmd16BAdam32Replicas")
def c4_16b() -> fdl.Config[Experiment]:
    """16.5 billion parameters on C4, on 32 chips (TPU v4-64).

    36 layers × 6144 × 48 heads. Global batch 512 rows of 1,024: 524,288 tokens a step. Pax's run had spikes of the loss
    near steps 900, 2,000 and 2,500, and a log perplexity of about 3.05 at 4,000 steps, 2.68 at 8,000 and 2.56 at
    11,000, with the tokenizer described at `c4-1b`; it ran at about 42.5 % MFU.
    """
    config = c4_lm(num_layers=36, model_dims=6144, num_heads=48)
    config.task.train.percore_batch_size = 16
    config.mesh.ici_mesh_shape = [1, 16, 2]
    return config


@recipe(pax_name="C4Spmd32BAdam64Replicas")
def c4_32b() -> fdl.Config[Experiment]:
    """32.5 billion parameters on C4, on 64 chips (TPU v4-128).

    40 layers × 8192 × 64 heads. Global batch 512 rows of 1,024: 524,288 tokens a step. Pax ran it at about 42 % MFU.
    """
    config = c4_lm(num_layers=40, model_dims=8192, num_heads=64)
    config.task.train.percore_batch_size = 8
    config.mesh.ici_mesh_shape = [1, 16, 4]
    return config


@recipe(pax_name="C4SpmdAdam")
def c4_adam() -> fdl.Config[Experiment]:
    """1.27 billion parameters on C4, layers unrolled, in float32, on 8 chips: the base of Pax's C4 recipes.

    24 layers × 2048 × 32 heads of 64. Global batch 8 rows of 1,024: 8,192 tokens a step. The remat policy applies;
    Pax ignored it for unrolled layers.
    """
    config = c4_lm(num_layers=24, model_dims=2048, num_heads=32, vocab_size=32_128)
    config.task.model.fprop_dtype = "float32"
    config.task.model.stack.scan = False
    config.task.model.stack.remat_policy = "qkv_context_out_proj"
    config.task.train.percore_batch_size = 1
    config.task.train.summary_interval_steps = 100
    config.mesh.ici_mesh_shape = [1, 4, 2]
    return config
