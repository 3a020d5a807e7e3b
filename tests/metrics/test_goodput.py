"""The accounts of a run's wall time sum to what a clock of the test measures."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time

import pytest
from etils import epath
from gcsfs.retry import HttpError

from paxcli.metrics.goodput import CAUSES, COMPILE, EVAL, INPUT_WAIT, LOST, SAVE, STEP, STOPPED, Goodput


def start(directory: pathlib.Path, resume_step: int = 0, steps: int = 0, seconds: float = 0.0) -> dict:
    """One start of a run that trains for so many steps and seconds; the file that it leaves."""
    with contextlib.closing(Goodput(epath.Path(directory), resume_step)) as goodput:
        with goodput.time(COMPILE):
            time.sleep(0.05)
        goodput.switch(STEP)
        time.sleep(seconds)
        goodput.step = resume_step + steps
    return json.loads((directory / "goodput.json").read_text())


def check_sums(report: dict) -> None:
    """Every second from the beginning of the first start to the end of the last one has one cause."""
    assert set(report["seconds"]) == set(CAUSES)
    starts = report["starts"]
    assert sum(report["seconds"].values()) == pytest.approx(report["wall_seconds"], abs=1e-6)
    assert starts[-1]["ended"] - starts[0]["began"] == pytest.approx(report["wall_seconds"], abs=1e-5)
    assert report["goodput"] == pytest.approx(report["seconds"][STEP] / report["wall_seconds"])
    assert all(seconds >= -1e-9 for seconds in report["seconds"].values())


def test_every_second_has_one_cause(tmp_path):
    with contextlib.closing(Goodput(epath.Path(tmp_path), 0)) as goodput:
        begin = time.perf_counter()
        goodput.switch(STEP)
        time.sleep(0.1)
        with goodput.time(EVAL):
            time.sleep(0.1)
            with goodput.time(SAVE):  # a signal saves within an evaluation
                time.sleep(0.2)
        goodput.add_input_wait(0.04)
        found = goodput.report()["seconds"]
        elapsed = time.perf_counter() - begin
    assert found[EVAL] >= 0.1 and found[SAVE] >= 0.2 and found[INPUT_WAIT] == 0.04 and found[STEP] >= 0.05
    assert sum(found[cause] for cause in (STEP, INPUT_WAIT, EVAL, SAVE)) == pytest.approx(elapsed, abs=0.05)
    check_sums(json.loads((tmp_path / "goodput.json").read_text()))


def test_restarts_are_appended_and_repeated_steps_are_lost(tmp_path):
    start(tmp_path, 0, steps=10, seconds=0.2)
    time.sleep(0.3)
    begin = time.time()
    report = start(tmp_path, 4, steps=8, seconds=0.1)  # steps 5 to 10 of the first start are repeated
    check_sums(report)
    first, second = report["starts"]
    assert 0.3 <= second["seconds"][STOPPED] <= 0.3 + time.time() - begin
    assert first["seconds"][LOST] == pytest.approx(1.5 * first["seconds"][STEP])  # 6 steps to 4
    assert (first["last_step"], second["first_step"], second["last_step"]) == (4, 4, 12)
    report = start(tmp_path, 2)  # an older checkpoint: all of the second start is lost, and more of the first
    check_sums(report)
    first, second, _ = report["starts"]
    assert second["seconds"][STEP] == 0 and second["seconds"][LOST] >= 0.1
    assert first["seconds"][LOST] == pytest.approx(4 * first["seconds"][STEP]) and first["last_step"] == 2


def test_the_file_grows_while_the_run_does_and_survives_a_kill(tmp_path):
    goodput = Goodput(epath.Path(tmp_path), 0)
    goodput.switch(EVAL)
    time.sleep(2.3)
    report = json.loads((tmp_path / "goodput.json").read_text())  # what a SIGKILL now would leave
    assert report["seconds"][EVAL] > 1.8
    goodput.close()


@pytest.mark.parametrize(
    "content", ["", "{}", '{"starts": [{"began": "x"}]}', '{"starts": 3}', "\ud83d", "[" * 100_000]
)
def test_a_damaged_file_does_not_stop_a_run(tmp_path, content):
    (tmp_path / "goodput.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    check_sums(start(tmp_path, 3))


def test_only_the_writing_process_of_a_job_writes(tmp_path):
    with contextlib.closing(Goodput(None, 0)) as goodput:
        goodput.switch(STEP)
    assert goodput.report()["goodput"] > 0 and list(tmp_path.iterdir()) == []


def test_accounting_costs_microseconds(tmp_path):
    with contextlib.closing(Goodput(epath.Path(tmp_path), 0)) as goodput:
        begin = time.perf_counter()
        for _ in range(1000):
            goodput.switch(INPUT_WAIT)
            goodput.switch(STEP)
        assert (time.perf_counter() - begin) / 1000 < 1e-4


def test_a_bucket_that_fails_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def fail(path: object, text: str) -> None:
        raise HttpError({"code": 503, "message": "unavailable"})

    monkeypatch.setattr("paxcli.metrics.goodput.replace_text", fail)
    Goodput(epath.Path(tmp_path), 0).close()
    assert "unavailable" in caplog.text
