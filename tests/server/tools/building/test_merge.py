"""Joining built corpora: the same tokens and fingerprint as one corpus, no byte moved, or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.corpus import Corpus
from corpus_server.corpus.verify import record, verify
from corpus_server.errors import CorpusServerError, InvalidParameter, UnreadableCorpus
from corpus_server.tools.building import merge as merge_module
from corpus_server.tools.building.manifest import read_manifest, spec_of
from corpus_server.tools.building.merge import merge
from tests.server.tools.building.built import tokens_of, write_built
from tests.serving import run_here


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [write_built(tmp_path / "a"), write_built(tmp_path / "b", lengths=(50, 70, 30), seed=1)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_merged_corpus_is_the_corpora_one_after_another(two: list[Path], tmp_path: Path) -> None:
    merge(two, tmp_path / "both")
    with Corpus.open(spec_of(tmp_path / "both")) as corpus:
        assert corpus.num_tokens == 450
        assert corpus.num_documents == sum(read_manifest(path).num_documents for path in two)
        assert corpus.tokenizer_name == "tokenizer.json"
        assert corpus.fingerprint_kind == "full"
        fingerprint = corpus.fingerprint
    assert (tokens_of(tmp_path / "both") == np.concatenate([tokens_of(path) for path in two])).all()
    assert verify(spec_of(tmp_path / "both")).fingerprint == fingerprint
    # What reading every byte gives is what was concluded from the recorded digests.
    assert record(spec_of(tmp_path / "both")).fingerprints["full"] == fingerprint
    manifest = read_manifest(tmp_path / "both")
    assert (manifest.fingerprint, manifest.num_tokens, len(manifest.shards)) == (fingerprint, 450, 5)
    assert [origin.options["seed"] for origin in manifest.origins] == [0, 1]


def test_no_shard_is_copied_unless_asked(two: list[Path], tmp_path: Path) -> None:
    merge(two, tmp_path / "links")
    merge(two, tmp_path / "copies", copy=True)
    for name in ("000003.npy", "000003.npy.documents"):
        assert (tmp_path / "links" / name).samefile(two[1] / name.replace("3", "1"))
        assert not (tmp_path / "copies" / name).samefile(two[1] / name.replace("3", "1"))
    links, copies = (record(spec_of(tmp_path / name)).fingerprints for name in ("links", "copies"))
    assert links == copies


def test_copies_are_on_the_disk_before_the_folder_has_its_name(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link needs no such wait: what it names is there already."""
    flush, flushed = os.fsync, set[str]()

    def note(fd: int) -> None:
        flushed.add(Path(f"/proc/self/fd/{fd}").readlink().name)
        flush(fd)

    monkeypatch.setattr(os, "fsync", note)
    merge(two, tmp_path / "both", copy=True)
    copied = {"tokenizer.json", *(f"{number:06}.npy" for number in range(5))}
    assert copied | {f"{number:06}.npy.documents" for number in range(5)} <= flushed


