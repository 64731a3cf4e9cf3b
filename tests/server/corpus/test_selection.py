"""Which files are the shards of a corpus, and in which order."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from corpus_server.corpus.selection import corpora_of_splits, files_left_out, list_shards, missing_numbers
from corpus_server.corpus_spec import ALL, CorpusSpec, split_of
from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building.inputs import find_inputs
from corpus_server.tools.building.job import BuildOptions
from corpus_server.tools.building.sources import check_first
from tests.corpora import discover, open_corpus, spec, write_arrow, write_megatron, write_npy, write_raw
from tests.serving import run_here


def _names(path: Path) -> list[str]:
    return [shard.name for shard in list_shards(spec(path))]


def test_shards_come_in_natural_order(tmp_path: Path) -> None:
    for name in ["b10.bin", "b2.bin", "b1.bin", "a.bin", "b02.bin"]:
        write_raw(tmp_path / name, [1])
    assert _names(tmp_path) == ["a.bin", "b1.bin", "b02.bin", "b2.bin", "b10.bin"]


def test_side_files_are_no_shards(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [[1, 2]])
    write_raw(tmp_path / "part.npy", [1])
    sides = ["tokenizer.json", "corpus.hashes.json", "part.csv.gz", ".hidden.bin", "meta.pkl", "README.md"]
    for name in [*sides, "LICENSE", "_SUCCESS", "prepare.py"]:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / ".cache").mkdir()
    write_raw(tmp_path / ".cache" / "y.bin", [1])
    assert _names(tmp_path) == ["part.npy", "x.bin"]


def _refusal(path: Path, **options: Any) -> str:
    with pytest.raises(UnreadableCorpus) as caught:
        list_shards(spec(path, **options))
    assert caught.value.detail.endswith(f"; {caught.value.remedy}")
    return caught.value.detail


@pytest.mark.parametrize(
    ("side_files", "found"),
    [
        ([], "nothing"),
        (["my notes.txt"], "only my notes.txt"),
        ([f"{n}.txt" for n in range(5)], "only 0.txt, 1.txt, 2.txt, 3.txt, 4.txt"),
        ([f"{n}.txt" for n in range(6)], "only 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 1 more"),
        ([f"{n}.txt" for n in range(1005)], "only 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 1,000 more"),
    ],
    ids=["none", "one", "five", "six", "many"],
)
def test_an_empty_folder_is_refused(tmp_path: Path, side_files: list[str], found: str) -> None:
    for name in side_files:
        (tmp_path / name).touch()
    assert _refusal(tmp_path) == (
        f"{tmp_path}: expected token files in the folder, found {found}; check the path, or tokenize its "
        f"text: corpus-server build {tmp_path} --tokenizer tokenizer.json --out DIR"
    )


def test_a_folder_without_token_files_is_not_blamed_on_a_picture(tmp_path: Path) -> None:
    for name in ("a.png", "b.CSS", "c.md"):
        (tmp_path / name).touch()
    assert _refusal(tmp_path).startswith(
        f"{tmp_path}: expected token files in the folder, found only a.png, b.CSS, c.md; check the path"
    )


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    assert _refusal(tmp_path / "missing") == (
        f"{tmp_path / 'missing'}: expected a token file or a folder of shards, found nothing; "
        "check the path and that it is mounted; write \\ before a , = # * ? or [ that belongs to a name"
    )


def test_a_path_in_an_object_store_is_refused() -> None:
    """The server stages the files of such a corpus; commands that take files cannot read them."""
    with pytest.raises(UnreadableCorpus) as caught:
        list_shards(spec("/web", store="s3://bucket"))
    assert caught.value.received == "s3://bucket/web"
    assert caught.value.remedy == (
        "run it on a copy and put the file that it makes (*.hashes.json, *.documents) beside the shards in "
        "the store; serve a split by its name: 's3://bucket/web#train'"
    )
    assert caught.value.detail == (
        f"s3://bucket/web: lies in an object store, and this command takes local files; {caught.value.remedy}"
    )


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is made up, for the superuser may list everything."""

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    assert _refusal(tmp_path) == f"{tmp_path}: cannot be listed: Permission denied; check its permissions"


