"""FLOPs of decoder-only models, against counts that MaxText published, their decode cache, and packed documents."""

from __future__ import annotations

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_recipes.tiny import tiny_synthetic
from paxcli.errors import ConfigError
from paxcli.inputs.base_input import language_spec
from paxcli.layers.attention.attention import Attention
from paxcli.layers.attention.latent_attention import LatentAttention
from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.block import EncoderBlock
from paxcli.layers.flops import Flops
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.output_head import OutputHead
from paxcli.layers.patterned_stack import PatternedStack
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from paxcli.training.validate import validate
from tests.tolerances import FLOAT32

# Published shapes: model, hidden, layers, heads, kv heads, dims per head, vocabulary, gated.
LLAMA2_7B = (4096, 11008, 32, 32, 32, 128, 32000, True)
LLAMA2_70B = (8192, 28672, 80, 64, 8, 128, 32000, True)
LLAMA3_8B = (4096, 14336, 32, 32, 8, 128, 128256, True)
LLAMA3_405B = (16384, 53248, 126, 128, 8, 128, 128256, True)
GPT3_175B = (12288, 49152, 96, 96, 96, 128, 50304, False)
GEMMA_2B = (2048, 16384, 18, 8, 1, 256, 256128, True)
MAXTEXT_22B = (6144, 24576, 48, 24, 24, 256, 32768, False)


def _config(shape: tuple) -> fdl.Config[LanguageModel]:
    model, hidden, layers, heads, kv_heads, head, vocab, gated = shape
    config = LanguageModel.config(
        vocab_size=vocab,
        max_seq_len=8192,
        model_dims=model,
        hidden_dims=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        dims_per_head=head,
    )
    config.stack.block.feed_forward.gated = gated
    return config


def _flops(config: fdl.Config[LanguageModel], batch: int, seq_len: int) -> Flops:
    flops = fdl.build(config).step_flops(language_spec(batch, seq_len))
    assert flops is not None
    return flops


# TFLOPs that MaxText counts for one step: by weights, by causal attention, in all, in all without causality.
@pytest.mark.parametrize(
    ("shape", "batch", "seq_len", "weights", "attention", "total", "total_not_causal"),
    [
        (LLAMA2_7B, 12, 2048, "974.25", "39.58", "1013.84", "1053.42"),
        (LLAMA2_7B, 4, 8192, "1299.00", "211.11", "1510.11", "1721.22"),
        (LLAMA2_7B, 1, 2048, "81.19", "3.30", "84.49", "87.78"),
        (LLAMA3_8B, 1, 2048, "92.22", "3.30", "95.52", "98.81"),
        (LLAMA2_70B, 1, 2048, "844.35", "16.49", "860.84", "877.33"),
        (LLAMA3_405B, 1, 2048, "4961.25", "51.95", "5013.21", "5065.16"),
        (GPT3_175B, 1, 2048, "2145.05", "29.69", "2174.73", "2204.42"),
        (GEMMA_2B, 1, 2048, "30.80", "0.93", "31.73", "32.65"),
        (MAXTEXT_22B, 16, 1024, "2157.2", "29.7", "2186.9", "2216.6"),
    ],
)
def test_published_counts_are_reproduced_to_the_last_digit(
    shape, batch, seq_len, weights, attention, total, total_not_causal
):
    config = _config(shape)
    causal = _flops(config, batch, seq_len)
    config.stack.block.attention.causal = False
    full = _flops(config, batch, seq_len)
    assert _printed(causal.weights, weights) == weights
    assert _printed(causal.attention, attention) == attention
    assert _printed(causal.total, total) == total
    assert _printed(full.total, total_not_causal) == total_not_causal


def _printed(flops: float, like: str) -> str:
    return f"{flops / 1e12:.{len(like.partition('.')[2])}f}"


def test_stacks_of_the_same_blocks_count_the_same():
    config = _config(LLAMA3_8B)
    expected = _flops(config, 2, 2048)
    config.head = OutputHead.partial()
    assert _flops(config, 2, 2048) == expected  # a look-up is free, tied or not
    block = config.stack.block
    config.stack = PipelinedStack.partial(block=block, num_stages=4, num_microbatches=2)
    assert _flops(config, 2, 2048) == expected
    config.stack = PatternedStack.partial(turns=(block, block))
    assert _flops(config, 2, 2048) == expected


