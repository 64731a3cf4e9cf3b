"""A file whose map comes and goes: never read where there is no map, and what changed is never served."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import xxhash

from corpus_server.corpus import guard
from corpus_server.errors import CorpusChanged, NotStaged, ReadFailed, StoreFailed, UnreadableCorpus
from corpus_server.stores import Cache, Extent, MappedSpans, StagedFile, attached
from corpus_server.stores.download import Recorded
from corpus_server.stores.objects import Store, StoreObject

EXTENT_BYTES = 4096
CONTENT = bytes(range(1, 256)) * 40  # three extents
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
    return Cache(tmp_path / "cache", 100_000, EXTENT_BYTES)


@pytest.fixture
def file(cache: Cache, ranges: Ranges) -> Iterator[StagedFile]:
    with StagedFile(Path("a.bin"), cast("Store", ranges), WHAT, cache) as opened:
        yield opened


@pytest.fixture
def extent(file: StagedFile) -> Extent:
    """The middle one."""
    return file.extents[1]


def fill(extent: Extent) -> Path:
    cache, (key, start, stop) = extent.file.cache, extent.part
    with cache.filling(key, stop - start, urgent=False) as local:
        local.write(CONTENT[start:stop])
    return cache.extents / key / "tokens"


def bytes_of(extent: Extent) -> bytes:
    return CONTENT[extent.part.start : extent.part.stop]


def is_guarded(address: int, num_bytes: int) -> bool:
    """Tell whether every byte of a map is under guard."""
    return any(each.start <= address and address + num_bytes <= each.stop for each in guard._ranges)


def may_be_read(address: int) -> bool:
    """Tell whether a page is mapped with the right to read it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= address < stop:
            return line.split()[1].startswith("r")
    return False


@pytest.mark.parametrize("header", [0, 10, 4096, 5000])
def test_extents_can_be_read_at_the_same_addresses_while_they_are_attached(
    file: StagedFile, header: int
) -> None:
    """In any order, each at its place behind the header, whose bytes nobody reads."""
    mapped = file.map(range(header, len(CONTENT)))
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    assert len(mapped) == len(CONTENT)
    extents = file.extents
    assert [bytes_of(each) for each in extents] == [
        CONTENT[start : start + EXTENT_BYTES] for start in range(header, len(CONTENT), EXTENT_BYTES)
    ]
    for each in extents:
        assert not each.attach()
        fill(each)
    for order in (extents, extents[::-1]):
        for each in order:
            at, size = address + each.part.start, each.size_bytes
            assert not may_be_read(at)
            assert not is_guarded(at, size)
            assert each.attach()
            assert ctypes.string_at(at, size) == bytes_of(each)
            assert is_guarded(at, size)
        assert ctypes.string_at(address + header, len(CONTENT) - header) == CONTENT[header:]
        for each in order:
            assert each.detach()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_extents_of_two_orders_share_the_addresses_of_the_bytes_that_both_hold(
    file: StagedFile, order: tuple[int, ...]
) -> None:
    """Attached and detached in any order: what is attached can be read, and nothing else."""
    address = np.frombuffer(file.map(), np.uint8).ctypes.data
    extents = [Extent(file, *bounds) for bounds in ((0, 8192), (4096, len(CONTENT)), (4096, 8192))]
    attached: list[Extent] = []
    for each in extents:
        fill(each)
    for number in (*order, *order):
        each = extents[number]
        if each in attached:
            attached.remove(each)
            assert each.detach()
        else:
            attached.append(each)
            assert each.attach()
        for start, stop in ((0, 4096), (4096, 8192), (8192, len(CONTENT))):
            is_there = any(its.start <= start and stop <= its.stop for its in attached)
            assert may_be_read(address + start) == is_there
            if is_there:
                assert ctypes.string_at(address + start, stop - start) == CONTENT[start:stop]


@pytest.mark.parametrize("written", [0, 1])
def test_a_local_copy_that_was_written_to_is_found_by_whoever_shares_its_bytes(
    file: StagedFile, written: int
) -> None:
    extents = [Extent(file, 0, 8192), Extent(file, 4096, len(CONTENT))]
    paths = [fill(each) for each in extents]
    assert all(each.attach() for each in extents)
    paths[written].write_bytes(bytes(extents[written].size_bytes))
    os.utime(paths[written], ns=(1, 1))
    for each in extents:
        with pytest.raises(CorpusChanged, match="written to since it was opened"):
            each.check_unchanged()
    assert extents[written].detach()
    extents[1 - written].check_unchanged()


