"""Small corpora with documents, and their views computed one document at a time, from docs/views.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from corpus_server.catalog import Catalog
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.index import index
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.tools.viewing.make import make_view
from tests.corpora import spec, write_raw

GROUP = 256


def write_corpus(folder: Path, shards: Sequence[Sequence[int]], *, first: int = 1) -> Path:
    """Write documents of these lengths: a token is `first` plus its place in the corpus, an end 0."""
    folder.mkdir(parents=True)
    for number, lengths in enumerate(shards):
        tokens: list[int] = []
        for length in lengths:
            tokens += [*range(first + len(tokens), first + len(tokens) + length - 1), 0]
        write_raw(folder / f"{number}.bin", tokens, dtype="uint32")
        first += len(tokens)
    index(spec(folder, eot=0, dtype="uint32"))
    return folder


def write_view(folder: Path, counts: Sequence[int], out: Path) -> Path:
    """Write the view of these multiplicities."""
    with Corpus.open(spec(folder, dtype="uint32")) as corpus:
        make_view(corpus, np.array(counts, dtype=np.uint16), out, made={})
    return out


def viewed_catalog(
    folder: Path, shards: Sequence[Sequence[int]], views: Mapping[str, Sequence[int]]
) -> Catalog:
    """Open a corpus `web`, views of it by name, and a corpus `code`."""
    web = write_corpus(folder / "web", shards)
    code = write_corpus(folder / "code", [[7] * 200], first=50_000)
    specs = [spec(web, "web", dtype="uint32"), spec(code, "code", dtype="uint32")]
    for name, counts in views.items():
        write_view(web, counts, folder / f"{name}.view")
        specs.append(CorpusSpec.parse(f"{name}=web?view={folder / name}.view"))
    return Catalog.open(specs)


def laid_out(shards: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
    """The documents of each shard of a view: pass after pass of each 256."""
    found, first = [], 0
    for lengths in shards:
        its = []
        for begin in range(first, first + len(lengths), GROUP):
            group = range(begin, min(begin + GROUP, first + len(lengths)))
            for number in range(1, max((counts[each] for each in group), default=0) + 1):
                its += [each for each in group if counts[each] >= number]
        found.append(its)
        first += len(lengths)
    return found
