"""Prints results and failures, as text or JSON, and returns exit codes."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from paxcli.cli.interrupts import interrupts
from paxcli.cli.usage_hints import import_hint, usage_hint
from paxcli.cli.user_code import explain
from paxcli.errors import ConfigError, MissingError, PaxError, RemoteError, first_line, machine_fault
from paxcli.log import silence, use_color
from paxcli.metrics.text import values_text

_BUG_HINT = "Please report it with the lines above."
_BUCKET_HINT = "Check that it exists and is yours to use: `gcloud storage ls`, `gcloud auth application-default login`."
_BUCKET_CLIENTS = {"gcsfs", "s3fs", "google", "aiohttp", "botocore"}
_INTERRUPTED, _TERMINATED = 130, 143  # What a shell reports for Ctrl-C and for SIGTERM.
_PATH_FAULTS = {errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}
_PATH_FAULT = re.compile(r"Could not determine home directory|Symlink loop|embedded null byte|'[^']*://'$")
_PATH_HINT = "Correct it, or what is there. Buckets are gs://, s3:// and az://."


def run(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code. Prints every failure, as text or as JSON."""
    options, as_json = list(arguments), _wants_json(arguments)
    try:
        interrupts.release()
        code = app(args=options, prog_name="pax", standalone_mode=False)
        return say_interrupted(arguments, code) if code == _INTERRUPTED else code or 0
    except typer.TyperException as error:
        context, message = getattr(error, "ctx", None), error.format_message()
        has_sets = context is not None and any("--set" in param.opts for param in context.command.params)
        hint = usage_hint(options, context.command_path if context else "pax", message, has_sets)
        return _fail(message, hint, error.exit_code, as_json)
    except (typer.Abort, KeyboardInterrupt):
        return say_interrupted(arguments, _INTERRUPTED)
    except Exception as error:
        return say_failure(arguments, error)


def say_interrupted(arguments: Sequence[str], exit_code: int) -> int:
    """Prints the failure of an interrupted command, and returns the exit code of the signal that it received."""
    exit_code = interrupts.exit_code or exit_code
    return _fail("Terminated." if exit_code == _TERMINATED else "Interrupted.", None, exit_code, _wants_json(arguments))


def say_failure(arguments: Sequence[str], error: Exception) -> int:
    """Prints a failure, as text or as JSON, and returns its exit code."""
    explained = _explain(error)
    if type(explained) is PaxError or os.environ.get("PAX_DEBUG"):
        traceback.print_exception(error)
    return _fail(explained.message, explained.hint, explained.exit_code, _wants_json(arguments))


def _explain(error: Exception) -> PaxError:
    """The cause and the next step of any exception; a `PaxError` itself, not of a subclass, is a bug in pax."""
    if isinstance(error, PaxError):
        error.hint = import_hint(error.__cause__) or error.hint
        return error
    if fault := machine_fault(error):
        hint = "Fix that, and run the same command again."
        if not getattr(error, "filename", None):  # a write to a full disk has none, and the disk may be that one
            hint += f" Temporary files are in {tempfile.gettempdir()}; TMPDIR names another directory."
        return MissingError(f"{fault[:1].upper()}{fault[1:]}: {first_line(error)}", hint)
    if (isinstance(error, OSError) and error.errno in _PATH_FAULTS) or _PATH_FAULT.match(str(error)):
        return ConfigError(f"A path cannot be used: {first_line(error).rstrip('.')}.", _PATH_HINT)
    if isinstance(error, ImportError) and (client := re.match(r"Install (\S+) to access", str(error))):
        return MissingError(f"{error}.", f"pip install {client[1]}")
    if _is_bucket_error(error):
        return RemoteError(f"Cannot access a bucket: {first_line(error)}", _BUCKET_HINT)
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        near = ascii(error.object[max(error.start - 20, 0) : error.end + 20])
        hint = "Correct it; if it is right, this system's locale is not UTF-8: `export LC_ALL=C.UTF-8`."
        return ConfigError(f"A text has bytes that are not UTF-8: {near}.", hint)
    if explained := explain(error):
        return ConfigError(*explained)
    return PaxError(f"This is a bug in pax: {type(error).__name__}: {error}", _BUG_HINT)


def _wants_json(arguments: Sequence[str]) -> bool:
    options = list(arguments)
    return "--json" in (options[: options.index("--")] if "--" in options else options)


def say(text: str, end: str = "\n") -> None:
    """Prints a result to stdout. Exits quietly if the reader, such as `head`, has closed the pipe.

    Raises:
      MissingError: Stdout cannot be written, as on a full disk.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        silence(sys.stdout)  # else the exit fails again
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(0) from None
        fault = machine_fault(error) or first_line(error)
        raise MissingError(f"Cannot write the result to stdout: {fault}.", "Send it to another place.") from None


def say_result(result: Any, text: str, as_json: bool, error: PaxError | None = None) -> None:
    """Prints a command's result: one JSON value with `--json`, else `text`, if there is any.

    Raises the `error` of a command that has a result and failed all the same; with `--json`, it is part of the result.
    """
    if error is not None and as_json:
        raise typer.Exit(_fail(error.message, error.hint, error.exit_code, as_json, result))
    if as_json or text:
        say(json_text(result) if as_json else text)
    if error is not None:
        raise error


def json_text(value: Any) -> str:
    """A value as strict JSON, in characters that stdout can encode."""
    return json.dumps(_strict(value), ensure_ascii=sys.stdout.encoding.lower() != "utf-8")


def metrics_text(step: int, metrics: Mapping[str, Mapping[str, float]]) -> str:
    """A line for each input's metrics."""
    return "\n".join(f"step {step} · {name} · {values_text(values)}" for name, values in metrics.items())


def _fail(message: str, hint: str | None, exit_code: int, as_json: bool, result: Mapping[str, Any] = {}) -> int:
    """Prints an error, and returns the exit code. Where stdout cannot take it as JSON, stderr gets it as text."""
    if as_json:
        with contextlib.suppress(typer.Exit, MissingError):
            say(json_text({**result, "error": {"message": message, "hint": hint, "exit_code": exit_code}}))
            return exit_code
    red, plain = ("\x1b[31m", "\x1b[0m") if use_color(sys.stderr) else ("", "")
    try:
        print(f"{red}error:{plain} {message}" + (f"\nhint: {hint}" if hint else ""), file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)
    return exit_code


def _is_bucket_error(error: Exception) -> bool:
    """Whether a bucket could not be read or written, after its client's retries. Not all derive from `OSError`."""
    kinds = type(error).mro()
    of_client = any(kind.__module__.partition(".")[0] in _BUCKET_CLIENTS for kind in kinds)
    of_tensorflow = any(kind.__module__.startswith("tensorflow.") and kind.__name__ == "OpError" for kind in kinds)
    return of_client or (of_tensorflow and "://" in str(error))


def _strict(value: Any) -> Any:
    """A value that strict JSON can hold: NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.item() if hasattr(value, "item") else value
