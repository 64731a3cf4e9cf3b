"""OLMo's raw dumps called .npy, their document tables, and their loss masks."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from corpus_server.corpus.index import index
from corpus_server.errors import UnreadableCorpus
from tests.corpora import open_corpus, recognise, spec, write_npy, write_raw

TOKENS = [5, 6, 2, 7, 2, 8]


def write(folder: Path, rows: str) -> Path:
    path = write_raw(folder / "part-0.npy", TOKENS)
    (folder / "part-0.csv.gz").write_bytes(gzip.compress(rows.encode()))
    return path


def test_is_told_from_a_real_npy_file_by_its_content(tmp_path: Path) -> None:
    layout = recognise(write_raw(tmp_path / "part-0.npy", TOKENS))
    assert (layout.format, layout.dtype.name, layout.num_tokens) == ("olmo", "uint16", 6)
    assert layout.reason == "named .npy, without the NPY header; no dtype was said, so uint16"
    assert recognise(write_npy(tmp_path / "part-1.npy", TOKENS)).format == "npy"


def test_documents_come_from_the_table_beside_it(tmp_path: Path) -> None:
    path = write(tmp_path, '0,3,"a, ""b""",s,1\r\n3,5,c,s,2\r\n5,5,d,s,3\r\n5,6,e,s,4\r\n')
    seen: list[tuple[int, int]] = []
    done = index(spec(path), progress=lambda _, count, total, __: seen.append((count, total)))
    assert (done.num_documents, done.shards[0].action, done.found_nowhere) == (4, "written", False)
    assert (seen, done.shards[0].num_found) == ([(0, 12), (12, 12)], None)
    with open_corpus(path) as corpus:
        assert [corpus.document_range(n) for n in range(4)] == [(0, 3), (3, 5), (5, 5), (5, 6)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,99999999999999999999\n", "too large"),
        ("0,3\n3,4\n3,6\n", "behind token 0 does not begin where another ends"),
        ("0,3\n4,6\n", "behind token 0 does not begin where another ends"),
        ("1,6\n", "does not begin where another ends"),
        ("0,3\n3,2\n2,6\n", "does not begin where another ends"),
        ("0,3\n3,5\n", "its last document ends at token 5, the shard holds 6"),
        ("", "its last document ends at token 0"),
        ("start,end\n0,6\n", "invalid literal"),
        ("0\n", "index out of range"),
    ],
)
def test_a_table_that_contradicts_the_tokens_is_refused(tmp_path: Path, rows: str, message: str) -> None:
    path = write(tmp_path, rows)
    with pytest.raises(UnreadableCorpus, match=rf"part-0\.csv\.gz: .*{message}"):
        index(spec(path))
    assert not path.with_name("part-0.npy.documents").exists()


def test_a_table_damaged_in_its_middle_is_one_clear_error(tmp_path: Path) -> None:
    path = write(tmp_path, "".join(f"{n},{n},{n * n:x}\n" for n in range(3000)))
    table = tmp_path / "part-0.csv.gz"
    content = bytearray(table.read_bytes())
    middle = len(content) // 2
    for at in range(middle, middle + 40):
        content[at] ^= 0x5A
    table.write_bytes(content)
    with pytest.raises(UnreadableCorpus, match=r"part-0\.csv\.gz: its rows .* cannot be used"):
        index(spec(path))


def test_an_end_of_text_token_that_contradicts_the_table_is_refused_unless_told(tmp_path: Path) -> None:
    path = write(tmp_path, "0,3\n3,5\n5,6\n")
    done = index(spec(path, eot=2))  # the same ends
    assert (done.num_documents, done.shards[0].action) == (3, "written")
    path.with_name("part-0.npy.documents").unlink()
    write(tmp_path, "0,5\n5,6\n")
    with pytest.raises(UnreadableCorpus) as caught:
        index(spec(path, eot=2))
    assert "token 2 ends 3 documents, the table beside it lists 2, or others; leave eot out" in (
        caught.value.detail
    )
    assert not path.with_name("part-0.npy.documents").exists()
    assert index(spec(path, eot=2), force=True).num_documents == 3
    assert index(spec(path)).num_documents == 2