def reading(*extents: Extent) -> Callable[[], list[Extent]]:
    """Return what a copy reads of those that are held."""
    return lambda: list(extents)


def test_one_stays_attached_while_it_is_held(extent: Extent) -> None:
    fill(extent)
    assert extent.attach()
    mapped, other = MappedSpans([extent]), MappedSpans([extent])
    with mapped.held(reading(extent)):
        with mapped.held(reading(extent)), other.held(reading(extent)):
            assert not extent.detach()
        assert not extent.detach()
        assert extent.file.is_attached(extent)
    assert extent.detach()


def test_one_that_was_unmapped_is_mapped_anew_for_a_copy_and_others_are_told(extent: Extent) -> None:
    """As when a reader of a long response stalls; whoever unmaps extents hears of it."""
    path, told = fill(extent), list[Extent]()
    extent.file.cache.on_attached = told.append
    assert extent.attach()
    mapped = MappedSpans([extent])
    assert extent.detach()
    with mapped.held(reading(extent)):
        assert extent.file.is_attached(extent)
        assert not extent.detach()
    assert told == [extent]
    assert extent.detach()
    path.unlink()
    with pytest.raises(NotStaged), mapped.held(reading(extent)):
        pass
    assert told == [extent]


def test_nothing_of_a_closed_file_is_mapped_anew(extent: Extent) -> None:
    """Its addresses may belong to something else by then."""
    fill(extent)
    mapped = MappedSpans([extent])
    extent.file.close()
    with pytest.raises(NotStaged), mapped.held(reading(extent)):
        pass


def test_one_that_was_attached_anew_is_held_as_it_is_mapped_now(extent: Extent) -> None:
    path = fill(extent)
    assert extent.attach()
    mapped = MappedSpans([extent])
    with mapped.held(reading(extent)):
        pass
    path.write_bytes(bytes(EXTENT_BYTES))
    assert extent.detach()
    os.utime(path, ns=(10**18, 10**18))
    assert extent.attach()
    with mapped.held(reading(extent)):
        assert not extent.detach()
    assert extent.detach()


def test_one_that_is_not_attached_cannot_be_held(file: StagedFile, extent: Extent) -> None:
    fill(extent)
    assert extent.attach()
    with (
        pytest.raises(NotStaged, match=r"a\.bin\[8192:10200\] is not on this machine"),
        MappedSpans([extent, file.extents[2]]).held(reading(extent, file.extents[2])),
    ):
        pass


def test_a_local_copy_that_was_written_to_is_not_served(extent: Extent) -> None:
    path = fill(extent)
    assert extent.attach()
    extent.check_unchanged()
    path.write_bytes(bytes(EXTENT_BYTES))
    os.utime(path, ns=(1, 1))
    with pytest.raises(CorpusChanged, match=r"a\.bin\[4096:8192\]: written to since it was opened"):
        extent.check_unchanged()


def test_a_local_copy_that_the_disk_did_not_take_is_not_served(extent: Extent) -> None:
    """`Cache.sync` removes it then; whoever has it mapped may read other pages in place of its own."""
    path = fill(extent)
    assert extent.attach()
    path.unlink()
    with pytest.raises(ReadFailed, match=r"a\.bin\[4096:8192\]: its copy was taken out of the cache"):
        extent.check_unchanged()


def test_pages_that_the_disk_did_not_deliver_are_not_served(file: StagedFile, extent: Extent) -> None:
    """Until the extent is attached anew; others are."""
    other = file.extents[0]
    file.map()
    for each in (extent, other):
        fill(each)
        assert each.attach()
    (guarded,) = [each for each in guard._ranges if each.start == file._address + extent.part.start]
    guarded.num_faults += 1
    with pytest.raises(ReadFailed, match=r"a\.bin\[4096:8192\]: the cache's disk did not deliver 1 pages"):
        extent.check_unchanged()
    other.check_unchanged()
    assert extent.detach()
    assert extent.attach()
    extent.check_unchanged()


