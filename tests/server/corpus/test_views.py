"""Views of small corpora, compared with the documents laid out one by one; damaged files."""

from __future__ import annotations

import tempfile
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.corpus.views import View, open_corpus
from corpus_server.corpus.views.file import ViewFile
from corpus_server.errors import CorpusServerError, UnknownDocument, UnreadableCorpus
from tests.corpora import spec
from tests.serving import run_here
from tests.views import laid_out, write_corpus, write_view

PROFILES = {
    "bits": lambda draw, size: draw.integers(0, 2, size),
    "bytes": lambda draw, size: draw.choice([0, 1, 1, 2, 7], size),
    "words": lambda draw, size: draw.choice([0, 0, 1, 300], size),
    "many": lambda draw, size: draw.integers(0, 900, size) // 3 * 7,
    "runs": lambda draw, size: np.arange(size) // 97 % 3,
    "one": lambda draw, size: np.arange(size) == size - 1,
    "all": lambda draw, size: np.ones(size, int),
}


def opened(folder: Path, view: Path, name: str = "v") -> View:
    found = open_corpus(spec(folder, name, dtype="uint32", view=str(view)))
    assert isinstance(found, View)
    return found


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 600), min_size=1, max_size=3),
    longest=st.sampled_from([2, 30]),
    profile=st.sampled_from(sorted(PROFILES)),
    seed=st.integers(0, 2**32),
)
def test_a_view_is_its_documents_laid_end_to_end(
    sizes: list[int], longest: int, profile: str, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    shards = [draw.integers(1, longest + 1, size).tolist() for size in sizes]
    counts = PROFILES[profile](draw, sum(sizes)).astype(int).tolist()
    counts[0] = max(counts[0], 1)
    starts = [0, *accumulate(length for lengths in shards for length in lengths)]
    documents = [each for its in laid_out(shards, counts) for each in its]
    places = np.concatenate([np.arange(starts[n], starts[n + 1]) for n in documents])
    with tempfile.TemporaryDirectory() as name:
        folder = write_corpus(Path(name) / "web", shards)
        with opened(folder, write_view(folder, counts, Path(name) / "a.view")) as view:
            assert (view.num_tokens, view.num_documents) == (places.size, len(documents))
            begin, stop = (int(each) for each in draw.integers(0, len(counts) + 1, 2))
            if begin < stop:
                assert view.file.decoded(begin, stop).tolist() == counts[begin:stop]
            bounds = [0, *accumulate(starts[n + 1] - starts[n] for n in documents)]
            assert np.array(view.sequences())[0].tolist() == bounds[:-1]

            def located(start: int, stop: int) -> list[int]:
                pieces = view.pieces(np.array([start]), np.array([stop])).places.tolist()
                first = view.base.starts
                return [first[shard] + at + each for shard, at, size in pieces for each in range(size)]

            for start, end in [
                (0, places.size),
                *np.sort(draw.integers(0, places.size + 1, (9, 2))).tolist(),
            ]:
                assert located(start, end) == places[start:end].tolist()
            for number in draw.integers(0, len(documents), 9).tolist():
                start, end = view.document_range(number)
                assert (start, end) == (bounds[number], bounds[number + 1])
                assert view.base_document(number) == documents[number]
                assert view.document_at(start) == view.document_at(end - 1) == number
            low, high = np.sort(draw.integers(0, starts[-1] + 1, (9, 2))).T
            high += 1
            low, high = np.minimum(low, starts[-1] - 1), np.minimum(high, starts[-1])
            found = view.places.ranges(low, np.maximum(high, low + 1))
            for owner, (start, end) in enumerate(zip(low, np.maximum(high, low + 1), strict=True)):
                held = np.flatnonzero((places >= start) & (places < end))
                its = [(a, b) for n, a, b in zip(*found, strict=True) if n == owner]
                assert [each for a, b in its for each in range(a, b)] == held.tolist()


SHARDS = [[3, 5, 2, 9], [4, 4, 1]]
COUNTS = [1, 0, 2, 1, 1, 0, 1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "web", SHARDS)


@pytest.fixture
def made(folder: Path, tmp_path: Path) -> Path:
    return write_view(folder, COUNTS, tmp_path / "a.view")


def test_a_fingerprint_follows_from_the_corpus_and_the_multiplicities(folder: Path, tmp_path: Path) -> None:
    found = []
    for counts in (COUNTS, COUNTS, [1] * 7):
        with opened(folder, write_view(folder, counts, tmp_path / "b.view")) as view:
            found.append(view.fingerprint)
            assert view.fingerprint != view.base.fingerprint
            assert view.describe()["view"]["fingerprint"] == view.base.fingerprint
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-1], "holds"),
        (lambda data: data + b"\0", "holds"),
        (lambda data: data[:20], "end inside"),
        (lambda data: b"", "is no view"),
        (lambda data: b"X" + data[1:], "is no view"),
        (lambda data: data[:8] + b"\3" + data[9:], "version 3"),
        (lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:], "header is damaged"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "differ from the ones written"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], "inside its header"),
    ],
)
def test_a_view_that_is_cut_or_changed_is_refused(folder: Path, made: Path, change: Any, says: str) -> None:
    made.write_bytes(change(made.read_bytes()))
    with pytest.raises(UnreadableCorpus, match=says):
        opened(folder, made)


def test_a_view_of_another_corpus_or_other_documents_is_refused(
    folder: Path, made: Path, tmp_path: Path
) -> None:
    other = write_corpus(tmp_path / "other", [[3, 5, 2, 9], [4, 5, 1]])
    with pytest.raises(UnreadableCorpus, match="is a view of corpus sampled-"):
        opened(other, made)
    # The same tokens, in other documents: at another end of text.
    run = run_here("index", f"{folder},dtype=uint32,eot=1", "--force")
    assert run.returncode == 0, run.stderr
    with pytest.raises(CorpusServerError, match=r"was made for|end elsewhere"):
        opened(folder, made)


def test_an_unknown_document_is_refused(folder: Path, made: Path) -> None:
    with opened(folder, made) as view, pytest.raises(UnknownDocument):
        view.document_range(6)


def test_verify_reads_the_corpus_and_the_view(folder: Path, made: Path) -> None:
    def verified() -> Any:
        return run_here("verify", f"{folder}?view={made},dtype=uint32")

    assert verified().returncode == 0
    with ViewFile(made) as file:
        assert file.find_problem() is None
    made.write_bytes(made.read_bytes()[:-1] + b"\x7f")
    run = verified()
    assert run.returncode == 1
    assert "differ from the ones written" in run.stdout


def test_a_view_of_the_whole_corpus_has_its_tokens(folder: Path, tmp_path: Path) -> None:
    with opened(folder, write_view(folder, [1] * 7, tmp_path / "b.view")) as view:
        assert view.starts == view.base.starts
        pieces = [(shard, 0, size) for shard, size in enumerate(b - a for a, b in pairwise(view.starts))]
        assert list(map(tuple, view.pieces(np.array([0]), np.array([view.num_tokens])).places)) == pieces
