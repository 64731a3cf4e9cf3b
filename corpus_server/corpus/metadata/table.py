"""The metadata of a corpus, open for single rows and for all of them. Nothing that serves tokens reads it."""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from corpus_server.corpus.files import Closing, OpenFile, unreadable
from corpus_server.corpus.metadata.pages import largest_page
from corpus_server.corpus.metadata.write import GROUP_ROWS, MAX_COLUMNS, common_schema, conform
from corpus_server.errors import counted
from corpus_server.extras import optional_package
from corpus_server.work import Budget

END_BYTES: Final = 4096
"""At the end of a Parquet file, where it keeps where everything lies, and the range of its values."""

MAX_PAGE_BYTES: Final = 128 << 20
"""Of a column, uncompressed: no value is larger. Writers mean pages of a megabyte, but pyarrow looks at the
size of a page once in 1,024 rows."""

_TEXTS: Final = ("string", "large_string", "binary", "large_binary")

_ROWS_AT_ONCE: Final = 4096  # a few milliseconds of decoding
_BYTES_AT_ONCE: Final = 16 << 20  # of decoded values, if they are long: a row is whole in any case
_DICTIONARY_BYTES: Final = 4 << 20  # of a column in a row group
_BUFFER_BYTES: Final = 1 << 20  # of a column that is read as a whole, whose row groups may have gigabytes


class DocumentTable(Closing):
    """Files of metadata, open; use it from any thread.

    Args:
        paths: of the files, in order.
        num_documents: of the corpus.
        open_file: opens one of them; another one than `OpenFile` if it lies in an object store.

    Attributes:
        paths: of the files.
        starts: number of each file's first row, then of all.
        columns: names and types of the columns, those of the first file first.
        tag: tells tables apart without reading them.
        key: of this content of these files on this machine.

    Raises:
        UnreadableCorpus: a file is damaged, or there are other rows than documents.
        MissingPackage: pyarrow is not installed.
    """

    def __init__(
        self, paths: Sequence[Path], num_documents: int, open_file: Callable[[Path], OpenFile] = OpenFile
    ) -> None:
        self.paths = tuple(paths)
        self._files: list[_File] = []
        try:
            for path in paths:
                self._files.append(_File(open_file(path)))
            self.starts = (0, *accumulate(file.num_rows for file in self._files))
            if self.starts[-1] != num_documents:
                has = counted(self.starts[-1], "row")
                what = f"its metadata has {has}, the corpus {counted(num_documents, 'document')}"
                raise unreadable(paths[0].parent, what, "it needs one row for each document, in order")
        except BaseException:
            self.close()
            raise
        self.columns: dict[str, str] = {}
        tag = xxhash.xxh3_64()
        for file in self._files:
            self.columns = {**file.columns, **self.columns}
            tag.update(file.end())
        self.tag = tag.hexdigest()
        self.key = " ".join(file.key for file in self._files)

    def rows(
        self,
        numbers: Iterable[int],
        budget: Budget,
        columns: Collection[str] | None = None,
        *,
        explains: bool = True,
    ) -> dict[int, dict[str, Any]]:
        """Return the rows of documents, column -> value; a file may lack columns of another.

        A column with a page of more than `MAX_PAGE_BYTES` is not read. Row groups are read from their begin.

        Args:
            numbers: of documents, in [0, num_documents).
            columns: those to read; None for all.
            explains: whether the value of a column that is not read says so; else it is missing.

        Raises:
            CorpusChanged, ReadFailed, UnreadableCorpus: a file is not what it was.
        """
        found: dict[int, dict[str, Any]] = {}
        wanted: dict[tuple[int, int], list[int]] = {}
        for number in sorted(set(numbers)):
            at = bisect_right(self.starts, number) - 1
            group = bisect_right(self._files[at].group_starts, number - self.starts[at]) - 1
            wanted.setdefault((at, group), []).append(number)
        for (at, group), its in wanted.items():
            file = self._files[at]
            too_large = file.too_large(group, columns, budget)
            wanted_columns = set(file.columns if columns is None else columns) - set(too_large)
            first, left = self.starts[at] + file.group_starts[group], its
            for batch in file.batches(file.rows_at_once(group), wanted_columns, group):
                stop = first + batch.num_rows
                taken, left = left[: (num := bisect_left(left, stop))], left[num:]
                for _, run in groupby(enumerate(taken), lambda each: each[1] - each[0]):
                    documents = [number for _, number in run]  # neighbours
                    with file.reading():
                        rows = python_rows(batch.slice(documents[0] - first, len(documents)))
                    found.update(zip(documents, rows, strict=True))
                if not left:
                    break
                first = stop
                budget.spend(num_bytes=batch.nbytes)
            for number in its if explains and too_large else ():
                found[number] |= too_large
        return found

    def tables(self, columns: Collection[str]) -> Iterator[Any]:
        """Yield some columns of all rows in order, as tables of the one schema that all files have."""
        schema = self.schema(columns)
        for file in self._files:
            for batch in file.batches(GROUP_ROWS, columns):
                yield conform(batch, schema)

    def schema(self, columns: Collection[str]) -> Any:
        """Return Arrow's schema of some columns, that all files have."""
        schema = common_schema(file.schema for file in self._files)
        for unwanted in set(schema.names).difference(columns):
            schema = schema.remove(schema.get_field_index(unwanted))
        return schema

    def column(self, name: str) -> Iterator[Any]:
        """Yield the values of a column of all rows in order, as arrays of some megabytes at most.

        Each has the type that its file has; texts may be coded by a dictionary.
        """
        for file in self._files:
            yield from file.column(name)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


