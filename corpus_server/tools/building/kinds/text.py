"""Text files, each of which is a document, and JSON, of which each line is one, or each record of an array.

A text is encoded in one call of the tokenizer, or in pieces if the options allow it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import xxhash

from corpus_server.corpus.files import unreadable
from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building.job import BuildOptions, Input, Slice
from corpus_server.tools.building.kept import kept_fields
from corpus_server.tools.building.kinds.arrays import records
from corpus_server.tools.building.kinds.kind import (
    COMPRESSED,
    COPIED,
    HEAD_BYTES,
    IS_CHAT,
    IS_IDS,
    IS_SEVERAL,
    TOOLS,
    Document,
    Kind,
    encoding_of,
    field_of,
    inner,
    no_field,
    no_utf8,
    opened,
    reading,
)
from corpus_server.tools.building.kinds.masked import mask_fields, with_mask
from corpus_server.user_files import BeyondLimit, GivenTwice, parse_json

# Characters of a piece, where a text is encoded in pieces. It is cut at ends of lines, where few tokenizers
# would join what is before with what is behind.
PIECE_CHARS: Final = 1 << 20
# Characters of a text that is encoded in one call: `tokenizers` takes 220 bytes for each character of English
# and 450 of Chinese, so 2 to 4 GB.
TEXT_CHARS: Final = 1 << 23
_READ_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 4096  # white space before a first record
_BYTE_ORDER_MARK: Final = "\ufeff"
_ONCE: Final = "give it once"
_ONE_EACH: Final = "a record is one line; write them so with jq -c . FILE"
_SHORTEN: Final = "write it in another way, or leave it out (build: --on-error skip)"
_HALF: Final = re.compile("[\ud800-\udfff]")
_FIRST_LINES: Final = 100  # if none of them is a document, the options are wrong and not the lines


def _read_text(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    yield from one_document(Document(piece.path, "", 0, ""), lambda: _texts(piece, options), options)


def _texts(piece: Slice, options: BuildOptions) -> Iterator[str]:
    """Yield the text of a file, some at a time."""
    if options.column is not None:
        raise unreadable(Path(piece.path), f"is text, which has no column {options.column!r} of token ids")
    yield from _decoded(piece.path)


def _decoded(path: str) -> Iterator[str]:
    """Yield a file of UTF-8, some at a time, without the byte order mark that it may begin with."""
    decoder, position, is_first = codecs.getincrementaldecoder("utf-8")(), 0, True
    with opened(path) as file:
        while (data := file.read(_READ_BYTES)) or decoder.getstate()[0]:
            begin = position - len(decoder.getstate()[0])
            if position == 0 and (encoding := encoding_of(data[:HEAD_BYTES])) is not None:
                what, remedy = no_utf8(data[:HEAD_BYTES])
                if len(data) % (4 if "32" in encoding else 2):  # of all of it, or of a power of two
                    what = f"looks like {encoding} that ends inside a character"
                    remedy = f"was the copy interrupted? Copy it again, then {remedy}"
                raise unreadable(Path(path), what, remedy)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                what = f"byte {begin + error.start}: is not UTF-8"
                raise unreadable(Path(path), what, no_utf8(b"")[1]) from error
            yield text.removeprefix(_BYTE_ORDER_MARK) if is_first else text
            position, is_first = position + len(data), is_first and not text


def one_document(
    document: Document, texts: Callable[[], Iterable[str]], options: BuildOptions
) -> Iterator[Document]:
    """Yield a document, whose text `texts` gives some at a time: whole, or in pieces if the options allow it.

    A text that is too long to be encoded in one call, or that cannot be read, is an error.
    """
    try:
        if options.in_pieces:
            yield from _in_pieces(document, texts, options)
        else:
            yield document._replace(content=_whole(document, texts()))
    except UnreadableCorpus as error:
        yield document.failed(error)


def _whole(document: Document, texts: Iterable[str]) -> str:
    held, num_chars = [], 0
    for text in texts:
        held.append(text)
        if (num_chars := num_chars + len(text)) > TEXT_CHARS:
            what = f"is a text of more than {TEXT_CHARS:,} characters, too many for one call of a tokenizer"
            remedy = (
                "make several documents of it, or say --cut-texts: pieces that end where lines end are "
                "encoded, and there the ids may differ from those of one call"
            )
            raise document.unreadable(what, remedy)
    return "".join(held)


def _in_pieces(
    document: Document, texts: Callable[[], Iterable[str]], options: BuildOptions
) -> Iterator[Document]:
    """Yield a document of any length in pieces of at most `PIECE_CHARS`, cut at ends of lines.

    Where documents are chosen by their content, the text is read twice.
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
        while len(held) - start > PIECE_CHARS:
            stop = start + PIECE_CHARS
            stop = held.rfind("\n", start, stop) + 1 or stop
            yield held[start:stop]
            start = stop
        held = held[start:]
    if held:
        yield held


