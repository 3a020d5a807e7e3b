"""Documents out of files: plain text, JSON lines, Parquet, ArrayRecord; and what becomes of a bad one."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from paxcli.errors import DataError, MissingError, did_you_mean
from paxcli.inputs.files import SourceFile, local_copy
from paxcli.log import log

TEXT, JSONL, PARQUET, ARRAY_RECORD, TOKENS = FORMATS = ("text", "jsonl", "parquet", "arrayrecord", "tokens")
_SUFFIXES = {
    ".jsonl": JSONL,
    ".jsonl.gz": JSONL,
    ".json.gz": JSONL,  # C4's shards hold an object a line
    ".ndjson": JSONL,
    ".parquet": PARQUET,
    ".arrayrecord": ARRAY_RECORD,
    ".array_record": ARRAY_RECORD,
    ".bin": TOKENS,
}
_AT_ONCE = 1024


def format_of(name: str) -> str:
    """The format that a file's suffix stands for: `text` unless it is one of the known."""
    return next((found for suffix, found in _SUFFIXES.items() if name.lower().endswith(suffix)), TEXT)


@dataclasses.dataclass
class BadRecords:
    """Counts records that cannot be read, and says when it is too many.

    Attributes:
      policy: `error`: the first ends everything. `skip`: up to `budget` are left out.
      budget: How many may be left out.
      found: What was wrong with each, and where.
    """

    policy: str = "error"
    budget: int = 0
    found: list[str] = dataclasses.field(default_factory=list)

    def add(self, error: DataError) -> None:
        """Leaves a record out, or raises `error`."""
        if self.policy == "error":
            raise error
        self.add_skipped([error.message])
        log.info("Left out: %s", error.message)

    def add_skipped(self, messages: list[str]) -> None:
        """Counts records that are left out already, or raises DataError where they are too many."""
        self.found += messages
        if len(self.found) > self.budget:
            raise DataError(
                f"More than {self.budget} records cannot be read. The last one: {self.found[-1]}",
                "Mend the data, or raise bad_record_budget.",
            )


@dataclasses.dataclass(frozen=True)
class Reading:
    """How files become documents.

    Attributes:
      format: Of all files; None: each by its suffix.
      text_field: The field or column that holds a document's text; None: an ArrayRecord's record is the text itself.
      policy: What becomes of bad records.
      budget: How many may be left out.
      cache_dir: Where ArrayRecords of a bucket are copied to.
    """

    format: str | None = None
    text_field: str | None = "text"
    policy: str = "error"
    budget: int = 0
    cache_dir: str | None = None

    def documents(self, file: SourceFile, bad: BadRecords) -> Iterator[Any]:
        """The documents of one file, in order: texts, unless a subclass makes something else of a record.

        Raises:
          DataError: A file that cannot be read, or a bad record that may not be left out.
        """
        readers: dict[str, Callable[[SourceFile, BadRecords], Iterator[Any]]] = {
            TEXT: _text,
            JSONL: self._jsonl,
            PARQUET: self._parquet,
            ARRAY_RECORD: self._array_record,
        }
        return readers[self.format or format_of(file.name)](file, bad)

    def document_of(self, record: dict[str, Any], place: str) -> Any:
        """The document in a record, here its text. Subclasses override this, and `columns`.

        Args:
          record: A JSON object, or a row of Parquet.
          place: File and line, for errors.

        Raises:
          DataError: The record holds no document.
        """
        text = record.get(str(self.text_field))
        if not isinstance(text, str):
            what = f"is {'null' if text is None else f'{type(text).__name__}, not text'}"
            what = what if self.text_field in record else "is missing"
            fields = ", ".join(map(str, record)) or "no field"
            raise DataError(f"{place}: `{self.text_field}` {what}; there is {fields}.", f"Set text_field. {MEND}")
        return text

    def columns(self, schema: Any, file: SourceFile) -> list[str]:
        """The columns of a Parquet file with this schema that `document_of` needs.

        Raises:
          DataError: The file lacks them.
        """
        import pyarrow

        if self.text_field not in schema.names:
            raise DataError(
                f"{file.path} has no column `{self.text_field}`; it has {', '.join(schema.names)}.",
                did_you_mean(str(self.text_field), schema.names) or "Set the input's text_field to one of them.",
            )
        kind = schema.field(self.text_field).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"{file.path}: column `{self.text_field}` holds {kind}, not text.", "Set text_field.")
        return [str(self.text_field)]

    def _jsonl(self, file: SourceFile, bad: BadRecords) -> Iterator[Any]:
        number = 0
        with _opened(file) as stream:
            while line := _next_line(stream, file, number):
                number += 1
                if line.isspace():
                    continue
                try:
                    document = self._parse(line, f"{file.path}, line {number}")
                except DataError as error:
                    bad.add(error)
                else:
                    yield document

    def _parquet(self, file: SourceFile, bad: BadRecords) -> Iterator[Any]:
        import pyarrow
        import pyarrow.parquet

        with _opened(file) as stream:
            try:
                table = pyarrow.parquet.ParquetFile(stream)
            except pyarrow.ArrowException as error:
                raise DataError(f"{file.path} is not a Parquet file: {error}") from None
            columns = self.columns(table.schema_arrow, file)
            number = 0
            try:
                for batch in table.iter_batches(_AT_ONCE, columns=columns):
                    for record in batch.to_pylist():
                        try:
                            document = self.document_of(record, f"{file.path}, row {number}")
                        except DataError as error:
                            bad.add(error)
                        else:
                            yield document
                        number += 1
            except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
                raise DataError(f"{file.path} is damaged after row {number}: {error}") from None

    def _array_record(self, file: SourceFile, bad: BadRecords) -> Iterator[Any]:
        import grain

        path = local_copy(file.path, self.cache_dir)
        try:
            source = grain.sources.ArrayRecordDataSource(str(path))
            size = len(source)
        except Exception as error:  # The reader is C++ and raises what it likes.
            raise DataError(f"{file.path} is not an ArrayRecord file: {error}") from None
        for first in range(0, size, _AT_ONCE):
            try:
                records = source.__getitems__(range(first, min(first + _AT_ONCE, size)))
            except Exception as error:
                raise DataError(f"{file.path} is damaged after record {first}: {error}") from None
            for number, record in enumerate(records, first):
                try:
                    document = self._parse(record, f"{file.path}, record {number}")
                except DataError as error:
                    bad.add(error)
                else:
                    yield document

    def _parse(self, record: bytes, place: str) -> Any:
        """The document in a record that is text, a JSON object or a `tf.train.Example`."""
        try:
            if self.text_field is None:
                return record.decode("utf-8")
            if record[:1] == b"\n":  # How every tf.train.Example begins, and no line of JSON.
                found: Any = {self.text_field: _example_field(record, self.text_field, place)}
            else:
                found = json.loads(record)
        except UnicodeDecodeError as error:
            raise DataError(f"{place} is not UTF-8: byte {error.start}.", MEND) from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} is not JSON: {error}.", MEND) from None
        if not isinstance(found, dict):
            raise DataError(f"{place} is a JSON {type(found).__name__}, not an object.", MEND)
        return self.document_of(found, place)


