"""Files of several kinds are read as launches."""

from __future__ import annotations

import datetime
import os
import pathlib
import sys

import pytest

from paxcli.convert.maxtext.convert import convert_script
from paxcli.convert.maxtext.launch_to_recipe import convert
from paxcli.convert.maxtext.render import report
from paxcli.convert.maxtext.settings import settings_of
from paxcli.convert.maxtext.source import read_file, read_source
from paxcli.errors import ConfigError
from tests.convert.maxtext.test_shell import keys

CANARY = "pax-canary"


@pytest.mark.parametrize(
    ("text", "said"), [(b"\x00\xff\x7f", "not a text"), (b" \n", "empty"), (b"ls -l\n", "no MaxText training")]
)
def test_what_is_no_launch_is_refused(tmp_path: pathlib.Path, text: bytes, said: str) -> None:
    (tmp_path / "x.sh").write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        read_source([str(tmp_path / "x.sh")])


def test_bare_keys_and_a_config_that_inherits_itself(tmp_path: pathlib.Path) -> None:
    (tmp_path / "keys.txt").write_text("# mine\nsteps=10 per_device_batch_size=2\nmodel_name='gpt3-52k'\n")
    assert keys(read_source([str(tmp_path / "keys.txt")]).launches[0])["model_name"] == "gpt3-52k"
    assert keys(read_source(["steps=3", "scale=2"]).launches[0]) == {"steps": "3", "scale": "2"}
    (tmp_path / "over.yml").write_text("base_config: under.yml\nsteps: 2\n")
    (tmp_path / "under.yml").write_text("steps: 1\nlogical_axis_rules: [['batch', 'data'], [mlp, [fsdp, tensor]]]\n")
    (launch,) = read_source([str(tmp_path / "over.yml")]).launches
    values = [(pair.key, pair.value) for pair in launch.pairs]
    assert values == [("logical_axis_rules", "[[batch,data],[mlp,[fsdp,tensor]]]"), ("steps", "2")]
    (tmp_path / "a.yml").write_text("base_config: b.yml\nsteps: 1\n")
    (tmp_path / "b.yml").write_text("base_config: a.yml\nsteps: 2\n")
    with pytest.raises(ConfigError, match="inherits itself"):
        read_source([str(tmp_path / "a.yml")])


def test_a_config_is_found_by_its_path_in_the_repository(tmp_path: pathlib.Path) -> None:
    configs = tmp_path / "src/MaxText/configs"
    (configs / "tpu/v5p").mkdir(parents=True)
    (configs / "mine").mkdir()
    (configs / "mine/small.yml").write_text("base_config: base.yml\nsteps: 17\nmax_target_length: 64\n")
    script = configs / "tpu/v5p/run.sh"
    script.write_text("python3 -m MaxText.train src/MaxText/configs/mine/small.yml model_name=gpt3-52k\n")
    (launch,) = read_file(script).launches
    assert keys(launch) == {"steps": "17", "max_target_length": "64", "model_name": "gpt3-52k"}
    assert not launch.diagnostics


def test_the_environment_overrides_a_config_but_not_the_command_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.yml").write_text("base_config: base.yml\nsteps: 5\nlog_period: 3\neval_interval: 6\n")
    text = "export M_STEPS=7 M_LOG_PERIOD=9\npython3 -m MaxText.train mine.yml log_period=4\n"
    (tmp_path / "run.sh").write_text(text)
    settings = settings_of(read_file(tmp_path / "run.sh").launches[0])
    assert (settings["steps"], settings["log_period"], settings["eval_interval"]) == (7, 4, 6)
    assert settings.warnings == [
        "Line 1: M_LOG_PERIOD is also on the command line, which applies here, which MaxText rejects."
    ]


def test_keys_may_be_nested_and_a_config_needs_a_script() -> None:
    assert keys(read_source(["dpo.dpo_beta=0.2", "steps=3"]).launches[0]) == {"dpo.dpo_beta": "0.2", "steps": "3"}
    for words, wrong in ((["steps=3", "mine.yml"], "mine.yml"), (["steps=3", "4"], "4"), (["steps:", "3"], "steps: 3")):
        with pytest.raises(ConfigError, match=f"`{wrong}` is neither a file nor key=value"):
            read_source(words)


