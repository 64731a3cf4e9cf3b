from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from types import SimpleNamespace

import pytest

from corpus_server.errors import CorpusChanged, InvalidParameter, MissingPackage, StoreFailed
from corpus_server.stores.objects import Store, StoreObject
from tests import stores
from tests.stores import Faults, WebServer

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer({"/a/web.bin": CONTENT}) as running:
        yield running


def opened(server: WebServer) -> tuple[Store, StoreObject]:
    store = Store(f"{server.url}/a/web.bin")
    found = store.head("a/web.bin")
    assert found is not None
    return store, found


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ({}, None),
        ({"range": (1, 5)}, StoreFailed),
        ({"content": b"abc"}, StoreFailed),
        ({"content": b"abcde"}, StoreFailed),
        ({"e_tag": "other"}, CorpusChanged),
        ({"size": 9}, CorpusChanged),
    ],
    ids=str,
)
def test_only_the_range_of_the_version_is_taken(
    server: WebServer,
    monkeypatch: pytest.MonkeyPatch,
    response: dict[str, object],
    error: type[Exception] | None,
) -> None:
    """Whatever obstore lets through, and of a version that the store was asked for by name, too."""
    store, what = opened(server)
    modified = datetime.fromisoformat(what.modified)
    asked: list[dict[str, object]] = []

    def get(_: object, path: str, *, options: dict[str, object]) -> SimpleNamespace:
        asked.append(options)
        meta = {
            "path": path,
            "size": what.size_bytes,
            "e_tag": what.etag,
            "last_modified": modified,
            **response,
        }
        content = response.get("content", b"abcd")
        return SimpleNamespace(meta=meta, range=response.get("range", (0, 4)), bytes=lambda: content)

    monkeypatch.setattr(store._obstore, "get", get)
    if error is None:
        assert bytes(store.read(what, 0, 4)) == b"abcd"
    else:
        with pytest.raises(error):
            store.read(what, 0, 4)
    assert asked[0] == {"range": (0, 4), "if_match": what.etag}


@pytest.mark.parametrize(
    "url", ["http://example.com/x.bin", "https://h/x?sig=1", "https://user@h/x", "https://h/x#y", "s3:///x"]
)
def test_a_url_that_would_not_be_what_it_says_is_refused(url: str) -> None:
    with pytest.raises(InvalidParameter):
        Store(url)


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingPackage) as caught:
        Store("s3://bucket/web")
    assert caught.value.remedy == "pip install 'corpus-server[stores]'"


@pytest.mark.parametrize("change", ["version", "size", "removed"])
def test_another_version_is_refused_at_once(server: WebServer, change: str) -> None:
    store, found = opened(server)
    if change == "version":
        server.fault = Faults(stores.changed)
    elif change == "size":
        server.files["/a/web.bin"] = CONTENT + b"more"
    else:
        server.files.clear()
    with pytest.raises(CorpusChanged, match=re.escape("web.bin")):
        store.read(found, 100, 1000)
    assert len(server.gets) <= 1


def test_s3_is_listed(bucket: Callable[[dict[str, bytes]], str]) -> None:
    url = bucket({"web/0.bin": b"ab", "web/sub/1.bin": b"c", "other": b""})
    store = Store(url)
    assert {each.path for each in store.list("web", recursive=True)} == {"web/0.bin", "web/sub/1.bin"}
    assert {each.path for each in store.list("web", recursive=False)} == {"web/0.bin"}
    found = store.head("web/0.bin")
    assert found is not None
    assert (found.size_bytes, found.md5) == (2, "187ef4436122d1cc2f40dc2b92f0eba0")


def test_an_etag_names_the_same_version_with_quotes_and_without(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure's lists leave them out."""
    store, found = opened(server)
    meta = store._obstore.head(store._store, found.path)
    unquoted = {**meta, "e_tag": meta["e_tag"].strip('"')}
    monkeypatch.setattr(store._obstore, "list", lambda *about, **options: [[unquoted]])
    (listed,) = store.list("a", recursive=True)
    assert listed == found
    assert bytes(store.read(listed, 0, 10)) == CONTENT[:10]


@pytest.mark.parametrize(
    ("url", "etag", "md5"),
    [
        ("s3://bucket/a.bin", f'"{"0a" * 16}"', "0a" * 16),
        ("s3://bucket/a.bin", f'"{"0a" * 16}-2"', None),  # put in two parts
        ("s3://bucket/a.bin", None, None),
        ("https://host/a.bin", f'"{"0a" * 16}"', None),
    ],
)
def test_only_the_etag_of_s3_is_an_md5(url: str, etag: str | None, md5: str | None) -> None:
    """Other servers may make any 32 hex digits of a version."""
    what = StoreObject(url=url, path="a.bin", size_bytes=1, etag=etag, modified="")
    assert what.md5 == md5
