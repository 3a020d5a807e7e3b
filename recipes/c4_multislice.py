"""Pax's GShard-style language models on C4, multislice: FSDP within a slice, data parallelism between slices.

All use bfloat16 activations, a learning rate of 1e-3 with 4,000 steps of warm-up, an evaluation of the full validation
set every 100 steps and a checkpoint every 1,000; each `-limit-steps` variant ends after 300 steps. Pax's names contain
22B or 32B, which is not the size of all of them.
"""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.training.experiment import Experiment

from .families import c4_lm


@recipe(pax_name="C4Spmd22BAdamMaxText")
def c4_22b_maxtext() -> fdl.Config[Experiment]:
    """21.9 billion parameters on C4, on 8 chips: the model that Pax compared with MaxText's.

    48 layers × 6144 × 24 heads of 256. Global batch 128 rows of 1,024: 131,072 tokens a step.
    """
    config = c4_lm(num_layers=48, model_dims=6144, num_heads=24, vocab_size=32_768)
    config.task.train.percore_batch_size = 16
    config.mesh.ici_mesh_shape = [1, 4, 2]
    return config


@recipe(pax_name="C4Spmd22BAdam1xv4_128")
def c4_22b_1xv4_128() -> fdl.Config[Experiment]:
    """21.9 billion parameters on C4, on one slice of 64 chips (TPU v4-128).

    48 layers × 6144 × 24 heads of 256. Global batch 1,024 rows of 1,024: 1,048,576 tokens a step.
    """
    config = c4_22b_maxtext()
    config.mesh.ici_mesh_shape = [1, 64, 1]
    return config


@recipe(pax_name="C4Spmd22BAdam2xv4_128")
def c4_22b_2xv4_128() -> fdl.Config[Experiment]:
    """`c4-22b-1xv4-128`, 21.9 billion parameters, on two slices of 64 chips (2 × TPU v4-128).

    Global batch 2,048 rows of 1,024: 2,097,152 tokens a step.
    """
    config = c4_22b_1xv4_128()
    config.mesh.dcn_mesh_shape = [2, 1, 1]
    return config


@recipe(pax_name="C4Spmd22BAdam4xv4_128")
def c4_22b_4xv4_128() -> fdl.Config[Experiment]:
    """`c4-22b-1xv4-128`, 21.9 billion parameters, on four slices of 64 chips (4 × TPU v4-128).

    Global batch 4,096 rows of 1,024: 4,194,304 tokens a step.
    """
    config = c4_22b_1xv4_128()
    config.mesh.dcn_mesh_shape = [4, 1, 1]
    return config


@recipe(pax_name="C4Spmd22BAdam1xv4_128LimitSteps")
def c4_22b_1xv4_128_limit_steps() -> fdl.Config[Experiment]:
    """`c4-22b-1xv4-128`, ended after 300 steps."""
    config = c4_22b_1xv4_128()
    config.task.train.num_train_steps = 300
    return config


@recipe(pax_name="C4Spmd22BAdam2xv4_128LimitSteps")
def c4_22b_2xv4_128_limit_steps() -> fdl.Config[Experiment]:
    """`c4-22b-2xv4-128`, ended after 300 steps."""
    config = c4_22b_2xv4_128()
    config.task.train.num_train_steps = 300
    return config


@recipe(pax_name="C4Spmd22BAdam4xv4_128LimitSteps")
def c4_22b_4xv4_128_limit_steps() -> fdl.Config[Experiment]:
    """`c4-22b-4xv4-128`, ended after 300 steps."""
    config = c4_22b_4xv4_128()
    config.task.train.num_train_steps = 300
    return config


@recipe(pax_name="C4Spmd22BAdam1xv4_384")
def c4_1xv4_384() -> fdl.Config[Experiment]:
    """24.8 billion parameters on C4, on one slice of 192 chips (TPU v4-384); Pax's name says 22B.

    24 layers × 9216 × 24 heads of 384. Global batch 1,920 rows of 1,024: 1,966,080 tokens a step.
    """
    config = c4_lm(num_layers=24, model_dims=9216, num_heads=24, vocab_size=32_768)
    config.task.train.percore_batch_size = 10
    config.mesh.ici_mesh_shape = [1, 192, 1]
    return config


