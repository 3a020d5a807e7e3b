"""Launches become recipes: golden files, the seed table, published sizes, the way back, and a run."""

from __future__ import annotations

import datetime
import json
import math
import pathlib

import fiddle as fdl
import jax.numpy as jnp
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paxcli.cli.main import app
from paxcli.cli.output import run
from paxcli.config.load import load
from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.launch import Launch, Pair
from paxcli.convert.maxtext.launch_to_recipe import BASE_RECIPE, convert
from paxcli.convert.maxtext.recipe_to_launch import command_line, to_maxtext
from paxcli.convert.maxtext.render import recipe_python, recipe_yaml, report
from paxcli.convert.maxtext.shell import read_script
from paxcli.convert.maxtext.sizes import num_parameters
from paxcli.convert.maxtext.topology import devices_of
from paxcli.convert.runs import recipe_with
from paxcli.errors import ConfigError
from paxcli.training.experiment import summarize
from tests.convert.maxtext.test_sizes import launch_with_bucket

HERE = pathlib.Path(__file__).parent
GOLDEN = {
    "2xv4-128.scale.sh": "2023-03-08",
    "2xv4-128.named.sh": "2023-04-19",
    "2xv4-128.base.sh": "2023-07-21",
    "22b.sh": None,
    "1xv4-384.sh": "2023-03-08",
    "128b.sh": "2024-03-01",
    "v5p_2048.sh": "2024-10-01",
    "gpt3_half.sh": "2025-04-10",
    "16vm.sh": None,
    "128vm.sh": None,
    "convergence.sh": None,
    "required.sh": None,
    "xpk.sh": "2025-09-01",
}


# One of each family, and some that pax lacks; the other models are slow tests.
OF_EACH_FAMILY = ("gpt3-52k", "llama2-7b", "llama3-8b", "llama3.1-8b", "mistral-7b", "mixtral-8x7b")
OF_EACH_FAMILY += ("gemma-2b", "gemma2-2b", "gemma3-12b", "gemma4-26b", "gemma4-e2b")
OF_EACH_FAMILY += (
    "qwen2.5-1.5b",
    "qwen3-0.6b",
    "qwen3-30b-a3b",
    "qwen3-vl-2b",
    "qwen3-next-80b-a3b",
    "qwen3.5-35b-a3b",
)
OF_EACH_FAMILY += ("deepseek2-16b", "deepseek3-tiny", "deepseek3.2-671b", "deepseek4-tiny", "olmo3-7b", "olmo3-7b-pt")
OF_EACH_FAMILY += ("gpt-oss-20b", "llama4-17b-16e", "llama4-17b-128e", "envy-test")


def of_script(name: str, date: str | None = None, **options) -> Conversion:
    return convert(launch_with_bucket(name), name, date=datetime.date.fromisoformat(date) if date else None, **options)


def of_keys(date: str = "2026-01-01", topology: str | None = None, **keys: object) -> Conversion:
    launch = Launch(1, pairs=[Pair(key, str(value), 1) for key, value in keys.items()])
    return convert(launch, "keys", date=datetime.date.fromisoformat(date), topology=topology)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_script_becomes_the_golden_recipe(name: str) -> None:
    topology = "v5e-256" if name == "gpt3_half.sh" else None
    text = recipe_yaml(of_script(name, GOLDEN[name], topology=topology))
    assert text == (HERE / "golden" / f"{name.removesuffix('.sh')}.yaml").read_text()
    assert yaml.safe_load(text)["recipe"] == "maxtext-base"


