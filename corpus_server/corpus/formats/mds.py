"""MosaicML's MDS shards whose samples are nothing but tokens of one length.

Layout (mosaicml-streaming `base/format/mds/writer.py`), little-endian:

    <u4 num_samples | <u4 offsets[num_samples + 1] | config, JSON | samples

Offsets count from the start of the file. A sample holds the `<u4` sizes of its columns of varying size, then
the bytes of its columns. With the single column `ndarray:uint16:2048` no size is stored, so the tokens of
all samples lie one after another and are mapped. Any other shard is converted by `corpus-server build`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from typing import Any, Final

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
    counted_layout,
)

_MAX_CONFIG_BYTES: Final = 1 << 20
_TOKEN_COLUMNS: Final = ("tokens", "input_ids")
_ENCODING: Final = re.compile(r"ndarray:(\w+):(\d+(?:,\d+)*)")  # dtype, shape of a sample


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout | None:
    if file.path.suffix != ".mds":
        return None
    num_samples, data_offset, config = _read_header(file)
    encodings = dict(zip(config["column_names"], config["column_encodings"], strict=True))
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
    return counted_layout(
        file,
        name="mds",
        reason=f"named .mds, its single column is {columns}",
        dtype=tokens,
        data_offset=data_offset,
        num_tokens=num_samples * math.prod(map(int, match[2].split(","))),
    )


def _remedy(file: OpenFile, encodings: dict[str, str]) -> str:
    """Return the command that makes the whole data set servable."""
    ids = [name for name, encoding in encodings.items() if encoding.startswith(("ndarray", "bytes"))]
    text = [name for name, encoding in encodings.items() if encoding == "str"]
    if text and not ids:
        return build_text(file.path.parent, text[0])
    column = next((name for name in _TOKEN_COLUMNS if name in ids), [*ids, *encodings][0])
    return build_ids(file.path.parent, column)


def _read_header(file: OpenFile) -> tuple[int, int, dict[str, Any]]:
    """Return the number of samples, the byte at which the first one begins, and the config."""
    try:
        (num_samples,) = struct.unpack("<I", file.head(4))
        header_bytes = 4 + 4 * (num_samples + 1)
        (first,) = struct.unpack("<I", file.head(8)[4:])
        if not header_bytes < first <= min(file.size_bytes, header_bytes + _MAX_CONFIG_BYTES):
            raise ValueError(f"{num_samples} samples beginning at byte {first} do not fit")
        config = json.loads(file.read(header_bytes, first - header_bytes))
        names, encodings = config["column_names"], config["column_encodings"]
        if not names or len(names) != len(encodings):
            raise ValueError("its config names no columns")
        if not all(isinstance(each, str) for each in (*names, *encodings)):
            raise ValueError("its config names columns or encodings by something else than text")
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise file.unreadable(f"its MDS header is damaged: {error}", COPY_AGAIN) from error
    return num_samples, first, config


FORMAT: Final = Format(read=_read)
