"""Imports SeqIO and TensorFlow on demand, without log noise and without accelerators."""

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
    """Imports the module `name`, which needs TensorFlow.

    Raises:
      MissingError: The module, or a dependency of it, is not installed.
    """
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # errors are raised as exceptions
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    try:
        with _no_stderr():  # TensorFlow prints messages before it reads its log level
            tensorflow = importlib.import_module("tensorflow")
            with contextlib.suppress(RuntimeError):  # TensorFlow is already initialized
                tensorflow.config.set_visible_devices([], "GPU")  # it would allocate all GPU memory
            module = importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or name).partition(".")[0]
        raise MissingError(f"SeqIO inputs need the package `{missing}`.", "pip install seqio tensorflow") from None
    logging.getLogger("absl").addFilter(_is_not_seqio_info)
    return module


@contextlib.contextmanager
def translate_errors(name: str | None) -> Iterator[None]:
    """Turns exceptions of TensorFlow and SeqIO into DataError or ConfigError about the input `name`."""
    tf = load("tensorflow")
    try:
        yield
    except tf.errors.OpError as error:
        hint = "Check the files (`gzip -t` finds damaged ones) and the task's preprocessors."
        raise DataError(f"Input `{name}`: {_cause(error.message)}", hint) from None
    except (ValueError, TypeError) as error:
        hint = "Correct the SeqIO task, or the fields of the input that name it."
        raise ConfigError(f"Input `{name}`: {error}", hint) from error


def without_autograph(function: Callable) -> Callable:
    """Disables AutoGraph for a function of `tf.data` that only uses TensorFlow ops."""
    return load("tensorflow").autograph.experimental.do_not_convert(function)


def map_in_parallel(ds: Any, function: Callable) -> Any:
    """Applies a function that only uses TensorFlow ops to the elements of a `tf.data.Dataset`."""
    return ds.map(without_autograph(function), num_parallel_calls=load("tensorflow").data.AUTOTUNE)


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    stderr = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _is_not_seqio_info(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "/seqio/" not in record.pathname


def _cause(message: str) -> str:
    """The message of a pax error raised in a dataset's Python function, without its traceback; else the first line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    raised = [line.partition(": ")[2] for line in lines if line.startswith("paxcli.errors.")]
    return raised[-1] if raised else re.sub(r"{{.*?}} ?| ?\[Op:.*", "", "".join(lines[:1]))