def test_the_first_script_value_by_value() -> None:
    converted = of_script("2xv4-128.scale.sh", "2023-03-08")
    block = "task.model.stack.block"
    assert (
        converted.values
        | {
            "mesh.ici_mesh_shape": [1, 64, 1],
            "mesh.dcn_mesh_shape": [2, 1, 1],
            "task.model.num_layers": 48,
            "task.model.model_dims": 6144,
            "task.model.hidden_dims": 24576,
            "task.model.num_heads": 24,
            "task.model.dims_per_head": 256,
            "task.model.vocab_size": 32768,
            "task.model.max_seq_len": 1024,
            "task.model.fprop_dtype": "bfloat16",
            "task.model.position": None,
            "task.model.embedding.scale_logits_sqrt_depth": True,
            "task.model.embedding.logit_cap": None,
            block: "ParallelBlock",
            f"{block}.norm": "RmsNorm",
            f"{block}.norm.epsilon": 1e-6,
            f"{block}.attention.relative_bias": "RelativeBias",
            f"{block}.attention.rotary": None,
            f"{block}.attention.logit_cap": None,
            f"{block}.feed_forward.activation": "relu",
            f"{block}.feed_forward.gated": False,
            f"{block}.feed_forward.use_bias": False,
            "task.model.stack.remat_policy": "nothing",
            "task.train.percore_batch_size": 16.0,
            "task.train.num_train_steps": 10,
            "task.train.learner.learning_rate": 3e-5,
            "task.train.learner.schedule": "LinearRampupSqrtDecay",
            "task.train.learner.schedule.warmup_steps": 15_000,
            "task.train.learner.optimizer": "AdamW",
            "task.train.learner.optimizer.beta2": 0.999,
            "task.train.learner.optimizer.weight_decay": 0.0,
            "task.train.learner.clip_gradient_norm_to_value": None,
            "checkpoint.save_interval_steps": 10_000,
        }
        == converted.values
    )
    assert (converted.num_devices, converted.tokens_per_step) == (128, 2_097_152)
    assert "13.65 s per step" in " ".join(report(converted).split())
    assert "attention not counted" in recipe_yaml(converted)
    row = next(row for row in converted.rows if row.pax == "task.model.hidden_dims")
    assert (row.maxtext, row.value, row.scaled, row.pax_value) == ("base_mlp_dim", 8192, 24576, 24576)


@pytest.mark.parametrize(
    "name", [n if n in OF_EACH_FAMILY else pytest.param(n, marks=pytest.mark.slow) for n in tables.table("models")]
)
def test_a_model_builds_with_its_size_or_is_refused_by_name(name: str) -> None:
    try:
        converted = of_keys(model_name=name)
        config = recipe_with(BASE_RECIPE, converted.values)
    except ConfigError as error:
        assert f"of model {name}: pax lacks " in error.message and "lacks that" not in error.message
        return
    config.train_input = load("maxtext-base").config.train_input
    assert summarize(config)["parameters"] == num_parameters(converted.settings)


def test_meshes() -> None:
    auto = of_keys(topology="v5e-256", ici_fsdp_parallelism=-1, ici_tensor_parallelism=16, num_slices=2)
    assert auto.values["mesh.ici_mesh_shape"] == [1, 16, 16] and auto.values["mesh.dcn_mesh_shape"] == [2, 1, 1]
    named = of_keys(ici_fsdp_parallelism=4, ici_expert_parallelism=2, ici_context_parallelism=2)
    assert named.values["mesh.ici_mesh_shape"] == {"fsdp": 4, "context": 2, "expert": 2}
    both = of_keys(ici_fsdp_parallelism=4, ici_context_parallelism=2, ici_context_usp_ulysses_parallelism=3)
    assert both.values["mesh.ici_mesh_shape"] == {"fsdp": 4, "context": 6} and both.num_devices == 24
    assert of_keys().values["mesh.ici_mesh_shape"] is None and "--topology" in of_keys().settings.undecided[0]
    with pytest.raises(ConfigError, match="make 8, but there are 4"):
        of_keys(topology="v4-8", ici_fsdp_parallelism=8)
    with pytest.raises(ConfigError, match="are all -1"):
        of_keys(topology="v4-8", ici_fsdp_parallelism=-1, ici_tensor_parallelism=-1)
    assert [devices_of(name) for name in ("v4-128", "v5p-2048", "v5e-256", "a3")] == [64, 1024, 256, 8]


def test_batches() -> None:
    half = of_keys(topology="v5e-256", model_name="gpt3-52k", per_device_batch_size=0.5)
    assert half.values["task.train.global_batch_size"] == 128
    many = of_keys(ici_fsdp_parallelism=4, per_device_batch_size=2, gradient_accumulation_steps=4)
    assert many.values["task.train.percore_batch_size"] == 8 and many.values["task.train.num_microbatches"] == 4
    assert many.tokens_per_step == 4 * 2 * 4 * 2048


