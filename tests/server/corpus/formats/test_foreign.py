"""Files that are known but not served: what is said of them, and which command makes them servable."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from corpus_server.errors import UnreadableCorpus
from tests.corpora import discover, recognise, write_raw

IDS = r"copy its token ids into shards: corpus-server build {} --column {} --eot ID --out DIR"
TEXT = r"tokenize its text: corpus-server build {}{} --tokenizer tokenizer.json --out DIR"


def refusal(path: Path, dtype: str | None = None) -> str:
    with pytest.raises(UnreadableCorpus) as caught:
        recognise(path, dtype=dtype)
    assert caught.value.remedy
    return caught.value.detail


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.csv", "a CSV file, which is not served; tokenize its text: corpus-server build "),
        ("a.npz", "a NumPy archive"),
        ("a.pt", "a torch file"),
        ("a.tar", "a tar archive, which is not served; unpack it"),
        ("a.BIN.ZST", "a file, compressed with Zstandard, .*cannot be mapped; decompress it: zstd -d"),
        ("a.bin.gz", "a file, compressed with gzip, .*decompress it: gunzip"),
        ("a.jsonl.xz", "JSON lines, compressed with xz, .*if it holds text, .*if it holds token ids, "),
        ("a.tar.gz", "a tar archive, compressed with gzip, .*decompress it: gunzip"),
        (
            "a.jsonl.zst",
            "JSON lines, compressed with Zstandard, .*if it holds text, .*if it holds token ids, ",
        ),
        ("a.parquet.gz", "a Parquet file, compressed with gzip, .*decompress it: gunzip"),
        ("a b.txt.gz", r"a text file, compressed with gzip, .*corpus-server build '/.*/a b\.txt\.gz' --tok"),
        ("a.mds.zstd", "an MDS shard, compressed with Zstandard, .*--column tokens"),
    ],
)
def test_by_name_whatever_the_dtype(tmp_path: Path, name: str, said: str) -> None:
    assert re.search(said, refusal(write_raw(tmp_path / name, [1, 2]), dtype="uint16"))


@pytest.mark.parametrize(
    ("magic", "said"),
    [
        (b"PAR1", "a Parquet file"),
        (b"ARROW1\0\0", "an Arrow file"),
        (b"PK\x03\x04", "a zip archive"),
        (b"\x28\xb5\x2f\xfd", "a file, compressed with Zstandard"),
        (b"\x1f\x8b\x08\x00", "a file, compressed with gzip"),
        (b"MMIDIDX\0\0", "a Megatron index under another name"),
    ],
)
def test_by_content(tmp_path: Path, magic: bytes, said: str) -> None:
    (tmp_path / "train.bin").write_bytes(magic + bytes(100))
    assert said in refusal(tmp_path / "train.bin")


TABLES = [
    ({"input_ids": [[1, 2]], "labels": [[1]]}, " with token ids in 'input_ids'", IDS, "input_ids"),
    ({"id": ["x"], "toks": [[1, 2]]}, " with token ids in 'toks'", IDS, "toks"),
    ({"b": [[1]], "a": [[2]]}, " with token ids in 'b'", IDS, "b"),
    ({"b": [[1]], "token_ids": [[1]], "tokens": [[2]]}, " with token ids in 'tokens'", IDS, "tokens"),
    ({"n": [3], "w": [[0.5]], "text": ["t"]}, " with text in 'text'", TEXT, ""),
    ({"title": ["t"], "content": ["t"]}, " with text in 'content'", TEXT, " --text-field content"),
    ({"url": ["u"], "text": ["t"]}, " with text in 'text'", TEXT, ""),
    ({"story": ["t"]}, " with text in 'story'", TEXT, " --text-field story"),
    ({"words": [["a", "b"]], "story": ["t"]}, " with text in 'story'", TEXT, " --text-field story"),
]


@pytest.mark.parametrize("kind", ["parquet", "feather", "stream", "jsonl", "jsonl.gz"])
@pytest.mark.parametrize(("columns", "seen", "remedy", "option"), TABLES)
def test_the_command_fits_the_columns(
    tmp_path: Path, kind: str, columns: dict[str, list[object]], seen: str, remedy: str, option: str
) -> None:
    path = tmp_path / ("a.arrow" if kind == "stream" else f"a.{kind}")
    line = json.dumps({name: values[0] for name, values in columns.items()}).encode() + b"\n"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    elif kind == "feather":
        pyarrow.feather.write_feather(pyarrow.table(columns), str(path))
    elif kind == "stream":
        table = pyarrow.table(columns)
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_bytes(gzip.compress(line) if kind.endswith("gz") else line)
    said = refusal(path)
    assert f"{seen}, " in said
    assert said.endswith(remedy.format(path, option))


@pytest.mark.parametrize("line", ["", "{", "3", '{"ids": []}', '{"n": 3, "w": [[1]], "x": null}'])
def test_a_line_that_tells_nothing_names_both_commands(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    text, ids = TEXT.format(path, ""), IDS.format(path, "input_ids")
    assert refusal(path) == (
        f"{path}: is JSON lines, which is not served; if it holds text, {text}; if it holds token ids, {ids}"
    )


def test_without_pyarrow_both_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["t"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    said = refusal(tmp_path / "a.parquet")
    assert f"if it holds text, {TEXT.format(tmp_path / 'a.parquet', '')}; if it holds token ids" in said


def test_text_may_be_served_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_text("To be")
    assert refusal(path).endswith(f"or serve its bytes: {path},dtype=uint8")
    assert recognise(path, dtype="uint8").num_tokens == 5


def test_in_a_folder_the_command_names_the_folder(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", [1])
    (tmp_path / "b.jsonl").write_text('{"text": "t"}\n')
    with pytest.raises(UnreadableCorpus, match=TEXT.format(tmp_path, "")):
        discover(tmp_path)


@pytest.mark.parametrize(
    "names", [("zarr.json", "c/0/0/0"), ("zarr.json", "c/0/0"), (".zarray", "0.0"), ("zarr.json", "c/0")]
)
def test_zarr_is_named(tmp_path: Path, names: tuple[str, str]) -> None:
    root = tmp_path / "tokens.zarr"
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(bytes(4))
    with pytest.raises(UnreadableCorpus, match=r"a chunk of the zarr array .*tokens\.zarr, .*zarr\.open"):
        discover(root)
