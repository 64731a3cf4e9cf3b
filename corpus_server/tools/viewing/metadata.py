"""The metadata of a corpus, as DuckDB reads it: the columns that an expression names, out of core."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.files import Closing, unreadable
from corpus_server.corpus.metadata import DocumentTable
from corpus_server.corpus.publish import scratch_folder
from corpus_server.corpus.selection import METADATA_FOLDER
from corpus_server.corpus.views.view import document_chunks
from corpus_server.errors import InvalidParameter, counted
from corpus_server.extras import optional_package
from corpus_server.tools.viewing.expressions import check_expression

MEMORY: Final = "1GB"
"""Of DuckDB's buffers; what does not fit is written beside the view that is made."""
MAX_SECONDS: Final = 3600.0
"""Of one query."""
SCRATCH: Final = ".corpus-server-"
"""With what names of folders begin that hold what does not fit into memory."""

LENGTH: Final = "num_tokens"
"""What an expression calls the tokens of a document, which the document index knows. A column of the metadata
that is called the same comes first."""

_ROWS: Final = 1 << 20  # of a batch
_NUMBERS: Final = (
    *("DOUBLE", "FLOAT", "DECIMAL", "HUGEINT", "BIGINT", "INTEGER", "SMALLINT", "TINYINT"),
    *("UBIGINT", "UINTEGER", "USMALLINT", "UTINYINT"),
)


