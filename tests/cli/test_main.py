from __future__ import annotations

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import pytest
import typer
from gcsfs.retry import HttpError
from google.api_core.exceptions import RetryError

from paxcli.cli import main
from paxcli.cli.output import run

_MACHINE_FAULTS = [
    *(errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENOMEM)
]
Pax = Callable[..., subprocess.CompletedProcess[str]]


def test_a_misspelt_verb(pax: Pax) -> None:
    result = pax("trian", "tiny")
    assert result.returncode == 2 and result.stdout == ""
    assert "trian" in result.stderr and "train" in result.stderr


def test_no_verb_shows_help(pax: Pax) -> None:
    result = pax()
    assert result.returncode == 0 and "pax recipes ls" in result.stdout


def test_control_c_is_a_failure_in_json_too(tmp_path: pathlib.Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom paxcli.config.recipe import recipe\n\n"
        "@recipe()\ndef slow():\n    open('started', 'w').close()\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "paxcli", "recipes", "show", "slow.py", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        while not (tmp_path / "started").exists() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(0.5)  # it sleeps; Python drops an interrupt that comes while it frees an object
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert json.loads(stdout)["error"]["exit_code"] == 130 and "Traceback" not in stderr


def test_a_bug_is_called_a_bug(pax: Pax, tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import paxcli.config.index as index\ndef find_recipes():\n    raise RuntimeError('kaputt')\n"
        "index.find_recipes = find_recipes\n"
    )
    result = pax("recipes", "ls", "--json", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    assert json.loads(result.stdout)["error"]["message"] == "This is a bug in pax: RuntimeError: kaputt"
    assert "Traceback" in result.stderr


def test_the_shell_completes_recipes(pax: Pax) -> None:
    words = {"_PAX_COMPLETE": "complete_bash", "COMP_WORDS": "pax recipes show tiny-", "COMP_CWORD": "3"}
    assert pax(env=words).stdout.split() == ["tiny-synthetic"]


def test_a_stdout_without_unicode_has_escapes(pax: Pax, pax_here: Pax) -> None:
    command, env = ["recipes", "show", "tiny", "--set=task.name=naïve"], {"PYTHONIOENCODING": "ascii"}
    text, as_json = pax(*command, env=env), pax(*command, "--json", env=env)
    assert (text.returncode, text.stderr) == (as_json.returncode, as_json.stderr) == (0, "")
    assert r"na\xefve" in text.stdout and "naïve" in pax_here(*command).stdout
    assert json.loads(as_json.stdout) == json.loads(pax_here(*command, "--json").stdout)


def test_version(pax: Pax) -> None:
    from paxcli import __version__

    assert pax("--version").stdout == f"pax {__version__}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_though_its_exception_is_lost(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom paxcli.config.recipe import recipe\n\n"
        "@recipe()\ndef slow():\n    open('started', 'w').close()\n"
        "    try:\n        time.sleep(60)\n    except KeyboardInterrupt:\n        pass\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "paxcli", "recipes", "show", "slow.py", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        while not (tmp_path / "started").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=50)
    assert process.returncode == 128 + number
    assert json.loads(stdout)["error"]["exit_code"] == 128 + number and "Traceback" not in stderr


def test_a_full_disk_is_the_machine_s_fault(tmp_path: pathlib.Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "paxcli", "recipes", "ls", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_that_stdout_cannot_take_goes_to_stderr_with_its_own_exit_code() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "paxcli", "recipes", "show", "nope", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and "nope" in done.stderr


def test_bytes_that_are_not_utf_8_are_shown(pax: Pax) -> None:
    done = pax("train", "tiny-synthetic", "--set", b"task.name=a\xff", "--json")
    assert done.returncode == 2
    assert "not UTF-8" in json.loads(done.stdout)["error"]["message"], done.stdout


def test_a_user_without_a_name_and_a_home_directory(tmp_path: pathlib.Path) -> None:
    """As in a container that runs under another user's number: its own, and that of all files, has no entry."""
    for index in range(2):
        (tmp_path / f"{index}.txt").write_text("some text")
    code = """
import os, pwd, sys

def find_nobody(number):
    raise KeyError(number)

pwd.getpwuid = find_nobody
from paxcli.cli.main import app
from paxcli.cli.output import run
sys.exit(run(app, sys.argv[1:]))
"""
    env = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    for _ in range(2):  # the second reads what the first wrote
        command = [sys.executable, "-c", code, "data", "tokenize", "*.txt", "--out", "tokens"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("closed", [">&-", "<&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed: str, tmp_path: pathlib.Path) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "paxcli"]
    deleted = subprocess.run([*command, "provision", "delete", "demo"], capture_output=True, text=True, timeout=60)
    assert deleted.returncode == 2 and "Traceback" not in deleted.stderr
    copied = subprocess.run([*command, "recipes", "cp", "tiny", "mine.py"], cwd=tmp_path, timeout=60)
    assert copied.returncode == 0 and (tmp_path / "mine.py").read_text().startswith('"""')


@pytest.mark.parametrize("number", _MACHINE_FAULTS)
def test_faults_of_the_machine_are_not_bugs(number: int, capsys: pytest.CaptureFixture) -> None:
    app = typer.Typer()

    @app.command()
    def write() -> None:
        raise OSError(number, os.strerror(number), "runs/a/metrics.jsonl.tmp")

    assert run(app, []) == 3
    shown = capsys.readouterr().err
    assert "runs/a/metrics.jsonl.tmp" in shown and "TMPDIR" not in shown


def test_a_full_disk_that_an_error_does_not_name_may_be_that_of_temporary_files(capsys: pytest.CaptureFixture) -> None:
    app = typer.Typer()

    @app.command()
    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert run(app, []) == 3
    assert f"Temporary files are in {tempfile.gettempdir()}; TMPDIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), "runs/a/config.txt"),
        OSError(errno.ELOOP, os.strerror(errno.ELOOP), "runs/a/.lock"),
        RuntimeError("Symlink loop from 'runs/a'"),
        ValueError("embedded null byte"),
    ],
    ids=str,
)
def test_a_path_that_cannot_be_used_is_not_a_bug(capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    app = typer.Typer()

    @app.command()
    def read() -> None:
        raise error

    assert run(app, []) == 2
    assert f"A path cannot be used: {error}" in capsys.readouterr().err


@pytest.mark.parametrize("run_dir", ["~nobody-of-this-name/a", "hdfs://a/b", "file:///a", "://"])
def test_a_run_directory_that_no_file_system_has(capsys: pytest.CaptureFixture[str], run_dir: str) -> None:
    assert run(main.app, ["checkpoints", "ls", run_dir]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: A path cannot be used: ") and "gs://" in shown


def test_a_bucket_whose_client_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def read() -> None:
        raise ImportError("Install s3fs to access S3")  # as fsspec does

    assert run(app, []) == 3
    assert "hint: pip install s3fs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [RetryError("Timeout of 120.0s exceeded", None), HttpError({"code": 503, "message": "unavailable"})],
    ids=lambda error: type(error).__name__,
)
def test_a_bucket_that_does_not_answer_is_a_remote_failure(capsys: pytest.CaptureFixture[str], error: Exception):
    app = typer.Typer()

    @app.command()
    def save() -> None:
        raise error

    assert run(app, []) == 4
    assert "Cannot access a bucket" in capsys.readouterr().err


def test_a_job_of_several_processes_explains_errors_like_a_single_one() -> None:
    """Each ends at once, without clean-up, and reports the error first."""
    code = """
import errno, os, jax
from paxcli.cli import main
from paxcli.mesh.startup import exit_on_error

@main.app.command()
def fill():
    jax.distributed.is_initialized = lambda: True
    with exit_on_error():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")

main.main()
"""
    done = subprocess.run([sys.executable, "-c", code, "fill"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and done.stderr.startswith("error: No space left on the device"), done.stderr


def test_an_interrupt_that_a_callback_drops_still_ends_the_command():
    """As JAX's callback at garbage collection does; the exit is at once, and prints no traceback."""
    code = """
import gc, os, signal, time
from paxcli.cli import main
from paxcli.cli.interrupts import interrupts

started = time.monotonic()
interrupts.install(lambda code: print(f"reported {code}, at once: {time.monotonic() - started < 3}", flush=True))
interrupts.release()
gc.callbacks.append(lambda phase, _: phase == "start" and os.kill(os.getpid(), signal.SIGTERM))
gc.collect()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "reported 143, at once: True\n", "")


def test_a_signal_raises_nothing_inside_another_library(tmp_path):
    """C++ that calls Python may crash at an exception that it does not expect."""
    (tmp_path / "library.py").write_text(
        "def call(function):\n"
        "    try:\n        function()\n"
        "    except BaseException as error:\n        print('raised', repr(error), flush=True)\n"
    )
    code = """
import os, signal, library
from paxcli.cli.interrupts import interrupts

interrupts.install(lambda code: print(f"reported {code}", flush=True))
interrupts.release()
library.call(lambda: os.kill(os.getpid(), signal.SIGTERM))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (143, "reported 143\n", "")


def test_a_signal_ends_a_command_that_is_inside_a_long_call_of_c():
    """As a compilation of minutes is: Python's handlers run only when it returns."""
    code = """
import ctypes, os, signal, threading
from paxcli.cli.interrupts import interrupts

interrupts.install(lambda code: print(f"reported {code}", flush=True))
interrupts.release()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
libc.pthread_mutex_lock(mutex)  # for ever
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "reported 143\n", "")


def test_jax_has_its_defaults_before_any_verb_loads_it(tmp_path: pathlib.Path) -> None:
    code = """
import os, sys
from paxcli.cli.main import app
from paxcli.cli.output import run

class Recorder:
    def find_spec(self, name, *_):
        if name == "jax":
            print("cache:", os.environ.get("JAX_COMPILATION_CACHE_DIR"), flush=True)

sys.meta_path.insert(0, Recorder())
run(app, sys.argv[1:])
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    for arguments in (["train", "tiny", "--set", "num_layers=x"], ["checkpoints", "ls", "nowhere"]):
        command = [sys.executable, "-c", code, *arguments]
        env["XDG_CACHE_HOME"] = str(tmp_path)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.stdout.splitlines()[:1] == [f"cache: {tmp_path}/pax/jax"], done.stderr
