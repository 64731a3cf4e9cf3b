"""Arrow files whose column `input_ids` has rows of one length, as Hugging Face's `save_to_disk` writes them.

Layout (Arrow `format/Message.fbs`, `Schema.fbs`, `File.fbs`; checked with pyarrow 26.0.1), little-endian:

    message   <i4 -1 | <i4 size of the metadata | metadata | body, the buffers of all columns
    stream    schema, then record batches and dictionaries, one message each | <i4 -1 | <i4 0
    file      "ARROW1\\0\\0" | stream | footer | <i4 size of the footer | "ARROW1"

Metadata and footer are flatbuffers. A record batch says where in its body each buffer lies. The ids of its
rows lie one after another in one of them, whether the rows have offsets (a list) or not (a fixed-size list),
and are one run. Its offsets are read to see that all rows have the same length; no other body is read.

pyarrow is not used: it tells where buffers lie only when it has read them, and a server need not have it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats.flatbuffers import Table, unpack
from corpus_server.corpus.formats.layout import (
    ACCEPTED_DTYPES,
    COPY_AGAIN,
    TOKEN_DTYPES,
    Format,
    Run,
    ShardLayout,
    TokenDtype,
    build_ids,
)
from corpus_server.errors import UnreadableCorpus
from corpus_server.user_files import parse_json, read_regular

_COLUMN: Final = "input_ids"
_MASKS: Final = ("labels", "attention_mask")  # columns that may say which tokens are padding
_FILE_MAGIC: Final = b"ARROW1\0\0"
_CONTINUATION: Final = b"\xff\xff\xff\xff"
_BLOCK_BYTES: Final = 4096  # read at once: a whole message of a few columns, one request to a store
_MAX_METADATA_BYTES: Final = 1 << 24
_MAX_COLUMNS: Final = 1 << 16  # with those inside others
_MAX_OFFSETS: Final = 1 << 16  # read of one batch; of a larger one the last, too

# Numbers of the unions MessageHeader and Type.
_SCHEMA, _BATCH = 1, 3
_INT, _LIST, _FIXED_SIZE_LIST, _LARGE_LIST = 2, 12, 16, 21
# Buffers that a column of a type takes, without those of the columns inside it. Unions and views, whose
# number depends on more, are missing.
_NUM_BUFFERS: Final = {
    **dict.fromkeys((1, 22), 0),  # null, run-end encoded
    **dict.fromkeys((13, _FIXED_SIZE_LIST), 1),  # struct
    **dict.fromkeys((_INT, 3, 6, 7, 8, 9, 10, 11, 15, 18), 2),  # numbers, booleans, times, fixed-size binary
    **dict.fromkeys((_LIST, 17, _LARGE_LIST), 2),  # map
    **dict.fromkeys((4, 5, 19, 20, 25, 26), 3),  # binary and text, list views
}

Refuse = Callable[[str], UnreadableCorpus]


class _Message(NamedTuple):
    at: int  # byte of the file
    kind: int
    header: Table
    body_at: int
    body_bytes: int


class _Column(NamedTuple):
    dtype: TokenDtype
    fixed_length: int | None  # tokens of each row; None if offsets say
    offsets: str  # their dtype
    node: int  # its number among the nodes of a batch; that of its ids follows
    buffer: int  # number of its first buffer


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout | None:
    if file.path.suffix.lower() not in (".arrow", ".feather"):
        return None
    is_file = file.head(8) == _FILE_MAGIC
    start = 8 if is_file else 0
    if not _CONTINUATION.startswith(file.read(start, min(4, file.size_bytes - start))):
        return None  # Feather 1, or Arrow before 0.15

    def refuse(reason: str) -> UnreadableCorpus:
        what = f"is an Arrow file with token ids in {_COLUMN!r}, which cannot be mapped: {reason}"
        return file.unreadable(what, build_ids(file.path.parent if in_folder else file.path, _COLUMN))

    try:
        footer_at, blocks = _read_footer(file) if is_file else (file.size_bytes, None)
        messages = _messages(file, start, footer_at, ends_itself=not is_file)
        schema = next(messages, None)
        if schema is None or schema.kind != _SCHEMA:
            raise ValueError("it does not begin with a schema")
        if (column := _find_column(schema.header, refuse)) is None:
            return None
        runs, lengths, found = [], set(), []
        for message in messages:
            if message.kind != _BATCH:
                continue  # a dictionary of another column
            found.append((message.at, message.body_bytes))
            run, length = _read_batch(file, message, column, refuse)
            if run.num_tokens:
                runs.append(run)
                lengths.add(length)
            if len(lengths) > 1:
                raise refuse(
                    f"rows have {' and '.join(map(str, sorted(lengths)))} tokens, expected one length"
                )
        if blocks is not None and blocks != found:
            raise ValueError("its footer lists other record batches than it holds")
    except (struct.error, ValueError, IndexError, RecursionError) as error:
        raise file.unreadable(f"its Arrow metadata is damaged: {error}", COPY_AGAIN) from error
    length = max(lengths, default=0)
    others = [name for name in _MASKS if any(field.text(0) == name for field in schema.header.tables(1))]
    left_out = (
        f"; {' and '.join(others)} beside it: not served, build --mask makes loss masks" if others else ""
    )
    return ShardLayout(
        format="arrow",
        reason=f"named {file.path.suffix}, rows of {length} tokens in its column {_COLUMN}{left_out}",
        dtype=column.dtype,
        runs=tuple(runs) or (Run(0, 0),),
    )


def _read_footer(file: OpenFile) -> tuple[int, list[tuple[int, int]]]:
    """Return the byte at which a file's footer begins, and the start and body of each batch it lists."""
    end = file.read(max(8, file.size_bytes - 10), min(10, file.size_bytes - 8))
    size = unpack("<i", end, 0)
    at = file.size_bytes - 10 - size
    if end[4:] != _FILE_MAGIC[:6] or not 0 < size <= _MAX_METADATA_BYTES or at < 8:
        raise ValueError("it does not end with a footer")
    footer = Table.root(file.read(at, size))
    return at, [(block[0], block[2]) for block in footer.vector(3, "<qi4xq")]


