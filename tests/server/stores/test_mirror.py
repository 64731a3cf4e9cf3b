from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
import xxhash

from corpus_server.catalog import Catalog
from corpus_server.corpus.index import index
from corpus_server.corpus.verify import record
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import CorpusServerError, NotStaged, StoreFailed, UnreadableCorpus
from corpus_server.stores import Mirror, StagedFile, mirror
from corpus_server.stores.objects import Store, StoreObject
from tests.corpora import some_tokens, write_llmc, write_megatron, write_npy, write_raw
from tests.stores import Reply, WebServer, contents

Bucket = Callable[[Mapping[str, bytes]], str]


def served(url: str, cache_dir: Path) -> Catalog:
    return Catalog.open([CorpusSpec.parse(f"web={url}")], cache_dir=cache_dir, cache_bytes=10**9)


def write_all(folder: Path) -> Path:
    """Write a shard of each kind that has a header, each longer than the ends that are read first."""
    folder.mkdir()
    write_raw(folder / "a.bin", some_tokens(40_000))
    write_npy(folder / "b.npy", some_tokens(40_000, seed=1))
    write_llmc(folder / "c.bin", some_tokens(40_000, seed=2))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def same(url: str, local: str, cache_dir: Path) -> None:
    """Check that a corpus in a store is described as the same files on this machine, but for its address."""
    with served(url, cache_dir) as there, Catalog.open([CorpusSpec.parse(f"web={local}")]) as here:
        described = there.corpus("web").describe()
        assert described == {**here.corpus("web").describe(), "address": url.rstrip("/")}


@pytest.mark.parametrize("what", ["", "/", "/a.bin", "/*.bin", "/?.npy"])
def test_folders_files_and_patterns_are_described_as_on_this_machine(
    tmp_path: Path, bucket: Bucket, what: str
) -> None:
    folder = write_all(tmp_path / "web")
    (folder / "tokenizer.json").unlink()
    (folder / "notes.txt").write_text("large")
    url = bucket({f"deep/web/{name}": body for name, body in contents(folder).items()})
    same(f"{url}/deep/web{what}", f"{folder}{what}", tmp_path / "cache")


def test_a_split_is_chosen_as_on_this_machine(tmp_path: Path, bucket: Bucket) -> None:
    folder = tmp_path / "web"
    folder.mkdir()
    for name in ("train_0.bin", "train_1.bin", "val_0.bin"):
        write_raw(folder / name, some_tokens(1000))
    url = bucket({f"web/{name}": body for name, body in contents(folder).items()})
    same(f"{url}/web#train", f"{folder}#train", tmp_path / "cache")
    with pytest.raises(UnreadableCorpus) as caught:
        served(f"{url}/web", tmp_path / "cache")
    # The user never named the folder in the cache.
    assert f"{url}/web#train" in caught.value.detail
    assert str(tmp_path) not in caught.value.detail


def test_what_lies_beside_a_shard_comes_along(tmp_path: Path, bucket: Bucket) -> None:
    """Megatron's index, document ends, and recorded hashes, which are of the tokens behind a header."""
    folder = tmp_path / "web"
    folder.mkdir()
    write_megatron(folder / "m", [list(range(50)), list(range(20))])
    tokens = some_tokens(1000, vocabulary=50)
    write_npy(folder / "z.npy", tokens)
    index(CorpusSpec.parse(f"{folder}/z.npy,eot=7"))
    record(CorpusSpec.parse(f"{folder}/z.npy"))
    url = bucket(contents(folder))
    for name in ("m.bin", "m", "z.npy"):
        same(f"{url}/{name}", f"{folder}/{name}", tmp_path / "cache")
    with served(f"{url}/m", tmp_path / "cache") as catalog:
        assert catalog.corpus("web").document_range(1) == (50, 70)
    with served(f"{url}/z.npy", tmp_path / "cache") as catalog:
        (shard,) = catalog.corpus("web").shards
        assert isinstance(shard.file, StagedFile)
        (recorded,) = shard.file.recorded
        assert (recorded.data_offset, recorded.data_bytes) == (128, 2000)
        assert recorded.digests == xxhash.xxh3_64_hexdigest(tokens.tobytes())