def looked_at(extent: Extent) -> MappedSpans:
    """Return an attached extent that was held, and so looked at, a moment ago."""
    assert extent.attach()
    mapped = MappedSpans([extent])
    with mapped.held(reading(extent)):
        pass
    return mapped


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody look for an hour, unless something says so."""
    monkeypatch.setattr(attached, "LOOK_SECONDS", 3600.0)


@pytest.mark.usefixtures("seldom")
@pytest.mark.parametrize("during", ["the copy", "nothing"])
def test_a_copy_of_what_another_process_gave_up_is_refused_at_once(extent: Extent, during: str) -> None:
    """`Cache.mark_wrong` and a failed `Cache.sync` give up what others have mapped."""
    cache = extent.file.cache
    other = Cache(cache.folder, 100_000, EXTENT_BYTES)
    fill(extent)
    mapped = looked_at(extent)

    def give_up() -> None:
        other.mark_wrong("o", "0" * 32, [extent.part.key])

    before, copy = (give_up, int) if during == "nothing" else (int, give_up)
    before()
    with pytest.raises(ReadFailed, match="its copy was taken out of the cache"), mapped.held(reading(extent)):
        copy()
    assert not extent.file.is_surely_good(extent, extent.file.sign())


@pytest.mark.usefixtures("seldom")
def test_pages_that_read_as_zeros_are_refused_at_once(file: StagedFile, extent: Extent) -> None:
    """The disk lost them, or somebody cut the file; copies of other extents are right."""
    assert guard.install()
    address = np.frombuffer(file.map(), np.uint8).ctypes.data
    other = file.extents[0]
    path, _ = fill(extent), fill(other)
    mapped, theirs = looked_at(extent), looked_at(other)
    assert other.attach()
    both = MappedSpans([other, extent])
    with both.held(reading(other, extent)):
        pass
    os.truncate(path, 0)
    with pytest.raises(CorpusChanged, match="4096 bytes at opening, 0 now"), mapped.held(reading(extent)):
        assert ctypes.string_at(address + extent.start, 16) == bytes(16)
    for _ in range(2):  # whoever holds it, until it is attached anew
        with pytest.raises(CorpusChanged), both.held(reading(other, extent)):
            pass
        with pytest.raises(CorpusChanged), mapped.held(reading(extent)):
            pass
        with both.held(reading(other)), theirs.held(reading(other)):
            assert ctypes.string_at(address, EXTENT_BYTES) == bytes_of(other)


def test_a_copy_of_what_another_program_changed_is_refused_after_the_next_look(
    extent: Extent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "LOOK_SECONDS", 0.0)
    path = fill(extent)
    mapped = looked_at(extent)
    path.write_bytes(bytes(EXTENT_BYTES))
    with pytest.raises(CorpusChanged, match="written to since it was opened"), mapped.held(reading(extent)):
        pass


def bring(extent: Extent) -> None:
    with ThreadPoolExecutor(1) as fetchers:
        extent.stage(fetchers, threading.Event(), urgent=True, on_bytes=lambda num_bytes: None)


@pytest.mark.parametrize("header", [0, 100], ids="header-{}".format)
def test_recorded_hashes_are_checked_of_each_extent_as_it_comes(
    ranges: Ranges, file: StagedFile, header: int
) -> None:
    """A block is an extent, also behind a header: so nothing else is fetched."""
    file.map(range(header, len(CONTENT)))
    digests = [xxhash.xxh3_128_hexdigest(bytes_of(each)) for each in file.extents]
    digests[1] = "0" * 32
    file.recorded.append(Recorded(header, len(CONTENT) - header, "".join(digests), EXTENT_BYTES))
    bring(file.extents[0])
    with pytest.raises(
        StoreFailed, match=f"block 1, bytes {header + 4096} on, differs from its recorded hash"
    ):
        bring(file.extents[1])
    bring(file.extents[2])
    assert [each.is_cached for each in file.extents] == [True, False, True]
    assert ranges.asked == [each.part[1:] for each in file.extents]


def test_recorded_hashes_of_runs_that_extents_cut_are_checked_with_what_is_missing(
    ranges: Ranges, file: StagedFile
) -> None:
    """Two runs with other bytes between them; the second one lies in all three extents."""
    file.map(range(len(CONTENT)))
    for start, stop in ((10, 500), (1000, 9000)):
        digest = xxhash.xxh3_128_hexdigest(CONTENT[start:stop])
        file.recorded.append(Recorded(start, stop - start, digest))
    for each in file.extents:
        ranges.asked.clear()
        bring(each)
        assert {(each.part.stop, 9000), (1000, each.part.start)} & set(ranges.asked)
    file.recorded[1] = Recorded(1000, 8000, "0" * 32)
    file.extents[1].discard()
    with pytest.raises(StoreFailed, match="block 0, bytes 1000 on, differs"):
        bring(file.extents[1])


class LikeS3(StoreObject):
    """An object whose ETag is taken for the MD5 of its bytes, as in S3."""

    @property
    def md5(self) -> str | None:
        assert self.etag is not None
        return self.etag.strip('"')


def like_s3(cache: Cache, ranges: Ranges, md5: str) -> StagedFile:
    about = {"url": "s3://bucket/a.bin", "path": "a.bin", "size_bytes": len(CONTENT), "modified": ""}
    return StagedFile(Path("a.bin"), cast("Store", ranges), LikeS3(**about, etag=f'"{md5}"'), cache)


def test_the_md5_of_an_object_is_checked_when_all_of_it_is_there(cache: Cache, ranges: Ranges) -> None:
    """A header, which is in no extent, is fetched for it."""
    with like_s3(cache, ranges, hashlib.md5(CONTENT).hexdigest()) as file:
        file.map(range(100, len(CONTENT)))
        for each in file.extents:
            bring(each)
        assert ranges.asked[-1] == (0, 100)
        assert all(each.attach() for each in file.extents)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_md5_is_checked_when_extents_of_several_orders_hold_all_of_it(
    cache: Cache, ranges: Ranges, order: tuple[int, ...]
) -> None:
    """They overlap; the object is refused, and all of them are removed."""
    with like_s3(cache, ranges, "0" * 32) as file:
        extents = [Extent(file, *bounds) for bounds in ((0, 4096), (0, 8192), (4096, len(CONTENT)))]
        for number in order[: max(order.index(2), 1)]:
            bring(extents[number])
        with pytest.raises(StoreFailed, match="its bytes have the MD5"):
            bring(extents[order[max(order.index(2), 1)]])
        assert not any(cache.has(each.part.key) for each in extents)


def test_an_object_with_another_md5_is_refused_from_then_on(cache: Cache, ranges: Ranges) -> None:
    """By everybody, until its mark is removed; what others have mapped of it is served no more."""
    with like_s3(cache, ranges, "0" * 32) as file, like_s3(cache, ranges, "0" * 32) as other:
        for each in file.extents[:2]:
            bring(each)
        theirs = other.extents[0]
        assert theirs.attach()
        refused = pytest.raises(StoreFailed, match=r"its bytes have the MD5 \w{32}, its ETag says 0000")
        with refused:
            bring(file.extents[2])
        assert not any(cache.has(each.part.key) for each in file.extents)
        with pytest.raises(ReadFailed, match="it is wrong"):
            theirs.check_unchanged()
        ranges.asked.clear()
        for each in (*file.extents, *other.extents):
            with refused:
                bring(each)
        assert ranges.asked == []
        (mark,) = (cache.folder / "wrong").iterdir()
        mark.unlink()
        bring(file.extents[0])
        file.recorded.append(Recorded(0, len(CONTENT), xxhash.xxh3_128_hexdigest(CONTENT)))
        mark.write_text("0")  # recorded hashes count more
        bring(file.extents[1])


def test_a_map_that_cannot_be_made_is_an_error(
    file: StagedFile, extent: Extent, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def mmap(self, *arguments: object) -> int:
            return 2**64 - 1

    fill(extent)
    file.map()
    with monkeypatch.context() as patch:
        patch.setattr(guard, "libc", Full)
        with pytest.raises(UnreadableCorpus, match=r"cannot be mapped.*vm\.max_map_count"):
            extent.attach()
    assert not file.is_attached(extent)


@pytest.mark.parametrize("num_bytes", [EXTENT_BYTES - 100, 0, EXTENT_BYTES + 1])
def test_a_copy_of_another_size_is_thrown_away(
    cache: Cache, ranges: Ranges, extent: Extent, num_bytes: int
) -> None:
    """The end of a last page that was cut off would read as zeros, and no fault would tell."""
    extent.file.map()
    os.truncate(fill(extent), num_bytes)
    assert not extent.attach()
    assert not cache.has(extent.part.key)
    os.truncate(fill(extent), num_bytes)
    assert extent.file.read(5000, 10) == CONTENT[5000:5010]
    assert ranges.asked == [(5000, 5010)]


def test_bytes_are_read_from_the_extents_that_are_there_and_else_from_the_store(
    ranges: Ranges, file: StagedFile
) -> None:
    file.map(range(10, 10_100))
    fill(file.extents[1])
    assert file.read(10, 10_090) == CONTENT[10:10_100]
    assert file.read(4200, 100) == CONTENT[4200:4300]
    assert ranges.asked == [(10, 4106), (8202, 10_100)]