def test_a_base_config_at_hand_gives_its_values(tmp_path: pathlib.Path) -> None:
    """Keys without a value have MaxText's default; a number may be written with a point."""
    (tmp_path / "base.yml").write_text(
        "steps: 21\nmax_num_checkpoints_to_keep: None\nlog_period: null\nrope_max_timescale: 1000000.0\n"
        "shared_experts: 1\nmodel_name: llama2-7b\n"
    )
    (tmp_path / "mine.yml").write_text("base_config: base.yml\nmax_target_length: 64\n")
    for name in ("base.yml", "mine.yml"):
        (launch,) = read_file(tmp_path / name).launches
        converted = convert(launch, name)
        assert converted.values["task.train.num_train_steps"] == 21
        assert converted.values["checkpoint.save_max_to_keep"] is None
        assert converted.values["task.train.summary_interval_steps"] == 100
        assert converted.values["task.model.stack.block.attention.rotary.max_timescale"] == 1e6
    assert converted.values["task.model.max_seq_len"] == 64


def test_an_instruct_model_has_the_sizes_of_its_base() -> None:
    """MaxText's names in its tutorials of fine-tuning; the files are those without the ending."""
    (launch,) = read_source(["model_name=llama3.1-8b-Instruct"]).launches
    assert settings_of(launch)["base_mlp_dim"] == 14336


def test_the_file_of_a_model_is_that_model_with_its_own_keys(tmp_path: pathlib.Path) -> None:
    """MaxText decides by the name, not by a key, that Llama 3.1's RoPE is scaled."""
    (tmp_path / "llama3.1-8b.yml").write_text("base_num_decoder_layers: 2\nrope_max_timescale: 500_000\n")
    (launch,) = read_source([str(tmp_path / "llama3.1-8b.yml")]).launches
    values = convert(launch, "llama3.1-8b.yml").values
    assert values["task.model.stack.block.attention.rotary.scaling"] == "Llama31Scaling"
    assert values["task.model.num_layers"] == 2 and values["task.model.hidden_dims"] == 14336


@pytest.mark.parametrize("names_config", [False, True])
def test_a_model_overrides_a_config_but_not_the_command_line(tmp_path: pathlib.Path, names_config: bool) -> None:
    (tmp_path / "base.yml").write_text("base_emb_dim: 2048\nvocab_size: 77\nnever_heard: 1\nlog_period: 7\n")
    (tmp_path / "mine.yml").write_text("base_config: base.yml\nmodel_name: llama2-7b\nbase_mlp_dim: 64\nsteps: 5\n")
    command = "python3 -m MaxText.train mine.yml base_num_decoder_layers=2 override_model_config=true\n"
    (tmp_path / "run.sh").write_text(command)
    settings = settings_of(read_file(tmp_path / ("run.sh" if names_config else "mine.yml")).launches[0])
    assert (settings["base_emb_dim"], settings["vocab_size"], settings["base_mlp_dim"]) == (4096, 32000, 11008)
    assert (settings["steps"], settings["log_period"]) == (5, 7)
    assert settings["base_num_decoder_layers"] == (2 if names_config else 32)
    warned = [text.split(" has no effect: model llama2-7b overrides")[0] for text in settings.warnings]
    lines = (1, 1) if names_config else (2, 3)
    assert warned == [f"Line {lines[0]}: vocab_size=77", f"Line {lines[1]}: base_mlp_dim=64"]
    assert not settings.dropped


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("python3 -m maxtext.trainers.post_train.rl.train_rl rl.yml model_name=llama2-7b", "reinforcement learning"),
        (
            "pip install -e .\npython3 -m maxtext.trainers.post_train.distillation.train_distill model_name=llama2-7b",
            "Line 2 runs maxtext.trainers.post_train.distillation.train_distill: post-training that pax does not do",
        ),
        ("python3 src/MaxText/rl/train_rl.py rl.yml model_name=llama2-7b", "reinforcement learning"),
        ("python3 -m MaxText.train base.yml model_name=llama2-7b use_dpo=true dpo.algo=orpo", "dpo_algo=orpo"),
        ("python3 -m MaxText.train base.yml model_name=llama2-7b per_device_batch_size=0.5", "--topology"),
        ("python3 -m MaxText.train base.yml model_name=llama2-7b dcn_fsdp_parallelism=-1", "--slices"),
        ("python3 -m MaxText.train base.yml model_name=llama2-7b dcn_diloco_parallelism=2", "pax lacks DiLoCo"),
        ("python3 -m MaxText.train base.yml model_name=llama2-7b moba=true", "pax lacks mixture of block attention"),
        (
            "python3 -m MaxText.train base.yml model_name=llama2-7b training_objective=block_diffusion",
            "pax lacks diffusion over blocks of tokens",
        ),
        ("python3 -m MaxText.train base.yml model_name=llama2-8b", "Pax's tables have no model `llama2-8b`"),
        ("python3 -m MaxText.train sweeps/mine.yml", "`mine.yml`: this config was not found"),
        ("python3 -m MaxText.train base.yml model_name=llama2-7b remat_policy=fulll", "Did you mean `full`?"),
    ],
)
def test_a_refusal_names_its_reason_and_the_next_step(tmp_path: pathlib.Path, command: str, reason: str) -> None:
    (tmp_path / "run.sh").write_text(f"{command} steps=3\n")
    with pytest.raises(ConfigError) as refused:
        convert(read_file(tmp_path / "run.sh").launches[0], "run.sh")
    assert reason in f"{refused.value.message} {refused.value.hint}" and refused.value.hint


