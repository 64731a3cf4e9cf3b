"""The bucket of tests and of the bench is, as obstore sees it, the S3 that moto serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from corpus_server.errors import CorpusChanged
from corpus_server.stores.objects import Store
from tests import stores
from tests.buckets import NAME, Bucket, Repeated
from tests.serving import RunningServer, run_here
from tests.stores import Reply

OBJECTS = {"web/000.bin": b"tokens", "web/sub/001.bin": b"more tokens", "web.idx": b"index", "other": b""}


def test_it_lists_and_reads_as_moto(
    bucket: Callable[[Mapping[str, bytes]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moto = Store(bucket(OBJECTS))
    with Bucket(objects=dict(OBJECTS)) as ours:
        for name, value in ours.environment.items():
            monkeypatch.setenv(name, value)
        store = Store(f"s3://{NAME}")
        for folder, recursive in (("", True), ("web", True), ("web", False), ("", False), ("none", True)):
            found, expected = (
                sorted(
                    (each.path, each.size_bytes, each.etag) for each in its.list(folder, recursive=recursive)
                )
                for its in (store, moto)
            )
            assert found == expected
        (what,) = store.list("web/sub", recursive=True)
        assert bytes(store.read(what, 2, 8)) == b"re tok"
        assert (store.head("web.idx") or what).size_bytes == 5
        assert store.head("web") is None
        ours.objects["web/sub/001.bin"] = b"some tokens"
        with pytest.raises(CorpusChanged):
            store.read(what, 2, 8)


def test_large_objects_take_no_memory_and_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = {f"{n}.bin": Repeated(2**28, n) for n in range(2)}
    with Bucket(objects=dict(shards)) as ours:
        for name, value in ours.environment.items():
            monkeypatch.setenv(name, value)
        store = Store(f"s3://{NAME}")
        (first, second) = sorted(store.list("", recursive=True), key=lambda each: each.path)
        assert (first.size_bytes, first.md5) == (2**29, None)
        one, other, later = (
            bytes(store.read(what, start, start + 2**20))
            for what, start in ((first, 2**28), (second, 2**28), (first, 2**28 + 2**24))
        )
        assert one == shards["0.bin"].tokens(2**27, 2**27 + 2**19).tobytes()
        assert len({one, other, later}) == 3


def test_opening_many_shards_and_describing_a_plan_takes_two_reads_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure was: a plan's description read samples of all shards again, one after another."""
    shards = {f"web/{n:03}.bin": Repeated(2**20, n) for n in range(40)}
    plan = {"seq_len": 100, "stages": [{"global_batch_size": 8, "mixture": {"web": 1.0}}]}
    with Bucket(objects=dict(shards)) as ours:
        for name, value in ours.environment.items():
            monkeypatch.setenv(name, value)
        with RunningServer(
            {"web": f"s3://{NAME}/web"}, tmp_path, arguments=("--cache-dir", str(tmp_path / "cache"))
        ) as server:
            assert len(ours.gets) == 80
            assert server.post_plan(plan).status == 200
            assert len(ours.gets) == 80


def unauthorized(reply: Reply) -> None:
    """Send 401."""
    reply.status, reply.body = 401, b"<Error><Code>Unauthorized</Code></Error>"


def too_many(reply: Reply) -> None:
    """Send 429."""
    reply.status, reply.body = 429, b"<Error><Code>TooManyRequests</Code></Error>"


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (stores.forbidden, "check the credentials"),
        (unauthorized, "check the credentials"),
        (stores.expired, "check the credentials"),
        (too_many, "asks for fewer requests"),
        (stores.unavailable, "asks for fewer requests"),
        (stores.broken, "check the network"),
        (None, "check the credentials"),
    ],
    ids=["403", "401", "expired", "429", "503", "500", "a wrong secret"],
)
def test_a_refused_list_says_what_to_check(change: Callable[[Reply], None] | None, remedy: str) -> None:
    """It is the first request: a wrong key shows there, and not where objects are read."""
    with Bucket(objects={"web/0.bin": bytes(100)}) as bucket:
        variables = bucket.environment
        if change is None:
            variables["AWS_SECRET_ACCESS_KEY"] = "another"
        else:
            bucket.fault = lambda path, reply: change(reply)
        done = run_here("inspect", f"s3://{NAME}/web", **variables)
    assert done.returncode != 0
    assert remedy in done.stderr


@pytest.mark.parametrize(
    ("url", "variables"),
    [
        ("gs://b/web", {"GOOGLE_SERVICE_ACCOUNT": "/there/is/none.json"}),
        ("az://c/web", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "no base64!"}),
    ],
    ids=["Google", "Azure"],
)
def test_a_key_that_cannot_be_used_is_no_matter_of_the_network(url: str, variables: dict[str, str]) -> None:
    done = run_here("inspect", url, **variables)
    assert done.returncode != 0
    assert "check the credentials" in done.stderr


def test_a_web_server_without_ranges_is_said() -> None:
    with stores.WebServer({"/web.bin": bytes(100_000)}) as server:
        server.fault = lambda path, reply: stores.whole(reply) if reply.status == 206 else None
        done = run_here("inspect", f"{server.url}/web.bin")
    assert done.returncode != 0
    assert "(the store, and each proxy or cache in front of it, must answer ranges" in done.stderr
