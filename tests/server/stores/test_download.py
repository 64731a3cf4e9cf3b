from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import xxhash

from corpus_server.errors import CacheFull, CorpusChanged, StoreFailed
from corpus_server.stores import download, objects
from corpus_server.stores.cache import Cache
from corpus_server.stores.download import Part, Recorded, Stopped, stage
from corpus_server.stores.objects import Store, StoreObject
from tests import stores
from tests.stores import Fault, Faults, Reply, WebServer

CONTENT = np.random.default_rng(0).bytes(10_000)
RANGE = 1024


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RANGE_BYTES", RANGE)
    monkeypatch.setattr(download, "_READ_BYTES", 100)
    monkeypatch.setattr(objects, "_TRY_AGAIN_SECONDS", 0.01)


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer({"/web.bin": CONTENT}) as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 100_000)


class LikeS3(StoreObject):
    """An object whose ETag is the MD5 of its bytes, as in S3."""

    @property
    def md5(self) -> str | None:
        assert self.etag is not None
        return self.etag.strip('"')


def bring(
    server: WebServer, cache: Cache, *, recorded: Sequence[Recorded] = (), like_s3: bool = False
) -> StoreObject:
    store = Store(server.url)
    found = store.head("web.bin")
    assert found is not None
    if like_s3:
        fields = ("url", "path", "size_bytes", "etag", "modified")
        found = LikeS3(**{name: getattr(found, name) for name in fields})
    with ThreadPoolExecutor(4) as fetchers:
        stage(store, found, whole(found), cache, recorded, fetchers, threading.Event(), is_all=True)
    return found


def whole(what: StoreObject) -> Part:
    """Return all of an object as one part."""
    return Part(f"{what.key}/0-{what.size_bytes}", 0, what.size_bytes)


def is_empty(cache: Cache) -> bool:
    return not list(cache.extents.iterdir())


def test_an_object_comes_in_parallel_ranges(server: WebServer, cache: Cache) -> None:
    found = bring(server, cache, like_s3=True)
    assert (cache.extents / whole(found).key / "tokens").read_bytes() == CONTENT
    assert sorted(start for _, start in server.gets) == list(range(0, len(CONTENT), RANGE))


@pytest.mark.parametrize("name", ["short", "shifted", "whole", "cut", "unavailable", "forbidden"])
def test_faults_that_pass_are_ridden_out(server: WebServer, cache: Cache, name: str) -> None:
    server.fault = Faults(getattr(stores, name), most=2)
    found = bring(server, cache)
    assert (cache.extents / whole(found).key / "tokens").read_bytes() == CONTENT


def late_in_the_object(fault: Fault) -> Fault:
    """Return a fault that begins with the sixth range."""
    return lambda path, reply: fault(path, reply) if "bytes 5120-" in str(reply.headers) else None


@pytest.mark.parametrize("name", ["short", "shifted", "whole", "forbidden", "expired", "changed"])
def test_faults_that_stay_leave_nothing(server: WebServer, cache: Cache, name: str) -> None:
    server.fault = late_in_the_object(Faults(getattr(stores, name)))
    with pytest.raises((StoreFailed, CorpusChanged)):
        bring(server, cache)
    assert is_empty(cache)


def test_one_flipped_bit_is_found_by_the_md5(server: WebServer, cache: Cache) -> None:
    server.fault = late_in_the_object(Faults(stores.flipped))
    with pytest.raises(StoreFailed, match="MD5"):
        bring(server, cache, like_s3=True)
    assert is_empty(cache)


def recorded_hashes(content: bytes, *, fine: bool = False) -> list[Recorded]:
    data = content[100:9900]
    if fine:
        digests = "".join(xxhash.xxh3_64_hexdigest(data[at : at + 500]) for at in range(0, len(data), 500))
        return [Recorded(data_offset=100, data_bytes=len(data), digests=digests, block_bytes=500)]
    return [Recorded(data_offset=100, data_bytes=len(data), digests=xxhash.xxh3_128_hexdigest(data))]


