"""Indexing: exact against a naive split, bounded memory, and whole sidecars whatever happens."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.corpus import index as indexing
from corpus_server.corpus import publish
from corpus_server.corpus.index import index
from corpus_server.errors import CorpusChanged, InvalidParameter, UnreadableCorpus
from tests.corpora import (
    open_corpus,
    some_tokens,
    spec,
    write_llmc,
    write_megatron,
    write_raw,
)
from tests.serving import environment, run_here


def split(tokens: list[int], eot: int, *, eot_first: bool = False) -> list[list[int]]:
    """Return the documents, one token after another."""
    documents: list[list[int]] = []
    current: list[int] = []
    for token, following in zip_longest(tokens, tokens[1:]):
        current.append(token)
        if (following if eot_first else token) == eot:
            documents.append(current)
            current = []
    return documents + ([current] if current else [])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@given(
    shards=st.lists(st.lists(st.integers(0, 3), max_size=60), min_size=1, max_size=4),
    eot=st.integers(0, 4),
    piece=st.integers(1, 70),
    dtype=st.sampled_from(["uint8", "uint16", "uint32", "int32"]),
    eot_at=st.sampled_from(["first", "last"]),
)
@settings(max_examples=150, deadline=None)
def test_documents_are_those_of_a_naive_split(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[int]],
    eot: int,
    piece: int,
    dtype: str,
    eot_at: str,
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    for number, tokens in enumerate(shards):
        write_raw(folder / f"{number}.bin", tokens, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexing, "_PIECE_TOKENS", piece)
        # Forced, because the tokens at the ends may look otherwise.
        done = index(spec(folder, eot=eot, dtype=dtype, eot_at=eot_at), force=True)
    eot_first = eot_at == "first"
    expected = [document for tokens in shards for document in split(tokens, eot, eot_first=eot_first)]
    flat = [token for tokens in shards for token in tokens]
    assert done.num_documents == len(expected)
    assert [shard.num_found for shard in done.shards] == [tokens.count(eot) for tokens in shards]
    assert done.found_nowhere == (bool(flat) and eot not in flat)
    with open_corpus(folder, name="c", dtype=dtype) as corpus:
        assert corpus.eot_first == eot_first
        assert corpus.num_documents == len(expected)
        at = 0
        for number, document in enumerate(expected):
            assert corpus.document_range(number) == (at, at + len(document))
            at += len(document)
        for shard in corpus.shards:
            assert shard.documents is not None
            assert shard.documents.find_problem() is None


def test_a_second_run_reads_nothing_and_force_reads_all(tmp_path: Path) -> None:
    write_raw(tmp_path / "0.bin", [1, 0, 2])
    write_raw(tmp_path / "1.bin", [3, 0])
    assert [shard.action for shard in index(spec(tmp_path, eot=0)).shards] == ["written", "written"]
    again = index(spec(tmp_path, eot=0))
    assert [shard.action for shard in again.shards] == ["kept", "kept"]
    assert [shard.num_found for shard in again.shards] == [1, 1]
    forced = index(spec(tmp_path, eot=0), force=True)
    assert [shard.action for shard in forced.shards] == ["written", "written"]


def test_only_what_is_wrong_is_written_again(tmp_path: Path) -> None:
    for number in range(3):
        write_raw(tmp_path / f"{number}.bin", [1, 0, number])
    index(spec(tmp_path, eot=0))
    damaged = tmp_path / "1.bin.documents"
    damaged.write_bytes(damaged.read_bytes()[:96] + bytes(8) + damaged.read_bytes()[104:])
    assert [shard.action for shard in index(spec(tmp_path, eot=0)).shards] == ["kept", "written", "kept"]
    (tmp_path / "2.bin.documents").write_bytes(b"something else")
    assert [shard.action for shard in index(spec(tmp_path, eot=0)).shards] == ["kept", "kept", "written"]


@pytest.mark.parametrize(("first", "then"), [("eot=0", "eot=1"), ("eot=0,eot_at=first", "eot=0")])
def test_an_index_of_another_token_is_replaced_by_force_alone(tmp_path: Path, first: str, then: str) -> None:
    """Also where a shard before it has none yet, of which nothing is written then."""
    path = write_raw(tmp_path / "1.bin", [1, 0, 1])
    assert run_here("index", f"{tmp_path},{first}").returncode == 0
    before = (tmp_path / "1.bin.documents").read_bytes()
    write_raw(tmp_path / "0.bin", [1, 0, 1])
    refused = run_here("index", f"{tmp_path},{then}")
    place = "first" if "first" in first else "last"
    word = {"first": "begin", "last": "end"}[place]
    assert refused.returncode == 2
    assert f"{path} has documents that {word} with token 0" in refused.stderr
    assert f"say eot=0,eot_at={place} to keep them, or --force" in refused.stderr
    assert names(tmp_path) == ["0.bin", "1.bin", "1.bin.documents"]
    assert (tmp_path / "1.bin.documents").read_bytes() == before
    assert run_here("index", f"{tmp_path},{then}", "--force").returncode == 0
    assert (tmp_path / "1.bin.documents").read_bytes() != before


def test_a_shard_with_its_own_index_needs_no_end_of_text(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "x", [[1, 0], [2, 0, 3]])
    assert index(spec(path)).num_documents == 2
    write_raw(tmp_path / "a.bin", [1], dtype="uint16")
    with pytest.raises(InvalidParameter) as caught:
        index(spec(tmp_path / "a.bin"))
    assert (caught.value.detail, caught.value.parameter, caught.value.remedy) == (
        "the id of the end-of-text token is missing",
        "eot",
        f"corpus-server index {tmp_path / 'a.bin'},eot=ID",
    )


def test_a_sidecar_that_another_process_writes_is_waited_for_by_the_user(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 0])
    sidecar = tmp_path / "a.bin.documents"
    with publish.publishing(sidecar), pytest.raises(UnreadableCorpus) as caught:
        index(spec(path, eot=0))
    assert caught.value.detail == (
        f"{sidecar}: the document ends cannot be written: another process is writing it; "
        "wait until it is done"
    )


def test_a_shard_written_to_meanwhile_is_not_published(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 0, 2])
    with pytest.raises(CorpusChanged, match=r"^a\.bin"):
        index(spec(path, eot=0), progress=lambda _, done, total, __: os.utime(path, ns=(0, 0)))
    assert names(tmp_path) == ["a.bin"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EROFS, "Read-only file system; run it where the folder may be written to and copy"),
        (errno.EACCES, "Permission denied; run it where"),
        (errno.EPERM, "Operation not permitted; run it where"),
        (errno.ENOSPC, "No space left on device; make room, then run it again: shards that are done stay"),
    ],
)
def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    """The refusal is made up, for the superuser is refused by none of them."""

    def refuse(path: Path, flags: int, mode: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    path = write_raw(tmp_path / "a.bin", [1, 0])
    monkeypatch.setattr(publish, "os", SimpleNamespace(**{**vars(os), "open": refuse}))
    with pytest.raises(UnreadableCorpus, match="the document ends cannot be written: " + message):
        index(spec(path, eot=0))
    assert names(tmp_path) == ["a.bin"]


MEASURE = """
import resource, sys
from corpus_server.corpus.index import index
from tests.corpora import spec
index(spec(sys.argv[1], eot=65535))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
done = index(spec(sys.argv[2], eot=0))
print(done.num_documents, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_twenty_million_tokens_in_bounded_memory(tmp_path: Path) -> None:
    """Every token ends a document, the worst case: 160 MB of ends."""
    small, large = write_raw(tmp_path / "small.bin", [1]), tmp_path / "large.bin"
    with large.open("wb") as file:
        file.truncate(4 * 10**7)
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, small, large],
        capture_output=True, text=True, env=environment(), check=True,
    )  # fmt: skip
    num_documents, grown_kib = map(int, ended.stdout.split())
    assert num_documents == 2 * 10**7
    assert grown_kib < 48 * 1024
    assert np.fromfile(tmp_path / "large.bin.documents", "<u8", count=3, offset=96).tolist() == [1, 2, 3]


