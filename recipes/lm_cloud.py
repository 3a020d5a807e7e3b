"""Pax's GShard-style language models on synthetic rows, for speed and scaling without data.

The `lm-cloud-NNNb` use bfloat16 activations, a learning rate of 2.5e-4 with 4,000 steps of warm-up, an evaluation every
100 steps and a checkpoint every 5,000. The synthetic rows are pax's own and can be learnt: the loss falls, but not
as in Pax.
"""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.training.experiment import Experiment

from .families import cloud_lm


@recipe(pax_name="LmCloudSpmdTest")
def lm_cloud_test() -> fdl.Config[Experiment]:
    """2.2 million parameters on synthetic rows, on one device: the smallest of its family.

    2 layers × 64 × 8 heads. Global batch 4 rows of 1,024: 4,096 tokens a step.
    """
    config = cloud_lm(num_layers=2, model_dims=64, num_heads=8)
    config.task.train.percore_batch_size = 4
    config.mesh.ici_mesh_shape = [1, 1, 1]
    return config


@recipe(pax_name="LmCloudSpmd2B")
def lm_cloud_2b() -> fdl.Config[Experiment]:
    """2.14 billion parameters on synthetic rows, on 4 chips.

    18 layers × 3072 × 24 heads. Global batch 32 rows of 1,024: 32,768 tokens a step. Pax's docstring states a
    batch of 128, which does not follow from its settings.
    """
    config = cloud_lm(num_layers=18, model_dims=3072, num_heads=24)
    config.task.train.percore_batch_size = 8
    config.mesh.ici_mesh_shape = [1, 4, 1]
    return config


@recipe(pax_name="LmCloudSpmd2BLimitSteps")
def lm_cloud_2b_limit_steps() -> fdl.Config[Experiment]:
    """`lm-cloud-2b`, ended after 300 steps."""
    config = lm_cloud_2b()
    config.task.train.num_train_steps = 300
    return config


@recipe(pax_name="LmCloudSpmd32B")
def lm_cloud_32b() -> fdl.Config[Experiment]:
    """32.5 billion parameters on synthetic rows, on 64 chips.

    40 layers × 8192 × 64 heads. Global batch 512 rows of 1,024: 524,288 tokens a step. Pax ran a model of this size
    on v4 at about 42 % MFU.
    """
    config = cloud_lm(num_layers=40, model_dims=8192, num_heads=64)
    config.task.model.stack.remat_policy = "context_and_out_proj"
    config.task.train.percore_batch_size = 8
    config.mesh.ici_mesh_shape = [1, 16, 4]
    return config


@recipe(pax_name="LmCloudSpmd64B")
def lm_cloud_64b() -> fdl.Config[Experiment]:
    """64.5 billion parameters on synthetic rows, on 128 chips.

    51 layers × 10240 × 80 heads. Global batch 512 rows of 1,024: 524,288 tokens a step.
    """
    config = cloud_lm(num_layers=51, model_dims=10240, num_heads=80)
    config.task.model.stack.remat_policy = "context_and_out_proj"
    config.task.train.percore_batch_size = 4
    config.mesh.ici_mesh_shape = [1, 16, 8]
    return config


@recipe(pax_name="LmCloudSpmd128B")
def lm_cloud_128b() -> fdl.Config[Experiment]:
    """129 billion parameters on synthetic rows, on 256 chips.

    71 layers × 12288 × 96 heads. Global batch 1,024 rows of 1,024: 1,048,576 tokens a step. Pax ran a model of this
    size on v4 at about 48.5 % MFU.
    """
    config = cloud_lm(num_layers=71, model_dims=12288, num_heads=96)
    config.task.train.percore_batch_size = 4
    config.mesh.ici_mesh_shape = [1, 64, 4]
    return config


@recipe(pax_name="LmCloudSpmd256B")
def lm_cloud_256b() -> fdl.Config[Experiment]:
    """258 billion parameters on synthetic rows, on 512 chips.

    80 layers × 16384 × 128 heads. Global batch 2,048 rows of 1,024: 2,097,152 tokens a step. Pax ran a model of
    this size on v4 at about 53 % MFU.
    """
    config = cloud_lm(num_layers=80, model_dims=16384, num_heads=128)
    config.task.train.percore_batch_size = 4
    config.mesh.ici_mesh_shape = [1, 64, 8]
    return config


