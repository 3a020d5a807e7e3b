"""The install script and the verification of workers. `test_end_to_end.py` runs a real installation."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import paxcli
from paxcli.cloud.commands import Target
from paxcli.cloud.gcloud import Gcloud
from paxcli.cloud.install import Result, _count_devices, _find_problem, _verify, install, install_script
from paxcli.cloud.package import Package, detect_extra, local_commands, make_package
from paxcli.cloud.workers import Worker
from paxcli.errors import ConfigError

ROOT = pathlib.Path(paxcli.__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("source", "extra", "requirement"),
    [
        ("git:https://example.com/pax.git@v1", "cpu", "paxcli @ git+https://example.com/pax.git@v1"),
        ("git:https://example.com/pax.git@v1", "cuda13", "paxcli[cuda13] @ git+https://example.com/pax.git@v1"),
        ("local", "tpu", f"{{ship}}/paxcli-{paxcli.__version__}-py3-none-any.whl[tpu]"),
        ("local", "cpu", f"{{ship}}/paxcli-{paxcli.__version__}-py3-none-any.whl"),
    ],
)
def test_each_source_is_a_requirement_of_pip_with_the_tested_pins(source, extra, requirement, tmp_path):
    package = make_package(source, extra, tmp_path, dry_run=True)
    assert package.requirement == requirement
    assert all(file.name in requirement or file.name == "constraints.txt" for file in package.files)
    assert len(package.files) == (2 if source == "local" else 1)
    assert (tmp_path / "constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()
    assert "http" not in requirement.replace("git+https://example.com", "")


def test_a_branch_that_has_moved_is_not_the_same_package(tmp_path, monkeypatch):
    repository = tmp_path / "pax"
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "init", "-q", "-b", "main", str(repository)], check=True)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{repository}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://example.com/pax.git")
    commits, hashes = [], []
    for message in ("one", "two"):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", message], check=True)
        subprocess.run([*git, "branch", "-f", "other/main"], check=True)  # not the branch `main`
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        commits.append(head.stdout.strip())
        package = make_package("git:https://example.com/pax.git@main", "cpu", tmp_path)
        assert package.requirement == f"paxcli @ git+https://example.com/pax.git@{commits[-1]}"
        hashes.append(package.hash)
    assert hashes[0] != hashes[1]
    for reference in (commits[0], commits[0][:8], "nosuch"):  # a commit; pip reports what does not exist
        package = make_package(f"git:https://example.com/pax.git@{reference}", "cpu", tmp_path)
        assert package.requirement.endswith(f"@{reference}")


@pytest.mark.parametrize(
    "source", ["", "conda", "pypi", "git:https://x/y@$(id)", "git:ssh://x/y@z", "git:https://x/y@-z", "a;b"]
)
def test_an_unknown_source_is_an_error(source, tmp_path):
    if source == "":
        source = " "
    with pytest.raises(ConfigError):
        make_package(source, "tpu", tmp_path)


def test_the_same_checkout_gives_the_same_wheel(tmp_path):
    hashes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        hashes.append(make_package("local", "tpu", tmp_path / name).hash)
    assert hashes[0] == hashes[1]


def test_a_local_install_is_two_commands(tmp_path):
    package = Package("paxcli[cuda12]==1.0", ())
    make, pip = local_commands(package, tmp_path / "venv", tmp_path)
    assert make == [sys.executable, "-m", "venv", f"{tmp_path}/venv"]
    assert pip[1:4] == ["-m", "pip", "install"] and pip[-1] == "paxcli[cuda12]==1.0"


def test_a_dry_run_names_files_that_the_user_has_or_makes(pax_here, tmp_path, monkeypatch):
    words = ("install", "--for", "cpu", "--venv", str(tmp_path / "venv"), "--dry-run", "--json")
    build, venv, pip = json.loads(pax_here(*words).stdout)["commands"]
    assert build[1:] == ["-m", "pip", "wheel", "--no-deps", "--wheel-dir", ".", str(ROOT)]
    wheel = f"./paxcli-{paxcli.__version__}-py3-none-any.whl"
    assert pip[-3:] == ["--constraint", str(ROOT / "constraints.txt"), wheel]
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr("paxcli.cloud.package._CHECKOUT", tmp_path)  # as installed from git: it has no constraints
    freeze, _, pip = json.loads(pax_here(*words, "--from", "git:https://x.org/y@main").stdout)["commands"]
    assert freeze[:2] == ["sh", "-c"] and freeze[2].endswith("-m pip freeze --exclude paxcli > constraints.txt")
    assert pip[-3:] == ["--constraint", "constraints.txt", "paxcli @ git+https://x.org/y@main"]


@pytest.mark.parametrize(
    ("pci", "driver", "extra"),
    [
        (("0x1ae0", "0x005e"), None, "tpu"),
        (("0x1ae0", "0x0042"), None, "cpu"),  # the network card of a machine of Google's
        (None, "580.65.06", "cuda13"),
        (None, "550.54.15", "cuda12"),
        (None, "470.1", "cpu"),
        (None, None, "cpu"),
    ],
)
def test_the_accelerator_of_this_machine_is_found(pci, driver, extra, tmp_path, monkeypatch):
    monkeypatch.setattr("paxcli.cloud.package._PCI", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    if pci:
        (tmp_path / "0000:00:04.0").mkdir()
        for name, text in zip(("vendor", "device"), pci, strict=True):
            (tmp_path / "0000:00:04.0" / name).write_text(text + "\n")
    if driver:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {driver}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert detect_extra() == extra


PYTHON3 = """#!/bin/sh
echo "$@" >> log
[ "$2" = uv ] && [ "$3" = venv ] && mkdir -p .pax/venv/bin && cp bin/python3 .pax/venv/bin/python
exit 0
"""


def test_uv_installs_python_once_where_it_is_too_old(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / ".pax").mkdir()
    for name in ("cat", "rm", "mkdir", "cp", "sh", "flock"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    (tmp_path / "bin/python3").write_text(PYTHON3)
    (tmp_path / "bin/python3").chmod(0o755)
    script = install_script(Package("paxcli[tpu]==1.0", ()))
    env = {"HOME": str(tmp_path), "PATH": str(tmp_path / "bin")}
    bash = str(shutil.which("bash"))
    for result in ("installed", "already"):
        done = subprocess.run([bash, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == result
    uv, venv, pip = (tmp_path / "log").read_text().splitlines()
    assert uv == "-m pip install --quiet --user uv"
    assert re.fullmatch(r"-m uv venv --quiet --seed --python 3\.1[123] \.pax/venv", venv)
    assert pip == "-m pip install --quiet --constraint .pax/ship/constraints.txt paxcli[tpu]==1.0"


def doctor(count=4, platform="tpu", jax="0.10.2", **more):
    devices = [{"platform": platform, "kind": "TPU v4", "count": count}]
    return {"pax": "1", "python": "3.12.1", "packages": {"jax": jax}, "devices": devices, "environment": {}} | more


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (doctor(), None),
        (doctor(jax="0.11.0"), "versions differ from worker 0: jax 0.11.0, not 0.10.2"),
        (doctor(platform="cpu"), "JAX finds no TPU"),
        (doctor(platform="cpu", environment={"JAX_PLATFORMS": True}), None),
        (doctor(error={"message": "JAX cannot start"}), "JAX cannot start"),
    ],
)
def test_workers_are_compared_with_the_first(report, problem):
    assert _find_problem(report, doctor()) == problem


def test_a_slice_has_the_devices_of_its_type():
    target = Target("demo", "us-central2-b", queued=True, slices=2, accelerator="v4-16")
    results = [
        Result(Worker(number, index), "installed", doctor=doctor(count))
        for number, index, count in [(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 3)]
    ]
    checked = _count_devices(target, results, set())
    assert [result.failed for result in checked] == [False, False, True, True]
    assert checked[3].result == "slice 1 has 7 devices, not 8"


class OneOfTwo(Gcloud):
    """Workers of a slice whose chips start only if all of its workers use them."""

    def run(self, argv, timeout=300, tries=3):
        if "paxcli doctor" not in " ".join(argv):
            return "installed"
        on_cpu = any("JAX_PLATFORMS=cpu" in word for word in argv)
        problem = {} if on_cpu else {"error": {"message": "JAX found no devices in 60 s"}}
        return json.dumps(doctor(1, "cpu", environment={"JAX_PLATFORMS": on_cpu}) | problem)


def test_a_part_of_a_slice_is_verified_without_its_chips():
    target = Target("demo", "us-central2-b", queued=True, accelerator="v4-16")
    package = Package("paxcli[tpu]==1.0", ())
    chosen, other = Worker(0, 0), Worker(0, 1)
    (result,) = install(target, [chosen], package, OneOfTwo(), print, [other])
    assert (result.failed, result.result) == (False, "installed, chips not checked")
    both = install(target, [chosen, other], package, OneOfTwo(), print)
    assert [result.failed for result in both] == [True, True]


def test_a_worker_whose_doctor_fails_is_not_compared_with():
    class Failing(Gcloud):
        def run(self, argv, timeout=300, tries=4):
            return json.dumps({"error": {"message": "no memory"}} if "--worker=0" in argv else doctor())

    results = [Result(Worker(0, index), "installed") for index in (0, 1)]
    checked = _verify(Target("demo", "us-central2-b"), results, Failing(), set())
    assert [(each.result, each.failed) for each in checked] == [("no memory", True), ("installed", False)]


def test_a_worker_of_no_machine_is_refused(pax_here):
    done = pax_here("install", "--worker", "1.3", "--dry-run")
    assert done.returncode == 2 and "`--worker 1.3`" in done.stderr and "--on" in done.stderr
