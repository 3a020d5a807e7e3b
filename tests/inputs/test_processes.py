"""Child processes of inputs: signals to all processes leave them alone, and the end of their parent ends them."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from paxcli.inputs.array_records import read_records
from tests.inputs.formats import write_array_record

TEXT = json.dumps({"text": "some words " * 50}) + "\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_workers_end_with_their_parent(tmp_path, number):
    (tmp_path / "a.jsonl").write_text(TEXT * 20_000)
    command = [sys.executable, "-m", "paxcli", "data", "tokenize", "*.jsonl", "--out=tokens", "--num-workers=2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **pipes) as process:
        while not list(tmp_path.glob("tokens/*.tmp")):
            assert process.poll() is None
            time.sleep(0.02)
        if number == signal.SIGINT:  # Ctrl-C goes to all
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        # The pipes end when the last process that writes to them has ended.
        report = process.communicate(timeout=20)[1]
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in report


def test_array_record_survives_signals_to_all_processes(tmp_path):
    expected = [b"%d" % i * 1000 for i in range(1000)]  # more than a pipe holds
    write_array_record(tmp_path / "a.arrayrecord", expected)
    records = read_records(str(tmp_path / "a.arrayrecord"))
    first = next(records)
    children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert children
    for child in children:
        os.kill(int(child), signal.SIGINT)
        os.kill(int(child), signal.SIGTERM)
    assert [first, *records] == expected
