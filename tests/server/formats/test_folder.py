"""Which files of a folder are shards, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from corpus_server.errors import UnreadableCorpus
from corpus_server.formats import discover, list_shards
from tests.corpora import write_llmc, write_megatron, write_npy, write_raw


def _names(path: Path) -> list[str]:
    return [shard.name for shard in list_shards(path)]


def test_shards_come_in_natural_order(tmp_path: Path) -> None:
    for name in ["b10.bin", "b2.bin", "b1.bin", "a.bin", "b02.bin"]:
        write_raw(tmp_path / name, [1])
    assert _names(tmp_path) == ["a.bin", "b1.bin", "b02.bin", "b2.bin", "b10.bin"]


def test_nested_folders_give_relative_names(tmp_path: Path) -> None:
    for folder in ["part10", "part2", "part2/deep"]:
        (tmp_path / folder).mkdir()
        write_raw(tmp_path / folder / "t.bin", [1])
    assert _names(tmp_path) == ["part2/deep/t.bin", "part2/t.bin", "part10/t.bin"]


def test_side_files_are_no_shards(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [[1, 2]])
    write_raw(tmp_path / "part.npy", [1])
    sides = ["tokenizer.json", "corpus.hashes.json", "part.csv.gz", ".hidden.bin", "meta.pkl", "README.md"]
    for name in [*sides, "LICENSE", "_SUCCESS", "prepare.py"]:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / ".cache").mkdir()
    write_raw(tmp_path / ".cache" / "y.bin", [1])
    assert _names(tmp_path) == ["part.npy", "x.bin"]


def test_a_stray_file_is_refused_and_not_served_as_tokens(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", [1])
    write_raw(tmp_path / "core.dump", [1])
    with pytest.raises(UnreadableCorpus, match=r"core\.dump: is neither a known token file"):
        discover(tmp_path)


def test_a_foreign_file_among_shards_is_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", [1])
    write_raw(tmp_path / "b.parquet", [1])
    with pytest.raises(UnreadableCorpus, match="Parquet"):
        discover(tmp_path)


def test_formats_may_be_mixed(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", [1])
    write_npy(tmp_path / "b.npy", [1, 2])
    write_llmc(tmp_path / "c.tok", [1, 2, 3])
    assert [(shard.format, shard.num_tokens) for shard in discover(tmp_path)] == [
        ("raw", 1),
        ("npy", 2),
        ("llm.c", 3),
    ]


@pytest.mark.parametrize("side_file", [None, "notes.txt"])
def test_an_empty_folder_is_refused(tmp_path: Path, side_file: str | None) -> None:
    if side_file:
        (tmp_path / side_file).touch()
    with pytest.raises(UnreadableCorpus, match=f"found {'only notes.txt' if side_file else 'nothing'}"):
        list_shards(tmp_path)


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCorpus, match="found nothing"):
        list_shards(tmp_path / "missing")


def test_a_data_file_without_its_index_among_pairs_is_ambiguous(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1, 2]])
    write_raw(tmp_path / "b.bin", [1])
    with pytest.raises(UnreadableCorpus, match=r"b\.bin: has no \.idx.*give the dtype to serve it as raw"):
        discover(tmp_path)
    assert [shard.format for shard in discover(tmp_path, dtype="uint16")] == ["megatron", "raw"]


def test_an_index_without_its_data_is_refused(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", [[1, 2]])
    write_megatron(tmp_path / "b", [[1, 2]])
    path.unlink()
    with pytest.raises(UnreadableCorpus, match=r"a\.idx: is an index, but a\.bin is missing"):
        list_shards(tmp_path)


@pytest.mark.parametrize("name", ["linked.bin", "linked.idx", "tokenizer.json", "linked"])
def test_links_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    root, outside = tmp_path / "corpus", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    write_raw(root / "a.bin", [1])
    target = outside if name == "linked" else write_raw(outside / "secret", [1])
    (root / name).symlink_to(target)
    with pytest.raises(UnreadableCorpus, match=f"{name}: is a symbolic link that leaves the corpus folder"):
        list_shards(root)


def test_links_inside_the_folder(tmp_path: Path) -> None:
    """A link to a shard is one more shard; to a folder, or in a circle, it is refused."""
    (tmp_path / "sub").mkdir()
    write_raw(tmp_path / "sub" / "a.bin", [1])
    (tmp_path / "b.bin").symlink_to("sub/a.bin")
    assert _names(tmp_path) == ["b.bin", "sub/a.bin"]
    (tmp_path / "again").symlink_to("sub")
    with pytest.raises(UnreadableCorpus, match="again: is a symbolic link to a folder"):
        list_shards(tmp_path)
    (tmp_path / "again").unlink()
    (tmp_path / "circle.bin").symlink_to("circle.bin")
    with pytest.raises(UnreadableCorpus, match=r"circle\.bin: cannot be opened"):
        discover(tmp_path)


def test_a_folder_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write_raw(tmp_path / "real" / "a.bin", [1])
    (tmp_path / "link").symlink_to("real")
    assert _names(tmp_path / "link") == ["a.bin"]
