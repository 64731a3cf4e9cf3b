"""Opening and reading a file once, with errors that name the way out."""

from __future__ import annotations

import errno
import mmap
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corpus_server.corpus.files import OpenFile, address_of
from corpus_server.corpus.guard import GuardedRange
from corpus_server.errors import CorpusChanged, ReadFailed, UnreadableCorpus
from tests.corpora import open_files
from tests.pages import drop


def test_reads_exactly_what_was_asked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with OpenFile(tmp_path / "a") as file:
        assert (file.size_bytes, file.name) == (10, "a")
        assert (file.head(4), file.head(99)) == (b"0123", b"0123456789")
        assert (file.read(3, 5), file.read(10, 0)) == (b"34567", b"")
        buffer = bytearray(3)
        file.read_into(7, memoryview(buffer))
        assert buffer == b"789"


def test_a_file_that_ends_too_early_has_changed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with OpenFile(tmp_path / "a") as file:
        os.truncate(tmp_path / "a", 4)
        with pytest.raises(CorpusChanged, match="a: 10 bytes at opening, now it ends at byte 4"):
            file.read(0, 10)


def test_a_failing_disk_is_named(tmp_path: Path) -> None:
    """A file of the kernel that answers reads at address 0 with an I/O error stands for the disk."""
    (tmp_path / "a").write_bytes(b"0123")
    with OpenFile(tmp_path / "a") as file, Path("/proc/self/mem").open("rb") as broken:
        os.dup2(broken.fileno(), file.fd, inheritable=False)
        with pytest.raises(ReadFailed, match=r"a: reading 4 bytes at byte 0 failed: Input/output error"):
            file.read(0, 4)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system cannot tell what is in memory")
def test_a_page_that_a_fast_disk_delivers_within_the_call_was_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that waits for the disk stands for a disk that is done before the call ends."""
    (tmp_path / "a").write_bytes(os.urandom(2**20))
    drop(tmp_path / "a")
    monkeypatch.setattr(os, "RWF_NOWAIT", 0)
    with OpenFile(tmp_path / "a") as file:
        assert not file.is_resident(2**19)
        assert file.is_resident(2**19)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system cannot tell what is in memory")
def test_what_is_in_memory_is_told_and_can_be_dropped(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(2**20))
    drop(tmp_path / "a")
    with OpenFile(tmp_path / "a") as file:
        file.read(0, 2**20)
        assert file.is_resident(2**19)
        assert not file.is_resident(2**20)  # behind the end
        file.drop(0, 2**20)
        assert not file.is_resident(2**19)
    assert not file.is_resident(0)
    file.drop(0, 2**20)  # a closed file has no pages


def test_closing_twice_does_not_close_another_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    before = open_files()
    file = OpenFile(tmp_path / "a")
    file.close()
    other = OpenFile(tmp_path / "a")
    file.close()
    other.check_unchanged()
    other.close()
    assert not open_files() - before


@pytest.mark.parametrize("state", ["open", "closed"])
def test_a_process_that_froze_its_objects_ends_in_silence(tmp_path: Path, state: str) -> None:
    """`gc.freeze` keeps modules and all that they refer to until Python has taken the names out of them."""
    (tmp_path / "a").write_bytes(b"0123")
    code = (
        "import gc, json, sys; from pathlib import Path; from corpus_server.corpus.files import OpenFile\n"
        "json.kept = OpenFile(Path(sys.argv[1])); json.kept.map()\n"
        "if sys.argv[2] == 'closed': json.kept.close()\n"
        "gc.freeze()"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a", state], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "cannot be opened: No such file or directory"),
        ("null\0byte", "cannot be opened: .*embedded null"),  # worded by Python
        ("", "cannot be opened: expected a regular file, found a folder"),
        ("pipe", "cannot be opened: expected a regular file, found a named pipe"),
        ("stale", "cannot be opened: Stale file handle"),
    ],
)
def test_what_cannot_be_opened_leaves_every_descriptor_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    """Also while the error, whose traceback holds the file, is still there."""
    os.mkfifo(tmp_path / "pipe")

    def refuse(fd: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    before = open_files()
    with monkeypatch.context() as patch, pytest.raises(UnreadableCorpus) as caught:  # noqa: PT012
        if name == "stale":
            (tmp_path / name).touch()
            patch.setattr(os, "fstat", refuse)
        OpenFile(tmp_path / name)
    assert not open_files() - before
    assert re.match(f"{re.escape(str(tmp_path / name))}: {said}", caught.value.detail)
    assert caught.value.remedy is None


def test_a_file_that_was_cut_before_it_is_mapped_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    with OpenFile(tmp_path / "a") as file:
        os.truncate(tmp_path / "a", 4)
        with pytest.raises(UnreadableCorpus, match=r"cannot be mapped: .*being written"):
            file.map()


def test_pages_that_the_disk_did_not_deliver_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    with OpenFile(tmp_path / "a") as file:
        file._guarded = GuardedRange(0, 10, num_faults=2)
        with pytest.raises(ReadFailed, match="a: the disk did not deliver 2 pages"):
            file.check_unchanged()


def test_a_file_that_is_being_deleted_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems change the status of such a file a moment before they count its names."""
    path = tmp_path / "a"
    path.touch()
    with OpenFile(path) as file:
        path.chmod(0o600)
        monkeypatch.setattr(time, "sleep", lambda seconds: path.unlink())
        file.check_unchanged()


def test_a_file_whose_disk_does_not_even_say_its_size_is_not_taken_for_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123")
    with OpenFile(tmp_path / "a") as file:
        kept = os.dup(file.fd)
        os.close(file.fd)
        with pytest.raises(ReadFailed, match="a: fstat failed: Bad file descriptor"):
            file.check_unchanged()
        os.dup2(kept, file.fd, inheritable=False)
        os.close(kept)


def test_a_large_file_is_mapped_at_a_huge_page_where_the_system_does_so(tmp_path: Path) -> None:
    """Otherwise a gather takes 1.2 times as long. The map is one: their number is limited."""
    num_bytes = 3 * 2**21 + 4096
    with mmap.mmap(-1, 2**22, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as other:
        if address_of(other) % 2**21:
            pytest.skip("this system aligns no map")
    (tmp_path / "a").write_bytes(bytes(num_bytes))
    with OpenFile(tmp_path / "a") as file:
        mapped = file.map()
        assert address_of(mapped) % 2**21 == 0
        assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 1
        assert bytes(mapped[num_bytes - 3 : num_bytes]) == bytes(3)
