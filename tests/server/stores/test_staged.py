"""A file whose map comes and goes: it is never read without its map, and what changed is never served."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import xxhash

from corpus_server.corpus import guard
from corpus_server.errors import CorpusChanged, ReadFailed, StoreFailed, UnreadableCorpus
from corpus_server.stores import Cache, StagedFile
from corpus_server.stores.download import Recorded
from corpus_server.stores.objects import Store, StoreObject

CONTENT = bytes(range(1, 256)) * 40
WHAT = StoreObject(url="s3://bucket/a.bin", path="a.bin", size_bytes=len(CONTENT), etag='"1"', modified="")


class Ranges:
    """A store that notes which ranges it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def read(self, what: StoreObject, start: int, stop: int) -> memoryview:
        self.asked.append((start, stop))
        return memoryview(CONTENT[start:stop])


@pytest.fixture
def ranges() -> Ranges:
    return Ranges()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 100_000)


@pytest.fixture
def file(cache: Cache, ranges: Ranges) -> Iterator[StagedFile]:
    with StagedFile(Path("a.bin"), cast("Store", ranges), WHAT, cache) as opened:
        yield opened


def fill(cache: Cache) -> Path:
    with cache.filling(WHAT.key, len(CONTENT), urgent=False) as local:
        local.write(CONTENT)
    return cache.shards / WHAT.key / "tokens"


def is_guarded(file: StagedFile) -> bool:
    """Tell whether every byte of a map is under guard."""
    start, stop = file._address, file._address + file.size_bytes
    return any(each.start <= start and stop <= each.stop for each in guard._ranges)


def may_be_read(address: int) -> bool:
    """Tell whether a page is mapped with the right to read it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= address < stop:
            return line.split()[1].startswith("r")
    return False


def test_its_tokens_can_be_read_at_the_same_addresses_while_it_is_attached(
    cache: Cache, file: StagedFile
) -> None:
    mapped = file.map()
    address = file._address
    assert not file.attach()
    fill(cache)
    for _ in range(2):
        assert not may_be_read(address)
        assert not is_guarded(file)
        assert file.attach()
        assert ctypes.string_at(address, len(CONTENT)) == CONTENT
        assert is_guarded(file)
        assert file.detach()
    assert len(mapped) == len(CONTENT)


def test_it_stays_attached_while_it_is_held(cache: Cache, file: StagedFile) -> None:
    fill(cache)
    assert file.attach()
    with file.held():
        with file.held():
            assert not file.detach()
        assert not file.detach()
        assert file.is_attached
    assert file.detach()


def test_a_local_copy_that_was_written_to_is_not_served(cache: Cache, file: StagedFile) -> None:
    path = fill(cache)
    assert file.attach()
    file.check_unchanged()
    path.write_bytes(bytes(len(CONTENT)))
    os.utime(path, ns=(1, 1))
    with pytest.raises(CorpusChanged, match=r"a\.bin: written to since it was opened"):
        file.check_unchanged()


def test_a_local_copy_that_the_disk_did_not_take_is_not_served(cache: Cache, file: StagedFile) -> None:
    """`Cache.sync` removes it then; whoever has it mapped may read other pages in place of its own."""
    path = fill(cache)
    assert file.attach()
    path.unlink()
    with pytest.raises(ReadFailed, match=r"a\.bin: the cache's disk did not take it"):
        file.check_unchanged()


def test_pages_that_the_disk_did_not_deliver_are_not_served(cache: Cache, file: StagedFile) -> None:
    """Until the file is attached anew."""
    fill(cache)
    file.map()
    assert file.attach()
    assert file._guarded is not None
    file._guarded.num_faults += 1
    with pytest.raises(ReadFailed, match=r"a\.bin: the cache's disk did not deliver 1 pages"):
        file.check_unchanged()
    assert file.detach()
    assert file.attach()
    file.check_unchanged()


def test_recorded_hashes_are_checked_when_it_is_staged(cache: Cache, file: StagedFile) -> None:
    with ThreadPoolExecutor(1) as fetchers:

        def bring(digest: str) -> None:
            file.recorded[:] = [Recorded(data_offset=0, data_bytes=len(CONTENT), digests=[digest])]
            file.stage(fetchers, threading.Event(), urgent=True, on_bytes=lambda num_bytes: None)

        with pytest.raises(StoreFailed, match="block 0, bytes 0 on, differs from its recorded hash"):
            bring("0" * 32)
        assert not file.is_cached
        bring(xxhash.xxh3_128_hexdigest(CONTENT))
    assert file.is_cached


def test_a_map_that_cannot_be_made_is_an_error(
    cache: Cache, file: StagedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def mmap(self, *arguments: object) -> int:
            return 2**64 - 1

    fill(cache)
    file.map()
    with monkeypatch.context() as patch:
        patch.setattr(guard, "libc", Full)
        with pytest.raises(UnreadableCorpus, match=r"cannot be mapped.*vm\.max_map_count"):
            file.attach()
    assert not file.is_attached


@pytest.mark.parametrize("num_bytes", [len(CONTENT) - 100, 0, len(CONTENT) + 1])
def test_a_copy_of_another_size_is_thrown_away(
    cache: Cache, ranges: Ranges, file: StagedFile, num_bytes: int
) -> None:
    """The end of a last page that was cut off would read as zeros, and no fault would tell."""
    file.map()
    os.truncate(fill(cache), num_bytes)
    assert not file.attach()
    assert not cache.has(WHAT.key)
    os.truncate(fill(cache), num_bytes)
    assert file.read(len(CONTENT) - 10, 10) == CONTENT[-10:]
    assert ranges.asked == [(len(CONTENT) - 10, len(CONTENT))]