def test_files_that_are_no_shards_are_listed(tmp_path: Path) -> None:
    _write(tmp_path, ["sub/train_1.bin", "train_0.bin", "val_0.bin"])
    for name in ("README.md", "sub/x.json", ".hidden"):
        (tmp_path / name).touch()
    assert [file.name for file in files_left_out(spec(tmp_path, split="train"))] == [
        "README.md",
        "sub/x.json",
        "val_0.bin",
    ]
    assert files_left_out(spec(tmp_path / "train_0.bin")) == []


def test_a_data_file_without_its_index_among_pairs_is_ambiguous(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1, 2]])
    write_raw(tmp_path / "b.bin", [1])
    write_raw(tmp_path / "c.bin", [1])
    assert _refusal(tmp_path) == (
        f"{tmp_path / 'b.bin'}: has no .idx, but other files of the folder do: it may be raw tokens or half "
        "of a Megatron pair; put its .idx there, or give the dtype to serve it as raw tokens"
    )
    (tmp_path / "c.bin").unlink()
    assert [shard.format for shard in discover(tmp_path, dtype="uint16")] == ["megatron", "raw"]


def test_an_index_without_its_data_is_refused(tmp_path: Path) -> None:
    for name in ("a.v1", "b", "c"):
        write_megatron(tmp_path / name, [[1, 2]])
    for name in ("a.v1.bin", "b.bin"):
        (tmp_path / name).unlink()
    said = "is an index, but a.v1.bin is missing beside it; put the .bin there or remove the .idx"
    assert _refusal(tmp_path) == f"{tmp_path / 'a.v1.idx'}: {said}"


@pytest.mark.parametrize("dtype", [None, "uint16"])
def test_the_index_of_a_chosen_file_counts_also_if_another_file_has_its_name(
    tmp_path: Path, dtype: str | None
) -> None:
    for name in ("a", "b"):
        write_megatron(tmp_path / name, [[1, 2]])
    write_npy(tmp_path / "a.npy", [1])
    shards = list_shards(spec(tmp_path, exclude=("*.npy",), dtype=dtype))
    assert [shard.name for shard in shards] == ["a.bin", "b.bin"]


@pytest.mark.parametrize("name", ["linked.bin", "linked.idx", "tokenizer.json", "linked"])
def test_links_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    root, outside = tmp_path / "corpus", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    write_raw(root / "a.bin", [1])
    target = outside if name == "linked" else write_raw(outside / "secret", [1])
    (root / name).symlink_to(target)
    assert _refusal(root) == (
        f"{root / name}: is a symbolic link that leaves the folder {root} (to {target}); "
        "copy or hard-link the file, or name the folder that really holds it"
    )


def test_links_of_the_cache_of_the_hub_lead_to_its_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--org--web"
    folder = repository / "snapshots" / ("0" * 40) / "data"
    for each in (folder, repository / "blobs"):
        each.mkdir(parents=True)
    write_raw(repository / "blobs" / "abc", [1, 2])
    (folder / "a.bin").symlink_to("../../../blobs/abc")
    for path in (folder, folder.parent):
        assert [file.path for file in list_shards(spec(path))] == [folder / "a.bin"]
    (folder / "b.bin").symlink_to("../../../refs")
    assert "is a symbolic link that leaves the folder" in _refusal(folder)


def test_links_inside_the_folder(tmp_path: Path) -> None:
    """A link to a shard is one more shard; to a folder, or in a circle, it is refused."""
    (tmp_path / "sub").mkdir()
    write_raw(tmp_path / "sub" / "a.bin", [1])
    (tmp_path / "b.bin").symlink_to("sub/a.bin")
    assert _names(tmp_path) == ["b.bin", "sub/a.bin"]
    (tmp_path / "again").symlink_to("sub")
    assert _refusal(tmp_path) == (
        f"{tmp_path / 'again'}: is a symbolic link to a folder, its files would count twice; remove it"
    )
    (tmp_path / "again").unlink()
    (tmp_path / "circle.bin").symlink_to("circle.bin")
    with pytest.raises(UnreadableCorpus, match=r"circle\.bin: cannot be opened"):
        discover(tmp_path)


