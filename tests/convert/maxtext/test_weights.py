"""Weights of MaxText: the logits are HF's, the way back is the identity, and a run goes on."""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.reading import named_leaves, nest_by_name, read_manifest
from paxcli.config.assign import assign
from paxcli.convert.layout import compare_to_model, from_pax
from paxcli.convert.maxtext import checkpoint_layout
from paxcli.convert.maxtext.checkpoint_layout import MaxTextLayout
from paxcli.convert.maxtext.launch import Launch, Pair
from paxcli.convert.maxtext.launch_to_recipe import BASE_RECIPE, convert
from paxcli.convert.maxtext.recipe_to_launch import decoder_block, to_maxtext
from paxcli.convert.maxtext.weights import _with_differences, export_maxtext, import_maxtext
from paxcli.convert.runs import ImportedWeights, recipe_with
from paxcli.errors import ConfigError, DataError
from paxcli.nested_map import NestedMap
from paxcli.training.session import state_shapes
from paxcli.training.start_from import write_run
from tests.convert.filling import to_pax
from tests.convert.maxtext import maxtext_checkpoints
from tests.convert.maxtext.maxtext_checkpoints import KEYS, SIZES
from tests.tolerances import FLOAT32

LOGITS = dict(atol=1e-4, rtol=0)


def config_of(family: str, **more: Any) -> fdl.Config:
    keys = SIZES | KEYS[family] | more
    launch = Launch(1, pairs=[Pair(key, str(value), 1) for key, value in keys.items()])
    config = recipe_with(BASE_RECIPE, convert(launch, family, date=datetime.date(2026, 1, 1)).values)
    if family == "llama31":
        config.task.model.stack.block.attention.rotary.scaling.original_max_seq_len = 48
    return config


def carried(
    tmp_path: pathlib.Path, family: str, checkpoint: pathlib.Path, name: str = "run", **more: Any
) -> tuple[ImportedWeights, dict[str, np.ndarray]]:
    """The checkpoint as a run; the arrays of that, by name."""
    config = config_of(family, **more)
    done = import_maxtext(config, "recipe: x\n", str(checkpoint), tmp_path / name)
    return done, arrays_of(tmp_path / name)


def arrays_of(run_dir: pathlib.Path) -> dict[str, np.ndarray]:
    return arrays_at(run_dir, max(CheckpointStore(run_dir / "checkpoints").steps()))


