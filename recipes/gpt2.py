"""GPT-2 (Radford et al., 2019) on synthetic rows: for GPUs, and to compare with other implementations.

The vocabulary of 50,257 is padded to 50,304 = 393 × 128, which suits tensor cores. The batch is for devices of at
least 80 GB; training uses mixed precision: float32 parameters and optimizer state, bfloat16 activations. Attention is
not restricted to documents, as in GPT-2's own training, so that cuDNN's kernel needs no mask.
"""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.layers.init import Gaussian
from paxcli.layers.positions import LearnedPositions
from paxcli.models.language_model import LanguageModel
from paxcli.optim.adamw import AdamW
from paxcli.optim.schedules import LinearRampupCosineDecay
from paxcli.training.experiment import Experiment
from paxcli.training.task import SingleTask


@recipe()
def gpt2_124m() -> fdl.Config[Experiment]:
    """GPT-2 small: 124 million parameters on synthetic rows.

    12 layers × 768 × 12 heads. 64 rows of 1,024 tokens on each device.
    """
    config = _gpt2(num_layers=12, model_dims=768, num_heads=12)
    config.task.train.percore_batch_size = 64
    return config


@recipe()
def gpt2_1p5b() -> fdl.Config[Experiment]:
    """GPT-2 XL: 1.56 billion parameters on synthetic rows.

    48 layers × 1600 × 25 heads. 16 rows of 1,024 tokens on each device.
    """
    config = _gpt2(num_layers=48, model_dims=1600, num_heads=25)
    config.task.train.percore_batch_size = 16
    config.task.train.learner.learning_rate = 2e-4
    return config


def _gpt2(num_layers: int, model_dims: int, num_heads: int) -> fdl.Config[Experiment]:
    model = LanguageModel.config(
        vocab_size=50_304,
        max_seq_len=1024,
        model_dims=model_dims,
        hidden_dims=4 * model_dims,
        num_layers=num_layers,
        num_heads=num_heads,
    )
    model.fprop_dtype = "bfloat16"
    model.params_init = Gaussian.config(stddev=0.02)
    model.position = LearnedPositions.partial()
    model.final_norm.epsilon = model.stack.block.norm.epsilon = 1e-5
    model.stack.block.attention.use_bias, model.stack.block.attention.segmented = True, False
    model.stack.remat_policy = "everything"
    config = Experiment.config(task=SingleTask.config(name="gpt2", model=model), train_input=SyntheticInput.config())
    # With Triton's matmuls, GPUs add biases and compute GELU in kernels of their own: 1.3 % slower on an H200.
    config.mesh.compiler_options = {"xla_gpu_enable_triton_gemm": False}
    train = config.task.train
    train.num_train_steps = 600_000
    train.learner.learning_rate = 6e-4
    train.learner.optimizer = AdamW.config()
    train.learner.schedule = LinearRampupCosineDecay.config(warmup_steps=2000)
    config.checkpoint.save_interval_steps = 1000
    return config
