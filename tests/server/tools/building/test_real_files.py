"""Files as people have them are read right, or refused in a line that says what helps."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building import sources
from corpus_server.tools.building.inputs import find_inputs
from corpus_server.tools.building.job import BuildOptions
from corpus_server.tools.building.kinds import arrays
from corpus_server.tools.building.manifest import spec_of
from corpus_server.tools.building.sources import check_first, plan_parts, read_documents
from corpus_server.tools.viewing.attach import attach
from corpus_server.user_files import parse_toml, read_small_file
from tests.server.tools.building.built import tokens_of
from tests.server.tools.building.sources import build_here, lines
from tests.server.tools.building.test_kept import metadata_of

BOM = b"\xef\xbb\xbf"


def read(path: Path | str, **options: Any) -> list[Any]:
    chosen = BuildOptions(
        tokenizer=None if "column" in options else "bytes", eot=0, vocab_size=256, **options
    )
    inputs = find_inputs([str(path)]).inputs
    check_first(inputs, chosen)
    documents = [document for part in plan_parts(inputs) for document in read_documents(part, chosen)]
    for document in documents:
        document.check()
    contents = [document.content for document in documents]
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in contents]


def refusal(path: Path | str, **options: Any) -> str:
    with pytest.raises(UnreadableCorpus) as caught:
        read(path, **options)
    return caught.value.detail


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def window(log: int) -> Callable[[bytes], bytes]:
    def compress(data: bytes) -> bytes:
        settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=log, enable_ldm=True)
        stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
        return stream.compress(data) + stream.flush()

    return compress


TWO = b'{"text":"a"}\n{"text":"b"}\n'


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (BOM + TWO, ["a", "b"]),
        (BOM + TWO + BOM + TWO, ["a", "b", "a", "b"]),
        (b'{"text":"a","score":NaN}\n{"text":"b","score":-Infinity}\n', ["a", "b"]),
        (b'{"text":"a","title":"\\ud83d"}\n', ["a"]),
        (b'{"text":"\\ud83d\\udc4d"}\n', ["\U0001f44d"]),
        (b'{"text":"a\\u0000b"}\n', ["a\0b"]),
        ('{"text":"a\u2028b\u0085c"}\n', ["a\u2028b\u0085c"]),
        (b'{"text":"a"}\r\n\r\n{"text":"b"}', ["a", "b"]),
        (b'{"text":"","n":1}\n{"text":null}\n{"text":"\\u200d"}\n', ["", "", "\u200d"]),
        (b'{"text":"a","n":18446744073709551616}\n', ["a"]),
        (b'{"text":"a","n":1,"n":2}\n', ["a"]),
    ],
    ids=[
        *("mark", "mark after cat", "NaN", "half a pair elsewhere", "a pair", "NUL", "line separators"),
        *("CRLF", "empty", "a large number", "an unread field twice"),
    ],
)
@pytest.mark.parametrize("packed", ["", ".gz", ".zst", ".bz2", ".xz"])
def test_lines_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes | str, expected: list[str], packed: str
) -> None:
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress}
    raw = data.encode() if isinstance(data, str) else data
    path = write(tmp_path / f"a.jsonl{packed}", (compress | {".xz": lzma.compress})[packed](raw))
    for size in (5, 1 << 20):
        monkeypatch.setattr(sources, "PART_BYTES", size)
        assert read(path) == expected


@pytest.mark.parametrize(
    ("record", "options", "name"),
    [
        ('{"text": "a", "text": "b"}', {}, "text"),
        ('{"text": "a", "text": NaN}', {}, "text"),
        ('{"in": {"text": "a", "text" :"b"}}', {"text_field": "in.text"}, "text"),
        ('{"in": {"text": "a"}, "in": {"text": "b"}}', {"text_field": "in.text"}, "in"),
        ('{"text": "a", "url": "b", "metadata": {}, "url": "c"}', {"keep": ("url",)}, "url"),
        ('{"ids": [1], "ids": [2]}', {"column": "ids"}, "ids"),
        ('{"ids": [1], "loss_mask": [1], "loss_mask": [0]}', {"column": "ids"}, "loss_mask"),
    ],
)
@pytest.mark.parametrize("form", ["{}\n", "[{}]"])
def test_a_field_that_is_read_and_stands_twice_is_refused(
    tmp_path: Path, record: str, options: dict[str, Any], name: str, form: str
) -> None:
    """Which value is meant is not known; parsers take the last one."""
    path = write(tmp_path / "a.json", form.format(record))
    assert f"{name!r} is given twice" in refusal(path, **options)


SKIPPABLE = b"\x50\x2a\x4d\x18" + (8).to_bytes(4, "little") + b"12345678"  # a frame that holds no data
A, B = b'{"text":"a"}\n', b'{"text":"b"}\n'


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        (".gz", gzip.compress(A) + gzip.compress(B) + gzip.compress(b"")),
        (".gz", gzip.compress(A + B[:5]) + gzip.compress(B[5:])),  # a line in two members
        (".gz", gzip.compress(A + B) + bytes(512)),  # padding of tapes
        (".zst", zstandard.compress(A) + zstandard.compress(B)),
        (".zst", SKIPPABLE + zstandard.compress(A) + SKIPPABLE + zstandard.compress(B) + SKIPPABLE),
        (".zst", zstandard.compress(b"") + zstandard.compress(A + B)),
    ],
    ids=["gz", "a line in two members", "padded gz", "zst", "skippable frames", "an empty frame"],
)
def test_compressed_files_of_several_members(tmp_path: Path, suffix: str, data: bytes) -> None:
    assert read(write(tmp_path / f"a.jsonl{suffix}", data)) == ["a", "b"]


@pytest.mark.parametrize("data", [A, gzip.compress(A) + b"garbage!"], ids=["plain", "garbage behind"])
def test_what_is_no_gzip_is_no_text(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path / "a.jsonl.gz", data)
    with pytest.raises(UnreadableCorpus, match="Not a gzipped file"):
        read(path)


def test_empty_files_among_sources_hold_no_documents(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "x.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "y.parquet")
    write(tmp_path / "z.jsonl", b"")
    write(tmp_path / "zz.jsonl", B)
    assert read(tmp_path) == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TWO.decode().encode("utf-16"), "line 1: is UTF-16; convert it with iconv -f UTF-16 -t"),
        ('{"text":"café"}\n'.encode("latin1"), "line 1: is not JSON: .*; convert it with iconv"),
        (
            b'{"text":"a\\ud83d b"}\n',
            r"line 1: holds half a surrogate pair, '\\ud83d', which is no character",
        ),
        (b'{"text":"a"}\n{"text": }\n{"text":"b"}\n', "line 2: is not JSON: .*; mend or remove the line"),
        (b'{"text":"a"}\n{"text":"b', "line 2: is not JSON: .*; was the copy interrupted"),
        (b'{"text":"a"}\n' + bytes(40), "line 2: is not JSON: .*; was the copy interrupted"),
        (b'{\n "text": "a"\n}\n', "line 1: is not JSON: .*; a record is one line; write them so with jq -c"),
        (
            b'{"text":"a"}\n{"text":"b","n":' + b"9" * 5000 + b"}\n",
            "line 2: holds a whole number of more than 4,300 digits; .* --on-error skip",
        ),
        (
            b'{"text":"a"}\n{"text":"b","n":' + b"[" * 3000 + b"]" * 3000 + b"}\n",
            "line 2: is nested deeper than the 1,000 levels or so",
        ),
        (
            b'[{"text":"a"},{"text":"b","n":' + b"9" * 5000 + b"}]",
            "what follows record 0 holds a whole number of more than 4,300 digits",
        ),
        (
            b'[{"text":"a"},{"text":"b","n":' + b"[" * 3000 + b"]" * 3000 + b"}]",
            "what follows record 0 is nested deeper than",
        ),
        (b'"just text"\n', "line 1: expected an object, got "),
        (b'{"text":["a","b"]}\n', r"expected text in 'text', got \['a', 'b'\]; a document is one text: join"),
        (b'{"text":[1,2]}\n', "for token ids say --column text"),
        (b'{"text":{"a":"b"}}\n', "expected text in 'text', got {'a': 'b'}$"),
        (b'{"Text":"a"}\n', "has no field 'text', only 'Text'"),
    ],
)
def test_what_is_no_line_of_json(tmp_path: Path, data: bytes, message: str) -> None:
    path = write(tmp_path / "a.jsonl", data)
    with pytest.raises(UnreadableCorpus, match=message):
        read(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"text":"a"},{"text":"b"}]', ["a", "b"]),
        (json.dumps([{"text": "ä" * n, "n": [1, {"x": n}]} for n in range(9)], indent=2), None),
        ('\ufeff\n [ {"text":"a"}\n]\n[]\n\ufeff[{"text":"b", "x": NaN}]', ["a", "b"]),
        ("[]", []),
    ],
    ids=["one line", "pretty", "after cat", "empty"],
)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_an_array_is_read_as_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: list[str] | None, size: int
) -> None:
    monkeypatch.setattr("corpus_server.tools.building.kinds.text._READ_BYTES", size)
    monkeypatch.setattr(sources, "PART_BYTES", 10)
    expected = ["ä" * n for n in range(9)] if expected is None else expected
    assert read(write(tmp_path / "data00.json", text)) == expected
    assert read(write(tmp_path / "a.jsonl.gz", gzip.compress(text.encode()))) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text":"a"},', "behind record 0: is not JSON: .*was the copy interrupted"),
        ('[{"text":"a"}', "it ends inside an array"),
        ('[{"text":"a"} {"text":"b"}]', "expected ',', found '{'"),
        ('[{"text":"a"}] x', r"expected '\[', found 'x'"),
        ('[{"text":"a"},{"text":tru', "behind record 0: is not JSON: "),
        ('[{"text":"a"},7]', "record 1: expected an object, got 7"),
        ('[{"text":"a"},{"body":"b"}]', "record 1: has no field 'text', only 'body'"),
    ],
)
def test_a_damaged_array_is_named_with_its_record(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "a.json", text)
    with pytest.raises(UnreadableCorpus, match=message):
        read(path)


def test_an_array_is_held_a_value_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held = 0
    decode = json.JSONDecoder.raw_decode

    def watched(self: Any, text: str, at: int = 0) -> Any:
        nonlocal held
        held = max(held, len(text))
        return decode(self, text, at)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", watched)
    one = '{"text": "' + "x" * 990 + '"},'
    found = sum(1 for _ in arrays.records(iter(["[", *[one] * 3000, "{}]"])))
    assert (found, held < 5000) == (3001, True)


CSV = 'id,text\n1,a\n2,"b, ""c""\nd"\n\n3,\n'


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.CSV"])
def test_rows_of_csv_are_documents_and_have_fields(tmp_path: Path, name: str) -> None:
    text = CSV.replace(",", "\t", 2).replace("2,", "2\t").replace("3,", "3\t") if "tsv" in name else CSV
    data = BOM + text.encode()
    path = write(tmp_path / name, gzip.compress(data) if name.endswith(".gz") else data)
    assert read(path) == ["a", 'b, "c"\nd', ""]
    build_here([path], tmp_path / "out", tokenizer="bytes", keep=("id",))
    assert [row["id"] for row in metadata_of(tmp_path / "out")] == ["1", "2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,text\n1,a,b\n", "row 0: has 3 fields, the first row names 2; is a quotation mark missing"),
        ('id,text\n1,"a\n2,b\n', r"line 3: unexpected end of data; write the rows as JSON lines"),
        ("id;text\n1;a\n", "has no field 'text', only 'id;text'"),
        ("text,text\na,b\n", "has several columns 'text'"),
    ],
)
def test_rows_of_csv_that_contradict_their_head(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(UnreadableCorpus, match=message):
        read(path)
    assert "holds texts, and no lists of token ids" in refusal(path, column="ids")


def test_a_field_of_csv_may_be_long(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.csv", "text\n" + "x" * 200_000)) == ["x" * 200_000]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.npy", "token files need no build: serve it as it is"),
        ("a.zip", "unpack it"),
        ("a.tar.gz", "unpack it, and name what it holds"),
        ("a.pkl", "save its texts or token ids as JSON lines or Parquet"),
        ("a.html", r"read it as text with --include '\*\.html'"),
        ("a.parquet.bz2", "decompress it"),
    ],
)
def test_the_remedy_for_a_file_of_another_kind_helps(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UnreadableCorpus, match=f"is of no kind that can be read; .*{message}"):
        read(write(tmp_path / name, b"PK\3\4"))


def test_a_folder_of_plain_json_says_how_it_is_named(tmp_path: Path) -> None:
    write(tmp_path / "in" / "data00.json", '[{"text":"a"}]')
    assert "name .json files themselves, as 'DIR/**/*.json'" in refusal(tmp_path / "in")
    assert read(f"{tmp_path}/in/*.json") == ["a"]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    "name", ["a.txt", "a.jsonl", "a.parquet", "a.arrow", "a.mds", "a.jsonl.gz", "a.csv", "a.jsonl.zst"]
)
def test_a_pointer_of_git_lfs_is_no_data(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, POINTER)
    assert f"{name}: is the pointer that Git LFS keeps in place of a file; fetch the file: git lfs pull" in (
        refusal(path)
    )


@pytest.mark.parametrize("log", [27, 28, 31])
def test_zstandard_with_a_large_window(tmp_path: Path, log: int) -> None:
    path = write(tmp_path / "a.jsonl.zst", window(log)(TWO))
    if log == 27:
        assert read(path) == ["a", "b"]
    else:
        assert "its window is larger than 128 MiB (zstd --long=28 or more): compress it anew" in refusal(path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("cut", [4, 20])
def test_compressed_data_that_was_cut(tmp_path: Path, suffix: str, cut: int) -> None:
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
    data = compress[suffix](lines([f"{n} {n * n}" for n in range(500)]))
    path = write(tmp_path / f"a.jsonl{suffix}", data + data)  # streams follow one another
    assert len(read(path)) == 1000
    write(path, (data + data)[:-cut])
    assert "was the copy interrupted" in refusal(path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_what_follows_the_first_stream_of_a_compressed_file_is_read_or_refused(
    tmp_path: Path, suffix: str
) -> None:
    """Python's own readers of bzip2 and xz end there, and with them all documents that follow."""
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
    first, second = (compress[suffix](lines([f"{each} {n * n}" for n in range(500)])) for each in "ab")
    for between in (b"", *((bytes(4), bytes(1 << 20)) if suffix == ".xz" else ())):
        padded = first + between + second + between
        assert len(read(write(tmp_path / f"a.jsonl{suffix}", padded))) == 1000
    refused = [
        first + b"rubbish" * 9,
        first + b"!" + second[1:],
        first + second[:30] + bytes(50) + second[80:],
    ]
    if suffix == ".xz":
        refused += [first + bytes(3) + second, first + second + bytes(5)]
    for damaged in refused:
        assert "a.jsonl" in refusal(write(tmp_path / f"a.jsonl{suffix}", damaged))


