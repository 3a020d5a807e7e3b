"""Reads ArrayRecord files in another process, because the library crashes its process at some damaged files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from paxcli.errors import DataError
from paxcli.inputs.processes import hold_signals

_RECORDS_PER_READ = 1024
_LENGTH_BYTES = 8
_END = b"\xff" * _LENGTH_BYTES


def read_records(path: str) -> Iterator[bytes]:
    """The records of a local ArrayRecord file, in order.

    Raises:
      DataError: It is not such a file, or it is damaged.
    """
    command = [sys.executable, "-m", "paxcli.inputs.array_records", path]
    with hold_signals():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None and process.stderr is not None
        try:
            while (header := process.stdout.read(_LENGTH_BYTES)) != _END:
                length = int.from_bytes(header, "little")
                record = process.stdout.read(length)
                if len(header) < _LENGTH_BYTES or len(record) < length:
                    reason = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
                    problem = f"is damaged, or is not an ArrayRecord file: {reason or 'reading it ends a process'}"
                    raise DataError(f"{path} {problem}.", "Download or write the file again.")
                yield record
        finally:
            process.kill()


def _write_records(path: str) -> None:
    """Writes all records to stdout, each after its length."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path)
    if not reader.ok():  # it would have no records
        reader.close()  # raises the reason
        sys.exit("it cannot be opened")
    for start in range(0, reader.num_records(), _RECORDS_PER_READ):
        for record in reader.read(start, min(start + _RECORDS_PER_READ, reader.num_records())):
            sys.stdout.buffer.write(len(record).to_bytes(_LENGTH_BYTES, "little") + record)
    sys.stdout.buffer.write(_END)


if __name__ == "__main__":
    _write_records(sys.argv[1])
