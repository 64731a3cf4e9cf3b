"""What documents have in a column of metadata, as 64 bits each: equal values have equal ones.

A text is hashed as its UTF-8; a whole number as its decimal digits, true and false as these words. A document
without a value has its own number, so that no other one has its value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus.metadata.table import DocumentTable
from corpus_server.errors import InvalidPlan
from corpus_server.extras import optional_package


def hashed_values(table: DocumentTable, column: str) -> NDArray[np.uint64]:
    """Return the hash of each document's value, `(documents,)`; reads the whole column.

    Raises:
        InvalidPlan: there is no such column, or its values are no text, whole numbers or booleans.
        CorpusChanged, ReadFailed, UnreadableCorpus: see `DocumentTable.rows`.
    """
    if column not in table.columns:
        accepted = f"a column of the metadata: {', '.join(sorted(table.columns))}"
        raise InvalidPlan.expected("family.by", accepted, column)
    parts, first = [np.empty(0, np.uint64)], 0
    for rows in table.tables([column]):
        parts.append(_hashes(rows.column(0).combine_chunks(), first, column))
        first += rows.num_rows
    return np.concatenate(parts)


def _hashes(values: Any, first: int, column: str) -> NDArray[np.uint64]:
    arrow = optional_package("pyarrow", extra="build", purpose="metadata of documents")
    types = arrow.types
    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if not (is_text or types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind)):
        raise InvalidPlan.expected(
            "family.by", "a column of text, whole numbers or booleans", f"{column!r} of {kind}"
        )
    if types.is_null(kind):
        return np.arange(first, first + len(values), dtype=np.uint64)
    encoded = values.dictionary_encode()
    distinct = encoded.dictionary if is_text else encoded.dictionary.cast(arrow.string())
    numbers = [xxhash.xxh3_64_intdigest(each.encode()) for each in distinct.to_pylist()]
    hashes = np.array(numbers or [0], np.uint64)
    is_null = values.is_null().to_numpy(zero_copy_only=False)
    which = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    own = np.arange(first, first + len(values), dtype=np.uint64)
    found: NDArray[np.uint64] = np.where(is_null, own, hashes[which])
    return found
