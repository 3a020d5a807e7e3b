"""Rules of `--from`: parameters under another name, and parameters that are not loaded; and arrays of another dtype."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.reading import named_leaves
from paxcli.checkpoint.warm_start import NO_RULES, Rules, load_params
from paxcli.errors import ConfigError, DataError


def fill(shapes: dict[str, Any], seed: int) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(chance.standard_normal(x.shape), x.dtype), shapes)


LANGUAGE_MODEL = {
    "embedding": {"table": jnp.zeros((20, 8))},
    "stack": {"layers": {"query": jnp.zeros((3, 8, 8)), "norm": jnp.zeros((3, 8))}},
    "head": {"w": jnp.zeros((8, 20))},
}
SEQUENCE_MODEL = {
    "embedding": {"table": jnp.zeros((20, 8))},
    "encoder": {"layers": {"query": jnp.zeros((3, 8, 8)), "norm": jnp.zeros((3, 8))}},
    "decoder": {"layers": {"query": jnp.zeros((3, 8, 8)), "cross": jnp.zeros((3, 8, 8)), "norm": jnp.zeros((3, 8))}},
    "head": {"w": jnp.zeros((8, 31))},
}


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> dict[str, Any]:
    params = fill(LANGUAGE_MODEL, 0)
    save(tmp_path, params)
    return params


def save(run_dir: pathlib.Path, params: Any, **more: Any) -> None:
    with CheckpointStore(epath.Path(run_dir) / "checkpoints") as store:
        store.save(7, {"params": params, **more}, {}, force=True)


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), found) == jax.tree.map(
        lambda x: (x.dtype, x.sharding), expected
    )


def test_an_encoder_and_a_decoder_from_one_stack_with_a_new_head(tmp_path: pathlib.Path, saved: dict[str, Any]) -> None:
    fresh = fill(SEQUENCE_MODEL, 1)
    rules = Rules({r"(en|de)coder/layers/(\w+)": r"stack/layers/\2"}, ["cross", "head"])
    params, report = load_params(tmp_path, None, fresh, rules=rules)
    layers = saved["stack"]["layers"]
    expected = {
        "embedding": saved["embedding"],
        "encoder": {"layers": layers},
        "decoder": {"layers": {**layers, "cross": fresh["decoder"]["layers"]["cross"]}},
        "head": fresh["head"],
    }
    assert_equal(params, expected)
    assert report.ignored == ["decoder/layers/cross", "head/w"] and not report.arrays.missing
    assert report.text().splitlines() == [
        f"Loaded 5 arrays from {tmp_path}/checkpoints/7.",
        "Matched by `init_ignore`, randomly initialized: `decoder/layers/cross`, `head/w`.",
        "In the checkpoint, not used: `head/w`.",
    ]
    # One array may initialize two parameters; the train step then donates the memory of each.
    jax.block_until_ready(jax.jit(lambda x: jax.tree.map(jnp.negative, x), donate_argnums=0)(params))


def test_a_dry_run_reads_no_array(tmp_path: pathlib.Path, saved: dict[str, Any]) -> None:
    for file in (tmp_path / "checkpoints" / "7" / "state").rglob("*"):
        if file.is_file():
            file.unlink()
    abstract = jax.eval_shape(lambda: SEQUENCE_MODEL)
    rules = Rules({r"encoder/(.*)": r"stack/\1"}, ["decoder", "head"])
    found, report = load_params(tmp_path, None, abstract, rules=rules, dry_run=True)
    assert found == abstract and len(report.arrays.matched) == 3


@pytest.mark.parametrize(
    ("rename", "ignore", "message", "hint"),
    [
        ({"encoder/(": "stack/"}, ["head"], "init_rename (full names): 'encoder/(' is not a regular expression", ""),
        ({}, ["he(ad"], "init_ignore: 'he(ad' is not a regular expression", ""),
        ({"encodr/(.*)": r"stack/\1"}, ["head"], "'encodr/(.*)' matches no parameter", "`encoder`"),
        ({"encoder": "stack"}, ["head"], "init_rename (full names): 'encoder' matches no parameter", ""),
        ({"head/w": "head/w"}, ["head"], "'head/w' matches no parameter", ""),  # it is ignored
        ({}, ["haed"], "init_ignore: 'haed' matches no parameter", "`head`"),
        ({"encoder/(.*)": r"stack/\2"}, ["head"], "is not a template: invalid group reference 2", r"`\1`"),
        ({"encoder/(.*)": r"stak/\1"}, ["head"], "lacks it. Did you mean `stack/layers/norm`", "`init_ignore`"),
        ({"encoder/(.*)": r"stack/\1", ".*norm": "stack/layers/norm"}, [], "Two rules of `init_rename` match", ""),
        ({"head/(.)": "embedding/table"}, [], "is float[20, 8] there, float[8, 31] here", "`init_ignore`"),
    ],
)
def test_rules_that_cannot_be_meant(
    tmp_path: pathlib.Path, saved: dict[str, Any], rename: dict[str, str], ignore: list[str], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        load_params(tmp_path, None, SEQUENCE_MODEL, rules=Rules(rename, ignore), dry_run=True)
    assert hint in str(refused.value.hint)


def test_floats_of_another_dtype_are_cast_and_named(tmp_path: pathlib.Path) -> None:
    there = {"a": jnp.zeros(40, jnp.bfloat16), "b": jnp.zeros(40), "d": jnp.zeros(2)}
    there = {**fill(there, 0), "c": jnp.ones(4, jnp.int8)}
    save(tmp_path, there, opt_state={"mu": {"a": there["a"]}})
    here = {"a": jnp.zeros(40), "b": jnp.zeros(40, jnp.bfloat16), "c": jnp.zeros(4), "d": jnp.zeros(2)}
    params, report = load_params(tmp_path, None, here)
    expected = {name: np.asarray(there[name]).astype(here[name].dtype) for name in "abd"}
    jax.tree.map(np.testing.assert_array_equal, params, expected | {"c": here["c"]})
    assert jax.tree.map(lambda x: x.dtype, params) == jax.tree.map(lambda x: x.dtype, here)
    assert report.text().splitlines()[:3] == [
        f"Loaded 3 arrays from {tmp_path}/checkpoints/7.",
        "Cast to the dtype of the model: `a`, `b`.",
        "Another shape or dtype, randomly initialized: `c` is int8[4] there, float[4] here.",
    ]
    state, report = load_params(tmp_path, None, {"params": here, "opt_state": {"mu": {"a": here["a"]}}}, "all")
    np.testing.assert_array_equal(state["opt_state"]["mu"]["a"], expected["a"])
    assert report.cast == ["opt_state/mu/a", "params/a", "params/b"]


def test_nothing_to_load(tmp_path: pathlib.Path, saved: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="No array in .* matches this model"):
        load_params(tmp_path, None, saved, rules=Rules({}, ["."]))
    assert_equal(load_params(tmp_path, None, fill(LANGUAGE_MODEL, 1), rules=NO_RULES)[0], saved)
    assert [*named_leaves(saved)] == ["embedding.table", "head.w", "stack.layers.norm", "stack.layers.query"]
