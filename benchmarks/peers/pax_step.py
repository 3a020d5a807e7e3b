"""The step that `pax train` runs: of a recipe, or of a GPT-2-like one of the sizes given, on synthetic rows.

The task has `recipe`, `overlays` and `sets`, or sizes.
"""

from __future__ import annotations

import atexit
import contextlib

from steps import TokenCounter, serve

_COUNTER = TokenCounter()
_OPEN = contextlib.ExitStack()  # the session, whose mesh is the current one until the process ends
atexit.register(_OPEN.close)


def make_step(task: dict):
    """The train step of the recipe."""
    import jax

    from paxcli.config.resolve import resolve
    from paxcli.mesh.sharding import put_batch
    from paxcli.mesh.startup import return_free_memory
    from paxcli.training.instrument import Instrument
    from paxcli.training.session import build_session

    if "recipe" in task:
        config = resolve(task["recipe"], task["overlays"], task["sets"]).config
    else:
        config = gpt2_like(task)
    session = _OPEN.enter_context(build_session(config).active())
    train_step = Instrument().prepare(session)()
    state = session.new_state()
    return_free_memory()
    metrics: dict = {}

    def step() -> None:
        nonlocal state, metrics
        batch = session.experiment.train_input.get_next()
        _COUNTER.add(int((batch.segment_ids > 0).sum()))
        state, metrics = train_step(state, put_batch(batch, session.mesh))

    return step, lambda: jax.block_until_ready(metrics)


def gpt2_like(size: dict):
    """A recipe of this size, with the positions, biases and weight decay of the peers."""
    from pax_recipes.tiny import tiny_synthetic
    from paxcli.layers.positions import LearnedPositions
    from paxcli.optim.adamw import AdamW

    config = tiny_synthetic()
    model = config.task.model
    for name in ("num_layers", "model_dims", "hidden_dims", "num_heads", "vocab_size"):
        setattr(model, name, size[name])
    model.max_seq_len = size["seq_len"]
    model.stack.unroll = 1  # as the peer in JAX scans its layers
    model.position = LearnedPositions.partial()
    model.stack.block.attention.rotary = None
    model.stack.block.attention.use_bias = True
    config.task.train.global_batch_size = size["batch"]
    config.task.train.learner.optimizer = AdamW.config(beta2=0.95, decay_norms_and_biases=True)
    return config


if __name__ == "__main__":
    serve(make_step, _COUNTER)
