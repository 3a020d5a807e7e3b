"""Encoder-decoder models."""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.inputs.synthetic import SyntheticPairs
from paxcli.models.sequence_model import SequenceModel
from paxcli.optim.adamw import AdamW
from paxcli.optim.schedules import LinearRampupCosineDecay
from paxcli.training.experiment import Experiment
from paxcli.training.task import SingleTask


@recipe()
def sequence_synthetic() -> fdl.Config[Experiment]:
    """An encoder-decoder that learns to reverse sequences: reads no file.

    2 + 2 layers × 128 × 4 heads, up to 15 tokens out of 30 a row, 64 rows a step. For a copy set
    `train_input.target=copy`.
    """
    model = SequenceModel.config(
        vocab_size=32, max_seq_len=16, model_dims=128, hidden_dims=512, num_layers=2, num_heads=4
    )
    model.encoder.remat_policy = model.decoder.remat_policy = "everything"
    task = SingleTask.config(name="sequence-synthetic", model=model)
    train = task.train
    train.num_train_steps = 600
    train.global_batch_size = 64
    train.learner.learning_rate = 1e-3
    train.learner.optimizer = AdamW.config(beta2=0.98)
    train.learner.schedule = LinearRampupCosineDecay.config(warmup_steps=50)
    config = Experiment.config(task=task, train_input=SyntheticPairs.config())
    config.eval_inputs = [SyntheticPairs.config(name="synthetic", eval_loop_num_batches=4)]
    return config
