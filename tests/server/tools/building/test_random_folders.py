"""Random folders of inputs by real writers: the documents of a naive reading, or a refusal with a reason.

MDS shards and folders of `save_to_disk` are written by mosaicml-streaming and datasets where these are
installed, else by their layouts, as litData's chunks and Megatron's files are. CORPUS_FOLDERS says how many
folders are tried.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_server.corpus import Corpus
from corpus_server.corpus.selection import natural_key
from corpus_server.errors import CorpusServerError
from corpus_server.tools.building.driver import build, choose_options
from corpus_server.tools.building.manifest import spec_of
from tests.corpora import open_corpus, write_megatron
from tests.server.tools.building.sources import in_this_process

NUM_FOLDERS = int(os.environ.get("CORPUS_FOLDERS", "60"))
EOT = 256
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
Rows = Sequence[Any]


@cache
def _library(name: str) -> Any:
    """Return a library that writes files, None if it is not installed with what it needs."""
    try:
        return import_module(name)
    except ImportError:
        return None


def records(rows: Rows) -> list[dict[str, Any]]:
    return [{"n": number, "score": float("nan"), "doc": row} for number, row in enumerate(rows)]


def write_lines(path: Path, rows: Rows, draw: random.Random) -> None:
    ending = draw.choice(["\n", "\r\n", "\n\n"])
    mark = draw.choice(["", "\ufeff"])
    text = mark + "".join(
        json.dumps(each, ensure_ascii=draw.random() < 0.5) + ending for each in records(rows)
    )
    path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](text.encode()))


def write_array(path: Path, rows: Rows, draw: random.Random) -> None:
    text = json.dumps(records(rows), indent=draw.choice([None, 1]))
    path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](text.encode()))


def write_csv(path: Path, rows: Rows, draw: random.Random) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t" if ".tsv" in path.suffixes else ",")
    writer.writerows([["n", "doc"], *([number, row] for number, row in enumerate(rows))])
    path.write_bytes(
        COMPRESS[path.suffix if path.suffix in COMPRESS else ""](text.getvalue().encode("utf-8-sig"))
    )


def as_table(rows: Rows, draw: random.Random) -> pa.Table:
    if rows and isinstance(rows[0], list):
        kind = draw.choice([pa.list_, pa.large_list])(draw.choice([pa.int32(), pa.int64(), pa.uint16()]))
        column = pa.array(rows, kind)
    else:
        column = pa.array(rows, draw.choice([pa.string(), pa.large_string()]))
        if draw.random() < 0.3:
            column = column.cast(pa.string()).dictionary_encode()
    return pa.table({"n": list(range(len(rows))), "doc": column})


def write_parquet(path: Path, rows: Rows, draw: random.Random) -> None:
    compression = draw.choice(["snappy", "zstd", "none"])
    pq.write_table(
        as_table(rows, draw), path, row_group_size=draw.choice([1, 3, 1000]), compression=compression
    )


def write_arrow(path: Path, rows: Rows, draw: random.Random) -> None:
    table = as_table(rows, draw)
    make = draw.choice([pa.ipc.new_stream, pa.ipc.new_file])
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=draw.choice([1, 2, 1000]))


def write_text(path: Path, rows: Rows, draw: random.Random) -> None:
    path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](rows[0].encode()))


def write_saved(folder: Path, rows: Rows, draw: random.Random) -> None:
    """Write what `save_to_disk` writes."""
    if (library := _library("datasets")) is not None:
        made = library.Dataset.from_dict({"doc": list(rows)})
        made.save_to_disk(str(folder), num_shards=min(len(rows), draw.choice([1, 2])))
        return
    folder.mkdir()
    half = len(rows) // 2
    names = [f"data-0000{n}-of-00002.arrow" for n in (0, 1)]
    for name, some in zip(names, (rows[:half], rows[half:]), strict=True):
        kind = pa.list_(pa.int64()) if isinstance(rows[0], list) else pa.string()
        table = pa.table({"doc": pa.array(list(some), kind)})
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def write_mds(folder: Path, rows: Rows, draw: random.Random) -> None:
    is_text = isinstance(rows[0], str)
    encoding = "str" if is_text else "ndarray:int32"
    if (library := _library("streaming")) is not None:
        writer = library.MDSWriter
        compression = draw.choice([None, "zstd"])
        with writer(
            out=str(folder), columns={"doc": encoding}, compression=compression, size_limit=200
        ) as out:
            for row in rows:
                out.write({"doc": row if is_text else np.array(row, "int32")})
        return
    folder.mkdir()
    config = json.dumps(
        {"column_names": ["doc"], "column_encodings": [encoding], "column_sizes": [None]}
    ).encode()
    # The shape of an array: the number of axes and the type of their lengths share a byte, then the lengths.
    values = [
        row.encode()
        if is_text
        else bytes([1 << 2 | 2]) + struct.pack("<I", len(row)) + np.array(row, "<i4").tobytes()
        for row in rows
    ]
    samples = [struct.pack("<I", len(value)) + value for value in values]
    first = 8 + 4 * len(rows) + len(config)
    offsets = (first + np.cumsum([0, *map(len, samples)])).astype("<u4")
    (folder / "shard.00000.mds").write_bytes(
        struct.pack("<I", len(rows)) + offsets.tobytes() + config + b"".join(samples)
    )
    shard = {
        "format": "mds",
        "samples": len(rows),
        "zip_data": None,
        "raw_data": {"basename": "shard.00000.mds"},
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


def write_litdata(folder: Path, rows: Rows, draw: random.Random) -> None:
    folder.mkdir()
    data = [np.array(row, "<i4").tobytes() for row in rows]
    offsets = (8 + 4 * len(rows) + np.cumsum([0, *map(len, data)])).tolist()
    (folder / "chunk-0-0.bin").write_bytes(
        struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + b"".join(data)
    )
    chunk = {"filename": "chunk-0-0.bin", "dim": sum(map(len, rows)), "chunk_size": len(rows)}
    config = {"compression": None, "data_format": ["no_header_tensor:15"]}
    (folder / "index.json").write_text(json.dumps({"config": config, "chunks": [chunk]}))


FILES: dict[str, Callable[[Path, Rows, random.Random], None]] = {
    **{f".jsonl{packed}": write_lines for packed in COMPRESS},
    **{f".json{packed}": write_array for packed in COMPRESS if packed},
    ".parquet": write_parquet,
    ".arrow": write_arrow,
}
TEXTS = {
    **{f".csv{packed}": write_csv for packed in COMPRESS if packed != ".gz"},  # .csv.gz are OLMo's documents
    ".tsv": write_csv,
    **{f".txt{packed}": write_text for packed in COMPRESS},
}
FOLDERS = {"saved": write_saved, "mds": write_mds}

# No carriage return: a text in CSV keeps it, but Python's own reader of the naive side is the same library.
characters = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufeff"), max_size=30)
ids = st.lists(st.integers(0, 255), max_size=12)


def damage(folder: Path, draw: random.Random) -> str | None:
    """Do what happens to folders; return what it was, None if nothing could happen."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    lists = [path for path in files if path.name in ("index.json", "state.json")]
    kind = draw.choice(["cut", "missing", "left over", "split", "pointer"])
    data = [path for path in files if path not in lists and path.name != "dataset_info.json"]
    if kind == "pointer":
        draw.choice(data).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif kind == "split":
        if len(data) == 1 or lists:
            return None
        path = draw.choice(data)
        path.rename(folder / f"test{''.join(path.suffixes)}")
    elif kind == "cut":
        packed = [path for path in data if path.suffix in {*COMPRESS, ".parquet", ".arrow", ".mds"} - {""}]
        if not packed:
            return None
        path = draw.choice(packed)
        whole = path.read_bytes()
        path.write_bytes(whole[: draw.randrange(1, len(whole))])
    else:
        if not lists:
            return None
        beside = [path for path in data if path.parent == lists[0].parent]
        if kind == "missing":
            draw.choice(beside).unlink()
        else:
            shutil.copy(beside[0], beside[0].with_name(f"chunk-9{beside[0].suffix}"))
    return kind


