from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from paxcli.metrics.flops import transformer_flops_per_step

# Published shapes: model, hidden, layers, heads, kv heads, dims per head, vocabulary, matrices into the hidden layer.
LLAMA2_7B = (4096, 11008, 32, 32, 32, 128, 32000, 2)
LLAMA2_70B = (8192, 28672, 80, 64, 8, 128, 32000, 2)
LLAMA3_8B = (4096, 14336, 32, 32, 8, 128, 128256, 2)
LLAMA3_405B = (16384, 53248, 126, 128, 8, 128, 128256, 2)
GPT3_175B = (12288, 49152, 96, 96, 96, 128, 50304, 1)
GEMMA_2B = (2048, 16384, 18, 8, 1, 256, 256128, 2)
MAXTEXT_22B = (6144, 24576, 48, 24, 24, 256, 32768, 1)


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
    causal = transformer_flops_per_step(batch, seq_len, *shape)
    full = transformer_flops_per_step(batch, seq_len, *shape, causal=False)
    assert _printed(causal.weights, weights) == weights
    assert _printed(causal.attention, attention) == attention
    assert _printed(causal.total, total) == total
    assert _printed(full.total, total_not_causal) == total_not_causal


def test_sliding_window_counts_the_pairs_of_a_mask():
    seq_len, window = 512, 128
    causal = transformer_flops_per_step(1, seq_len, *LLAMA2_7B)
    windowed = transformer_flops_per_step(1, seq_len, *LLAMA2_7B, sliding_window=window)
    distance = jnp.arange(seq_len)[:, None] - jnp.arange(seq_len)
    # A mask also has the diagonal, where the closed form has half of it.
    pairs = [float(jnp.sum((distance >= 0) & (distance < reach))) for reach in (window, seq_len)]
    assert windowed.attention / causal.attention == pytest.approx(pairs[0] / pairs[1], rel=5e-3)
    assert windowed.weights == causal.weights
    assert transformer_flops_per_step(1, seq_len, *LLAMA2_7B, sliding_window=4096) == causal


def test_sliding_window_without_causality_is_refused():
    with pytest.raises(ValueError, match="causal"):
        transformer_flops_per_step(1, 8, *LLAMA2_7B, causal=False, sliding_window=4)


def test_forward_count_is_what_xla_counts_for_a_layer():
    B, T, D, F, N, K, H, V = 2, 64, 32, 96, 4, 2, 8, 128

    def forward(x, wq, wk, wv, wo, gate, up, down, unembed):
        q = jnp.einsum("btd,dkgh->btkgh", x, wq)
        k, v = jnp.einsum("bsd,dkh->bskh", x, wk), jnp.einsum("bsd,dkh->bskh", x, wv)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k)
        x = jnp.einsum("btkgh,kghd->btd", jnp.einsum("bkgts,bskh->btkgh", scores, v), wo)
        return jnp.einsum("btf,fd->btd", jnp.einsum("btd,df->btf", x, gate) + x @ up, down) @ unembed

    shapes = [(B, T, D), (D, K, N // K, H), (D, K, H), (D, K, H), (K, N // K, H, D), (D, F), (D, F), (F, D), (D, V)]
    lowered = jax.jit(forward).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    ours = transformer_flops_per_step(B, T, D, F, 1, N, K, H, V, num_gate_activations=2, causal=False)
    assert ours.total / 3 == pytest.approx(lowered.cost_analysis()["flops"], rel=0.01)


def _printed(flops: float, like: str) -> str:
    return f"{flops / 1e12:.{len(like.partition('.')[2])}f}"