def arrays_at(run_dir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    store = CheckpointStore(run_dir / "checkpoints")
    manifest = read_manifest(store.directory / str(step))
    wanted = {name: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for name, entry in manifest.arrays.items()}
    return {name: np.asarray(x) for name, x in store.restore(step, wanted)[0].items()}


def params_in(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return nest_by_name({name.removeprefix("params."): x for name, x in arrays.items() if name.startswith("params.")})


# Those whose parameters others have too are left to the slow suite.
FAMILIES = [pytest.param(name, marks=pytest.mark.slow) if name in ("llama2", "mistral") else name for name in KEYS]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: pathlib.Path, family: str) -> None:
    arrays = maxtext_checkpoints.arrays_of(family)
    found = {}
    for scanned in (True, False):
        params = maxtext_checkpoints.params_of(family, arrays, scanned)
        checkpoint = maxtext_checkpoints.save(tmp_path / f"{scanned}", params)
        done, found[scanned] = carried(tmp_path, family, checkpoint, f"run {scanned}")
        assert (done.step, done.with_optimizer) == (0, False)
    assert_same(found[True], found[False])
    ids = jnp.asarray(arrays["in/ids"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    batch = NestedMap(ids=ids, segment_ids=jnp.ones_like(ids), segment_pos=positions)
    model, params = fdl.build(config_of(family).task.model), params_in(found[True])
    logits = jax.jit(lambda v: model.apply(v, batch, method="compute_predictions"))({"params": params}).logits
    np.testing.assert_allclose(logits, arrays["out/logits"], **LOGITS)


@pytest.mark.parametrize(("family", "scanned"), [("llama31", True), ("mixtral", False), ("gemma2", True)])
def test_there_and_back_is_the_identity(tmp_path: pathlib.Path, family: str, scanned: bool) -> None:
    params = maxtext_checkpoints.params_of(family, maxtext_checkpoints.arrays_of(family), scanned)
    checkpoint = maxtext_checkpoints.save(tmp_path / "theirs", params, step=3, with_optimizer=True)
    done, ours = carried(tmp_path, family, checkpoint, scan_layers=str(scanned).lower())
    assert (done.step, done.with_optimizer, int(ours["step"]), int(ours["opt_state.0.count"])) == (3, True, 3, 3)
    config = config_of(family, scan_layers=str(scanned).lower())
    back = export_maxtext(config, tmp_path / "run", str(tmp_path / "back"))
    assert_same(*(nested_leaves(maxtext_checkpoints.read(folder)) for folder in (checkpoint, back.directory)))
    with pytest.raises(ConfigError, match="already exists"):
        export_maxtext(config, tmp_path / "run", str(tmp_path / "back"))


def test_the_block_of_a_launch_is_known_without_it(tmp_path: pathlib.Path) -> None:
    """A recipe has no `decoder_block`: the names of arrays tell what it does not, and `query_scale` the rest."""
    params = maxtext_checkpoints.params_of("llama2", maxtext_checkpoints.arrays_of("llama2"), scanned=True)
    checkpoint = maxtext_checkpoints.save(tmp_path / "theirs", params)
    _, ours = carried(tmp_path, "llama2", checkpoint)
    assert_same(carried(tmp_path, "llama2", checkpoint, "gelu", mlp_activations="[gelu,linear]")[1], ours)
    for block in ("llama2", "qwen3"):
        config = config_of("llama2", decoder_block=block)
        assert decoder_block(config) == to_maxtext(config)[0]["decoder_block"] == block


@pytest.mark.parametrize("scanned", [True, False])
def test_fused_heads_are_those_of_separate_arrays(tmp_path: pathlib.Path, scanned: bool) -> None:
    """MaxText since July 2026 fuses queries, keys and values along the heads, of which keys may have fewer."""
    params = maxtext_checkpoints.params_of("llama31", maxtext_checkpoints.arrays_of("llama31"), scanned)
    _, separate = carried(tmp_path, "llama31", maxtext_checkpoints.save(tmp_path / "separate", params), "separate run")
    for name, layer in params["decoder"].items():
        if name.startswith("layers"):
            attention = layer["self_attention"]
            parts = [attention.pop(part)["kernel"] for part in ("query", "key", "value")]
            attention["qkv_proj"] = {"kernel": np.concatenate(parts, axis=-2)}
    _, fused = carried(tmp_path, "llama31", maxtext_checkpoints.save(tmp_path / "fused", params), "fused run")
    assert_same(fused, separate)


def test_a_recipe_of_our_own_goes_there_and_back(tmp_path: pathlib.Path) -> None:
    """Scales that are stored otherwise, unrolled layers, and the blocks that no checkpoint above has."""
    for name, keys in {"qwen": dict(decoder_block="qwen3"), "gemma": dict(decoder_block="gemma3")}.items():
        launch = dict(SIZES, head_dim=8, base_num_kv_heads=2, base_num_decoder_layers=8, use_qk_norm="true", **keys)
        converted = convert(Launch(1, pairs=[Pair(k, str(v), 1) for k, v in launch.items()]), name)
        config = recipe_with(BASE_RECIPE, converted.values)
        stack = config.task.model.stack
        for block in getattr(stack, "turns", None) or [stack.block]:
            block.norm.direct_scale = block.attention.qk_norm.direct_scale = False
            block.attention.query_scale = 0.5
        layout = MaxTextLayout(keys["decoder_block"], 8)
        params = named_leaves(state_shapes(config).params)
        rules = checkpoint_layout.layout_of(_with_differences(config, layout), params)
        random = np.random.RandomState(0)
        ours = {name: random.randn(*leaf.shape).astype(np.float32) for name, leaf in params.items()}
        for kind in ("params", "mu", "nu"):
            theirs = dict(from_pax(rules, ours, kind))
            assert not compare_to_model(rules, params, theirs)
            again = to_pax(rules, theirs, kind)
            assert again.keys() == ours.keys()
            for name, x in ours.items():
                np.testing.assert_allclose(again[name], x, **FLOAT32)


def test_frozen_parameters_have_no_moments(tmp_path: pathlib.Path) -> None:
    """MaxText's Adam has moments of all parameters, 0 until the first gradient."""
    config = config_of("llama31")
    config.task.train.learner.bprop_variable_exclusion = ("embedding",)
    shapes, random = state_shapes(config), np.random.default_rng(0)
    named = {name: x for name, x in named_leaves(shapes).items() if name.startswith(("params.", "opt_state."))}
    arrays = {name: random.uniform(size=x.shape).astype(x.dtype) for name, x in named.items()}
    write_run(config, "recipe: x\n", tmp_path / "run", shapes, arrays, step=3)
    done = export_maxtext(config, tmp_path / "run", tmp_path / "theirs")
    _, again = carried(tmp_path, "llama31", pathlib.Path(done.directory), "again")
    ours, theirs = ({n.partition(".mu.")[2]: x for n, x in found.items() if ".mu." in n} for found in (arrays, again))
    assert theirs.keys() - ours.keys() == {"embedding.table"} and not theirs["embedding.table"].any()
    for name, x in ours.items():
        np.testing.assert_allclose(theirs[name], x, **FLOAT32)


@pytest.mark.parametrize("optimizer", ["AdamW", "Sgd"])
def test_moving_averages_are_left_out_and_named(tmp_path: pathlib.Path, optimizer: str) -> None:
    """MaxText has none: it gets the parameters that training has, which the moments belong to."""
    config = config_of("llama31", opt_type={"Sgd": "sgd"}.get(optimizer, "adamw"))
    config.task.train.learner.ema_decay = 0.5
    shapes, random = state_shapes(config), np.random.default_rng(0)
    named = {name: x for name, x in named_leaves(shapes).items() if name.startswith(("params.", "opt_state."))}
    arrays = {name: random.uniform(size=x.shape).astype(x.dtype) for name, x in named.items()}
    write_run(config, "recipe: x\n", tmp_path / "run", shapes, arrays, step=3)
    done = export_maxtext(config, tmp_path / "run", tmp_path / "theirs")
    assert done.left_out == ["moving averages"] and done.with_optimizer
    config.task.train.learner.ema_decay = None
    again = import_maxtext(config, "recipe: x\n", done.directory, tmp_path / "again")
    assert again.step == 3
    found = arrays_of(tmp_path / "again")
    for name, x in params_in(arrays)["final_norm"].items():
        np.testing.assert_allclose(found[f"params.final_norm.{name}"], x, **FLOAT32)


def test_lion_is_refused(tmp_path: pathlib.Path) -> None:
    """Its one moment is not Adam's first."""
    config = config_of("llama31")
    shapes = state_shapes(config)
    write_run(config, "recipe: x\n", tmp_path / "run", shapes, {}, step=3)
    done = export_maxtext(config, tmp_path / "run", tmp_path / "theirs")
    assign(config, "optimizer", "Lion")
    write_run(config, "recipe: x\n", tmp_path / "lion", state_shapes(config), {}, step=3)
    with pytest.raises(ConfigError, match=r"optimizer keeps `opt_state.*\.mu\."):
        export_maxtext(config, tmp_path / "lion", tmp_path / "lion in theirs")
    with pytest.raises(ConfigError, match=r"optimizer keeps `opt_state.*\.mu\."):  # Adam's would pass for Lion's
        import_maxtext(config, "recipe: x\n", done.directory, tmp_path / "lion again")


def test_what_does_not_fit_is_named_with_both_shapes(tmp_path: pathlib.Path) -> None:
    params = maxtext_checkpoints.params_of("llama2", maxtext_checkpoints.arrays_of("llama2"), scanned=True)
    params["decoder"]["lora"] = {"kernel": np.zeros(3, np.float32)}
    del params["decoder"]["logits_dense"]
    checkpoint = maxtext_checkpoints.save(tmp_path / "theirs", params)
    with pytest.raises(DataError) as raised:
        carried(tmp_path, "llama2", checkpoint, vocab_size=64)
    for text in (
        "`token_embedder.embedding` is [61, 32] there, [64, 32] here",
        "it lacks `decoder.logits_dense.kernel`",
        "only it has `decoder.lora.kernel`",
    ):
        assert text in raised.value.message
    for folder, said in (
        ("nowhere", "no directory"),
        (".", "holds no checkpoint"),
        ("run", "no parameters of a MaxText"),
    ):
        (tmp_path / "run").mkdir(exist_ok=True)
        if folder == "run":
            maxtext_checkpoints.save(tmp_path / "run", {"other": np.zeros(3, np.float32)})
        with pytest.raises(DataError, match=said) as raised:
            carried(tmp_path, "llama2", tmp_path / folder)
        assert raised.value.hint
    assert not (tmp_path / "run" / "recipe.yaml").exists()


@pytest.mark.slow
def test_a_run_goes_on_from_the_command_line(pax, tmp_path: pathlib.Path) -> None:
    params = maxtext_checkpoints.params_of("gpt2", maxtext_checkpoints.arrays_of("gpt2"), scanned=True)
    maxtext_checkpoints.save(tmp_path / "theirs", params, step=3, with_optimizer=True)
    keys = [f"{key}={value}" for key, value in (SIZES | KEYS["gpt2"] | {"opt_type": "adamw"}).items()]
    assert pax("maxtext-convert", *keys, "--date", "2026-01-01", "--out", "recipe.yaml").returncode == 0
    import_it = ["import", "theirs", "--recipe", "recipe.yaml", "--out", "run", "--json"]
    done = pax(*import_it, "--dry-run")
    assert done.returncode == 0 and json.loads(done.stdout)["step"] == 3, done.stderr
    assert not (tmp_path / "run").exists()
    done = pax(*import_it)
    assert done.returncode == 0, done.stderr
    assert [json.loads(done.stdout)[key] for key in ("family", "step", "with_optimizer")] == ["gpt3", 3, True]
    imported = arrays_of(tmp_path / "run")
    evaluated = pax("eval", "run", "--overlay", "synthetic-data", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    trained = pax("train", "run/recipe.yaml", "--run-dir", "run", "--set", "summary_interval_steps=1")
    assert trained.returncode == 0 and "Resuming run at step 3" in trained.stderr, trained.stderr
    command = pax("maxtext-convert", "--to-maxtext", "run")
    assert command.returncode == 0 and "decoder_block=gpt3" in command.stdout, command.stderr
    export_it = ["export", "run", "--format", "maxtext", "--out", "back", "--json"]
    assert pax(*export_it, "--dry-run").returncode == 0 and not (tmp_path / "back").exists()
    back = pax(*export_it)
    assert back.returncode == 0, back.stderr
    assert json.loads(back.stdout)["directory"] == str(tmp_path / "back" / "4" / "items")
    tree = maxtext_checkpoints.read(tmp_path / "back" / "4" / "items")
    assert int(tree["step"]) == int(tree["opt_state"][0]["count"]) == 4
    done = pax("export", "run", "--step", "3", "--format", "maxtext", "--out", "exported")
    assert done.returncode == 0 and "and the optimizer's state of step 3 as gpt3" in done.stdout, done.stderr
    assert pax("import", "exported", "--recipe", "recipe.yaml", "--out", "again").returncode == 0
    assert_same(arrays_of(tmp_path / "again"), imported)
    again = pax(*import_it)
    assert again.returncode == 2 and "already has checkpoints" in again.stdout


def nested_leaves(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in named_leaves(tree).items()}


def assert_same(these: dict[str, np.ndarray], those: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert these.keys() == those.keys()
    for name, x in these.items():
        np.testing.assert_array_equal(x, those[name], err_msg=name)
