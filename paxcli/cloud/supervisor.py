"""Runs on a worker: keeps one job going without the connection that started it, and tells what it prints.

`python -m paxcli.cloud.supervisor start SPEC`, or `status JOB`, `follow JOB OUT ERR`, `dump JOB`, `stop JOB SIGNAL`,
`latest`. SPEC is JSON: `job`, `arguments` of pax, and `files` to put beside it. Every answer is lines of JSON. A job's
files are in `~/.pax/jobs/JOB`. The lock file says which job runs: whoever holds it has written its name there.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

JOBS = Path.home() / ".pax" / "jobs"
_LOCK = JOBS / "lock"
_POLL, _HEARTBEAT = 0.2, 10.0
_CHUNK = 1 << 16
_LOCK_TRIES = 20
_TAIL = 4000


def start(spec: dict[str, Any]) -> dict[str, Any]:
    """Starts a job and returns when it runs. Asked again for the same job, only says how it is."""
    job, folder = spec["job"], JOBS / spec["job"]
    JOBS.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(_LOCK_TRIES):  # one that only looks holds it for a moment too
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
    (folder / "files").mkdir(parents=True)
    for name, text in spec["files"].items():
        (folder / "files" / Path(name).name).write_text(text)
    # What was shipped is named by its place here; all else is passed on as it was typed.
    arguments = [word if isinstance(word, str) else f"{folder}/files/{word[0]}{word[1]}" for word in spec["arguments"]]
    os.truncate(lock, 0)
    os.write(lock, job.encode())
    ready, readied = os.pipe()
    if os.fork():
        os.close(readied)
        os.read(ready, 1)  # until the job has its process
        return status(job)
    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    _supervise(folder, [sys.executable, "-m", "paxcli", *arguments], readied)
    os._exit(0)


def _supervise(folder: Path, command: list[str], readied: int) -> None:
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=Path.home(), start_new_session=True)
    (folder / "pid").write_text(str(process.pid))
    os.close(readied)
    code = process.wait()
    _write(folder / "exit.json", {"code": code if code >= 0 else 128 - code, "ended": time.time()})


def status(job: str) -> dict[str, Any]:
    """Whether a job runs, and else how it ended: with `code`, or `lost` when the machine went down under it."""
    folder = JOBS / job
    if not folder.is_dir():
        return {"job": job, "state": "unknown"}
    runs = _running() == job  # before looking for how it ended, or it might end in between
    if (folder / "exit.json").exists():
        ended = json.loads((folder / "exit.json").read_text())
        tail = _read(folder / "stderr", -_TAIL)[0] if ended["code"] else ""
        return {"job": job, "state": "ended", **ended, "tail": tail}
    return {"job": job, "state": "running" if runs else "lost"}


def follow(job: str, out: int, err: int, once: bool = False) -> None:
    """Prints what the job printed, from these places on, until it ends, or `once`. A negative place is from the end."""
    folder, at, beat = JOBS / job, {"stdout": out, "stderr": err}, time.monotonic()
    while True:
        now = status(job)
        for name in at:
            while True:
                text, end = _read(folder / name, at[name], whole_lines=now["state"] == "running")
                if end == at[name]:
                    break
                at[name] = end
                _say({"stream": name, "text": text, "end": end})
                beat = time.monotonic()
        if once or now["state"] != "running":
            _say(now)
            return
        if time.monotonic() - beat > _HEARTBEAT:  # ends this process when nobody listens any more
            _say({})
            beat = time.monotonic()
        time.sleep(_POLL)


def stop(job: str, name: str) -> dict[str, Any]:
    """Sends a job SIGTERM, which makes pax save and stop, or SIGKILL with all its processes."""
    now = status(job)
    if now["state"] == "running" and (JOBS / job / "pid").exists():
        pid = int((JOBS / job / "pid").read_text())
        try:
            os.killpg(pid, signal.SIGKILL) if name == "KILL" else os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
    return now


def latest() -> dict[str, Any]:
    """The job that runs, or the one that was started last."""
    folders = sorted((path for path in JOBS.glob("*/files")), key=lambda path: path.stat().st_ctime)
    job = _running() or (folders[-1].parent.name if folders else None)
    return status(job) if job else {"job": None, "state": "unknown"}


def _running() -> str | None:
    if not _LOCK.exists():
        return None
    with open(_LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read()
    return None


def _read(path: Path, start: int, whole_lines: bool = False) -> tuple[str, int]:
    """Text from a place in a file on (a negative one counts from the end), and where the text ends."""
    try:
        with open(path, "rb") as file:
            file.seek(start if start >= 0 else max(0, path.stat().st_size + start))
            start, data = file.tell(), file.read(_CHUNK)
    except FileNotFoundError:
        return "", start
    if whole_lines or len(data) == _CHUNK:
        data = data[: data.rfind(b"\n") + 1] or (data if len(data) == _CHUNK else b"")
    return data.decode(errors="replace"), start + len(data)


def _write(path: Path, value: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main(verb: str, *arguments: str) -> None:
    """Answers one request."""
    if verb == "start":
        _say(start(json.loads(arguments[0])))
    elif verb == "follow":
        follow(arguments[0], int(arguments[1]), int(arguments[2]))
    elif verb == "dump":
        follow(arguments[0], 0, 0, once=True)
    elif verb == "status":
        _say(status(arguments[0]))
    elif verb == "stop":
        _say(stop(*arguments))
    else:
        _say(latest())


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BrokenPipeError:
        os._exit(0)
