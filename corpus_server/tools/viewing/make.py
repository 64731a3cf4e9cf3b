"""Write the view of a corpus, given how often each document comes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.files import unreadable
from corpus_server.corpus.progress import Meter, Progress
from corpus_server.corpus.views.file import GROUP, Groups, Multiplicities, ViewHeader, write_view
from corpus_server.corpus.views.view import document_chunks
from corpus_server.errors import InvalidParameter


def make_view(
    corpus: Corpus,
    counts: Multiplicities,
    out: Path,
    *,
    made: Mapping[str, Any],
    metadata: str | None = None,
    progress: Progress | None = None,
) -> ViewHeader:
    """Write a view, completely or not at all.

    Args:
        counts: `(documents,)`, the multiplicity of each.
        made: the options, as given.
        metadata: digest of what they were evaluated over.

    Raises:
        InvalidParameter: nothing is chosen.
        UnreadableCorpus: the file cannot be written.
        CorpusChanged: the corpus was written to meanwhile.
    """
    groups, digest = _index(corpus, counts, Meter("indexing", counts.size, progress))
    if not groups.token[-1]:
        raise InvalidParameter("the view would hold no token: no document was chosen", parameter="where")
    header = {"fingerprints": corpus.fingerprints, "documents": digest, "made": made, "metadata": metadata}
    for shard in corpus.shards:
        shard.file.check_unchanged()
    try:
        return write_view(out, counts, groups, header=header)
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise unreadable(out, what, "make room, or name another place with --out") from error


def _index(corpus: Corpus, counts: Multiplicities, meter: Meter) -> tuple[Groups, str]:
    """Return the index of a view, and the digest of the documents' ends, as `documents_digest` makes it."""
    digest = xxhash.xxh3_128()
    first, tokens, chosen = [np.empty(0, np.int64)], [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    for number, edges in document_chunks(corpus):  # chunks begin where groups do
        digest.update(np.ascontiguousarray(edges[1:], dtype="<i8").data)
        its = counts[number : number + edges.size - 1].astype(np.int64)
        begins = np.arange(0, its.size, GROUP)
        per_group = np.add.reduceat(its, begins)
        kept = per_group > 0
        first.append(number + begins[kept])
        chosen.append(per_group[kept])
        tokens.append(np.add.reduceat(its * np.diff(edges), begins)[kept])
        meter.add(its.size)
    sums = (np.concatenate(each).cumsum() for each in (tokens, chosen))
    return Groups(np.concatenate(first), *sums), f"xxh3-{digest.hexdigest()}"
