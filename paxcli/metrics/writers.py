"""Writes metrics to `metrics.jsonl`, which scripts and `pax plot` read, and to TensorBoard."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Protocol, TextIO

from etils import epath

from paxcli.config.paths import replace_text
from paxcli.errors import DataError, first_line
from paxcli.log import log

TRAIN = "train"

_EVAL_MARK = re.compile(b'"split": "eval/')
_LAST_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20
_NUM_SAMPLES = 20_000
_FLUSH_SECONDS = 5
_EVENTS = "pax-events"
MetricValues = Mapping[str, float | int | None]


def _parse_number(number: str) -> float | None:
    """The value of a number in JSON; None for NaN, infinity and 1e999, as `JsonlWriter` writes them."""
    return value if math.isfinite(value := float(number)) else None


def _parse_int(number: str) -> int | None:
    """The value of an integer in JSON; None if a float cannot hold it, as for other numbers."""
    return None if _parse_number(number) is None else int(number)


_DECODER = json.JSONDecoder(parse_constant=_parse_number, parse_float=_parse_number, parse_int=_parse_int)


class Writer(Protocol):
    """Writes metrics."""

    def write(self, step: int, values: MetricValues, split: str = TRAIN) -> None:
        """Writes the metrics of one step; `split` is `train` or `eval/NAME`."""

    def close(self, kind: type[BaseException] | None = None, error: BaseException | None = None, /, *_: object) -> None:
        """Flushes and closes. Takes the arguments of `__exit__`; `error`: what ended the run, if it is not finished."""


class JsonlWriter:
    """Writes one JSON object a line, flushed at once. Values that are not finite become null.

    Args:
      path: The file. Object stores cannot append: there, each line rewrites the file.
      resume_step: The step that the run resumes from: lines of later steps and a torn last line are removed. None
        starts an empty file.
    """

    def __init__(self, path: epath.PathLike, resume_step: int | None = None):
        self._path = epath.Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        size = _size_up_to(self._path, resume_step)
        if "://" in os.fspath(path):
            self._file: TextIO = io.StringIO()
            self._file.write(self._path.read_bytes()[:size].decode() if size else "")
            replace_text(self._path, self._file.getvalue())
        else:
            self._file = open(self._path, "a", encoding="utf-8")
            self._file.truncate(size)

    def write(self, step: int, values: MetricValues, split: str = TRAIN) -> None:
        """Appends one line."""
        finite = {name: value if is_finite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "split": split, **finite}, allow_nan=False) + "\n")
        self._file.flush()
        if isinstance(self._file, io.StringIO):
            replace_text(self._path, self._file.getvalue())

    def close(self, *_: object) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoardWriter:
    """Writes TensorBoard events, one directory a split, so that training and evaluation of a metric share a chart.

    A thread writes them every few seconds, and at `close`. If it fails, as on a full disk, that is logged once, and
    later events are dropped: this is the second copy of the metrics.

    Args:
      directory: Parent of `train/` and `eval/NAME/`.
      resume_step: The step that the run resumes from: TensorBoard hides events of later steps that were written
        before. None hides all earlier events.
    """

    def __init__(self, directory: epath.PathLike, resume_step: int | None = None):
        self._directory = os.fspath(directory)
        self._purge_step = 0 if resume_step is None else resume_step + 1
        self._splits: dict[str, Any] = {}

    def write(self, step: int, values: MetricValues, split: str = TRAIN) -> None:
        """Adds the values that are finite."""
        writer = self._splits.get(split) or self._open(split)
        for name, value in values.items():
            if is_finite(value):
                writer.add_scalar(name, value, step)

    def close(self, *_: object) -> None:
        """Closes the files of all splits."""
        for writer in self._splits.values():
            writer.close()

    def _open(self, split: str) -> Any:
        from tensorboardX import SummaryWriter, record_writer

        factory = SimpleNamespace(  # for paths with the prefix `_EVENTS`, local or in buckets
            open=lambda path: _EventFile(record_writer.open_file(path.removeprefix(f"{_EVENTS}:"))),
            directory_check=lambda path: record_writer.directory_check(path.removeprefix(f"{_EVENTS}:")),
        )
        record_writer.register_writer_factory(_EVENTS, factory)
        self._splits[split] = SummaryWriter(
            f"{_EVENTS}:{self._directory}/{split}",
            purge_step=self._purge_step,
            max_queue=1000,  # never wait for the thread
            flush_secs=_FLUSH_SECONDS,
            filename_suffix=f".{time.time_ns()}",  # otherwise two files started in the same second are one
        )
        return self._splits[split]


class _EventFile:
    """TensorBoard's file of events, whose first failure is logged, and which drops everything after that."""

    def __init__(self, file: Any):
        self._file = file
        self.write, self.flush, self.close = (self._guard(method) for method in (file.write, file.flush, file.close))

    def _guard(self, method: Callable[..., Any]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if self._file is None:
                return
            try:
                method(*arguments)
            except Exception as error:  # each file system raises its own types
                log.warning("TensorBoard events are not written: %s", first_line(error))
                failed, self._file = self._file, None
                with contextlib.suppress(Exception):
                    failed.close()  # or it is flushed again when it is deleted

        return call


def read_lines(path: epath.Path, sample: bool = False) -> Iterator[dict[str, Any]]:
    """The lines of a `metrics.jsonl`: the objects of `read_records`, each with a split and numbers.

    Raises:
      DataError: A value of a line is not a number or null.
    """
    for line in read_records(path, sample):
        kinds = {type(value) for name, value in line.items() if name != "split"}
        if not isinstance(line.get("split"), str) or not kinds <= {int, float, bool, type(None)}:
            raise DataError(f"{path} has a line without metrics: {str(line)[:100]}.", "Restore or delete that line.")
        yield line


def read_records(path: epath.Path, sample: bool = False) -> Iterator[dict[str, Any]]:
    """The JSON objects of a JSONL file that have a `step`; none if there is no file. Incomplete lines are left out.

    Args:
      path: The file.
      sample: Of a long file, parse the evaluations, some 20,000 training lines at equal distances, and the last ones.
        Parsing millions of lines would take minutes, and gigabytes of memory.
    """
    rest = b""
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        size = file.seek(0, os.SEEK_END)
        sampled = size - _LAST_BYTES if sample else 0
        file.seek(0)
        while file.tell() < sampled:
            text = rest + file.read(min(_BLOCK_BYTES, sampled - file.tell()))
            end = text.rfind(b"\n") + 1
            spots = {*range(0, end, size // _NUM_SAMPLES + 1), *(m.start() for m in _EVAL_MARK.finditer(text, 0, end))}
            lines = {(text.rfind(b"\n", 0, spot) + 1, text.index(b"\n", spot)) for spot in spots}
            yield from _parse_lines(text[begin:stop] for begin, stop in sorted(lines))
            rest = text[end:]
        yield from _parse_lines((rest + file.read()).splitlines())


def is_finite(value: float | int | None) -> bool:
    """Whether a value can be written."""
    return value is not None and math.isfinite(value)


def _parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects that have a `step`, without torn lines."""
    for text in lines:
        with contextlib.suppress(ValueError, RecursionError):
            parsed = _DECODER.decode(text.decode("utf-8-sig"))
            if isinstance(parsed, dict) and isinstance(parsed.get("step"), int):
                yield dict(zip(map(sys.intern, parsed), parsed.values(), strict=True))  # or each line has its own names


def _size_up_to(path: epath.Path, resume_step: int | None) -> int:
    """The size of a file without the lines at its end that are torn, or of steps after `resume_step`."""
    with path.open("rb") if resume_step is not None and path.exists() else io.BytesIO() as file:
        size, tail = file.seek(0, os.SEEK_END), _LAST_BYTES
        while size:
            start = file.seek(max(size - tail, 0))
            text, end = file.read(size - start), size - start
            while end and ((begin := text.rfind(b"\n", 0, end - 1) + 1) or not start):
                lines = _parse_lines([text[begin:end]]) if text.endswith(b"\n", 0, end) else ()
                if any(line["step"] <= resume_step for line in lines):
                    return start + end
                end = begin
            size, tail = size if start else 0, 8 * tail
    return 0