@pytest.mark.parametrize("what", ["", "/token_ids_0.npy", "/b.bin", "/token*"])
def test_loss_masks_come_with_their_shards(tmp_path: Path, bucket: Bucket, what: str) -> None:
    folder = tmp_path / "web"
    folder.mkdir()
    write_raw(folder / "token_ids_0.npy", some_tokens(40_000))
    (folder / "labels_mask_0.npy").write_bytes(bytes([1]) * 40_000)
    write_raw(folder / "b.bin", some_tokens(1000))
    np.save(folder / "b.bin.mask.npy", np.zeros(1000, bool))
    record(CorpusSpec.parse(f"{folder}{what}"))
    url = bucket({f"web/{name}": body for name, body in contents(folder).items()})
    same(f"{url}/web{what}", f"{folder}{what}", tmp_path / "cache")
    assert not any("mask" in name and body for name, body in contents(tmp_path / "cache").items())
    with served(f"{url}/web{what}", tmp_path / "cache") as catalog:
        for shard in catalog.corpus("web").shards:
            assert shard.mask is not None
            assert isinstance(shard.mask.file, StagedFile)
            assert [each.data_bytes for each in shard.mask.file.recorded] == [shard.num_tokens]


def test_opening_reads_both_ends_of_each_shard_and_no_more(tmp_path: Path) -> None:
    content = some_tokens(10_000_000).tobytes()
    with WebServer({"/web.bin": content}) as server, served(f"{server.url}/web.bin", tmp_path) as catalog:
        assert catalog.corpus("web").num_tokens == 10_000_000
        assert 2 <= len(server.gets) <= 66  # the ends, and the samples between of a single shard
        assert not any(contents(tmp_path / "corpora").values())
        assert not contents(tmp_path / "shards")


class WeakServer(WebServer):
    """Its ETags are weak, so that no `If-Match` matches (RFC 9110, 13.1.1)."""

    def reply(self, path: str, headers: Message, method: str = "GET") -> Reply:
        reply = super().reply(path, headers, method)
        if "If-Match" in headers:
            return Reply(412, {}, b"")
        return replace(reply, headers={**reply.headers, "ETag": 'W/"1"'})


def test_weak_etags_are_compared_here_and_not_by_the_server(tmp_path: Path) -> None:
    content = some_tokens(100_000).tobytes()
    with WeakServer({"/web.bin": content}) as server, served(f"{server.url}/web.bin", tmp_path) as catalog:
        assert catalog.corpus("web").num_tokens == 100_000


def test_tokens_cannot_be_read_before_they_are_staged(tmp_path: Path) -> None:
    content = some_tokens(1000).tobytes()
    with (
        WebServer({"/web.bin": content}) as server,
        served(f"{server.url}/web.bin", tmp_path) as catalog,
        pytest.raises(NotStaged),
    ):
        catalog.gatherer("web").gather(np.array([[0, 0]]), 10, np.dtype("<u2"))


def test_a_corpus_that_changed_gets_another_folder(tmp_path: Path) -> None:
    with WebServer({"/web.bin": bytes(4000), "/tokenizer.json": b"{}"}) as server:
        url = f"{server.url}/web.bin,tokenizer=none"
        with served(url, tmp_path) as old:
            server.files["/web.bin"] = bytes(8000)
            with served(url, tmp_path) as new:
                assert (old.corpus("web").num_tokens, new.corpus("web").num_tokens) == (2000, 4000)
                assert len(list((tmp_path / "corpora").iterdir())) == 2
        with served(url, tmp_path):
            assert len(list((tmp_path / "corpora").iterdir())) == 1


def test_a_killed_process_leaves_no_folder(tmp_path: Path) -> None:
    with WebServer({"/web.bin": bytes(4000)}) as server:
        with served(f"{server.url}/web.bin", tmp_path):
            (target,) = (tmp_path / "corpora").iterdir()
        (tmp_path / "corpora" / f".{target.name}.abc").mkdir()
        with served(f"{server.url}/web.bin", tmp_path):
            assert list((tmp_path / "corpora").iterdir()) == [target]


