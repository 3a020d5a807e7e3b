"""`pax doctor` tells the truth, quickly, also on a machine where something is missing or hangs."""

from __future__ import annotations

import importlib.metadata
import json
import time

import pytest

from paxcli import __version__
from paxcli.cli import doctor
from paxcli.cli.main import app
from paxcli.cli.output import run


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    code = run(app, ["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_says_versions_devices_and_parts(pax) -> None:
    done = pax("doctor", "--json", devices=8, env={"JAX_NUM_PROCESSES": "a-value"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["pax"] == __version__
    assert found["packages"] == {name: importlib.metadata.version(name) for name in doctor.REQUIRED}
    assert found["devices"] == [{"platform": "cpu", "kind": "cpu", "count": 8}]
    assert set(found["optional"]) >= {"tensorflow", "seqio", "lingvo", "libtpu", "gcloud"}
    assert found["environment"]["JAX_NUM_PROCESSES"] is True
    assert "a-value" not in done.stdout + done.stderr


def test_text_has_no_control_codes_off_a_terminal(pax) -> None:
    done = pax("doctor")
    assert done.returncode == 0, done.stderr
    assert f"pax                 {__version__}" in done.stdout
    assert "1 x cpu (cpu)" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_a_missing_part_says_how_to_get_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-package": "pip install no-such-package"})
    monkeypatch.setenv("PATH", "")
    code, found = report(capsys)
    assert code == 0
    assert found["optional"]["no-such-package"] == {"version": None, "get": "pip install no-such-package"}
    assert found["optional"]["gcloud"] == {"version": None, "get": doctor.GCLOUD}


def test_a_missing_requirement_exits_3_and_names_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", (*doctor.REQUIRED, "no-such-package"))
    code, found = report(capsys)
    assert code == 3
    assert found["packages"]["no-such-package"] is None
    assert found["error"]["exit_code"] == 3
    assert found["error"]["hint"] == "pip install no-such-package"


def test_jax_that_cannot_start_exits_3_with_its_reason(pax) -> None:
    done = pax("doctor", env={"JAX_PLATFORMS": "no_such_platform"})
    assert done.returncode == 3
    assert "no_such_platform" in done.stderr
    assert "Traceback" not in done.stderr
    assert "flax" in done.stdout


def test_a_hung_accelerator_does_not_hang_doctor(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "PROBE", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 0.5)
    start = time.monotonic()
    code, found = report(capsys)
    assert time.monotonic() - start < 10
    assert code == 3
    assert found["devices"] == []
    assert "0.5 s" in found["error"]["message"]