MEND = "Mend it, or set on_bad_record=skip and a bad_record_budget."


def _text(file: SourceFile, bad: BadRecords) -> Iterator[str]:
    with _opened(file) as stream:
        content = _damage(lambda: stream.read(), file, "")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        found = error.object[error.start]
        bad.add(
            DataError(
                f"{file.path} is not UTF-8 text: byte {error.start} is 0x{found:02x}.",
                "Convert it (iconv -t utf-8), or leave it out of the input's `files`.",
            )
        )
        return
    if not text and not file.by_wildcard:
        raise DataError(f"{file.path} is empty.", "Leave it out of the input's `files`.")
    yield text


@contextlib.contextmanager
def _opened(file: SourceFile) -> Iterator[Any]:
    try:
        stream: Any = file.path.open("rb")
    except OSError as error:
        is_directory = isinstance(error, IsADirectoryError)
        raise DataError(
            f"Cannot read {file.path}: {error.strerror or error}.",
            "Name the files in it, such as DIR/**/*.txt."
            if is_directory
            else "Give this user permission to read it, or leave it out of the input's `files`.",
        ) from None
    with stream:
        yield gzip.GzipFile(fileobj=stream) if file.name.lower().endswith(".gz") else stream


def _next_line(stream: IO[bytes], file: SourceFile, number: int) -> bytes:
    return _damage(stream.readline, file, f" after line {number}")


def _damage(read: Callable[[], bytes], file: SourceFile, where: str) -> bytes:
    """What `read` returns. Nobody knows how many records are missing of a damaged file, so none can be left out."""
    try:
        return read()
    except EOFError:
        raise DataError(f"{file.path} is truncated: its gzip stream ends{where} without an end mark.", _AGAIN) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file.path} is damaged{where}: {error}.", _AGAIN) from None
    except OSError as error:
        raise DataError(f"Cannot read {file.path}{where}: {error.strerror or error}.") from None


_AGAIN = "Fetch the file again."


def _example_field(record: bytes, field: str, place: str) -> str:
    try:
        import tensorflow as tf
    except ImportError:
        raise MissingError(f"{place} is a tf.train.Example.", "pip install tensorflow") from None
    from google.protobuf.message import DecodeError

    try:
        features = tf.train.Example.FromString(record).features.feature
    except DecodeError:
        raise DataError(
            f"{place} is neither JSON nor a tf.train.Example.", f"text_field=None reads text. {MEND}"
        ) from None
    if field not in features or len(features[field].bytes_list.value) != 1:
        raise DataError(f"{place} has no text `{field}`; there is {', '.join(sorted(features))}.", "Set text_field.")
    return features[field].bytes_list.value[0].decode("utf-8")