SPLIT_FOLDERS = {
    "nanogpt": (["train.bin", "val.bin"], "train (train.bin), val (val.bin)"),
    "llm.c": (
        ["tinyshakespeare_train.bin", "tinyshakespeare_val.bin"],
        "train (tinyshakespeare_train.bin), val",
    ),
    "modded-nanogpt": (
        ["fineweb_val_000000.bin", *(f"fineweb_train_{n:06}.bin" for n in (1, 2, 3))],
        "train (fineweb_train_000001.bin, fineweb_train_000002.bin and 1 more), val (fineweb_val_000000.bin)",
    ),
    "folders": (["train/0.bin", "Validation/0.bin"], "val (Validation/0.bin), train (train/0.bin)"),
    "a-validation-file-in-a-training-folder": (
        ["part-000.bin", "val.bin"],
        "other (names that say none: part-000.bin), val (val.bin)",
    ),
    "a-validation-file-in-a-folder-called-train": (
        ["train/0.bin", "train/val_0.bin"],
        "train (train/0.bin), train+val (train/val_0.bin)",
    ),
}


def _write(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_raw(folder / name, [1])
    return folder


@pytest.mark.parametrize("layout", SPLIT_FOLDERS)
def test_files_of_several_splits_are_refused_with_the_choices(tmp_path: Path, layout: str) -> None:
    """Served as one corpus, training would see its validation data, without a word."""
    names, said = SPLIT_FOLDERS[layout]
    folder = _write(tmp_path / "my data", names)
    with pytest.raises(UnreadableCorpus) as caught:
        list_shards(spec(folder))
    assert re.fullmatch(
        f"{folder}: its files are of several splits: {re.escape(said)}.*; as one corpus, training would see "
        f"its validation data; {re.escape(str(caught.value.remedy))}",
        caught.value.detail,
    )
    for each in corpora_of_splits(spec(folder)):
        choice = f"'{folder}#{each.split}'"
        assert choice in str(caught.value.remedy)
        (shards,) = {tuple(list_shards(each)), tuple(list_shards(CorpusSpec.parse(choice.strip("'"))))}
        assert {split_of(shard.name) for shard in shards} == {each.split}
    assert re.fullmatch(
        f"choose one: .* or .*; or serve each under a name of its own: corpus-server serve '{folder}' "
        f"--splits; or, if they do belong together: '{folder}#all'",
        str(caught.value.remedy),
    )
    assert len(list_shards(CorpusSpec.parse(f"{folder}#all"))) == len(names)


def test_megatron_splits_are_told_apart_and_may_lack_the_others_index(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x_train_text_document", [[1, 2]])
    write_megatron(tmp_path / "x_valid_text_document", [[1, 2]])
    with pytest.raises(UnreadableCorpus, match="several splits"):
        _names(tmp_path)
    (tmp_path / "x_valid_text_document.idx").unlink()
    chosen = list_shards(spec(tmp_path, split="train"))
    assert [shard.name for shard in chosen] == ["x_train_text_document.bin"]
    assert [file.path for file in list_shards(spec(tmp_path / "x_train_text_document"))] == [chosen[0].path]


def test_an_index_without_its_data_is_refused_by_its_own_split_alone(tmp_path: Path) -> None:
    for name in ("x_train_text_document", "x_valid_text_document", "y_valid_text_document"):
        write_megatron(tmp_path / name, [[1, 2]])
    (tmp_path / "y_valid_text_document.bin").unlink()
    assert [shard.name for shard in list_shards(spec(tmp_path, split="train"))] == [
        "x_train_text_document.bin"
    ]
    for split in ("val", ALL):
        with pytest.raises(UnreadableCorpus, match=r"y_valid_text_document\.idx: is an index"):
            list_shards(spec(tmp_path, split=split))


def test_splits_are_corpora_named_after_them(tmp_path: Path) -> None:
    _write(tmp_path, ["train/0.bin", "train/val_0.bin", "b.bin"])
    assert [(each.name, each.split, each.path) for each in corpora_of_splits(spec(tmp_path, "web"))] == [
        ("web-other", "other", tmp_path),
        ("web-train", "train", tmp_path),
        ("web-train-val", "train+val", tmp_path),
    ]
    chosen = spec(tmp_path, "web", split="train")
    assert corpora_of_splits(chosen) == [chosen]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({"include": ("*_train_*.bin",)}, ["a_train_1.bin"]),
        ({"include": ("**/*_train_*.bin",)}, ["a_train_1.bin", "b/a_train_2.bin", "b/c/a_train_3.bin"]),
        ({"include": ("b/*",)}, ["b/a_train_2.bin"]),
        ({"include": ("b/**",)}, ["b/a_train_2.bin", "b/c/a_train_3.bin"]),
        ({"include": ("a_[tv]*_1.bin",), "split": "val"}, ["a_val_1.bin"]),
        ({"exclude": ("*val*",)}, ["a_train_1.bin", "b/a_train_2.bin", "b/c/a_train_3.bin"]),
        ({"exclude": ("a_*", "b/c/**")}, ["b/a_train_2.bin"]),
        ({"include": ("*",), "exclude": ("*train*",)}, ["a_val_1.bin"]),
    ],
)
def test_patterns_choose(tmp_path: Path, options: dict[str, Any], chosen: list[str]) -> None:
    _write(tmp_path, ["a_train_1.bin", "a_val_1.bin", "b/a_train_2.bin", "b/c/a_train_3.bin"])
    assert [shard.name for shard in list_shards(spec(tmp_path, **options))] == chosen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ("*",)}, "several splits"),
        ({"exclude": ("*vla*",)}, r"the pattern '\*vla\*' matches no token file; check its spelling; write"),
        ({"include": ("*train*", "*.npy")}, r"the pattern '\*\.npy' matches no token file"),
        ({"exclude": ("*",)}, "expected token files in the folder, found only"),
        (
            {"split": "test"},
            r"no file is of split test; there are train \(a_train_1\.bin\), val \(a_val_1\.bin\)$",
        ),
    ],
)
def test_a_choice_of_nothing_or_of_too_much_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    _write(tmp_path, ["a_train_1.bin", "a_val_1.bin"])
    with pytest.raises(UnreadableCorpus, match=message):
        list_shards(spec(tmp_path, **options))


