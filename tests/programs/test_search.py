"""Which variants are compiled, and in which order. Their reports are made up here; compiling takes minutes."""

from __future__ import annotations

import functools
import logging
import os

import pytest
import yaml

from paxcli.cli.main import app, run
from paxcli.config.render import config_text
from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError
from paxcli.programs import search as searching
from paxcli.programs import topologies
from paxcli.programs.ahead_of_time import Compiled
from paxcli.programs.estimate import count_work
from paxcli.programs.search import search
from paxcli.programs.topologies import find_compile_target, hide_accelerators
from paxcli.training.experiment import global_batch_size
from paxcli.training.session import build_session

pytest.importorskip("libtpu")

GIB = 1 << 30
ALL_POLICIES = searching._policies
COUNTED: dict[str, dict] = {}


@pytest.fixture(autouse=True)
def count_less(monkeypatch) -> None:
    """The work of a recipe is counted once for all tests, with 3 of 18 policies: it takes most of the time."""
    monkeypatch.setattr(searching, "_policies", lambda config: ALL_POLICIES(config)[::7])
    count = searching._works

    def counted(session_of, fp8_speed: float) -> dict:
        sessions = list(session_of.values())
        policies = searching._policies(sessions[0].config)
        key = str([policies, *((config_text(one.config), one.mesh) for one in sessions)])
        if key not in COUNTED:
            COUNTED[key] = count(session_of, fp8_speed)
        return COUNTED[key]

    monkeypatch.setattr(searching, "_works", counted)


def made_up(config, target, row_bytes: float) -> Compiled:
    """A row needs `row_bytes`, saving everything four times as much; without tensor parallelism it is fastest."""
    shape = config.mesh.ici_mesh_shape
    tensor = shape.get("tensor", 1) if isinstance(shape, dict) else 1
    everything = config.task.model.stack.remat_policy == "everything"
    needed = global_batch_size(config, 4) / 4 * row_bytes * (4 if everything else 1)
    speed = (3 if everything else 2) / tensor
    return Compiled({"fits": needed <= target.hbm_bytes, "hbm_needed_bytes": needed} | at_speed(config, speed), "")


def at_speed(config, tokens_per_second: float) -> dict:
    rows = global_batch_size(config, 4)
    seconds = rows * 256 / tokens_per_second
    sizes = {"global_batch_size": rows, "predicted_step_seconds": seconds}
    return sizes | {"predicted_tokens_per_second": tokens_per_second}


def searched(monkeypatch, *settings: str, row_bytes: float = GIB / 8, target: str = "v5e-4") -> tuple[list, list]:
    hide_accelerators()
    trials = []
    monkeypatch.setattr(searching, "compile_ahead", functools.partial(made_up, row_bytes=row_bytes))
    config = resolve("tiny-synthetic", (), ["optimizer=Adam", "max_seq_len=256", *settings]).config
    ranked = search(config, find_compile_target(target), lambda trial, best: trials.append(trial))
    assert {id(one) for one in trials} == {id(one) for one in ranked} and trials[0].settings == {}
    return trials, ranked


def test_few_variants_are_compiled_the_recipe_first_and_ranked(monkeypatch) -> None:
    monkeypatch.setattr(searching, "_policies", ALL_POLICIES)
    trials, ranked = searched(monkeypatch)
    assert len(trials) == len(ranked) == 6
    batches = [one.settings.get("task.train.percore_batch_size") for one in trials]
    assert batches[::2] == [None, 8, 8]  # the update of the parameters is shared by more tokens
    assert batches[1::2] == [None, None, None]  # the recipe's
    speeds = [one.report["predicted_tokens_per_second"] for one in ranked if one.report["fits"]]
    assert speeds == sorted(speeds, reverse=True)


