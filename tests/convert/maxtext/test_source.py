"""Files of several kinds are read as launches."""

from __future__ import annotations

import os
import pathlib

import pytest

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