def test_splits_are_merged_one_by_one(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        for split in ("train", "val"):
            write_built(tmp_path / name / split, split=split, seed=seed)
    merged = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert {split: manifest.num_tokens for split, manifest in merged.items()} == {"train": 600, "val": 600}
    assert names(tmp_path / "both") == ["train", "val"]
    assert verify(spec_of(tmp_path / "both" / "val")).ok


def test_a_merged_corpus_can_be_merged_again(two: list[Path], tmp_path: Path) -> None:
    merge(two, tmp_path / "both")
    third = write_built(tmp_path / "c", seed=2)
    merge([tmp_path / "both" / "manifest.json", third], tmp_path / "all")
    merge([*two, third], tmp_path / "at once")
    assert read_manifest(tmp_path / "all") == read_manifest(tmp_path / "at once")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"dtype": "uint32"}, "one dtype: that of .*/a is uint16, that of .*/other is uint32"),
        ({"eot": 39}, "one end-of-text token: that of .*/a is 0, that of .*/other is 39"),
        ({"tokenizer": "[]"}, r"one tokenizer: that of .*/a is tokenizer.json \(xxh3-128="),
        ({"tokenizer": None}, "one tokenizer: .* that of .*/other is None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_corpora_that_differ_are_refused(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    paths = [write_built(tmp_path / "a"), write_built(tmp_path / "other", **other)]
    with pytest.raises(InvalidParameter, match=said):
        merge(paths, tmp_path / "both")
    assert names(tmp_path) == ["a", "other"]


def test_training_data_is_not_merged_with_held_out_documents(tmp_path: Path) -> None:
    train = write_built(tmp_path / "a" / "train", split="train")
    val = write_built(tmp_path / "a" / "val", split="val")
    with pytest.raises(InvalidParameter, match="must be of one split, got train, val"):
        merge([train, val], tmp_path / "both")
    with pytest.raises(InvalidParameter, match=r"same splits, .*/a has train, val, .*/train has none"):
        merge([tmp_path / "a", train], tmp_path / "both")


def test_the_same_tokens_are_not_merged_twice(two: list[Path], tmp_path: Path) -> None:
    again = shutil.copytree(two[0], tmp_path / "again")
    for repeated in (two[0], again):
        with pytest.raises(InvalidParameter, match=f"{repeated} holds the same tokens as .*/a"):
            merge([*two, repeated], tmp_path / "both")


def test_what_was_not_built_or_is_damaged_is_refused(two: list[Path], tmp_path: Path) -> None:
    def refuse(path: Path, said: str) -> None:
        with pytest.raises(UnreadableCorpus, match=said):
            merge([two[0], path], tmp_path / "both")
        assert not (tmp_path / "both").exists()
        shutil.rmtree(path, ignore_errors=True)

    copies = (shutil.copytree(two[1], tmp_path / f"copy{number}") for number in range(9))
    refuse(tmp_path / "nowhere", "has no manifest.json")
    (path := next(copies)).joinpath("manifest.json").unlink()
    refuse(path, "has no manifest.json")
    (path := next(copies)).joinpath("corpus.hashes.json").unlink()
    refuse(path, "expected recorded hashes .* there are none")
    shutil.copy(two[0] / "corpus.hashes.json", path := next(copies))
    refuse(path, "expected recorded hashes that give")
    (path := next(copies)).joinpath("000001.npy").unlink()
    refuse(path, "content differs from its recorded hashes")
    np.save((path := next(copies)) / "000001.npy", np.arange(70, dtype="uint16"))
    refuse(path, "made for other tokens")
    path = next(copies)
    for suffix in (".npy", ".npy.documents"):
        (path / f"000002{suffix}").rename(path / f"000009{suffix}")
    refuse(path, "holds 3 shards, its manifest names 3 or other ones")
    document = json.loads((path := next(copies)).joinpath("manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(document | {"version": 2}))
    refuse(path, "is no manifest of version 1: version: Input should be 1")
    (path := next(copies)).joinpath("manifest.json").write_text('{"kind": ')
    refuse(path, "is no manifest of version 1: Expecting value")


def test_an_out_that_exists_is_left_alone(two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    with pytest.raises(InvalidParameter, match="a folder that does not exist yet"):
        merge(two, tmp_path / "both")


def test_where_links_are_not_possible_the_refusal_names_copy(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(merge_module.os, "link", refuse)
    with pytest.raises(CorpusServerError, match="--copy"):
        merge(two, tmp_path / "both")
    assert names(tmp_path) == ["a", "b"]
    merge(two, tmp_path / "both", copy=True)


def test_the_command_says_what_it_made(two: list[Path], tmp_path: Path) -> None:
    said = run_here("merge", *two, "--out", tmp_path / "both", "--json")
    assert (said.returncode, said.stderr) == (0, "")
    (merged,) = json.loads(said.stdout)
    assert merged["fingerprint"] == read_manifest(tmp_path / "both").fingerprint
    again = run_here("merge", *two, "--out", tmp_path / "both")
    assert again.returncode == 2
    assert "a folder that does not exist yet, got" in again.stderr
    assert "(choose another name, or remove it)" in again.stderr
    assert "450 tokens of" in run_here("merge", *two, "--out", tmp_path / "more").stdout
