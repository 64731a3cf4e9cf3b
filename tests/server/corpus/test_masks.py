"""Loss masks beside token files: found by name, checked for length, part of the corpus."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.corpus.fingerprints import sidecar_path
from corpus_server.corpus.index import index
from corpus_server.corpus.verify import record, verify
from corpus_server.errors import CorpusServerError, UnreadableCorpus
from corpus_server.tools.building.inputs import find_inputs
from corpus_server.tools.building.merge import merge
from tests.corpora import (
    open_corpus,
    open_files,
    some_tokens,
    spec,
    write_arrow,
    write_npy,
    write_raw,
)
from tests.server.tools.building.built import write_built

MASK = [0, 1, 1, 0, 1]
TOKENS = [10, 11, 12, 13, 14]
BYTES = bytes(MASK)


def npy(dtype: str, mask: Sequence[float] = MASK) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(mask, dtype))
    return file.getvalue()


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = open_files()
    yield
    assert not open_files() - before


def masks(folder: Path, **options: Any) -> list[list[int] | None]:
    with open_corpus(folder, **options) as corpus:
        found = [shard.mask and shard.mask.tokens.astype(int).tolist() for shard in corpus.shards]
        assert corpus.num_masks == len(found) - found.count(None)
        return found


def fingerprint(folder: Path, **options: Any) -> str:
    with open_corpus(folder, **options) as corpus:
        return corpus.fingerprint


@pytest.mark.parametrize(
    ("tokens", "mask", "content"),
    [
        ("token_ids_part_0000.npy", "labels_mask_part_0000.npy", BYTES),
        ("input_ids.npy", "label_mask.npy", BYTES),
        ("a.ds", "a.ds.loss", BYTES),
        ("a.bin", "a.bin.mask.npy", npy("bool")),
        ("a.bin", "a.bin.mask.npy", npy("uint8")),
        ("a.npy", "a.npy.mask.npy", BYTES),
    ],
)
@pytest.mark.parametrize("named", ["folder", "file"])
def test_the_mask_beside_a_token_file(
    tmp_path: Path, tokens: str, mask: str, content: bytes, named: str
) -> None:
    write_raw(tmp_path / tokens, TOKENS)
    (tmp_path / mask).write_bytes(content)
    path, options = tmp_path if named == "folder" else tmp_path / tokens, {"dtype": "uint16"}
    assert masks(path, **options) == [MASK]
    assert masks(path, mask=False, **options) == [None]
    with open_corpus(path, **options) as corpus:
        (shard,) = corpus.describe()["shards"]
        at, size = len(content) - len(MASK), len(content)
        assert shard["loss_mask"] == {
            "file": mask,
            "data_offset": at,
            "dtype": "uint8",
            "size_bytes": size,
        }
    with pytest.raises(UnreadableCorpus, match=r"loss mask.*not served; name the token file"):
        open_corpus(tmp_path / mask)


def test_only_some_shards_have_masks_and_those_in_folders_find_theirs(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("0.bin", "sub/1.bin"):
        write_raw(tmp_path / name, TOKENS)
    (tmp_path / "sub/1.bin.mask.npy").write_bytes(BYTES)
    assert masks(tmp_path) == [None, MASK]
    assert masks(tmp_path, exclude=("sub/*",)) == [None]
    with open_corpus(tmp_path) as corpus:
        described = corpus.describe()
        assert described["num_masks"] == 1
        assert "loss_mask" not in described["shards"][0]
        assert described["shards"][1]["loss_mask"]["file"] == "sub/1.bin.mask.npy"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin.mask.npy", BYTES[:4], "holds 4 bytes, the file beside it 5 tokens: one byte each; was the"),
        ("a.bin.mask.npy", bytes(6), "holds 6 bytes, the file beside it 5 tokens"),
        ("a.bin.mask.npy", b"", "holds 0 bytes, .* 5 tokens"),
        ("a.bin.mask.npy", npy("bool", [1] * 6), "holds 6 bytes, .* 5 tokens.*mask=no"),
        ("a.bin.mask.npy", npy("float16", [0, 1]), "holds 4 bytes, .* 5 tokens: 2 bytes each"),
        (
            "a.bin.mask.npy",
            npy("float16", [1, 2, -0.5, 1, 1]),
            r"at least 0, got -0\.5 at byte 132",
        ),
        (
            "a.bin.mask.npy",
            npy("float16", [1, 2, 1, float("nan"), 1]),
            "finite weights of .*, got nan",
        ),
        ("a.bin.mask.npy", npy("bool")[:-1], "holds 4 tokens, its header says 5"),
        (
            "a.bin.mask.npy",
            npy("float32"),
            "float16 for weights, its header says '<f4'; save it again: .*'float16'",
        ),
        ("a.bin.mask.npy", npy("bool")[:100], "NPY header is damaged"),
        ("a.bin.mask.npy", b"\0\1\0\2\0", r"expected bytes of 0 and 1, got 2 at byte 3: is it a loss mask\?"),
        ("b.bin.mask.npy", BYTES, r"b\.bin\.mask\.npy: is named like a loss mask, .*\(mask=no\)"),
        ("a.mask.npy", BYTES, "no token file beside it; name it after its token file"),
        ("x_label_mask.npy", BYTES, "no token file beside it"),
    ],
)
def test_a_mask_that_is_not_that_of_its_tokens_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """Training would count tokens that were to be left out, and no error would show it."""
    write_raw(tmp_path / "a.bin", TOKENS)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableCorpus, match=message):
        open_corpus(tmp_path)
    assert masks(tmp_path, mask=False) == [None]


def test_two_masks_of_one_file_are_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "token_ids.npy", TOKENS)
    for name in ("label_mask.npy", "token_ids.npy.mask.npy"):
        (tmp_path / name).write_bytes(BYTES)
    with pytest.raises(UnreadableCorpus, match=r"2 loss masks: .*\.mask\.npy"):
        open_corpus(tmp_path)


def test_a_mask_counts_in_the_fingerprint_only_where_there_is_one(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", TOKENS)
    write_raw(tmp_path / "b.bin", [20])
    head, first, second = b"corpus-server sampled fingerprint 1\n", b"5 uint16\n", b"1 uint16\n"
    first, second = (
        start + np.array(tokens, "<u2").tobytes() for start, tokens in ((first, TOKENS), (second, [20]))
    )
    bare = f"sampled-{hashlib.sha256(head + first + second).hexdigest()}"
    assert fingerprint(tmp_path) == bare
    (tmp_path / "a.bin.mask.npy").write_bytes(npy("bool"))
    mask = b"5 bool\n" + BYTES
    masked = f"sampled-{hashlib.sha256(head + first + mask + second).hexdigest()}"
    assert fingerprint(tmp_path) == masked
    assert fingerprint(tmp_path, mask=False) == bare
    (tmp_path / "a.bin.mask.npy").write_bytes(BYTES)  # how it is stored does not count
    assert fingerprint(tmp_path) == masked
    (tmp_path / "a.bin.mask.npy").write_bytes(bytes(5))
    assert fingerprint(tmp_path) not in (bare, masked)


def test_a_mask_of_weights_counts_by_its_type(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", TOKENS)
    weights = np.array([0, 0.5, 1, 65504, 0.1], "<f2")
    np.save(tmp_path / "a.bin.mask.npy", weights)
    content = b"5 uint16\n" + np.array(TOKENS, "<u2").tobytes() + b"5 float16\n" + weights.tobytes()
    digest = hashlib.sha256(b"corpus-server sampled fingerprint 1\n" + content)
    assert fingerprint(tmp_path) == f"sampled-{digest.hexdigest()}"
    bare = fingerprint(tmp_path, mask=False)
    (tmp_path / "a.bin.mask.npy").write_bytes(npy("float16"))
    bits = fingerprint(tmp_path)
    (tmp_path / "a.bin.mask.npy").write_bytes(npy("bool"))
    assert len({bare, bits, fingerprint(tmp_path)}) == 3
    np.save(tmp_path / "a.bin.mask.npy", weights)
    with open_corpus(tmp_path, token_range=(1, 4)) as corpus:
        (shard,) = corpus.shards
        assert shard.mask is not None
        assert shard.mask.tokens.tolist() == weights[1:4].tolist()


def test_a_damaged_weight_is_found(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", some_tokens(20_000))
    path, weights = tmp_path / "a.bin.mask.npy", np.full(20_000, 0.5, "<f2")
    np.save(path, weights)
    made = record(spec(tmp_path))
    assert (verify(spec(tmp_path)).fingerprint, made.num_tokens) == (made.fingerprints["full"], 20_000)
    weights[10_000] = -1
    np.save(path, weights)
    (bad,) = verify(spec(tmp_path)).bad_blocks
    assert bad.shard == "a.bin.mask.npy"
    assert bad.reason == "a loss mask: expected finite weights of at least 0, got -1.0"
    np.save(path, np.ones(20_000, bool))
    (problem,) = [each for each in verify(spec(tmp_path)).problems if each.shard == "a.bin.mask.npy"]
    assert problem.detail == "holds 20000 bool tokens, recorded were 20000 float16"


def test_document_ends_do_not_depend_on_a_mask(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", TOKENS)
    index(spec(tmp_path, eot=12))
    (tmp_path / "a.bin.mask.npy").write_bytes(BYTES)
    with open_corpus(tmp_path) as corpus:
        assert corpus.document_range(1) == (3, 5)
    (tmp_path / "a.bin.mask.npy").write_bytes(b"damaged")
    assert index(spec(tmp_path, eot=12)).shards[0].action == "kept"


def test_hashes_are_recorded_and_a_damaged_byte_of_a_mask_is_found(tmp_path: Path) -> None:
    tokens = some_tokens(20_000)
    write_raw(tmp_path / "a.bin", tokens)
    path = tmp_path / "a.bin.mask.npy"
    np.save(path, np.ones(20_000, bool))
    bare = record(spec(tmp_path, mask=False)).fingerprints
    with pytest.raises(UnreadableCorpus, match="0 loss masks were recorded and 1 are here: record again"):
        open_corpus(tmp_path)
    assert fingerprint(tmp_path, mask=False) == bare["full"]
    made = record(spec(tmp_path))
    assert made.fingerprints["full"] != bare["full"]
    assert (made.num_shards, made.num_tokens) == (1, 20_000)
    assert fingerprint(tmp_path) == made.fingerprints["full"]
    with pytest.raises(UnreadableCorpus, match="1 loss masks were recorded and 0 are here"):
        open_corpus(tmp_path, mask=False)
    found = verify(spec(tmp_path))
    assert (found.ok, found.num_shards, found.num_tokens) == (True, 1, 20_000)
    assert found.fingerprint == made.fingerprints["full"]
    content = bytearray(path.read_bytes())
    content[10_000] = 7
    path.write_bytes(content)
    (bad,) = verify(spec(tmp_path)).bad_blocks
    assert (bad.shard, bad.reason) == ("a.bin.mask.npy", "a loss mask: expected bytes of 0 and 1, got 7")
    with pytest.raises(UnreadableCorpus, match="got 7"):
        record(spec(tmp_path))
    content[10_000] = 0
    path.write_bytes(content)
    found = verify(spec(tmp_path))
    assert [(bad.shard, bad.start, bad.stop) for bad in found.bad_blocks] == [("a.bin.mask.npy", 0, 20_000)]
    path.write_bytes(content[:-1])
    found = verify(spec(tmp_path))
    assert ([each.shard for each in found.problems], found.num_shards) == (["a.bin"], 1)
    assert f"{path}: holds 19999 tokens, its header says 20000" in found.problems[0].detail
    path.unlink()
    problems = verify(spec(tmp_path)).problems
    assert [(each.shard, each.detail) for each in problems] == [
        ("a.bin.mask.npy", "recorded, but the file is missing")
    ]
    assert sidecar_path(spec(tmp_path)) == sidecar_path(spec(tmp_path, mask=False))


@pytest.mark.parametrize("token_range", [(0, 10), (3, 8), (7, 9)])
def test_a_range_of_tokens_has_its_part_of_the_masks(tmp_path: Path, token_range: tuple[int, int]) -> None:
    for name in ("a", "b"):
        write_raw(tmp_path / f"{name}.bin", TOKENS)
        (tmp_path / f"{name}.bin.mask.npy").write_bytes(BYTES)
    found = [each for mask in masks(tmp_path, token_range=token_range) for each in mask or []]
    assert found == (MASK + MASK)[slice(*token_range)]
    cut = fingerprint(tmp_path, token_range=token_range)
    (tmp_path / "a.bin.mask.npy").write_bytes(bytes(4) + b"\0")
    assert (fingerprint(tmp_path, token_range=token_range) == cut) == (token_range[0] >= 5)


def test_a_file_of_several_runs_has_one_mask(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    rows = arrow.array([[1, 2], [3, 4], [5, 6]], arrow.list_(arrow.uint16()))
    write_arrow(tmp_path / "a.arrow", arrow.table({"input_ids": rows}), rows=2)
    np.save(tmp_path / "a.arrow.mask.npy", np.array([0, 1, 1, 0, 1, 1], bool))
    assert masks(tmp_path) == [[0, 1, 1, 0], [1, 1]]
    record(spec(tmp_path))
    assert verify(spec(tmp_path)).ok


def test_an_empty_shard_has_an_empty_mask(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", [])
    write_raw(tmp_path / "b.bin", TOKENS)
    np.save(tmp_path / "a.npy.mask.npy", np.empty(0, bool))
    assert masks(tmp_path) == [[], None]


def test_a_change_of_a_mask_is_noticed_as_that_of_its_shard(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", TOKENS)
    path = tmp_path / "a.bin.mask.npy"
    path.write_bytes(BYTES)
    with open_corpus(tmp_path) as corpus:
        (shard,) = corpus.shards
        assert shard.mask is not None
        shard.mask.file.check_unchanged()
        os.truncate(path, 3)
        shard.file.check_unchanged()
        with pytest.raises(CorpusServerError, match=re.escape("a.bin.mask.npy: 5 bytes at opening, 3 now")):
            shard.mask.file.check_unchanged()


def test_masks_are_not_lost_by_what_copies_token_files(tmp_path: Path) -> None:
    built = [write_built(tmp_path / str(seed), seed=seed) for seed in range(2)]
    (built[1] / "000000.npy.mask.npy").write_bytes(bytes(100))  # after its manifest was written
    record(spec(built[1]))
    with pytest.raises(UnreadableCorpus, match="expected recorded hashes that give"):
        merge(built, tmp_path / "merged")
    write_raw(tmp_path / "x.mds", TOKENS)
    (tmp_path / "x.mds.mask.npy").write_bytes(BYTES)
    with pytest.raises(UnreadableCorpus, match=r"x\.mds\.mask\.npy: is a loss mask, and build copies none"):
        find_inputs([str(tmp_path / "x.mds")])
