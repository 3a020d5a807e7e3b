"""Create, install and train in three commands, on a fake cloud whose workers are real processes."""

from __future__ import annotations

import json

import pytest

from tests.devices import cpu_devices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Nothing is fetched: a worker's virtual environment sees what is installed on this machine (fake_cloud.py).
OFFLINE = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
IN = ("--zone", "us-central2-b", "--project", "my-project")


@pytest.mark.parametrize(("accelerator", "workers", "devices"), [("v5e-1", 1, 1), ("v5e-32", 8, 4)], ids=["2", "16"])
def test_three_commands(cloud, pax, tmp_path, accelerator, workers, devices):
    flags = cpu_devices(devices)
    env = {"FAKE_ENV": json.dumps(OFFLINE | flags)}
    cloud.write(states=[["ACCEPTED", "WAITING_FOR_RESOURCES", "ACTIVE"]], workers=workers)
    done = pax("provision", "demo", "--accelerator", accelerator, "--slices", "2", *IN, "--wait", env=env)
    assert done.returncode == 0, done.stderr

    # The last worker fails twice, then succeeds; only this worker is retried.
    last = f"--node=1 --worker={workers - 1} "
    cloud.play(
        f"{last}--zone=us-central2-b --project=my-project --command=bash -lc 'set -eu", "no space left", 1, times=2
    )
    done = pax("install", "--on", "demo", "--json", env=env, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["workers"]
    assert [row["devices"] for row in rows] == [devices] * 2 * workers
    assert {row["result"] for row in rows} == {"installed"} and "no space left" in done.stderr
    scripts = [call for call in cloud.calls_with("ssh") if "pip install" in call[-1]]
    assert len(scripts) == 2 * workers + 2

    done = pax("install", "--on", "demo", "--json", env=env, timeout=1200)
    assert {row["result"] for row in json.loads(done.stdout)["workers"]} == {"already"}

    if workers > 1:  # sixteen training processes are too many for a small machine; a doctor each is not
        done = pax("doctor", "--on", "demo", "--json", env=env)
        assert done.returncode == 0 and json.loads(done.stdout)["devices"][0]["count"] == devices
        return
    sets = ("--set", "num_train_steps=20", "--set", "mesh.dcn_mesh_shape={data: 2}")
    words = ("train", "tiny-synthetic", *sets, "--on", "demo", "--json")
    done = pax(*words, env=env)
    assert done.returncode == 2 and "--run-dir gs://" in json.loads(done.stdout)["error"]["hint"]
    done = pax(*words, "--run-dir", str(tmp_path / "run"), env=env)
    assert done.returncode == 0, done.stderr
    # Gloo, which connects CPU processes, logs to stdout.
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 20 and (tmp_path / "run" / "metrics.jsonl").exists()
    done = pax("plot", str(tmp_path / "run"), "--on", "demo", env=env)
    assert done.returncode == 0 and (tmp_path / "run" / "loss.png").exists()