def check_stream(file: OpenFile) -> None:
    """Raise ValueError if a stream does not end itself, or more follows it: its readers see neither."""
    is_old = not file.head(4).startswith(_CONTINUATION)
    mark = b"" if is_old else _CONTINUATION
    try:
        for _ in _messages(file, 0, file.size_bytes, ends_itself=True, mark=mark):
            pass
    except (struct.error, IndexError) as error:
        raise ValueError(f"its messages are damaged: {error}") from error


def _messages(
    file: OpenFile, at: int, stop: int, *, ends_itself: bool, mark: bytes = _CONTINUATION
) -> Iterator[_Message]:
    """Yield the messages between two bytes. A stream must end itself: nothing else tells a truncated one.

    Messages begin with a `mark`; those of Arrow before 0.15 with none.
    """
    begin = len(mark) + 4
    while at < stop:
        block = file.read(at, min(_BLOCK_BYTES, stop - at))
        size = unpack("<i", block, len(mark))
        if not block.startswith(mark) or not 0 <= size <= min(_MAX_METADATA_BYTES, stop - at - begin):
            raise ValueError(f"no message begins at byte {at}")
        if size == 0:
            if ends_itself and at + begin != stop:
                raise ValueError(f"its stream ends at byte {at + begin} of {stop}")
            return
        metadata = block[begin : begin + size] if begin + size <= len(block) else file.read(at + begin, size)
        message = Table.root(metadata)
        header, body_bytes = message.table(2), message.number(3, "<q")
        body_at = at + begin + size
        if header is None or not 0 <= body_bytes <= stop - body_at:
            raise ValueError(f"the message at byte {at} says {body_bytes} bytes, {stop - body_at} follow it")
        yield _Message(at, message.number(1, "<B"), header, body_at, body_bytes)
        at = body_at + body_bytes
    if ends_itself:
        raise ValueError(f"its stream does not end before byte {stop}")


def _find_column(schema: Table, refuse: Refuse) -> _Column | None:
    """Return the column of token ids; None if none of that name holds lists of integers."""
    before: list[int] = []  # types of the columns before it
    for field in schema.tables(1):
        if field.text(0) == _COLUMN:
            return _as_column(schema, field, before, refuse)
        before += _types(field, _MAX_COLUMNS - len(before))
    return None


