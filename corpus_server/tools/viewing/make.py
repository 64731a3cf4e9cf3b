"""Write the view of a corpus, given how often each document comes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.files import unreadable
from corpus_server.corpus.progress import Meter, Progress
from corpus_server.corpus.views.file import GROUP, Groups, Layers, Multiplicities, ViewHeader, write_view
from corpus_server.corpus.views.layers import layers_of
from corpus_server.corpus.views.view import document_chunks
from corpus_server.errors import InvalidParameter

_AT_ONCE: Final = 1 << 14  # documents


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
    groups, layers, digest = _index(corpus, counts, Meter("indexing", counts.size, progress))
    if not groups.token[-1]:
        raise InvalidParameter("the view would hold no token: no document was chosen", parameter="where")
    header = {"fingerprints": corpus.fingerprints, "documents": digest, "made": made, "metadata": metadata}
    for shard in corpus.shards:
        shard.file.check_unchanged()
    try:
        return write_view(out, counts, groups, layers, header=header)
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise unreadable(out, what, "make room, or name another place with --out") from error


def _index(corpus: Corpus, counts: Multiplicities, meter: Meter) -> tuple[Groups, Layers, str]:
    """Return both indices of a view, and the digest of where documents end, see `documents_digest`."""
    digest = xxhash.xxh3_128()
    first, chosen, layers = [np.empty(0, np.int64)], [np.zeros(1, np.int64)], []
    for number, edges in document_chunks(corpus):  # chunks begin where groups do
        digest.update(np.ascontiguousarray(edges[1:], dtype="<i8").data)
        for begin in range(0, edges.size - 1, _AT_ONCE):
            its = counts[number + begin : number + edges.size - 1][:_AT_ONCE]
            size, fill = its.size, -its.size % GROUP
            its = np.pad(its, (0, fill)).reshape(-1, GROUP)
            ends = np.pad(edges[begin + 1 : begin + 1 + size], (0, fill), "edge").reshape(-1, GROUP)
            kept = np.flatnonzero(its.any(axis=1))
            begins = np.append(edges[begin], ends[:-1, -1])
            first.append(number + begin + GROUP * kept)
            chosen.append(its[kept].sum(axis=1, dtype=np.int64))
            layers.append(layers_of(np.column_stack((begins, ends))[kept], its[kept]))
            meter.add(size)
    index = Layers.joined(layers)
    documents = np.concatenate(first)
    tokens = index.token[index.group.searchsorted(np.arange(documents.size + 1))]
    groups = Groups(documents, tokens, np.concatenate(chosen).cumsum())
    return groups, index, f"xxh3-{digest.hexdigest()}"