@pytest.mark.parametrize("fine", [False, True])
def test_one_flipped_bit_is_found_by_recorded_hashes(server: WebServer, cache: Cache, fine: bool) -> None:
    hashes = recorded_hashes(CONTENT, fine=fine)
    server.fault = late_in_the_object(Faults(stores.flipped))
    with pytest.raises(StoreFailed, match="recorded hash"):
        bring(server, cache, recorded=hashes)
    assert is_empty(cache)
    server.fault = lambda path, reply: None
    assert cache.has(whole(bring(server, cache, recorded=hashes)).key)


def test_recorded_hashes_count_more_than_an_etag_that_is_no_md5(
    server: WebServer, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LikeS3, "md5", "0" * 32)
    with pytest.raises(StoreFailed, match="MD5"):
        bring(server, cache, like_s3=True)
    bring(server, cache, like_s3=True, recorded=recorded_hashes(CONTENT))


def test_a_version_that_changes_meanwhile_is_never_mixed(server: WebServer, cache: Cache) -> None:
    def exchange(path: str, reply: Reply) -> None:
        if "bytes 3072-" in str(reply.headers):
            server.files["/web.bin"] = bytes(len(CONTENT))

    server.fault = exchange
    with pytest.raises(CorpusChanged):
        bring(server, cache)
    assert is_empty(cache)


def test_stopping_gives_up(server: WebServer, cache: Cache) -> None:
    store, stopping = Store(server.url), threading.Event()
    found = store.head("web.bin")
    assert found is not None
    stopping.set()
    with ThreadPoolExecutor(4) as fetchers, pytest.raises(Stopped):
        stage(store, found, whole(found), cache, (), fetchers, stopping, is_all=True)
    assert is_empty(cache)


def test_a_range_under_way_is_waited_for_after_another_has_failed(cache: Cache) -> None:
    """It writes to a descriptor whose number would soon mean another file."""
    second_began, second_ended = threading.Event(), threading.Event()

    class Failing:
        def read(self, what: StoreObject, start: int, stop: int) -> memoryview:
            if start == 0:
                second_began.wait(60)
                raise StoreFailed("the first range does not come")
            second_began.set()
            time.sleep(0.2)
            second_ended.set()
            return memoryview(bytes(stop - start))

    what = StoreObject(url="s3://bucket/a", path="a", size_bytes=2 * RANGE, etag=None, modified="")
    with ThreadPoolExecutor(2) as fetchers:
        with pytest.raises(StoreFailed, match="the first range"):
            stage(
                cast("Store", Failing()),
                what,
                whole(what),
                cache,
                (),
                fetchers,
                threading.Event(),
                is_all=True,
            )
        assert second_ended.is_set()


def test_what_the_disk_takes_in_parts_is_whole(
    server: WebServer, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, content, offset: write(fd, content[:300], offset))
    found = bring(server, cache)
    assert (cache.extents / whole(found).key / "tokens").read_bytes() == CONTENT


def test_what_the_disk_does_not_return_is_not_taken_for_hashed(
    server: WebServer, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:60]], offset))
    with pytest.raises(CacheFull, match="the disk did not return what was written to it"):
        bring(server, cache, like_s3=True)
    assert is_empty(cache)


def test_without_room_nothing_is_fetched(server: WebServer, tmp_path: Path) -> None:
    with pytest.raises(CacheFull):
        bring(server, Cache(tmp_path / "small", 9_999))
    assert server.gets == []


def test_an_empty_object_is_no_exception(cache: Cache) -> None:
    with WebServer({"/web.bin": b""}) as server:
        assert cache.has(whole(bring(server, cache)).key)


def test_versions_have_keys_of_their_own(server: WebServer) -> None:
    found = Store(server.url).head("web.bin")
    assert found is not None
    others = [replace(found, etag="other"), replace(found, size_bytes=1), replace(found, url="other")]
    assert len({found.key, *(each.key for each in others)}) == 4