def test_places_of_single_tensors() -> None:
    stack = "task.model.stack"
    custom = of_keys(remat_policy="custom", context="device", key_proj="offload", qkv_proj="device", mlpwo="device")
    assert custom.values[f"{stack}.remat_policy"] == "context" and custom.values[f"{stack}.offload"] == ["key"]
    assert custom.values[f"{stack}.save"] == ["feed_forward_out"]
    assert [dropped.key for dropped in custom.settings.dropped] == ["qkv_proj"]  # its products are not fused
    assert not any("remat_policy" in note for note in custom.approximated)
    fused = of_keys(model_name="gpt3-52k", remat_policy="custom", qkv_proj="offload", mlpwi="offload", context="remat")
    assert fused.values[f"{stack}.offload"] == ["query", "key", "value", "feed_forward_in"]


def test_the_rate_is_zero_after_the_schedule() -> None:
    values = of_keys(model_name="gpt3-52k", steps=30, learning_rate_schedule_steps=20, learning_rate=1.0).values
    learner = recipe_with(
        BASE_RECIPE, of_keys(model_name="gpt3-52k", steps=30, learning_rate_schedule_steps=20).values
    ).task.train.learner
    schedule = fdl.build(learner.schedule)
    assert [round(float(schedule(jnp.asarray(step))), 3) for step in (0, 1, 2, 20, 29)] == [0, 0.5, 1, 0, 0]
    assert values["task.train.learner.schedule"] == "PiecewiseSchedule"


@pytest.mark.parametrize(
    ("date", "step_4"), [("2026-01-19", 3e-4 + 2.7e-3 * 0.5 * (1 + math.cos(math.pi * 2 / 5))), ("2026-01-20", 0.00165)]
)
def test_the_cosine_reaches_its_end_at_the_last_step_since_2026(date: str, step_4: float) -> None:
    keys = {"learning_rate": 3e-3, "warmup_steps_fraction": 0.3, "steps": 7, "learning_rate_final_fraction": 0.1}
    values = of_keys(date, model_name="gpt3-52k", **keys).values
    learner = recipe_with(BASE_RECIPE, values).task.train.learner
    rate = learner.learning_rate * fdl.build(learner.schedule)(jnp.asarray(4))
    assert float(rate) == pytest.approx(step_4, rel=1e-5)
    assert values["task.train.learner.schedule.warmup_steps"] == 2


def test_a_run_may_be_warmup_alone() -> None:
    keys = {"model_name": "gpt3-52k", "warmup_steps_fraction": 1.0, "steps": 4}
    schedule = fdl.build(recipe_with(BASE_RECIPE, of_keys("2026-08-22", **keys).values).task.train.learner.schedule)
    schedule.validate()
    assert [float(schedule(jnp.asarray(step))) for step in range(4)] == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("gpt3-22b", "task.model.max_seq_len", 1024),
        ("gpt3-6b", "task.model.max_seq_len", 1024),
        ("qwen3-30b-a3b", "task.model.stack.block.attention.rotary.max_timescale", 1e7),
        ("qwen3-480b-a35b", "task.model.stack.block.attention.rotary.max_timescale", 1e7),
        ("qwen3-235b-a22b", "task.model.stack.block.attention.rotary.max_timescale", 5e6),
        ("qwen3-235b-a22b", "task.loss_aggregator.loss_weights", [1.0, 0.001]),
        ("gpt3-175b", "train_input.c4.tfds_name", "c4/en:3.0.4"),
    ],
)
def test_keys_of_model_files_are_carried(name: str, path: str, value: object) -> None:
    assert of_keys("2026-08-22", model_name=name).values[path] == value


def test_gemma3_has_query_and_key_norms_without_a_key() -> None:
    by_name = of_keys("2026-08-22", model_name="gemma3-4b", dataset_type="synthetic")
    keys = {key: setting.value for key, setting in by_name.settings.values.items() if setting.origin == "model"}
    assert "use_qk_norm" not in keys
    by_keys = of_keys("2026-08-22", **keys, dataset_type="synthetic")
    assert num_parameters(by_keys.settings) == num_parameters(by_name.settings) == 3_880_099_328
    assert by_keys.values["task.model.stack.turns.0.attention.qk_norm"] == "RmsNorm"


