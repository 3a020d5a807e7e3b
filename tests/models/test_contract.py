"""An architecture in a user's own file: all that the rest of pax asks of it is what its model and layers declare."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import shutil

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.inputs.base_input import language_spec
from paxcli.models.decoding import generate
from paxcli.models.sampling import Sampling
from tests.conftest import ROOT
from tests.models import latent_model

D, F, L, N, H, HV, R, V, T, B = 64, 128, 2, 4, 16, 12, 8, 259, 64, 8


@pytest.fixture(scope="module")
def model():
    return fdl.build(latent_model.latent().task.model)


def _flops_by_hand() -> float:
    attention = D * N * H + D * R + R * N * (H + HV) + N * HV * D
    weights = 6 * B * T * (L * (attention + 2 * D * F) + D * V)
    pairs = 3 * B * (T * T / 2) * 2 * L * N * (H + HV)
    return weights + pairs


def test_flops_and_cache_are_those_of_the_attention(model):
    assert model.step_flops(language_spec(B, T)).total == _flops_by_hand()
    assert model.init_cache(3, 10).shape == (L, 3, 10, R)
    assert model.cache_bytes(3, 10) == 4 * L * 3 * 10 * R


def test_greedy_decoding_with_the_latent_cache_equals_full_passes(model):
    batch = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), language_spec(1, 4))
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), batch)["params"])
    params = jax.tree.map(lambda p: 3 * p, params)
    prompts, lengths = jnp.array([[3, 1, 4, 1], [5, 9, 0, 0]]), jnp.array([4, 2])
    run = jax.jit(generate, static_argnums=(0, 5))
    found = run(model, params, prompts, lengths, 0, Sampling(max_tokens=8))

    @jax.jit
    def next_ids(ids):
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        logits, _ = model.apply({"params": params}, ids, jnp.ones_like(ids), positions, None, method="extend")
        return jnp.argmax(logits, axis=-1)

    for row, length in enumerate(lengths.tolist()):
        ids = np.zeros((1, 12), np.int32)
        ids[0, :length] = prompts[row, :length]
        for at in range(length, length + 8):
            ids[0, at] = next_ids(jnp.asarray(ids))[0, at - 1]
        np.testing.assert_array_equal(found.ids[row, : length + 8], ids[0, : length + 8])


def test_it_trains_and_decodes_from_a_file(pax, tmp_path):
    shutil.copy(latent_model.__file__, tmp_path / "mine.py")
    done = pax("train", "./mine.py:latent", "--run-dir", "run", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    records = [json.loads(line) for line in pathlib.Path(tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < records[0]["loss"]
    last = records[-1]
    assert last["mfu"] == pytest.approx(_flops_by_hand() / last["step_seconds"] / 0.1e12, rel=0.01)
    assert result["mfu"] is not None
    done = pax("--trust-code", "decode", "run", "--prompt", "def ", "--max-tokens", "5", "--temperature", "0", "--json")
    assert done.returncode == 0, done.stderr
    (output,) = json.loads(done.stdout)["outputs"]
    assert len(output["ids"]) == 5


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is for Linux on x86-64 only")
def test_it_compiles_for_tpus(pax, tmp_path):
    shutil.copy(latent_model.__file__, tmp_path / "mine.py")
    synthetic = ("--set", "train_input=SyntheticInput", "--set", "fprop_dtype=bfloat16", "--set", "peak_tflops=null")
    for step in ("train", "decode"):
        done = pax("compile", "./mine.py:latent", "--topology", "v5e-4", "--step", step, *synthetic, "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["fits"] and report["num_devices"] == 4
        assert report.get("cache_bytes") == (2 * L * 16 * T * R if step == "decode" else None)
        if step == "train":
            assert report["flops_per_step"] == _flops_by_hand() and 0 < report["predicted_mfu"] < 1


@pytest.mark.parametrize("room", ["training", "models", "metrics", "programs"])
def test_nothing_is_asked_that_is_not_declared(room):
    """Capabilities are types: no `hasattr`, and no `getattr` of a model or of its parts."""
    probe = re.compile(r"hasattr\(|getattr\([\w.]*\b(model|stack|layer|block|source)\b")
    for path in (ROOT / "paxcli" / room).rglob("*.py"):
        assert not probe.search(path.read_text()), path


@pytest.mark.slow
def test_a_classifier_has_no_decode(pax):
    sets = ("--set", "num_train_steps=2", "--set", "global_batch_size=8", "--set", "save_interval_steps=2")
    sets += ("--set", "peak_tflops=1")
    done = pax("train", "vit-synthetic", "--run-dir", "run", *sets, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mfu"] > 0
    for verb in (("decode", "run", "--prompt", "a"), ("compile", "vit-synthetic", "--step", "decode")):
        more = ("--topology", "cpu:1") if verb[0] == "compile" else ()
        done = pax(*verb, *more, "--json")
        assert done.returncode == 2, done.stderr
        assert "ClassificationModel has no decode" in json.loads(done.stdout)["error"]["message"]