def test_variants_of_a_model_without_tokens_are_ranked_too(monkeypatch) -> None:
    """Images have rows only."""
    hide_accelerators()

    def compile_faster_in_shards(config, target) -> Compiled:
        speed = at_speed(config, 2 if config.mesh.ici_mesh_shape else 1)
        return Compiled({"fits": True, "hbm_needed_bytes": 1, **speed, "predicted_tokens_per_second": None}, "")

    monkeypatch.setattr(searching, "compile_ahead", compile_faster_in_shards)
    best, *others = search(resolve("vit-synthetic").config, find_compile_target("v5e-4"))
    assert searching._MESH in best.settings
    assert any(searching._BATCH in one.settings for one in (best, *others))  # a larger batch is estimated to be faster


def test_messages_about_each_variant_are_left_out(monkeypatch, caplog) -> None:
    monkeypatch.setattr(searching, "_policies", lambda config: [])
    with caplog.at_level(logging.INFO):
        searched(monkeypatch, "vocab_size=999", "mesh.ici_mesh_shape={fsdp: 2, tensor: 2}")
        assert "does not divide over" not in caplog.text
        logging.getLogger("paxcli").info("a message after it")
    assert "a message after it" in caplog.text


def test_libtpu_has_its_options_before_the_estimates_start_it(monkeypatch) -> None:
    """It reads them once, at its start: later ones would have no effect on the variants that are compiled."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    seen = []

    def devices(target):
        seen.append(os.environ["LIBTPU_INIT_ARGS"])
        raise ConfigError("enough")

    monkeypatch.setattr(topologies.CompileTarget, "devices", devices)
    with pytest.raises(ConfigError, match="enough"):
        searched(monkeypatch, "mesh.libtpu_options={xla_tpu_scoped_vmem_limit_kib: 65536}")
    assert seen == ["--xla_tpu_scoped_vmem_limit_kib=65536"]


def test_settings_that_fit_are_found_for_a_recipe_that_does_not(monkeypatch) -> None:
    trials, ranked = searched(monkeypatch, "percore_batch_size=64", row_bytes=GIB / 2)  # 32 GiB; a device has 15.75
    assert not trials[0].report["fits"]
    assert ranked[0].report["fits"]


@pytest.mark.slow
def test_policies_replace_what_the_recipe_saves_and_offloads(monkeypatch) -> None:
    monkeypatch.setattr(searching, "_policies", ALL_POLICIES)
    hide_accelerators()
    settings = ["offload=[query]", "remat_policy=context", "feed_forward.gated=true"]
    config = resolve("tiny-synthetic", (), [*settings, "optimizer=Adam", "max_seq_len=256"]).config
    path = "task.model.stack"
    candidates = searching._candidates(config, find_compile_target("v5e-4"))
    found = [{key: value for key, value in one.settings.items() if path in key} for one in candidates]
    assert {f"{path}.remat_policy": "everything", f"{path}.offload": []} in found
    all_but_one = {f"{path}.remat_policy": "qkv_context_out_proj", f"{path}.save": ["feed_forward_in"]}
    offloading = next(one.settings for one in candidates if "key" in one.settings.get(f"{path}.offload", ()))
    assert offloading == {
        f"{path}.offload": ["query", "key", "value"],
        "mesh.compiler_options": {"xla_tpu_pipeline_memory_host_transfers": "false"},
    }
    memory = {str(one): candidate.memory for one, candidate in zip(found, candidates, strict=True)}
    less, more = ({f"{path}.remat_policy": name, f"{path}.offload": []} for name in ("context", "dots_except_logits"))
    less.pop(f"{path}.remat_policy")  # the recipe's
    assert memory[str(less)] < memory[str(all_but_one | {f"{path}.offload": []})] < memory[str(more)]


def test_a_pipeline_is_divided_into_other_stages_with_one_row_of_each_device_in_a_microbatch(monkeypatch) -> None:
    hide_accelerators()
    sets = ["stack=PipelinedStack", "num_layers=12", "num_stages=2", "microbatch_size=4"]
    config = resolve("tiny-synthetic", (), [*sets, "mesh.ici_mesh_shape={stage: 2, fsdp: 4}"]).config
    stack = "task.model.stack."
    once = {stack + "gather_weights_once": True}
    assert searching._meshes(config, find_compile_target("v5e-8")) == [
        {searching._MESH: {"stage": 2, "fsdp": 2, "tensor": 2}, stack + "microbatch_size": 2} | once,
        {searching._MESH: {"stage": 2, "tensor": 4}, stack + "microbatch_size": 1} | once,
        {searching._MESH: {"stage": 4, "fsdp": 2}, stack + "microbatch_size": 2, stack + "num_stages": 4} | once,
        {searching._MESH: {"stage": 4, "tensor": 2}, stack + "microbatch_size": 1, stack + "num_stages": 4} | once,
        {searching._MESH: {"stage": 8}, stack + "microbatch_size": 1, stack + "num_stages": 8} | once,
    ]
    policies = searching._policies(config)
    assert not any("mesh.compiler_options" in one for one in policies)
    offloading = next(one for one in policies if one.get(stack + "offload"))
    monkeypatch.setattr(searching, "_policies", lambda config: [offloading])  # one of them, as tracing takes long
    found = searching._candidates(config, find_compile_target("v5e-8"))
    stages = {one.settings.get(stack + "num_stages", 2) for one in found}
    assert stages == {2, 4}  # eight do not divide twelve layers
    assert any(one.settings.get(stack + "offload") for one in found)
    assert not any("mesh.compiler_options" in one.settings for one in found)


def test_each_number_of_stages_saves_as_many_inputs_of_stages(monkeypatch) -> None:
    hide_accelerators()
    monkeypatch.setattr(searching, "_policies", lambda config: [])
    target, layers = find_compile_target("v5e-8"), ["num_layers=8", "max_seq_len=256", "remat_policy=nothing"]
    sets = ["stack=PipelinedStack", "num_stages=2", "microbatch_size=4", "mesh.ici_mesh_shape={stage: 2, fsdp: 4}"]
    config = resolve("tiny-synthetic", (), [*sets, *layers]).config
    found = searching._candidates(config, target)
    saved = {one.mesh.num_stages: one.work.saved for one in found if searching._BATCH not in one.settings}
    with build_session(config, target.devices()).active() as session:
        of_recipe = count_work(session)  # the search counts those of four and eight stages only
    activation = global_batch_size(config, 8) * 256 * 128 * 4
    assert saved[2] == pytest.approx(of_recipe.saved, rel=0.02)
    assert (saved[8] - saved[4]) / 4 == pytest.approx(activation, rel=0.05)


def test_variants_that_offload_more_than_the_memory_of_the_host_are_left_out(monkeypatch) -> None:
    few_rows = dict(row_bytes=GIB / 2)  # 32 GiB, and a device has 15.75
    offloading, _ = searched(monkeypatch, "percore_batch_size=64", **few_rows)
    monkeypatch.setitem(topologies._HOST_BYTES, "v5e", 1e3)
    without, _ = searched(monkeypatch, "percore_batch_size=64", **few_rows)
    assert any("task.model.stack.offload" in one.settings for one in offloading)
    assert not any("task.model.stack.offload" in one.settings for one in without)


def test_stages_on_slices_keep_their_number() -> None:
    sets = ["stack=PipelinedStack", "num_stages=2", "stack.num_microbatches=4", "mesh.dcn_mesh_shape={stage: 2}"]
    config = resolve("tiny-synthetic", (), [*sets, "mesh.ici_mesh_shape={fsdp: 4}"]).config
    tensor, *_ = searching._meshes(config, find_compile_target("v5e-4", 2))
    assert tensor["mesh.ici_mesh_shape"] == {"fsdp": 2, "tensor": 2}
    assert tensor["task.model.stack.microbatch_size"] == 2 and tensor["task.model.stack.num_microbatches"] is None
    assert "task.model.stack.num_stages" not in tensor


def test_one_device_has_one_mesh(monkeypatch) -> None:
    trials, _ = searched(monkeypatch, target="v5e-1")
    assert len(trials) == 6 and not any("mesh.ici_mesh_shape" in one.settings for one in trials)


def test_a_variant_that_cannot_be_sharded_is_left_out(monkeypatch) -> None:
    hide_accelerators()
    asked = []

    def refuse_the_second(config, target) -> Compiled:
        asked.append(config)
        if len(asked) == 2:
            raise ConfigError("A global batch of 2 does not divide over fsdp=4.")
        return made_up(config, target, GIB / 8)

    monkeypatch.setattr(searching, "compile_ahead", refuse_the_second)
    config = resolve("tiny-synthetic", (), ["optimizer=Adam", "max_seq_len=256"]).config
    assert len(search(config, find_compile_target("v5e-4"))) == len(asked) - 1 == 6


def test_an_offloading_variant_without_memory_to_spare_was_estimated_too_small(monkeypatch) -> None:
    hide_accelerators()
    target = find_compile_target("v5e-4")
    config = resolve("tiny-synthetic", (), ["optimizer=Adam", "max_seq_len=256"]).config
    kept = (["query"], ["query", "key"], ["query", "key", "value"])
    offloads = [{"task.model.stack.remat_policy": "nothing", "task.model.stack.offload": names} for names in kept]
    monkeypatch.setattr(searching, "_policies", lambda config: offloads)
    memory = {str(one.settings): one.memory for one in searching._candidates(config, target)}

    def full(config, target) -> Compiled:
        spare = 0 if config.task.model.stack.offload else GIB
        needed = target.hbm_bytes - spare
        return Compiled({"fits": True, "hbm_needed_bytes": needed} | at_speed(config, 1.0), "")

    monkeypatch.setattr(searching, "compile_ahead", full)
    trials: list = []
    search(config, target, lambda trial, best: trials.append(trial))
    offloading = [str(one.settings) for one in trials if "task.model.stack.offload" in one.settings]
    sizes = [memory[settings] for settings in offloading]
    assert len(sizes) > 1 and sizes == sorted(sizes, reverse=True)


def test_no_variant_is_compiled_after_some_minutes_once_one_is_better(monkeypatch) -> None:
    monkeypatch.setattr(searching, "_SECONDS", -1)
    trials, _ = searched(monkeypatch, "mesh.ici_mesh_shape={fsdp: 2, tensor: 2}")
    assert [one.rank > trials[0].rank for one in trials] == [False] * (len(trials) - 1) + [True]
    trials, _ = searched(monkeypatch, "percore_batch_size=64", row_bytes=GIB / 2)
    assert [one.report["fits"] for one in trials] == [False] * (len(trials) - 1) + [True]


def test_an_interrupted_search_has_saved_the_best_so_far(monkeypatch, tmp_path) -> None:
    tried: list = []

    def compile_two(config, target) -> Compiled:
        if len(tried) == 2:
            raise KeyboardInterrupt
        tried.append(config.mesh.ici_mesh_shape)
        compiled = made_up(config, target, row_bytes=GIB / 8)
        return Compiled(compiled.report | {"predicted_mfu": None}, "")

    monkeypatch.setattr(searching, "compile_ahead", compile_two)
    command = ["compile", "tiny-synthetic", "--topology=v5e-4", "--set=mesh.ici_mesh_shape={tensor: 4}"]
    assert run(app, [*command, "--search", f"--save={tmp_path}/best.yaml"]) == 130
    assert yaml.safe_load((tmp_path / "best.yaml").read_text())["mesh.ici_mesh_shape"] == tried[1] == {"fsdp": 4}


def test_nothing_is_ranked_without_a_prediction() -> None:
    with pytest.raises(ConfigError, match="no step-time prediction"):
        search(resolve("c4-1b").config, find_compile_target("cpu:4"))
