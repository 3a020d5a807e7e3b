"""Runs a job on a worker, detached from the connection that started it, and streams its output.

`python -m paxcli.cloud.supervisor start SPEC`, or `status JOB`, `follow JOB OUT ERR`, `dump JOB`, `stop JOB SIGNAL`,
`latest`. SPEC is JSON: `job`, `arguments` of pax, and `files` by their paths. Answers are lines of JSON. A job's files
are in `~/.pax/jobs/JOB`, with those of SPEC below `files`, in the directories that they come from. The supervisor of
the running job and the job itself hold the lock file, which contains the job's name.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JOBS = Path.home() / ".pax" / "jobs"
_LOCK = JOBS / "lock"
_POLL, _HEARTBEAT = 0.2, 10.0
_CHUNK = 1 << 16
_LOCK_TRIES = 20
_TAIL = 4000
_EXIT_BYTES = 100  # reserved on the disk for the exit code


def start(spec: dict[str, Any]) -> dict[str, Any]:
    """Starts a job and returns once it is running. If the job was already started, returns its status."""
    job = spec["job"]
    folder = JOBS / job
    JOBS.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(_LOCK_TRIES):  # a status query also holds the lock for a moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(_POLL / 4)
    else:
        running = _LOCK.read_text()
        return status(job) if running == job else {"busy": running}
    if folder.exists():
        return status(job)
    files = folder / "files"
    files.mkdir(parents=True)
    for name, text in spec["files"].items():
        place = Path(f"{files}/{name}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (folder / "exit.part").write_text(" " * _EXIT_BYTES)
    # A pair (file name, suffix) is the path of a sent file on this worker; other arguments are unchanged.
    arguments = [word if isinstance(word, str) else str(Path(f"{files}/{''.join(word)}")) for word in spec["arguments"]]
    os.truncate(lock, 0)
    os.write(lock, job.encode())
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        os.read(read_end, 1)  # returns when the child closes its end: the job is running
        return status(job)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    _supervise(folder, [sys.executable, "-m", "paxcli", *arguments], write_end, lock)
    os._exit(0)


def _supervise(folder: Path, command: list[str], ready: int, lock: int) -> None:
    """Runs the command, closes the file descriptor `ready` once it is running, and records its exit code.

    The command holds the lock, too, in case it outlives this process. At its end the lock is released, whatever
    processes it leaves behind.
    """
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, cwd=Path.home(), start_new_session=True, pass_fds=[lock]
        )
    (folder / "pid").write_text(str(process.pid))
    os.close(ready)
    code = process.wait()
    with open(folder / "exit.part", "r+") as file:  # overwrites: the disk may be full now
        json.dump({"code": code if code >= 0 else 128 - code, "ended": time.time()}, file)
    (folder / "exit.part").replace(folder / "exit.json")
    fcntl.flock(lock, fcntl.LOCK_UN)


def status(job: str) -> dict[str, Any]:
    """The job's state: `running`, `ended` with `code`, `lost` (the machine went down) or `unknown`."""
    folder = JOBS / job
    if not folder.is_dir():
        return {"job": job, "state": "unknown"}
    is_running = _running_job() == job  # checked before exit.json: the job may end in between
    if (folder / "exit.json").exists():
        ended = json.loads((folder / "exit.json").read_text())
        tail = _read(folder / "stderr", -_TAIL)[0] if ended["code"] else ""
        return {"job": job, "state": "ended", **ended, "tail": tail}
    if is_running:
        return {"job": job, "state": "running"}
    return {"job": job, "state": "lost", "tail": "The machine went down, or the job's supervisor was killed."}


def follow(job: str, out: int, err: int, once: bool = False) -> None:
    """Streams the job's output from these byte offsets, until the job ends, or what there is now if `once`.

    Negative offsets are relative to the end.
    """
    folder = JOBS / job
    at = {"stdout": out, "stderr": err}
    beat = time.monotonic()
    while True:
        now = status(job)
        for name in at:
            while True:
                text, end = _read(folder / name, at[name], whole_lines=now["state"] == "running")
                if end == at[name]:
                    break
                at[name] = end
                _answer({"stream": name, "text": text, "end": end})
                beat = time.monotonic()
        if once or now["state"] != "running":
            _answer(now)
            return
        if time.monotonic() - beat > _HEARTBEAT:  # raises BrokenPipeError once the connection is closed
            _answer({})
            beat = time.monotonic()
        time.sleep(_POLL)


def stop(job: str, name: str) -> dict[str, Any]:
    """Sends SIGTERM to a job, so that pax saves a checkpoint and exits, or SIGKILL to all its processes."""
    now = status(job)
    if now["state"] == "running" and (JOBS / job / "pid").exists():
        pid = int((JOBS / job / "pid").read_text())
        for process in _session(pid) if name == "KILL" else (pid,):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if name == "KILL" else signal.SIGTERM)
    return now


def _session(leader: int) -> Iterator[int]:
    """The processes that a process started, itself first. The run of `--restarts` has a process group of its own."""
    for process in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process) == leader:
                yield process


def latest() -> dict[str, Any]:
    """The status of the running job, or of the one that was started last."""
    folders = sorted((path for path in JOBS.glob("*/files")), key=lambda path: path.stat().st_ctime)
    job = _running_job() or (folders[-1].parent.name if folders else None)
    return status(job) if job else {"job": None, "state": "unknown"}


def _running_job() -> str | None:
    if not _LOCK.exists():
        return None
    with open(_LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read()
    return None


def _read(path: Path, start: int, whole_lines: bool = False) -> tuple[str, int]:
    """Reads text from a byte offset of a file (negative: relative to the end); returns it and its end offset."""
    try:
        with open(path, "rb") as file:
            file.seek(start if start >= 0 else max(0, path.stat().st_size + start))
            start, data = file.tell(), file.read(_CHUNK)
    except FileNotFoundError:
        return "", start
    is_part = whole_lines or len(data) == _CHUNK
    if is_part:
        data = data[: data.rfind(b"\n") + 1] or (data if len(data) == _CHUNK else b"")
    text, used = codecs.utf_8_decode(data, "replace", not is_part)  # of a part, the last character may be incomplete
    return text, start + used


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main(verb: str, *arguments: str) -> None:
    """Handles one request."""
    if verb == "start":
        _answer(start(json.loads(arguments[0])))
    elif verb == "follow":
        follow(arguments[0], int(arguments[1]), int(arguments[2]))
    elif verb == "dump":
        follow(arguments[0], 0, 0, once=True)
    else:
        _answer({"status": status, "stop": stop, "latest": latest}[verb](*arguments))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BrokenPipeError:
        os._exit(0)