KILLED = """
import sys
from corpus_server.corpus.index import index
from tests.corpora import spec
print("ready", flush=True)
for n in range(1000):
    index(spec(sys.argv[1], eot=n % 2), force=True)
"""


def test_kill_at_any_moment_leaves_whole_sidecars(tmp_path: Path) -> None:
    """Catalogue row 16, for indexing; what was left aside is gone after the next run."""
    tokens = some_tokens(300_000, vocabulary=3)
    for number in range(3):
        write_raw(tmp_path / f"{number}.bin", tokens)
    expected = {eot: int((tokens == eot).sum() + (tokens[-1] != eot)) for eot in (0, 1)}
    left_aside = 0
    for moment in range(12):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, env=environment()
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.003 * moment + 0.001)
            process.send_signal(signal.SIGKILL)
        left_aside += sum(name.endswith(".tmp") for name in names(tmp_path))
        for number in range(3):
            if (tmp_path / f"{number}.bin.documents").exists():
                with open_corpus(tmp_path / f"{number}.bin", name="c") as corpus:
                    documents = corpus.shards[0].documents
                    assert documents is not None
                    assert documents.find_problem() is None
                    assert documents.num_documents in expected.values()
        if moment % 3 == 0:
            index(spec(tmp_path, eot=0), force=True)
            assert not [name for name in names(tmp_path) if name.endswith(".tmp")]
            with open_corpus(tmp_path, name="c") as corpus:
                assert corpus.num_documents == 3 * expected[0]
    assert left_aside > 0, "no kill came while a file was being written: the test shows nothing"