@settings(max_examples=NUM_FOLDERS, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_folder_gives_the_documents_of_a_naive_reading_or_a_reason(data: st.DataObject) -> None:
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    of_ids = data.draw(st.booleans())
    document = ids if of_ids else characters
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "in"
        folder.mkdir()
        expected: dict[str, list[Any]] = {}
        for number in range(data.draw(st.integers(1, 4))):
            rows = data.draw(st.lists(document, min_size=1, max_size=6))
            if data.draw(st.integers(0, 4)) == 0:
                name = data.draw(st.sampled_from([*FOLDERS, *(["litdata"] if of_ids else [])]))
                ({**FOLDERS, "litdata": write_litdata}[name])(folder / f"{name}{number}", rows, draw)
                # A shard or two below: their order is that of their numbers.
                expected[f"{name}{number}/"] = rows
            else:
                kinds = FILES if of_ids else FILES | TEXTS
                suffix = data.draw(st.sampled_from(sorted(kinds)))
                rows = rows[:1] if ".txt" in suffix else rows
                kinds[suffix](folder / f"{'ab'[number % 2]}{number}{suffix}", rows, draw)
                expected[f"{'ab'[number % 2]}{number}{suffix}"] = rows
        harm = damage(folder, draw) if data.draw(st.integers(0, 3)) == 0 else None
        options = choose_options(
            tokenizer=None if of_ids else "bytes",
            eot=EOT if of_ids else 0,
            **({"column": "doc"} if of_ids else {"text_field": "doc"}),
        )
        naive = [row for name in sorted(expected, key=natural_key) for row in expected[name]]
        whole = [[*(row if of_ids else row.encode()), options.eot] for row in naive if len(row)]
        try:
            built = build([str(folder)], Path(made) / "out", options, in_this_process)
        except CorpusServerError as error:
            reason = str(error)
            assert reason
            may_end_itself = not of_ids and any("\0" in row for row in naive)
            has_one = any(path.suffix == ".txt" or ".txt" in path.suffixes for path in folder.rglob("*"))
            assert harm or not whole or may_end_itself or (of_ids and has_one), reason
            return
        assert harm is None, harm
        with Corpus.open(spec_of(Path(made) / "out")) as corpus:
            tokens = np.concatenate([shard.tokens for shard in corpus.shards]).tolist()
            assert corpus.num_documents is not None
            found = [tokens[slice(*corpus.document_range(number))] for number in range(corpus.num_documents)]
        assert found == whole
        assert built.reading is not None
        assert sum(built.reading.documents_left_out.values()) == len(naive) - len(whole)


@settings(max_examples=max(10, NUM_FOLDERS // 10), suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=9), min_size=1, max_size=9), st.data())
def test_megatron_files_are_served_as_their_writer_wrote_them_or_refused(
    documents: list[list[int]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as made:
        write_megatron(Path(made) / "x", documents)
        with open_corpus(made) as corpus:
            tokens = np.concatenate([shard.tokens for shard in corpus.shards]).tolist()
            ranges = [corpus.document_range(number) for number in range(corpus.num_documents or 0)]
            assert [tokens[start:stop] for start, stop in ranges] == documents
        path = data.draw(st.sampled_from([Path(made) / "x.bin", Path(made) / "x.idx"]))
        path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size - 1))])
        with pytest.raises(CorpusServerError, match=re.escape(path.name)):
            open_corpus(made).close()
