"""SeqIO and TensorFlow, imported when an input needs them, quietly and away from the accelerators."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from paxcli.errors import ConfigError, DataError, MissingError


def load(name: str) -> Any:
    """The module `name`: `seqio`, `tensorflow`, or a part of one of them.

    Raises:
      MissingError: It is not installed.
    """
    if "tensorflow" not in sys.modules:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # what matters, it raises
        logging.getLogger("tensorflow").setLevel(logging.ERROR)
        logging.getLogger("absl").addFilter(_is_not_seqio_chatter)
    try:
        tensorflow = importlib.import_module("tensorflow")
        module = importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or name).partition(".")[0]
        raise MissingError(f"SeqIO inputs need the package `{missing}`.", "pip install seqio tensorflow") from None
    with contextlib.suppress(RuntimeError):  # TensorFlow has started, so this was done before
        tensorflow.config.set_visible_devices([], "GPU")  # it would take all of its memory from JAX
    return module


@contextlib.contextmanager
def as_our_errors(where: str) -> Iterator[None]:
    """What TensorFlow and SeqIO raise about data, tasks and settings, as errors of ours; `where` begins the message."""
    tf = load("tensorflow")
    try:
        yield
    except tf.errors.OpError as error:
        raise DataError(f"{where}: {_cause(error.message)}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}", "Correct the SeqIO task, or the fields of the input that name it.") from error


def plain(function: Callable) -> Callable:
    """A function for `tf.data` that is made of TensorFlow operations alone, so that AutoGraph need not rewrite it."""
    return load("tensorflow").autograph.experimental.do_not_convert(function)


def _is_not_seqio_chatter(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "/seqio/" not in record.pathname


def _cause(message: str) -> str:
    """What a Python function inside a dataset raised, without its traceback; else the first line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    raised = [line.partition(": ")[2] for line in lines if line.startswith("paxcli.errors.")]
    return raised[-1] if raised else lines[0] if lines else "TensorFlow gives no reason."