def test_gpt3_had_a_schedule_of_its_own() -> None:
    old = of_keys("2024-10-01", topology="v5p-2048", model_name="gpt3-175b", per_device_batch_size=1.5)
    learner = "task.train.learner"
    assert old.values[f"{learner}.learning_rate"] == 2e-5
    assert old.values[f"{learner}.schedule.schedules.0.warmup_steps"] == 265
    assert old.values[f"{learner}.schedule.boundaries"] == [108_600]
    assert of_keys("2026-01-01", model_name="gpt3-175b").values["task.train.learner.learning_rate"] == 3e-5


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"decoder_block": "deepseek4"}, "decoder_block=deepseek4 of the launch: pax lacks compressed attention"),
        ({"decoder_block": "deepseek"}, "routed_score_func= of the launch"),
        (
            {"model_name": "deepseek3-tiny", "use_indexer": True},
            "use_indexer=True of model deepseek3-tiny: .*an indexer",
        ),
        ({"model_name": "gpt-oss-20b", "mlp_activations_limit": 5.0}, "mlp_activations_limit=5.0"),
        ({"model_name": "deepseek3-tiny", "ici_pipeline_parallelism": 2}, "cannot be pipelined"),
        ({"use_post_attn_norm": True}, "use_post_attn_norm without"),
        ({"opt_type": "lion"}, "opt_type=lion"),
        ({"remat_policy": "fulll"}, "remat_policy=fulll"),
        ({"remat_policy": "custom", "context": "hbm"}, "context=hbm"),
        ({"mlp_activations": "[silu,silu]"}, "mlp_activations"),
        ({"rope_type": "ntk"}, "rope_type=ntk"),
        ({"dtype": "float16"}, "dtype=float16"),
        ({"model_name": "gemma2-2b", "ici_pipeline_parallelism": 2}, "cannot be pipelined"),
        ({"steps": 0, "learning_rate_schedule_steps": 0}, "not a number of steps"),
        ({"base_emb_dim": 0}, "emb=0"),
        ({"per_device_batch_size": 0}, "not a batch size"),
    ],
)
def test_what_pax_lacks_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        of_keys(**keys)
    assert raised.value.hint


@pytest.mark.parametrize(
    "keys",
    [
        {"model_name": "gpt3-52k", "steps": 300, "per_device_batch_size": 3, "run_name": "a b's"},
        {"model_name": "gpt3-6b", "ici_fsdp_parallelism": 8, "dcn_data_parallelism": 2, "remat_policy": "none"},
        {"model_name": "gpt3-22b", "dataset_path": "gs://d", "tokenizer_path": "t.model", "dataset_type": "tfds"}
        | {"quantization": "fp8", "mu_dtype": "bfloat16", "z_loss_multiplier": 1e-4}
        | {"gradient_clipping_threshold": 0, "steps": 12345, "warmup_steps_fraction": 0.03, "max_target_length": 512},
        {"remat_policy": "qkv_proj_offloaded", "dataset_type": "synthetic"},
        {
            "model_name": "mixtral-8x7b",
            "dataset_type": "synthetic",
            "mtp_num_layers": 1,
            "load_balance_loss_weight": 0.02,
        },
        {"remat_policy": "custom", "decoder_layer_input": "offload", "mlpwi_0": "offload", "out_proj": "device"},
    ],
)
def test_there_and_back(keys: dict[str, object]) -> None:
    _there_and_back(of_keys("2026-08-22", **keys))


def test_vocabulary_tiles_are_chunks_of_the_loss() -> None:
    converted = of_keys("2026-08-22", model_name="gpt3-52k", per_device_batch_size=3, num_vocab_tiling=8)
    assert converted.values["task.model.loss_chunk"] == 3 * 2048 / 8
    _there_and_back(converted)
    config = recipe_with(BASE_RECIPE, converted.values)
    for chunk, tiles in ((768, "8"), (700, "12"), (10**6, None), (None, None), ("auto", None)):
        config.task.model.loss_chunk = chunk
        assert to_maxtext(config)[0].get("num_vocab_tiling") == tiles, chunk


@pytest.mark.parametrize(
    "name",
    ["llama3.1-8b", "mixtral-8x7b", "gemma-2b", "gemma2-2b", "gemma3-12b", "qwen3-8b", "mistral-7b"]
    + ["qwen2.5-7b", "olmo3-7b", "olmo3-7b-pt"],
)
def test_models_go_there_and_back(name: str) -> None:
    _there_and_back(of_keys("2026-08-22", model_name=name, dataset_type="synthetic"))


def test_a_norm_after_the_feed_forward_alone_goes_there_and_back() -> None:
    _there_and_back(of_keys("2026-08-22", model_name="gemma-2b", dataset_type="synthetic", use_post_ffw_norm="true"))


