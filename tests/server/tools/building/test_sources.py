"""Input files are found in order, and what is wrong in one is named with its place."""

from __future__ import annotations

import dataclasses
import gzip
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
import zstandard

from corpus_server.errors import InvalidParameter, UnreadableCorpus
from corpus_server.tools.building import sources
from corpus_server.tools.building.inputs import find_inputs
from corpus_server.tools.building.job import BuildOptions, Split
from corpus_server.tools.building.sources import plan_parts, read_documents
from tests.server.tools.building.sources import (
    lines,
    texts,
    write_arrow_stream,
    write_feather,
    write_gzip,
    write_parquet,
    write_zstandard,
)

TEXT = BuildOptions(tokenizer="bytes", eot=0, vocab_size=256)
IDS = BuildOptions(tokenizer=None, eot=0, vocab_size=None, column="ids")


def names(*named: Path | str, include: Sequence[str] = ()) -> list[str]:
    return [Path(each.path).name for each in find_inputs([str(path) for path in named], include).inputs]


def read(path: Path | str, options: BuildOptions = TEXT, include: Sequence[str] = ()) -> list[Any]:
    parts = plan_parts(find_inputs([str(path)], include).inputs)
    documents = [document for part in parts for document in read_documents(part, options)]
    for document in documents:
        if document.error is not None:
            raise document.error
    return [document.content for document in documents]


def test_a_folder_gives_its_files_of_known_kinds_in_natural_order(tmp_path: Path) -> None:
    for name in (
        "b10.jsonl",
        "b2.jsonl.gz",
        "README.md",
        "dataset_info.json",
        "c4.json.gz",
        ".hidden.jsonl",
        "cache-1.arrow",
    ):
        (tmp_path / name).write_text("x")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.PARQUET").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("x")
    assert names(tmp_path) == ["z.PARQUET", "b2.jsonl.gz", "b10.jsonl", "c4.json.gz"]


def test_sources_keep_their_order_and_patterns_are_natural(tmp_path: Path) -> None:
    for name in ("a1.txt", "a2.txt", "a10.txt", "b.json"):
        (tmp_path / name).write_text("x")
    assert names(tmp_path / "b.json", tmp_path / "a*.txt") == ["b.json", "a1.txt", "a2.txt", "a10.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.jsonl", "expected a file, a folder or a pattern, found nothing"),
        ("none*.jsonl", "expected a file, a folder or a pattern, found nothing"),
        ("a.rst", r"a\.rst: is of no kind that can be read; known are \.txt, .* with --include '\*\.rst'"),
        ("a.parquet.gz", "is of no kind"),
        ("folder", "expected files of .* in the folder, found none"),
        ("empty.jsonl", "the sources are empty files"),
    ],
)
def test_sources_that_give_nothing(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    for other in ("a.rst", "a.parquet.gz"):
        (tmp_path / other).write_text("x")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UnreadableCorpus, match=message):
        find_inputs([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("include", "found"),
    [
        (["*.md"], ["README.md", "b.md"]),
        (["*.md", "*.jsonl"], ["README.md", "a.jsonl", "b.md"]),
        (["sub/*"], ["b.md", "c.py.gz"]),
        (["**/*.py.gz"], ["c.py.gz"]),
        (["*.parquet"], "expected files that match *.parquet in the folder, found none"),
        ([], ["a.jsonl"]),
    ],
)
def test_files_of_other_names_are_text_if_they_are_included(
    tmp_path: Path, include: list[str], found: list[str] | str
) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("README.md", "sub/b.md", ".x.md", "x.png"):
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "sub" / "c.py.gz").write_bytes(gzip.compress(b"pass"))
    (tmp_path / "a.jsonl").write_bytes(lines(["a"]))
    if isinstance(found, str):
        with pytest.raises(UnreadableCorpus, match=re.escape(found)):
            names(tmp_path, include=include)
        return
    assert names(tmp_path, include=include) == found
    contents = {"README.md": "# README.md", "b.md": "# sub/b.md", "c.py.gz": "pass", "a.jsonl": "a"}
    assert read(tmp_path, include=include) == [contents[name] for name in found]
    assert read(tmp_path / "README.md", include=["*.md"]) == ["# README.md"]


def test_a_source_says_the_field_of_its_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["a"], "body"))
    (tmp_path / "b.jsonl?text=x").mkdir()  # a path that is there is no field
    (tmp_path / "b.jsonl?text=x" / "b.jsonl").write_bytes(lines(["b"]))
    assert read(f"{tmp_path}/a.jsonl?text=body") == read(f"{tmp_path}/*.jsonl?text=body") == ["a"]
    assert read(f"{tmp_path}/b.jsonl?text=x") == ["b"]
    with pytest.raises(UnreadableCorpus, match=r"or for one source SOURCE\?text="):
        read(tmp_path / "a.jsonl")


