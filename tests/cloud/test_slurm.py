"""The emitted batch script on a real Slurm: a controller and two node daemons on this machine."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from paxcli.training.run_dir import RunDir
from tests.jobs import free_ports
from tests.training.runs import losses, small

DAEMONS = ("slurmctld", "slurmd")
PATH = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
STEPS = 600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(shutil.which(name, path=PATH) for name in DAEMONS),
        reason="NO SLURM ON THIS MACHINE: the emitted Slurm script was not tested. Debian: apt-get install slurm-wlm",
    ),
]

# Two nodes with one GPU each, on one machine. JAX connects to the first node by its name, which has to resolve.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0
SchedulerType=sched/builtin
SelectType=select/cons_tres
GresTypes=gpu
KillWait=5
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:h100:1
NodeName={host}-two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:h100:1
PartitionName=all Nodes={host},{host}-two Default=YES State=UP
"""


def wait_for(condition: Callable[[], bool], seconds: float, say: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.5)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Runs a command of Slurm's, or pax, in a folder, and returns its stdout."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    values = {"host": host, "user": getpass.getuser(), "folder": folder, "ports": free_ports(3)}
    (folder / "slurm.conf").write_text(CONFIG.format(**values))
    (folder / "gres.conf").write_text(f"NodeName={host},{host}-two Name=gpu Type=h100 File=/dev/null\n")
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH, "JAX_PLATFORMS": "cpu"}

    def run(*command: str, cwd: pathlib.Path = folder) -> str:
        done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def output() -> str:
        return "\n".join(file.read_text()[-2000:] for file in folder.glob("*.out"))

    daemons = [["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", name] for name in (host, f"{host}-two"))]
    processes = []
    try:
        for number, daemon in enumerate(daemons):
            with open(folder / f"{number}.out", "w") as out:
                processes.append(subprocess.Popen(daemon, env=env, cwd=folder, stdout=out, stderr=out))
        wait_for(lambda: _sinfo(env).split() == ["idle", "idle"], 60, lambda: _sinfo(env) + output())
        yield run
    finally:
        subprocess.run(["scancel", "--user", getpass.getuser()], env=env, timeout=60, check=False)
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def _sinfo(env: dict[str, str]) -> str:
    command = ["sinfo", "--noheader", "--Node", "--format=%t"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30).stdout


def process_id(run_dir: pathlib.Path, rank: int) -> int:
    """The process of a job with this rank."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words, env = ((process / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            is_pax = (
                not words[0].endswith(b"bash")
                and b"train" in words
                and any(os.fsencode(run_dir) in word for word in words)
            )
            if is_pax and f"SLURM_PROCID={rank}".encode() in env:
                return int(process.name)
    raise AssertionError(f"no process of rank {rank}")


def job_fields(slurm: Callable[..., str], number: str) -> dict[str, str]:
    words = slurm("scontrol", "show", "job", number).split()
    return dict(word.partition("=")[::2] for word in words if "=" in word)


def test_a_job_is_preempted_loses_a_process_and_ends(slurm, tmp_path):
    run_dir, script = tmp_path / "run", tmp_path / "job.sh"
    sizes = small(num_train_steps=STEPS, save_interval_steps=10_000, eval_interval_steps=None)
    where = ["--target", "slurm", "--accelerator", "h100:1", "--slices", "2", "--run-dir", str(run_dir)]
    slurm("pax", "provision", "emit", "tiny-synthetic", *sizes, *where, "--out", str(script))
    number = slurm("sbatch", "--parsable", str(script), cwd=tmp_path).strip()

    def log() -> str:
        return "\n".join(file.read_text() for file in tmp_path.glob("*.log"))

    def job() -> dict[str, str]:
        return job_fields(slurm, number)

    def state() -> str:
        return f"{job()}\n{log()[-4000:]}"

    def start_again(restarts: int) -> None:
        """Slurm starts a requeued job after two minutes; an administrator may have it start at once."""
        wait_for(lambda: (job()["Restarts"], job()["JobState"]) == (str(restarts), "PENDING"), 200, state)
        slurm("scontrol", "update", f"JobId={number}", "StartTime=now")

    def last_step() -> int:
        return max(losses(run_dir), default=0) if (run_dir / "metrics.jsonl").exists() else 0

    wait_for(lambda: last_step() >= 10, 180, state)
    assert job()["NumNodes"] == "2" and job()["Restarts"] == "0"
    slurm("scancel", "--signal=TERM", number)
    start_again(1)
    stops = {int(step) for step in re.findall(r"Stopped by SIGTERM and saved at step (\d+)", log())}
    assert len(stops) == 1, state()  # of both processes
    (stopped_at,) = stops
    assert 10 <= last_step() <= stopped_at < STEPS, state()

    wait_for(lambda: last_step() > stopped_at, 180, state)
    os.kill(process_id(run_dir, rank=1), signal.SIGKILL)  # as when a machine runs out of memory
    start_again(2)
    wait_for(lambda: job()["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), 240, state)
    assert job()["JobState"] == "COMPLETED" and job()["ExitCode"] == "0:0", state()
    assert log().count(f"at step {stopped_at}.") == 2 and log().count("2 × cpu") == 3, log()
    assert list(losses(run_dir)) == [1, *range(10, STEPS + 1, 10)]
    starts = json.loads((run_dir / "goodput.json").read_text())["starts"]
    kept = [(start["first_step"], start["last_step"]) for start in starts]
    assert kept == [(0, stopped_at), (stopped_at, stopped_at), (stopped_at, STEPS)]  # the killed start lost its steps
    assert starts[1]["seconds"]["lost"] > 0


def test_a_job_whose_first_process_refuses_ends(slurm, tmp_path):
    """The other process exits with 75, as it lost the first; the job has the code of the one that knows why."""
    run_dir, script = RunDir(tmp_path / "run"), tmp_path / "job.sh"
    where = ["--target", "slurm", "--accelerator", "h100:1", "--slices", "2", "--run-dir", str(run_dir.path)]
    slurm("pax", "provision", "emit", "tiny-synthetic", *small(), *where, "--out", str(script))
    run_dir.create()
    with run_dir.lock():
        number = slurm("sbatch", "--parsable", str(script), cwd=tmp_path).strip()
        ended = ("COMPLETED", "FAILED", "CANCELLED", "PENDING")
        time.sleep(5)
        wait_for(lambda: job_fields(slurm, number)["JobState"] in ended, 120, lambda: str(job_fields(slurm, number)))
    found = job_fields(slurm, number)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "2:0", "0"), found
