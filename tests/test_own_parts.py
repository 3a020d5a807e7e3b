"""The examples of docs/own-parts.md run, and learn."""

from __future__ import annotations

import pathlib
import re

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paxcli as pax
from paxcli.checkpoint.reading import named_leaves
from paxcli.training.progress import Reporter
from tests.tolerances import FLOAT32

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "own-parts.md").read_text()
FILES = dict(re.findall(r"^```python title=\"(\w+\.py)\"\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
RECIPES = re.findall(r"^\$ pax train \./(\w+\.py):(\w+)", PAGE, re.MULTILINE)
SMALL = {"global_batch_size": 4, "num_train_steps": 20, "summary_interval_steps": 10, "eval_interval_steps": None}
SMALL_MODEL = {"num_layers": 1, "model_dims": 32, "hidden_dims": 64, "num_heads": 2, "max_seq_len": 32}


def test_each_example_is_trained_by_a_command_of_the_page():
    assert list(dict.fromkeys(file for file, _ in RECIPES)) == list(FILES) and len(FILES) == 6


MARKS = {file: () if file != "flax_modules.py" else (pytest.mark.slow,) for file in FILES}


@pytest.mark.parametrize(("file", "recipe"), [pytest.param(*one, marks=MARKS[one[0]]) for one in RECIPES])
def test_an_own_part_trains(file: str, recipe: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / file).write_text(FILES[file])
    changes = SMALL | ({"max_seq_len": 32} if file == "model.py" else SMALL_MODEL)
    changes |= {"learning_rate": 0.3 if file == "model.py" else 0.01, "eval_inputs": []}
    run = pax.train(pax.load(f"{tmp_path / file}:{recipe}", set=changes), tmp_path / "run", progress=Reporter())
    loss = run.metrics()["loss"]
    assert loss[-1] < loss[0] - 0.05, loss


@pytest.mark.parametrize(("recipe", "inner"), [("linen", "Dense_0"), ("bridged", "inner.w_in")])
def test_a_plain_module_computes_in_a_block_what_it_computes_alone(
    recipe: str, inner: str, tmp_path: pathlib.Path
) -> None:
    """The output of the block without attention is the residual plus the module, applied to its own parameters."""
    (tmp_path / "flax_modules.py").write_text(FILES["flax_modules.py"])
    block = pax.load(f"{tmp_path}/flax_modules.py:{recipe}", set=SMALL_MODEL).config.task.model.stack.block
    layer = fdl.build(block)(model_dims=8, hidden_dims=12, num_heads=2, dims_per_head=4)
    x, ones = jax.random.normal(jax.random.key(1), (2, 3, 8)), jnp.ones((2, 3), int)
    params = nn.meta.unbox(layer.init(jax.random.key(0), x, None, ones, ones)["params"])
    assert any(name.startswith(f"feed_forward.{inner}.") for name in named_leaves(params))
    params["attention"] = jax.tree.map(jnp.zeros_like, params["attention"])
    feed_forward = layer.feed_forward(model_dims=8, hidden_dims=12)
    normed = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    alone = feed_forward.apply({"params": params["feed_forward"]}, normed)
    y, _ = layer.apply({"params": params}, x, None, ones, ones)
    np.testing.assert_allclose(y, x + alone, **FLOAT32)
