"""Read tables that people have: Parquet, JSON lines, CSV, as record batches without the text itself.

    .parquet                             columns
    .jsonl .ndjson .json                 a record a line
    .csv .tsv                            a record a line, names in the first one
    .csv.gz of OLMo and Dolma            no names: start, end, id, source, place

The last three also with .gz or .zst behind. An object `metadata`, as datatrove and Dolma write it, gives its
fields as columns.
"""

from __future__ import annotations

import codecs
import csv
import glob
import io
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.metadata.write import MAX_COLUMNS, column
from corpus_server.corpus.selection import natural_key
from corpus_server.errors import InvalidParameter
from corpus_server.extras import optional_package
from corpus_server.user_files import BeyondLimit, GivenTwice, parse_json

PLACES: Final = ("#start", "#end")
"""Columns of OLMo's tables, which have no names, that say which tokens of its file a document is."""

_OLMO: Final = (*PLACES, "id", "source", "place")
_LINES: Final = (".jsonl", ".ndjson", ".json")
_NESTED: Final = "metadata"
_LEFT_OUT: Final = ("text", "tokens", "input_ids")  # unless they are named
_ROWS: Final = 1 << 14
_WHOLE: Final = r"^-?(0|[1-9][0-9]{0,17})$"
_NUMBER: Final = r"^-?(0|[1-9][0-9]{0,14})?(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_BLOCK_BYTES: Final = 8 << 20
_PURPOSE: Final = "a table of metadata"


def find_tables(source: str) -> list[Path]:
    """Return the files that a path or a quoted pattern names, in natural order; of a folder, its tables."""
    path = Path(source)
    if path.is_dir():
        paths = [each for each in path.iterdir() if not each.name.startswith(".") and _suffix(each)]
    else:
        paths = [path] if path.is_file() else [*map(Path, glob.glob(source, recursive=True))]  # noqa: PTH207
    if not (found := sorted(paths, key=lambda each: natural_key(each.as_posix()))):
        what = "expected tables (.parquet, .jsonl, .csv), found nothing"
        raise unreadable(path, what, "check the path, or name the files by a quoted pattern")
    return found


def read_table(path: Path, keep: Collection[str] | None) -> Iterator[Any]:
    """Yield the rows of a file as record batches, whose schemas may differ.

    Args:
        keep: columns; None for all but the text and the tokens.

    Raises:
        UnreadableCorpus: the file is damaged or of no known kind.
        InvalidParameter: it lacks a column.
    """
    if not (suffix := _suffix(path)):
        raise unreadable(path, "is no table that can be read", "known are .parquet, .jsonl and .csv")
    readers = {".parquet": _read_parquet, ".csv": _read_csv, ".tsv": _read_csv}
    with _reading(path):
        for batch in readers.get(suffix, _read_lines)(path, keep):
            if batch.num_columns > MAX_COLUMNS:
                what = f"has {batch.num_columns:,} columns"
                raise unreadable(path, what, f"name at most {MAX_COLUMNS:,} with --keep")
            yield batch


def is_kept(name: str, keep: Collection[str] | None) -> bool:
    """Tell whether a column is one of those that were asked for."""
    return name not in _LEFT_OUT if keep is None else name in keep


def _suffix(path: Path) -> str:
    """Return `.jsonl` for `x.jsonl.gz`, "" for what is no table."""
    suffixes = [each.lower() for each in path.suffixes]
    if len(suffixes) > 1 and suffixes[-1] in (".gz", ".zst"):
        del suffixes[-1]
    return suffixes[-1] if suffixes and suffixes[-1] in (".parquet", ".csv", ".tsv", *_LINES) else ""


def _open(path: Path) -> io.BufferedReader:
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    return io.BufferedReader(arrow.input_stream(str(path), compression="detect"), 1 << 20)


def _read_parquet(path: Path, keep: Collection[str] | None) -> Iterator[Any]:
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    parquet = optional_package("pyarrow.parquet", extra="build", purpose=_PURPOSE)
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        schema = file.schema_arrow
        nested = _NESTED in schema.names and arrow.types.is_struct(schema.field(_NESTED).type)
        inner = [field.name for field in schema.field(_NESTED).type] if nested else []
        _check_once(path, schema.names)
        _check_named(path, [*schema.names, *inner], keep)
        names = [name for name in schema.names if (nested and name == _NESTED) or is_kept(name, keep)]
        if not names:
            raise unreadable(path, "has no column but text and tokens", "name one with --keep")
        for batch in file.iter_batches(_ROWS, columns=names):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            if nested:
                fields = zip(inner, columns.pop(_NESTED).flatten(), strict=True)
                columns |= {name: its for name, its in fields if is_kept(name, keep) and name not in columns}
            yield arrow.record_batch(columns)


def _check_once(path: Path, names: Sequence[str]) -> None:
    """Refuse a table with a column that comes twice: which one is meant?"""
    if twice := [name for name, number in Counter(names).items() if number > 1]:
        raise unreadable(path, f"has column {twice[0]!r} more than once", "rename one")