def test_a_folder_that_is_being_made_is_not_taken_for_one_that_was_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever removes what a killed process left must find it locked."""
    write, made = Mirror._write, []

    def refused(self: Mirror, folder: Path, name: str, what: StoreObject) -> None:
        with pytest.raises(BlockingIOError):
            mirror._lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.append(name)
        write(self, folder, name, what)

    monkeypatch.setattr(Mirror, "_write", refused)
    with WebServer({"/web.bin": bytes(4000)}) as server, served(f"{server.url}/web.bin", tmp_path):
        assert made == ["web.bin"]


def test_another_process_may_have_made_the_folder_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Mirror._write

    def overtaken(self: Mirror, folder: Path, name: str, what: StoreObject) -> None:
        write(self, folder, name, what)
        shutil.copytree(folder, folder.with_name(folder.name.lstrip(".").rpartition(".")[0]))

    monkeypatch.setattr(Mirror, "_write", overtaken)
    with WebServer({"/web.bin": bytes(4000)}) as server, served(f"{server.url}/web.bin", tmp_path) as catalog:
        assert catalog.corpus("web").num_tokens == 2000
        assert len(list((tmp_path / "corpora").iterdir())) == 1


def test_objects_without_a_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = Store._object

    def unnamed(self: Store, meta: object) -> StoreObject:
        return replace(named(self, meta), etag=None, modified="1970-01-01T00:00:00+00:00")

    monkeypatch.setattr(Store, "_object", unnamed)
    with (
        WebServer({"/web.bin": bytes(4000)}) as server,
        pytest.raises(StoreFailed, match="neither ETag nor Last-Modified"),
    ):
        served(f"{server.url}/web.bin", tmp_path)


@pytest.mark.parametrize("path", ["web", "web/", "web/a//b", "web/./b", "web/../b", "web/..", "web/a\0b"])
def test_an_object_that_would_lie_outside_of_the_folder_is_refused(path: str) -> None:
    with pytest.raises(UnreadableCorpus, match="cannot be a file's name"):
        mirror._name_below("web", path)
    assert mirror._name_below("web", "web/a/..b") == "a/..b"


def test_markers_of_folders_are_no_shards(tmp_path: Path, bucket: Bucket) -> None:
    url = bucket({"web/": b"", "web/0.bin": bytes(2000), "web/sub/": b"", "web/sub/1.bin": bytes(2000)})
    with served(f"{url}/web", tmp_path) as catalog:
        assert [shard.name for shard in catalog.corpus("web").shards] == ["0.bin", "sub/1.bin"]


@pytest.mark.parametrize("what", ["nothing", "web/9.bin", "web/*.npy"])
def test_nothing_there_is_said(tmp_path: Path, bucket: Bucket, what: str) -> None:
    url = bucket({"web/0.bin": bytes(2000)})
    with pytest.raises(UnreadableCorpus, match=r"found nothing|matches no token file"):
        served(f"{url}/{what}", tmp_path)


def test_a_store_that_refuses_is_said(tmp_path: Path, bucket: Bucket) -> None:
    bucket({})
    with pytest.raises(StoreFailed, match="NoSuchBucket"):
        served("s3://no-such-bucket/web", tmp_path)


def test_a_web_server_has_single_files(tmp_path: Path) -> None:
    with WebServer({"/d/web.bin": bytes(2000)}) as server:
        for url in (f"{server.url}/d/", f"{server.url}/d/*.bin", f"{server.url}/d/other.bin"):
            with pytest.raises(CorpusServerError):
                served(url, tmp_path)


@pytest.mark.parametrize("written", ["a%20b.bin", "a b.bin", "%C3%A9.bin", "é.bin", "a+b.bin"])
def test_a_url_of_the_web_may_be_percent_encoded(tmp_path: Path, written: str) -> None:
    """As browsers copy it."""
    files = {name: some_tokens(1000).tobytes() for name in ("/a%20b.bin", "/%C3%A9.bin", "/a+b.bin")}
    with WebServer(files) as server, served(f"{server.url}/{written}", tmp_path) as catalog:
        assert catalog.corpora["web"].num_tokens == 1000


def test_a_signed_url_of_the_web_is_refused_and_its_signature_is_not_said(tmp_path: Path) -> None:
    with (
        WebServer({"/a.bin": some_tokens(1000).tobytes()}) as server,
        pytest.raises(CorpusServerError, match=r"one file, without a query .* got '.*/a\.bin'") as caught,
        served(f"{server.url}/a.bin?sig=abc", tmp_path),
    ):
        pass
    assert "abc" not in str(caught.value)


def test_only_urls_of_one_store_make_a_corpus() -> None:
    spec = CorpusSpec.parse("web=s3://b/x/*_train_*.bin,s3://b/y/*.bin,dtype=uint32")
    assert (spec.store, str(spec.path), spec.include) == ("s3://b", "/", ("x/*_train_*.bin", "y/*.bin"))
    assert spec.path_text() == "'s3://b/x/*_train_*.bin,s3://b/y/*.bin'"
    with pytest.raises(CorpusServerError, match="one store"):
        CorpusSpec.parse("web=s3://b/x.bin,s3://c/y.bin")
