"""`pax train`, `eval` and `decode` as a user meets them, and every mistake that a user can make."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shutil
import textwrap
import threading

import pytest

from paxcli.checkpoint.manifest import from_json, to_json
from paxcli.metrics.meter import RESERVED
from paxcli.training.run_dir import RunDir
from tests.cli.conftest import quick
from tests.training.runs import losses


def _error(done) -> dict:
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == done.returncode
    assert "Traceback" not in done.stderr
    return error


def test_json_report(trained):
    run_dir, result, done = trained
    keys = {"run_dir", "steps", "loss", "log_pplx", "tokens_per_second", "mfu", "seconds"}
    assert keys <= result.keys()
    assert result["steps"] == 20 and result["run_dir"] == str(run_dir)
    assert result["loss"] == losses(run_dir)[20]


def test_the_summary_of_a_loss_that_is_not_finite():
    from paxcli.cli.train import run_text

    result = {"run_dir": "a", "steps": 2, "loss": None, "tokens_per_second": 5.0, "eval": {}}
    assert run_text(result).startswith("a: 2 steps, loss not finite\n")
    assert run_text(result | {"tokens_per_second": None}).startswith("a: 2 steps, loss unknown\n")  # no metrics.jsonl


def test_a_pipe_gets_no_control_codes(trained):
    *_, done = trained
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", done.stdout + done.stderr)
    assert sum(line.startswith("step ") for line in done.stderr.splitlines()) == 4  # 1, 10, 20 and the evaluation


def test_the_run_directory(trained):
    run_dir, *_ = trained
    for name in ("recipe.yaml", "config.txt", "environment.json", "metrics.jsonl", "tensorboard", "checkpoints/20"):
        assert (run_dir / name).exists(), name
    environment = json.loads((run_dir / "environment.json").read_text())
    assert {"pax", "python", "jax", "device_kind", "num_devices"} <= environment.keys()
    first, *_, last = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    of_model, of_step = {"loss", "log_pplx", "accuracy"}, {"learning_rate", "grad_norm", "param_norm", "skipped_steps"}
    assert first.keys() - RESERVED == of_model | of_step, "a model's metric may have no name that pax writes"
    assert last["split"] == "eval/stdlib" and last.keys() - RESERVED == of_model


def test_recipe_yaml_is_the_run_again(trained, tmp_path, pax):
    run_dir, *_ = trained
    done = pax("train", str(run_dir / "recipe.yaml"), "--run-dir=again")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "again") == losses(run_dir)
    config = [(path / "config.txt").read_text() for path in (run_dir, tmp_path / "again")]
    assert config[0] == config[1] and "train_input.input_random_seed = null" not in config[0]


def test_dry_run_touches_nothing(tmp_path, pax_here):
    done = pax_here("train", "tiny", "--dry-run", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["parameters"] == 824_448
    assert json.loads(done.stdout)["would"] == "start"
    assert not list(tmp_path.iterdir())
    empty = pax_here("train", "tiny", "--run-dir=", "--dry-run", "--json")
    assert empty.returncode == 2 and "is empty" in _error(empty)["message"]
    (tmp_path / "file").write_text("")
    (tmp_path / "step.pax").write_text("not a compiled step")
    damaged = pax_here("train", "tiny", "--compiled=step.pax", "--dry-run", "--json")
    assert damaged.returncode == 5 and "step.pax is not a compiled step" in damaged.stdout
    (tmp_path / "step.pax").unlink()
    below = pax_here("train", "tiny", "--run-dir=file/run", "--dry-run", "--json")
    assert below.returncode == 3 and "file is a file" in _error(below)["message"]


def test_a_run_directory_is_resumed(trained, tmp_path, pax, monkeypatch, capsys):
    from paxcli.cli.main import app, run

    shutil.copytree(trained[0], tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    more = ["--set=num_train_steps=24", "--allow-changed"]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def dry_run(*arguments):
        code = run(app, ["train", "mine", *arguments, "--dry-run", "--json"])
        return code, json.loads(capsys.readouterr().out)

    assert dry_run()[1]["would"] == "do nothing: the run is finished"
    assert dry_run(*more)[1]["would"] == "resume at step 20"
    # Training takes nothing from it either, and does not ask whether it is there.
    assert dry_run(*more, "--from=nowhere")[1].get("would") == "resume at step 20"
    assert dry_run()[1]["data"].keys() == {"train", "stdlib"}
    assert dry_run()[1]["mesh"] == "data=1" and dry_run()[1]["state_bytes_per_device"] > 1e4
    for arguments, exit_code, message in (
        (["--set=num_layers=2"], 2, "num_layers"),
        (["--set=learning_rate=-1"], 2, "learning_rate must be at least 0"),
        (["--set=ici_mesh_shape={data: 8}", "--allow-changed"], 2, "needs 8 devices"),
        (["--profile-steps=5"], 2, "--profile-steps 5 is not a range"),
        (["--from=nowhere", "--run-dir=new"], 5, "nowhere has no checkpoint"),
        (["--with-optimizer"], 2, "no checkpoint to take the optimizer state from"),
        (["--from=mine@99", "--run-dir=new"], 5, "mine has no checkpoint of step 99"),
        (["--set=eval_inputs=[TextInput]", "--set=eval_inputs.0.files=[no.txt]", "--allow-changed"], 5, "no.txt"),
    ):
        code, refused = dry_run(*arguments)
        assert code == exit_code and message in refused["error"]["message"], refused
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with RunDir("mine").lock():
        assert "mine is in use by process" in dry_run()[1]["error"]["message"]
    done = pax("train", "mine", *more, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 24 and "at step 20" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_eval(trained, pax):
    run_dir, *_ = trained
    done = pax("eval", str(run_dir), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    last = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][-1]
    assert result["step"] == 20
    assert result["metrics"]["stdlib"]["log_pplx"] == pytest.approx(last["log_pplx"], rel=1e-6)
    assert json.loads((run_dir / "eval" / "20.json").read_text()) == result


def test_eval_watch_ends_with_the_run(trained, pax):
    run_dir, *_ = trained
    done = pax("eval", str(run_dir), "--watch", "--json")
    assert done.returncode == 0, done.stderr
    assert [entry["step"] for entry in json.loads(done.stdout)["evaluations"]] == [10, 20]


def test_eval_watch_waits_for_the_first_checkpoint(trained, tmp_path, monkeypatch, capsys):
    from paxcli.cli.main import app, run
    from paxcli.inference import trained as module

    monkeypatch.setattr(module, "_POLL_SECONDS", 0.1)
    copy = shutil.copytree(trained[0], tmp_path / "copy")
    (copy / "checkpoints" / "10").rename(copy / "checkpoints" / "hidden")
    starts = threading.Timer(1.0, copy.rename, [tmp_path / "late"])
    starts.start()
    assert run(app, ["eval", str(trained[0] / "recipe.yaml"), "--run-dir", str(tmp_path / "late"), "--watch"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 20 · ") and out.count("\n") == 1
    assert run(app, ["eval", str(tmp_path / "late"), "--watch", "--step", "20"]) == 2
    assert "--watch evaluates every checkpoint, and --step one" in capsys.readouterr().err


@pytest.mark.parametrize("trains", [True, False])
def test_eval_watch_tells_that_no_process_trains(trains, trained, tmp_path, monkeypatch, caplog):
    import paxcli
    from paxcli.cli.main import app, run
    from paxcli.inference import trained as module

    caplog.set_level("INFO", "pax")
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.1)
    copy, evaluate = shutil.copytree(trained[0], tmp_path / "copy"), paxcli.Run.evaluate
    hidden = (copy / "checkpoints" / "20").rename(copy / "checkpoints" / "hidden")

    def evaluate_before_the_next(self, step, *more):
        metrics = evaluate(self, step, *more)
        if step == 10:
            threading.Timer(2.0, hidden.rename, [copy / "checkpoints" / "20"]).start()
        return metrics

    monkeypatch.setattr(paxcli.Run, "evaluate", evaluate_before_the_next)
    with RunDir(copy).lock() if trains else contextlib.nullcontext():
        assert run(app, ["eval", str(copy), "--watch"]) == 0
    assert caplog.text.count(f"No process trains in {copy}: waiting") == (0 if trains else 1)


def test_eval_watch_survives_the_deletion_of_checkpoints(trained, tmp_path, monkeypatch, capsys):
    """Training deletes two while it evaluates: the next one, and the one after that just before it is read."""
    import paxcli
    from paxcli.cli.main import app, run

    copy = shutil.copytree(trained[0], tmp_path / "mine")
    checkpoints, evaluate = tmp_path / "mine" / "checkpoints", paxcli.Run.evaluate
    for step in (0, 12, 14, 16):  # 0 is that of an import
        manifest = shutil.copytree(checkpoints / "10", checkpoints / f"{step}") / "manifest" / "metadata"
        renumbered = dataclasses.replace(from_json(json.loads(manifest.read_text())), step=step)
        manifest.write_text(json.dumps(to_json(renumbered)))

    def evaluate_late(self, step, *more):
        if step in (10, 14):
            shutil.rmtree(checkpoints / f"{step + 2 if step == 10 else step}")
        return evaluate(self, step, *more)

    monkeypatch.setattr(paxcli.Run, "evaluate", evaluate_late)
    assert run(app, ["eval", str(copy), "--watch", "--json"]) == 0
    assert [entry["step"] for entry in json.loads(capsys.readouterr().out)["evaluations"]] == [0, 10, 16, 20]


def test_a_dry_run_refuses_the_compiler_options_that_a_run_refuses(tmp_path, monkeypatch, capsys):
    from paxcli.cli.main import app, run

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = {}
    for option in ("xla_cpu_no_such_option=true", "xla_backend_optimization_level=1"):
        name, _, value = option.partition("=")
        arguments = [f"--set=mesh.compiler_options={{{name}: {value}}}", f"--run-dir={tmp_path / name}", "--json"]
        for more in (["--dry-run"], [])[: 2 if "no_such" in name else 1]:
            code = run(app, ["train", "tiny", *arguments, *more])
            found[name, *more] = code, json.loads(capsys.readouterr().out)
    (dry, dry_error), (real, real_error), (code, plan) = found.values()
    assert dry == real == 2 and dry_error == real_error
    assert "No such compile option: 'xla_cpu_no_such_option'" in dry_error["error"]["message"]
    assert code == 0 and plan["compiler_options"] == {"xla_backend_optimization_level": 1}


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_eval_watch_of_checkpoints_that_are_all_deleted(options, trained, tmp_path, monkeypatch, capsys):
    import paxcli
    from paxcli.cli.main import app, run

    copy, evaluate = shutil.copytree(trained[0], tmp_path / "mine"), paxcli.Run.evaluate

    def evaluate_late(self, step, *more):
        shutil.rmtree(copy / "checkpoints" / f"{step}")
        return evaluate(self, step, *more)

    monkeypatch.setattr(paxcli.Run, "evaluate", evaluate_late)
    assert run(app, ["eval", str(copy), "--watch", *options]) == 5
    printed = capsys.readouterr()
    message = json.loads(printed.out)["error"]["message"] if options else printed.err
    assert "Every checkpoint was deleted before it was evaluated." in message


def test_decode(trained, pax):
    run_dir, *_ = trained
    arguments = ("decode", str(run_dir), "--prompt", "de", "--max-tokens", "8", "--temperature", "1", "--seed", "3")
    first, second = pax(*arguments), pax(*arguments, "--json")
    assert first.returncode == 0, first.stderr
    (line,) = first.stdout.splitlines()
    assert json.loads(second.stdout)["outputs"] == [json.loads(line)]
    output = json.loads(line)
    assert output["prompt"] == "de" and len(output["ids"]) == len(output["log_probs"]) <= 8
    assert output["finish_reason"] in ("eos", "length")
    assert max(output["log_probs"]) <= 0
    assert (run_dir / "decoded" / "20.jsonl").exists()


@pytest.mark.slow
def test_decode_a_file_of_prompts_and_settings_of_the_recipe(trained, tmp_path, pax):
    run_dir, *_ = trained
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "de", "continuation": "f "}\n{"ids": [2, 103], "max_tokens": 3}\n'
    )
    sets = ("--set", "decoding.num_samples=2", "--set", "decoding.temperature=1")
    done = pax("decode", str(run_dir), "--prompts-file=prompts.jsonl", *sets, "--json")
    scored, first, second = json.loads(done.stdout)["outputs"]
    assert (scored["text"], scored["finish_reason"]) == ("f ", "given")
    assert first["score"] >= second["score"] and len(first["ids"]) <= 3
    beams = pax("decode", str(run_dir), "--prompt=de", "--set=decoding=BeamSearch", "--max-tokens=4", "--json")
    assert len(json.loads(beams.stdout)["outputs"]) == 1
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n\nnot JSON\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    for arguments, message in {
        ("--prompts-file=bad.jsonl",): "bad.jsonl, line 3: not JSON",
        ("--prompts-file=deep.jsonl",): "deep.jsonl, line 1: not JSON",
        ("--interactive", "--prompt=x"): "reads prompts from the terminal",
        ("--prompt", "x" * 256): "longer than max_seq_len=32",
        ("--prompt=x", "--set=decoding.eos_ids=[400]"): "vocab_size is 259",
        ("--prompt=x", "--set=decoding=BeamSearch", "--temperature=1"): "BeamSearch has no `temperature`",
    }.items():
        failed = pax("decode", str(run_dir), *arguments)
        assert failed.returncode == 2 and message in failed.stderr, failed.stderr


@pytest.mark.slow
def test_decode_several_prompts_like_one_by_one(trained, tmp_path, pax):
    run_dir, *_ = trained
    (tmp_path / "prompts.txt").write_text("import\nx\n")
    options = ("--max-tokens=5", "--temperature=0")
    done = pax("decode", str(run_dir), "--prompts-file=prompts.txt", *options)
    together = [json.loads(line) for line in done.stdout.splitlines()]
    alone = [json.loads(pax("decode", str(run_dir), "--prompt", prompt, *options).stdout) for prompt in ("import", "x")]
    assert [o["ids"] for o in together] == [o["ids"] for o in alone]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "named"),
    [
        (("train", "tinny"), 2, "`tiny`"),
        (("train", "tiny", "--set", "num_layer=2"), 2, "num_layers"),
        (("train", "tiny", "--set", "num_layers=two"), 2, "expected int"),
        (("train", "tiny", "--set", "num_heads=3"), 2, "num_heads=3"),
        (("train", "tiny", "--set", "mesh.ici_mesh_shape={fsdp: 4}"), 2, "found 1"),
        (("train", "tiny", "--set", "mesh.ici_mesh_shape={fdsp: 4}"), 2, "`fsdp`"),
        (("train", "tiny", "--set", "mesh.ici_mesh_shape={data: 3}"), 2, "data=3 needs 3 devices"),
        (("train", "tiny", "--set", "mesh.ici_mesh_shape={tensor: 8}"), 2, "tensor=8 needs 8 devices"),
        (("train", "tiny", "--set", "num_microbatches=3"), 2, "3 microbatches"),
        (("train", "tiny", "--set", "train_input.seq_len=512"), 2, "max_seq_len=256"),
        (("train", "tiny", "--set", "task.model.vocab_size=100"), 2, "259"),
        (("train", "tiny", "--set", "save_interval_steps=0"), 2, "save_interval_steps"),
        (("train", "tiny", "--set", "final_norm.dims=3"), 2, "filled in"),
        (("train", "tiny", "--overlay", "cpuu"), 2, "`cpu`"),
        (("train", "missing.yaml"), 2, "missing.yaml"),
        (("train", "missing.py:recipe"), 2, "missing.py"),
        (("train", "tiny", "--from", "nowhere"), 5, "nowhere"),
        (("eval", "tiny"), 5, "no checkpoint"),
        (("decode", "nowhere/at/all"), 2, "nowhere"),
    ],
)
def test_mistakes(arguments, exit_code, named, tmp_path, monkeypatch, capsys):
    from paxcli.cli.main import app, run

    monkeypatch.chdir(tmp_path)
    assert run(app, [*arguments, "--json"]) == exit_code
    error = json.loads(capsys.readouterr().out)["error"]
    assert named in error["message"] + (error["hint"] or "")
    assert run(app, [*arguments]) == exit_code
    text = capsys.readouterr()
    assert "goodput" not in text.err and "Traceback" not in text.err  # it refuses before it compiles
    assert len(text.err.splitlines()) <= 24 and text.out == ""


@pytest.mark.parametrize(("content", "named"), [(b"", "empty"), (b"fine \xff", "0xff"), (None, "There is no file")])
def test_bad_text(content, named, tmp_path, pax_here):
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            from paxcli.config.recipe import recipe
            from paxcli.inputs.text import TextInput
            from pax_recipes.tiny import tiny

            @recipe()
            def mine():
                config = tiny()
                config.train_input = TextInput.config(files=["text.txt"])
                return config
            """
        )
    )
    done = pax_here("train", "./mine.py:mine", "--json")
    assert done.returncode == 5, done.stdout + done.stderr
    error = _error(done)
    assert "text.txt" in error["message"] and named in error["message"]


