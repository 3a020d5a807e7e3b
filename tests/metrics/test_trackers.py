from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from paxcli.errors import DivergedError, MissingError, Stopped
from paxcli.metrics import trackers
from paxcli.metrics.trackers import TrackerWriter, check_installed
from tests.jobs import free_port

RECIPE = {"task.train.num_train_steps": 40, "model": "LanguageModel", "mesh.ici_mesh_shape": None}
MANY = {f"field_{number}": number for number in range(250)}  # more than one request takes
# A client whose every call fails, as with a server that is down.
FAILING = """
from types import SimpleNamespace

class Settings:
    def __init__(self, **settings): pass

def fail(*arguments, **named):
    raise ConnectionError("no route to the tracker")

def init(**settings):
    {init}
    return SimpleNamespace(id="abc", define_metric=lambda *a, **k: None, log=fail, finish=fail)
"""


def installed(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: its real client was not tried (`pip install {name}`)")


def wandb_records(log):
    """The records of a `.wandb` file: after 7 bytes, checksum, length, kind and data of each. It has one block."""
    at = 7
    while at + 7 <= len(log):
        _, length, kind = struct.unpack_from("<IHB", log, at)
        assert kind == 1, "a record of several parts"
        yield log[at + 7 : at + 7 + length]
        at += 7 + length


def send(name, run_dir, resume_step=0, first=1, error=None):
    writer = TrackerWriter(name, run_dir, RECIPE | MANY, resume_step)
    for step in (first, first + 1):
        writer.write(step, {"loss": 1 / step, "mfu": None, "grad_norm": float("nan")})
    writer.write(first + 1, {"loss": 0.25}, "eval/held-out")
    writer.close(type(error), error, None)


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Installs a package `wandb` whose `init` does this first, and whose other calls fail."""
    real = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "wandb"}
    monkeypatch.setattr(trackers.log, "propagate", True)
    monkeypatch.syspath_prepend(tmp_path)
    for name in real:
        del sys.modules[name]
    yield lambda init: (tmp_path / "wandb.py").write_text(FAILING.format(init=init))
    sys.modules.pop("wandb", None)
    sys.modules.update(real)


@pytest.mark.parametrize("init", ["pass", "fail()"])
def test_a_failing_client_is_logged_once_and_stops_nothing(tmp_path, failing, caplog, init):
    failing(init)
    with caplog.at_level(logging.WARNING, logger="pax"):
        send("wandb", tmp_path)
    messages = [record.message for record in caplog.records]
    failed = "wandb failed: no route to the tracker"
    lost = "wandb did not receive all metrics: no route to the tracker"
    assert messages == ([lost, failed] if init == "pass" else [failed])


def test_a_client_that_hangs_delays_the_end_of_a_run_only_so_long(tmp_path, monkeypatch, failing, caplog):
    failing("import threading; threading.Event().wait(3)")
    monkeypatch.setattr(trackers, "_CLOSE_SECONDS", 0.1)
    send("wandb", tmp_path)
    assert "did not receive all metrics within" in caplog.text
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "wandb"]
    assert thread.daemon  # the process can exit
    thread.join()


@pytest.fixture
def recorded(monkeypatch):
    """Replaces wandb's client by one that records the id and the state of each run."""
    runs = []

    def start(name, recipe, run_id):
        run_id = run_id or f"id{len(runs)}"
        states = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
        return trackers.Client(run_id, lambda *_: None, lambda state: runs.append((name, run_id, state)), states)

    monkeypatch.setitem(trackers._OPEN, "wandb", start)
    return runs


def test_a_run_that_did_not_finish_is_not_finished(tmp_path, recorded):
    """All were, after a signal or an error too."""
    for error in (None, Stopped("SIGTERM"), KeyboardInterrupt(), DivergedError("NaN"), ValueError()):
        send("wandb", tmp_path, error=error)
    assert [state for *_, state in recorded] == ["finished", "stopped", "stopped", "failed", "failed"]


def test_a_copy_of_a_run_does_not_continue_the_tracker_s_run_of_the_original(tmp_path, recorded):
    (tmp_path / "a").mkdir()
    send("wandb", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    send("wandb", tmp_path / "copy", resume_step=2)
    send("wandb", tmp_path / "copy", resume_step=4)
    (tmp_path / "a").rename(tmp_path / "moved")
    send("wandb", tmp_path / "moved", resume_step=2)
    (tmp_path / "moved" / "wandb-run-id.txt").write_text("id7\n")  # as earlier versions wrote it
    send("wandb", tmp_path / "moved", resume_step=4)
    found = [(name, run_id) for name, run_id, _ in recorded]
    assert found == [("a", "id0"), ("copy", "id1"), ("copy", "id1"), ("moved", "id0"), ("moved", "id7")]


def test_a_tracker_that_is_not_installed_is_found_before_the_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match="mlflow, which is not installed") as error:
        check_installed(["mlflow"])
    assert error.value.hint == "Install it: `pip install mlflow`."


@pytest.mark.slow
def test_wandb_offline_receives_the_metrics(tmp_path, monkeypatch):
    installed("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    run_dir = tmp_path / "run-a"
    run_dir.mkdir()
    send("wandb", run_dir, error=Stopped("SIGTERM"))
    run_id = (run_dir / "wandb-run-id.txt").read_text().split()[0]
    (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    rows, runs, exits = [], [], []
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
        if record.HasField("run"):
            runs.append(record.run)
        if record.HasField("exit"):
            exits.append(record.exit.exit_code)
    assert rows == [
        {"step": 1, "train/loss": 1.0},
        {"step": 2, "train/loss": 0.5},
        {"step": 2, "eval/held-out/loss": 0.25},
    ]
    assert {(run.project, run.display_name, run.run_id) for run in runs} == {("pax", "run-a", run_id)}
    assert exits == [255]


@contextlib.contextmanager
def mlflow_server(folder):
    """The address of MLflow's own server, on this machine."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    with open(folder / "server.log", "w") as log:
        command += [
            f"--backend-store-uri=sqlite:///{folder}/mlflow.db",
            f"--default-artifact-root={folder / 'artifacts'}",
        ]
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(1200):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                assert answer.read() == b"OK"
                break
            assert server.poll() is None, (folder / "server.log").read_text()
            time.sleep(0.1)
        else:
            pytest.fail("MLflow's server did not start: " + (folder / "server.log").read_text())
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


@pytest.mark.slow
def test_mlflow_receives_the_metrics_and_a_resumed_run_continues(tmp_path, monkeypatch):
    installed("mlflow")
    import mlflow

    with mlflow_server(tmp_path) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
        mlflow.set_tracking_uri(address)
        run_dir = tmp_path / "run-a"
        run_dir.mkdir()
        send("mlflow", run_dir, error=Stopped("SIGTERM"))
        client = mlflow.MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
        assert run.info.status == "KILLED"
        send("mlflow", run_dir, resume_step=2, first=3)
        (run,) = client.search_runs([run.info.experiment_id])
        assert (run.info.run_name, run.info.status) == ("run-a", "FINISHED")
        assert run.data.params == {name: str(value) for name, value in (RECIPE | MANY).items()}
        losses = client.get_metric_history(run.info.run_id, "train/loss")
        assert [(one.step, one.value) for one in losses] == [(step, 1 / step) for step in (1, 2, 3, 4)]
        assert [one.step for one in client.get_metric_history(run.info.run_id, "eval/held-out/loss")] == [2, 4]
        send("mlflow", run_dir, error=ValueError())  # a new run in the same directory
        found = client.search_runs([run.info.experiment_id])
        assert sorted(one.info.status for one in found) == ["FAILED", "FINISHED"]
