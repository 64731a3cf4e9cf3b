"""Text files, each of which is a document, and JSON lines, each of which is one.

A text longer than `TEXT_CHARS` is read and encoded in pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import xxhash

from corpus_server.corpus.files import unreadable
from corpus_server.tools.building.job import BuildOptions, Input, Slice
from corpus_server.tools.building.kept import kept_fields
from corpus_server.tools.building.kinds.kind import (
    COMPRESSED,
    IS_IDS,
    Document,
    Kind,
    field_of,
    no_field,
    opened,
)

# Characters that are encoded at once: `tokenizers` takes 200 bytes for each of their tokens. A longer text is
# cut at ends of lines, where few tokenizers would join what is before with what is behind.
TEXT_CHARS: Final = 1 << 20
_READ_BYTES: Final = 1 << 20


def _read_text(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    yield from in_pieces(Document(piece.path, "", 0, ""), lambda: _texts(piece, options), options)


def _texts(piece: Slice, options: BuildOptions) -> Iterator[str]:
    """Yield the text of a file, some at a time."""
    path = Path(piece.path)
    if options.column is not None:
        raise unreadable(path, f"is text, which has no column {options.column!r} of token ids")
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with opened(piece.path) as file:
        while (data := file.read(_READ_BYTES)) or decoder.getstate()[0]:
            begin = position - len(decoder.getstate()[0])
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                what = f"byte {begin + error.start}: is not UTF-8"
                raise unreadable(path, what, "convert it with iconv") from error
            position += len(data)


def in_pieces(
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


def _divide_lines(file: Input, step: int) -> Iterator[Slice]:
    if file.path.lower().endswith(COMPRESSED):
        yield file.whole()
        return
    for start in range(0, file.num_bytes, step):
        stop = min(start + step, file.num_bytes)
        yield file.slice(start, stop, stop - start)


def _read_lines(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    """Yield the lines that begin in the slice; the last one may end behind it."""
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
                yield _json_document(document, options, piece)
            position += len(line)


def _json_document(line: Document, options: BuildOptions, piece: Slice) -> Document:
    try:
        record = orjson.loads(line.content)
    except orjson.JSONDecodeError as error:
        raise line.unreadable(f"is not JSON: {error}", "was the copy interrupted?") from error
    if not isinstance(record, dict):
        raise line.unreadable(f"expected an object, got {line.content[:40]!r}")
    name = field_of(piece, options)
    if name not in record:
        raise line.unreadable(*no_field(name, list(record), options))
    content = _json_content(line, name, record[name], options)
    return line._replace(content=content, kept=kept_fields(record, options.keep))


def _json_content(line: Document, name: str, value: Any, options: BuildOptions) -> Any:
    if options.column is None:
        if value is None or isinstance(value, str):
            return value or ""
        raise line.unreadable(f"expected text in {name!r}, got {value!r:.60}", IS_IDS.format(name))
    # The types are looked at one by one, because NumPy would make 1 of True.
    if value is None or (isinstance(value, list) and set(map(type, value)) <= {int}):
        ids = np.array(value or [], None if value else np.uint32)
        if ids.dtype != object:  # no id is beyond 64 bits
            return ids
    raise line.unreadable(f"expected a list of token ids in {name!r}, got {value!r:.60}")


TEXT: Final = Kind(_read_text, lambda *its: next(_texts(*its), None))
LINES: Final = Kind(_read_lines, lambda *its: next(_read_lines(*its), None), _divide_lines, has_fields=True)
