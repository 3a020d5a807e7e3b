"""Writes the same documents in every format of TextInput."""

from __future__ import annotations

import gzip
import json
import lzma
import pathlib

import numpy as np
import pyarrow
import pyarrow.parquet
from array_record.python.array_record_module import ArrayRecordWriter
from backports import zstd
from etils import epath

from paxcli.inputs.documents import Reading
from paxcli.inputs.files import find_files
from paxcli.inputs.tokenizers import ByteTokenizer
from paxcli.inputs.tokenizing import Tokenizing, plan_parts


def write_formats(directory: pathlib.Path, texts: list[str]) -> None:
    """`all` as JSON lines, packed and not, Parquet and ArrayRecord; `part-*.bin`, token files; and `foreign.bin`."""
    for name in ("jsonl.gz", "json", "jsonl.xz", "ndjson.zst"):
        write_jsonl(directory / f"all.{name}", texts)
    table = pyarrow.table({"url": ["u"] * len(texts), "text": texts})
    pyarrow.parquet.write_table(table, directory / "all.parquet", row_group_size=3)
    write_array_record(directory / "all.arrayrecord", [json.dumps({"text": text}).encode() for text in texts])
    tokenizing = Tokenizing(Reading(), ByteTokenizer)
    parts = plan_parts(find_files([f"{directory}/*.txt"]), epath.Path(directory), bytes_per_part=300)
    assert len(parts) > 1
    assert len(list(tokenizing.write_all(parts, num_workers=0))) == len(parts)
    ids = np.concatenate([[2, *ByteTokenizer().encode(text), 1] for text in texts]).astype("<u2")
    ids.tofile(directory / "foreign.bin")
    (directory / "foreign.bin.json").write_text('{"dtype": "uint16", "vocab_size": 259, "eos_id": 1}')


def write_jsonl(path: pathlib.Path, texts: list[str]) -> None:
    """An object a line, as C4's shards have."""
    lines = "".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in texts).encode()
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(lines))


def write_array_record(path: pathlib.Path, records: list[bytes]) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
