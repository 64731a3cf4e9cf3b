"""An S3 server and buckets for the tests of one worker."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.stores import s3_client, s3_server

pytest.importorskip("obstore")


@pytest.fixture(scope="session")
def s3_environment() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def bucket(
    s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Mapping[str, bytes]], str]:
    """Put objects into a new bucket and return its URL; obstore finds it in this process and its children."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    client = s3_client(s3_environment)

    def fill(objects: Mapping[str, bytes]) -> str:
        name = f"bucket-{os.getpid()}-{next(_numbers)}"
        client.create_bucket(Bucket=name)
        for key, body in objects.items():
            client.put_object(Bucket=name, Key=key, Body=body)
        return f"s3://{name}"

    return fill


_numbers = itertools.count()
