"""CSV and TSV: each row is a document, whose fields the first row names."""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from corpus_server.corpus.files import unreadable
from corpus_server.tools.building.job import BuildOptions, Slice
from corpus_server.tools.building.kept import kept_fields
from corpus_server.tools.building.kinds.kind import Document, Kind, field_of, no_field, opened

_AS_LINES: Final = "write the rows as JSON lines or Parquet"


def _read(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    path = Path(piece.path)
    if options.column is not None:
        raise unreadable(path, "holds texts, and no lists of token ids", _AS_LINES)
    csv.field_size_limit(sys.maxsize)  # 131,072 characters otherwise
    delimiter = "\t" if ".tsv" in map(str.lower, path.suffixes) else ","
    with io.TextIOWrapper(opened(piece.path), "utf-8-sig", newline="") as text:
        # Strict: a quotation mark that is never closed would take all that follows into one field.
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            names = next(rows, [])
            name = field_of(piece, options)
            for wanted in (name, *options.keep):
                if wanted not in names:
                    raise unreadable(path, *no_field(wanted, names, options))
            if twice := [each for each, count in Counter(names).items() if count > 1 and each]:
                raise unreadable(path, f"has several columns {twice[0]!r}", "rename all but one of them")
            for number, row in enumerate(filter(None, rows)):
                document = Document(piece.path, "row", number, "")
                if len(row) != len(names):
                    what = f"has {len(row)} fields, the first row names {len(names)}"
                    error = document.unreadable(what, f"is a quotation mark missing? Or {_AS_LINES}")
                    yield document.failed(error)
                    continue
                record = dict(zip(names, row, strict=True))
                yield document._replace(content=record[name], kept=kept_fields(record, options.keep))
        except csv.Error as error:
            raise unreadable(path, f"line {rows.line_num}: {error}", _AS_LINES) from error


def _check(piece: Slice, options: BuildOptions) -> None:
    if (first := next(_read(piece, options), None)) is not None and options.on_error == "refuse":
        first.check()


CSV: Final = Kind(_read, _check, has_fields=True)
