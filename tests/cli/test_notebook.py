"""`pax notebook` starts Jupyter with pax's Python, here or on a worker. Jupyter itself is a module that prints."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import pytest

IN = ["--zone", "us-central2-b", "--project", "my-project"]
IS_MISSING = pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is not None, reason="Jupyter is installed")


@pytest.fixture
def jupyter(tmp_path: pathlib.Path) -> dict[str, str]:
    """An environment in which `python -m jupyter` prints its arguments."""
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in ("jupyterlab", "ipykernel"):
        (modules / f"{name}.py").touch()
    (modules / "jupyter.py").write_text(
        "import sys\nprint(sys.executable, *sys.argv[1:])\nsys.exit('--port=8999' in sys.argv)"
    )
    environment = {"PYTHONPATH": str(modules)}
    return {**environment, "FAKE_ENV": json.dumps(environment)}


def worker_python(cloud, name: str) -> None:
    """Gives the worker a Python where `pax install` puts it."""
    python = cloud.root / "workers" / f"{name}-w0" / ".pax" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)


def test_here_it_runs_in_this_python(pax, jupyter):
    done = pax("notebook", "docs", "--port", "8890", env=jupyter)
    assert done.returncode == 0, done.stderr
    python, *words = done.stdout.split()
    assert python == sys.executable
    assert {"lab", "--port=8890", "--ServerApp.root_dir=docs"} <= set(words)
    assert "--MultiKernelManager.default_kernel_name=python3" in words


def test_a_failure_of_jupyter_is_not_success(pax, jupyter):
    assert pax("notebook", "--port", "8999", env=jupyter).returncode == 2


@IS_MISSING
def test_without_jupyter_the_hint_installs_it(pax):
    done = pax("notebook", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["hint"] == f"{sys.executable} -m pip install jupyterlab"


def test_a_dry_run_prints_the_command_for_a_tpu_vm(pax, cloud):
    done = pax("notebook", "notes here", "--on", "demo", *IN, "--dry-run", "--json")
    (argv,) = json.loads(done.stdout)["commands"]
    assert (argv[:3], argv[4:6]) == (["gcloud", "compute", "tpus"], ["ssh", "demo"])
    assert argv[-3:] == ["--", "-t", "-L8888:localhost:8888"]
    (command,) = [word for word in argv if word.startswith("--command=")]
    assert "cd " in command and "notes here" in command and "--no-browser" in command
    assert cloud.calls_with("compute") == []


def test_on_a_tpu_vm_it_runs_in_the_python_of_pax(pax, cloud, jupyter):
    assert pax("provision", "demo", "--accelerator", "v5e-4", *IN, "--wait").returncode == 0
    worker_python(cloud, "demo")
    done = pax("notebook", "--on", "demo", env=jupyter)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0].endswith(".pax/venv/bin/python")
    assert cloud.calls_with("ssh", "-L8888:localhost:8888")
    assert pax("notebook", "--on", "demo", "--port", "8999", env=jupyter).returncode == 4


@IS_MISSING
def test_a_tpu_vm_without_jupyter(pax, cloud):
    assert pax("provision", "demo", "--accelerator", "v5e-4", *IN, "--wait").returncode == 0
    worker_python(cloud, "demo")
    done = pax("notebook", "--on", "demo")
    assert done.returncode == 3
    assert 'pax provision ssh demo --command "~/.pax/venv/bin/python -m pip install jupyterlab"' in done.stderr
