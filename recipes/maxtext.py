"""What recipes out of MaxText begin with."""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.layers.rms_norm import RmsNorm
from paxcli.models.language_model import LanguageModel
from paxcli.training.experiment import Experiment
from paxcli.training.task import SingleTask


@recipe()
def maxtext_base() -> fdl.Config[Experiment]:
    """MaxText's smallest GPT-3 (`gpt3-52k`) in size: `pax maxtext-convert` sets fields on it.

    It has rows of 1,024 made-up tokens, 8 a device, and takes all devices that there are.
    """
    model = LanguageModel.config(
        vocab_size=1024, max_seq_len=1024, model_dims=16, hidden_dims=64, num_layers=1, num_heads=2, dims_per_head=8
    )
    model.fprop_dtype = "bfloat16"
    model.position = None
    model.stack.block.norm = RmsNorm.partial()
    model.final_norm = RmsNorm.partial()
    model.stack.block.feed_forward.use_bias = False
    config = Experiment.config(task=SingleTask.config(name="maxtext", model=model), train_input=SyntheticInput.config())
    config.task.train.percore_batch_size = 8
    return config
