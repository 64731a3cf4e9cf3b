"""What people feed by mistake: files of another kind than their names say, twice, or of another system."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building.inputs import find_inputs
from corpus_server.tools.building.job import BuildOptions
from corpus_server.tools.building.manifest import spec_of
from corpus_server.tools.building.sources import check_first
from tests.corpora import open_corpus, write_raw
from tests.server.tools.building.test_real_files import read, refusal, write
from tests.serving import run_here

LINES = b'{"text":"a"}\n{"text":"b"}\n'


def parquet(**columns: object) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def with_dictionary(data: bytes) -> bytes:
    samples = [json.dumps({"text": f"number {n} of many, {n * 7}"}).encode() for n in range(500)]
    return zstandard.ZstdCompressor(dict_data=zstandard.train_dictionary(2000, samples)).compress(data)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.jsonl",
            gzip.compress(LINES, mtime=0),
            "is gzip, which its name does not say; rename it .* ends with .gz",
        ),
        ("a.csv", zstandard.compress(LINES), "is Zstandard, which its name does not say; .* ends with .zst"),
        ("a.txt", bz2.compress(LINES), "is bzip2, which its name does not say; .* ends with .bz2"),
        ("a.jsonl", lzma.compress(LINES), "is xz, which its name does not say; .* ends with .xz"),
        ("a.jsonl.gz", zstandard.compress(LINES), "is Zstandard, which its name does not say"),
        ("a.jsonl", parquet(text=["a"]), "is Parquet, which its name does not say; .* ends with .parquet"),
        ("a.txt", b"PK\x03\x04" + bytes(60), "is zip, which its name does not say; unpack it, and name what"),
        ("a.jsonl", b"<!DOCTYPE html><html>404</html>\n", "is a page of HTML; was a download refused?"),
        ("a.parquet", b"\n<html><body>Sign in</body></html>", "is a page of HTML; was a download refused?"),
        ("a.jsonl.gz", LINES, "Not a gzipped file .*; is it what its name says"),
        ("a.jsonl.zst", with_dictionary(LINES), "zstd -dc -D DICTIONARY .*jsonl.zst | zstd -o NEW.zst"),
        ("a.jsonl", b'{"text":"a"}\r{"text":"b"}\r', "line 1: is not JSON: .*; a record is one line; .* jq"),
        ("a.jsonl", b'{"text":"a"}{"text":"b"}\n', "line 1: is not JSON: .*; a record is one line; .* jq -c"),
        ("a.jsonl", b'{"text":"a"},\n{"text":"b"},\n', "line 1: .*; leave out the comma behind each record"),
        ("a.csv", "text\nhello\n".encode("utf-16"), "is UTF-16; convert it with iconv -f UTF-16 -t UTF-8"),
        ("a.csv", "text\ncafé\n".encode("latin1"), "is not UTF-8; convert it with iconv -f ITS-ENCODING -t"),
        ("a.txt", "hello".encode("utf-32"), "is UTF-32; convert it with iconv -f UTF-32 -t UTF-8"),
        (
            "a.jsonl",
            LINES.decode().encode("utf-32-le"),
            "line 1: is UTF-32LE; convert it with iconv",
        ),
        ("a.jsonl", b'{"text":[{"role":"user","content":"a"}]}\n', "for conversations say --chat text"),
        (
            "a.parquet",
            parquet(text=[[{"role": "user", "content": "a"}]]),
            "for conversations say --chat text",
        ),
    ],
    ids=map(str, range(20)),  # bytes of compressed files are no names
)
def test_a_file_of_another_kind_is_named_with_what_helps(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    with pytest.raises(UnreadableCorpus, match=message):
        read(write(tmp_path / name, data))


@pytest.mark.parametrize("text", ["PAR1 is how Parquet begins", "BZh, said the bee", "ARROW1 <html>"])
def test_a_text_may_begin_as_other_files_do(tmp_path: Path, text: str) -> None:
    assert read(write(tmp_path / "a.txt", text)) == [text]
    assert read(write(tmp_path / "page.txt", f"<html>{text}")) == [f"<html>{text}"]


def test_what_archives_and_browsers_leave_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", LINES)
    for name in ("b.jsonl.crdownload", "c.jsonl.part", "d.jsonl.tmp", "e.jsonl~", "Thumbs.db"):
        write(tmp_path / name, b"{")
    for name in ("._a.jsonl", "__MACOSX/a.jsonl", "__MACOSX/._b.jsonl", ".ipynb_checkpoints/a.jsonl"):
        write(tmp_path / name, b"\0\5\x16\7")
    assert read(tmp_path) == ["a", "b"]
    (tmp_path / "served").mkdir()
    write_raw(tmp_path / "served" / "x.bin", [1, 2, 3])
    write(tmp_path / "served" / "__MACOSX" / "x.bin", b"\0\5\x16\7")
    with open_corpus(tmp_path / "served") as corpus:
        assert [shard.name for shard in corpus.shards] == ["x.bin"]


def test_a_file_that_is_there_twice_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", LINES)
    assert find_inputs([str(tmp_path)]).doubled == ()
    write(tmp_path / "a.jsonl.gz", gzip.compress(LINES, mtime=0))
    os.link(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    said = find_inputs([str(tmp_path)]).doubled
    assert said == (
        f"{tmp_path}/a.jsonl and {tmp_path}/a.jsonl.gz are both read: is one the other, compressed?",
        f"{tmp_path}/a.jsonl and {tmp_path}/b.jsonl are one file, which is read twice",
    )
    done = run_here("build", tmp_path, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert done.returncode == 0
    assert "are one file, which is read twice" in " ".join(done.stderr.split())


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_null_among_ids_is_an_error_of_its_row(tmp_path: Path, kind: str) -> None:
    rows = [[1, 2], [3, None], [4]]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"ids": rows}), path)
    else:
        path.write_text("".join(f"{json.dumps({'ids': row})}\n" for row in rows))
    place = "row 1: a list of token ids holds a null" if kind == "parquet" else "line 2: expected a list of"
    assert place in refusal(path, column="ids")
    options = ("--column", "ids", "--eot", "0", "--on-error", "skip", "--out", tmp_path / "out")
    assert run_here("build", path, *options).returncode == 0
    with open_corpus(spec_of(tmp_path / "out").path) as corpus:
        assert corpus.shards[0].tokens.tolist() == [1, 2, 0, 4, 0]


def test_an_archive_is_to_be_unpacked_and_a_wrong_place_is_no_lack_of_room(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "a.tar.gz", b"x")).endswith("; unpack it, and name what it holds")
    source = write(tmp_path / "a.jsonl", LINES)
    done = run_here("build", source, "--tokenizer", "bytes", "--out", "/proc/out")
    assert "cannot be written" in done.stderr
    assert "give another --out" in " ".join(done.stderr.split())


def test_ids_that_are_texts_or_fractions_are_named(tmp_path: Path) -> None:
    for ids in (["1", "2"], [1.0, 2.0]):
        message = refusal(write(tmp_path / "a.jsonl", json.dumps({"ids": ids})), column="ids")
        assert message.endswith(f"got {ids}; ids are whole numbers, and not texts or fractions")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("locked", ["a.jsonl", "sub", "sub/b.jsonl", "a.jsonl in sub"])
def test_what_a_user_may_not_read_is_told_as_such(open_folder: Path, locked: str) -> None:
    name, _, folder = locked.partition(" in ")
    named = write(open_folder / folder / name, LINES) if name.endswith("jsonl") else open_folder
    write(open_folder / "sub" / "c.jsonl", LINES)
    (open_folder / (folder or name)).chmod(0)
    code = "import sys; from corpus_server.cli import main; main()"
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.getuid() == 0 else []
    if user and subprocess.run([*user, sys.executable, "-c", "import corpus_server.cli"]).returncode:
        pytest.skip("another user cannot import the package here")
    command = ["build", str(named), "--tokenizer", "bytes", "--out", str(open_folder / "out")]
    done = subprocess.run([*user, sys.executable, "-c", code, *command], capture_output=True, text=True)
    said = " ".join(done.stderr.split())
    assert (done.returncode, "Permission denied; check its permissions" in said) == (2, True), said
    (open_folder / (folder or name)).chmod(0o755)


def test_a_file_that_has_gone_is_told_as_such(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", LINES)
    (found,) = find_inputs([str(path)]).inputs
    path.unlink()
    options = BuildOptions(tokenizer="bytes", eot=0, vocab_size=256)
    with pytest.raises(UnreadableCorpus, match="No such file or directory; was it moved or removed"):
        check_first([found], options)
