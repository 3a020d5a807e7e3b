"""The base of recipes converted from MaxText."""

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
def maxtext_base() -> fdl.Config[Experiment]:
    """MaxText's smallest GPT-3 (`gpt3-52k`): `pax maxtext-convert` sets fields on it.

    One layer of 16 × 2 heads. 8 rows of 1,024 synthetic tokens on each device; it uses all devices.
    """
    model = LanguageModel.config(
        vocab_size=1024, max_seq_len=1024, model_dims=16, hidden_dims=64, num_layers=1, num_heads=2, dims_per_head=8
    )
    model.fprop_dtype = "bfloat16"
    model.params_init = Gaussian.config(table_stddev=1.0)
    model.position = LearnedPositions.partial(num_positions=2048)
    model.stack.block.attention.use_bias = True
    config = Experiment.config(task=SingleTask.config(name="maxtext", model=model), train_input=SyntheticInput.config())
    train = config.task.train
    train.percore_batch_size = 8
    train.learner.optimizer = AdamW.config(decay_norms_and_biases=True)
    train.learner.schedule = LinearRampupCosineDecay.config(warmup_steps=100, decay_start=100, decay_end=1000)
    return config
