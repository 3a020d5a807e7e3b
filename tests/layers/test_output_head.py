"""Logits of a tied table and of an untied head, against their formula."""

from __future__ import annotations

import numpy as np

from paxcli.layers.embedding import TiedEmbedding
from paxcli.layers.output_head import OutputHead
from tests.layers.arrays import random_array
from tests.tolerances import FLOAT32


def test_logits_by_the_table_and_by_a_head():
    x, w, b = random_array(2, 3, 4), random_array(4, 7), random_array(7)
    tied = TiedEmbedding(vocab_size=7, model_dims=4, scale_logits_sqrt_depth=True, use_bias=True, logit_cap=5.0)
    y = tied.apply({"params": {"table": w.T, "bias": b}}, x, method="logits")
    np.testing.assert_allclose(y, 5 * np.tanh((np.asarray(x) @ w / 2 + b) / 5), **FLOAT32)
    head = OutputHead(vocab_size=7, model_dims=4, use_bias=True, logit_cap=5.0)
    y = head.apply({"params": {"w": w, "b": b}}, x, method="logits")
    np.testing.assert_allclose(y, 5 * np.tanh((np.asarray(x) @ w + b) / 5), **FLOAT32)
