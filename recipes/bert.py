"""Masked language models: Pax's BERT recipes.

Pax read MLPerf's BERT data from TFRecord files that each user had to provide, masked at each reading, 512 tokens a
row. These recipes train on synthetic rows (`SyntheticInput`) and mask tokens in the model, as Pax did for data without
masks. The rest is the GShard family: per-dimension query scale, soft caps of 50 and 30, embeddings scaled by sqrt(D), a
bias of the logits, sinusoidal positions; but with ReLU, and bidirectional attention.

Two differences from Pax are deliberate: layers are scanned, which computes the same and compiles faster; and the remat
policy applies, which Pax ignored because its layers were unrolled.
"""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.layers.init import PraxisXavier
from paxcli.layers.positions import SinusoidPositions
from paxcli.models.masked_language_model import MaskedLanguageModel
from paxcli.optim.adafactor import ShardedAdafactor
from paxcli.optim.adam import Adam
from paxcli.optim.schedules import LinearRampupExponentialDecay
from paxcli.training.experiment import Experiment
from paxcli.training.task import SingleTask


@recipe("BertAdamL4H128")
def bert_adam_l4_h128() -> fdl.Config[Experiment]:
    """BERT of 4.9M parameters with Adam: pure data parallelism over 8 devices, 64 rows of 512 tokens a step.

    4 layers × 128 × 8 heads. Pax ran it with pmap on the 8 cores of a TPU v2 2x2; for any other number of devices set
    `mesh.ici_mesh_shape=null`, which uses all devices.
    """
    config = _bert("bert-adam-l4-h128")
    train = config.task.train
    train.percore_batch_size = 8
    train.learner.learning_rate = 1e-3
    train.learner.schedule.decay_end = 300_000
    config.task.model.stack.block.attention.combine_qkv = False
    config.mesh.ici_mesh_shape = [8, 1, 1]
    return config


@recipe("BertSpmdL4H128")
def bert_spmd_l4_h128() -> fdl.Config[Experiment]:
    """The same model as `bert-adam-l4-h128`, sharded: 8 devices as 4 fsdp × 2 tensor, 32 rows a step."""
    config = _bert("bert-spmd-l4-h128")
    _use_adafactor(config, weight_decay=1e-3)
    config.task.train.percore_batch_size = 4
    config.mesh.ici_mesh_shape = [1, 4, 2]
    return config


@recipe("BertSpmdL33H12kBiggerBatch")
def bert_spmd_l33_h12k_bigger_batch() -> fdl.Config[Experiment]:
    """BERT of 100B parameters: 512 devices as 64 fsdp × 8 tensor, 2,048 rows of 512 tokens a step.

    33 layers × 12288 × 128 heads of 96, feed-forward of 98304, label smoothing of 0.1.
    """
    config = _bert("bert-spmd-l33-h12k-bigger-batch")
    model = config.task.model
    model.num_layers, model.model_dims, model.hidden_dims = 33, 12288, 98304
    model.num_heads, model.dims_per_head = 128, 96
    model.label_smoothing = 0.1
    _use_adafactor(config, weight_decay=1e-2)
    config.task.train.percore_batch_size = 4
    config.mesh.ici_mesh_shape = [1, 64, 8]
    config.checkpoint.save_interval_steps = 1000
    return config


@recipe("BertSpmdL33H12kBiggerBatch8x8x16")
def bert_spmd_l33_h12k_bigger_batch_8x8x16() -> fdl.Config[Experiment]:
    """BERT of 100B parameters: 1,024 devices as 64 fsdp × 16 tensor, 4,096 rows of 512 tokens a step."""
    config = bert_spmd_l33_h12k_bigger_batch()
    config.task.name = "bert-spmd-l33-h12k-bigger-batch-8x8x16"
    config.mesh.ici_mesh_shape = [1, 64, 16]
    config.checkpoint.save_interval_steps = 500
    return config


@recipe("BertSpmdL66H12kBiggerBatch8x8x16")
def bert_spmd_l66_h12k_bigger_batch_8x8x16() -> fdl.Config[Experiment]:
    """BERT of 200B parameters: 1,024 devices as 64 fsdp × 16 tensor, 4,096 rows of 512 tokens a step."""
    config = bert_spmd_l33_h12k_bigger_batch_8x8x16()
    config.task.name = "bert-spmd-l66-h12k-bigger-batch-8x8x16"
    config.task.model.num_layers = 66
    config.task.model.stack.remat_policy = "qkv_context_out_proj"
    config.checkpoint.save_interval_steps = 200
    config.checkpoint.save_max_to_keep = 20
    return config


@recipe("BertSpmdL66H12kBiggerBatch8x8x8")
def bert_spmd_l66_h12k_bigger_batch_8x8x8() -> fdl.Config[Experiment]:
    """BERT of 200B parameters: 512 devices as 64 fsdp × 8 tensor, 512 rows of 512 tokens a step.

    Pax's description says 1,024 chips; its mesh has 512.
    """
    config = bert_spmd_l66_h12k_bigger_batch_8x8x16()
    config.task.name = "bert-spmd-l66-h12k-bigger-batch-8x8x8"
    config.task.train.percore_batch_size = 1
    config.mesh.ici_mesh_shape = [1, 64, 8]
    return config


def _bert(name: str) -> fdl.Config[Experiment]:
    """The common settings, at the small size."""
    model = MaskedLanguageModel.config(
        vocab_size=32000, max_seq_len=512, model_dims=128, hidden_dims=512, num_layers=4, num_heads=8
    )
    model.fprop_dtype = "bfloat16"
    model.params_init = PraxisXavier.config()
    model.position = SinusoidPositions.partial()
    model.embedding.scale_sqrt_depth = True
    model.embedding.use_bias = True
    model.embedding.logit_cap = 30.0
    block = model.stack.block
    block.attention.per_dim_scale = True
    block.attention.logit_cap = 50.0
    block.feed_forward.activation = "relu"
    block.zero_padding = True
    block.norm.reductions_in_fp32 = model.final_norm.reductions_in_fp32 = False

    task = SingleTask.config(name=name, model=model)
    train = task.train
    train.num_train_steps = 10_000_000
    train.summary_interval_steps = 100
    train.eval_interval_steps = 100
    train.learner.optimizer = Adam.config(beta2=0.99, epsilon=1e-6, clip_threshold=1.0, weight_decay=1e-3)
    train.learner.clip_gradient_norm_to_value = 5.0
    train.learner.schedule = LinearRampupExponentialDecay.config(
        warmup_steps=4000, decay_start=4001, decay_end=100_000, min_ratio=0.1
    )
    config = Experiment.config(task=task, train_input=SyntheticInput.config())
    config.eval_inputs = [SyntheticInput.config(name="synthetic", eval_loop_num_batches=4)]
    config.checkpoint.save_interval_steps = 5000
    config.checkpoint.save_max_to_keep = 10
    config.checkpoint.save_keep_interval_duration = "12h"
    return config


def _use_adafactor(config: fdl.Config[Experiment], weight_decay: float) -> None:
    learner = config.task.train.learner
    learner.learning_rate = 2.5e-4
    learner.optimizer = ShardedAdafactor.config(momentum_dtype="int8", weight_decay=weight_decay)
