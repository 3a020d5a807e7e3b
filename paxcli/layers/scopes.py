"""Names that profiling and step-time prediction look for in compiled programs and traces.

XLA keeps the path of Flax modules and `jax.named_scope`s of each instruction in its metadata
(`op_name="jit(train_step)/…/attention/core/dot_general"`). Scopes change only this metadata, never what is computed.
"""

# Module names, which are part of the paths of parameters too.
ATTENTION = "attention"
NORM_SUFFIX = "norm"  # `attention_norm`, `final_norm`, `query_norm`

# Scopes inside an attention layer.
ATTENTION_CORE = "core"  # logits, softmax and the weighted sum of values
ATTENTION_PROJECTION = "projection"  # from activations to queries, keys and values, and from the context back

# Scopes of a training step.
CAST = "cast"
GRADIENT_ACCUMULATION = "gradient_accumulation"
LOSS = "loss"
METRICS = "metrics"
NOISE = "noise"
OPTIMIZER = "optimizer"

# Phases of the training loop, which it marks in traces of the host.
TRAIN_PHASE = "train"
INPUT_PHASE = "input"
SAVE_PHASE = "save"
EVALUATE_PHASE = "evaluate"
PHASES = (TRAIN_PHASE, INPUT_PHASE, SAVE_PHASE, EVALUATE_PHASE)
