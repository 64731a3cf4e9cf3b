"""A fingerprint follows the content and nothing else."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.fingerprints import (
    sidecar_path,
)
from corpus_server.corpus.verify import record, verify
from corpus_server.errors import UnreadableCorpus
from tests.corpora import (
    open_corpus,
    some_tokens,
    spec,
    write_llmc,
    write_megatron,
    write_npy,
    write_raw,
    write_sparse,
)

TOKENS = some_tokens(300_000)


def _fingerprint(path: Path, **options: str) -> str:
    with open_corpus(path, name="any", **options) as corpus:
        return corpus.fingerprint


def test_exact_value_of_a_small_corpus(tmp_path: Path) -> None:
    content = b"corpus-server sampled fingerprint 1\n3 uint16\n" + np.array([1, 2, 3], "<u2").tobytes()
    expected = f"sampled-{hashlib.sha256(content).hexdigest()}"
    assert _fingerprint(write_raw(tmp_path / "a.bin", [1, 2, 3])) == expected


@pytest.mark.parametrize(("num_shards", "num_samples"), [(1, 64), (3, 21), (32, 2), (40, 2)])
def test_exact_value_of_a_sample(tmp_path: Path, num_shards: int, num_samples: int) -> None:
    """64 blocks of 4096 bytes are shared by the shards, and each has two at least."""
    digest = hashlib.sha256(b"corpus-server sampled fingerprint 1\n")
    for shard in range(num_shards):
        tokens = some_tokens(300_000 // num_shards, seed=shard)
        data = write_raw(tmp_path / f"{shard}.bin", tokens).read_bytes()
        digest.update(b"%d uint16\n" % len(tokens))
        if len(data) <= 4096 * num_samples:
            digest.update(data)
        else:
            for number in range(num_samples):
                start = (len(data) - 4096) * number // (num_samples - 1)
                digest.update(data[start : start + 4096])
    assert _fingerprint(tmp_path) == f"sampled-{digest.hexdigest()}"


def test_container_format_path_and_name_do_not_count(tmp_path: Path) -> None:
    paths = [
        write_raw(tmp_path / "a.bin", TOKENS),
        write_npy(tmp_path / "b.npy", TOKENS),
        write_llmc(tmp_path / "c.bin", TOKENS),
        write_megatron(tmp_path / "d", [TOKENS[:1000].tolist(), TOKENS[1000:].tolist()]),
    ]
    (tmp_path / "moved").mkdir()
    paths.append(Path(shutil.copy(paths[0], tmp_path / "moved" / "renamed.bin")))
    sampled = {_fingerprint(path) for path in paths}
    full = {record(spec(path)).fingerprints["full"] for path in paths}
    assert len(sampled) == len(full) == 1


def test_shard_boundaries_order_and_dtype_count(tmp_path: Path) -> None:
    for name, parts in {
        "one": [[1, 2, 3, 4]],
        "two": [[1, 2], [3, 4]],
        "other": [[1], [2, 3, 4]],
        "order": [[3, 4], [1, 2]],
    }.items():
        (tmp_path / name).mkdir()
        for number, tokens in enumerate(parts):
            write_raw(tmp_path / name / f"{number}.bin", tokens)
    found = {_fingerprint(path) for path in tmp_path.iterdir()}
    found.add(_fingerprint(tmp_path / "one", dtype="int32"))
    assert len(found) == 5


def test_a_change_between_the_sampled_blocks_shows_only_in_the_full_fingerprint(tmp_path: Path) -> None:
    paths = [write_sparse(tmp_path / f"{n}.bin", 10**6, at=at) for n, at in enumerate([{}, {10_000: 1}])]
    first, second = (record(spec(path)).fingerprints for path in paths)
    assert first["sampled"] == second["sampled"]
    assert first["full"] != second["full"]


def test_content_that_differs_from_its_recorded_hashes_does_not_open(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", TOKENS)
    record(spec(path))
    write_raw(path, TOKENS[::-1])
    with pytest.raises(
        UnreadableCorpus, match=r"verify .*` to find the block, or delete a\.bin\.hashes\.json"
    ):
        open_corpus(path, name="a")
    sidecar_path(spec(path)).unlink()
    assert _fingerprint(path).startswith("sampled-")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-20], "cannot be read"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "unknown kind of sidecar"),
        (lambda text: text.replace('"num_tokens": 300000', '"num_tokens": 300001'), "do not give the finger"),
        (lambda text: text.replace('"shards"', '"files"'), "field missing or of the wrong type"),
        (lambda text: "[]", "wrong type"),
        (lambda text: '{"kind": 3}', "field missing"),
    ],
)
def test_a_damaged_sidecar_is_refused(tmp_path: Path, damage: Callable[[str], str], message: str) -> None:
    path = write_raw(tmp_path / "a.bin", TOKENS)
    sidecar = record(spec(path)).sidecar
    sidecar.write_text(damage(sidecar.read_text()))
    with pytest.raises(UnreadableCorpus, match=message):
        open_corpus(path, name="a")


@pytest.mark.parametrize(
    ("selection", "stem"),
    [
        ({}, "corpus"),
        ({"split": "train"}, "corpus.train"),
        ({"include": ("a*",)}, [["a*"], [], None, None]),
        ({"exclude": ("a*",)}, [[], ["a*"], None, None]),
        ({"include": ("a*",), "split": "train"}, [["a*"], [], "train", None]),
        ({"token_range": (1, 5)}, [[], [], None, [1, 5]]),
        ({"token_range": (0, 5), "split": "train"}, [[], [], "train", [0, 5]]),
    ],
)
def test_the_name_of_a_sidecar(tmp_path: Path, selection: dict[str, Any], stem: str | list[Any]) -> None:
    """Servers find by it what other releases recorded."""
    if not isinstance(stem, str):
        stem = f"corpus.{hashlib.sha256(json.dumps(stem).encode()).hexdigest()[:16]}"
    assert sidecar_path(spec(tmp_path, **selection)) == tmp_path / f"{stem}.hashes.json"
    stem = stem.replace("corpus", "a.bin")
    path = write_raw(tmp_path / "a.bin", [1])
    assert sidecar_path(spec(path, **selection)) == tmp_path / f"{stem}.hashes.json"


def test_each_selection_has_hashes_and_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    for name in ("train_0.bin", "train_1.bin", "val.bin"):
        write_raw(tmp_path / name, some_tokens(1000, seed=sum(name.encode())))
    train, val, one = spec(tmp_path, split="train"), spec(tmp_path, split="val"), spec(tmp_path / "val.bin")
    patterns = spec(tmp_path, include=("train_?.bin",))
    full = {each: record(each).fingerprints["full"] for each in (train, val, one, patterns)}
    assert (full[train], full[val]) == (full[patterns], full[one])
    for each, expected in full.items():
        with Corpus.open(each) as corpus:
            assert corpus.fingerprint == expected
        assert verify(each).fingerprint == expected
    assert [path.name for path in sorted(tmp_path.glob("corpus.*"))][1:] == [
        "corpus.train.hashes.json",
        "corpus.val.hashes.json",
    ]
    (tmp_path / "train_1.bin").unlink()
    with pytest.raises(UnreadableCorpus, match="differs from its recorded hashes"):
        Corpus.open(train)
    assert [(problem.shard, problem.detail) for problem in verify(train).problems] == [
        ("train_1.bin", "recorded, but the file is missing")
    ]
