"""`import paxcli as pax`: what it costs, what it offers, and that a run can be used from Python."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import paxcli as pax
from paxcli.training.progress import Reporter

PUBLIC = {
    "ConfigError",
    "DataError",
    "DivergedError",
    "Generation",
    "MissingError",
    "PaxError",
    "Recipe",
    "RemoteError",
    "Run",
    "Stopped",
    "compile",
    "export_weights",
    "import_weights",
    "inspect_input",
    "load",
    "train",
}
SMALL = {
    "num_layers": 1,
    "model_dims": 32,
    "hidden_dims": 64,
    "num_heads": 2,
    "max_seq_len": 32,
    "global_batch_size": 4,
    "num_train_steps": 4,
    "summary_interval_steps": 2,
    "save_interval_steps": 2,
    "eval_interval_steps": None,
    "eval_inputs.0.reset_for_eval": False,
    "eval_inputs.0.eval_loop_num_batches": 2,
    "train_input.input_random_seed": 7,
}


class Interrupts(Reporter):
    """Sends Ctrl-C to this process after the first logged step."""

    def __init__(self):
        self.has_sent = False

    def step(self, record):
        if not self.has_sent:
            self.has_sent = True
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that is trained."""
    return pax.train(pax.load("tiny", set=SMALL), tmp_path_factory.mktemp("api") / "run", progress=Reporter())


def test_importing_loads_nothing_heavy():
    heavy = ("fiddle", "flax", "jax", "numpy", "optax", "orbax", "rich", "seqio", "tensorflow", "typer")
    code = f"import sys, paxcli; dir(paxcli); paxcli.PaxError; print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_the_public_names_are_these_and_documented():
    assert set(dir(pax)) == {*PUBLIC, "__version__"}
    page = (pathlib.Path(__file__).parents[1] / "docs" / "api.md").read_text()
    for name in PUBLIC:
        assert getattr(pax, name).__doc__, name
        assert f"pax.{name}" in page, name
    methods = [name for kind in (pax.Recipe, pax.Run) for name in vars(kind) if not name.startswith("_")]
    assert [name for name in methods if f"`{name}" not in page and f".{name}" not in page] == []
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = pax.trian


def test_a_recipe_shows_its_values_and_where_they_come_from():
    recipe = pax.load("tiny", overlays="cpu", set={"num_layers": 2})
    value = recipe.values["task.model.num_layers"]
    assert (value.value, value.source) == (2, "--set") and recipe.config.task.model.num_layers == 2
    assert "num_layers: 2" in str(recipe) and recipe.sizes()["num_devices"] == 1
    assert "num_layers: 2" in recipe.yaml()


def test_values_may_be_scalars_of_numpy():
    recipe = pax.load("tiny", set={"num_layers": np.int64(2), "learning_rate": np.float32(0.5)})
    assert recipe.yaml() == pax.load("tiny", set={"num_layers": 2, "learning_rate": 0.5}).yaml()


def test_mistakes_are_typed_errors_with_a_hint():
    with pytest.raises(pax.ConfigError, match="tinny") as error:
        pax.load("tinny")
    assert "tiny" in error.value.hint
    assert "".join(traceback.format_exception(error.value)).endswith(f"\nhint: {error.value.hint}\n")
    with pytest.raises(pax.ConfigError, match="expected int"):
        pax.load("tiny", set={"num_layers": "two"})
    with pytest.raises(pax.ConfigError, match="`set` is a list") as error:
        pax.load("tiny", set=["num_layers=2"])
    assert '{"num_layers": 4}' in error.value.hint
    for function in (pax.load, pax.train):
        with pytest.raises(pax.ConfigError, match="`recipe` is a Config"):
            function(pax.load("tiny").config)
    with pytest.raises(pax.ConfigError, match="plain values"):
        pax.load("tiny", set={"task.model.stack": pax.load("tiny").config.task.model.stack})
    with pytest.raises(pax.ConfigError, match="tinny"):
        pax.train("tinny")
    with pytest.raises(pax.ConfigError, match="at least 1, not -1"):
        pax.inspect_input("tiny", batches=-1)
    with pytest.raises(pax.ConfigError, match="no test inputs") as error:
        pax.inspect_input("tiny", split="test")
    assert "--split train or --split eval" in error.value.hint
    with pytest.raises(pax.ConfigError, match="no host -1 of 1"):
        pax.inspect_input("tiny", host_index=-1)
    with pytest.raises(pax.ConfigError, match="not an accelerator"):
        pax.compile("tiny", "nowhere")
    with pytest.raises(pax.ConfigError, match="step must be one of train, eval, decode, not test"):
        pax.compile("tiny", "cpu:1", step="test")
    with pytest.raises(pax.ConfigError, match="on_corrupt must be one of refuse, previous, not ignore"):
        pax.train("tiny", "nowhere", on_corrupt="ignore")
    with pytest.raises(pax.ConfigError, match="format must be one of hf, maxtext, not orbax"):
        pax.export_weights("nowhere", "elsewhere", format="orbax")
    with pytest.raises(pax.ConfigError, match="format must be one of hf, paxml, maxtext, not orbax"):
        pax.import_weights("nowhere", "elsewhere", format="orbax")
    with pytest.raises(pax.DataError, match=r"no recipe.yaml"):
        _ = pax.Run("nowhere").recipe
    with pytest.raises(pax.DataError, match=r"no metrics.jsonl"):
        pax.Run("nowhere").metrics()
    assert issubclass(pax.DataError, pax.PaxError)