def _as_column(schema: Table, field: Table, before: list[int], refuse: Refuse) -> _Column | None:
    kind, details, inner = field.number(2, "<B"), field.table(3), field.tables(5)
    if kind not in (_LIST, _LARGE_LIST, _FIXED_SIZE_LIST) or details is None or field.table(4):
        return None
    integer = inner[0].table(3) if len(inner) == 1 and inner[0].number(2, "<B") == _INT else None
    if integer is None or inner[0].table(4):
        return None
    dtype = f"{'' if integer.number(1, '<B') else 'u'}int{integer.number(0, '<i')}"
    if dtype not in TOKEN_DTYPES:
        raise refuse(f"they are {dtype}, served are {ACCEPTED_DTYPES}")
    if schema.number(0, "<h"):
        raise refuse("they are big-endian")
    if not _NUM_BUFFERS.keys() >= set(before):
        raise refuse("a column before them is a union or a view")
    if sum(other.text(0) == _COLUMN for other in schema.tables(1)) > 1:
        raise refuse("there are several columns of that name")
    return _Column(
        dtype=TOKEN_DTYPES[dtype],
        fixed_length=details.number(0, "<i") if kind == _FIXED_SIZE_LIST else None,
        offsets="<i8" if kind == _LARGE_LIST else "<i4",
        node=len(before),
        buffer=sum(_NUM_BUFFERS[each] for each in before),
    )


def _types(field: Table, most: int) -> list[int]:
    """Return the types of a column and of those inside it, in the order of a batch's nodes."""
    if field.table(4):
        return [_INT]  # a batch holds numbers of entries of the dictionary
    found = [field.number(2, "<B")]
    for inner in field.tables(5):
        found += _types(inner, most - len(found))
    if len(found) > most:
        raise ValueError(f"more than {_MAX_COLUMNS} columns")
    return found


def _read_batch(file: OpenFile, message: _Message, column: _Column, refuse: Refuse) -> tuple[Run, int]:
    """Return the run of a record batch, and the tokens of each row."""
    batch = message.header
    if batch.table(3) is not None:
        raise refuse("they are compressed")
    nodes, buffers = batch.vector(1, "<qq"), batch.vector(2, "<qq")
    (num_rows, null_rows), (num_ids, null_ids) = nodes[column.node], nodes[column.node + 1]
    if null_rows or null_ids:
        raise refuse("there are nulls among them")
    if num_rows != batch.number(0, "<q") or num_rows < 0:
        raise ValueError(f"the batch at byte {message.at} has columns of several lengths")
    if num_rows == 0:
        return Run(0, 0), 0
    if column.fixed_length is not None:
        first, length = 0, column.fixed_length
        offset = _buffer(message, buffers[column.buffer + 2], num_rows * length * column.dtype.itemsize)
    else:
        width = np.dtype(column.offsets).itemsize
        offsets_at = _buffer(message, buffers[column.buffer + 1], (num_rows + 1) * width)
        first, length = _equal_rows(file, offsets_at, num_rows, column.offsets, refuse)
        num_bytes = (first + num_rows * length) * column.dtype.itemsize
        offset = _buffer(message, buffers[column.buffer + 3], num_bytes)
    if not (first >= 0 <= length and first + num_rows * length <= num_ids):
        raise ValueError(
            f"the batch at byte {message.at} holds {num_ids} ids for {num_rows} rows of {length}"
        )
    return Run(offset + first * column.dtype.itemsize, num_rows * length), length


def _buffer(message: _Message, place: tuple[Any, ...], num_bytes: int) -> int:
    """Return the byte of the file at which a buffer begins that must hold `num_bytes`."""
    offset, size = place
    if not (0 <= num_bytes <= size and 0 <= offset <= message.body_bytes - size):
        raise ValueError(f"a buffer of the batch at byte {message.at} is {size} bytes, expected {num_bytes}")
    return int(message.body_at + offset)


def _equal_rows(file: OpenFile, at: int, num_rows: int, dtype: str, refuse: Refuse) -> tuple[int, int]:
    """Return where the first row begins among the ids, and the length that all rows have."""
    width = np.dtype(dtype).itemsize
    count = min(num_rows + 1, _MAX_OFFSETS)
    offsets = np.frombuffer(file.read(at, count * width), dtype).astype(np.int64)
    last = int.from_bytes(file.read(at + num_rows * width, width), "little", signed=True)
    first, lengths = int(offsets[0]), np.unique(np.diff(offsets))
    length = int(lengths[0])
    if lengths.size > 1 or last != first + num_rows * length:
        raise refuse(f"rows have different lengths, {length} tokens the shortest")
    return first, length


def _listed(path: Path) -> list[tuple[str]] | None:
    try:
        return [(str(each["filename"]),) for each in parse_json(read_regular(path))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


FORMAT: Final = Format(
    read=_read,
    list_name="state.json",  # beside the files of `save_to_disk`
    listed=_listed,
    is_listed=lambda name: name.endswith(".arrow"),
    # `map` and `filter` keep their results beside the data: the same rows once more, or numbers of rows.
    side_files={"cache-*.arrow": "a cache of Hugging Face's datasets"},
)