def test_a_link_to_a_folder_in_which_nothing_can_match_is_passed_over(tmp_path: Path) -> None:
    """Patterns of two disks meet in the root of all files, where /sbin is a link."""
    (tmp_path / "usr").mkdir()
    (tmp_path / "sbin").symlink_to("usr")
    for disk in ("disk1", "disk2"):
        (tmp_path / disk).mkdir()
        write_raw(tmp_path / disk / "a.bin", [1, 2, 3])
    both = CorpusSpec.parse(f"web={tmp_path}/disk1/*.bin,{tmp_path}/disk2/*.bin")
    assert [shard.name for shard in list_shards(both)] == ["disk1/a.bin", "disk2/a.bin"]


def _mds(folder: Path, *, listed: dict[str, int], files: dict[str, int]) -> Path:
    """Write shards of so many samples of two tokens, and an index that lists shards."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"column_names": ["tokens"], "column_encodings": ["ndarray:uint16:2"], "column_sizes": [4]}
    text = json.dumps(config).encode()
    for name, count in files.items():
        first = 8 + 4 * count + len(text)
        head = struct.pack(f"<{count + 2}I", count, *(first + 4 * n for n in range(count + 1)))
        (folder / name).write_bytes(head + text + np.arange(2 * count, dtype="<u2").tobytes())
    shards = [
        {"format": "mds", "samples": count, "zip_data": None, "raw_data": {"basename": name}}
        for name, count in listed.items()
    ]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def _said(path: Path) -> str:
    with pytest.raises(UnreadableCorpus) as served:
        open_corpus(path)
    return served.value.detail


@pytest.mark.parametrize(
    ("listed", "files", "message"),
    [
        ({"a.mds": 3, "b.mds": 3}, {"a.mds": 3}, "b.mds: is missing: index.json beside it lists it; copy"),
        ({"a.mds": 3}, {"a.mds": 3, "b.mds": 3}, "b.mds: is not among the 1 files that index.json beside it"),
        ({"a.mds": 4}, {"a.mds": 3}, "a.mds: holds 3 samples, index.json beside it lists 4; are the two of"),
        ({"a.mds": 3, "b.mds": 1}, {"a.mds": 3, "b.mds": 1}, None),
    ],
    ids=["missing", "left over", "of another run", "whole"],
)
@pytest.mark.parametrize("below", ["", "sub"])
def test_a_folder_of_mds_shards_is_held_to_its_index(
    tmp_path: Path, below: str, listed: dict[str, int], files: dict[str, int], message: str | None
) -> None:
    folder = _mds(tmp_path / below, listed=listed, files=files)
    options = BuildOptions(tokenizer=None, eot=0, vocab_size=None, column="tokens")
    if message is None:
        with open_corpus(tmp_path) as corpus:
            assert corpus.num_tokens == 2 * sum(files.values())
        assert len(find_inputs([str(tmp_path)]).inputs) == len(files)
        return
    assert _said(tmp_path).startswith(f"{folder}/{message}")
    for source in (tmp_path, f"{folder}/*.mds"):
        with pytest.raises(UnreadableCorpus) as built:  # build says the same, before any work
            check_first(find_inputs([str(source)]).inputs, options)
        assert built.value.detail.startswith(f"{folder}/{message}")


def test_an_index_of_shards_in_folders_below_lists_them_by_their_paths(tmp_path: Path) -> None:
    for name in ("0", "1"):
        _mds(tmp_path / name, listed={"a.mds": 2}, files={"a.mds": 2})
    _mds(tmp_path, listed={"0/a.mds": 2, "1/a.mds": 2}, files={})
    with open_corpus(tmp_path) as corpus:
        assert corpus.num_tokens == 8
    (tmp_path / "1" / "a.mds").unlink()
    assert "1/a.mds: is missing" in _said(tmp_path)  # though nothing else lies in its folder
    (tmp_path / "1" / "index.json").unlink()
    assert "1/a.mds: is missing" in _said(tmp_path)


def _saved(folder: Path, listed: Sequence[str], files: Sequence[str]) -> None:
    """Write what `save_to_disk` of datasets writes: streams of two rows, and the list of them."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"input_ids": pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int32()))})
    for name in files:
        write_arrow(folder / name, table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": each} for each in listed]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_folder_of_save_to_disk_is_held_to_its_list(tmp_path: Path) -> None:
    data = [f"data-{n:05}-of-00003.arrow" for n in range(3)]
    _saved(tmp_path / "whole", data, [*data, "cache-0123.arrow"])
    with open_corpus(tmp_path / "whole") as corpus:
        assert corpus.num_tokens == 18
    _saved(tmp_path / "hole", data, [data[0], data[2]])
    assert f"{data[1]}: is missing: state.json beside it lists it" in _said(tmp_path / "hole")
    _saved(tmp_path / "more", data[:1], data[:2])
    assert f"{data[1]}: is not among the 1 files that state.json" in _said(tmp_path / "more")
    for name in ("hole", "more"):
        with pytest.raises(UnreadableCorpus, match=re.escape(data[1])):
            find_inputs([str(tmp_path / name)])
    # The list of a split that is not chosen does not count.
    _saved(tmp_path / "dict" / "train", data[:1], data[:1])
    _saved(tmp_path / "dict" / "test", data, data[:1])
    with open_corpus(tmp_path / "dict", split="train") as corpus:
        assert corpus.num_tokens == 6
    assert len(find_inputs([f"{tmp_path}/dict#train"]).inputs) == 1
    with pytest.raises(UnreadableCorpus, match="is missing"):
        find_inputs([f"{tmp_path}/dict#test"])


def test_a_hole_among_numbered_shards_is_a_warning(tmp_path: Path) -> None:
    for number in (0, 1, 3):
        write_raw(tmp_path / f"train-{number:05}-of-00004.bin", [1, 2])
    run = run_here("inspect", str(tmp_path))
    said = "corpus 'c': 1 of the 4 files train-*-of-00004.bin is missing: number 2; were all of them copied?"
    assert (
        " ".join(run.stderr.split()).replace(f"corpus '{tmp_path.name}'", "corpus 'c'") == f"warning: {said}"
    )
    with open_corpus(tmp_path) as corpus:
        assert corpus.warnings() == [said]
    with open_corpus(tmp_path, include=("*-0000[01]-*",)) as corpus:
        assert corpus.warnings() == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a-1-of-2.bin", "a-2-of-2.bin"], []),  # counted from 1
        (["a-0-of-2.bin", "a-1-of-2.bin"], []),
        (["a-2-of-2.bin"], ["1 of the 2 files a-*-of-2.bin is missing: number 1"]),
        (["x/a-0-of-9.bin"], ["8 of the 9 files x/a-*-of-9.bin are missing: numbers 1, 2, 3, ..."]),
        (["a-7-of-2.bin", "of-3.bin", "1-of-a-kind.bin", "a-0-of-1.bin"], []),
    ],
)
def test_missing_numbers(names: list[str], said: list[str]) -> None:
    assert missing_numbers(names) == said