def test_metrics_are_columns(run):
    columns = run.metrics()
    assert columns["step"].tolist() == [1, 2, 4]
    assert {len(column) for column in columns.values()} == {3}
    assert columns["loss"].dtype == float and columns["loss"][-1] == run.result["loss"]
    assert np.isnan(columns["mfu"]).all()  # no peak is known of this device
    assert run.metrics("eval/stdlib")["loss"].shape == (1,)
    with pytest.raises(pax.ConfigError, match="eval/stdlb"):
        run.metrics("eval/stdlb")


def test_a_run_is_evaluated_on_the_same_batches_each_time(run):
    first = run.evaluate()
    assert first == run.evaluate() == run.evaluate(step=4)
    assert first["stdlib"]["loss"] == pytest.approx(run.metrics("eval/stdlib")["loss"][0], rel=1e-6)
    assert run.steps[-1] == 4 and list(run.watch()) == run.steps
    with pytest.raises(pax.DataError, match="step 3"):
        run.evaluate(step=3)
    with pytest.raises(pax.ConfigError, match="`limit` is a setting of tasks"):
        run.evaluate(limit=3)
    with pytest.raises(pax.ConfigError, match="different data"):
        run.evaluate(files="a.txt", tasks="hellaswag")


def test_a_step_may_be_one_of_the_metrics(run):
    step = run.metrics()["step"][-1]
    assert isinstance(step, np.int64) and type(run.step(step)) is int
    assert run.evaluate(step) == run.evaluate(int(step))


def test_a_run_generates(run):
    several = run.generate(["def ", "x"], 4, temperature=0)
    assert [one.prompt for one in several] == ["def ", "x"]
    alone = run.generate("def ", 4, temperature=0)[0]
    assert several[0].log_probs == pytest.approx(alone.log_probs, abs=1e-5)  # XLA adds in another order
    assert several[0].score == pytest.approx(alone.score, abs=1e-5)
    assert dataclasses.replace(several[0], log_probs=alone.log_probs, score=alone.score) == alone
    assert run.generate([]) == []
    assert run.generate({"prompt": "def "}, 4, temperature=0) == [alone]
    assert len(several[0].ids) == len(several[0].log_probs) <= 4 and several[0].finish_reason in ("eos", "length")
    from_inputs, metrics = run.generate_from_inputs(max_tokens=2)
    assert [one.prompt for one in from_inputs] == ["def ", "class ", "import "] and metrics == {}
    assert "input" not in from_inputs[0].to_dict()


def test_threads_that_share_a_run_get_what_one_thread_gets(run):
    prompts, steps = ["def ", "x", "im", "cl"], [2, 4, 2, 4]
    alone = pax.Run(run.path)
    texts = [alone.generate(prompt, 4, temperature=0)[0].ids for prompt in prompts]
    losses = [alone.evaluate(step) for step in steps]
    shared = pax.Run(run.path)
    with ThreadPoolExecutor(4) as pool:
        generated = pool.map(lambda prompt: shared.generate(prompt, 4, temperature=0)[0].ids, prompts)
        assert list(generated) == texts
        assert list(pool.map(shared.evaluate, steps)) == losses


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": "4"}, "max_tokens: expected int or null, got '4'"),
        ({"max_tokens": 2.5}, "max_tokens: expected int or null, got 2.5"),
        ({"temperature": "hot"}, "temperature: expected float, got 'hot'"),
        ({"stop": 3}, "stop: expected list, got 3"),
        ({"top_p": 2}, "top_p must be above 0 and at most 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"beam_size": 4}, "Sampling has no `beam_size`"),
    ],
    ids=str,
)
def test_wrong_settings_of_generation_are_named(settings, message, run):
    with pytest.raises(pax.ConfigError, match=message):
        run.generate("def ", **settings)


def test_a_run_opened_by_its_path_is_the_same(run):
    again = pax.Run(run.path)
    assert again.config.task.model.num_layers == 1 and again.result is None
    ours, theirs = jax.tree.leaves(run.params()), jax.tree.leaves(again.params(4))
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert again.evaluate() == run.evaluate()
    assert pax.Run(run.path, "tiny").config == pax.load("tiny").config


def test_parameters_are_arrays_by_name(run):
    assert set(run.params()) == {"embedding", "final_norm", "stack"}


def test_a_checkpoint_is_evaluated_as_saved_although_its_parameters_were_changed(run):
    metrics, params = run.evaluate(), run.params()
    params["embedding"]["table"] = 2 * params["embedding"]["table"]
    del params["final_norm"]
    assert run.evaluate() == metrics and "final_norm" in run.params()


