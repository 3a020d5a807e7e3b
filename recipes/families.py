"""The common settings of Pax's two families of language models.

Both are decoder-only, pre-norm, with a tied embedding, a plain GELU feed-forward with biases, and no dropout. The
GShard family (`c4_lm`, `cloud_lm`) has sinusoidal positions, a learned query scale and soft caps; the GPT-3 family
(`gpt3_lm`) has learned positions, biases everywhere and no caps. A recipe calls one of the three and sets sizes, batch
and mesh.
"""

from __future__ import annotations

import fiddle as fdl

from paxcli.inputs.c4 import C4, C4Input
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.layers.init import Gaussian, PraxisXavier
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.layers.positions import LearnedPositions, SinusoidPositions
from paxcli.models.language_model import LanguageModel
from paxcli.optim.adam import Adam
from paxcli.optim.schedules import LinearRampupCosineDecay, LinearRampupExponentialDecay
from paxcli.training.early_stopping import EarlyStopping
from paxcli.training.experiment import Experiment
from paxcli.training.task import SingleTask

# Pax's recipes have no last step; their schedules do.
ENDLESS = 10_000_000


def c4_lm(*, num_layers: int, model_dims: int, num_heads: int, vocab_size: int = 32_000) -> fdl.Config[Experiment]:
    """The GShard family on C4, 1,024 tokens a row (Pax: `C4SpmdAdam`)."""
    model = _gshard_model(num_layers, model_dims, num_heads, vocab_size)
    config = _gshard_experiment(model, learning_rate=1e-3)
    config.task.train.summary_interval_steps = 10
    config.checkpoint.save_interval_steps = 1000
    _read_c4(config)
    return config


def cloud_lm(*, num_layers: int, model_dims: int, num_heads: int) -> fdl.Config[Experiment]:
    """The GShard family on synthetic rows of 1,024 tokens (Pax: `LmCloudSpmd`)."""
    model = _gshard_model(num_layers, model_dims, num_heads, vocab_size=32_000)
    config = _gshard_experiment(model, learning_rate=2.5e-4)
    config.train_input = SyntheticInput.config()
    config.eval_inputs = [SyntheticInput.config(name="synthetic")]
    return config


def gpt3_lm(*, num_layers: int, model_dims: int, num_heads: int, vocab_size: int) -> fdl.Config[Experiment]:
    """The GPT-3 family on C4, 2,048 tokens a row (Pax: `C4SpmdGpt3AdamOrgHP`)."""
    model = _pax_model(num_layers, model_dims, num_heads, vocab_size, norm_epsilon=1e-5)
    model.max_seq_len = 2048
    model.params_init = Gaussian.config(stddev=0.006)
    model.position = LearnedPositions.partial(num_positions=16_384)
    model.stack.block.attention.use_bias = True

    config = _experiment(model)
    learner = config.task.train.learner
    learner.learning_rate = 6e-5
    learner.schedule = LinearRampupCosineDecay.config(warmup_steps=265, decay_start=266, decay_end=108_600)
    learner.optimizer = Adam.config(beta2=0.95, epsilon=1e-8, clip_threshold=None, weight_decay=0.1)
    learner.clip_gradient_norm_to_value = 1.0
    config.task.train.summary_interval_steps = 10
    config.task.early_stopping_fn = EarlyStopping.config(target=2.69)  # log_pplx
    config.checkpoint.save_interval_steps = 100
    _read_c4(config)
    return config


def split_into_stages(
    config: fdl.Config[Experiment],
    num_stages: int,
    microbatch_size: int,
    stream_io: bool = False,
    gather_weights_once: bool = False,
) -> None:
    """Splits the layers of a recipe into pipeline stages; within a stage they are unrolled, as in Pax's recipes."""
    stack = config.task.model.stack
    config.task.model.stack = PipelinedStack.partial(
        block=stack.block,
        num_stages=num_stages,
        microbatch_size=microbatch_size,
        stream_io=stream_io,
        gather_weights_once=gather_weights_once,
        scan=False,
        remat_policy=stack.remat_policy,
    )


def _gshard_model(num_layers: int, model_dims: int, num_heads: int, vocab_size: int) -> fdl.Config[LanguageModel]:
    model = _pax_model(num_layers, model_dims, num_heads, vocab_size, norm_epsilon=1e-6)
    model.max_seq_len = 1024
    model.fprop_dtype = "bfloat16"
    model.params_init = PraxisXavier.config()  # initializes attention far smaller than Xavier
    model.position = SinusoidPositions.partial()
    model.embedding.scale_sqrt_depth = True
    model.embedding.use_bias = True
    model.embedding.logit_cap = 30.0
    model.stack.block.attention.per_dim_scale = True
    model.stack.block.attention.logit_cap = 50.0
    return model


def _gshard_experiment(model: fdl.Config[LanguageModel], learning_rate: float) -> fdl.Config[Experiment]:
    config = _experiment(model)
    learner = config.task.train.learner
    learner.learning_rate = learning_rate
    learner.schedule = LinearRampupExponentialDecay.config(warmup_steps=4000, decay_start=4001, decay_end=300_000)
    learner.optimizer = Adam.config(beta2=0.99, epsilon=1e-6, clip_threshold=1.0, weight_decay=1e-3)
    learner.clip_gradient_norm_to_value = 5.0
    config.task.train.summary_interval_steps = 100
    config.checkpoint.save_interval_steps = 5000
    return config


def _pax_model(
    num_layers: int, model_dims: int, num_heads: int, vocab_size: int, norm_epsilon: float
) -> fdl.Config[LanguageModel]:
    """The model settings of both families."""
    model = LanguageModel.config(
        vocab_size=vocab_size,
        model_dims=model_dims,
        hidden_dims=4 * model_dims,
        num_layers=num_layers,
        num_heads=num_heads,
    )
    for norm in (model.final_norm, model.stack.block.norm):
        norm.epsilon = norm_epsilon
        norm.reductions_in_fp32 = False
    model.stack.block.zero_padding = True
    model.stack.remat_policy = "nothing"
    return model


def _experiment(model: fdl.Config[LanguageModel]) -> fdl.Config[Experiment]:
    config = Experiment.config(task=SingleTask.config(model=model))
    config.task.train.num_train_steps = ENDLESS
    config.task.train.eval_interval_steps = 100
    config.checkpoint.save_max_to_keep = 10
    config.checkpoint.save_keep_interval_duration = "12h"
    config.decoding.truncate_before_temperature = True
    return config


def _read_c4(config: fdl.Config[Experiment]) -> None:
    """Sets C4 in English as the data, in Pax's order and layout; its path and tokenizer are set when training."""
    c4 = C4.config()
    config.train_input = C4Input.config(c4=c4, input_random_seed=9876)
    validation = C4Input.config(name="c4-validation", c4=c4, input_random_seed=4321)
    validation.reset_for_eval = True
    validation.eval_loop_num_batches = None
    validation.eval_num_examples = 5662  # the rows of Pax's validation set
    config.eval_inputs = [validation]
