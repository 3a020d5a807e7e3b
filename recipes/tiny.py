"""Recipes that train on any machine in minutes."""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.inputs.base_input import Prompts
from paxcli.inputs.stdlib import StdlibInput
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.init import Gaussian
from paxcli.models.language_model import LanguageModel
from paxcli.optim.muon import Muon
from paxcli.optim.schedules import LinearRampupCosineDecay
from paxcli.training.experiment import Experiment
from paxcli.training.task import SingleTask


@recipe()
def tiny() -> fdl.Config[Experiment]:
    """A byte-level language model, trained on the sources of Python's standard library.

    4 layers × 128 × 4 heads, 256 bytes a row, 2,048 bytes a step. Two CPU cores train it in three to five minutes, to
    about 1.23 nats per byte on held-out files.
    """
    task = SingleTask.config(name="tiny", model=_byte_model())
    train = task.train
    train.num_train_steps = 900
    train.global_batch_size = 8
    train.eval_interval_steps = 450
    train.learner.learning_rate = 1e-2
    train.learner.schedule = LinearRampupCosineDecay.config(warmup_steps=100, min_ratio=0.05)
    train.learner.optimizer = Muon.config()

    config = Experiment.config(task=task, train_input=StdlibInput.config())
    config.eval_inputs = [StdlibInput.config(name="stdlib", reset_for_eval=True, eval_loop_num_batches=None)]
    config.decode_inputs = [Prompts.config(prompts=["def ", "class ", "import "])]
    config.decoding.temperature = 0.7
    config.checkpoint.save_interval_steps = 150
    config.checkpoint.save_max_to_keep = 3
    return config


@recipe()
def tiny_synthetic() -> fdl.Config[Experiment]:
    """`tiny` on synthetic rows: reads no file."""
    config = tiny()
    config.task.name = "tiny-synthetic"
    config.train_input = SyntheticInput.config()
    config.eval_inputs = [SyntheticInput.config(name="synthetic", eval_loop_num_batches=4)]
    config.decode_inputs = []
    return config


def _byte_model() -> fdl.Config[LanguageModel]:
    model = LanguageModel.config(
        vocab_size=259, max_seq_len=256, model_dims=128, hidden_dims=512, num_layers=4, num_heads=4
    )
    model.params_init = Gaussian.config(stddev=0.02)
    model.position = None
    model.stack.block.attention.rotary = Rotary.partial()
    model.stack.remat_policy = "everything"  # small enough to save every activation
    return model