class _File(Closing):
    """One open file of metadata.

    Attributes:
        schema: Arrow's; `columns` are its names and types as text.
    """

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._parquet = optional_package("pyarrow.parquet", extra="build", purpose="metadata of documents")
        try:
            with self.reading():
                self._footer = self._parquet.read_metadata(_Reader(file))
                self.schema = self._footer.schema.to_arrow_schema()
            if len(self.schema) > MAX_COLUMNS:
                raise file.unreadable(
                    f"has {len(self.schema):,} columns", f"at most {MAX_COLUMNS:,} are served"
                )
        except BaseException:
            self.close()
            raise
        self.num_rows: int = self._footer.num_rows
        self._largest: dict[tuple[int, int], int] = {}  # page of each row group and column, once looked for
        self.columns = {field.name: str(field.type) for field in self.schema}

    @cached_property
    def group_starts(self) -> tuple[int, ...]:
        """First row of each row group, then `num_rows`."""
        groups = range(self._footer.num_row_groups)
        starts = (0, *accumulate(self._footer.row_group(number).num_rows for number in groups))
        if starts[-1] != self.num_rows:  # else rows would be those of other documents
            what = f"its row groups have {starts[-1]:,} rows, its footer says {self.num_rows:,}"
            raise self._file.unreadable(what, "write it again")
        return starts

    def too_large(self, group: int, columns: Collection[str] | None, budget: Budget) -> dict[str, str]:
        """Return the columns of a row group that are not read, and what is said instead of their values."""
        its, found = self._footer.row_group(group), {}
        for number in range(its.num_columns):
            chunk = its.column(number)
            name = chunk.path_in_schema.partition(".")[0]
            if columns is not None and name not in columns:
                continue
            budget.spend()
            if (key := (group, number)) not in self._largest:
                self._largest[key] = self._largest_page(chunk)
            if (size := self._largest[key]) > MAX_PAGE_BYTES:
                found[name] = (
                    f"not read: a page of this column has {size:,} bytes, more than {MAX_PAGE_BYTES:,}"
                )
        return found

    def _largest_page(self, chunk: Any) -> int:
        if chunk.total_uncompressed_size <= MAX_PAGE_BYTES:
            return int(chunk.total_uncompressed_size)
        start, first = chunk.data_page_offset, chunk.dictionary_page_offset
        start = start if first is None or not 0 < first < start else first
        with self.reading():
            stop = min(start + chunk.total_compressed_size, self._file.size_bytes)
            return largest_page(self._file.read, start, stop)

    def rows_at_once(self, group: int) -> int:
        """Return how many rows of a row group may be decoded together."""
        its = self._footer.row_group(group)
        fitting: int = _BYTES_AT_ONCE * its.num_rows // max(1, its.total_byte_size)
        return max(1, min(_ROWS_AT_ONCE, fitting))

    def column(self, name: str) -> Iterator[Any]:
        """See `DocumentTable.column`."""
        for group, num_rows in enumerate(np.diff(self.group_starts).tolist()):
            if name not in self.columns:
                arrow = optional_package("pyarrow", extra="build", purpose="metadata of documents")
                yield arrow.nulls(num_rows)
                continue
            its = self._footer.row_group(group)
            chunks = (its.column(number) for number in range(its.num_columns))
            sizes = [each.total_uncompressed_size for each in chunks if each.path_in_schema == name]
            num_bytes = max(1, sum(sizes))
            rows = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * num_rows // num_bytes))
            # A dictionary may grow to hold all texts of a row group.
            is_coded = num_bytes <= _DICTIONARY_BYTES
            for batch in self.batches(rows, [name], group, is_coded=is_coded, buffer_bytes=_BUFFER_BYTES):
                yield batch.column(0)

    @property
    def key(self) -> str:
        """See `OpenFile.key`."""
        return self._file.key

    def end(self) -> bytes:
        """Return the size and the last bytes of the file."""
        size = self._file.size_bytes
        return b"%d " % size + self._file.read(max(0, size - END_BYTES), min(END_BYTES, size))

    def batches(
        self,
        size: int,
        columns: Collection[str] | None,
        group: int | None = None,
        *,
        is_coded: bool = True,
        buffer_bytes: int = 0,
    ) -> Iterator[Any]:
        """Yield record batches of at most `size` rows, of one row group or of all.

        Args:
            is_coded: whether texts of a row group come coded by a dictionary.
            buffer_bytes: by which a column is read; 0: that of a row group as a whole.
        """
        names = [name for name in self.columns if columns is None or name in columns]
        with self.reading():
            # Where many rows have one long text, it is there once.
            texts = (
                []
                if group is None or not is_coded
                else [its.name for its in self.schema if str(its.type) in _TEXTS]
            )
            parquet = self._parquet.ParquetFile(
                _Reader(self._file),
                metadata=self._footer,
                read_dictionary=texts,
                buffer_size=buffer_bytes,
                page_checksum_verification=True,
            )
            groups = None if group is None else [group]
            read = parquet.iter_batches(size, row_groups=groups, columns=names, use_threads=False)
        while True:
            with self.reading():
                batch = next(read, None)
            self._file.check_unchanged()
            if batch is None:
                return
            yield batch

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Report what pyarrow raises for a damaged file, and for values that Python cannot have."""
        try:
            yield
        except (OSError, ValueError, NotImplementedError, OverflowError) as error:
            # ArrowInvalid is a ValueError, and so is text that is no UTF-8.
            self._file.check_unchanged()
            why = (str(error).splitlines() or [""])[0][:200]
            raise self._file.unreadable(f"its metadata cannot be read: {why}", "write it again") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Reader(io.RawIOBase):
    """An open file of a corpus as Python's own files are: pyarrow reads the same inode as all others."""

    def __init__(self, file: OpenFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size_bytes}[whence]
        )
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._file.size_bytes - self._at)]
        self._file.read_into(self._at, wanted)
        self._at += len(wanted)
        return len(wanted)


def python_rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a record batch as Python's values; as text what Python has not: nanoseconds, say."""
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = column.to_pylist()
        except (ValueError, OverflowError):
            columns[name] = column.cast("string").to_pylist()
    return [{name: values[row] for name, values in columns.items()} for row in range(batch.num_rows)]
