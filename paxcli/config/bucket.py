"""Buckets that fail: operations are repeated after random waits, until a deadline that ends the process."""

from __future__ import annotations

import contextlib
import functools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from paxcli.errors import RemoteError, exit_now

_TRANSIENT = re.compile(
    r", (408|429|50\d)$|: (408|429|50\d) |UNAVAILABLE|_EXCEEDED|_EXHAUSTED|ABORTED|[Tt]imed? ?out|onnect|RetryError"
)
_OPERATIONS = ("exists", "isdir", "listdir", "glob", "makedirs", "mkdir", "rmtree", "remove", "rename", "copy", "stat")
_LONGEST_WAIT = 30.0
_TICKS = 10

_seconds: float | None = None
_repeated = 0


def repeat_operations(seconds: float) -> None:
    """Makes every operation of an `epath.Path` in a bucket `repeat`, from now on, for at most so many seconds.

    The clients of buckets repeat requests themselves, each a number of times; this is for when they give up.
    """
    global _seconds
    from etils.epath.backend import fsspec_backend

    for name in _OPERATIONS if _seconds is None else ():
        setattr(fsspec_backend, name, repeat(getattr(fsspec_backend, name)))
    _seconds = seconds


def is_transient(error: Exception) -> bool:
    """Whether a client reports that a server is overloaded or cannot be reached."""
    return _TRANSIENT.search(f"{type(error).__name__}: {error}") is not None


def repeat(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, repeated while it fails as a bucket does that is overloaded or cannot be reached."""

    @functools.wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _repeated
        if _seconds is None:
            return operation(*args, **kwargs)
        longest = 0.1
        with deadline(_seconds):
            while True:
                try:
                    return operation(*args, **kwargs)
                except (FileNotFoundError, FileExistsError, PermissionError):
                    raise  # these are answers
                except Exception as error:  # each client raises its own types
                    if not is_transient(error):
                        raise
                _repeated += 1
                time.sleep(random.uniform(0, longest))
                longest = min(2 * longest, _LONGEST_WAIT)

    return call


@contextlib.contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Exits with code 4 if the block does not end, and no byte of an array is transferred, in so many seconds.

    None = no limit.
    """
    ended = exit_when_stuck(seconds)
    try:
        yield
    finally:
        ended.set()


def exit_when_stuck(seconds: float | None, is_active: Callable[[], bool] = lambda: True) -> threading.Event:
    """The same, in the background: until the event that it returns is set, or `is_active` is false."""
    ended = threading.Event()

    def watch(seconds: float) -> None:
        seen, ticks = _tensorstore_count("bytes_read", "bytes_written"), 0
        while not ended.wait(seconds / _TICKS) and is_active():
            now = _tensorstore_count("bytes_read", "bytes_written")
            seen, ticks = now, ticks + 1 if now == seen else 0
            if ticks >= _TICKS - 1:
                hint = "Run the same command again when the bucket answers. `storage_timeout_seconds` is the limit."
                exit_now(RemoteError(f"The bucket did not answer for {seconds:g} s.", hint))

    if seconds is not None:
        threading.Thread(target=watch, args=(seconds,), name="bucket-deadline", daemon=True).start()
    return ended


def count_retries() -> int:
    """Repetitions since the process started: of requests for arrays, by TensorStore, and by `repeat`."""
    return _repeated + _tensorstore_count("retries")


def _tensorstore_count(*names: str) -> int:
    """The sum of TensorStore's counters of these names, over the kinds of buckets."""
    import tensorstore

    metrics: list[dict[str, Any]] = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    wanted = {f"/tensorstore/kvstore/{kind}/{name}" for kind in ("gcs", "gcs_grpc", "s3") for name in names}
    return sum(value["value"] for metric in metrics if metric["name"] in wanted for value in metric["values"])
