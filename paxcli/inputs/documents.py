"""Reads documents from plain text, JSON lines, CSV, Parquet and ArrayRecord files, and handles bad records."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import io
import json
import lzma
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from typing import Any, AnyStr, BinaryIO, ClassVar, Self

from paxcli.errors import DataError, did_you_mean, load_library
from paxcli.inputs.array_records import read_records
from paxcli.inputs.files import SourceFile, local_copy, size_of
from paxcli.log import log

TEXT, JSONL, PARQUET, ARRAY_RECORD, TOKENS = ("text", "jsonl", "parquet", "arrayrecord", "tokens")
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_SUFFIXES = {
    JSONL: (".jsonl", ".json", ".ndjson"),  # C4's .json.gz files have one object per line
    **{format: (f".{format}",) for format in _DELIMITERS},
    PARQUET: (".parquet",),
    ARRAY_RECORD: (".arrayrecord", ".array_record"),
    TOKENS: (".bin",),
}
_RECORDS_PER_READ = 1024
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*(\{|$)")  # how a file of one array of objects begins


def format_of(name: str) -> str:
    """The format of a file by its suffix, before that of compression; `text` for an unknown suffix."""
    name = re.sub(r"\.(gz|xz|zst)$", "", name.lower())
    return next((format for format, suffixes in _SUFFIXES.items() if name.endswith(suffixes)), TEXT)


@dataclasses.dataclass
class BadRecords:
    """Collects the errors of records that cannot be read, up to a budget.

    Attributes:
      policy: `error`: the first bad record raises. `skip`: up to `budget` records are skipped.
      budget: Maximum number of skipped records.
      found: The error message of each skipped record.
    """

    policy: str = "error"
    budget: int = 0
    found: list[str] = dataclasses.field(default_factory=list)

    def add(self, error: DataError) -> None:
        """Skips a record, or raises `error`."""
        if self.policy == "error":
            raise error
        self.add_skipped([error.message])
        log.info("Skipped: %s", error.message)

    def add_skipped(self, messages: list[str]) -> None:
        """Counts records that were skipped, for example in another process. Raises DataError above the budget."""
        self.found += messages
        if len(self.found) > self.budget:
            hint = "Fix the data, or raise bad_record_budget."
            raise DataError(f"More than {self.budget} records cannot be read. The last one: {self.found[-1]}", hint)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Reads documents from files. Its fields are those of the same names of an input.

    Attributes:
      format: Format of all files. None: by each file's suffix.
      text_field: Field or column with a document's text. None: the text is an ArrayRecord's full record.
      on_bad_record: `error` or `skip` bad records.
      bad_record_budget: Maximum number of skipped records.
      cache_dir: Directory for local copies of a bucket's ArrayRecord files.
      empty_cell: What the field of an empty cell of CSV contains.
    """

    empty_cell: ClassVar[str | None] = ""

    format: str | None = None
    text_field: str | None = "text"
    on_bad_record: str = "error"
    bad_record_budget: int = 0
    cache_dir: str | None = None

    @classmethod
    def of(cls, source: Any) -> Self:
        """Reads the files of the input `source`."""
        return cls(**{field.name: getattr(source, field.name) for field in dataclasses.fields(cls)})

    def documents(self, file: SourceFile, bad: BadRecords) -> Iterator[Any]:
        """The documents of one file, in order: texts, unless a subclass overrides `document_of`.

        Raises:
          DataError: The file cannot be read, or a bad record must not be skipped.
        """
        read, parse = {
            TEXT: (_read_text, _decode_text),
            JSONL: (_read_lines, self._parse_record),
            **dict.fromkeys(_DELIMITERS, (self._read_cells, self._parse_cells)),
            PARQUET: (self._read_rows, self.document_of),
            ARRAY_RECORD: (self._read_array_records, self._parse_record),
        }[self.format or format_of(file.name)]
        for place, record in read(file):
            try:
                yield parse(record, place)
            except DataError as error:
                bad.add(error)

    def document_of(self, record: dict[str, Any], place: str) -> Any:
        """The document of a record, here its text. A subclass may override this, together with `columns`.

        Args:
          record: A JSON object, or a row of a CSV or Parquet file.
          place: File and line, for errors.

        Raises:
          DataError: The record does not have a document.
        """
        text = record.get(str(self.text_field))
        if not isinstance(text, str):
            problem = "is null" if text is None else f"is {type(text).__name__}, not text"
            problem = problem if self.text_field in record else "is missing"
            raise lacks_field(record, f"{place}: `{self.text_field}` {problem}", "Set text_field (`--text-field`).")
        return text

    def columns(self, schema: Any, file: SourceFile) -> list[str]:
        """The columns of a CSV or Parquet file that `document_of` reads.

        Raises:
          DataError: The file does not have them.
        """
        if self.text_field not in schema.names:
            hint = did_you_mean(str(self.text_field), schema.names) or "Set the input's text_field to one of these."
            raise DataError(f"{file.path} has no column `{self.text_field}`; it has {', '.join(schema.names)}.", hint)
        kind = schema.field(self.text_field).type
        if not str(kind).startswith(("string", "large_string", "dictionary")):
            hint = "Set text_field (`--text-field`) to another column."
            raise DataError(f"{file.path}: column `{self.text_field}` has type {kind}, not text.", hint)
        return [str(self.text_field)]

    def _read_rows(self, file: SourceFile) -> Iterator[tuple[str, Any]]:
        import pyarrow.parquet

        path, number = str(file.path), None
        with _open_stream(file) as stream:
            try:
                table = pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)
                columns, number = self.columns(table.schema_arrow, file), 0
                for batch in table.iter_batches(_RECORDS_PER_READ, columns=columns):
                    kinds = {field.name: field.type for field in batch.schema}
                    for record in batch.to_pylist():
                        yield f"{path}, row {number}", {name: _decode(record[name], kinds[name]) for name in record}
                        number += 1
            except (pyarrow.ArrowException, ValueError, RecursionError, OSError) as error:
                problem = "is not a Parquet file" if number is None else f"is damaged after row {number}"
                hint = "Set `format` as the file is, or download it again."
                raise DataError(f"{path} {problem}: {error}", hint) from None

    def _read_cells(self, file: SourceFile) -> Iterator[tuple[str, Any]]:
        """The names of the columns and the cells of each row of a CSV file. Bytes that are not UTF-8 are surrogates."""
        import pyarrow

        csv.field_size_limit(2**28)  # characters: a quote without its end must not fill the memory
        names, start = list[str](), 1  # the columns' names, and the line of the next row, which may have several lines
        with _open_stream(file) as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
            lines = iter(lambda: _read_checked(text.readline, file, f" after line {rows.line_num}"), "")
            rows = csv.reader(lines, delimiter=_DELIMITERS[self.format or format_of(file.name)], strict=True)
            try:
                for cells in rows:
                    place, start = f"{file.path}, line {start}", rows.line_num + 1
                    if names and cells:
                        yield place, (names, cells)
                    elif cells:
                        names = _check_names(cells, place)
                        self.columns(pyarrow.schema(dict.fromkeys(names, pyarrow.string())), file)
            except csv.Error as error:
                hint = "Quote cells that have delimiters, quotes or line breaks, and double the quotes in them."
                raise DataError(f"{file.path}, line {start} cannot be split into cells: {error}.", hint) from None

    def _parse_cells(self, row: tuple[list[str], list[str]], place: str) -> Any:
        names, cells = row
        if len(cells) != len(names):
            raise DataError(f"{place} has {len(cells)} cells, and the first row has {len(names)}.", FIX_HINT)
        check_unicode("".join(cells), place)
        return self.document_of({name: cell or self.empty_cell for name, cell in zip(*row, strict=True)}, place)

    def _read_array_records(self, file: SourceFile) -> Iterator[tuple[str, Any]]:
        for number, record in enumerate(read_records(str(local_copy(file.path, self.cache_dir)))):
            yield f"{file.path}, record {number}", record

    def _parse_record(self, record: bytes, place: str) -> Any:
        """The document in a serialized record, which is text, a JSON object or a `tf.train.Example`."""
        try:
            if self.text_field is None:
                return record.decode("utf-8")
            if record[:1] == b"\n":  # a serialized tf.train.Example starts with this byte, a line of JSON does not
                found: Any = {self.text_field: _example_field(record, self.text_field, place)}
            else:
                found = json.loads(record.removeprefix(BOM_UTF8).decode("utf-8"))  # of bytes, it takes half characters
                if b"\\u" in record:
                    json.dumps(found, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise DataError(f"{place} has the escape {half}, half a character without the other.", FIX_HINT) from None
        except UnicodeDecodeError as error:
            raise DataError(f"{place} is not UTF-8: byte {error.start}.", FIX_HINT) from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} is not JSON: {error}.", FIX_HINT) from None
        if not isinstance(found, dict):
            raise DataError(f"{place} is a JSON {type(found).__name__}, not an object.", FIX_HINT)
        return self.document_of(found, place)