@pytest.mark.parametrize("name", GOLDEN)
def test_a_script_is_as_large_as_maxtext_says(name: str) -> None:
    converted = of_script(name, GOLDEN[name], topology="v5e-256" if name == "gpt3_half.sh" else None)
    config = recipe_with(BASE_RECIPE, converted.values)
    config.train_input = load("maxtext-base").config.train_input
    assert summarize(config)["parameters"] == num_parameters(converted.settings)


def _there_and_back(first: Conversion) -> None:
    back, left = to_maxtext(recipe_with(BASE_RECIPE, first.values))
    assert left == []
    (launch,) = read_script(command_line(back)).launches
    second = convert(launch, "back", date=datetime.date(2026, 8, 22))
    assert second.values == first.values


VALUES = [
    "",
    "0",
    "1",
    "-1",
    "2",
    "64",
    "0.5",
    "-3.5",
    "nan",
    "inf",
    "1e400",
    "true",
    "none",
    "[",
    "[a,b]",
    "relu",
    "10" * 20,
]
VALUES += [
    "llama2-7b",
    "gpt3-175b",
    "gemma2-2b",
    "mixtral-8x7b",
    "cosine",
    "adam_pax",
    "full",
    "v4-128",
    "${X",
    "\x1b[0m",
]


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.sampled_from(sorted(tables.known_keys())), st.sampled_from(VALUES)), max_size=12),
    st.sampled_from(["2023-02-01", "2023-08-01", "2024-02-01", "2024-06-01", "2026-08-22", None]),
)
def test_no_keys_break_it(pairs: list[tuple[str, str]], date: str | None) -> None:
    launch = Launch(1, pairs=[Pair(key, value, 1) for key, value in pairs], note="0 TFLOP/s")
    try:
        converted = convert(launch, "x.sh", date=datetime.date.fromisoformat(date) if date else None)
        assert yaml.safe_load(recipe_yaml(converted))["set"] and report(converted)
        compile(recipe_python(converted), "x.py", "exec")
    except ConfigError as error:
        assert error.hint


def test_the_base_is_expressed_but_for_its_defaults() -> None:
    keys, left = to_maxtext(load("maxtext-base").config)
    assert keys["decoder_block"] == "gpt3" and keys["warmup_steps_fraction"].startswith("0.1003996")
    assert not [path for path in left if path.startswith("task.model")]


def test_what_maxtext_cannot_express_is_refused() -> None:
    with pytest.raises(ConfigError, match="MaxText cannot express .*per_dim_scale"):
        to_maxtext(load("c4-1b").config)
    config = load("maxtext-base").config
    config.task.train.learner.optimizer.decay_norms_and_biases = False
    assert "task.train.learner.optimizer.decay_norms_and_biases" in to_maxtext(config)[1]


def test_a_comment_cannot_end_a_recipe() -> None:
    nasty = '"""\n\u2028import os\nx = """'
    launch = Launch(1, pairs=[Pair("model_name", "gpt3-52k", 1), Pair("run_name", nasty, 1)], note=nasty)
    launch.flags["XLA_FLAGS"] = nasty
    converted = convert(launch, 'a"""b.sh', date=datetime.date(2026, 1, 1))
    assert yaml.safe_load(recipe_yaml(converted))["set"]["task.name"] == nasty
    compile(recipe_python(converted), "x.py", "exec")


