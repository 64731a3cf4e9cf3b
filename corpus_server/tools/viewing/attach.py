"""Attach a table to a corpus as metadata of its documents, by order or by key; or change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.files import unreadable
from corpus_server.corpus.metadata import DocumentTable
from corpus_server.corpus.metadata.files import files_in, own_folder, record_digests
from corpus_server.corpus.metadata.pieces import append, tables
from corpus_server.corpus.metadata.write import regrouped, write_files
from corpus_server.corpus.progress import Meter, Progress
from corpus_server.corpus.publish import publishing_folder, scratch_folder
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter, UnreadableCorpus, counted
from corpus_server.extras import optional_package
from corpus_server.tools.viewing.metadata import SCRATCH, Metadata
from corpus_server.tools.viewing.tables import PLACES, find_tables, read_table
from corpus_server.user_files import reason_of

_SHOWN: Final = 20  # columns in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """What a corpus has now."""

    folder: Path
    num_documents: int
    columns: dict[str, str]  # with their types
    added: tuple[str, ...]  # those of the table
    digest: str


def attach(
    spec: CorpusSpec,
    source: str,
    *,
    key: str | None = None,
    keep: Collection[str] | None = None,
    progress: Progress | None = None,
) -> Attached:
    """Add the columns of a table to the metadata of a corpus; a column of the same name is replaced.

    Progress is in documents.

    Args:
        source: files of the table: a path, a folder or a pattern.
        key: column by whose values a document's row is found, which the metadata has already; None: the rows
            are in the order of the documents.
        keep: columns of the table; None for all but the text and the tokens.

    Raises:
        InvalidParameter: the table has other rows than there are documents, or lacks a column.
        UnreadableCorpus: a file is damaged, or the disk refuses; nothing has changed.
        UnknownDocument: the corpus has no document index.
    """
    spec = dataclasses.replace(spec, view=None)
    target, paths = own_folder(spec), find_tables(source)
    with Corpus.open(spec) as corpus, ExitStack() as opened:
        if not corpus.num_documents:
            raise corpus.no_documents(spec=spec)
        if key is not None and keep is not None:
            keep = {*keep, key}
        try:
            scratch = opened.enter_context(scratch_folder(target.absolute().parent, SCRATCH))
            with (scratch / "pieces").open("wb") as file:
                meter = Meter("reading", corpus.num_documents, progress)
                added = _read(corpus, paths, keep, file, meter, checks_places=key is None)
            if key is not None and key not in added:
                raise InvalidParameter.expected("key", f"a column of the table: {_listed(added)}", key)
            found: Iterable[Any] = tables([scratch / "pieces"])
            if key is not None:
                write_files(scratch / "table", found)
                files = sorted((scratch / "table").iterdir())
                found = opened.enter_context(Metadata(corpus, scratch, files)).in_order(key)
            with publishing_folder(target, replace=True) as folder:
                merged = _merged(_present(corpus, target), found, added)
                write_files(folder, _counted(merged, Meter("writing", corpus.num_documents, progress)))
                digest = record_digests(folder)
        except OSError as error:
            what = f"the metadata cannot be written: {reason_of(error)}"
            raise unreadable(target, what, "make room, or run it where the folder is writable") from error
    with Corpus.open(spec) as corpus:
        table = corpus.metadata()
        assert table is not None
        return Attached(
            folder=target,
            num_documents=table.starts[-1],
            columns=table.columns,
            added=tuple(added),
            digest=digest,
        )


def _counted(found: Iterable[Any], meter: Meter) -> Iterator[Any]:
    for each in found:
        yield each
        meter.add(each.num_rows)


def _read(
    corpus: Corpus,
    paths: Sequence[Path],
    keep: Collection[str] | None,
    file: Any,
    meter: Meter,
    *,
    checks_places: bool,
) -> list[str]:
    """Write the rows of all tables to `file`; return their columns.

    Raises:
        InvalidParameter: see `attach`.
    """
    total = corpus.num_documents or 0
    added: dict[str, None] = {}
    num_rows = 0
    for path in paths:
        for batch in read_table(path, keep):
            if num_rows + batch.num_rows > total:
                raise _wrong_rows(f"more than {total:,}", total)
            if set(PLACES) <= set(batch.schema.names):
                if checks_places:
                    _check_places(corpus, path, num_rows, batch)
                batch = batch.drop_columns(list(PLACES))
            append(file, batch)
            added |= dict.fromkeys(batch.schema.names)
            num_rows += batch.num_rows
            meter.add(batch.num_rows)
    if num_rows != total:
        raise _wrong_rows(f"{num_rows:,}", total)
    if missing := [name for name in keep or () if name not in added]:
        raise InvalidParameter.expected("keep", f"fields of the records: {_listed([*added])}", missing[0])
    if keep is None:
        added.pop("text", None)  # of records that have nothing else
    if not added:
        raise unreadable(paths[0], "has no column but text and tokens", "name one with --keep")
    return [*added]


def _wrong_rows(found: str, total: int) -> InvalidParameter:
    return InvalidParameter(
        f"the table has {found} rows, the corpus {counted(total, 'document')}",
        parameter="metadata",
        remedy="attach a table with one row for each document; those without tokens are in no corpus",
    )


def _check_places(corpus: Corpus, path: Path, first: int, batch: Any) -> None:
    """Refuse OLMo's rows if they are of other tokens than the documents."""
    start, end = (batch.column(name).to_numpy(zero_copy_only=False) for name in PLACES)
    numbers = np.arange(first, first + batch.num_rows)
    edges = corpus.document_edges(numbers, 1)
    wrong = np.flatnonzero(np.diff(edges)[:, 0] != end - start)
    if wrong.size:
        row = int(wrong[0])
        raise InvalidParameter(
            f"{path}: says {end[row] - start[row]} tokens of document {numbers[row]}, which has "
            f"{int(np.diff(edges[row])[0])}",
            parameter="metadata",
            remedy="name the tables in the order of the shards",
        )


def _present(corpus: Corpus, target: Path) -> DocumentTable | None:
    """Return the metadata that the corpus has, None if it has none or only that of more shards."""
    try:
        return corpus.metadata()
    except UnreadableCorpus:
        if files_in(target):
            raise
        return None


def _merged(old: DocumentTable | None, found: Iterable[Any], added: list[str]) -> Iterator[Any]:
    """Yield the rows of the metadata with columns added, in tables of one schema."""
    arrow = optional_package("pyarrow", extra="build", purpose="metadata of documents")
    kept = [] if old is None else [name for name in old.columns if name not in added]
    if old is None or not kept:
        yield from (each.select(added) for each in found)
        return
    for one, other in zip(regrouped(old.tables(kept)), regrouped(found), strict=True):
        yield arrow.table([*one.columns, *other.select(added).columns], names=[*kept, *added])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