def test_a_script_without_a_launch_shows_the_skipped_statement_that_runs_python(tmp_path: pathlib.Path) -> None:
    models = "llama2-7b gemma-7b mistral-7b mixtral-8x7b gemma2-9b qwen3-8b llama3.1-8b"
    train = "python3 -m MaxText.train base.yml model_name=$model steps=10"
    (tmp_path / "run.sh").write_text(f"usage() {{ echo $0; }}\nfor model in {models}; do\n  {train}\ndone\n")
    with pytest.raises(ConfigError) as refused:
        read_file(tmp_path / "run.sh")
    assert str(refused.value.hint).startswith("Skipped, at line 2: for model in llama2-7b ")
    assert "(a `for` statement). Give its keys" in str(refused.value.hint)


def test_an_unknown_device_of_a_wrapper_is_a_question(tmp_path: pathlib.Path) -> None:
    train = "python3 MaxText/train.py base.yml model_name=gpt3-52k steps=5"
    (tmp_path / "run.sh").write_text(
        f"xpk workload create --device-type=h100-80gb-8 --num-nodes=2 --command='{train}'\n"
    )
    converted = convert(read_file(tmp_path / "run.sh").launches[0], "run.sh")
    assert any("h100-80gb-8" in text and "--topology" in text for text in converted.settings.undecided)


def test_a_batch_that_only_a_shell_can_compute_is_a_question(tmp_path: pathlib.Path) -> None:
    """Also where quotes around it, in the string of a command, make it a text."""
    train = 'python3 MaxText/train.py base.yml model_name=gpt3-52k steps=5 per_device_batch_size=\\"\\${B}\\"'
    lines = [': "${B:=$(( 512 / DEVICES ))}"', f"xpk workload create --command \"export B='${{B}}'; {train}\""]
    (tmp_path / "run.sh").write_text("\n".join(lines))
    converted = convert(read_file(tmp_path / "run.sh").launches[0], "run.sh")
    assert any("per_device_batch_size needs `$(( 512 / DEVICES ))`" in text for text in converted.settings.undecided)


def test_a_report_begins_with_what_is_not_exact_and_is_narrow(tmp_path: pathlib.Path) -> None:
    words = ["model_name=gpt3-22b", "steps=10", "dtype=float32", "stepz=3"]
    converted = convert(read_source(words).launches[0], "maxtext", date=datetime.date(2024, 6, 1))
    brief, full = report(converted), report(converted, verbose=True)
    assert max(map(len, [*brief.splitlines(), *full.splitlines()])) <= 100
    assert brief.index("For you to decide:") < brief.index("Approximated:") < brief.index("Values:")
    assert "rounds the table to bfloat16" in " ".join(brief.split())
    values = brief[brief.index("Values:") :]
    assert "num_train_steps = 10" in values and "model_dims" not in values and "`--verbose` shows them" in values
    assert "task.model.model_dims = 6144" in full and "--verbose" not in full


