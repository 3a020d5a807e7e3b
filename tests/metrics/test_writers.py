from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from etils import epath

from paxcli.errors import DataError
from paxcli.metrics import writers
from paxcli.metrics.writers import JsonlWriter, TensorBoardWriter, read_lines


def _lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def _scalars(directory, name):
    """(step, value) pairs as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_jsonl_has_one_object_a_line_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlWriter(path)
    loss = 2.3025851249694824  # a float32
    writer.write(1, {"loss": loss, "skipped_steps": 0, "mfu": None})
    writer.write(1, {"loss": 3.0}, "eval/held-out")
    assert _lines(path) == [
        {"step": 1, "split": "train", "loss": loss, "skipped_steps": 0, "mfu": None},
        {"step": 1, "split": "eval/held-out", "loss": 3.0},
    ]
    writer.close()


def test_values_that_are_not_finite_become_null(tmp_path):
    with closing(JsonlWriter(tmp_path / "metrics.jsonl")) as writer:
        writer.write(1, {"loss": float("nan"), "grad_norm": float("inf")})
    assert _lines(tmp_path / "metrics.jsonl") == [{"step": 1, "split": "train", "loss": None, "grad_norm": None}]


def test_a_resumed_file_equals_that_of_an_uninterrupted_run(tmp_path):
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    for path, last in ((whole, 6), (resumed, 5)):
        with closing(JsonlWriter(path)) as writer:
            for step in range(1, last + 1):
                writer.write(step, {"loss": 1 / step})
                writer.write(step, {"loss": 2 / step}, "eval/x")
    with resumed.open("a") as file:
        file.write('{"step": 6, "split": "tr')  # killed while writing
    with closing(JsonlWriter(resumed, resume_step=3)) as writer:
        for step in range(4, 7):
            writer.write(step, {"loss": 1 / step})
            writer.write(step, {"loss": 2 / step}, "eval/x")
    assert resumed.read_bytes() == whole.read_bytes()
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


@pytest.mark.parametrize("last_bytes", [8, 64, 1 << 16])
@pytest.mark.parametrize("resume_step", [0, 1, 2, 40, 99])
def test_a_long_file_is_cut_at_the_step_that_the_run_resumes_from(tmp_path, monkeypatch, resume_step, last_bytes):
    monkeypatch.setattr(writers, "_LAST_BYTES", last_bytes)
    path, lines = tmp_path / "metrics.jsonl", [f'{{"step": {step}, "split": "train"}}\n' for step in range(1, 51)]
    path.write_text("".join(lines) + '{"step": 51, "sp')
    JsonlWriter(path, resume_step).close()
    assert path.read_text() == "".join(lines[:resume_step])


@pytest.mark.parametrize(
    "torn", ["", "\n", "{}", "[1]\n", "[" * 100_000, "\x00\x00\n", '{"step"', '{"step": 4, "loss": 1.5']
)
def test_torn_lines_are_removed(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3, "split": "train"}\n' + torn)
    with closing(JsonlWriter(path, resume_step=9)) as writer:
        writer.write(4, {})
    assert [line["step"] for line in _lines(path)] == [3, 4]


@pytest.mark.parametrize("block", [9_999, 1 << 20])
def test_a_long_file_is_sampled(tmp_path, monkeypatch, block):
    monkeypatch.setattr(writers, "_NUM_SAMPLES", 100)
    monkeypatch.setattr(writers, "_BLOCK_BYTES", block)
    path = epath.Path(tmp_path / "metrics.jsonl")
    with path.open("w") as file:
        for step in range(1, 20_001):
            file.write(json.dumps({"step": step, "split": "train", "loss": 1 / step}) + "\n")
            if step % 5000 == 0:
                file.write(json.dumps({"step": step, "split": "eval/x", "loss": 1.0}) + "\n")
    found = list(read_lines(path, sample=True))
    assert [line["step"] for line in found if line["split"] == "eval/x"] == [5000, 10_000, 15_000, 20_000]
    steps = [line["step"] for line in found if line["split"] == "train"]
    assert steps == sorted(set(steps)) and steps[-1000:] == list(range(19_001, 20_001))
    early = [step for step in steps if step <= 10_000]
    assert 45 < len(early) < (55 if block > 1_000_000 else 120) and max(np.diff(early)) < 250
    assert [line["step"] for line in read_lines(path) if line["split"] == "train"] == list(range(1, 20_001))


@pytest.mark.parametrize(
    "line", [{"loss": 2}, {"split": 4, "loss": 1}, {"split": "train", "loss": "y"}, {"split": "train", "loss": [1]}]
)
def test_a_line_that_somebody_changed_is_named(tmp_path, line):
    path = epath.Path(tmp_path / "metrics.jsonl")
    path.write_text(f'{{"step": 1, "split": "train", "loss": NaN}}\n{json.dumps({"step": 2} | line)}\n')
    lines = read_lines(path)
    assert next(lines) == {"step": 1, "split": "train", "loss": None}
    with pytest.raises(DataError, match=r"metrics.jsonl has a line without metrics: \{'step': 2"):
        next(lines)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1e999", f"1{'0' * 400}"])
def test_a_number_that_is_not_finite_is_none(tmp_path, number):
    """JSON's grammar has 1e999, which Python reads as infinity: strict JSON and charts have no place for it."""
    path = epath.Path(tmp_path / "metrics.jsonl")
    path.write_text(f'{{"step": 1, "split": "train", "loss": {number}, "mfu": 1e-3}}\n')
    assert list(read_lines(path)) == [{"step": 1, "split": "train", "loss": None, "mfu": 0.001}]


