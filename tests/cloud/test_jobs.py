"""Jobs on the workers of a fake cloud, with real processes, supervisors and signals."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from paxcli import __version__
from paxcli.cli.main import app
from paxcli.cloud import jobs, supervisor
from paxcli.cloud.commands import Target
from paxcli.cloud.gcloud import Gcloud
from paxcli.cloud.jobs import Job
from paxcli.cloud.targets import remember
from paxcli.cloud.workers import Worker, find_workers
from paxcli.errors import ConfigError, RemoteError

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def prepare(cloud, slices=1, workers=1) -> Target:
    """A running target whose workers have this checkout of pax in place of the one that `pax install` would install."""
    target = Target("demo", "us-central2-b", "my-project", queued=True, slices=slices)
    resource = {"kind": "queued-resources", "slices": slices, "states": ["ACTIVE"], "type": "v5litepod-1"}
    cloud.write(resources={"demo": resource}, workers=workers)
    for node in [f"demo-{number}" for number in range(slices)] if slices > 1 else ["demo"]:
        for index in range(workers):
            python = cloud.root / "workers" / f"{node}-w{index}" / ".pax/venv/bin/python"
            python.parent.mkdir(parents=True)
            path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
            python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
            python.chmod(0o755)
    remember(target)
    return target


class Watched(Job):
    """A job that records its output and messages."""

    def __init__(self, target: Target, name="job-1"):
        self.out, self.news = {"stdout": "", "stderr": ""}, []
        gcloud = Gcloud(lambda seconds: time.sleep(min(seconds, 0.1)))
        super().__init__(target, name, find_workers(target, gcloud), gcloud, self.news.append)

    def watch(self) -> int:
        def keep(stream, text):
            self.out[stream] += text

        return self.follow(keep)


def test_all_workers_run_it_and_worker_0_is_shown(cloud):
    job = Watched(prepare(cloud, slices=2))
    job.start(["--version"], {})
    assert job.watch() == 0
    assert job.out == {"stdout": f"pax {__version__}\n", "stderr": ""}
    assert [answer["code"] for answer in job.status().values()] == [0, 0]
    shown = []
    job.dump(Worker(1, 0), lambda stream, text: shown.append(text))
    assert shown == [f"pax {__version__}\n"]
    found = json.loads(CliRunner().invoke(app, ["provision", "logs", "demo", "--worker", "all", "--json"]).stdout)
    assert found["job"] == "job-1" and [each["worker"] for each in found["workers"]] == ["0.0", "1.0"]
    assert {(each["state"], each["stdout"]) for each in found["workers"]} == {("exit code 0", f"pax {__version__}\n")}


def test_starting_again_after_a_lost_answer_does_not_run_twice(cloud):
    cloud_target = prepare(cloud)
    cloud.play("supervisor start", "ERROR: connection timed out", 255, late=True)
    job = Watched(cloud_target)
    job.start(["--version"], {})
    assert job.watch() == 0 and job.out["stdout"].count("pax") == 1
    assert job.status([]) == {}  # the workers other than worker 0


def test_ctrl_c_while_it_starts_leaves_nothing_behind(cloud):
    class Interrupted(Gcloud):
        def run(self, argv, timeout=300, tries=4):
            answer = super().run(argv, timeout, tries)
            if "supervisor start" in argv[-1]:
                raise KeyboardInterrupt
            return answer

    job = Watched(prepare(cloud, slices=2))
    job.gcloud = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        job.start(["train", "tiny-synthetic", "--run-dir", "run"], {})
    assert job.news == ["stopping job-1 where it has started"]
    while (states := job.status()) and any(answer["state"] == "running" for answer in states.values()):
        time.sleep(0.1)
    assert [answer["code"] for answer in states.values()] == [128 + signal.SIGKILL] * 2


def test_a_lost_connection_is_reopened_without_repeated_output(cloud):
    job = Watched(prepare(cloud))
    job.start(["recipes", "ls"], {})
    cloud.play("supervisor follow", "ERROR: connection reset by peer", 255, times=2)
    assert job.watch() == 0
    assert sum("lost the connection" in line for line in job.news) == 2
    assert job.out["stdout"].count("\ntiny ") == 1


AGAIN = """#!/bin/sh
case "$*" in *"supervisor {verb}"*) {gcloud} "$@" | head -n {lines};; esac
exec {gcloud} "$@"
"""


@pytest.mark.parametrize("lines", [1, 2])
def test_output_is_shown_once_where_gcloud_runs_the_command_again(cloud, lines):
    """As gcloud does up to ten times if ssh loses the connection, with the same arguments."""
    job = Watched(prepare(cloud))
    job.start(["--version"], {})
    assert job.watch() == 0
    written = "a line\n" * 10_001 + "ü" * 70_000  # in chunks, one of which would end within a character
    (cloud.root / "workers/demo-w0/.pax/jobs/job-1/stdout").write_text(written)
    gcloud = cloud.root / "bin/gcloud"
    gcloud.rename(cloud.root / "bin/once")
    gcloud.write_text(AGAIN.format(verb="follow", gcloud=cloud.root / "bin/once", lines=lines))
    gcloud.chmod(0o755)
    for start in (0, -100, len(written.encode()) - 3):
        job.at, job.out["stdout"] = {"stdout": start, "stderr": 0}, ""
        assert job.watch() == 0
        assert job.out["stdout"] == written.encode()[start:].decode(errors="replace")


def test_the_exit_code_is_the_jobs_and_files_are_sent(cloud):
    job = Watched(prepare(cloud))
    job.start(["recipes", "show", ("mine.yaml", "")], {"mine.yaml": "recipe: nosuch\n"})
    assert job.watch() == 2
    assert "nosuch" in job.out["stderr"]


def test_arguments_arrive_unchanged(cloud, tmp_path):
    job = Watched(prepare(cloud))
    words = [f"$(touch {tmp_path}/x)", "a;b", "it's", 'quo"te', "new\nline", "ü", "--flags-file=x"]
    job.start(["recipes", "show", "--", *words], {})
    assert job.watch() == 2 and not (tmp_path / "x").exists()
    spec = json.loads(next(word for word in _spec_of(cloud)))
    assert spec["arguments"][3:] == words


@pytest.mark.parametrize("verb", ["attach", "logs", "stop"])
def test_a_job_that_was_never_started_is_an_error(cloud, verb):
    prepare(cloud)
    for words, message in [((), "No job was ever"), (("--job", "nosuch"), "No job nosuch was ever")]:
        result = CliRunner().invoke(app, ["provision", verb, "demo", *words])
        assert isinstance(result.exception, ConfigError) and message in result.exception.message


def test_stopping_a_job_that_has_ended_says_how(cloud):
    job = Watched(prepare(cloud, slices=2))
    job.start(["recipes", "show", "nosuch"], {})
    assert job.watch() == 2
    for words in ((), ("--kill",), ("--job", "job-1")):
        result = CliRunner().invoke(app, ["provision", "stop", "demo", *words])
        assert result.exit_code == 0 and "job-1 is not running: exit code 2 on 2 of 2 workers." in result.stdout
    found = json.loads(CliRunner().invoke(app, ["provision", "stop", "demo", "--json"]).stdout)
    assert found == {"job": "job-1", "workers": {"0.0": "ended", "1.0": "ended"}}


def test_a_lost_job_is_reported(cloud):
    job = Watched(prepare(cloud))
    job.start(["--version"], {})
    assert job.watch() == 0
    (cloud.root / "workers/demo-w0/.pax/jobs/job-1/exit.json").unlink()
    assert job.watch() == 4
    assert job.news == ["worker 0.0 failed first: lost\nThe machine went down, or the job's supervisor was killed."]


def test_the_exit_code_is_written_over_a_reserved_block(cloud):
    """So that a disk which the job filled does not lose it."""
    job = Watched(prepare(cloud))
    job.start(["recipes", "show", "nosuch"], {})
    assert job.watch() == 2
    assert (cloud.root / "workers/demo-w0/.pax/jobs/job-1/exit.json").stat().st_size == 100


def test_a_killed_job_leaves_no_process(tmp_path, monkeypatch):
    """Not even one in a process group of its own, as the run of `pax train --restarts` has."""
    (tmp_path / "job-1").mkdir()
    monkeypatch.setattr(supervisor, "JOBS", tmp_path)
    monkeypatch.setattr(supervisor, "status", lambda job: {"state": "running"})
    child = "import subprocess; subprocess.Popen(['sleep', '60'], process_group=0); print('on', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", child], text=True, start_new_session=True, **pipes) as parent:
        (tmp_path / "job-1/pid").write_text(str(parent.pid))
        assert parent.stdout.readline() == "on\n"
        supervisor.stop("job-1", "KILL")
        started = time.monotonic()
        assert parent.stdout.read() == "" and time.monotonic() - started < 30  # the sleeping process has it too
    assert parent.returncode == -signal.SIGKILL


ASK = """
import sys
from paxcli.cloud import supervisor
sys.executable = "HOME/job"
supervisor.main(*sys.argv[1:])
"""


def test_a_job_whose_supervisor_was_killed_keeps_its_machine(tmp_path):
    (tmp_path / "job").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "job").chmod(0o755)

    def ask(*words: str) -> dict:
        argv = [sys.executable, "-c", ASK.replace("HOME", str(tmp_path)), *words]
        env = {**os.environ, "HOME": str(tmp_path)}
        return json.loads(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout)

    def start(job: str) -> dict:
        return ask("start", json.dumps({"job": job, "arguments": [], "files": {}}))

    assert start("job-1") == {"job": "job-1", "state": "running"}
    pid = int((tmp_path / ".pax/jobs/job-1/pid").read_text())
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    os.kill(int(re.search(r"PPid:\s*(\d+)", status)[1]), signal.SIGKILL)
    assert ask("status", "job-1")["state"] == "running"
    assert start("job-2") == {"busy": "job-1"}
    assert ask("stop", "job-1", "KILL")["state"] == "running"
    while os.path.exists(f"/proc/{pid}/exe"):
        time.sleep(0.01)
    assert ask("status", "job-1")["state"] == "lost"
    assert start("job-2")["state"] == "running"
    ask("stop", "job-2", "KILL")


def _spec_of(cloud):
    for call in cloud.calls:
        command = next((word for word in call if word.startswith("--command=") and "supervisor start" in word), None)
        if command:
            yield shlex.split(shlex.split(command.removeprefix("--command="))[2])[-1]


def test_a_worker_without_pax_has_the_install_hint(cloud):
    target = prepare(cloud, slices=2)
    (cloud.root / "workers/demo-1-w0/.pax/venv/bin/python").unlink()
    with pytest.raises(RemoteError, match="1 of 2 workers did not start; 1.0") as error:
        Watched(target).start(["--version"], {})
    assert error.value.hint == "pax install --on demo"


@pytest.mark.parametrize("text", ["x" * 130_000, "x = 'it'\n" * 4000])
def test_files_that_are_too_large_are_an_error(text):
    """Each of the quotes is 17 characters in the argument."""
    with pytest.raises(ConfigError, match="too large"):
        jobs.start_script("job-1", ["train"], {"a.py": text})


def pax(*words: str, **options) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "paxcli", *words], text=True, **pipes | options)


def read_until(stream, word: str) -> str:
    text = ""
    for line in stream:
        text += line
        if word in line:
            return text
    raise AssertionError(f"no {word!r} in {text}")


@pytest.mark.slow
def test_a_killed_client_finds_its_job_again_and_stops_it(cloud, tmp_path):
    """Train; kill the client; attach; a second job is refused; stop saves: exit 75."""
    prepare(cloud)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("recipe: tiny-synthetic\nset: {num_train_steps: 1000000, summary_interval_steps: 5}\n")
    words = ("train", str(recipe), "--on", "demo", "--run-dir", str(tmp_path / "run"))
    client = pax(*words)
    read_until(client.stderr, "step 5 ")
    client.kill()
    client.communicate()
    second = pax(*words)
    _, err = second.communicate(timeout=600)
    assert second.returncode == 2 and "busy with job train-" in err
    terminal, slave = pty.openpty()
    attached = pax("provision", "attach", "demo", stdin=slave, start_new_session=True)
    read_until(attached.stderr, "step ")
    attached.send_signal(signal.SIGINT)  # and it asks what is meant
    os.write(terminal, b"\n")
    read_until(attached.stderr, "step ")
    stopped = pax("provision", "stop", "demo")
    assert stopped.communicate(timeout=600)[0].startswith("Asked train-") and stopped.returncode == 0
    _, err = attached.communicate(timeout=600)
    assert attached.returncode == 75, err
    assert any(path.name.isdigit() for path in (tmp_path / "run/checkpoints").iterdir())


def test_the_worker_that_failed_first_gives_the_exit_code(cloud, monkeypatch):
    monkeypatch.setattr(jobs, "_EXIT_SECONDS", 0.0)
    job = Watched(prepare(cloud, slices=2))
    lost = {"state": "unreachable", "tail": ""}
    ended = {"state": "ended", "tail": "a mistake"}
    job._follow_worker = lambda worker, on_text: ended | {"code": 4, "ended": 20.0}
    for other, code in [
        (ended | {"code": 2, "ended": 10.0}, 2),
        (ended | {"code": 2, "ended": 30.0}, 4),
        (ended | {"code": 0, "ended": 1.0}, 4),
        (lost, 4),
    ]:
        job.status = lambda workers, other=other: dict.fromkeys(workers, other)
        assert job.follow(lambda *_: None) == code
    assert [line for line in job.news if "failed first" in line] == ["worker 1.0 failed first: exit code 2\na mistake"]


def test_a_worker_that_does_not_answer_at_the_end_is_asked_again(cloud):
    job = Watched(prepare(cloud, slices=2))
    ended = {"state": "ended", "code": 0, "ended": 1.0, "tail": ""}
    answers = [{"state": "unreachable", "tail": "no route to host"}, ended]
    job._follow_worker = lambda worker, on_text: ended
    job.status = lambda workers: dict.fromkeys(workers, answers.pop(0))
    assert job.follow(lambda *_: None) == 0 and not answers and not job.news
