"""A built corpus holds its documents, token by token, or there is no corpus."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from corpus_server.corpus import Corpus
from corpus_server.corpus.index import index
from corpus_server.corpus.tokenizers import open_tokenizer
from corpus_server.corpus.verify import verify
from corpus_server.errors import CorpusServerError, InvalidParameter, UnreadableCorpus
from corpus_server.tools.building import driver, part, sources
from corpus_server.tools.building.driver import build, choose_options
from corpus_server.tools.building.job import Job, Part, Split, work_folder
from corpus_server.tools.building.manifest import Source, spec_of
from corpus_server.tools.building.part import PartResult, build_part
from tests.server.corpus.test_tokenizers import write_ranks, write_sentencepiece, write_tokenizer_json
from tests.server.tools.building.sources import (
    WRITERS,
    build_here,
    content,
    in_this_process,
    texts,
    write_jsonl,
    write_parquet,
)
from tests.serving import run_here

EOT = 0  # of `bytes`


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few documents make many parts and batches."""
    monkeypatch.setattr(sources, "PART_BYTES", 1000)
    monkeypatch.setattr("corpus_server.tools.building.kinds.tables._ROWS_AT_ONCE", 3)
    monkeypatch.setattr(part, "_BATCH_SIZE", 300)


def tokens_of(folder: Path) -> list[int]:
    with Corpus.open(spec_of(folder)) as corpus:
        return np.concatenate([shard.tokens for shard in corpus.shards]).tolist()


def documents_of(folder: Path) -> list[list[int]]:
    with Corpus.open(spec_of(folder)) as corpus:
        tokens = np.concatenate([shard.tokens for shard in corpus.shards])
        assert corpus.num_documents is not None
        ranges = map(corpus.document_range, range(corpus.num_documents))
        return [tokens[start:stop].tolist() for start, stop in ranges]


def expected(tokenizer: Path | str, rows: Sequence[str], eot: int) -> list[list[int]]:
    """Return the documents as one call of the tokenizer gives them."""
    encoded = open_tokenizer(tokenizer).encode_batch([row for row in rows if row])
    return [[*ids.tolist(), eot] for ids in encoded]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("write_tokenizer", [write_tokenizer_json, write_ranks, write_sentencepiece])
def test_text_of_every_kind_of_file_is_encoded_as_in_one_call(
    tmp_path: Path, name: str, write_tokenizer: Any
) -> None:
    rows = [*texts(60), "", "an end <|endoftext|> in a text"]
    tokenizer = write_tokenizer(tmp_path)
    source = WRITERS[name](tmp_path / name, rows)
    built = build_here([source], tmp_path / "out", tokenizer=str(tokenizer))[None]
    eot = open_tokenizer(tokenizer).eot_id
    assert eot is not None
    assert documents_of(tmp_path / "out") == expected(tokenizer, rows, eot)
    assert (built.num_documents, built.eot, built.dtype) == (61, eot, "uint16")
    assert verify(spec_of(tmp_path / "out")).ok
    with Corpus.open(spec_of(tmp_path / "out")) as corpus:
        assert corpus.fingerprint == built.fingerprint
    assert isinstance(built.tokenizer, Source)
    assert (tmp_path / "out" / built.tokenizer.path).read_bytes() == tokenizer.read_bytes()


@pytest.mark.parametrize("name", WRITERS)
def test_token_ids_of_every_kind_of_file_are_kept(tmp_path: Path, name: str) -> None:
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 70_000, size=size).tolist() for size in draw.integers(0, 30, size=50)]
    rows[3] = [*rows[3], 99]  # brings its end-of-text token
    source = WRITERS[name](tmp_path / name, rows, field="input_ids")
    built = build_here([source], tmp_path / "out", column="input_ids", eot=99)[None]
    ended = [row if row[-1] == 99 else [*row, 99] for row in rows if row]
    assert documents_of(tmp_path / "out") == ended
    assert (built.dtype, built.tokenizer) == ("uint32", None)


