"""Runs that are traced by option and on request, and the summaries of their traces."""

from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from paxcli.cli.main import app
from paxcli.cli.output import run
from paxcli.errors import ConfigError, DataError
from paxcli.profiling.steps import StepTracer, parse_steps, start_trace, stop_trace
from paxcli.profiling.summary import HLO_FILE, MEMORY_FILE, summarize
from paxcli.profiling.trace import find_trace
from paxcli.training.instrument import Instrument
from tests.training.runs import small


def test_a_traced_run_and_its_summary(pax, tmp_path, capsys):
    """On two devices, so that there are collectives. The run checks for a request before its first step."""
    (tmp_path / "run" / "profile").mkdir(parents=True)
    (tmp_path / "run" / "profile" / "request").touch()
    sets = small(num_train_steps=20, eval_interval_steps=None, num_layers=2, eval_inputs="[]")
    sets += ["--set=mesh.ici_mesh_shape={fsdp: 2}"]
    done = pax("train", "tiny", *sets, "--run-dir=run", "--profile-steps=12:14", "--json", devices=2)
    assert done.returncode == 0, done.stderr
    traces = [line.split()[-1] for line in done.stderr.splitlines() if line.startswith("Traced:")]
    on_request, by_option = (summarize(str(tmp_path / place)) for place in traces)
    assert not (tmp_path / "run" / "profile" / "request").exists()
    assert (on_request["steps"], by_option["steps"], by_option["devices"]) == (5, 3, 2)

    assert by_option["shares"].keys() == {"matmul", "attention", "norm", "collective", "other", "idle"}
    assert sum(by_option["shares"].values()) == pytest.approx(1, abs=1e-9)
    assert all(share > 0 for share in by_option["shares"].values())
    layers = {one["layer"]: one["share"] for one in by_option["layers"]}
    assert {
        "stack/layers/attention/core",
        "stack/layers/feed_forward",
        "embedding",
        "loss",
        "optimizer",
    } <= layers.keys()
    assert sum(layers.values()) + by_option["shares"]["idle"] == pytest.approx(1, abs=1e-9)
    assert layers.get("(not known)", 0) < 0.2
    assert all(one["count"] % (2 * 3) == 0 for one in by_option["operations"])  # devices × steps
    assert by_option["memory"]["argument_bytes"] > by_option["memory"]["temp_bytes"] * 0.01 > 0

    assert run(app, ["profile", "summarize", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace"] == by_option["trace"]
    assert run(app, ["profile", "summarize", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    percents = [float(line.split("%")[0]) for line in shown.splitlines()[3:9]]
    assert sum(percents) == pytest.approx(100, abs=0.3) and "stack/layers/attention" in shown

    cut_short = b"HloModule jit_train_step\n\nENTRY %main (x: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n"
    sizes = (b"", b'{"temp_by', b"[1]", b'{"temp_bytes": null}', b'{"temp_bytes": 1%s}' % (b"0" * 400))
    damaged = {MEMORY_FILE: sizes, HLO_FILE: (b"\xff\xfe", b"", cut_short)}
    for name, contents in damaged.items():
        file = epath.Path(by_option["trace"]) / name
        sound = file.read_bytes()
        for content in contents:
            file.write_bytes(content)
            with pytest.raises(DataError, match="is damaged"):
                summarize(by_option["trace"])
        file.write_bytes(sound)


def test_operations_of_an_evaluation_are_not_taken_for_those_of_the_step(tmp_path):
    """Both programs have instructions of the same names: the matmul of one is in `loss`, that of the other is not."""

    def program(name, scope):
        def compute(x):
            with jax.named_scope(scope):
                return jnp.sin(x @ x)

        compute.__name__ = name
        return jax.jit(compute).lower(jnp.ones((256, 256))).compile()

    step, evaluation = program("train_step", "loss"), program("eval_step", "embedding")
    trace = start_trace(epath.Path(tmp_path))
    for compiled in (step, evaluation, evaluation):
        jax.block_until_ready(compiled(jnp.ones((256, 256))))
    stop_trace(trace, step)
    found = summarize(str(trace), top=1000)["operations"]
    of_evaluation = {one["name"]: one for one in found if one["name"].startswith("jit_eval_step/")}
    of_step = {one["name"]: one for one in found if f"jit_eval_step/{one['name']}" in of_evaluation}
    assert of_step and {one["layer"] for one in of_step.values()} == {"loss"}
    assert {one["layer"] for one in of_evaluation.values()} == {"(not known)"}
    assert all(of_evaluation[f"jit_eval_step/{name}"]["count"] == 2 * one["count"] for name, one in of_step.items())


def test_the_newest_trace_after_a_change_of_the_time_zone(tmp_path, monkeypatch):
    older = tmp_path / "plugins" / "profile" / time.strftime("%Y_%m_%d_%H_%M_%S", time.gmtime(time.time() - 60))
    older.mkdir(parents=True)
    (older / "vm.xplane.pb").touch()
    monkeypatch.setenv("TZ", "Etc/GMT+12")
    time.tzset()
    try:
        trace = start_trace(epath.Path(tmp_path))
        stop_trace(trace, None)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert find_trace(str(tmp_path)) == trace != older and [one.name for one in older.iterdir()] == ["vm.xplane.pb"]


def test_a_run_that_resumes_after_the_steps_to_trace_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("pax"), "propagate", True)
    tracer = StepTracer(epath.Path(tmp_path), range(2, 4))
    for step in (5, 6):
        tracer.before(step)
        tracer.after(step, {"loss": jnp.zeros(())})
    assert caplog.text.count("traces nothing: the run resumed after step 3") == 1


def test_a_gpu_trace_with_command_buffers(tmp_path):
    """Part of a step of GPT-2 on an H200. Its events name their command buffer, where others name their instruction."""
    shutil.copy(Path(__file__).parent / "data" / "h200.xplane.pb", tmp_path)
    found = summarize(str(tmp_path), top=100)
    shares = {one["name"]: one for one in found["operations"]}
    assert {one["category"] for name, one in shares.items() if "cudnn" in name} == {"attention"}
    assert shares["nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT"]["category"] == "matmul"
    assert shares["fusion_1448"]["layer"] == "(not known)" and found["shares"]["idle"] < 0.03

    fusion = 'fusion(%a), kind=kLoop, calls=%f, metadata={op_name="jit(train_step)/LanguageModel/final_norm/mul"}'
    body = f"  %a = f32[8] parameter(0)\n  ROOT %fusion.1448 = f32[8] {fusion}\n"
    (tmp_path / HLO_FILE).write_text(f"ENTRY %main (a: f32[8]) -> f32[8] {{\n{body}}}\n")
    operations = summarize(str(tmp_path), top=100)["operations"]
    assert next(one for one in operations if one["name"] == "fusion_1448")["layer"] == "final_norm"


def test_a_run_on_gpus_traces_without_command_buffers(tmp_path, monkeypatch):
    monkeypatch.setattr(Instrument, "prepare", lambda self, session: self.options)
    config = SimpleNamespace(task=SimpleNamespace(train=SimpleNamespace(num_train_steps=3)))
    of = {
        platform: SimpleNamespace(
            mesh=SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)])), config=config
        )
        for platform in ("gpu", "tpu")
    }
    assert StepTracer(tmp_path, range(2, 4)).prepare(of["gpu"]) == {"xla_gpu_enable_command_buffer": ""}
    assert StepTracer(tmp_path, range(2, 4)).prepare(of["tpu"]) == StepTracer(tmp_path).prepare(of["gpu"]) == {}


def test_a_directory_without_a_trace(tmp_path):
    with pytest.raises(DataError, match="no trace"):
        summarize(str(tmp_path))
    (tmp_path / "vm.xplane.pb").write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match="no trace"):
        summarize(str(tmp_path / "vm.xplane.pb"))
    with pytest.raises(DataError):
        summarize(str(tmp_path))


def test_steps_to_trace():
    assert list(parse_steps("2:4", 10)) == [2, 3, 4]


@pytest.mark.parametrize("text", ["3", "0:2", "5:4", "a:b", "3:11"])
def test_steps_that_cannot_be_traced(text):
    with pytest.raises(ConfigError, match="--profile-steps"):
        parse_steps(text, 10)
