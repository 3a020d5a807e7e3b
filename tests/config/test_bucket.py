"""Which failures of operations on a bucket are repeated."""

from __future__ import annotations

import pytest
from gcsfs.retry import HttpError
from google.api_core.exceptions import Forbidden, ServiceUnavailable

from paxcli.config import bucket

OVERLOADED = [HttpError({"code": 503, "message": "unavailable"}), ServiceUnavailable("x"), ConnectionResetError("x")]
OVERLOADED += [TimeoutError("timed out"), RuntimeError("UNAVAILABLE: all retries failed")]
ANSWERS = [FileNotFoundError("gs://a/checkpoints/500"), HttpError({"code": 403, "message": "denied"}), Forbidden("x")]
ANSWERS += [FileExistsError("gs://a timed out, 503"), PermissionError("gs://a/503"), ValueError("step 500 of gs://a")]


@pytest.mark.parametrize("error", OVERLOADED, ids=repr)
def test_an_overloaded_bucket_is_asked_again(monkeypatch, error):
    monkeypatch.setattr(bucket, "_seconds", 60.0)
    failures, before = [error, error], bucket.count_retries()

    def read(name: str) -> str:
        if failures:
            raise failures.pop()
        return name

    assert bucket.repeat(read)("a") == "a"
    assert bucket.count_retries() == before + 2


@pytest.mark.parametrize("error", ANSWERS, ids=repr)
def test_an_answer_is_not_asked_for_again(monkeypatch, error):
    monkeypatch.setattr(bucket, "_seconds", 60.0)

    def read() -> None:
        raise error

    with pytest.raises(type(error)):
        bucket.repeat(read)()