def _check_named(path: Path, names: Collection[str], keep: Collection[str] | None) -> None:
    """Refuse columns that a table lacks; of JSON lines, only all records together tell."""
    if missing := [name for name in keep or () if name not in names]:
        accepted = f"columns of {path.name}: {', '.join(names)}"
        raise InvalidParameter.expected("keep", accepted, missing[0])


def _read_lines(path: Path, keep: Collection[str] | None) -> Iterator[Any]:
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    with _open(path) as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if not line.isspace())
        while some := list(islice(lines, _ROWS)):
            values: dict[str, list[Any]] = {}
            for row, (number, line) in enumerate(some):
                for name, value in _record(path, number, line).items():
                    if is_kept(name, keep):
                        its = values.setdefault(name, [])
                        its += [None] * (row - len(its)) + [value]
            for its in values.values():
                its += [None] * (len(some) - len(its))
            columns = {name: column(its) for name, its in values.items()}
            # A batch without columns would have no rows.
            yield arrow.record_batch(columns or {_LEFT_OUT[0]: arrow.nulls(len(some))})


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    line = line.removeprefix(codecs.BOM_UTF8)
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        record = _lenient(path, number, line, error)
    else:
        if isinstance(record, dict) and line.count(b":") > len(record):  # else each name stands once
            _refuse_twice(path, number, line)
    if not isinstance(record, dict):
        raise unreadable(path, f"line {number}: expected an object, got {line[:40]!r}")
    nested = record.get(_NESTED)
    if isinstance(nested, dict):
        del record[_NESTED]
        record |= {name: value for name, value in nested.items() if name not in record}
    return record


def _refuse_twice(path: Path, number: int, line: bytes) -> None:
    """Refuse a record that gives a name twice, of which orjson takes the last value."""
    try:
        parse_json(line)
    except GivenTwice as error:
        raise unreadable(path, f"line {number}: {error}", "give it once") from error
    except ValueError:  # beyond a limit of Python's parser, and not of orjson
        pass


def _lenient(path: Path, number: int, line: bytes, strict: orjson.JSONDecodeError) -> Any:
    """Return a record that is JSON as Python writes it, with NaN and numbers of any size."""
    try:
        record = parse_json(line)
        json.dumps(record, ensure_ascii=False).encode()  # refuses halves of surrogate pairs
    except BeyondLimit as error:
        raise unreadable(path, f"line {number}: {error}", "write it in another way") from error
    except ValueError as error:
        what = f"line {number}: is not JSON: {strict}"
        raise unreadable(path, what, "was the copy interrupted?") from error
    return record


def _read_csv(path: Path, keep: Collection[str] | None) -> Iterator[Any]:
    """Read texts and narrow each block of a column to numbers, if that loses nothing."""
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    arrow_csv = optional_package("pyarrow.csv", extra="build", purpose=_PURPOSE)
    delimiter = "\t" if _suffix(path) == ".tsv" else ","
    with _open(path) as file:
        line = file.readline().decode("utf-8-sig")
    if not line:  # OLMo writes an empty table for an empty file
        return
    first = next(csv.reader(io.StringIO(line), delimiter=delimiter))
    is_olmo = len(first) == len(_OLMO) and all(each.isdecimal() for each in first[:2])
    names = list(_OLMO) if is_olmo else first
    _check_once(path, names)
    _check_named(path, names, keep)
    kept = [name for name in names if is_kept(name, keep) or (is_olmo and name in PLACES)]
    with _open(path) as file:
        reader = arrow_csv.open_csv(
            file,
            read_options=arrow_csv.ReadOptions(
                block_size=_BLOCK_BYTES, column_names=names if is_olmo else None, use_threads=False
            ),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=kept,
                column_types=dict.fromkeys(names, arrow.string()),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        for batch in reader:
            columns = {name: batch.column(name) for name in kept}
            yield arrow.record_batch(
                {
                    name: its.cast(arrow.int64()) if name in PLACES else _narrowed(its)
                    for name, its in columns.items()
                }
            )


def _narrowed(texts: Any) -> Any:
    """Return a column of texts as whole numbers or numbers if all of them are written like one.

    Not `007` and not 20 digits: they are names, and would become other ones.
    """
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    compute = optional_package("pyarrow.compute", extra="build", purpose=_PURPOSE)
    for pattern, kind in ((_WHOLE, arrow.int64()), (_NUMBER, arrow.float64())):
        if compute.all(compute.match_substring_regex(texts, pattern)).as_py() is not False:
            return texts.cast(kind)
    return texts


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Report what the disk and pyarrow raise for a table that is damaged."""
    try:
        yield
    except (OSError, EOFError, ValueError) as error:  # ArrowInvalid is a ValueError
        why = (str(error).splitlines() or [""])[0][:200]
        raise unreadable(path, f"cannot be read: {why}", "was the copy interrupted?") from error
