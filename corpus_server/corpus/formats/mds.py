"""MosaicML's MDS shards whose samples are nothing but tokens of one length.

Layout (mosaicml-streaming `base/format/mds/writer.py`), little-endian:

    <u4 num_samples | <u4 offsets[num_samples + 1] | config, JSON | samples
    index.json  {"shards": [{"raw_data": {"basename": ...}, "zip_data": null, "samples": ...}, ...]}

Offsets count from the start of the file. A sample holds the `<u4` sizes of its columns of varying size, then
the bytes of its columns. With the single column `ndarray:uint16:2048` no size is stored, so the tokens of
all samples lie one after another and are mapped. Any other shard is converted by `corpus-server build`.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from corpus_server.corpus.files import OpenFile, unreadable
from corpus_server.corpus.formats.layout import (
    ACCEPTED_DTYPES,
    COPY_AGAIN,
    TOKEN_DTYPES,
    Format,
    ShardLayout,
    TokenDtype,
    build_ids,
    build_text,
    counted_run,
    read_header,
)
from corpus_server.user_files import parse_json, read_regular

_INDEX: Final = "index.json"
_MAX_CONFIG_BYTES: Final = 1 << 20
_TOKEN_COLUMNS: Final = ("tokens", "input_ids")
_ENCODING: Final = re.compile(r"ndarray:(\w+):([0-9]{1,9}(?:,[0-9]{1,9})*)")  # dtype, shape of a sample


class Column(NamedTuple):
    """A column of the samples of a shard."""

    name: str
    encoding: str
    size: int | None  # bytes in each sample; None if each sample says it


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout | None:
    if file.path.suffix != ".mds":
        return None
    num_samples, data_offset, encodings = _read_header(file)
    check_samples(file.path, num_samples)
    columns = ", ".join(f"{name} ({encoding})" for name, encoding in encodings.items())
    match = _ENCODING.fullmatch(next(iter(encodings.values())))
    reason = None
    if len(encodings) != 1 or match is None:
        reason = f"its samples hold {columns}: their tokens do not lie one after another"
    elif match[1] not in TOKEN_DTYPES:
        reason = f"its column {columns} holds {match[1]}, served are {ACCEPTED_DTYPES}"
    if match is None or reason is not None:
        raise file.unreadable(f"is an MDS shard that cannot be mapped: {reason}", _remedy(file, encodings))
    tokens = TOKEN_DTYPES[match[1]]
    num_tokens = num_samples * math.prod(map(int, match[2].split(",")))
    return ShardLayout(
        format="mds",
        reason=f"named .mds, its single column is {columns}",
        dtype=tokens,
        runs=counted_run(file, tokens, data_offset=data_offset, num_tokens=num_tokens),
    )


def _remedy(file: OpenFile, encodings: dict[str, str]) -> str:
    """Return the command that makes the whole data set servable."""
    ids = [name for name, encoding in encodings.items() if encoding.startswith(("ndarray", "bytes"))]
    text = [name for name, encoding in encodings.items() if encoding == "str"]
    if text and not ids:
        return build_text(file.path.parent, text[0])
    column = next((name for name in _TOKEN_COLUMNS if name in ids), [*ids, *encodings][0])
    return build_ids(file.path.parent, column)


def _read_header(file: OpenFile) -> tuple[int, int, dict[str, str]]:
    """Return the number of samples, the byte at which the first one begins, and the columns' encodings."""
    num_samples, first = read_header(file, "<II", "the MDS header")
    header_bytes = 4 + 4 * (num_samples + 1)
    try:
        if not header_bytes < first <= min(file.size_bytes, header_bytes + _MAX_CONFIG_BYTES):
            raise ValueError(f"{num_samples} samples beginning at byte {first} do not fit")
        columns = read_columns(file.read(header_bytes, first - header_bytes))
    except ValueError as error:
        raise file.unreadable(f"its MDS header is damaged: {error}", COPY_AGAIN) from error
    return num_samples, first, {column.name: column.encoding for column in columns}


def read_columns(config: bytes) -> list[Column]:
    """Return the columns that a shard's config names, at least one; raise ValueError if it is damaged."""
    try:
        found = parse_json(config)
        names, encodings = found["column_names"], found["column_encodings"]
        columns = [Column(*each) for each in zip(names, encodings, found["column_sizes"], strict=True)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"its config is damaged: {error!r:.100}") from error
    if not columns or not all(isinstance(text, str) for each in columns for text in each[:2]):
        raise ValueError("its config does not name its columns")
    if not all(each.size is None or (type(each.size) is int and each.size >= 0) for each in columns):
        raise ValueError("its config gives a column a size that is no number")
    return columns


def check_samples(path: Path, num_samples: int) -> None:
    """Raise UnreadableCorpus if the index beside a shard lists another number of samples than its header."""
    index = path.with_name(_INDEX)
    for names, listed in _index(index) or () if index.is_file() else ():
        if path.name in names and listed != num_samples:
            what = f"holds {num_samples:,} samples, {_INDEX} beside it lists {listed:,}"
            raise unreadable(path, what, "are the two of one run? Copy both again")


def _listed(path: Path) -> list[tuple[str, ...]] | None:
    found = _index(path)
    return None if found is None else [names for names, _ in found]


def _index(path: Path) -> tuple[tuple[tuple[str, ...], int], ...] | None:
    """Return the names that each listed shard may have, and its samples; None if it is no index of MDS."""
    status = path.stat()
    return _read_index(path, status.st_mtime_ns, status.st_size)


# Cached, because each of a folder's shards asks for the same index, which grows with their number.
@lru_cache(maxsize=4)
def _read_index(path: Path, mtime_ns: int, size_bytes: int) -> tuple[tuple[tuple[str, ...], int], ...] | None:
    try:
        shards = parse_json(read_regular(path))["shards"]
        return tuple(
            (
                tuple(shard[key]["basename"] for key in ("raw_data", "zip_data") if shard[key]),
                int(shard["samples"]),
            )
            for shard in shards
            if shard["format"] == "mds"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


FORMAT: Final = Format(
    read=_read, list_name=_INDEX, listed=_listed, is_listed=lambda name: ".mds" in Path(name).suffixes
)