def test_a_converted_recipe_trains(pax, pax_here, tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.sh").write_text(
        "python3 MaxText/train.py MaxText/configs/base.yml model_name=gpt3-52k steps=20 per_device_batch_size=4 \\\n"
        "  learning_rate=1e-2 max_target_length=128 log_period=10 enable_checkpointing=false stepz=3\n"
    )
    done = pax_here("maxtext-convert", "run.sh", "--date", "2024-10-01", "--out", "out.yaml", "--check", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["parameters"] == result["maxtext_parameters"] and result["dropped"][0]["key"] == "stepz"
    trained = pax("train", "out.yaml", "--overlay", "cpu", "--overlay", "synthetic-data", "--run-dir", "run")
    assert trained.returncode == 0, trained.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    python = pax_here("maxtext-convert", "run.sh", "--date", "2024-10-01", "--python", "--out", "out.py")
    assert python.returncode == 0, python.stderr
    both = pax_here("recipes", "diff", "out.yaml", "out.py")
    assert both.stdout.strip() == "They do not differ.", both.stdout + both.stderr


def test_two_trainings_are_two_recipes(pax_here, tmp_path: pathlib.Path) -> None:
    line = "python3 MaxText/train.py base.yml model_name=gpt3-52k run_name="
    (tmp_path / "two.sh").write_text(f"{line}a\nfor i in 1 2; do ls; done\n{line}'\x1b[31mb'\n")
    done = pax_here("maxtext-convert", "two.sh", "--date", "2024-10-01")
    assert done.returncode == 2 and "2 trainings" in done.stderr
    done = pax_here("maxtext-convert", "two.sh", "--date", "2024-10-01", "--out", "two.yaml")
    assert done.returncode == 0 and "line 2: for i in" in done.stderr and "\x1b" not in done.stderr + done.stdout
    names = [yaml.safe_load((tmp_path / file).read_text())["set"]["task.name"] for file in ("two.yaml", "two-2.yaml")]
    assert names == ["a", "\x1b[31mb"]
    (tmp_path / "two.yaml").unlink()
    (tmp_path / "two-2.yaml").write_text("mine")
    done = pax_here("maxtext-convert", "two.sh", "--date", "2024-10-01", "--out", "two.yaml")
    assert done.returncode == 2 and "two-2.yaml already exists." in done.stderr
    assert (tmp_path / "two-2.yaml").read_text() == "mine" and not (tmp_path / "two.yaml").exists()


def test_the_command_line_refuses_with_two(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    (tmp_path / "bad.sh").write_bytes(b"\x00\x01")
    monkeypatch.chdir(tmp_path)
    dates = [["steps=1", "--date", date] for date in ("never", "2023-01-11", "2026-08-23")]
    for arguments in (["bad.sh"], ["--model", "deepseek4-284b"], [], ["missing.sh"], *dates):
        assert run(app, ["maxtext-convert", *arguments]) == 2 and "hint" in capsys.readouterr().err, arguments


@pytest.mark.parametrize(("date", "beta"), [("2025-03-01", 0.04), ("2026-06-01", 0.2)])
def test_preferences_are_carried_over(date: str, beta: float) -> None:
    """The same loss as MaxText's, which was `log_sigmoid(beta * beta * margin)` until May 2026."""
    keys = {"model_name": "gpt3-52k", "use_dpo": "true", "dpo_beta": 0.2, "dpo_label_smoothing": 0.1}
    converted = of_keys(date, **keys, train_data_columns="[chosen,rejected]")
    config = recipe_with(BASE_RECIPE, converted.values)
    assert fdl.get_callable(config.train_input).__name__ == "PreferenceInput"
    assert config.task.model.loss_chunk is None
    scores, reference = jnp.array([[-3.0, -5.0]]), jnp.array([[-4.0, -4.5]])
    loss, _ = fdl.build(config.task.model.dpo).metrics(scores, reference, jnp.ones(1))["loss"]
    margin = beta * ((-3.0 + 4.0) - (-5.0 + 4.5))
    sigmoid = 1 / (1 + math.exp(-margin))
    assert float(loss) == pytest.approx(-0.9 * math.log(sigmoid) - 0.1 * math.log(1 - sigmoid), rel=1e-5)
    assert any("--from" in text for text in converted.settings.undecided)


def test_what_differs_from_maxtexts_default_is_reported() -> None:
    converted = of_keys(model_name="llama2-7b", steps=3, add_bos=False, use_qk_norm=True)
    assert {dropped.key for dropped in converted.settings.dropped} >= {"add_bos", "use_qk_norm"}
    assert of_keys(model_name="llama2-7b", steps=3, add_bos=True, use_qk_norm=False).settings.dropped == []


def test_a_comment_with_a_version_is_no_rate() -> None:
    launch = Launch(1, pairs=[Pair("model_name", "llama2-7b", 1), Pair("steps", "3", 1)], note="v1.2.3 TFLOP/s")
    assert "TFLOP/s per device, counted by" in report(convert(launch, "a.sh", date=datetime.date(2026, 1, 1)))


@pytest.mark.parametrize(("value", "factor"), [("true", None), ("false", 1.0)])
def test_the_attention_scaling_of_yarn_is_not_reported_as_dropped(value: str, factor: float | None) -> None:
    converted = of_keys(rope_type="yarn", rope_attention_scaling=value, dataset_type="synthetic")
    assert converted.values["task.model.stack.block.attention.rotary.scaling.attention_factor"] == factor
    assert not converted.settings.dropped