def _divide_lines(file: Input, step: int) -> Iterator[Slice]:
    if file.path.lower().endswith(COMPRESSED) or _is_array(file.path):
        yield file.whole()
        return
    for start in range(0, file.num_bytes, step):
        stop = min(start + step, file.num_bytes)
        yield file.slice(start, stop, stop - start)


def _is_array(path: str) -> bool:
    """Tell whether a file is a JSON array of records, and not one record a line."""
    with reading(path), opened(path) as file:
        return file.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _read_records(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    """Yield the records of a JSON array, which are decoded one by one."""
    number = 0
    try:
        for number, record in enumerate(records(_decoded(piece.path))):
            document = Document(piece.path, "record", number, "")
            try:
                yield _json_record(document, record, options, piece)
            except UnreadableCorpus as error:
                yield document.failed(error)
    except GivenTwice as error:
        raise unreadable(Path(piece.path), f"behind record {number}: {error}", _ONCE) from error
    except BeyondLimit as error:
        raise unreadable(Path(piece.path), f"what follows record {number} {error}", _SHORTEN) from error
    except ValueError as error:
        raise unreadable(Path(piece.path), f"behind record {number}: is not JSON: {error}", COPIED) from error


def _read_lines(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    """Yield the lines that begin in the slice; the last one may end behind it."""
    if piece.start == 0 and _is_array(piece.path):
        yield from _read_records(piece, options)
        return
    with opened(piece.path) as file:
        compressed = piece.path.lower().endswith(COMPRESSED)
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
                try:
                    yield _json_document(document, options, piece)
                except UnreadableCorpus as error:
                    yield document.failed(error)
            position += len(line)


def _json_document(line: Document, options: BuildOptions, piece: Slice) -> Document:
    try:
        record = orjson.loads(line.content)
    except orjson.JSONDecodeError as error:
        record = _lenient(line, error)
        is_lenient = True
    else:
        is_lenient = False
        _refuse_twice(line, record, options, piece)
    document = _json_record(line, record, options, piece, is_lenient=is_lenient)
    if any(isinstance(value, float) and abs(value) >= 1 << 63 for value in document.kept):
        # orjson reads a whole number of more than 64 bits as a float.
        document = document._replace(kept=kept_fields(json.loads(line.content), options.keep))
    return document


def _refuse_twice(line: Document, record: Any, options: BuildOptions, piece: Slice) -> None:
    """Refuse a record that gives a name twice which is read: orjson takes the last value.

    Names are looked for as bytes, 0.8 ms for each megabyte; Python's parser, which sees all of them, takes 5.
    Names of messages stand once in each, so a conversation is parsed: its template takes longer than that.
    """
    fields = mask_fields(record, options) if isinstance(record, dict) else ()
    names = _quoted(field_of(piece, options), *options.keep, *fields)
    if options.chat is None and all(line.content.count(name) < 2 for name in names):
        return
    try:
        parse_json(line.content)
    except GivenTwice as error:
        raise line.unreadable(str(error), _ONCE) from error
    except ValueError:  # beyond a limit of Python's parser, and not of orjson
        pass


@lru_cache
def _quoted(*names: str) -> tuple[bytes, ...]:
    """Return names, and those of the fields on the way to them, as they stand in JSON."""
    parts = dict.fromkeys(part for name in names for part in (name, *name.split(".")))
    return tuple(json.dumps(part, ensure_ascii=False).encode() for part in parts)


def _lenient(line: Document, strict: orjson.JSONDecodeError) -> Any:
    """Return a record that is JSON as Python writes it: NaN, halves of surrogate pairs, a byte order mark."""
    data: bytes = line.content.removeprefix(codecs.BOM_UTF8)
    try:
        return parse_json(data.decode())
    except BeyondLimit as error:
        raise line.unreadable(str(error), _SHORTEN) from error
    except ValueError as error:
        what, remedy = f"is not JSON: {strict}", COPIED
        if encoding_of(data[:HEAD_BYTES]) is not None:
            what, remedy = no_utf8(data[:HEAD_BYTES])
        elif isinstance(error, UnicodeDecodeError):
            remedy = no_utf8(b"")[1]
        elif strict.msg.startswith("unexpected content after document"):
            is_comma = data.rstrip().endswith(b"},")
            remedy = "leave out the comma behind each record" if is_comma else _ONE_EACH
        elif data.strip() in (b"{", b"["):
            remedy = _ONE_EACH
        elif data.endswith(b"\n") and b"\0" not in data:  # the line is whole
            remedy = "mend or remove the line"
        raise line.unreadable(what, remedy) from error


def _json_record(
    document: Document, record: Any, options: BuildOptions, piece: Slice, *, is_lenient: bool = True
) -> Document:
    if not isinstance(record, dict):
        raise document.unreadable(f"expected an object, got {document.content[:40] or record!r:.40}")
    name = field_of(piece, options)
    try:
        value = inner(record, name)
    except KeyError:
        raise document.unreadable(*no_field(name, list(record), options)) from None
    content = _json_content(document, name, value, options)
    kept = kept_fields(record, options.keep)
    if is_lenient and (half := _HALF.search(json.dumps([value, kept], ensure_ascii=False))):
        what = f"holds half a surrogate pair, {half[0]!a}, which is no character"
        raise document.unreadable(what, "was a text cut between UTF-16 units? Replace it")
    tools = None if options.chat is None else record.get(TOOLS)
    document = document._replace(content=content, kept=kept, tools=tools)
    fields = {field: _values(record.get(field)) for field in mask_fields(record, options)}
    return with_mask(document, fields, options) if fields else document


def _values(value: Any) -> list[Any] | None:
    """Return the values of a field beside the token ids; None if it is no list of numbers."""
    is_numbers = isinstance(value, list) and set(map(type, value)) <= {int, float, bool}
    return value if is_numbers else None


def _json_content(line: Document, name: str, value: Any, options: BuildOptions) -> Any:
    if options.chat is not None:
        if value is None or (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
            return value or ""
        raise line.unreadable(f"expected a list of messages in {name!r}, got {value!r:.60}")
    if options.column is None:
        if value is None or isinstance(value, str):
            return value or ""
        remedy = IS_IDS.format(name) if isinstance(value, list) and {*map(type, value)} <= {int} else None
        if isinstance(value, list) and any(isinstance(each, str) for each in value):
            remedy = IS_SEVERAL
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            remedy = IS_CHAT.format(name)
        raise line.unreadable(f"expected text in {name!r}, got {value!r:.60}", remedy)
    # The types are looked at one by one, because NumPy would make 1 of True.
    if value is None or (isinstance(value, list) and set(map(type, value)) <= {int}):
        ids = np.array(value or [], None if value else np.uint32)
        if ids.dtype != object:  # no id is beyond 64 bits
            return ids
    remedy = "ids are whole numbers, and not texts or fractions"
    raise line.unreadable(f"expected a list of token ids in {name!r}, got {value!r:.60}", remedy)


def _check_lines(piece: Slice, options: BuildOptions) -> None:
    """Read the first document; where documents may be left out, some of the first ones must be right."""
    errors = []
    for document in islice(_read_lines(piece, options), 1 if options.on_error == "refuse" else _FIRST_LINES):
        if document.error is None:
            return
        errors.append(document.error)
    if errors:
        raise errors[0]


def _check_text(piece: Slice, options: BuildOptions) -> None:
    try:
        next(_texts(piece, options), None)
    except UnreadableCorpus:
        if options.on_error == "refuse" or options.column is not None:
            raise


TEXT: Final = Kind(_read_text, _check_text)
LINES: Final = Kind(_read_lines, _check_lines, _divide_lines, has_fields=True)
