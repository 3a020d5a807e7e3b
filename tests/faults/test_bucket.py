"""A run in a bucket that fails: a part of the requests is repeated, and no answer at all ends the run in time."""

from __future__ import annotations

import json
import pathlib
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from gcp_storage_emulator import server, storage

from tests.faults.processes import Process, wait_until
from tests.jobs import free_port
from tests.training.runs import small

METHODS = ("do_GET", "do_POST", "do_PUT", "do_DELETE")
RUN = "gs://mine/run"


class Bucket:
    """A bucket of a server that speaks as Google's does, in this process's memory; it can fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.failing, self.failed, self._chances = 0.0, 0, random.Random(0)
        self._lock, self._generation = threading.Lock(), None
        for method in METHODS:
            monkeypatch.setattr(server.RequestHandler, method, self._flaky(getattr(server.RequestHandler, method)))
        monkeypatch.setattr(storage.Storage, "get_file_obj", self._note_generation(storage.Storage.get_file_obj))
        monkeypatch.setattr(server.Response, "close", self._add_generation(server.Response.close))
        port = free_port()
        self.server = server.create_server("127.0.0.1", port, in_memory=True, default_bucket="mine")
        self.server.start()
        address = f"http://127.0.0.1:{port}"
        self.env = {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "TENSORSTORE_GCS_REQUEST_CONCURRENCY": "1",
        }

    def _flaky(self, handle: Callable) -> Callable:
        def answer(handler: server.RequestHandler) -> None:
            if self._chances.random() >= self.failing:
                with self._lock:
                    self._generation = None
                    return handle(handler)
            self.failed += 1
            handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
            time.sleep(self._chances.uniform(0, 0.2))
            return handler.send_error(503)

        return answer

    def _note_generation(self, get: Callable) -> Callable:
        def get_and_note(*arguments: object, **options: object) -> dict:
            found = get(*arguments, **options)
            self._generation = found["generation"]
            return found

        return get_and_note

    def _add_generation(self, close: Callable) -> Callable:
        """The server leaves out a header of downloads that TensorStore needs to write a file again."""

        def add_and_close(response: server.Response) -> None:
            if self._generation is not None:
                response["x-goog-generation"] = self._generation
            close(response)

        return add_and_close


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    found = Bucket(monkeypatch)
    yield found
    found.server.stop()


def _train(folder: pathlib.Path, bucket: Bucket, name: str, **changes: object) -> Process:
    options = small(**{"num_train_steps": 20, "summary_interval_steps": 5, "eval_inputs": "[]", **changes})
    return Process(folder, "train", "tiny-synthetic", *options, f"--run-dir={RUN}-{name}", env=bucket.env, name=name)


def _losses(folder: pathlib.Path, bucket: Bucket, name: str) -> dict[int, float]:
    """Step → loss, and the number of repeated operations at step -1."""
    address = f"{bucket.env['STORAGE_EMULATOR_HOST']}/storage/v1/b/mine/o/run-{name}%2Fmetrics.jsonl?alt=media"
    with urllib.request.urlopen(address) as file:
        lines = [json.loads(line) for line in file]
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"} | {
        -1: lines[-1]["storage_retries"]
    }


@pytest.mark.slow
@pytest.mark.faults
def test_a_bucket_that_fails_a_fifth_of_all_requests(tmp_path, bucket, counts):
    with _train(tmp_path, bucket, "sound") as process:
        code, report = process.end()
    assert code == 0, report
    bucket.failing = 0.2
    with _train(tmp_path, bucket, "flaky") as process:
        code, report = process.end(600)
    assert code == 0, report
    bucket.failing = 0.0
    sound, flaky = _losses(tmp_path, bucket, "sound"), _losses(tmp_path, bucket, "flaky")
    assert sound.pop(-1) == 0
    flaky.pop(-1)  # any number: gcsfs and TensorStore repeat most requests themselves
    assert flaky == sound and bucket.failed > 10
    counts.add("bucket that fails 20 % of the requests", "run equal")


@pytest.mark.slow
@pytest.mark.faults
def test_a_bucket_that_stops_to_answer_ends_the_run_in_time(tmp_path, bucket, counts):
    limit = 30.0
    with _train(tmp_path, bucket, "lost", num_train_steps=100_000, storage_timeout_seconds=limit) as process:
        wait_until(lambda: "step 30 " in process.err.read_text() + process.out.read_text(), process)
        bucket.failing, started = 1.0, time.monotonic()
        code, report = process.end(120)
        seconds = time.monotonic() - started
    assert code == 4, report
    assert "The bucket did not answer for 30 s" in report and seconds < limit + 10
    bucket.failing = 0.0
    with _train(tmp_path, bucket, "lost", num_train_steps=100_000, storage_timeout_seconds=limit) as process:
        wait_until(lambda: "Resuming" in process.err.read_text() + process.out.read_text(), process)
    counts.add("bucket that stops to answer", "exit code 4, then resumed", seconds)
