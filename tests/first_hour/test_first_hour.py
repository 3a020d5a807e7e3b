"""Thirty things that a newcomer tries in the first hour, and what has to come back. One tiny run serves most."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from paxcli.cli.main import app
from paxcli.cli.output import run
from tests.devices import cpu_devices
from tests.training.runs import losses, small

pytestmark = pytest.mark.slow  # each check is a process of its own

INTERVALS = {"eval_interval_steps": 4, "save_interval_steps": 4, "summary_interval_steps": 1}


def sized(**changes: object) -> list[str]:
    """`--set` options of a tiny run of 8 steps."""
    return small(**{"num_train_steps": 8, "global_batch_size": 4, **INTERVALS, **changes})


SMALL = sized()


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    """Runs a command line in this process, in an empty directory: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def command(*words: object):
        capsys.readouterr()
        code = run(app, [str(word) for word in words])
        return (code, *capsys.readouterr())

    return command


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with the run `run`, of 8 steps."""
    path = tmp_path_factory.mktemp("first hour")
    done = command(path, "train", "tiny", "--run-dir", "run", *SMALL)
    assert done.returncode == 0, done.stderr
    return path


def command(path: pathlib.Path, *words: str, **options) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "paxcli", *words]
    return subprocess.run(
        arguments, cwd=path, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL, **options
    )


def files(path):
    return {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file() and file.name != ".lock"}


def test_01_help_lists_the_verbs(say):
    code, out, _ = say("--help")
    assert code == 0 and all(f"\n  {verb} " in out for verb in ("train", "recipes", "report", "doctor"))


def test_02_doctor_names_versions_and_no_secrets(say, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_a_secret")
    _, out, _ = say("doctor", "--json")
    assert {"pax", "jax"} <= set(out.replace('"', " ").split()) and "hf_a_secret" not in out


def test_03_a_mistyped_verb_names_the_right_one(say):
    code, _, err = say("trian")
    assert code == 2 and "train" in err


def test_04_a_mistyped_option_names_the_right_one(say):
    code, _, err = say("train", "tiny", "--run-dri", "x")
    assert code == 2 and "--run-dir" in err


def test_05_recipes_are_listed_with_a_summary(say):
    code, out, _ = say("recipes", "ls", "--json")
    assert code == 0 and all(set(one) >= {"name", "pax_name", "summary"} for one in json.loads(out))


def test_06_an_unknown_recipe_names_near_ones(say):
    code, _, err = say("train", "c4-1bb")
    assert code == 2 and "`c4-1b`" in err and "Traceback" not in err


def test_07_a_value_has_its_origin(say):
    code, out, _ = say("recipes", "show", "tiny", "--set", "num_layers=3", "--json")
    (found,) = [one for path, one in json.loads(out)["values"].items() if path.endswith(".num_layers")]
    assert (code, found) == (0, {"value": 3, "from": "--set"})


def test_08_an_unknown_field_names_near_ones(say):
    code, _, err = say("train", "tiny", "--set", "num_layer=3")
    assert code == 2 and "num_layers" in err


def test_09_a_wrong_type_is_named(say):
    code, _, err = say("train", "tiny", "--set", "num_layers=abc")
    assert code == 2 and "int" in err


def test_10_a_copy_of_a_recipe_is_the_same(say):
    code, out, _ = say("recipes", "cp", "tiny", "mine.py")
    assert code == 0 and "--run-dir runs/mine" in out
    code, out, _ = say("recipes", "diff", "tiny", "./mine.py:tiny", "--exit-code")
    assert (code, out) == (0, "They do not differ.\n")


def test_11_two_recipes_are_compared(say):
    code, out, _ = say("recipes", "diff", "tiny", "tiny-synthetic")
    assert code == 0 and "train_input" in out
    assert say("recipes", "diff", "tiny", "tiny-synthetic", "--exit-code")[0] == 1


def test_12_a_dry_run_says_sizes_and_writes_nothing(say, tmp_path):
    code, out, _ = say("train", "tiny", "--dry-run", "--json")
    wanted = {"parameters", "global_batch_size", "mesh", "state_bytes_per_device", "data"}
    assert code == 0 and wanted <= set(json.loads(out)) and list(tmp_path.iterdir()) == []


def test_13_training_leaves_everything_in_the_run_directory(trained):
    names = {path.name for path in (trained / "run").iterdir()}
    wanted = {"metrics.jsonl", "tensorboard", "config.txt", "recipe.yaml", "environment.json", "checkpoints"}
    assert wanted <= names
    found = losses(trained / "run")
    assert found[8] < found[1]


def test_14_a_finished_run_is_left_alone(trained):
    before = files(trained / "run")
    done = command(trained, "train", "tiny", "--run-dir", "run", *SMALL)
    assert done.returncode == 0 and "is finished" in done.stderr and files(trained / "run") == before


def test_15_a_longer_run_resumes_as_if_it_had_not_stopped(trained, tmp_path):
    longer = sized(num_train_steps=12, decay_end=12)  # the schedule ends with the run, unless its end is given
    first = sized(decay_end=12)
    assert command(tmp_path, "train", "tiny", "--run-dir", "a", *first).returncode == 0
    assert command(tmp_path, "train", "tiny", "--run-dir", "a", "--allow-changed", *longer).returncode == 0
    assert command(tmp_path, "train", "tiny", "--run-dir", "b", *longer).returncode == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_16_a_changed_model_is_refused_by_name(trained, say):
    code, _, err = say("train", "tiny", "--dry-run", "--run-dir", trained / "run", *sized(model_dims=64))
    assert code == 2 and "task.model.model_dims: 32 → 64" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["17_sigterm", "20_ctrl_c"])
def test_a_signal_saves_and_a_rerun_resumes(tmp_path, number):
    words = [sys.executable, "-m", "paxcli", "train", "tiny", "--run-dir", "run", *sized(num_train_steps=5000)]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75 and number.name in err
    last = max(losses(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()


def test_18_a_killed_run_resumes(tmp_path):
    words = [sys.executable, "-m", "paxcli", "train", "tiny", "--run-dir", "run", *sized(num_train_steps=16)]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not any(path.name.isdigit() for path in (tmp_path / "run" / "checkpoints").glob("*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = command(tmp_path, *words[3:])
    assert done.returncode == 0, done.stderr
    assert sorted(losses(tmp_path / "run")) == list(range(1, 17))


def test_19_a_damaged_checkpoint_is_named_and_the_one_before_serves(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "8"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])  # its last bytes may be of no array
    longer = ["train", "tiny", "--run-dir", "run", *sized(num_train_steps=9), "--allow-changed"]
    done = command(tmp_path, *longer)
    assert done.returncode == 5 and "8" in done.stderr and "--on-corrupt" in done.stderr
    done = command(tmp_path, *longer, "--on-corrupt", "previous")
    assert done.returncode == 0 and "step 4" in done.stderr, done.stderr


def test_21_a_loss_that_is_not_finite_is_exit_code_6(tmp_path):
    done = command(tmp_path, "train", "tiny", "--run-dir", "run", *sized(learning_rate=1e38, warmup_steps=0))
    assert done.returncode == 6, done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") >= 1


def test_22_an_empty_run_has_no_checkpoint(say, tmp_path):
    (tmp_path / "empty").mkdir()
    code, out, _ = say("eval", "tiny", "--run-dir", "empty", "--json")
    assert code == 5 and "no checkpoint" in json.loads(out)["error"]["message"]


def test_23_decoding_twice_gives_the_same(trained):
    decode = ["decode", "run", "--prompt", "x", "--max-tokens", "8", "--seed", "0", "--json"]
    first, second = (command(trained, *decode) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout and not list(trained.rglob("*.pkl"))


def test_24_batches_can_be_looked_at_and_are_the_same_again(say):
    inspect = ["inspect-input", "tiny", "--num-batches", "1", "--json"]
    first, second = (json.loads(say(*inspect)[1])["inputs"][0] for _ in range(2))
    assert first["rows"] == second["rows"] and first["fields"]["ids"]["shape"] == [8, 256]
    assert {"padding_share", "segments_per_row", "weights"} <= set(first)


def test_25_a_mesh_that_does_not_fit_says_how_many_devices(tmp_path):
    eight = os.environ | cpu_devices(8)
    mesh = ["train", "tiny", "--dry-run", "--set", "global_batch_size=24", "--set"]
    done = command(tmp_path, *mesh, "mesh.ici_mesh_shape=[3,2,1]", env=eight)
    assert done.returncode == 2 and "needs 6 devices, found 8" in done.stderr
    for shape in ("[3,2,1]", "[1,3,2]"):  # nor does it divide the batch, or the model
        done = command(tmp_path, *mesh[:3], "--set", f"mesh.ici_mesh_shape={shape}", env=eight)
        assert done.returncode == 2 and "needs 6 devices, found 8" in done.stderr
    assert command(tmp_path, *mesh, "mesh.ici_mesh_shape=[4,2,1]", env=eight).returncode == 0


CREATE = ["--accelerator", "v5litepod-16", "--zone", "us-west4-a", "--project", "my-project-1", "--dry-run", "--json"]


def test_26_tpus_are_ordered_by_a_command_that_can_be_pasted(say):
    code, out, err = say("provision", "create", "demo", *CREATE)
    assert code == 0, err
    words = json.loads(out)["commands"][0]
    assert words[0] == "gcloud" and any("v5litepod-16" in word for word in words)


def test_27_a_hostile_name_is_refused(say, tmp_path):
    code, out, _ = say("provision", "create", "a;touch x", *CREATE)
    assert code == 2 and "error" in json.loads(out) and not (tmp_path / "x").exists()


def test_28_installing_without_gcloud_says_so(say, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, err = say("install", "--on", "demo")
    assert code in (2, 3) and "hint:" in err


def test_29_pgle_needs_a_gpu_and_says_so(say):
    code, _, err = say("pgle", "collect", "tiny")
    assert code == 3 and "GPU" in err


def test_30_a_launch_script_is_read_and_never_run(say, tmp_path):
    (tmp_path / "run.sh").write_text(
        "python3 -m MaxText.train base.yml base_num_decoder_layers=2 steps=7 my_key=$(touch ran)\n"
    )
    code, out, err = say("maxtext-convert", "run.sh", "--dry-run", "--json")
    assert not (tmp_path / "ran").exists()
    report = json.loads(out)
    assert "my_key" in json.dumps(report), (code, err)
