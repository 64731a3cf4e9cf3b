"""Divide the input files into parts, and read their documents.

    files                                    a document is    divided at
    .txt .text, and what --include chooses   a file           files
    .jsonl .ndjson .json                     a line           lines
    these with .gz or .zst behind            as above         files
    .parquet                                 a row            row groups
    .arrow .feather                          a row            files
    .mds, also .gz .zst .zstd (MosaicML)     a sample         files
    chunk-*.bin (litData)                    an item          files

The division depends on the files alone, and the corpus does not depend on the division: parts are joined in
the order of the files, and inside a file in its own order. A text longer than `TEXT_CHARS` is read and
encoded in pieces.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
import orjson
import xxhash

from corpus_server.building.job import BuildOptions, Input, Part, Slice
from corpus_server.building.kept import Kept, columns_to_read, kept_fields, kept_rows
from corpus_server.building.samples import check_mds, litdata_items, mds_samples
from corpus_server.corpus.files import unreadable
from corpus_server.corpus.formats.litdata import read_index
from corpus_server.errors import UnreadableCorpus
from corpus_server.extras import optional_package

# Characters that are encoded at once: `tokenizers` takes 200 bytes for each of their tokens. A longer text is
# cut at ends of lines, where few tokenizers would join what is before with what is behind.
TEXT_CHARS: Final = 1 << 20
_READ_BYTES: Final = 1 << 20

PART_BYTES: Final = 16 << 20  # bytes of input; a few seconds of work, which is what a kill costs a process

# The last parts are smaller, so that processes end together: a share of what is left, but not so little that
# publishing their files counts.
_SHARE_OF_LEFT: Final = 8
_LEAST_PART_BYTES: Final = 1 << 20

_ROWS_AT_ONCE: Final = 256  # a batch of an Arrow file may hold gigabytes, and more of them as Python strings
_COMPRESSED: Final = (".gz", ".zst", ".zstd")


class Document(NamedTuple):
    """A document of an input.

    Attributes:
        unit: what the file counts its documents in, for errors: "row", say; "" for a whole file.
        number: of the row, sample or item, counted from 0; of a line, the byte at which it begins.
        content: text, or token ids `(n,)` of any integer type; empty where the file has a null.
        kept: values of the fields that `options.keep` names.
        is_last: more of the same document follows, unless it is set.
        digest: xxh3-64 of the whole text, where `content` is a piece and the build has splits.
    """

    path: str
    unit: str
    number: int
    content: Any
    kept: Kept = ()
    is_last: bool = True
    digest: int | None = None

    def unreadable(self, what: str, remedy: str | None = None) -> UnreadableCorpus:
        """Return the error for this document."""
        number = _line_number(self.path, self.number) if self.unit == "line" else self.number
        return _unreadable(self.path, f"{self.unit} {number}" if self.unit else "", what, remedy)


class Kind(NamedTuple):
    """How files of one kind are divided and read, and whether their documents have fields to keep.

    `check` reads no more than a first document takes.
    """

    divide: Callable[[Input], Iterator[Slice]]
    read: Callable[[Slice, BuildOptions], Iterator[Document]]
    check: Callable[[Slice, BuildOptions], object]
    has_fields: bool = False


def plan_parts(inputs: Iterable[Input]) -> tuple[Part, ...]:
    """Divide the inputs, in order, into parts, the last ones smaller. Small files share a part."""
    inputs = tuple(inputs)
    left = sum(each.num_bytes for each in inputs)
    parts: list[Part] = []
    pending: list[Slice] = []
    num_bytes = 0
    for each in inputs:
        for piece in _kind(each.path).divide(each):
            most = min(PART_BYTES, max(_LEAST_PART_BYTES, left // _SHARE_OF_LEFT))
            if pending and num_bytes + piece.num_bytes > most:
                parts.append(Part(number=len(parts), slices=tuple(pending)))
                left -= num_bytes
                pending, num_bytes = [], 0
            num_bytes += piece.num_bytes
            if pending and (pending[-1].path, pending[-1].stop) == (piece.path, piece.start):
                before = pending.pop()
                both = before.num_bytes + piece.num_bytes
                piece = dataclasses.replace(piece, start=before.start, num_bytes=both)
            pending.append(piece)
    return (*parts, Part(number=len(parts), slices=tuple(pending)))


def read_documents(part: Part, options: BuildOptions) -> Iterator[Document]:
    """Yield the documents of a part in order; what is no document is an error with its place."""
    for piece in part.slices:
        with _reading(piece.path):
            for document in _kind(piece.path, options).read(piece, options):
                content = document.content
                if isinstance(content, str) and len(content) > TEXT_CHARS:
                    yield from _in_pieces(document, (content,).__iter__, options)
                else:
                    yield document


def check_first(inputs: Iterable[Input], options: BuildOptions) -> None:
    """Raise UnreadableCorpus if the first document of an input cannot be read, before hours of work."""
    for each in inputs:
        if each.num_bytes:
            with _reading(each.path):
                _kind(each.path, options).check(next(_divide_not(each)), options)


def check_kind(path: Path) -> None:
    """Raise UnreadableCorpus if a file's name is that of no kind."""
    if suffix_of(path) not in KINDS:
        remedy = f"known are {', '.join(KINDS)}; read it as text with --include '*{path.suffix}'"
        raise unreadable(path, "is of no kind that can be read", remedy)


