"""Random folders of inputs by real writers: the documents of a naive reading, or a refusal with a reason.

MDS shards, litData's chunks, Megatron's files and folders of `save_to_disk` are written by
mosaicml-streaming, litdata, megatron-core and datasets where these are installed, else by their layouts.
CORPUS_FOLDERS says how many folders are tried.
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
import warnings
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
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from corpus_server.corpus import Corpus
from corpus_server.corpus.selection import natural_key
from corpus_server.errors import CorpusServerError
from corpus_server.tools.building.driver import build, choose_options
from corpus_server.tools.building.manifest import spec_of
from tests.corpora import open_corpus, write_megatron
from tests.server.tools.building.sources import in_this_process

NUM_FOLDERS = int(os.environ.get("CORPUS_FOLDERS", "60"))
# A long run ends with its first failure as it was found: to shrink it takes minutes.
PHASES = tuple(Phase) if NUM_FOLDERS <= 60 else (Phase.generate,)
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
        with warnings.catch_warnings(action="ignore"):
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
    if (library := _library("streaming")) is not None and all(map(len, rows)):
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
    if (library := _library("litdata.streaming.writer")) is not None and all(map(len, rows)):
        loader = draw.choice(["TokensLoader", "PyTreeLoader"])
        with warnings.catch_warnings(action="ignore"):  # of an item that is longer than a chunk
            made = library.BinaryWriter(
                str(folder),
                chunk_bytes=200,
                item_loader=getattr(_library("litdata.streaming.item_loader"), loader)(),
                **draw.choice([{}, {"compression": "zstd", "compression_level": "chunk"}]),
            )
            for number, row in enumerate(rows):
                made[number] = np.array(row, "i4")
            made.done()
            made.merge()
        return
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
            shutil.copy(beside[0], beside[0].with_name(f"chunk-9{''.join(beside[0].suffixes)}"))
    return kind


@settings(max_examples=NUM_FOLDERS, suppress_health_check=list(HealthCheck), phases=PHASES)
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
            **({"column": "doc", "rows": "documents"} if of_ids else {"text_field": "doc"}),
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


def write_columns(path: Path, columns: dict[str, Rows], draw: random.Random) -> None:
    """Write rows with several lists of one length, in any layout that holds such."""
    if path.suffix == ".jsonl":
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif path.suffix == ".mds":
        with _library("streaming").MDSWriter(
            out=str(path.parent / "mds"), columns=dict.fromkeys(columns, "ndarray:int32"), size_limit=300
        ) as out:
            for row in zip(*columns.values(), strict=True):
                out.write({name: np.array(value, "i4") for name, value in zip(columns, row, strict=True)})
    else:
        table = pa.table({name: pa.array(rows, pa.list_(pa.int32())) for name, rows in columns.items()})
        if path.suffix == ".parquet":
            pq.write_table(table, path, row_group_size=draw.choice([1, 3, 1000]))
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=draw.choice([1, 2, 1000]))


def tokens_and_mask(folder: Path) -> tuple[list[int], list[int]]:
    with Corpus.open(spec_of(folder)) as corpus:
        masks = (shard.mask.tokens if shard.mask else np.ones(shard.num_tokens) for shard in corpus.shards)
        tokens = (shard.tokens for shard in corpus.shards)
        return np.concatenate([*tokens]).tolist(), np.concatenate([*masks]).astype(int).tolist()


@settings(max_examples=max(10, NUM_FOLDERS // 5), suppress_health_check=list(HealthCheck), phases=PHASES)
@given(st.data())
def test_padded_rows_give_the_tokens_and_masks_of_a_naive_reading(data: st.DataObject) -> None:
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    rows = data.draw(st.lists(st.lists(st.integers(0, 255), max_size=6), min_size=1, max_size=9))
    targets = [[data.draw(st.booleans()) for _ in row] for row in rows]
    length, pad = 8, data.draw(st.sampled_from([0, EOT]))
    left = data.draw(st.booleans())

    def padded(row: Sequence[int], value: int) -> list[int]:
        more = [value] * (length - len(row))
        return [*more, *row] if left else [*row, *more]

    columns = {
        "doc": [padded(row, pad) for row in rows],
        "attention_mask": [padded([1] * len(row), 0) for row in rows],
        "labels": [
            padded([token if is_target else -100 for token, is_target in zip(row, its, strict=True)], -100)
            for row, its in zip(rows, targets, strict=True)
        ],
    }
    kinds = [".jsonl", ".parquet", ".arrow", *([".mds"] if _library("streaming") else [])]
    named = data.draw(st.sets(st.sampled_from(["attention_mask", "labels"])))
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "in").mkdir()
        write_columns(Path(made) / "in" / f"a{data.draw(st.sampled_from(kinds))}", columns, draw)
        options = choose_options(
            tokenizer=None, eot=EOT, column="doc", mask=tuple(sorted(named)), rows="documents"
        )
        try:
            build([f"{made}/in"], Path(made) / "out", options, in_this_process)
        except CorpusServerError as error:
            missing = {"attention_mask", "labels"} - named
            reason = str(error)
            assert (missing and "no target" in reason) or not any(rows), reason
            return
        found = tokens_and_mask(Path(made) / "out")
    expected: list[tuple[int, int]] = []
    for row, its in zip(rows, targets, strict=True):
        pairs = list(zip(row, map(int, its), strict=True))
        if "attention_mask" not in named:  # then labels leave out all of the padding, or the row is whole
            pairs = [
                (token, int(label != -100))
                for token, label in zip(
                    padded(row, pad), padded([0 if each else -100 for each in its], -100), strict=True
                )
            ]
        if not pairs:
            continue
        expected += pairs
        if pairs[-1][0] != EOT:
            expected.append((EOT, pairs[-1][1]))
    if not named or named == {"attention_mask"}:
        expected = [(token, 1) for token, _ in expected]
    assert list(zip(*found, strict=True)) == expected


@settings(max_examples=max(10, NUM_FOLDERS // 5), suppress_health_check=list(HealthCheck), phases=PHASES)
@given(st.data())
def test_packed_rows_give_the_text_and_documents_of_a_naive_reading(data: st.DataObject) -> None:
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    length = data.draw(st.integers(1, 9))
    with tempfile.TemporaryDirectory() as made:
        text: list[int] = []
        (Path(made) / "in").mkdir()
        for number in range(data.draw(st.integers(1, 3))):
            tokens = data.draw(st.lists(st.sampled_from([1, 2, 3, EOT]), min_size=1, max_size=40))
            rows = [tokens[start : start + length] for start in range(0, len(tokens), length)]
            suffix = data.draw(st.sampled_from(sorted(FILES)))
            FILES[suffix](Path(made) / "in" / f"a{number}{suffix}", rows, draw)
            text += tokens
        shard_tokens = data.draw(st.integers(1, 60))
        options = choose_options(
            tokenizer=None, eot=EOT, column="doc", rows="packed", shard_tokens=shard_tokens
        )
        build([f"{made}/in"], Path(made) / "out", options, in_this_process)
        with Corpus.open(spec_of(Path(made) / "out")) as corpus:
            assert np.concatenate([shard.tokens for shard in corpus.shards]).tolist() == text
            assert corpus.num_documents is not None
            ends = {corpus.document_range(number)[1] for number in range(corpus.num_documents)}
            borders = {at + 1 for at, token in enumerate(text) if token == EOT}
            cuts = set(np.cumsum([shard.num_tokens for shard in corpus.shards]).tolist())
            assert ends == borders | cuts
            assert max(shard.num_tokens for shard in corpus.shards) <= shard_tokens


@settings(max_examples=max(10, NUM_FOLDERS // 10), suppress_health_check=list(HealthCheck), phases=PHASES)
@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=9), min_size=1, max_size=9), st.data())
def test_megatron_files_are_served_as_their_writer_wrote_them_or_refused(
    documents: list[list[int]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as made:
        library = _library("megatron.core.datasets.indexed_dataset")
        if library is None:
            write_megatron(Path(made) / "x", documents)
        else:
            import torch

            # Drawn first: an example may end while it is drawn, and the writer's file would stay open.
            dtype = data.draw(st.sampled_from(["uint16", "int32"]))
            middles = [data.draw(st.integers(0, len(document))) for document in documents]
            builder = library.IndexedDatasetBuilder(f"{made}/x.bin", dtype=np.dtype(dtype).type)
            for document, middle in zip(
                documents, middles, strict=True
            ):  # of two sequences, one may be empty
                with warnings.catch_warnings(action="ignore"):
                    builder.add_document(torch.tensor(document), [middle, len(document) - middle])
            builder.finalize(f"{made}/x.idx")
        with open_corpus(made) as corpus:
            tokens = np.concatenate([shard.tokens for shard in corpus.shards]).tolist()
            ranges = [corpus.document_range(number) for number in range(corpus.num_documents or 0)]
            assert [tokens[start:stop] for start, stop in ranges] == documents
        path = data.draw(st.sampled_from([Path(made) / "x.bin", Path(made) / "x.idx"]))
        path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size - 1))])
        with pytest.raises(CorpusServerError, match=re.escape(path.name)):
            open_corpus(made).close()
