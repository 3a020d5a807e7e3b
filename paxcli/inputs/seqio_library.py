"""SeqIO and TensorFlow, imported when an input needs them, quietly and away from the accelerators."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from paxcli.errors import ConfigError, DataError, MissingError


@functools.cache
def load(name: str) -> Any:
    """The module `name`, which needs TensorFlow.

    Raises:
      MissingError: It, or something it needs, is not installed.
    """
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # what matters, it raises
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    try:
        with _no_stderr():  # TensorFlow greets before it knows how much to log
            tensorflow = importlib.import_module("tensorflow")
            with contextlib.suppress(RuntimeError):  # it has started without us
                tensorflow.config.set_visible_devices([], "GPU")  # it would take all of its memory from JAX
            module = importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or name).partition(".")[0]
        raise MissingError(f"SeqIO inputs need the package `{missing}`.", "pip install seqio tensorflow") from None
    logging.getLogger("absl").addFilter(_is_not_seqio_chatter)
    return module


@contextlib.contextmanager
def as_our_errors(where: str) -> Iterator[None]:
    """What TensorFlow and SeqIO raise about data, tasks and settings, as errors of ours; `where` begins the message."""
    tf = load("tensorflow")
    try:
        yield
    except tf.errors.OpError as error:
        hint = "If a file is damaged, `gzip -t` names it; if not, look at the task's preprocessors."
        raise DataError(f"{where}: {_cause(error.message)}", hint) from None
    except (ValueError, TypeError) as error:
        hint = "Correct the SeqIO task, or the fields of the input that name it."
        raise ConfigError(f"{where}: {error}", hint) from error


def plain(function: Callable) -> Callable:
    """A function for `tf.data` that is made of TensorFlow operations alone, so that AutoGraph need not rewrite it."""
    return load("tensorflow").autograph.experimental.do_not_convert(function)


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    kept = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _is_not_seqio_chatter(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "/seqio/" not in record.pathname


def _cause(message: str) -> str:
    """What a Python function inside a dataset raised, without its traceback; else the first line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    raised = [line.partition(": ")[2] for line in lines if line.startswith("paxcli.errors.")]
    return raised[-1] if raised else re.sub(r"{{.*?}} ?| ?\[Op:.*", "", "".join(lines[:1]))
