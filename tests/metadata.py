"""Metadata of documents for tests: written by pyarrow itself, and read as a slow reader would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from corpus_server.corpus.corpus import Corpus
from corpus_server.work import Budget
from tests.corpora import spec


def write_metadata(folder: Path, columns: dict[str, Sequence[Any]], **options: Any) -> Path:
    """Write a table as the only file of a folder; return the folder."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "0.parquet", **options)
    return folder


def metadata_of(path: Path | str, **options: Any) -> list[dict[str, Any]]:
    """Return the metadata of all documents of a corpus, in order."""
    with Corpus.open(spec(path, **options)) as corpus:
        table = corpus.metadata()
        assert table is not None
        assert corpus.num_documents is not None
        found = table.rows(range(corpus.num_documents), Budget())
    return [found[number] for number in range(len(found))]