@pytest.mark.parametrize(
    ("tokens", "eot_at", "found", "is_sure"),
    [
        ([[0, 1, 2, 0, 3], [4, 0, 5]], None, True, True),
        ([[1, 2, 0, 3], [4, 0, 5, 0]], None, False, True),
        ([[1, 0, 2], [3, 0, 4]], None, False, False),
        ([[0, 1, 0, 2, 0]], None, False, False),
        ([[1, 0, 2]], "first", True, True),
        ([[1, 0, 2]], "last", False, True),
    ],
)
def test_the_ends_of_shards_tell_where_documents_have_end_of_text(
    tmp_path: Path, tokens: list[list[int]], eot_at: str | None, found: bool, is_sure: bool
) -> None:
    for number, each in enumerate(tokens):
        write_raw(tmp_path / f"{number}.bin", each)
    done = index(spec(tmp_path, eot=0, eot_at=eot_at))
    assert (done.eot_first, done.is_sure) == (found, is_sure)
    with open_corpus(tmp_path) as corpus:
        assert corpus.eot_first == found
        assert [corpus.document_range(0)[1], corpus.num_documents] == [
            len(split(tokens[0], 0, eot_first=found)[0]),
            sum(len(split(each, 0, eot_first=found)) for each in tokens),
        ]


@pytest.mark.parametrize(("tokens", "eot_at"), [([0, 1, 0, 2], "last"), ([1, 0, 2, 0], "first")])
def test_a_wrong_guess_is_refused_unless_it_is_forced(tmp_path: Path, tokens: list[int], eot_at: str) -> None:
    path = write_raw(tmp_path / "a.bin", tokens)
    with pytest.raises(InvalidParameter, match="its shards look as if documents"):
        index(spec(path, eot=0, eot_at=eot_at))
    assert index(spec(path, eot=0, eot_at=eot_at), force=True).eot_first == (eot_at == "first")


def test_files_of_llmc_begin_documents_with_end_of_text(tmp_path: Path) -> None:
    """Also where shards are cut at both ends; a file that ends with it is refused."""
    path = write_llmc(tmp_path / "a.bin", [1, 0, 2, 3, 0, 4])
    done = index(spec(path, eot=0))
    assert (done.eot_first, done.is_sure, done.num_documents) == (True, True, 3)
    assert "which documents begin with" in run_here("inspect", path).stdout
    other = write_llmc(tmp_path / "b.bin", [1, 0, 2, 3, 0])
    with pytest.raises(InvalidParameter, match="eot_at=last"):
        index(spec(other, eot=0))


def test_the_command_warns_where_nothing_tells(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 0, 2])
    assert "say eot_at=last where the corpus is served" in run_here("index", f"{path},eot=0").stderr
    assert not run_here("index", f"{path},eot=0,eot_at=first").stderr
