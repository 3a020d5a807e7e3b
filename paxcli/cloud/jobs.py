"""One pax command on all workers at once: start it, see what it prints, find it again, stop it.

The job does not need the connection: `supervisor.py` keeps it on each worker.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paxcli.cloud import commands
from paxcli.cloud.commands import Target
from paxcli.cloud.gcloud import Gcloud, failure, find_gcloud, pause
from paxcli.cloud.values import check
from paxcli.cloud.workers import Repeater, Worker, on_each, run_script
from paxcli.errors import ConfigError, PaxError, RemoteError

PYTHON = '"$HOME/.pax/venv/bin/python"'
_MAX_SPEC_BYTES = 96_000  # Linux takes no argument longer than 128 KiB.
_LOOK_SECONDS = 30.0
_PATIENCE_SECONDS = 600.0
_LAST_WORDS_SECONDS = 120.0
LOST = 4

Argument = str | tuple[str, str]


@dataclasses.dataclass
class Job:
    """A job on the workers of a target.

    Args:
      say: Is given news of the workers.
      at: Up to where what worker 0 printed was passed on, in bytes. A negative place is from the end.
    """

    target: Target
    name: str
    workers: Sequence[Worker]
    gcloud: Gcloud
    say: Callable[[str], None]
    at: dict[str, int] = dataclasses.field(default_factory=lambda: {"stdout": 0, "stderr": 0})

    def __post_init__(self) -> None:
        check("job", self.name)

    def start(self, arguments: Sequence[Argument], files: Mapping[str, str]) -> None:
        """Starts it everywhere.

        Raises:
          ConfigError: Another job runs there, or the files are too large.
          RemoteError: It did not start on every worker; it is ended on those where it did.
        """
        script = start_script(self.name, arguments, files)
        answers = on_each(self.workers, lambda worker: self._ask(worker, script))
        busy = next(
            (answer["busy"] for answer in answers.values() if isinstance(answer, dict) and "busy" in answer), None
        )
        failed = {worker: answer for worker, answer in answers.items() if isinstance(answer, PaxError)}
        if not busy and not failed:
            return
        if failed or any("state" in answer for answer in answers.values() if isinstance(answer, dict)):
            self.stop("KILL")  # everywhere: a worker whose answer was lost may have started it
        if busy:
            name = self.target.name
            raise ConfigError(
                f"{name} is busy with {busy}.", f"pax provision attach {name}, or pax provision stop {name}"
            )
        worker, error = next(iter(failed.items()))
        missing = "No such file" in error.message and ".pax/venv" in error.message
        hint = f"pax install --on {self.target.name}" if missing else error.hint
        raise RemoteError(
            f"{len(failed)} of {len(self.workers)} workers did not start; {worker}: {error.message}", hint
        )

    def follow(self, on_text: Callable[[str, str], None]) -> int:
        """Passes on what worker 0 prints and returns the job's exit code: that of the worker which failed first.

        Args:
          on_text: Is given "stdout" or "stderr", and text.

        Raises:
          RemoteError: Worker 0 could not be reached for a long time; the job may go on.
        """
        first, *others = self.workers
        known: dict[Worker, str] = {}
        # Each look is a gcloud a worker: many workers are looked at less often.
        with Repeater(lambda: self._tell_changes(others, known), max(_LOOK_SECONDS, 2.0 * len(others))):
            ended = {first: self._follow_one(first, on_text)}
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        waiting = list(others)
        while waiting:
            for worker, answer in self.status(waiting).items():
                if answer["state"] != "running":
                    ended[worker] = answer
            waiting = [worker for worker in waiting if worker not in ended]
            if time.monotonic() > deadline:
                break
            if waiting:
                self.gcloud.sleep(2.0)
        for worker in waiting:
            self.say(f"worker {worker} still runs; pax provision stop {self.target.name} ends it")
        failed = [
            (answer.get("ended", math.inf), worker) for worker, answer in ended.items() if answer.get("code", LOST)
        ]
        if not failed:
            return LOST if waiting else 0
        _, worst = min(failed)
        if worst != first:
            self.say(f"worker {worst} failed first: {describe(ended[worst])}\n{ended[worst].get('tail', '')}".rstrip())
        return int(ended[worst].get("code", LOST))

    def dump(self, worker: Worker, on_text: Callable[[str, str], None]) -> dict[str, Any]:
        """Passes on all that one worker printed so far, and returns its state."""
        script = f"exec {PYTHON} -m paxcli.cloud.supervisor dump {self.name}"
        argv = commands.ssh(self.target, str(worker.slice), str(worker.index), script)
        answer, error = _listen(argv, on_text, {})
        if answer is None:
            raise error
        return answer

    def status(self, workers: Sequence[Worker] | None = None) -> dict[Worker, dict[str, Any]]:
        """How it is on each worker; a worker that cannot be asked is `unreachable`."""
        script = f"exec {PYTHON} -m paxcli.cloud.supervisor status {self.name}"
        answers = on_each(workers or self.workers, lambda worker: self._ask(worker, script))
        return {
            worker: {"state": "unreachable", "tail": answer.message} if isinstance(answer, PaxError) else answer
            for worker, answer in answers.items()
        }

    def stop(self, how: str = "TERM", workers: Sequence[Worker] | None = None) -> None:
        """Makes it save and stop (TERM), or ends it (KILL)."""
        script = f"exec {PYTHON} -m paxcli.cloud.supervisor stop {self.name} {how}"
        on_each(workers or self.workers, lambda worker: self._ask(worker, script))

    def _ask(self, worker: Worker, script: str) -> dict[str, Any]:
        return ask(self.target, worker, script, self.gcloud)

    def _tell_changes(self, workers: Sequence[Worker], known: dict[Worker, str]) -> None:
        for worker, answer in self.status(workers).items():
            state = describe(answer)
            if known.get(worker, "running") != state:
                self.say(f"worker {worker}: {state}")
            known[worker] = state

    def _follow_one(self, worker: Worker, on_text: Callable[[str, str], None]) -> dict[str, Any]:
        """Follows one worker over lost connections."""
        heard, attempt = time.monotonic(), 0
        while True:
            places = f"{self.at['stdout']} {self.at['stderr']}"
            script = f"exec {PYTHON} -m paxcli.cloud.supervisor follow {self.name} {places}"
            argv = commands.ssh(self.target, str(worker.slice), str(worker.index), script)
            before = dict(self.at)
            answer, error = _listen(argv, on_text, self.at)
            if answer is not None:
                return answer
            if self.at != before:
                heard, attempt = time.monotonic(), 0
            if time.monotonic() - heard > _PATIENCE_SECONDS:
                hint = f"The job may go on there: pax provision attach {self.target.name}"
                raise RemoteError(f"The connection to worker {worker} is lost: {error.message}", hint)
            attempt += 1
            self.say(f"lost the connection to worker {worker}; the job goes on there, and pax connects again")
            self.gcloud.sleep(1.0 + pause(attempt))


def start_script(name: str, arguments: Sequence[Argument], files: Mapping[str, str]) -> str:
    """What each worker runs to start a job. An argument that names a shipped file is a pair (file, what follows it)."""
    spec = json.dumps({"job": check("job", name), "arguments": arguments, "files": files}, ensure_ascii=False)
    if len(spec.encode()) > _MAX_SPEC_BYTES:
        hint = "Copy them with pax provision scp … --worker all and name them by their absolute path there."
        raise ConfigError("The files are too large to travel with the command.", hint)
    return f"exec {PYTHON} -m paxcli.cloud.supervisor start {shlex.quote(spec)}"


def latest_job(target: Target, worker: Worker, gcloud: Gcloud) -> str:
    """The job that runs on a worker, or ran last.

    Raises:
      ConfigError: There was none.
    """
    answer = ask(target, worker, f"exec {PYTHON} -m paxcli.cloud.supervisor latest", gcloud)
    if not answer.get("job"):
        raise ConfigError(f"No job was started on {target.name}.", f"pax train RECIPE --on {target.name}")
    return check("job", answer["job"])


def ask(target: Target, worker: Worker, script: str, gcloud: Gcloud) -> dict[str, Any]:
    """Runs a script that answers with one line of JSON."""
    output = run_script(target, worker, script, gcloud)
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise RemoteError(f"Worker {worker} gave no answer: {output[-300:]!r}.", f"pax install --on {target.name}")


def describe(answer: Mapping[str, Any]) -> str:
    """A worker's state in words."""
    return f"exit code {answer['code']}" if answer["state"] == "ended" else answer["state"]


def _listen(
    argv: Sequence[str], on_text: Callable[[str, str], None], at: dict[str, int]
) -> tuple[dict[str, Any] | None, RemoteError]:
    """Follows over one connection; returns how the job ended, or None and why the connection did."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [find_gcloud(), *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C here is not for it
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                answer = json.loads(line) if line.startswith("{") and line.endswith("}\n") else {}
                if "text" in answer:
                    at[answer["stream"]] = answer["end"]
                    on_text(answer["stream"], answer["text"])
                elif "state" in answer:
                    return answer, RemoteError("")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.stdout.close()
            process.wait()
        errors.seek(0)
        return None, failure(argv, process.returncode, errors.read())