def test_paths_may_be_path_objects(run, tmp_path):
    (tmp_path / "small.yaml").write_text("task.model.num_layers: 1\n")
    assert pax.load("tiny", overlays=tmp_path / "small.yaml").values["task.model.num_layers"].value == 1
    (tmp_path / "a.txt").write_text("def f(): pass\n" * 20)
    assert set(run.evaluate(files=tmp_path / "a.txt")) == {"files"}
    assert set(run.evaluate(files=tmp_path.glob("*.txt"))) == {"files"}
    with pytest.raises(pax.DataError, match="nowhere has no checkpoint"):
        pax.train("tiny-synthetic", tmp_path / "run", init_from=tmp_path / "nowhere", progress=Reporter())


def test_other_files_are_evaluated_as_training_reads_them(run, tmp_path):
    turn, text = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a" * 9}], "t" * 20
    (tmp_path / "a.jsonl").write_text(json.dumps({"turns": turn, "content": text}) + "\n")
    (tmp_path / "a.txt").write_text(text)

    def tokens(kind: str, field: str, file: str) -> float:
        fields = {
            "train_input": kind,
            "train_input.files": None if kind == "StdlibInput" else [str(tmp_path / "a.jsonl")],
            "train_input.text_field": field,
        }
        other = pax.Run(run.path, pax.load(run.path, set=fields))
        return other.evaluate(files=tmp_path / file)["files"]["num_tokens"]

    as_text = tokens("TextInput", "content", "a.jsonl")
    assert as_text == tokens("ChatInput", "turns", "a.txt") in range(20, 23)  # with an end token
    assert as_text == tokens("StdlibInput", "content", "a.jsonl")
    assert tokens("ChatInput", "turns", "a.jsonl") == 32  # with the headers of the template, truncated


def test_a_run_is_plotted(run, tmp_path):
    figure = run.plot(run.path, metrics=["loss", "learning_rate"], path=tmp_path / "curves.png")
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "learning_rate"]
    png = b"\x89PNG\r\n"
    assert (tmp_path / "curves.png").read_bytes().startswith(png) and figure._repr_png_().startswith(png)
    with pytest.raises(pax.ConfigError, match="No run has a metric"):
        run.plot(metrics=["lost"])
    with pytest.raises(pax.ConfigError, match="log must be one of .*x, y, xy, not z"):
        run.plot(log="z")
    assert [axes.get_ylabel() for axes in run.plot(metrics="accuracy").axes] == ["accuracy"]


def test_ctrl_c_saves_and_the_same_call_resumes_also_in_a_thread(tmp_path, run):
    recipe, previous = pax.load("tiny", set=SMALL), signal.getsignal(signal.SIGINT)
    with pytest.raises(pax.Stopped, match="SIGINT"):
        pax.train(recipe, tmp_path / "run", progress=Interrupts())
    assert signal.getsignal(signal.SIGINT) is previous
    stopped = pax.Run(tmp_path / "run")
    assert 0 < stopped.steps[-1] < 4
    results = []
    thread = threading.Thread(target=lambda: results.append(pax.train(recipe, tmp_path / "run", progress=Reporter())))
    thread.start()
    thread.join()
    assert results[0].steps[-1] == 4 and results[0].result["loss"] == run.result["loss"]
    finished = pax.train(recipe, tmp_path / "run", progress=Reporter())  # it is, and its lock is free
    assert finished.result["steps"] == 4


def test_progress_is_printed_unless_it_goes_elsewhere(tmp_path, capsys):
    pax.train(pax.load("tiny", set=SMALL | {"num_train_steps": 1}), tmp_path / "run")
    out, err = capsys.readouterr()
    assert out == "" and "step 1 · loss" in err and "\x1b" not in err


def test_inputs_are_inspected_and_steps_compiled():
    recipe = pax.load("tiny", set=SMALL)
    assert pax.inspect_input("tiny").inputs[0].batches[0]["ids"].shape[0] > 4
    (found,) = pax.inspect_input(recipe, batches=2, split="eval").inputs
    assert len(found.batches) == 2 and found.batches[0]["ids"].shape == (4, 32)
    assert [one["prompt"] for one in pax.inspect_input(recipe, split="decode").prompts][0] == "def "
    compiled = pax.compile(recipe, "cpu:1")
    assert compiled.report["fits"] and "HloModule" in compiled.text
    assert jax.config.jax_enable_compilation_cache


def test_paths_of_new_files_may_begin_with_a_tilde_and_be_in_new_directories(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pax.compile(pax.load("tiny", set=SMALL), "cpu:1", save="~/steps/tiny.step")
    run.plot(path="~/curves/loss.png")
    run.report(path="~/pages/run.html")
    written = ["curves/loss.png", "pages/run.html", "steps/tiny.step"]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*.*")) == written


def test_a_compiled_step_that_cannot_be_written_is_a_typed_error(tmp_path):
    recipe = pax.load("tiny", set=SMALL)
    with pytest.raises(pax.MissingError, match="Is a directory"):
        pax.compile(recipe, "cpu:1", save=tmp_path)
    with pytest.raises(pax.ConfigError, match="train steps only"):
        pax.compile(recipe, "cpu:1", step="eval", save=tmp_path / "eval.step")
