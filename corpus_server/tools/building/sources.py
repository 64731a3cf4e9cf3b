"""Divide the input files into parts, and read their documents.

    files                                    a document is    divided at
    .txt .text, and what --include chooses   a file           files
    .jsonl .ndjson .json                     a line           lines
    these with a JSON array                  a record         files
    .csv .tsv                                a row            files
    these with .gz .zst .bz2 .xz behind      as above         files
    .parquet                                 a row            row groups
    .arrow .feather                          a row            files
    .mds, also compressed (MosaicML)         a sample         files
    chunk-*.bin (litData)                    an item          files

The division depends on the files alone, and the corpus does not depend on the division: parts are joined in
the order of the files, and inside a file in its own order. `kinds` has a file for each kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from corpus_server.corpus.files import unreadable
from corpus_server.errors import InvalidParameter
from corpus_server.tools.building.job import TEXT_FIELD, BuildOptions, Input, Part, Slice
from corpus_server.tools.building.kinds import packed, rows, samples, tables, text
from corpus_server.tools.building.kinds.kind import COMPRESSED, Document, Kind, reading

PART_BYTES: Final = 16 << 20  # bytes of input; a few seconds of work, which is what a kill costs a process

# The last parts are smaller, so that processes end together: a share of what is left, but not so little that
# publishing their files counts.
_SHARE_OF_LEFT: Final = 8
_LEAST_PART_BYTES: Final = 1 << 20

KINDS: Final = {
    **dict.fromkeys((".txt", ".text"), text.TEXT),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), text.LINES),
    **dict.fromkeys((".csv", ".tsv"), rows.CSV),
    **dict.fromkeys((".parquet", ".arrow", ".feather"), tables.TABLE),
    ".mds": samples.MDS,
    ".bin": samples.LITDATA,
}


def plan_parts(inputs: Iterable[Input]) -> tuple[Part, ...]:
    """Divide the inputs, in order, into parts, the last ones smaller. Small files share a part."""
    inputs = tuple(inputs)
    left = sum(each.num_bytes for each in inputs)
    parts: list[Part] = []
    pending: list[Slice] = []
    num_bytes = 0
    for each in inputs:
        for piece in _kind(each.path).divide(each, min(PART_BYTES, _LEAST_PART_BYTES)):
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
    """Yield the documents of a part in order; what is no document has an error with its place."""
    for piece in part.slices:
        with reading(piece.path):
            found = _kind(piece.path, options).read(piece, options)
            for document in packed.checked(found) if options.is_packed else found:
                content = document.content
                if isinstance(content, str) and len(content) > text.PIECE_CHARS:
                    yield from text.one_document(document, (content,).__iter__, options)
                else:
                    yield document


def check_text_fields(inputs: Iterable[Input], options: BuildOptions) -> None:
    """Raise InvalidParameter if a field of text is named, and is read of no file."""
    its_files: dict[str, list[Input]] = {}
    for each in inputs:
        its_files.setdefault(each.text_field or options.text_field, []).append(each)
    for field, files in its_files.items():
        if field == TEXT_FIELD:
            continue
        if (named := options.column if options.chat is None else options.chat.field) is not None:
            why = f"documents are in {named!r}"
        elif all(_kind(each.path) is text.TEXT for each in files):
            why = f"{files[0].path} is plain text"
        else:
            continue
        raise InvalidParameter(
            f"no field {field!r} is read: {why}; leave it out (--text-field, ?text=, or --field of find)",
            parameter="text_field",
        )


def check_first(inputs: Iterable[Input], options: BuildOptions) -> None:
    """Raise UnreadableCorpus if the first document of an input cannot be read, before hours of work.

    Where nobody says what rows of token ids are, the first rows of the first input must look like documents.
    """
    inputs = tuple(inputs)
    check_text_fields(inputs, options)
    is_first = True
    for each in inputs:
        if each.num_bytes:
            kind = _kind(each.path, options)
            with reading(each.path):
                kind.check(each.whole(), options)
                if is_first and options.column is not None and options.rows is None:
                    slices = kind.divide(each, _LEAST_PART_BYTES)
                    found = chain.from_iterable(kind.read(piece, options) for piece in slices)
                    packed.check_documents(Path(each.path), found, options)
            is_first = False


def _kind(path: str, options: BuildOptions | None = None) -> Kind:
    kind = KINDS.get(suffix_of(Path(path)), text.TEXT)
    if options is not None and options.keep and not kind.has_fields:
        remedy = "keep fields of JSON lines, CSV, Parquet and Arrow files"
        raise unreadable(Path(path), f"has no field {options.keep[0]!r} to keep", remedy)
    if (
        options is not None
        and options.has_masks
        and not (kind.has_fields or (kind.has_masks and options.chat is None))
    ):
        remedy = (
            "JSON lines, Parquet, Arrow files and, for masks, MDS shards and chunks of litData have fields"
        )
        name = options.mask[0] if options.chat is None else options.chat.field
        raise unreadable(Path(path), f"has no field {name!r}", remedy)
    return kind


def suffix_of(path: Path) -> str:
    """Return `.jsonl` for `x.jsonl.gz`; compressed Parquet and Arrow files do not exist."""
    *_, inner, last = "", "", *(suffix.lower() for suffix in path.suffixes)
    is_packed = last in COMPRESSED and KINDS.get(inner) in (text.TEXT, text.LINES, rows.CSV, samples.MDS)
    return inner if is_packed else last
