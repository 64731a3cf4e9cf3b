"""MosaicML's MDS shards whose samples are nothing but tokens of one length.

Layout (mosaicml-streaming `base/format/mds/writer.py`), little-endian:

    <u4 num_samples | <u4 offsets[num_samples + 1] | config, JSON | samples

Offsets count from the start of the file. A sample holds the `<u4` sizes of its columns of varying size, then
the bytes of its columns. With the single column `ndarray:uint16:2048` no size is stored, so the tokens of
all samples lie one after another and are mapped. Any other shard is converted by `corpus-server build`.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from corpus_server.corpus.files import OpenFile
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
from corpus_server.user_files import parse_json

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


FORMAT: Final = Format(read=_read)
