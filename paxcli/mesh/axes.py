"""Mesh axes and logical axes.

A *mesh axis* is a dimension of the device mesh. A *logical axis* names the meaning of an array dimension; the rules
in `rules.py` map it to mesh axes. Layers name logical axes only:

    parameters    embed, mlp, heads, kv_heads, head_dim, vocab, layers, norm, expert, stage
    activations   activation_stage, activation_batch, activation_microbatch, activation_length, activation_embed,
                  activation_residual, activation_mlp, activation_heads, activation_kv_heads, activation_vocab,
                  activation_expert
"""

from __future__ import annotations

import enum


class Axis(enum.StrEnum):
    """A mesh axis, from the outermost (slowest links) to the innermost (fastest)."""

    STAGE = "stage"  # pipeline parallelism
    DATA = "data"  # data parallelism: parameters are replicated
    FSDP = "fsdp"  # fully sharded data parallelism (ZeRO-3): shards parameters and the batch
    CONTEXT = "context"  # context parallelism: shards the sequence
    EXPERT = "expert"  # expert parallelism: shards experts and the batch
    TENSOR = "tensor"  # tensor parallelism: shards heads and hidden dimensions


MESH_AXES: tuple[str, ...] = tuple(axis.value for axis in Axis)
BATCH_AXES: tuple[str, ...] = (Axis.DATA.value, Axis.FSDP.value, Axis.EXPERT.value)