@recipe(pax_name="LmCloudSpmd512B")
def lm_cloud_512b() -> fdl.Config[Experiment]:
    """514 billion parameters on synthetic rows, on 1,024 chips.

    102 layers × 20480 × 160 heads. Global batch 4,096 rows of 1,024: 4,194,304 tokens a step. Pax ran a model of
    this size on v4 at about 49 % MFU.
    """
    config = cloud_lm(num_layers=102, model_dims=20480, num_heads=160)
    config.task.train.percore_batch_size = 4
    config.mesh.ici_mesh_shape = [1, 64, 16]
    # Without microbatches the activations fit v4, but not the buffers of their collectives.
    config.task.train.num_microbatches = 2
    return config


@recipe(pax_name="LmCloudSpmd1024B")
def lm_cloud_1024b() -> fdl.Config[Experiment]:
    """1,030 billion parameters on synthetic rows, on 2,048 chips.

    142 layers × 24576 × 192 heads. Global batch 4,096 rows of 1,024: 4,194,304 tokens a step. Pax ran a model of
    this size on v4 at about 53.5 % MFU.
    """
    config = cloud_lm(num_layers=142, model_dims=24576, num_heads=192)
    config.task.train.percore_batch_size = 2
    config.mesh.ici_mesh_shape = [1, 256, 8]
    return config


@recipe(pax_name="LmCloudSpmdMultislice2B")
def lm_cloud_multislice_2b() -> fdl.Config[Experiment]:
    """`lm-cloud-2b`, 2.14 billion parameters, on two slices of 4 chips.

    Global batch 128 rows of 1,024: 131,072 tokens a step.
    """
    config = lm_cloud_2b()
    config.task.train.percore_batch_size = 16
    config.mesh.dcn_mesh_shape = [2, 1, 1]
    return config


@recipe(pax_name="LmCloudSpmdAdam")
def lm_cloud_adam() -> fdl.Config[Experiment]:
    """166 million parameters on synthetic rows, 2 unrolled layers in float32, on 8 chips.

    2 layers × 2048 × 16 heads. Global batch 128 rows of 1,024: 131,072 tokens a step. Learning rate 1e-3. The remat
    policy applies; Pax ignored it for unrolled layers.
    """
    config = cloud_lm(num_layers=2, model_dims=2048, num_heads=16)
    config.task.model.fprop_dtype = "float32"
    config.task.model.stack.scan = False
    config.task.train.percore_batch_size = 16
    config.task.train.learner.learning_rate = 1e-3
    config.mesh.ici_mesh_shape = [1, 4, 2]
    return config


@recipe(pax_name="LmCloudSpmdAdamLimitSteps")
def lm_cloud_adam_limit_steps() -> fdl.Config[Experiment]:
    """`lm-cloud-adam`, ended after 4,000 steps."""
    config = lm_cloud_adam()
    config.task.train.num_train_steps = 4000
    return config


@recipe(pax_name="LmCloudTransformerAdam")
def lm_cloud_transformer() -> fdl.Config[Experiment]:
    """436 million parameters on synthetic rows, data-parallel over all devices.

    32 layers × 1024 × 16 heads, unrolled, ReLU, no cap on the logits, float32. 16 rows of 1,024 on each device: on
    4 devices a global batch of 64, 65,536 tokens a step. Learning rate 1e-3. Pax ran it with pmap over the devices
    of one host; here it is the mesh's `data` axis, over all hosts.
    """
    config = cloud_lm(num_layers=32, model_dims=1024, num_heads=16)
    model = config.task.model
    model.fprop_dtype = "float32"
    model.embedding.logit_cap = None
    model.stack.scan = False
    model.stack.remat_policy = "everything"
    model.stack.block.attention.combine_qkv = False
    model.stack.block.feed_forward.activation = "relu"
    config.task.train.percore_batch_size = 16
    config.task.train.learner.learning_rate = 1e-3
    return config


@recipe(pax_name="LmCloudTransformerAdamTest")
def lm_cloud_transformer_test() -> fdl.Config[Experiment]:
    """58 million parameters: `lm-cloud-transformer` with 2 layers.

    On 4 devices a global batch of 64 rows of 1,024: 65,536 tokens a step.
    """
    config = lm_cloud_transformer()
    config.task.model.num_layers = 2
    return config


@recipe(pax_name="LmCloudTransformerAdamLimitSteps")
def lm_cloud_transformer_limit_steps() -> fdl.Config[Experiment]:
    """159 million parameters: `lm-cloud-transformer` with 10 layers, ended after 2,000 steps.

    On 4 devices a global batch of 64 rows of 1,024: 65,536 tokens a step.
    """
    config = lm_cloud_transformer()
    config.task.model.num_layers = 10
    config.task.train.num_train_steps = 2000
    return config