def _kind(path: str, options: BuildOptions | None = None) -> Kind:
    kind = KINDS.get(suffix_of(Path(path)), _TEXT_KIND)
    if options is not None and options.keep and not kind.has_fields:
        remedy = "keep fields of JSON lines, Parquet and Arrow files"
        raise _unreadable(path, "", f"has no field {options.keep[0]!r} to keep", remedy)
    return kind


def suffix_of(path: Path) -> str:
    """Return `.jsonl` for `x.jsonl.gz`; compressed Parquet and Arrow files do not exist."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if len(suffixes) > 1 and suffixes[-1] in _COMPRESSED and suffixes[-2] in (*_TEXT, *_LINES, ".mds"):
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def _slice(file: Input, start: int, stop: int, num_bytes: int) -> Slice:
    return Slice(path=file.path, start=start, stop=stop, num_bytes=num_bytes, text_field=file.text_field)


def _divide_not(file: Input) -> Iterator[Slice]:
    yield _slice(file, 0, file.num_bytes, file.num_bytes)


def _divide_lines(file: Input) -> Iterator[Slice]:
    if file.path.lower().endswith(_COMPRESSED):
        yield from _divide_not(file)
        return
    step = min(PART_BYTES, _LEAST_PART_BYTES)
    for start in range(0, file.num_bytes, step):
        stop = min(start + step, file.num_bytes)
        yield _slice(file, start, stop, stop - start)


def _divide_row_groups(file: Input) -> Iterator[Slice]:
    # One slice for each group: `plan_parts` puts small ones together.
    with _reading(file.path), _open_parquet(file.path) as parquet:
        groups = parquet.metadata
        sizes = [groups.row_group(number).total_byte_size for number in range(groups.num_row_groups)]
    total = max(1, sum(sizes))
    for number, size in enumerate(sizes):
        # Its share of the file: the sizes are those of the uncompressed columns.
        num_bytes = file.num_bytes * size // total
        yield _slice(file, number, number + 1, num_bytes)


def _read_text(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    _check_text(piece, options)
    yield from _in_pieces(Document(piece.path, "", 0, ""), lambda: _texts(piece.path), options)


def _check_text(piece: Slice, options: BuildOptions) -> None:
    if options.column is not None:
        raise _unreadable(piece.path, "", f"is text, which has no column {options.column!r} of token ids")
    next(_texts(piece.path), None)


def _texts(path: str) -> Iterator[str]:
    """Yield the text of a file, some at a time."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with _open(path) as file:
        while (data := file.read(_READ_BYTES)) or decoder.getstate()[0]:
            begin = position - len(decoder.getstate()[0])
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                place, remedy = f"byte {begin + error.start}", "convert it with iconv"
                raise _unreadable(path, place, "is not UTF-8", remedy) from error
            position += len(data)