def test_a_byte_order_mark_before_the_first_line_is_not_part_of_it(tmp_path):
    path = epath.Path(tmp_path / "metrics.jsonl")
    path.write_text('\ufeff{"step": 1, "split": "train"}\n{"step": 2, "split": "train"}\n')
    assert [line["step"] for line in read_lines(path)] == [1, 2]


def test_a_new_run_starts_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7, "split": "train", "loss": 1.0}\n')
    JsonlWriter(path).close()
    assert path.read_text() == ""


def test_each_line_rewrites_a_file_in_an_object_store(tmp_path, monkeypatch):
    monkeypatch.setattr(writers.epath, "Path", lambda uri: tmp_path / uri.removeprefix("store://"))
    for resume_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        with closing(JsonlWriter("store://run/metrics.jsonl", resume_step)) as writer:
            for step in steps:
                writer.write(step, {"loss": float(step)})
                assert _lines(tmp_path / "run/metrics.jsonl")[-1]["step"] == step
    assert [line["step"] for line in _lines(tmp_path / "run/metrics.jsonl")] == [1, 2, 3, 4]


def test_a_killed_process_loses_no_line(tmp_path):
    script = (
        "import os, signal, sys; from paxcli.metrics.writers import JsonlWriter\n"
        "writer = JsonlWriter(sys.argv[1])\n"
        "for step in range(1, 4): writer.write(step, {'loss': 0.5})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "metrics.jsonl"
    assert subprocess.run([sys.executable, "-c", script, str(path)]).returncode == -9
    assert [line["step"] for line in _lines(path)] == [1, 2, 3]


def test_tensorboard_reads_what_was_written(tmp_path):
    with closing(TensorBoardWriter(tmp_path)) as writer:
        writer.write(1, {"loss": 2.5, "mfu": None, "grad_norm": float("nan")})
        writer.write(2, {"loss": 1.25, "mfu": 0.5})
        writer.write(2, {"loss": 1.5}, "eval/held-out")
    assert _scalars(tmp_path / "train", "loss") == [(1, 2.5), (2, 1.25)]
    assert _scalars(tmp_path / "train", "mfu") == [(2, 0.5)]
    assert _scalars(tmp_path / "eval" / "held-out", "loss") == [(2, 1.5)]


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path):
    with closing(TensorBoardWriter(tmp_path)) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": float(step)})
    with closing(TensorBoardWriter(tmp_path, resume_step=3)) as writer:
        writer.write(4, {"loss": 40.0})
    assert _scalars(tmp_path / "train", "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_a_failing_file_is_one_warning_and_no_traceback(tmp_path):
    script = """
import resource, sys
from paxcli.metrics.writers import TensorBoardWriter

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # no file may be larger
writer = TensorBoardWriter(sys.argv[1])
for step in range(3000):  # more than its queue holds
    writer.write(step, {"loss": 1.0})
writer.close()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr == "TensorBoard events are not written: [Errno 27] File too large\n"


def test_writing_loads_no_heavy_package(tmp_path):
    script = (
        "import sys; from paxcli.metrics.writers import TensorBoardWriter\n"
        "assert 'tensorboardX' not in sys.modules\n"
        "writer = TensorBoardWriter(sys.argv[1]); writer.write(1, {'loss': 1.0}); writer.close()\n"
        "heavy = {'tensorflow', 'torch', 'jax', 'matplotlib'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