def test_links_that_leave_a_folder_are_refused_as_servers_refuse_them(tmp_path: Path) -> None:
    for folder in ("texts", "outside"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    link = tmp_path / "texts" / "link.txt"
    for target, said in (("../outside/a.txt", "leaves the folder"), ("../outside", "leaves the folder")):
        link.symlink_to(target)
        with pytest.raises(UnreadableCorpus, match=rf"link\.txt: is a symbolic link that {said} "):
            find_inputs([str(tmp_path / "texts")])
        link.unlink()
    link.symlink_to("a.txt")
    assert names(tmp_path / "texts") == ["a.txt", "link.txt"]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_a_long_text_is_one_document_in_pieces_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: str
) -> None:
    text = "".join(f"{'ä🦆'[: number % 3]}{number}\n" * (number % 5) for number in range(300)) + "x" * 500
    data = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed](text.encode())
    (tmp_path / f"a.txt{packed}").write_bytes(data)
    (tmp_path / "b.jsonl").write_bytes(lines([text]))
    monkeypatch.setattr("corpus_server.tools.building.kinds.text.PIECE_CHARS", 100)
    monkeypatch.setattr("corpus_server.tools.building.kinds.text._READ_BYTES", 7)
    options = dataclasses.replace(TEXT, splits=(Split(name="val", share=0.5),))
    for name in (f"a.txt{packed}", "b.jsonl"):
        (part,) = plan_parts(find_inputs([str(tmp_path / name)]).inputs)
        pieces = list(read_documents(part, options))
        assert "".join(each.content for each in pieces) == text
        assert max(len(each.content) for each in pieces) <= 100
        assert all(each.content.endswith("\n") for each in pieces if "x" not in each.content)
        assert [each.is_last for each in pieces] == [False] * (len(pieces) - 1) + [True]
        # So a long text goes to the split that it would go to as a whole.
        assert {each.digest for each in pieces} == {xxhash.xxh3_64_intdigest(text.encode())}


def test_a_file_that_is_named_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UnreadableCorpus, match=r"a\.txt: is named 2 times"):
        find_inputs([str(tmp_path), str(tmp_path / "a.txt")])
    with pytest.raises(UnreadableCorpus, match=r"a\.txt: is named 2 times"):
        find_inputs([str(tmp_path / "a.txt"), os.path.relpath(tmp_path / "a.txt")])


