"""Pax's optimal-scaling recipes: a series of sizes on larger and larger slices of TPU v4, on synthetic rows.

A model of L layers is 128 L wide and has L heads. Learning rate 2.5e-4, bfloat16, a remat policy that saves the outputs
of matmuls with weights, a checkpoint every 5,000 steps.
"""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.training.experiment import Experiment

from .families import cloud_lm


@recipe(pax_name="OptimalScaling2x2x1")
def optimal_scaling_2x2x1() -> fdl.Config[Experiment]:
    """4.43 billion parameters on synthetic rows, on 4 chips (2x2x1).

    28 layers × 3584 × 28 heads. Global batch 64 rows of 1,024: 65,536 tokens a step.
    """
    return _rung(num_layers=28, percore_batch_size=16, ici_mesh_shape=[1, 4, 1])


@recipe(pax_name="OptimalScaling2x2x2")
def optimal_scaling_2x2x2() -> fdl.Config[Experiment]:
    """6.57 billion parameters on synthetic rows, on 8 chips (2x2x2).

    32 layers × 4096 × 32 heads. Global batch 64 rows of 1,024: 65,536 tokens a step.
    """
    return _rung(num_layers=32, percore_batch_size=8, ici_mesh_shape=[1, 8, 1])


@recipe(pax_name="OptimalScaling2x2x4")
def optimal_scaling_2x2x4() -> fdl.Config[Experiment]:
    """9.32 billion parameters on synthetic rows, on 16 chips (2x2x4).

    36 layers × 4608 × 36 heads. Global batch 128 rows of 1,024: 131,072 tokens a step.
    """
    return _rung(num_layers=36, percore_batch_size=8, ici_mesh_shape=[1, 16, 1])


@recipe(pax_name="OptimalScaling2x4x4")
def optimal_scaling_2x4x4() -> fdl.Config[Experiment]:
    """12.7 billion parameters on synthetic rows, on 32 chips (2x4x4).

    40 layers × 5120 × 40 heads. Global batch 256 rows of 1,024: 262,144 tokens a step.
    """
    return _rung(num_layers=40, percore_batch_size=8, ici_mesh_shape=[1, 32, 1])


@recipe(pax_name="OptimalScaling4x4x4")
def optimal_scaling_4x4x4() -> fdl.Config[Experiment]:
    """18.1 billion parameters on synthetic rows, on 64 chips (4x4x4).

    45 layers × 5760 × 45 heads. Global batch 512 rows of 1,024: 524,288 tokens a step.
    """
    return _rung(num_layers=45, percore_batch_size=8, ici_mesh_shape=[1, 64, 1])


@recipe(pax_name="OptimalScaling4x4x8")
def optimal_scaling_4x4x8() -> fdl.Config[Experiment]:
    """24.8 billion parameters on synthetic rows, on 128 chips (4x4x8).

    50 layers × 6400 × 50 heads. Global batch 512 rows of 1,024: 524,288 tokens a step.
    """
    return _rung(num_layers=50, percore_batch_size=4, ici_mesh_shape=[1, 128, 1])


@recipe(pax_name="OptimalScaling4x8x8")
def optimal_scaling_4x8x8() -> fdl.Config[Experiment]:
    """34.8 billion parameters on synthetic rows, on 256 chips (4x8x8).

    56 layers × 7168 × 56 heads. Global batch 512 rows of 1,024: 524,288 tokens a step.
    """
    return _rung(num_layers=56, percore_batch_size=2, ici_mesh_shape=[1, 64, 4])


@recipe(pax_name="OptimalScaling4x8x16")
def optimal_scaling_4x8x16() -> fdl.Config[Experiment]:
    """51.8 billion parameters on synthetic rows, on 512 chips (4x8x16).

    64 layers × 8192 × 64 heads. Global batch 1,024 rows of 1,024: 1,048,576 tokens a step.
    """
    return _rung(num_layers=64, percore_batch_size=2, ici_mesh_shape=[1, 128, 4])


@recipe(pax_name="OptimalScaling4x16x16")
def optimal_scaling_4x16x16() -> fdl.Config[Experiment]:
    """51.8 billion parameters on synthetic rows, on 1,024 chips (4x16x16).

    Global batch 1,024 rows of 1,024: 1,048,576 tokens a step.
    """
    return _rung(num_layers=64, percore_batch_size=1, ici_mesh_shape=[1, 256, 4])


@recipe(pax_name="OptimalScaling4x16x32")
def optimal_scaling_4x16x32() -> fdl.Config[Experiment]:
    """51.8 billion parameters on synthetic rows, on 2,048 chips (4x16x32).

    Global batch 2,048 rows of 1,024: 2,097,152 tokens a step.
    """
    return _rung(num_layers=64, percore_batch_size=1, ici_mesh_shape=[1, 512, 4])


@recipe(pax_name="OptimalScaling4x24x32")
def optimal_scaling_4x24x32() -> fdl.Config[Experiment]:
    """51.8 billion parameters on synthetic rows, on 3,072 chips (4x24x32).

    Global batch 3,072 rows of 1,024: 3,145,728 tokens a step. Pax's mesh was [1, 768, 4], which splits 8,192
    features into 768 uneven shards; here 3 replicas of 256 shards compute the same.
    """
    return _rung(num_layers=64, percore_batch_size=1, ici_mesh_shape=[3, 256, 4])


def _rung(num_layers: int, percore_batch_size: int, ici_mesh_shape: list[int]) -> fdl.Config[Experiment]:
    config = cloud_lm(num_layers=num_layers, model_dims=128 * num_layers, num_heads=num_layers)
    config.task.model.stack.remat_policy = "dots_with_no_batch_dims"
    config.task.train.percore_batch_size = percore_batch_size
    config.mesh.ici_mesh_shape = ici_mesh_shape
    return config
