"""Runs one pax command on all workers: starts it, streams its output, reattaches to it, stops it.

The job survives a lost connection, since `supervisor.py` runs it on each worker.
"""

from __future__ import annotations

import collections
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
from paxcli.cloud.workers import Worker, on_each, repeating, run_script
from paxcli.errors import ConfigError, PaxError, RemoteError

PYTHON = '"$HOME/.pax/venv/bin/python"'
_SUPERVISOR = f"exec {PYTHON} -m paxcli.cloud.supervisor"
_MAX_SCRIPT_BYTES = 128_000  # Linux takes no argument longer than 128 KiB.
_STATUS_SECONDS = 30.0
_RECONNECT_SECONDS = 600.0
_EXIT_SECONDS = 120.0
LOST = 4

Argument = str | tuple[str, str]


@dataclasses.dataclass
class Job:
    """A job on the workers of a target.

    Args:
      target: The TPU VMs.
      name: Name of the job.
      workers: The workers that run it, worker 0 first.
      gcloud: Runs the commands.
      say: Receives messages about the workers' state.
      at: How many bytes of worker 0's stdout and stderr were already streamed. Negative: relative to the end.
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
        """Starts the job on all workers.

        Raises:
          ConfigError: Another job is running, or the files are too large.
          RemoteError: The job did not start on every worker; it is killed on those where it did, as after Ctrl-C.
        """
        script = start_script(self.name, arguments, files)
        try:
            answers = on_each(self.workers, lambda worker: self._ask(worker, script))
        except KeyboardInterrupt:
            self.say(f"stopping {self.name} where it has started")
            self.stop("KILL")
            raise
        busy = [answer["busy"] for answer in answers.values() if isinstance(answer, dict) and "busy" in answer]
        failed = {worker: answer for worker, answer in answers.items() if isinstance(answer, PaxError)}
        if not busy and not failed:
            return
        self.stop("KILL")  # on all workers: one whose answer was lost may have started it
        if busy:
            name = self.target.name
            hint = f"pax provision attach {name}, or pax provision stop {name}"
            raise ConfigError(f"{name} is busy with job {busy[0]}.", hint)
        worker, error = next(iter(failed.items()))
        missing = "No such file" in error.message and ".pax/venv" in error.message
        hint = f"pax install --on {self.target.name}" if missing else error.hint
        raise RemoteError(
            f"{len(failed)} of {len(self.workers)} workers did not start; {worker}: {error.message}", hint
        )

    def follow(self, on_text: Callable[[str, str], None]) -> int:
        """Streams the output of worker 0 and returns the job's exit code: that of the first worker that failed.

        Args:
          on_text: Receives "stdout" or "stderr", and text.

        Raises:
          RemoteError: Worker 0 was unreachable for too long; the job may still be running.
        """
        first, *others = self.workers
        known: dict[Worker, str] = {}
        # A status query starts one gcloud process per worker, so many workers are queried less often.
        with repeating(lambda: self._report_changes(others, known), max(_STATUS_SECONDS, 2.0 * len(others))):
            ended = {first: self._follow_worker(first, on_text)}
        deadline = time.monotonic() + _EXIT_SECONDS
        waiting: dict[Worker, dict[str, Any]] = dict.fromkeys(others, {})
        while waiting:
            answers = self.status([*waiting])
            waiting = {w: answer for w, answer in answers.items() if answer["state"] in ("running", "unreachable")}
            ended |= {w: answer for w, answer in answers.items() if w not in waiting}
            if time.monotonic() > deadline:
                break
            if waiting:
                self.gcloud.sleep(2.0)
        for worker, answer in waiting.items():
            self.say(f"worker {worker} is still {describe(answer)}; stop it: pax provision stop {self.target.name}")
        failed = sorted(worker for worker, answer in ended.items() if answer.get("code", LOST))
        if not failed:
            return LOST if waiting else 0
        culprit = min(failed, key=lambda worker: ended[worker].get("ended", math.inf))
        answer = ended[culprit]
        if culprit != first or answer["state"] != "ended":  # the output of worker 0 was shown
            self.say(f"worker {culprit} failed first: {describe(answer)}\n{answer.get('tail', '')}".rstrip())
        return int(answer.get("code", LOST))

    def dump(self, worker: Worker, on_text: Callable[[str, str], None]) -> dict[str, Any]:
        """Streams all output of one worker so far, and returns its state."""
        script = f"{_SUPERVISOR} dump {self.name}"
        argv = commands.ssh(self.target, str(worker.slice), str(worker.index), script)
        answer, error = _stream(argv, on_text, {})
        if answer is None:
            raise error
        return answer

    def status(self, workers: Sequence[Worker] | None = None) -> dict[Worker, dict[str, Any]]:
        """The job's state on each worker; `unreachable` if a worker does not answer."""
        return self._states(self.workers if workers is None else workers, f"{_SUPERVISOR} status {self.name}")

    def stop(self, signal_name: str = "TERM") -> dict[Worker, dict[str, Any]]:
        """Stops the job: TERM lets it save a checkpoint, KILL does not. Returns its state on each worker until then."""
        return self._states(self.workers, f"{_SUPERVISOR} stop {self.name} {signal_name}")

    def _states(self, workers: Sequence[Worker], script: str) -> dict[Worker, dict[str, Any]]:
        answers = on_each(workers, lambda worker: self._ask(worker, script))
        return {
            worker: {"state": "unreachable", "tail": answer.message} if isinstance(answer, PaxError) else answer
            for worker, answer in answers.items()
        }

    def _ask(self, worker: Worker, script: str) -> dict[str, Any]:
        return ask(self.target, worker, script, self.gcloud)

    def _report_changes(self, workers: Sequence[Worker], known: dict[Worker, str]) -> None:
        for worker, answer in self.status(workers).items():
            state = describe(answer)
            if known.get(worker, "running") != state:
                self.say(f"worker {worker}: {state}")
            known[worker] = state

    def _follow_worker(self, worker: Worker, on_text: Callable[[str, str], None]) -> dict[str, Any]:
        """Streams the output of one worker until its job ends; reconnects if the connection is lost."""
        last_output, attempt = time.monotonic(), 0
        while True:
            offsets = f"{self.at['stdout']} {self.at['stderr']}"
            script = f"{_SUPERVISOR} follow {self.name} {offsets}"
            argv = commands.ssh(self.target, str(worker.slice), str(worker.index), script)
            before = dict(self.at)
            answer, error = _stream(argv, on_text, self.at)
            if answer is not None:
                return answer
            if self.at != before:
                last_output, attempt = time.monotonic(), 0
            if time.monotonic() - last_output > _RECONNECT_SECONDS:
                hint = f"The job may still be running: pax provision attach {self.target.name}"
                raise RemoteError(f"The connection to worker {worker} is lost: {error.message}", hint)
            attempt += 1
            self.say(f"lost the connection to worker {worker}; the job continues there; reconnecting")
            self.gcloud.sleep(1.0 + pause(attempt))