def test_a_python_file_of_benchmarks_is_read_as_syntax(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.py").write_text(
        f"import os\nos.system('touch {CANARY}')\n"
        "a = add(models, Model(model_name='basic-1', model_type='default', xla_flags=flags.A + ' --b=1',\n"
        "  tuning_params={'per_device_batch_size': 2, 'steps': 3, 'mlp_activations': ['silu', 'linear']}))\n"
        "b = Model(model_name='basic-2', model_type='llama2-7b', tuning_params={'steps': 1, **more})\n"
    )
    launch = read_file(tmp_path / "b.py", {"name": "basic-1"}).launches[0]
    assert keys(launch)["per_device_batch_size"] == "2" and keys(launch)["mlp_activations"] == "[silu,linear]"
    assert launch.flags["LIBTPU_INIT_ARGS"] == "flags.A + ' --b=1'" and launch.pairs[1].line == 4
    assert read_file(tmp_path / "b.py", {"name": "basic-2"}).launches[0].diagnostics[0].text == "more"
    with pytest.raises(ConfigError, match="has 2 configurations"):
        read_file(tmp_path / "b.py")
    with pytest.raises(ConfigError, match="no variable `steps`"):
        read_file(tmp_path / "b.py", {"name": "basic-1", "steps": "3"})
    assert not os.path.exists(CANARY)


def test_a_variable_that_no_script_has_is_an_error(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.sh").write_text("export BATCH=${BATCH:-4}\n")
    (tmp_path / "run.sh").write_text("source env.sh\npython3 MaxText/train.py base.yml steps=$STEPS\n")
    assert keys(read_file(tmp_path / "run.sh", {"STEPS": "3", "BATCH": "8", "1": "x"}).launches[0]) == {"steps": "3"}
    with pytest.raises(ConfigError, match="no variable `STEPZ`") as caught:
        read_file(tmp_path / "run.sh", {"STEPZ": "3"})
    assert "STEPS" in caught.value.hint
    with pytest.raises(ConfigError, match="Only a script has variables"):
        convert_script(["steps=3", "model_name=llama2-7b"], arguments={"steps": "4"})


def test_a_sourced_file_sets_variables_and_is_not_run(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.sh").write_text(f"touch {CANARY}\nSTEPS=7\nexport M_SCALE=2\n")
    (tmp_path / "run.sh").write_text(
        "source ./env.sh\nsource gone.sh\npython3 MaxText/train.py base.yml steps=$STEPS\n"
    )
    file = read_file(tmp_path / "run.sh")
    (launch,) = file.launches
    assert keys(launch) == {"steps": "7"} and [pair.key for pair in launch.overrides] == ["SCALE"]
    assert [(found.line, found.text) for found in file.skipped][-1] == (2, "source gone.sh")
    assert not os.path.exists(CANARY)


MANIFEST = """apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
spec:
  replicatedJobs:
  - spec: {containers: [{name: a, command: [bash, -c, "python3 MaxText/train.py base.yml steps=$N scale=2"]}]}
  - template: {spec: {containers: [{name: b, command: [python3, MaxText/train.py], args: [base.yml, run_name=a b]}]}}
"""


def test_the_commands_of_a_kubernetes_manifest_are_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "job.yaml").write_text(MANIFEST)
    first, second = read_file(tmp_path / "job.yaml", {"N": "7"}).launches
    assert keys(first) == {"steps": "7", "scale": "2"} and keys(second) == {"run_name": "a b"}
    (tmp_path / "service.yaml").write_text("apiVersion: v1\nkind: Service\nspec: {ports: [1]}\n")
    with pytest.raises(ConfigError, match="starts no MaxText training"):
        read_file(tmp_path / "service.yaml")


@pytest.mark.parametrize("text", ["python3 MaxText/train.py base.yml $ARGS", "python3 MaxText/train.py base.yml a_b=1"])
def test_a_launch_without_a_known_key_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    (launch,) = read_file(tmp_path / "run.sh").launches
    with pytest.raises(ConfigError, match="no key that pax knows"):
        settings_of(launch)


def calls_to_convert(keys: int) -> int:
    """Calls of Python functions, for a launch with so many unknown keys."""
    words = ["model_name=gpt3-52k", *(f"unknown_{i}_key=1" for i in range(keys))]
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    launch = read_source(words).launches[0]
    sys.setprofile(count)
    try:
        report(convert(launch, "x", date=datetime.date(2026, 1, 1)))
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_for_unknown_keys_grows_with_their_number_alone() -> None:
    calls_to_convert(1)  # reads the tables
    few, many = calls_to_convert(200), calls_to_convert(1200)
    assert many - few < 150 * 1000


def test_a_base_config_that_is_no_text_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yml").write_text('base_config: "b.yml"\nmodel_name: llama2-7b\n')
    (tmp_path / "b.yml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="b.yml is not a text file"):
        read_file(tmp_path / "a.yml")
