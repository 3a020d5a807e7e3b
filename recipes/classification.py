"""Classifiers: Pax's two MLPs, and a small image classifier."""

from __future__ import annotations

import fiddle as fdl

from paxcli.config.recipe import recipe
from paxcli.inputs.synthetic import SyntheticImages, SyntheticInput
from paxcli.layers.vision_transformer import VisionTransformer
from paxcli.models.classification_model import ClassificationMlpModel, ClassificationModel
from paxcli.optim.adam import Adam
from paxcli.optim.adamw import AdamW
from paxcli.optim.schedules import LinearRampupCosineDecay
from paxcli.training.experiment import Experiment
from paxcli.training.task import SingleTask


@recipe("SmallMlp")
def small_mlp() -> fdl.Config[Experiment]:
    """An MLP of 8 layers × 1024 that predicts a token from the one before: 9.4M parameters, 8 devices.

    128 rows of 1,024 synthetic tokens a step. Pax's did not learn: its loss was the accuracy, which has no gradient,
    every token was the same, and the warm-up was longer than the run. Here the loss is the cross-entropy, the rows can
    be learnt, and there is no warm-up.
    """
    return _mlp("small-mlp", model_dims=1024, hidden_dims=1024)


@recipe("LargeMlp")
def large_mlp() -> fdl.Config[Experiment]:
    """The MLP of `small-mlp`, 7168 wide, on a vocabulary of 4096 in 4096 dimensions: 384M parameters, 8 devices."""
    return _mlp("large-mlp", model_dims=4096, hidden_dims=7168)


@recipe()
def vit_synthetic() -> fdl.Config[Experiment]:
    """A small vision transformer on synthetic images of 10 classes: reads no file, learns in a minute on any machine.

    4 layers × 64 × 4 heads over 8 × 8 patches of 32 × 32 × 3 pixels, 64 images a step.
    """
    network = VisionTransformer.partial(
        image_size=32, patch_size=8, model_dims=64, hidden_dims=256, num_layers=4, num_heads=4
    )
    network.stack.remat_policy = "everything"
    task = SingleTask.config(name="vit-synthetic", model=ClassificationModel.config(num_classes=10, network=network))
    train = task.train
    train.num_train_steps = 200
    train.global_batch_size = 64
    train.learner.learning_rate = 1e-3
    train.learner.optimizer = AdamW.config()
    train.learner.schedule = LinearRampupCosineDecay.config(warmup_steps=10)
    config = Experiment.config(task=task, train_input=SyntheticImages.config())
    config.eval_inputs = [SyntheticImages.config(name="synthetic", eval_loop_num_batches=4)]
    return config


def _mlp(name: str, model_dims: int, hidden_dims: int) -> fdl.Config[Experiment]:
    model = ClassificationMlpModel.config(
        vocab_size=model_dims, model_dims=model_dims, hidden_dims=hidden_dims, num_layers=8
    )
    task = SingleTask.config(name=name, model=model)
    train = task.train
    train.num_train_steps = 10
    train.percore_batch_size = 16
    train.summary_interval_steps = 5
    train.eval_interval_steps = 100
    train.learner.learning_rate = 1e-3
    train.learner.optimizer = Adam.config(weight_decay=1e-3)
    train.learner.clip_gradient_norm_to_value = 5.0
    config = Experiment.config(task=task, train_input=SyntheticInput.config(seq_len=1024))
    config.eval_inputs = [SyntheticInput.config(name="synthetic", seq_len=1024)]
    config.mesh.ici_mesh_shape = [8, 1, 1]
    config.checkpoint.save_interval_steps = 5
    config.checkpoint.save_keep_interval_duration = "12h"
    return config