def start_script(name: str, arguments: Sequence[Argument], files: Mapping[str, str]) -> str:
    """The script that starts a job on a worker. An argument with a sent file is a pair (path, suffix)."""
    spec = json.dumps({"job": check("job", name), "arguments": arguments, "files": files}, ensure_ascii=False)
    script = f"{_SUPERVISOR} start {shlex.quote(spec)}"
    if len(shlex.quote(script).encode()) > _MAX_SCRIPT_BYTES:  # `commands.ssh` quotes it once more
        hint = "Copy them with pax provision scp … --worker all and pass their absolute path on the workers."
        raise ConfigError("The files are too large to be sent with the command.", hint)
    return script


def find_job(name: str | None, target: Target, worker: Worker, gcloud: Gcloud) -> str:
    """The name of a job on a worker. None: the job that is running, or the last one.

    Raises:
      ConfigError: No such job was ever started.
    """
    question = f"status {check('job', name)}" if name else "latest"
    answer = ask(target, worker, f"{_SUPERVISOR} {question}", gcloud)
    if answer["state"] == "unknown":
        what, hint = (f"job {name}", "Leave out --job") if name else ("job", f"pax train RECIPE --on {target.name}")
        raise ConfigError(f"No {what} was ever started on {target.name}.", hint)
    return check("job", answer["job"])


def ask(target: Target, worker: Worker, script: str, gcloud: Gcloud) -> dict[str, Any]:
    """Runs a script on a worker and parses its answer, one line of JSON."""
    output = run_script(target, worker, script, gcloud)
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise RemoteError(f"Worker {worker} did not answer: {output[-300:]!r}.", f"pax install --on {target.name}")


def describe(answer: Mapping[str, Any]) -> str:
    """A worker's state as text."""
    return f"exit code {answer['code']}" if answer["state"] == "ended" else answer["state"]


def describe_stop(job: Job, answers: Mapping[Worker, Mapping[str, Any]]) -> str:
    """The effect of a request to stop, as text, by the states that the workers had."""
    counts = collections.Counter(map(describe, answers.values()))
    if running := counts["running"]:
        return f"Asked {job.name} to stop on {running} of {len(answers)} workers."
    states = ", ".join(f"{state} on {count} of {len(answers)} workers" for state, count in counts.items())
    return f"{job.name} is not running: {states}."


def _stream(
    argv: Sequence[str], on_text: Callable[[str, str], None], at: dict[str, int]
) -> tuple[dict[str, Any] | None, RemoteError]:
    """Streams output over one connection; returns the job's final state, or None and why the connection ended."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [find_gcloud(), *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C must not reach it
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                answer = json.loads(line) if line.startswith("{") and line.endswith("}\n") else {}
                if "text" in answer:
                    stream, end = answer["stream"], answer["end"]
                    before, at[stream] = at.get(stream, 0), max(at.get(stream, 0), end)
                    if end > before:  # gcloud itself repeats the command, with its old offsets, when ssh fails
                        on_text(stream, answer["text"].encode()[before - end :].decode(errors="replace"))
                elif "state" in answer:
                    return answer, RemoteError("")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.stdout.close()
            process.wait()
        errors.seek(0)
        return None, failure(argv, process.returncode, errors.read())
