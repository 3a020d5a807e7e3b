"""Child processes that read and tokenize files, which the end of this process ends, and no other signal."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import TypeVar

from paxcli.errors import MissingError

T = TypeVar("T")
R = TypeVar("R")


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Delays SIGINT and SIGTERM inside the `with` block; processes that start there never get them.

    Ctrl-C, and the SIGTERM of a scheduler, go to all processes. This one may still need them, to save first.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def map_in_processes(function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[T, R]]:
    """Applies `function` in up to `num_workers` processes, and yields items with their results as they complete.

    With 0 workers, applies it in this process, when the next result is asked for.

    Raises:
      MissingError: A process was killed, usually because memory ran out.
    """
    if not (num_processes := min(num_workers, len(items))):
        yield from ((item, function(item)) for item in items)
        return
    # JAX and TensorFlow have threads, so processes must be spawned, not forked.
    context = multiprocessing.get_context("spawn")
    alive, lifeline = context.Pipe(duplex=False)
    arguments = (alive, max(1, (os.cpu_count() or 1) // num_processes))
    pool = concurrent.futures.ProcessPoolExecutor(num_processes, context, initializer=_start, initargs=arguments)
    try:
        with hold_signals():
            running = {pool.submit(function, item): item for item in items}
        for done in concurrent.futures.as_completed(running):
            yield running[done], done.result()
    except BrokenProcessPool:
        raise MissingError("A tokenizing process was killed.", "Memory may have run out: use fewer workers.") from None
    finally:
        lifeline.close()
        pool.shutdown(wait=True, cancel_futures=True)


def _start(alive: Connection, num_threads: int) -> None:
    """Ends this worker when its parent closes the other end of `alive`, or ends: it could wait for work forever.

    Its tokenizer has `num_threads`, so that the workers together use the machine's cores.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(num_threads))
    threading.Thread(target=lambda: (alive.poll(None), os._exit(1)), daemon=True).start()