COLUMNS_HINT = "Name the columns in column_map, such as {prompt: question}; or set text_field to that with messages."
FIX_HINT = "Fix it, or skip it: on_bad_record=skip (`pax data tokenize --on-bad-record skip`)."


def lacks_field(fields: Iterable[str], problem: str, hint: str = COLUMNS_HINT) -> DataError:
    """The error of a record in which a field is missing, with the names of its `fields`."""
    return DataError(f"{problem}; fields: {', '.join(map(str, fields)) or 'none'}.", f"{hint} {FIX_HINT}")


def _read_text(file: SourceFile) -> Iterator[tuple[str, Any]]:
    with _open_stream(file) as stream:
        content = _read_checked(stream.read, file, "")
    if not content and not file.by_wildcard:
        raise DataError(f"{file.path} is empty.", "Remove it from the input's `files`.")
    yield str(file.path), content


def _decode_text(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}."
        hint = "Convert it (iconv -t utf-8), or remove it from the input's `files`."
        raise DataError(f"{place} {problem}", hint) from None


@contextlib.contextmanager
def _open_stream(file: SourceFile) -> Iterator[Any]:
    try:
        stream: Any = file.path.open("rb")
    except OSError as error:
        hint = "Give this user permission to read it, or remove it from the input's `files`."
        if isinstance(error, IsADirectoryError):
            hint = "Use a pattern for the files in it, such as DIR/**/*.txt."
        raise DataError(f"Cannot read {file.path}: {error.strerror or error}.", hint) from None
    with stream:
        unpack = _UNPACKERS.get(file.path.suffix.lower())
        if unpack and not size_of(file.path):  # gzip takes it for an archive of nothing
            raise DataError(f"{file.path} is truncated: it has 0 bytes.", "Download the file again.")
        yield unpack(stream) if unpack else stream