class Metadata(Closing):
    """The metadata of a corpus, open for questions. DuckDB may read its files and nothing else.

    Args:
        corpus: it has a document index.
        scratch: folder for what does not fit into memory.
        beside: files of another table, which `in_order` asks.

    A corpus without metadata can be asked what names no column of it, such as lengths of documents.

    Raises:
        UnreadableCorpus: it cannot be read, or it has other rows than documents.
        MissingPackage: DuckDB is not installed.
    """

    def __init__(self, corpus: Corpus, scratch: Path, beside: Sequence[Path] = ()) -> None:
        self._duckdb = optional_package("duckdb", extra="views", purpose="a question about metadata")
        self._arrow = optional_package("pyarrow", extra="views", purpose="a question about metadata")
        self._corpus = corpus
        table = corpus.metadata()
        self.files: Sequence[Path] = () if table is None else table.paths
        columns = () if table is None else tuple(table.columns)
        if table is not None:
            _check_names(table)
        self._columns = columns
        self._has_length = LENGTH in map(str.lower, columns)
        # DuckDB would take a column of this name for the number of the document.
        number = "#document"
        while number in map(str.lower, columns):
            number += "#"
        self._number = f'"{number}"'
        with ExitStack() as opened:
            folder = opened.enter_context(scratch_folder(scratch, SCRATCH))
            self._connection = opened.enter_context(self._duckdb.connect())
            self._open(table, beside, folder)
            self._opened = opened.pop_all()

    def _open(self, table: DocumentTable | None, beside: Sequence[Path], scratch: Path) -> None:
        names = ", ".join(_quoted(str(each)) for each in (*self.files, *beside))
        run = self._connection.execute
        run(f"SET temp_directory = {_quoted(str(scratch))}")
        run(f"SET memory_limit = '{MEMORY}'")
        run("SET preserve_insertion_order = true")
        run("SET TimeZone = 'UTC'")
        run("SET python_enable_replacements = false")
        run("SET autoinstall_known_extensions = false")
        run("SET autoload_known_extensions = false")
        try:
            run(f"SET allowed_paths = [{names}]")
            run("SET enable_external_access = false")
            parts: Sequence[str] = [
                f"SELECT *, {first} + file_row_number AS {self._number} "
                f"FROM {_parquet([path], 'file_row_number = true')}"
                for path, first in ([] if table is None else zip(table.paths, table.starts, strict=False))
            ] or [f"SELECT range AS {self._number} FROM range({self._corpus.num_documents})"]
            # By name: files that were written at different times may have their columns in another order.
            run(f"CREATE VIEW documents AS {' UNION ALL BY NAME '.join(parts)}")
            if beside:
                run(f"CREATE VIEW beside AS SELECT * FROM {_parquet(beside)}")
        except self._duckdb.Error as error:
            what = f"its metadata cannot be read: {_first_line(error)}"
            path = self.files[0].parent if self.files else scratch
            raise unreadable(path, what, "write it again") from error
        run("SET lock_configuration = true")

    def condition(self, what: str, text: str) -> Iterator[NDArray[np.bool_]]:
        """Yield in order for which documents an expression is true; null counts as false."""
        item, table = self._item(what, text, ("BOOLEAN",), "a condition (BOOLEAN)")
        query = f"SELECT coalesce(({item}), false) AS value FROM {table}"
        for batch in self._batches(what, query):
            yield batch.column(0).to_numpy(zero_copy_only=False).astype(bool)

    def numbers(self, what: str, text: str) -> Iterator[NDArray[np.float64]]:
        """Yield in order the number that an expression gives of each document; NaN for null."""
        item, table = self._item(what, text, _NUMBERS, "a number")
        query = f"SELECT coalesce(CAST(({item}) AS DOUBLE), 'nan'::DOUBLE) AS value FROM {table}"
        for batch in self._batches(what, query):
            yield batch.column(0).to_numpy(zero_copy_only=False)

    def firsts(self, column: str, chosen: NDArray[np.uint16]) -> Iterator[NDArray[np.int64]]:
        """Yield, unordered, the first chosen document of each value of a column, and all without a value."""
        name = self._column("dedup", column)
        self._connection.register("chosen", self._arrow.table({"chosen": self._arrow.array(chosen)}))
        both = "documents POSITIONAL JOIN chosen"
        its = f"SELECT {self._number} AS number, {name} AS value FROM {both} WHERE chosen.chosen > 0"
        query = f"""
            WITH its AS NOT MATERIALIZED ({its})
            SELECT number FROM its WHERE value IS NULL
            UNION ALL SELECT min(number) FROM its WHERE value IS NOT NULL GROUP BY value
        """
        for batch in self._batches("dedup", query):
            yield batch.column(0).to_numpy(zero_copy_only=False)

    def keyed(self, what: str, column: str, ids: list[str]) -> NDArray[np.int64]:
        """Return the documents that have some ids in a column: each names one.

        Raises:
            InvalidParameter: a document has none, two have one, or no document has it.
        """
        name = self._column("key", column)
        self._connection.register("ids", self._arrow.table({"id": self._arrow.array(sorted(set(ids)))}))
        for (missing,) in self._rows(f"SELECT count(*) FROM documents WHERE {name} IS NULL"):
            if missing:
                raise _wrong(
                    "key", f"column {column!r} is null for {counted(missing, 'document')}", "a key of each"
                )
        joined = f"ids LEFT JOIN documents ON ids.id = {name}::VARCHAR"
        numbered = f"SELECT ids.id, count({self._number}), min({self._number}) FROM {joined}"
        numbers = []
        for key, count, number in self._rows(f"{numbered} GROUP BY ids.id ORDER BY ids.id"):
            if count != 1:
                what_is = "names no document" if not count else f"names {count:,} documents"
                raise _wrong(what, f"{key!r} {what_is} by column {column!r}", "ids of one document each")
            numbers.append(number)
        return np.array(numbers, dtype=np.int64)

    def in_order(self, key: str) -> Iterator[Any]:
        """Yield the rows of the table beside the metadata in the order of the documents, as tables.

        Each document names its row by the value of a column that both tables have.

        Raises:
            InvalidParameter: a value is missing, or is in a table twice, or in one of them alone.
        """
        own, its = self._column("key", key), f'beside."{_doubled(key)}"'
        for table, name, what in (("documents", own, "the documents'"), ("beside", its, "the table's")):
            for (missing,) in self._rows(f"SELECT count(*) FROM {table} WHERE {name} IS NULL"):
                if missing:
                    raise _wrong(
                        "key", f"{what} column {key!r} is null in {counted(missing, 'row')}", "a key in each"
                    )
            twice = f"SELECT {name}::VARCHAR, count(*) FROM {table} GROUP BY 1 HAVING count(*) > 1"
            for value, count in self._rows(f"{twice} ORDER BY 1 LIMIT 1"):
                found = f"{what} column {key!r} has {value!r} in {count:,} rows"
                raise _wrong("key", found, "each key in one row")
        for table, name, other, its_name, what in (
            ("documents", own, "beside", its, "documents are in no row of the table"),
            ("beside", its, "documents", own, "rows of the table are of no document"),
        ):
            joined = f"FROM {table} ANTI JOIN {other} ON {name}::VARCHAR = {its_name}::VARCHAR"
            for count, value in self._rows(f"SELECT count(*), min({name}::VARCHAR) {joined}"):
                if count:
                    raise _wrong("key", f"{count:,} {what}, the first by key is {value!r}", "a row of each")
        joined = f"documents JOIN beside ON {own}::VARCHAR = {its}::VARCHAR"
        ordered = self._batches("key", f"SELECT beside.* FROM {joined} ORDER BY documents.{self._number}")
        return (self._arrow.table(each) for each in ordered)

    def _item(self, what: str, text: str, kinds: tuple[str, ...], accepted: str) -> tuple[str, str]:
        """Return an expression that may be evaluated, and over what: with lengths only if it names them."""
        (item, names), table = check_expression(self._connection, what, text), "documents"
        columns = [name[-1] for name in names if self._has_length or name[-1].lower() != LENGTH]
        for column in columns:
            self._check_has_metadata(column)
        known = {LENGTH, *map(str.lower, self._columns)}
        for name in names:
            if not known.intersection(map(str.lower, name)):
                has = f"a column of the metadata ({', '.join(self._columns)}) or {LENGTH}"
                raise _wrong(what, f"no column is called {'.'.join(name)!r}", has)
        if len(columns) < len(names):
            edges = (edges for _, edges in document_chunks(self._corpus))
            lengths = self._arrow.chunked_array(
                [self._arrow.array(np.diff(each).astype(np.uint32)) for each in edges], type="uint32"
            )
            self._connection.register("stored", self._arrow.table({LENGTH: lengths}))
            # Signed, because DuckDB refuses differences of unsigned numbers that are below 0.
            own = f"(SELECT {LENGTH}::BIGINT AS {LENGTH} FROM stored) AS lengths"
            table = f"documents POSITIONAL JOIN {own}"
        ((_, kind, *_),) = self._rows(f"DESCRIBE SELECT {item} AS value FROM {table}", what)
        if not kind.startswith(kinds):
            raise _wrong(what, f"is of type {kind}", accepted)
        return item, table

    def _check_has_metadata(self, column: str) -> None:
        if not self.files:
            what = f"has no metadata ({METADATA_FOLDER}/*.parquet beside its shards), so no column {column!r}"
            raise InvalidParameter(
                f"corpus {self._corpus.name!r} {what}",
                remedy="attach some: corpus-server index CORPUS --metadata TABLE",
            )

    def _column(self, what: str, name: str) -> str:
        self._check_has_metadata(name)
        columns = [column for column, *_ in self._rows("DESCRIBE documents")]
        columns = [each for each in columns if each not in ("file_row_number", self._number.strip('"'))]
        if name not in columns:
            raise InvalidParameter.expected(what, f"a column of the metadata: {', '.join(columns)}", name)
        return f'documents."{_doubled(name)}"'

    def _rows(self, query: str, what: str = "metadata") -> list[tuple[Any, ...]]:
        with self._bounded(what):
            found: list[tuple[Any, ...]] = self._connection.execute(query).fetchall()
        return found

    def _batches(self, what: str, query: str) -> Iterator[Any]:
        with self._bounded(what):
            relation = self._connection.sql(query)
            # DuckDB 1 calls it by another name.
            read = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
            yield from read(_ROWS)

    @contextmanager
    def _bounded(self, what: str) -> Iterator[None]:
        """End a query that takes too long; errors are those of the user's expression."""
        timer = threading.Timer(MAX_SECONDS, self._connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (self._duckdb.Error, self._arrow.ArrowException) as error:
            raise _wrong(what, f"DuckDB says: {_first_line(error)}", "what it can evaluate") from error
        finally:
            timer.cancel()

    def close(self) -> None:
        """Close the connection and remove what it wrote."""
        self._opened.close()


def _check_names(table: DocumentTable) -> None:
    """Refuse names that DuckDB takes for one, as it does not tell capital letters from small ones."""
    seen: dict[str, str] = {}
    for name in table.columns:
        if (other := seen.setdefault(name.lower(), name)) != name:
            raise unreadable(
                table.paths[0].parent,
                f"columns {other!r} and {name!r} differ in capitals alone, so a name could mean either",
                "rename one",
            )


def _parquet(paths: Sequence[Path], options: str = "") -> str:
    """Return what reads files in DuckDB: nothing but their own columns, whatever their folders are called."""
    listed = ", ".join(_quoted(str(each)) for each in paths)
    return f"read_parquet([{listed}], hive_partitioning = false{options and ', '}{options})"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _doubled(name: str) -> str:
    return name.replace('"', '""')


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _wrong(what: str, found: str, accepted: str) -> InvalidParameter:
    return InvalidParameter(f"--{what}: {found}; expected {accepted}", parameter=what, accepted=accepted)
