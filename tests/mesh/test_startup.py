"""Processes that join a job, or raise an error with the reason."""

from __future__ import annotations

import http.server
import os
import pathlib
import subprocess
import sys
import threading

import jax
import pytest

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.errors import ConfigError, DataError
from paxcli.mesh import startup
from paxcli.mesh.mesh import Mesh, libtpu_arguments
from tests.devices import cpu_devices
from tests.jobs import free_port, job_variables

_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def test_two_processes_make_one_mesh_and_one_checkpoint(tmp_path):
    port = free_port()
    flags = {"JAX_PLATFORMS": "cpu"} | cpu_devices(4)
    script = pathlib.Path(__file__).with_name("two_processes.py")
    command = [sys.executable, str(script), str(tmp_path / "checkpoints")]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | flags | job_variables(port, index),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for index in range(2)
    ]
    try:
        output = [process.communicate(timeout=600)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output)

    # One process cannot take the input positions of two; where they agree, any number can.
    store = CheckpointStore(tmp_path / "checkpoints")
    abstract = {"params": {"w": jax.ShapeDtypeStruct((16, 8), "float32")}}
    with pytest.raises(DataError, match="2 processes, and this job has 1"):
        store.restore(2, abstract)
    assert store.restore(4, abstract)[1] == {"position": 7}


@pytest.mark.parametrize("index", [0, 1])
def test_a_missing_peer_is_named_in_time(index):
    port = free_port()
    code = """
import sys
from paxcli.errors import PaxError
from paxcli.mesh.startup import start_distributed
try:
    start_distributed(timeout_seconds=2)
except PaxError as error:
    print(error.message)
    sys.exit(error.exit_code)
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | job_variables(port, index)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 75, done.stderr
    assert f"process {index} of 2 at 127.0.0.1:{port}" in done.stdout and "within 2 s" in done.stdout


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"JAX_NUM_PROCESSES": "1"},
        job_variables(1, 0, count=1),
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},  # sbatch, outside of srun
        {"SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"MEGASCALE_NUM_SLICES": "1", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_single_process_never_initializes(monkeypatch, env):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("initialized")

    monkeypatch.setattr(jax.distributed, "initialize", never)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    startup.start_distributed(timeout_seconds=1)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_STEP_NODELIST": "a[1-2]", "SLURM_NTASKS": "2"},
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "a"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"JAX_COORDINATOR_ADDRESS": "a:1", "SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "2"},
    ],
)
def test_jax_detects_managed_jobs_itself(monkeypatch, env):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **_: calls.append(args))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    startup.start_distributed()
    assert calls == [(None, None, None)]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID is not set"),
        ({"JAX_PROCESS_COUNT": "2", "JAX_PROCESS_INDEX": "1"}, "JAX_COORDINATOR_ADDRESS is not set"),
        ({**job_variables(1, 0), "JAX_COORDINATOR_ADDRESS": "coordinator"}, "expected host:port"),
        (job_variables(1, 2), "does not match"),
    ],
)
def test_incomplete_job_variables_are_an_error(monkeypatch, env, message):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        startup.start_distributed()


def test_a_tpu_vm_of_several_hosts_is_found_through_its_metadata_server(monkeypatch):
    attributes = {"worker-network-endpoints": "10.0.0.2,10.0.0.3", "tpu-env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\n"}

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            value = attributes.get(self.path.rpartition("/")[2])
            self.send_response(200 if value and self.headers["Metadata-Flavor"] == "Google" else 404)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        calls = []
        monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **_: calls.append(args))
        monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
        monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)  # libtpu sets it where another test loads it
        monkeypatch.setenv("TPU_ML_PLATFORM", "JAX")
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_address[1]}")
        startup.start_distributed()
        assert calls == [(None, None, None)]
        attributes.update({"worker-network-endpoints": "10.0.0.2", "tpu-env": "ZONE: 'z'\n"})
        startup.start_distributed()
        assert calls == [(None, None, None)]
        server.shutdown()


def test_libtpu_gets_the_recipes_options_once(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=2")
    arguments = libtpu_arguments({"xla_a": 1, "xla_b": True})
    for _ in range(2):
        startup.start_distributed(libtpu=arguments)
    assert os.environ["LIBTPU_INIT_ARGS"] == "--xla_a=1 --xla_b=true --xla_a=2"


@pytest.mark.parametrize("options", [{"--xla_a": 1}, {"xla_a": "1 --xla_b"}, {"xla_a": "'"}])
def test_invalid_libtpu_options_are_errors(options):
    with pytest.raises(ConfigError, match="not a libtpu option"):
        Mesh(libtpu_options=options).validate()
