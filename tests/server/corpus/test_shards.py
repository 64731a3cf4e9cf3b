"""A mapped file: its tokens, its changes, its end."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from corpus_server.corpus.shards import Shard
from corpus_server.errors import CorpusChanged, ReadFailed, UnreadableCorpus
from tests.corpora import (
    open_descriptors,
    rewrite_in_place,
    some_tokens,
    write_llmc,
    write_megatron,
    write_npy,
    write_raw,
)

Writer = Callable[[Path, list[int]], Path]


@pytest.mark.parametrize("write", [write_raw, write_npy, write_llmc])
def test_tokens_are_the_ones_written(tmp_path: Path, write: Writer) -> None:
    with Shard.open(write(tmp_path / "a.bin", [5, 6, 7])) as shard:
        assert shard.tokens.tolist() == [5, 6, 7]
        assert shard.name == "a.bin"
        assert shard.size_bytes == shard.data_offset + shard.data_bytes
        assert ctypes.string_at(shard.address, 6) == shard.read_data(0, 6) == shard.tokens.tobytes()
        assert not shard.tokens.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            shard.tokens.flags.writeable = True


@pytest.mark.parametrize("write", [write_raw, write_npy, write_llmc])
def test_a_shard_may_hold_no_tokens(tmp_path: Path, write: Writer) -> None:
    with Shard.open(write(tmp_path / "a.bin", [])) as shard:
        assert (shard.tokens.size, shard.tokens.dtype, shard.address) == (0, np.dtype("<u2"), 0)
        shard.check_unchanged()


def test_data_at_an_odd_offset_are_read(tmp_path: Path) -> None:
    header = b"{'descr': '<u4', 'fortran_order': False, 'shape': (2,), } \n"
    prefix = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    assert len(prefix) % 4
    (tmp_path / "a.npy").write_bytes(prefix + np.array([70000, 2], "<u4").tobytes())
    with Shard.open(tmp_path / "a.npy") as shard:
        assert shard.tokens.tolist() == [70000, 2]
        assert shard.tokens[[1, 0]].tolist() == [2, 70000]


def _truncate(path: Path) -> None:
    os.truncate(path, 2)


def _extend(path: Path) -> None:
    os.truncate(path, 100)


def _write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def _rewrite(path: Path) -> None:
    rewrite_in_place(path, b"\xff")


def _allow_reading(path: Path) -> None:
    rewrite_in_place(path, b"")
    path.chmod(0o640)


def _link(path: Path) -> None:
    rewrite_in_place(path, b"")
    path.with_name("link.bin").hardlink_to(path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_truncate, "6 bytes at opening, 2 now"),
        (_extend, "6 bytes at opening, 100 now"),
        (_write_in_place, "written to since"),
        (_rewrite, ".* rewritten with its modification time restored"),
        (_allow_reading, ".* its permissions, owner or links"),
        (_link, ".* its permissions, owner or links"),
    ],
)
def test_a_change_in_place_is_found(tmp_path: Path, change: Callable[[Path], None], what: str) -> None:
    path = write_raw(tmp_path / "a.bin", [5, 6, 7])
    with Shard.open(path, name="sub/a.bin") as shard:
        shard.check_unchanged()
        change(path)
        with pytest.raises(CorpusChanged, match=rf"^sub/a\.bin: {what}"):
            shard.check_unchanged()


def test_a_change_that_was_found_stays_found_when_the_file_is_deleted(tmp_path: Path) -> None:
    """A deleted file may have any ctime, and only the look before tells that it was rewritten."""
    path = write_raw(tmp_path / "a.bin", [5, 6, 7])
    with Shard.open(path) as shard:
        _rewrite(path)
        for prepare in (lambda: None, path.unlink):
            prepare()
            with pytest.raises(CorpusChanged, match="rewritten"):
                shard.check_unchanged()


def test_a_file_replaced_by_rename_keeps_its_old_tokens(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [5, 6, 7])
    with Shard.open(path) as shard:
        write_raw(tmp_path / "b.bin", [1, 2, 3]).replace(path)
        shard.check_unchanged()
        assert shard.tokens.tolist() == [5, 6, 7]
        path.unlink()
        shard.check_unchanged()


def test_reading_behind_a_truncation_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", some_tokens(5000))
    with Shard.open(path) as shard:
        os.truncate(path, 4000)
        assert len(shard.read_data(0, 4000)) == 4000
        with pytest.raises(CorpusChanged, match=r"10000 bytes at opening, now it ends at byte 4000"):
            shard.read_data(0, 10000)


def test_a_view_outlives_close(tmp_path: Path) -> None:
    shard = Shard.open(write_raw(tmp_path / "a.bin", [5, 6, 7]))
    view = shard.tokens[1:]
    shard.close()
    assert view.tolist() == [6, 7]
    assert (shard.tokens.size, shard.address) == (0, 0)


def test_close_frees_map_and_descriptors_and_may_be_repeated(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "marked", [[1, 2], [3]])
    before = open_descriptors()
    shard = Shard.open(path)
    assert "marked.bin" in Path("/proc/self/maps").read_text()
    shard.close()
    shard.close()
    assert open_descriptors() == before
    assert "marked.bin" not in Path("/proc/self/maps").read_text()
    with pytest.raises(ReadFailed):
        shard.check_unchanged()


def test_a_failed_opening_leaves_nothing_open(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1], dtype="uint8")
    before = open_descriptors()
    with pytest.raises(UnreadableCorpus):
        Shard.open(path)
    assert open_descriptors() == before
