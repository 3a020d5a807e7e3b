"""Runs actions on the workers of TPU VMs in parallel, with one gcloud process and one result per worker."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from paxcli.cloud import commands, states
from paxcli.cloud.commands import Target
from paxcli.cloud.gcloud import Gcloud
from paxcli.errors import ConfigError, PaxError

T = TypeVar("T")

# Each gcloud process needs about 100 MB and one core-second to start.
AT_ONCE = 16


@dataclasses.dataclass(frozen=True, order=True)
class Worker:
    """One TPU VM of one slice; as text, `1.3`."""

    slice: int
    index: int

    def __str__(self) -> str:
        return f"{self.slice}.{self.index}"


def find_workers(target: Target, gcloud: Gcloud) -> list[Worker]:
    """All workers of all slices, according to the Cloud TPU API.

    Raises:
      RemoteError: Some slice is not running.
    """
    status = states.look(target, gcloud)
    if status.phase is not states.Phase.READY:
        raise states.not_usable(status, target)
    return [Worker(number, index) for number, count in enumerate(status.workers) for index in range(count)]


def select(workers: Sequence[Worker], node: str, index: str) -> list[Worker]:
    """The workers with this slice and index, each a number or `all`."""
    chosen = [w for w in workers if node in ("all", str(w.slice)) and index in ("all", str(w.index))]
    if not chosen:
        raise ConfigError(f"There is no worker {node}.{index}.", f"Workers: {', '.join(map(str, workers[:8]))} …")
    return chosen


def on_each(
    workers: Iterable[Worker], action: Callable[[Worker], T], at_once: int | None = AT_ONCE
) -> dict[Worker, T | PaxError]:
    """Calls `action` for every worker, `at_once` in parallel (None: all), and returns each result or error."""
    listed = list(workers)

    def attempt(worker: Worker) -> T | PaxError:
        try:
            return action(worker)
        except PaxError as error:
            return error

    with ThreadPoolExecutor(min(at_once or len(listed), len(listed)) or 1) as pool:
        return dict(zip(listed, pool.map(attempt, listed), strict=True))


def run_script(
    target: Target, worker: Worker, script: str, gcloud: Gcloud, timeout: float = 300, tries: int = 3
) -> str:
    """Runs a script on one worker and returns its stdout. A lost connection may run it again.

    Raises:
      RemoteError: The script failed.
    """
    return gcloud.run(commands.ssh(target, str(worker.slice), str(worker.index), script), timeout, tries)


@contextlib.contextmanager
def repeating(action: Callable[[], None], seconds: float) -> Iterator[None]:
    """Calls `action` every `seconds` in a background thread."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(seconds):
            action()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield
    finally:
        stopped.set()