@recipe(pax_name="C4Spmd22BAdam2xv4_384")
def c4_2xv4_384() -> fdl.Config[Experiment]:
    """`c4-1xv4-384`, 24.8 billion parameters, on two slices of 192 chips (2 × TPU v4-384).

    Global batch 3,840 rows of 1,024: 3,932,160 tokens a step.
    """
    config = c4_1xv4_384()
    config.mesh.dcn_mesh_shape = [2, 1, 1]
    return config


@recipe(pax_name="C4Spmd22BAdam1xv4_8")
def c4_1xv4_8() -> fdl.Config[Experiment]:
    """0.87 billion parameters on C4, on one slice of 4 chips (TPU v4-8); Pax's name says 22B.

    16 layers × 2048 × 8 heads of 256. Global batch 64 rows of 1,024: 65,536 tokens a step.
    """
    config = c4_lm(num_layers=16, model_dims=2048, num_heads=8, vocab_size=32_768)
    config.task.train.percore_batch_size = 16
    config.mesh.ici_mesh_shape = [1, 4, 1]
    return config


@recipe(pax_name="C4Spmd22BAdam2xv4_8")
def c4_2xv4_8() -> fdl.Config[Experiment]:
    """`c4-1xv4-8`, 0.87 billion parameters, on two slices of 4 chips (2 × TPU v4-8).

    Global batch 128 rows of 1,024: 131,072 tokens a step.
    """
    config = c4_1xv4_8()
    config.mesh.dcn_mesh_shape = [2, 1, 1]
    return config


@recipe(pax_name="C4Spmd22BAdam4xv4_8")
def c4_4xv4_8() -> fdl.Config[Experiment]:
    """`c4-1xv4-8`, 0.87 billion parameters, on four slices of 4 chips (4 × TPU v4-8).

    Global batch 256 rows of 1,024: 262,144 tokens a step.
    """
    config = c4_1xv4_8()
    config.mesh.dcn_mesh_shape = [4, 1, 1]
    return config


@recipe(pax_name="C4Spmd22BAdam1xv4_8LimitSteps")
def c4_1xv4_8_limit_steps() -> fdl.Config[Experiment]:
    """`c4-1xv4-8`, ended after 300 steps."""
    config = c4_1xv4_8()
    config.task.train.num_train_steps = 300
    return config


@recipe(pax_name="C4Spmd22BAdam2xv4_8LimitSteps")
def c4_2xv4_8_limit_steps() -> fdl.Config[Experiment]:
    """`c4-2xv4-8`, ended after 300 steps."""
    config = c4_2xv4_8()
    config.task.train.num_train_steps = 300
    return config


@recipe(pax_name="C4Spmd22BAdam4xv4_8LimitSteps")
def c4_4xv4_8_limit_steps() -> fdl.Config[Experiment]:
    """`c4-4xv4-8`, ended after 300 steps."""
    config = c4_4xv4_8()
    config.task.train.num_train_steps = 300
    return config


@recipe(pax_name="C4Spmd32BAdam1xv5_256")
def c4_32b_1xv5_256() -> fdl.Config[Experiment]:
    """32.5 billion parameters on C4, on one slice of 128 chips (TPU v5p-256).

    40 layers × 8192 × 32 heads of 256. Global batch 256 rows of 2,048: 524,288 tokens a step. Pax's docstring
    states a batch of 2,048, which does not follow from its settings.
    """
    config = c4_lm(num_layers=40, model_dims=8192, num_heads=32, vocab_size=32_768)
    config.task.model.max_seq_len = 2048
    config.task.train.percore_batch_size = 2
    config.mesh.ici_mesh_shape = [1, 128, 1]
    return config


@recipe(pax_name="C4Spmd32BAdam2xv5_256")
def c4_32b_2xv5_256() -> fdl.Config[Experiment]:
    """`c4-32b-1xv5-256`, 32.5 billion parameters, on two slices of 128 chips (2 × TPU v5p-256).

    Global batch 512 rows of 2,048: 1,048,576 tokens a step.
    """
    config = c4_32b_1xv5_256()
    config.mesh.dcn_mesh_shape = [2, 1, 1]
    return config