def _in_pieces(
    document: Document, texts: Callable[[], Iterable[str]], options: BuildOptions
) -> Iterator[Document]:
    """Yield a document of any length in pieces of at most `TEXT_CHARS`, cut at ends of lines.

    `texts` gives its text, some at a time; where documents are chosen by their content it is read twice.
    """
    pieces = _pieces(texts())
    before, digest = next(pieces, ""), None
    for piece in pieces:
        if digest is None and options.splits:
            whole = xxhash.xxh3_64()
            for text in texts():
                whole.update(text.encode())
            digest = whole.intdigest()
        yield document._replace(content=before, is_last=False, digest=digest)
        before = piece
    yield document._replace(content=before, digest=digest)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    held = ""
    for text in texts:
        held, start = held + text, 0
        while len(held) - start > TEXT_CHARS:
            stop = start + TEXT_CHARS
            stop = held.rfind("\n", start, stop) + 1 or stop
            yield held[start:stop]
            start = stop
        held = held[start:]
    if held:
        yield held


def _read_lines(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    """Yield the lines that begin in the slice; the last one may end behind it."""
    with _open(piece.path) as file:
        compressed = piece.path.lower().endswith(_COMPRESSED)
        position = piece.start
        if position:
            # The line that the byte before belongs to began before the slice, also if that byte ends it.
            file.seek(position - 1)
            position += len(file.readline()) - 1
        while compressed or position < piece.stop:
            line = file.readline()
            if not line:
                break
            if not line.isspace():
                document = Document(piece.path, "line", position, line)
                yield _json_document(document, options, piece)
            position += len(line)


def _line_number(path: str, position: int) -> int:
    """Return the number of the line that begins at byte `position`; counted only when an error needs it."""
    number, left = 1, position
    with _open(path) as file:
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            number += piece.count(b"\n")
            left -= len(piece)
    return number


def _field(piece: Slice, options: BuildOptions) -> str:
    return options.column or piece.text_field or options.text_field


def _json_document(line: Document, options: BuildOptions, piece: Slice) -> Document:
    try:
        record = orjson.loads(line.content)
    except orjson.JSONDecodeError as error:
        raise line.unreadable(f"is not JSON: {error}", "was the copy interrupted?") from error
    if not isinstance(record, dict):
        raise line.unreadable(f"expected an object, got {line.content[:40]!r}")
    kept = kept_fields(record, options.keep)
    content = _json_content(line, record, _field(piece, options), options)
    return line._replace(content=content, kept=kept)


def _json_content(
    line: Document, record: dict[str, Any], name: str, options: BuildOptions
) -> str | np.ndarray[Any, np.dtype[Any]]:
    if name not in record:
        raise line.unreadable(*_no_field(name, list(record), options))
    value = record[name]
    if options.column is None:
        if value is None or isinstance(value, str):
            return value or ""
        raise line.unreadable(f"expected text in {name!r}, got {value!r:.60}", _IS_IDS.format(name))
    # The types are looked at one by one, because NumPy would make 1 of True.
    if value is None or (isinstance(value, list) and set(map(type, value)) <= {int}):
        ids = np.array(value or [], None if value else np.uint32)
        if ids.dtype != object:  # no id is beyond 64 bits
            return ids
    raise line.unreadable(f"expected a list of token ids in {name!r}, got {value!r:.60}")


def _read_parquet(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    with _open_parquet(piece.path) as parquet:
        name = _column(piece, parquet.schema_arrow, options)
        row = sum(parquet.metadata.row_group(number).num_rows for number in range(piece.start))
        groups = list(range(piece.start, piece.stop))
        names = {name, *columns_to_read(parquet.schema_arrow.names, options.keep)}
        for batch in parquet.iter_batches(_ROWS_AT_ONCE, row_groups=groups, columns=list(names)):
            yield from _with_kept(_rows(piece.path, row, batch.column(name), options), batch, options)
            row += batch.num_rows


def _check_parquet(piece: Slice, options: BuildOptions) -> None:
    with _open_parquet(piece.path) as parquet:
        _column(piece, parquet.schema_arrow, options)


def _read_arrow(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    with _open_arrow(piece.path) as reader:
        name, row = _column(piece, reader.schema, options), 0
        is_file = hasattr(reader, "get_batch")
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
                some = batch.slice(first, _ROWS_AT_ONCE)
                rows = _rows(piece.path, row + first, some.column(name), options)
                yield from _with_kept(rows, some, options)
            row += batch.num_rows


def _check_arrow(piece: Slice, options: BuildOptions) -> None:
    with _open_arrow(piece.path) as reader:
        _column(piece, reader.schema, options)


@contextmanager
def _open_arrow(path: str) -> Iterator[Any]:
    """Open either layout: the file format (Feather), or the stream that `datasets` writes."""
    arrow = _pyarrow(path)
    with arrow.memory_map(path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(file) as reader:
            yield reader


def _column(piece: Slice, schema: Any, options: BuildOptions) -> str:
    """Return the column to read after checking its type."""
    path, name = piece.path, _field(piece, options)
    types = _pyarrow(path).types
    if name not in schema.names:
        raise _unreadable(path, "", *_no_field(name, schema.names, options))
    if schema.names.count(name) > 1:
        raise _unreadable(path, "", f"has several columns {name!r}", "rename all but one of them")
    found = schema.field(name).type
    is_list = any(check(found) for check in (types.is_list, types.is_large_list, types.is_fixed_size_list))
    if options.column is not None and not (is_list and types.is_integer(found.value_type)):
        raise _unreadable(path, "", f"expected lists of integers in column {name!r}, got {found}")
    is_text = any(check(found) for check in (types.is_string, types.is_large_string, types.is_string_view))
    if options.column is None and not is_text:
        remedy = _IS_IDS.format(name) if is_list else None
        raise _unreadable(path, "", f"expected text in column {name!r}, got {found}", remedy)
    _check_kept(path, schema, options)
    return name


def _check_kept(path: str, schema: Any, options: BuildOptions) -> None:
    """Refuse kept fields that neither the columns nor the fields of a column `metadata` have."""
    names = list(schema.names)
    if "metadata" in names and _pyarrow(path).types.is_struct(nested := schema.field("metadata").type):
        names += [field.name for field in nested]
    if missing := [name for name in options.keep if name not in names]:
        what, _ = _no_field(missing[0], names, options)
        raise _unreadable(path, "", what, "name fields that all files have with --keep")


def _with_kept(rows: Iterator[Document], batch: Any, options: BuildOptions) -> Iterator[Document]:
    if not options.keep:
        return rows
    both = zip(rows, kept_rows(batch, options.keep), strict=True)
    return (document._replace(kept=kept) for document, kept in both)


def _rows(path: str, first: int, column: Any, options: BuildOptions) -> Iterator[Document]:
    if options.column is None:
        for number, text in enumerate(column.to_pylist(), first):
            yield Document(path, "row", number, text or "")
        return
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    values = column.flatten()
    if values.null_count:
        raise _unreadable(path, f"rows {first} to {first + len(column)}", "a list of token ids holds a null")
    flat, stops = values.to_numpy(), np.cumsum(lengths)
    for number, (stop, length) in enumerate(zip(stops.tolist(), lengths.tolist(), strict=True), first):
        yield Document(path, "row", number, flat[stop - length : stop])


def _read_mds(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    with _open(piece.path) as file:
        samples = mds_samples(file.read(), _field(piece, options))
    for number, content in enumerate(samples):
        document = Document(piece.path, "sample", number, content)
        if isinstance(content, str) != (options.column is None):
            what = "text" if options.column is None else "token ids"
            raise document.unreadable(f"expected {what}, got something else")
        yield document


def _check_mds(piece: Slice, options: BuildOptions) -> None:
    with _open(piece.path) as file:
        check_mds(file, _field(piece, options), is_text=options.column is None)


def _litdata_config(piece: Slice, options: BuildOptions) -> tuple[dict[str, Any], bool]:
    """Return the configuration of a chunk's folder, and whether its items have no sizes before them."""
    path = Path(piece.path)
    index = path.with_name("index.json")
    config, num_tokens = read_index(index) if index.exists() else ({}, {})
    if path.name not in num_tokens:
        what = "is no chunk that an index.json of litData lists"
        raise _unreadable(piece.path, "", what, "serve it as it is")
    if options.column is None:
        raise _unreadable(piece.path, "", "holds token ids", "say --column tokens")
    return config, num_tokens[path.name] is not None


def _read_litdata(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    config, flat = _litdata_config(piece, options)
    with _open(piece.path) as file:
        items = litdata_items(file.read(), config, flat=flat)
    for number, ids in enumerate(items):
        yield Document(piece.path, "item", number, ids)


_IS_IDS: Final = "for token ids say --column {}"


def _no_field(name: str, found: Sequence[str], options: BuildOptions) -> tuple[str, str]:
    option = "--text-field, or for one source SOURCE?text=" if options.column is None else "--column"
    return f"has no field {name!r}, only {', '.join(map(repr, found))}", f"name one of them with {option}"


def _open(path: str) -> IO[bytes]:
    name = path.lower()
    if name.endswith((".zst", ".zstd", ".zstd.bin")):
        # Not the package zstandard: it ends silently where a file was cut off.
        return io.BufferedReader(_pyarrow(path).input_stream(path, compression="zstd"), 1 << 20)
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.open(path))
    return Path(path).open("rb", buffering=1 << 20)


def _open_parquet(path: str) -> Any:
    return optional_package("pyarrow.parquet", extra="build", purpose=path).ParquetFile(path)


def _pyarrow(path: str) -> Any:
    optional_package("pyarrow.ipc", extra="build", purpose=path)
    return optional_package("pyarrow", extra="build", purpose=path)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Report what the disk and the libraries raise for a file that cannot be read or is damaged."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # pyarrow raises OSError for compressed data
        raise _unreadable(path, "", f"cannot be read: {error}", "was the copy interrupted?") from error
    except ValueError as error:  # pyarrow's ArrowInvalid
        raise _unreadable(path, "", f"is damaged: {error}", "was the copy interrupted?") from error


def _unreadable(path: str, place: str, what: str, remedy: str | None = None) -> UnreadableCorpus:
    return unreadable(Path(path), f"{place}: {what}" if place else what, remedy)


def _check_lines(piece: Slice, options: BuildOptions) -> None:
    next(_read_lines(piece, options), None)


_TEXT_KIND: Final = Kind(_divide_not, _read_text, _check_text)
_TEXT: Final = dict.fromkeys((".txt", ".text"), _TEXT_KIND)
_LINES: Final = dict.fromkeys(
    (".jsonl", ".ndjson", ".json"), Kind(_divide_lines, _read_lines, _check_lines, has_fields=True)
)
KINDS: Final = {
    **_TEXT,
    **_LINES,
    ".parquet": Kind(_divide_row_groups, _read_parquet, _check_parquet, has_fields=True),
    **dict.fromkeys((".arrow", ".feather"), Kind(_divide_not, _read_arrow, _check_arrow, has_fields=True)),
    ".mds": Kind(_divide_not, _read_mds, _check_mds),
    ".bin": Kind(_divide_not, _read_litdata, _litdata_config),
}
