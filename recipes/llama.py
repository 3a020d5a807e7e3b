"""Llama models (Touvron et al., 2023) on synthetic rows: for GPUs, and to compare with other implementations.

RMSNorm, RoPE, SwiGLU without biases, grouped-query attention (GQA) in some, an untied output head. Mixed precision:
parameters and second moments are float32, activations bfloat16. Batch size and remat policy are for one GPU of 141 GB
with unrolled layers (overlay `gpu-1`), where JAX may use 92 %; with FSDP over several, larger batches fit. Attention is
not restricted to documents, so that cuDNN's kernel needs no mask; set `attention.segmented` to true for packed
documents.
"""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.init import Gaussian
from paxcli.layers.output_head import OutputHead
from paxcli.layers.rms_norm import RmsNorm
from paxcli.models.language_model import LanguageModel
from paxcli.optim.adamw import AdamW
from paxcli.optim.schedules import LinearRampupCosineDecay
from paxcli.training.experiment import Experiment
from paxcli.training.task import SingleTask


@recipe()
def llama_1b() -> fdl.Config[Experiment]:
    """TinyLlama: 1.1 billion parameters on synthetic rows (Zhang et al., 2024).

    22 layers × 2048 × 32 heads, 4 key/value heads. 16 rows of 2,048 tokens on each device.
    """
    config = _llama(num_layers=22, model_dims=2048, hidden_dims=5632, num_heads=32, vocab_size=32_000)
    config.task.model.num_kv_heads = 4
    config.task.model.max_seq_len = 2048
    config.task.model.stack.remat_policy = "dots_except_logits"
    config.task.train.percore_batch_size = 16
    config.task.train.learner.learning_rate = 4e-4
    return config


@recipe()
def llama2_7b() -> fdl.Config[Experiment]:
    """Llama 2 7B: 6.74 billion parameters on synthetic rows.

    32 layers × 4096 × 32 heads. 2 rows of 4,096 tokens on each device.
    """
    config = _llama(num_layers=32, model_dims=4096, hidden_dims=11_008, num_heads=32, vocab_size=32_000)
    config.task.model.max_seq_len = 4096
    config.task.model.stack.remat_policy = "dots_except_logits"
    config.task.train.percore_batch_size = 2
    return config


@recipe()
def llama3_8b() -> fdl.Config[Experiment]:
    """Llama 3 8B: 8.03 billion parameters on synthetic rows.

    32 layers × 4096 × 32 heads, 8 key/value heads. One row of 8,192 tokens on each device. The first moments are
    bfloat16: with float32 ones, the state and its gradients fill a GPU of 141 GB.
    """
    config = _llama(num_layers=32, model_dims=4096, hidden_dims=14_336, num_heads=32, vocab_size=128_256)
    config.task.model.num_kv_heads = 8
    config.task.model.max_seq_len = 8192
    config.task.model.stack.block.attention.rotary.max_timescale = 500_000.0
    config.task.model.stack.remat_policy = "dots_except_logits"
    config.task.train.percore_batch_size = 1
    config.task.train.learner.optimizer.mu_dtype = "bfloat16"
    return config


def _llama(
    num_layers: int, model_dims: int, hidden_dims: int, num_heads: int, vocab_size: int
) -> fdl.Config[Experiment]:
    model = LanguageModel.config(
        vocab_size=vocab_size,
        model_dims=model_dims,
        hidden_dims=hidden_dims,
        num_layers=num_layers,
        num_heads=num_heads,
    )
    model.fprop_dtype = "bfloat16"
    model.params_init = Gaussian.config(stddev=0.02)
    model.position, model.head = None, OutputHead.partial()
    model.stack.block.norm, model.final_norm = RmsNorm.partial(epsilon=1e-5), RmsNorm.partial(epsilon=1e-5)
    model.stack.block.attention.rotary, model.stack.block.attention.segmented = Rotary.partial(), False
    feed_forward = model.stack.block.feed_forward
    feed_forward.activation, feed_forward.gated, feed_forward.use_bias = "silu", True, False
    config = Experiment.config(task=SingleTask.config(name="llama", model=model), train_input=SyntheticInput.config())
    train = config.task.train
    train.num_train_steps = 500_000
    train.learner.learning_rate = 3e-4
    train.learner.optimizer = AdamW.config()
    train.learner.schedule = LinearRampupCosineDecay.config(warmup_steps=2000)
    config.checkpoint.save_interval_steps = 1000
    return config