def test_a_folder_that_may_not_be_listed_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a build by another user would hold fewer documents, and nobody would know."""
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refuse(folder: str) -> Any:
        if str(folder).endswith("locked"):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UnreadableCorpus, match="locked: cannot be listed: Permission denied"):
        find_inputs([str(tmp_path)])


def test_a_pattern_of_folders_alone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("x")
    with pytest.raises(UnreadableCorpus, match="matches folders and no file"):
        find_inputs([str(tmp_path / "*")])
    assert names(tmp_path / "**") == ["a.txt"]


def test_an_empty_source_is_not_the_current_folder() -> None:
    with pytest.raises(InvalidParameter, match="source must be a file, a folder or a pattern, got ''"):
        find_inputs([""])


def test_a_link_to_nothing_and_a_named_pipe_are_refused(tmp_path: Path) -> None:
    """Opening a named pipe would wait without end."""
    (tmp_path / "link.txt").symlink_to("nothing.txt")
    with pytest.raises(UnreadableCorpus, match=r"link\.txt: cannot be read: No such file"):
        find_inputs([str(tmp_path / "link.txt")])
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UnreadableCorpus, match=r"pipe\.txt: expected a regular file"):
        find_inputs([str(tmp_path / "pipe.txt")])


def test_a_name_that_the_manifest_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff.txt")).write_text("x")
    with pytest.raises(UnreadableCorpus, match="its name is not UTF-8"):
        find_inputs([str(tmp_path)])


@pytest.mark.parametrize("write", [write_gzip, write_zstandard])
def test_compressed_files_in_capitals(tmp_path: Path, write: Any) -> None:
    written = write(tmp_path / ("a.jsonl.gz" if write is write_gzip else "a.jsonl.zst"), texts(3))
    path = written.rename(tmp_path / written.name.upper())
    assert read(path) == texts(3)


def test_two_columns_of_the_same_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(UnreadableCorpus, match="has several columns 'text'"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n \n\n"])
def test_lines_are_read_once_wherever_parts_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: bytes
) -> None:
    rows = texts(6, most_words=2)
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(rows).removesuffix(b"\n") + ending)
    for size in range(1, path.stat().st_size + 2):
        monkeypatch.setattr(sources, "PART_BYTES", size)
        assert read(path) == rows


def test_small_files_share_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("x" * 30)
    monkeypatch.setattr(sources, "PART_BYTES", 100)
    parts = plan_parts(find_inputs([str(tmp_path)]).inputs)
    assert [len(part.slices) for part in parts] == [3, 3, 3, 1]
    assert [part.number for part in parts] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "is not JSON: "),
        (b"[1]", r"expected an object, got b'\[1\]"),
        (
            b'{"body": "a", "n": 1}',
            r"has no field 'text', only 'body', 'n'; name one of them with --text-field \(find: --field\),",
        ),
        (b'{"text": 5}', "expected text in 'text', got 5"),
        (b'{"text": [5]}', r"expected text in 'text', got \[5\]; for token ids say --column text"),
        (b'{"text": "\xff"}', "is not JSON: "),
    ],
)
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_a_bad_line_is_named_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, message: str, packed: str
) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 50)
    data = lines(["ä"] * 40) + b"\n" + line + b"\n" + lines(["b"] * 3)
    data = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed](data)
    path = tmp_path / f"a.jsonl{packed}"
    path.write_bytes(data)
    with pytest.raises(UnreadableCorpus, match=rf"a\.jsonl{packed}: line 42: {message}"):
        read(path)


@pytest.mark.parametrize(
    "value", ["[1.5]", "[true]", "[[1]]", "[1, [2]]", f"[{2**70}]", '"text"', "7", '["1"]']
)
def test_a_list_of_something_else_than_ids(tmp_path: Path, value: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"ids": [1]}\n{"ids": ' + value + "}\n")
    with pytest.raises(UnreadableCorpus, match=r"line 2: expected a list of token ids in 'ids', got "):
        read(tmp_path / "a.jsonl", IDS)


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_parquet, "a.parquet"), (write_feather, "a.feather"), (write_arrow_stream, "a.arrow")],
)
def test_columns_of_another_name_or_type(tmp_path: Path, write: Any, name: str) -> None:
    path = write(tmp_path / name, ["a"])
    with pytest.raises(
        UnreadableCorpus, match="has no field 'ids', only 'n', 'text'; name one of them with --col"
    ):
        read(path, IDS)
    path = write(tmp_path / name, [[1, 2]])
    with pytest.raises(
        UnreadableCorpus, match=r"expected text in column 'text', got list<.*; for token ids say --col"
    ):
        read(path)
    path = write(tmp_path / name, ["a"], field="ids")
    with pytest.raises(UnreadableCorpus, match="expected lists of integers in column 'ids', got string"):
        read(path, IDS)
    path = write(tmp_path / name, [[1], [2, None]], field="ids")
    with pytest.raises(UnreadableCorpus, match="a list of token ids holds a null"):
        read(path, IDS)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_gzip, "a.jsonl.gz"),
        (write_zstandard, "a.jsonl.zst"),
        (write_parquet, "a.parquet"),
        (write_feather, "a.feather"),
        (write_arrow_stream, "a.arrow"),
    ],
)
@pytest.mark.parametrize("keep", [0.3, 0.95, 4])
def test_a_copy_that_was_interrupted(tmp_path: Path, write: Any, name: str, keep: float) -> None:
    path = write(tmp_path / name, texts(200))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep if keep > 1 else keep * len(whole))])
    with pytest.raises(UnreadableCorpus, match=rf"{name}: .*was the copy interrupted"):
        read(path)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xe4def")
    with pytest.raises(UnreadableCorpus, match=r"a\.txt: byte 3: is not UTF-8; convert it with iconv"):
        read(tmp_path / "a.txt")
    with pytest.raises(UnreadableCorpus, match="is text, which has no column 'ids'"):
        read(tmp_path / "a.txt", IDS)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_named_also_where_it_is_valid_utf8(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("hello\n".encode(encoding))
    name = encoding.upper().replace("-BE", "BE").replace("-LE", "LE")
    said = f"a.txt: is {name}; convert it with iconv -f {name} -t UTF-8"
    with pytest.raises(UnreadableCorpus, match=said):
        read(tmp_path / "a.txt")


def refusal(*named: Path | str, include: Sequence[str] = ()) -> str:
    with pytest.raises((UnreadableCorpus, InvalidParameter)) as caught:
        find_inputs([str(each) for each in named], include)
    return caught.value.detail


def touch(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


HUB_LAYOUT = [f"data/{split}-00000-of-00001.parquet" for split in ("test", "train", "validation")]


@pytest.mark.parametrize(
    "files",
    [
        HUB_LAYOUT,
        ["train.jsonl", "val.jsonl"],
        ["train/a.txt", "validation/a.txt"],
        ["train/data-00000-of-00001.arrow", "test/data-00000-of-00001.arrow"],  # a saved DatasetDict
        ["en/c4-train.00000-of-00001.json.gz", "en/c4-validation.00000-of-00001.json.gz"],
        ["train/00.jsonl.zst", "train/01.jsonl.zst", "val.jsonl.zst", "test.jsonl.zst"],  # the Pile's
        ["train.jsonl", "more.jsonl"],
    ],
    ids=["hub", "lines", "folders", "DatasetDict", "C4", "Pile", "a name that says none"],
)
def test_files_of_several_splits_are_no_corpus_until_one_is_chosen(tmp_path: Path, files: list[str]) -> None:
    touch(tmp_path / "in", *files)
    for source in (tmp_path / "in", f"{tmp_path}/in/**/*.*"):
        said = refusal(source)
        assert "its files are of several splits: " in said
        assert f"choose one: {source}#" in said
        assert f"or, if they do belong together: {source}#all" in said
        train = [Path(name).name for name in files if "train" in name]
        assert names(f"{source}#train") == train
        assert sorted(names(f"{source}#all")) == sorted(Path(name).name for name in files)
    assert "no file is of split eval; there are " in refusal(f"{tmp_path}/in#eval")
    assert "split must be one of " in refusal(f"{tmp_path}/in#trian")


def test_several_sources_are_of_one_split_or_each_says_its_own(tmp_path: Path) -> None:
    touch(tmp_path, "train/a.jsonl", "val/a.jsonl", "x-train.jsonl", "x-val.jsonl", "plain.jsonl")
    for one, other in (("train", "val"), ("x-train.jsonl", "x-val.jsonl")):
        assert "are of several splits: train (" in refusal(tmp_path / one, tmp_path / other)
        assert names(f"{tmp_path}/{one}#all", f"{tmp_path}/{other}#all") == [
            "a.jsonl" if one == "train" else one,
            "a.jsonl" if other == "val" else other,
        ]
    assert names(tmp_path / "train", tmp_path / "x-train.jsonl") == ["a.jsonl", "x-train.jsonl"]
    assert names(f"{tmp_path}/x-train.jsonl#train?text=body", tmp_path / "plain.jsonl")
    found = find_inputs([f"{tmp_path}/x-train.jsonl#train?text=body"]).inputs
    assert [each.text_field for each in found] == ["body"]


def test_a_path_that_looks_like_a_split_is_a_path(tmp_path: Path) -> None:
    touch(tmp_path, "a#train/b.txt", "a#train/val.jsonl#test")
    assert names(tmp_path / "a#train" / "val.jsonl#test", include=["*"]) == ["val.jsonl#test"]
    assert names(tmp_path / "a#train#other") == ["b.txt"]


def test_files_that_are_not_read_are_told_with_the_reason(tmp_path: Path) -> None:
    touch(tmp_path, "train.jsonl", "val.jsonl", "info.json", "x.png", "raw.bin", "cache-1.arrow", ".x.txt")
    found = find_inputs([f"{tmp_path}#train"])
    assert {path.name: why for path, why in found.left_out} == {
        "val.jsonl": "of another split",
        "info.json": "plain .json may describe other files; name it to read it",
        "x.png": "of no kind that is read; --include reads it as text",
        "raw.bin": "no chunk of litData; token files need no build",
        "cache-1.arrow": "a cache of Hugging Face's datasets",
    }
    assert find_inputs([f"{tmp_path}/train*"]).left_out == ()


def test_a_hole_among_numbered_files_is_told(tmp_path: Path) -> None:
    touch(tmp_path / "in", *(f"train-{n:05}-of-00004.jsonl" for n in (0, 1, 3)), "model-1-of-2.txt")
    assert find_inputs([f"{tmp_path}/in#train"]).missing == (
        "1 of the 4 files train-*-of-00004.jsonl is missing: number 2",
    )
    assert find_inputs([f"{tmp_path}/in/train-0000[01]*"]).missing != ()
    touch(tmp_path / "in", "train-00002-of-00004.jsonl")
    assert find_inputs([f"{tmp_path}/in/train-0000[01]*"]).missing == ()
    assert find_inputs([f"{tmp_path}/in/train-00001-of-00004.jsonl"]).missing == ()