def test_a_page_of_a_parquet_file_that_its_checksum_refutes(tmp_path: Path) -> None:
    table = pa.table({"text": [f"document number {each}" for each in range(50)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    assert len(read(path)) == 50
    path.write_bytes(path.read_bytes().replace(b"document number 7", b"document number 6"))
    assert "CRC checksum verification failed" in refusal(path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 2, 1 << 20):
        monkeypatch.setattr("corpus_server.tools.building.kinds.text._READ_BYTES", size)
        assert read(write(tmp_path / "a.txt", BOM + b"hello")) == ["hello"]
        assert read(write(tmp_path / "b.txt", "a\ufeff".encode())) == ["a\ufeff"]
    assert "a.txt: is UTF-16; convert it with iconv" in refusal(
        write(tmp_path / "a.txt", "hello".encode("utf-16"))
    )


T = ["a", "", None, "b"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(T),
        pa.array(T, pa.large_string()),
        pa.array(T, pa.string_view()),
        pa.array(T).dictionary_encode(),
        pa.array([None if text is None else text.encode() for text in T], pa.binary()),
        pa.array([None if text is None else text.encode() for text in T], pa.large_binary()),
    ],
    ids=lambda column: str(column.type),
)
def test_text_of_every_type(tmp_path: Path, column: Any) -> None:
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["a", "", "", "b"]
    nested = pa.array([{"content": text} for text in T])
    pq.write_table(pa.table({"n": [1] * 4, "message": nested}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet", text_field="message.content") == ["a", "", "", "b"]


def test_bytes_that_are_no_text_are_named_with_their_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [b"a", b"\xff"]}), tmp_path / "a.parquet")
    assert "row 1: is not UTF-8" in refusal(tmp_path / "a.parquet")


def test_nested_fields(tmp_path: Path) -> None:
    table = pa.table({"doc": pa.array([{"a": {"text": "x"}}, {"a": None}, None]), "doc.b": ["u", "v", "w"]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", text_field="doc.a.text") == ["x", "", ""]
    assert read(tmp_path / "a.parquet", text_field="doc.b") == ["u", "v", "w"]
    assert "expected text in column 'doc', got struct" in (
        said := refusal(tmp_path / "a.parquet", text_field="doc")
    )
    assert "name a field of it: doc.a" in said
    assert "has no field 'doc.c'" in refusal(tmp_path / "a.parquet", text_field="doc.c")
    path = write(tmp_path / "a.jsonl", '{"doc":{"a":{"text":"x"}}}\n{"doc.a.text":"y"}\n')
    assert read(path, text_field="doc.a.text") == ["x", "y"]
    assert "has no field 'doc.b'" in refusal(path, text_field="doc.b")


@pytest.mark.parametrize(
    "kind", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("dtype", [pa.int8(), pa.int32(), pa.int64(), pa.uint16(), pa.uint64()], ids=str)
def test_lists_of_ids_of_every_type(tmp_path: Path, kind: Any, dtype: Any) -> None:
    rows = [[7, 7], [1, 2], None, [], [3, 9], [8]]
    column = pa.array(rows, kind(dtype))
    for name, table in (("a", pa.table({"ids": column})), ("b", pa.table({"ids": column.slice(1, 4)}))):
        with (
            pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as w,
        ):
            w.write_table(table)
    whole = [row or [] for row in rows]
    assert read(tmp_path / "a.arrow", column="ids") == whole
    assert read(tmp_path / "b.arrow", column="ids") == whole[1:5]
    pq.write_table(
        pa.table({"ids": pa.array([[1, 2], None, [3, 9]], pa.list_(pa.int32(), 2))}), tmp_path / "c.parquet"
    )
    assert read(tmp_path / "c.parquet", column="ids") == [[1, 2], [], [3, 9]]


@pytest.mark.parametrize("rows", [[[], [], None], [None, None]])
def test_a_column_of_empty_lists_holds_no_ids(tmp_path: Path, rows: list[Any]) -> None:
    """`datasets` gives the shard of such rows the type `list<null>`."""
    (tmp_path / "in").mkdir()
    for name, some in (("a", rows), ("b", [[1, 2]])):
        pq.write_table(pa.table({"ids": pa.array(some)}), tmp_path / "in" / f"{name}.parquet")
    build_here([tmp_path / "in"], tmp_path / "out", column="ids", eot=9)
    assert tokens_of(tmp_path / "out").tolist() == [1, 2, 9]


def test_a_list_of_texts_is_no_document(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [["a", "b"]]}), tmp_path / "a.parquet")
    assert "a document is one text: join the texts" in refusal(tmp_path / "a.parquet")


def arrow_stream(*texts: str, **options: Any) -> bytes:
    table, sink = pa.table({"text": [*texts]}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue())


def test_an_arrow_stream_ends_itself_and_nothing_follows(tmp_path: Path) -> None:
    """Readers of streams see neither: of eight rows they would give four."""
    stream, path = arrow_stream(*"abcdefgh"), tmp_path / "a.arrow"
    assert read(write(path, stream)) == [*"abcdefgh"]
    for cut in range(8, len(stream) - 1, 8):
        assert "was the copy interrupted" in refusal(write(path, stream[:-cut])), cut
    assert "its stream ends at byte" in refusal(write(path, stream + stream))
    old = arrow_stream(*"abcdefgh", use_legacy_format=True)  # Arrow before 0.15
    assert read(write(path, old)) == [*"abcdefgh"]
    for cut in range(4, len(old) - 1, 4):
        assert "was the copy interrupted" in refusal(write(path, old[:-cut])), cut


def test_kept_numbers_keep_their_digits(tmp_path: Path) -> None:
    large = ["18446744073709551615", "-1", "9007199254740993", "123456789012345678901234567890", "2.5"]
    path = write(tmp_path / "a.jsonl", "".join(f'{{"text":"{n}","id":{n}}}\n' for n in large))
    build_here([path], tmp_path / "out", tokenizer="bytes", keep=("id",))
    assert [row["id"] for row in metadata_of(tmp_path / "out")] == large


def test_a_column_with_a_large_number_far_from_the_others_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corpus_server.tools.building.part._BATCH_SIZE", 10)
    rows = [9007199254740993, *[1] * 50, 2.5]
    path = write(
        tmp_path / "a.jsonl", "".join(json.dumps({"text": "x" * 9, "a": n, "b": 7}) + "\n" for n in rows)
    )
    build_here([path], tmp_path / "out", tokenizer="bytes", keep=("a", "b"))
    kept = metadata_of(tmp_path / "out")
    assert [row["a"] for row in kept] == ["9007199254740993", *["1"] * 50, "2.5"]
    assert {row["b"] for row in kept} == {7}


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("m.csv", "id,source\r\n007,x\r\n8,y\r\n"),
        ("m.tsv", "id\tsource\n007\tx\n8\ty\n"),
        ("m.jsonl", '{"id":"007","source":"x"}\n{"id":"8","source":"y"}\n'),
    ],
)
def test_a_table_of_metadata_may_begin_with_a_byte_order_mark(tmp_path: Path, name: str, table: str) -> None:
    build_here([write(tmp_path / "a.jsonl", TWO)], tmp_path / "out", tokenizer="bytes")
    attach(spec_of(tmp_path / "out"), str(write(tmp_path / name, BOM + table.encode())), key=None, keep=None)
    assert metadata_of(tmp_path / "out") == [{"id": "007", "source": "x"}, {"id": "8", "source": "y"}]


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", BOM + b'[corpora.x]\npath = "x.bin"\n')
    assert parse_toml(read_small_file(path)[0]) == {"corpora": {"x": {"path": "x.bin"}}}