@pytest.mark.parametrize(
    ("largest", "eot", "dtype"),
    [(255, 7, "uint8"), (256, 7, "uint16"), (255, 256, "uint16"), (65536, 7, "uint32")],
)
def test_ids_without_a_tokenizer_take_the_smallest_type(
    tmp_path: Path, largest: int, eot: int, dtype: str
) -> None:
    source = write_parquet(tmp_path / "a.parquet", [[1, 2], [largest]], field="ids")
    built = build_here([source], tmp_path / "out", column="ids", eot=eot)[None]
    assert built.dtype == dtype
    assert tokens_of(tmp_path / "out") == [1, 2, eot, largest, eot]


def test_a_text_file_is_one_document_and_its_bytes_are_tokens(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b10.txt").write_text("ten")
    (tmp_path / "in" / "b2.txt").write_text("Grüße\r\n")
    (tmp_path / "in" / "empty.txt").touch()
    built = build_here([tmp_path / "in"], tmp_path / "out", tokenizer="bytes")[None]
    assert documents_of(tmp_path / "out") == [[*"Grüße\r\n".encode(), EOT], [*b"ten", EOT]]
    assert (built.dtype, built.tokenizer) == ("uint8", "bytes")


def test_a_null_is_an_empty_document_and_is_left_out(tmp_path: Path) -> None:
    rows = [None, "a", None]
    for name, write in WRITERS.items():
        write(tmp_path / name, rows)
    built = build_here([tmp_path / name for name in WRITERS], tmp_path / "out", tokenizer="bytes")[None]
    assert built.num_documents == len(WRITERS)


def test_shards_end_where_documents_end(tmp_path: Path) -> None:
    rows = ["a" * length for length in (3, 4, 4, 30, 1, 1, 9, 2)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    built = build_here([source], tmp_path / "out", tokenizer="bytes", shard_tokens=10)[None]
    # With their end-of-text tokens 4 5 | 5 | 31 | 2 2 | 10 | 3; the document of 31 tokens is cut, and what is
    # left of it begins a shard that takes more.
    assert [shard.num_tokens for shard in built.shards] == [9, 5, 10, 10, 10, 5, 10, 3]
    assert built.num_documents == 8
    assert [shard.num_documents for shard in built.shards] == [2, 1, 1, 1, 1, 3, 1, 1]
    assert tokens_of(tmp_path / "out") == [token for row in rows for token in [*row.encode(), EOT]]


def test_the_division_into_parts_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(50))
    write_parquet(tmp_path / "b.parquet", texts(30, seed=1))
    found = []
    for number, size in enumerate((200, 1000, 10**6)):
        monkeypatch.setattr(sources, "PART_BYTES", size)
        out = tmp_path / str(number)
        named = [tmp_path / "a.jsonl", tmp_path / "b.parquet"]
        build_here(named, out, tokenizer="bytes", splits=(Split(name="val", share=0.2),), shard_tokens=500)
        found.append(content(out))
    assert all(each == found[0] for each in found)
    assert len(found[0]) > 10


def test_splits_are_chosen_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 20_000)
    rows = texts(2000, most_words=3)
    shares = (Split(name="val", share=0.05), Split(name="test", share=0.1))
    build_here([write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "out", tokenizer="bytes", splits=shares)
    names = {row: [*row.encode(), EOT] for row in rows}
    found = {name: documents_of(tmp_path / "out" / name) for name in ("train", "val", "test")}
    for row, ids in names.items():
        share = xxhash.xxh3_64_intdigest(row.encode()) / 2**64
        assert ids in found["val" if share < 0.05 else "test" if share < 0.15 else "train"]
    assert sum(map(len, found.values())) == 2000
    assert 60 < len(found["val"]) < 140

    # Another order, other files: the same documents.
    turned = [write_jsonl(tmp_path / "b.jsonl", rows[:0:-1]), write_jsonl(tmp_path / "c.jsonl", rows[:1])]
    build_here(turned, tmp_path / "turned", tokenizer="bytes", splits=shares)
    for name, documents in found.items():
        assert sorted(documents_of(tmp_path / "turned" / name)) == sorted(documents)


def test_a_corpus_is_on_the_disk_before_its_work_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifests come last, then the names of the splits, then that of the corpus."""
    flush, flushed = os.fsync, list[str]()

    def note(fd: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{fd}").readlink().relative_to(tmp_path).as_posix())
        flush(fd)

    source = write_jsonl(tmp_path / "a.jsonl", texts(60))
    monkeypatch.setattr(os, "fsync", note)
    build_here([source], tmp_path / "out", tokenizer="bytes", splits=(Split(name="val", share=0.3),))
    whole = "out.building/whole"
    assert flushed[-4:] == [f"{whole}/val/.manifest.json.tmp", f"{whole}/val", whole, "."]
    assert f"{whole}/train/.manifest.json.tmp" in flushed


def test_a_split_that_gets_nothing_is_an_error(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(InvalidParameter, match="split 'val' got none of 2 documents"):
        build_here([source], tmp_path / "out", tokenizer="bytes", splits=(Split(name="val", share=1e-9),))
    assert not (tmp_path / "out").exists()


def test_the_document_index_is_the_one_that_index_would_write(tmp_path: Path) -> None:
    build_here([write_jsonl(tmp_path / "a.jsonl", texts(50))], tmp_path / "out", tokenizer="bytes")
    before = content(tmp_path / "out")
    index(replace(spec_of(tmp_path / "out"), eot=EOT), force=True)
    assert content(tmp_path / "out") == before


class Killed(BaseException):
    """Stands for a kill: no handler of errors sees it."""


def test_a_build_continues_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rename of a file, and every removal, is a point at which the build may end."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(60))
    options = choose_options(tokenizer="bytes", eot=None, shard_tokens=900)
    named = [str(source)]
    build(named, tmp_path / "whole", options, in_this_process)
    expected, out = content(tmp_path / "whole"), tmp_path / "out"

    left = 0

    def counted(act: Any) -> Any:
        def action(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return act(*arguments, **keywords)

        return action

    for name in ("replace", "rename", "unlink"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(os, "unlink", counted(os.unlink))
    kills = 0
    while True:
        left = kills % 5  # so that several runs are needed, each killed at another point
        try:
            build(named, out, options, in_this_process)
        except Killed:
            kills += 1
            assert not out.exists() or content(out) == expected
            continue
        break
    assert kills > 20
    assert content(out) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out", "whole"]


def test_finished_parts_are_not_built_again(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(60))
    options = choose_options(tokenizer="bytes", eot=None)
    built = []

    def run_parts(job: Job, parts: Sequence[Part], folder: Path) -> Iterator[PartResult]:
        for each in parts:
            if len(built) == 3:
                built.append(-1)
                raise KeyboardInterrupt
            built.append(each.number)
            yield build_part(job.options, each, folder)

    seen: list[tuple[str, int, int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        build([str(source)], tmp_path / "out", options, run_parts)
    build([str(source)], tmp_path / "out", options, run_parts, lambda *said: seen.append(said))
    assert built == [0, 1, 2, -1, *range(3, built[-1] + 1)]
    # The bar begins where the first run ended, and speed counts this run alone.
    assert seen[0][0] == "starting"
    assert 0 < seen[0][1] < seen[0][2]
    assert seen[0][3] == 0
    assert [done for what, done, total, _ in seen if done == total] != []


def test_a_second_build_of_the_same_says_that_it_did_nothing(tmp_path: Path) -> None:
    command = ("build", write_jsonl(tmp_path / "a.jsonl", texts(3)), "--tokenizer", "bytes", "--out")
    first, second = run_here(*command, tmp_path / "out"), run_here(*command, tmp_path / "out")
    assert "was there already" not in first.stderr
    assert second.returncode == 0
    assert second.stderr.startswith(f"{tmp_path / 'out'} was there already, built of the same files")


def test_a_restart_with_other_options_or_sources_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = [write_jsonl(tmp_path / f"{name}.jsonl", texts(10)) for name in "ab"]
    other = write_jsonl(tmp_path / "c.jsonl", texts(1))
    monkeypatch.setattr(driver, "assemble", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_here(named, tmp_path / "out", tokenizer="bytes")
    for named_now, options, said in (
        (named, {"shard_tokens": 5}, "shard_tokens was 100000000, now 5"),
        (named[::-1], {}, "the sources come in another order"),
        (named[:1], {}, r".*b\.jsonl was changed, added or removed"),
        ([*named, other], {}, r".*c\.jsonl was changed, added or removed"),
    ):
        with pytest.raises(InvalidParameter, match=f"unfinished build: {said}"):
            build_here(named_now, tmp_path / "out", tokenizer="bytes", **options)
    write_jsonl(named[0], texts(11))
    with pytest.raises(InvalidParameter, match=r"a\.jsonl was changed") as caught:
        build_here(named, tmp_path / "out", tokenizer="bytes")
    assert caught.value.remedy is not None
    assert "--fresh" in caught.value.remedy
    monkeypatch.undo()
    build_here(named, tmp_path / "out", tokenizer="bytes", fresh=True)
    assert len(documents_of(tmp_path / "out")) == 21


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_source_that_changes_meanwhile_is_never_published(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(10))

    def run_parts(job: Job, parts: Sequence[Part], folder: Path) -> Iterator[PartResult]:
        yield from in_this_process(job, parts, folder)
        write_jsonl(source, texts(12))

    options = choose_options(tokenizer="bytes", eot=None)
    with pytest.raises(UnreadableCorpus, match=r"a\.jsonl: was changed while it was read"):
        build([str(source)], tmp_path / "out", options, run_parts)
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(10))
    out = tmp_path / "out"
    out.mkdir()
    built = build_here([source], out, tokenizer="bytes")  # an empty one is taken
    before = content(out)
    assert build_here([source], out, tokenizer="bytes") == built  # the same build is done already
    for options in ({"shard_tokens": 5}, {"eot": 1}):
        with pytest.raises(InvalidParameter, match="out must be a folder that does not exist yet"):
            build_here([source], out, tokenizer="bytes", **options)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidParameter, match="out must be a folder"):
        build_here([source], tmp_path / "file", tokenizer="bytes")
    assert content(out) == before
    assert not work_folder(out).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eot": 1}, "tokenizer must be 'gpt2' or another model of the Hugging Face Hub, "),
        ({"column": "ids"}, "no end-of-text token is known, because there is no tokenizer"),
        ({"column": "ids", "eot": 2**32}, r"eot must be in \[0, 4294967295\]"),
        ({"tokenizer": "bytes", "eot": 256}, r"eot must be in \[0, 255\]"),
        ({"tokenizer": "bytes", "shard_tokens": 0}, "shard_tokens must be at least 1"),
        ({"tokenizer": "/nowhere/tokenizer.json"}, "the tokenizer cannot be read"),
        (
            {"tokenizer": "bytes", "splits": (Split(name="val", share=0.6), Split(name="test", share=0.4))},
            "shares below 1 in all",
        ),
        (
            {"tokenizer": "bytes", "splits": (Split(name="val", share=0.6), Split(name="val", share=0.1))},
            "different names",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CorpusServerError, match=message):
        choose_options(**{"tokenizer": None, "eot": None, **options})


@pytest.mark.parametrize(
    ("name", "share"), [("train", 0.1), ("heldout", 0.1), ("", 0.1), ("val", 0.0), ("val", 1.0)]
)
def test_splits_that_cannot_be(name: str, share: float) -> None:
    with pytest.raises(
        InvalidParameter, match=r"split must be (one of dev, eval, holdout, .*validation|NAME=SH)"
    ):
        Split(name=name, share=share)