def _unpack_zstd(stream: BinaryIO) -> Any:
    return load_library("backports.zstd", "Reading *.zst needs the package `backports.zstd`.").open(stream)


_UNPACKERS: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _unpack_zstd}


def _decode(value: Any, kind: Any) -> Any:
    """A value of Parquet as JSON lines have it: decodes text of the type JSON, and drops the null fields of objects.

    Parquet gives all objects of a column the same fields; those that an object does not have are null.
    """
    import pyarrow

    if isinstance(value, dict):
        return {field.name: _decode(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if isinstance(value, list) and not pyarrow.types.is_map(kind):
        return [_decode(item, kind.value_type) for item in value]
    return json.loads(value) if isinstance(kind, pyarrow.JsonType) and value is not None else value


def _read_lines(file: SourceFile) -> Iterator[tuple[str, Any]]:
    """The lines of a file of JSON lines. A file of one array, as Alpaca's data, is read like one line for each item."""
    path, number, has_records = str(file.path), 0, False
    with _open_stream(file) as stream:
        while line := _read_checked(stream.readline, file, f" after line {number}"):
            number += 1
            if not has_records and _ARRAY.match(line):
                yield from _read_array(line + _read_checked(stream.read, file, f" after line {number}"), file)
            elif line.removeprefix(BOM_UTF8).strip():
                has_records = True
                yield f"{path}, line {number}", line


def _read_array(content: bytes, file: SourceFile) -> Iterator[tuple[str, Any]]:
    try:
        items = json.loads(content)
    except (ValueError, RecursionError) as error:
        hint = "Write one object on each line, or one array of objects."
        raise DataError(f"{file.path} is not a JSON array: {error}.", hint) from None
    for number, item in enumerate(items):
        yield f"{file.path}, item {number}", json.dumps(item).encode()


def _check_names(names: list[str], place: str) -> list[str]:
    """The names of a CSV file's columns, after a check."""
    check_unicode("".join(names), place, "Convert it (iconv -t utf-8), or remove it from the input's `files`.")
    if "" in names or len({*names}) < len(names):
        hint = "Name each column in the first row. With pandas, write the file with `index=False`."
        raise DataError(f"{place}: columns do not have a name each, or share one: {', '.join(names)}.", hint)
    return names


def check_unicode(text: str, place: str, hint: str = FIX_HINT) -> None:
    """Raises DataError for surrogates, which represent bytes that are not UTF-8, or for half a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place} is not UTF-8 text after {error.object[: error.start][-20:]!r}.", hint) from None


def _read_checked(read: Callable[[], AnyStr], file: SourceFile, where: str) -> AnyStr:
    """Calls `read`, and turns its errors into a DataError.

    A damaged file is always an error: the number of missing records is unknown, so they cannot count as skipped.
    """
    try:
        return read()
    except EOFError:
        problem = f"is truncated: its compressed data ends{where} without an end-of-stream marker."
    except Exception as error:  # each compression has its own type
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            hint = "Check the file and its permissions."
            raise DataError(f"Cannot read {file.path}{where}: {error.strerror or error}.", hint) from None
        problem = f"is damaged{where}: {error}."
    raise DataError(f"{file.path} {problem}", "Download the file again.")


def _example_field(record: bytes, field: str, place: str) -> str:
    tf = load_library("tensorflow", f"{place} is a tf.train.Example.")
    from google.protobuf.message import DecodeError

    try:
        features = tf.train.Example.FromString(record).features.feature
    except DecodeError:
        hint = f"For plain text, set text_field=None. {FIX_HINT}"
        raise DataError(f"{place} is neither JSON nor a tf.train.Example.", hint) from None
    if field not in features or len(features[field].bytes_list.value) != 1:
        raise lacks_field(sorted(features), f"{place} has no text field `{field}`", "Set text_field.")
    return features[field].bytes_list.value[0].decode("utf-8")
