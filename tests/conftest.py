"""What holds for every test: the CPU, one device, no network, compiled programs kept between runs."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.cloud.fake_cloud import FakeCloud
from tests.devices import cpu_devices

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Set before jax is imported, and inherited by the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["COLUMNS"] = "120"
for name in ("XLA_FLAGS", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(name, None)
if "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ:
    # The first: pax has a level of its own for CPUs, which comes before JAX's. The second: a program in 32 parts, for
    # as many cores, is a third more work.
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    # The older code generator compiles faster. Later versions of jaxlib have it no longer.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)
if importlib.util.find_spec("hypothesis") is not None:  # which the environment of Lingvo's tests lacks
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)  # on a busy machine, an example may take any time
    settings.load_profile("untimed")
sys.dont_write_bytecode = False  # or every process, and every collection, compiles all of the source again


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-scale", type=float, default=1.0, help="Share of the fault suite's repetitions to run.")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this machine can be reached: a test that needs more fails on every machine alike."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else "localhost"
        if host not in ("localhost", "127.0.0.1", "::1", "0.0.0.0"):
            raise OSError(f"tests may not reach the network, and this one tried {host}")
        connect(self, address)  # pyrefly: ignore

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Drops what a file's tests traced. All of it takes gigabytes, which every garbage collection would read."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture
def pax(tmp_path: pathlib.Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `pax ARGS…` as a process of its own, in `tmp_path`: `pax("train", "tiny", devices=8)`."""

    def run(*args: str, devices: int = 1, timeout: float = 600, env: dict[str, str] | None = None):
        flags = cpu_devices(devices) if devices > 1 else {}
        return subprocess.run(
            [sys.executable, "-m", "paxcli", *args],
            cwd=tmp_path,
            env={**os.environ, **flags, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.fixture
def pax_here(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs `pax ARGS…` in this process, in `tmp_path`: seconds faster than `pax`, for commands that train nothing."""
    from paxcli.cli.main import app
    from paxcli.cli.main import run as run_command_line
    from paxcli.log import log, setup_logging

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        setup_logging()
        code = run_command_line(app, args)
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    handlers, propagates = log.handlers[:], log.propagate
    yield run
    log.handlers[:], log.propagate = handlers, propagates


@pytest.fixture
def cloud(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    """A cloud with nothing in it, whose `gcloud` is first on PATH."""
    return FakeCloud(tmp_path / "cloud", monkeypatch)