def test_run_directory_is_a_file(tmp_path, pax_here):
    (tmp_path / "file").write_text("")
    done = pax_here("train", "tiny", "--run-dir=file", "--json")
    assert done.returncode == 2 and "is a file" in _error(done)["message"]


@pytest.mark.skipif(os.geteuid() == 0 and not pathlib.Path("/proc/self").exists(), reason="needs a read-only place")
def test_run_directory_cannot_be_written(pax):
    done = pax("train", "tiny", "--run-dir=/proc/run", "--json")
    assert done.returncode == 3 and "cannot be written" in _error(done)["message"]


def test_run_directory_is_in_use(tmp_path, pax_here):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = pax_here("train", "tiny", "--run-dir=run", "--json")
    assert done.returncode == 2 and "in use" in _error(done)["message"]


def test_checkpoint_of_another_recipe(trained, tmp_path, pax_here):
    """Without `config.txt`, the checkpoint's own record of the recipe tells."""
    import shutil

    run_dir, *_ = trained
    shutil.copytree(run_dir, tmp_path / "copy")
    (tmp_path / "copy" / "config.txt").unlink()
    done = pax_here("train", "tiny", *quick(num_train_steps=30, hidden_dims=128), "--run-dir=copy", "--json")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "hidden_dims" in _error(done)["message"]


