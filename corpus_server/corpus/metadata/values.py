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
from corpus_server.corpus.metadata.write import conform
from corpus_server.errors import InvalidPlan
from corpus_server.extras import optional_package


def hashed_values(table: DocumentTable, column: str) -> NDArray[np.uint64]:
    """Return the hash of each document's value, `(documents,)`; reads the whole column, block by block.

    Raises:
        InvalidPlan: there is no such column, or its values are no text, whole numbers or booleans.
        CorpusChanged, ReadFailed, UnreadableCorpus: see `DocumentTable.rows`.
    """
    if column not in table.columns:
        accepted = f"a column of the metadata: {', '.join(sorted(table.columns))}"
        raise InvalidPlan.expected("family.by", accepted, column)
    arrow = optional_package("pyarrow", extra="build", purpose="metadata of documents")
    schema = table.schema([column])
    kind, types = schema.field(0).type, arrow.types
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if not (is_text or types.is_integer(kind) or types.is_boolean(kind)):
        raise InvalidPlan.expected(
            "family.by", "a column of text, whole numbers or booleans", f"{column!r} of {kind}"
        )
    found, first = np.arange(table.starts[-1], dtype=np.uint64), 0
    for values in table.column(column):
        has_value = values.is_valid().to_numpy(zero_copy_only=False)
        encoded = values if types.is_dictionary(values.type) else values.dictionary_encode()
        numbers = encoded.indices.drop_null().to_numpy(zero_copy_only=False)
        used, which = np.unique(numbers, return_inverse=True)
        hashes = _hashes(encoded.dictionary.take(arrow.array(used)), schema, arrow)
        found[first : first + len(values)][has_value] = hashes[which]
        first += len(values)
    return found


def _hashes(values: Any, schema: Any, arrow: Any) -> NDArray[np.uint64]:
    """Return the hashes of values that are not null, as those of the type that all files have."""
    batch = arrow.record_batch([values], names=schema.names)
    texts = conform(batch, schema).column(0).cast(arrow.string()).to_pylist()
    return np.array([xxhash.xxh3_64_intdigest(each.encode()) for each in texts], dtype=np.uint64)
