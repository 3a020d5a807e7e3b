"""A run in a bucket, of a server that speaks as Google's does."""

from __future__ import annotations

import json
import pathlib
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import create_server

BRIEF = ("--set", "eval_inputs=[]", "--set", "num_layers=1", "--set", "checkpoint.save_interval_steps=2")


download = objects.download


def download_with_generation(request: Any, response: Any, storage: Any, *_: Any, **__: Any) -> None:
    """As Google's server answers: without this header, TensorStore cannot write what it has read."""
    download(request, response, storage)
    if response.status < 300:
        name = request.params["bucket_name"], request.params["object_id"]
        response["x-goog-generation"] = storage.get_file_obj(*name)["generation"]


@pytest.fixture
def of_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Environment in which `gs://mine` is a bucket in this process's memory."""
    monkeypatch.setattr(objects, "download", download_with_generation)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="mine")
    server.start()
    address = f"http://127.0.0.1:{port}"
    yield {
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "TENSORSTORE_GCS_REQUEST_CONCURRENCY": "1",  # the server mixes up generations that are written at one time
    }
    server.stop()


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_where_it_was(pax, of_bucket, tmp_path: pathlib.Path) -> None:
    first = pax(
        "train", "tiny-synthetic", *BRIEF, "--set", "num_train_steps=2", "--run-dir", "gs://mine/run", env=of_bucket
    )
    assert first.returncode == 0, first.stderr
    more = ("--set", "num_train_steps=4", "--allow-changed", "--run-dir", "gs://mine/run", "--json")
    second = pax("train", "gs://mine/run", *more, env=of_bucket)
    assert second.returncode == 0, second.stderr
    assert "Resuming gs://mine/run at step 2." in second.stderr
    assert json.loads(second.stdout)["steps"] == 4
    shown = pax("recipes", "show", "gs://mine/run", env=of_bucket)
    assert "num_train_steps: 4" in shown.stdout, shown.stdout + shown.stderr
    assert list(tmp_path.iterdir()) == []  # nothing of it is on this machine


@pytest.mark.slow
def test_a_checkpoint_in_a_bucket_is_deleted(pax, of_bucket) -> None:
    first = pax(
        "train", "tiny-synthetic", *BRIEF, "--set", "num_train_steps=4", "--run-dir", "gs://mine/run", env=of_bucket
    )
    assert first.returncode == 0, first.stderr
    deleted = pax("checkpoints", "rm", "gs://mine/run", "--step", "2", env=of_bucket)
    assert deleted.returncode == 0, deleted.stderr
    with urllib.request.urlopen(f"{of_bucket['STORAGE_EMULATOR_HOST']}/storage/v1/b/mine/o?maxResults=1000") as reply:
        names = [item["name"] for item in json.load(reply)["items"]]
    assert {name.split("/")[2] for name in names if name.startswith("run/checkpoints/")} - {""} == {"4"}
    resumed = pax("train", "gs://mine/run", "--set", "num_train_steps=5", "--allow-changed", env=of_bucket)
    assert "Resuming gs://mine/run at step 4." in resumed.stderr, resumed.stderr
