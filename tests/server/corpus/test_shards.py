"""A mapped file: its tokens, its changes, its end."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from corpus_server.corpus import guard
from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.index import index
from corpus_server.errors import CorpusChanged, ReadFailed, UnreadableCorpus
from tests.corpora import (
    open_files,
    open_shard,
    rewrite_in_place,
    some_tokens,
    spec,
    write_llmc,
    write_megatron,
    write_npy,
    write_raw,
)

Writer = Callable[[Path, list[int]], Path]


@pytest.mark.parametrize("write", [write_raw, write_npy, write_llmc])
def test_tokens_are_the_ones_written(tmp_path: Path, write: Writer) -> None:
    with open_shard(write(tmp_path / "a.bin", [5, 6, 7])) as shard:
        assert shard.tokens.tolist() == [5, 6, 7]
        assert shard.name == "a.bin"
        assert shard.size_bytes == shard.data_offset + shard.data_bytes
        assert ctypes.string_at(shard.address, 6) == shard.read_data(0, 6) == shard.tokens.tobytes()
        assert [bytes(piece) for piece in shard.pieces(1, 6, 3)] == [
            shard.read_data(1, 3),
            shard.read_data(4, 2),
        ]
        assert not shard.tokens.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            shard.tokens.flags.writeable = True


@pytest.mark.parametrize("write", [write_raw, write_npy, write_llmc])
def test_a_shard_may_hold_no_tokens(tmp_path: Path, write: Writer) -> None:
    with open_shard(write(tmp_path / "a.bin", []), in_folder=True) as shard:
        assert (shard.tokens.size, shard.tokens.dtype, shard.address) == (0, np.dtype("<u2"), 0)
        assert not shard.tokens.flags.writeable
        shard.file.check_unchanged()


def test_what_opening_is_told(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [5, 0, 7])
    index(spec(path, eot=0))
    with open_shard(path) as shard:
        assert shard.documents is not None
        assert (shard.name, shard.eot, shard.documents.num_documents) == ("a.bin", 0, 2)
    with open_shard(path, name="sub/a.bin", sidecar=False) as shard:
        assert (shard.name, shard.file.name) == ("sub/a.bin", "sub/a.bin")
        assert (shard.documents, shard.eot) == (None, None)
    stray = write_raw(tmp_path / "a.dat", [5, 0, 7])
    with open_shard(stray, dtype=np.dtype("u1")) as shard:
        assert (shard.num_tokens, shard.documents, shard.eot) == (6, None, None)
    with pytest.raises(UnreadableCorpus, match="is neither a known token file nor a known side file"):
        open_shard(stray, in_folder=True)


@pytest.mark.parametrize("write", [write_raw, write_llmc])
def test_a_cut_shard_is_one_of_fewer_tokens(tmp_path: Path, write: Writer) -> None:
    with open_shard(write(tmp_path / "a.bin", [5, 6, 7, 8])) as shard:
        shard.cut(1, 3)
        assert (shard.num_tokens, shard.data_bytes, shard.tokens.tolist()) == (2, 4, [6, 7])
        assert ctypes.string_at(shard.address, 4) == shard.read_data(0, 4) == shard.tokens.tobytes()
        shard.cut(1, 2)
        assert ctypes.string_at(shard.address, 2) == shard.read_data(0, 2) == shard.tokens.tobytes()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no such list of maps elsewhere")
def test_pages_that_are_released_are_mapped_no_longer(tmp_path: Path) -> None:
    """Their tokens are read again when they are needed."""
    tokens = some_tokens(2**20)
    with open_shard(write_raw(tmp_path / "released.bin", tokens)) as shard:
        assert (shard.tokens == tokens).all()
        shard.release(3, 3)
        assert _mapped_kib("released.bin") > 1536
        shard.release(2**18, 2**19)
        assert _mapped_kib("released.bin") <= 1536  # some kernels release larger pieces
        shard.release(0, 2**20)
        assert _mapped_kib("released.bin") == 0
        assert (shard.tokens == tokens).all()


def test_nothing_is_released_of_a_closed_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are an empty array of the process's own memory, which would lose what it holds."""
    released: list[int] = []
    shard = open_shard(write_raw(tmp_path / "a.bin", [5, 6, 7]))
    libc = SimpleNamespace(madvise=lambda address, num_bytes, advice: released.append(num_bytes))
    monkeypatch.setattr(guard, "libc", lambda: libc)
    shard.release(1, 3)
    shard.close()
    shard.release(1, 3)
    assert released == [6]


def _mapped_kib(name: str) -> int:
    """Return how much of a file's map has pages."""
    _, _, entry = Path("/proc/self/smaps").read_text().partition(f"{name}\n")
    return int(re.findall(r"^Rss: +(\d+) kB$", entry, re.MULTILINE)[0])


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
    with open_shard(path, name="sub/a.bin") as shard:
        shard.file.check_unchanged()
        change(path)
        with pytest.raises(CorpusChanged, match=rf"^sub/a\.bin: {what}"):
            shard.file.check_unchanged()


def test_a_change_that_was_found_stays_found_when_the_file_is_deleted(tmp_path: Path) -> None:
    """A deleted file may have any ctime, and only the look before tells that it was rewritten."""
    path = write_raw(tmp_path / "a.bin", [5, 6, 7])
    with open_shard(path) as shard:
        _rewrite(path)
        for prepare in (lambda: None, path.unlink):
            prepare()
            with pytest.raises(CorpusChanged, match="rewritten"):
                shard.file.check_unchanged()


def test_a_file_replaced_by_rename_keeps_its_old_tokens(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [5, 6, 7])
    with open_shard(path) as shard:
        write_raw(tmp_path / "b.bin", [1, 2, 3]).replace(path)
        shard.file.check_unchanged()
        assert shard.tokens.tolist() == [5, 6, 7]
        path.unlink()
        shard.file.check_unchanged()


def test_close_frees_map_and_descriptors_and_may_be_repeated(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "marked", [[1, 2], [3]])
    before = open_files()
    shard = open_shard(path)
    assert "marked.bin" in Path("/proc/self/maps").read_text()
    shard.close()
    shard.close()
    assert not open_files() - before
    assert "marked.bin" not in Path("/proc/self/maps").read_text()
    with pytest.raises(ReadFailed):
        shard.file.check_unchanged()


def test_an_index_does_not_stay_open_without_its_tokens(tmp_path: Path) -> None:
    class Unmappable(OpenFile):
        def map(self, data: range | None = None) -> memoryview:
            raise self.unreadable("cannot be mapped", "try again")

    path = write_megatron(tmp_path / "x", [[1, 2], [3]])
    before = open_files()
    with pytest.raises(UnreadableCorpus, match="cannot be mapped") as caught:
        open_shard(path, open_file=Unmappable)
    assert not open_files() - before
    assert caught.tb is not None  # it would keep a file open that nobody has closed