def test_flops_of_alternating_windows_and_of_a_tokens_experts():
    config = _config(LLAMA2_7B)
    block = config.stack.block
    counts = {}
    for windows in ((256,), (None,), (256, None)):
        turns = tuple(fdl.copy_with(block, attention=fdl.copy_with(block.attention, window=w)) for w in windows)
        config.stack = PatternedStack.partial(turns=turns)
        counts[windows] = _flops(config, 1, 2048)
    assert counts[256, None].attention == (counts[256,].attention + counts[None,].attention) / 2
    assert counts[256, None].weights == counts[None,].weights

    experts = MoeFeedForward.partial(num_experts=16, num_experts_per_token=3)
    config.stack = PatternedStack.partial(turns=(fdl.copy_with(block, feed_forward=experts),))
    one_expert = 2 * 2048 * 32 * 3 * 4096 * 11008
    routers = 2 * 2048 * 32 * 4096 * 16
    assert _flops(config, 1, 2048).weights - counts[None,].weights == 3 * (2 * one_expert + routers)


@pytest.mark.parametrize("pattern", [None, True, False])
def test_the_cache_is_that_of_its_layers(pattern):
    """K heads of keys and values for each layer; its size in bytes is known before anything is allocated."""
    config = _config((64, 128, 4, 4, 2, 16, 100, False))
    config.fprop_dtype = "bfloat16"
    config.stack.block.attention.value_dims_per_head = 24
    if pattern is not None:
        config.stack = PatternedStack.partial(turns=(config.stack.block,) * 2, scan=pattern)
    model = fdl.build(config)
    cache = jax.eval_shape(lambda: model.init_cache(3, 10))
    parts = (cache,) if pattern is None else cache
    count, stacked = {None: (1, (4,)), True: (2, (2,)), False: (4, ())}[pattern]
    assert [part.key.shape for part in parts] == [(*stacked, 3, 2, 16, 10)] * count
    assert [part.value.shape for part in parts] == [(*stacked, 3, 2, 10, 24)] * count
    assert parts[0].key.dtype == jnp.bfloat16
    assert model.cache_bytes(3, 10) == 2 * 4 * 3 * 2 * 10 * (16 + 24)


def test_a_model_that_sees_later_tokens_does_not_decode():
    config = _config((64, 128, 4, 4, 2, 16, 100, False))
    config.stack.block = EncoderBlock.partial()
    with pytest.raises(ConfigError, match="not causal"):
        fdl.build(config).init_cache(1, 8)


@pytest.mark.parametrize("attention", [Attention, LatentAttention])
def test_documents_that_see_each_other_are_one_text(attention):
    config = _config((16, 32, 1, 2, 2, 8, 20, False))
    config.position = None
    sizes = {"rotary": Rotary.partial()} if attention is Attention else {"latent_dims": 8, "rotary_dims": 4}
    config.stack.block.attention = attention.partial(segmented=False, **sizes)
    model, ids = fdl.build(config), jnp.arange(8)[None]
    batch = NestedMap(ids=ids, labels=ids, weights=jnp.ones((1, 8)), segment_ids=ids // 4 + 1, segment_pos=ids % 4)
    joined = batch | {"segment_ids": jnp.ones_like(ids), "segment_pos": ids}
    params = jax.jit(model.init)(jax.random.key(0), batch)["params"]
    found, expected = (jax.jit(model.loss_and_metrics)(params, rows)[1].xent for rows in (batch, NestedMap(joined)))
    np.testing.assert_allclose(found, expected, **FLOAT32)


@pytest.mark.parametrize("field", ["use_bias", "logit_cap", "scale_logits_sqrt_depth"])
def test_fields_of_tied_logits_are_refused_beside_a_head(field):
    config = tiny_synthetic()
    setattr(config.task.model.embedding, field, 30.0 if field == "logit_cap" else True)
    validate(config)
    config.task.model.head = OutputHead.partial()
    with pytest.raises(ConfigError, match=f"task.model.embedding.{field} has no effect: `task.model.head` computes"):
        validate(config)