def test_divergence(tmp_path, pax):
    done = pax("train", "tiny", *quick(learning_rate=1e38, skip_invalid_gradients="false"), "--run-dir=d", "--json")
    assert done.returncode == 6, done.stdout + done.stderr
    assert "loss" in _error(done)["message"]
    assert (tmp_path / "d" / "metrics.jsonl").read_text()


def test_an_own_layer_and_recipe(tmp_path, pax):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            '''
            """A recipe with a layer of its own."""
            import jax.numpy as jnp

            from paxcli.config.recipe import recipe
            from paxcli.layers.base import Layer
            from paxcli.layers.init import Init, Xavier
            from pax_recipes.tiny import tiny_synthetic


            class Sandwich(Layer):
                """Squared ReLU between two matrices."""

                model_dims: int
                hidden_dims: int
                params_init: Init = Xavier()

                def setup(self):
                    shape, axes = (self.model_dims, self.hidden_dims), ("embed", "mlp")
                    self.w = self.weight("w", self.params_init, shape, axes, contracts=(0,), produces=(1,))

                def __call__(self, x):
                    return jnp.square(jnp.maximum(x @ self.w, 0)) @ self.w.T


            @recipe()
            def my_recipe():
                """`tiny-synthetic` with sandwiches."""
                config = tiny_synthetic()
                config.task.model.stack.block.feed_forward = Sandwich.partial()
                return config
            '''
        )
    )
    done = pax("train", "./mine.py:my_recipe", *quick(learning_rate=0.01), "--json")
    assert done.returncode == 0, done.stderr
    series = losses(tmp_path / "runs" / "my-recipe")
    assert series[20] < series[1] - 0.1


@pytest.mark.slow
def test_without_tensorflow(tmp_path, pax):
    """Training and decoding work where tensorflow, seqio and lingvo cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "for name in ('tensorflow', 'seqio', 'lingvo', 'tensorflow_datasets'):\n"
        "    sys.modules[name] = None\n"
    )
    done = pax("train", "tiny", *quick(), "--run-dir=run", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    done = pax("decode", "run", "--prompt=x", "--max-tokens=2", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
