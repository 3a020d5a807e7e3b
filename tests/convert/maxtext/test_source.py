"""Files of several kinds are read as launches."""

from __future__ import annotations

import os
import pathlib

import pytest

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
    (tmp_path / "a.yml").write_text("base_config: b.yml\nsteps: 1\n")
    (tmp_path / "b.yml").write_text("base_config: a.yml\nsteps: 2\n")
    with pytest.raises(ConfigError, match="inherits itself"):
        read_source([str(tmp_path / "a.yml")])


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
    assert not os.path.exists(CANARY)


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
