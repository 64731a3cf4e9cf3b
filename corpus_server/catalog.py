"""The corpora that a process has open, and plans bound to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.files import Closing
from corpus_server.corpus.views import open_corpus
from corpus_server.corpus_spec import CorpusSpec, with_views
from corpus_server.errors import FingerprintMismatch, InvalidParameter, UnknownCorpus, naming
from corpus_server.plan import Plan
from corpus_server.read.bound_plan import BoundPlan, ShardList
from corpus_server.read.ends import check_eots
from corpus_server.read.families import with_documents, with_values
from corpus_server.read.gather import Gatherer
from corpus_server.read.table_files import TableInUse
from corpus_server.read.tables import Tables
from corpus_server.read.vocabularies import check_tokenizers
from corpus_server.settings import DEFAULT_CACHE_BYTES, DEFAULT_EXTENT_BYTES, default_cache_dir
from corpus_server.stores import Cache, Mirror
from corpus_server.work import Budget


class Fitted(NamedTuple):
    """A plan with its fingerprints, the shards of its corpora, its tables, and those of its family."""

    plan: Plan
    opened: ShardList
    tables: Sequence[TableInUse]
    values: Sequence[TableInUse]

    def bind(self, parent: BoundPlan | None = None) -> BoundPlan:
        """Return the bound plan; `parent` is the one that it continues.

        Raises:
            InvalidPlan: the plan does not fit the corpora, see `Sampler`.
        """
        return BoundPlan(self.plan, self.opened, self.tables, self.values, parent)


class Catalog(Closing):
    """Open corpora by name; a context manager that closes them.

    Attributes:
        cache: of extents, if a corpus lies in an object store.
    """

    def __init__(
        self,
        corpora: Iterable[Corpus],
        mirrors: ExitStack,
        cache: Cache | None,
        tables: Tables,
        *,
        reads_ahead: bool,
        lists_names: bool,
    ) -> None:
        self.cache = cache
        self._mirrors = mirrors
        self.corpora = {corpus.name: corpus for corpus in corpora}
        self._reads_ahead = reads_ahead
        self._tables = tables
        self._lists_names = lists_names
        self._gatherers = {
            name: Gatherer(corpus.shards, reads_ahead=reads_ahead) for name, corpus in self.corpora.items()
        }
        # By the names in plans and their corpora, for as long as a plan uses it.
        self._opened: WeakValueDictionary[tuple[tuple[str, Corpus], ...], ShardList] = WeakValueDictionary()

    @classmethod
    def open(
        cls,
        specs: Iterable[CorpusSpec],
        *,
        reads_ahead: bool = True,
        cache_dir: Path | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        extent_bytes: int = DEFAULT_EXTENT_BYTES,
        tables: Tables | None = None,
        lists_names: bool = True,
    ) -> Catalog:
        """Open every corpus, or none.

        Args:
            reads_ahead: see `Gatherer`.
            tables: that the rows of plans follow from; without them each is built in memory.
            lists_names: whether who asks for an unknown corpus may learn which there are.
            cache_dir, cache_bytes, extent_bytes: of the cache, if a corpus lies in an object store; without a
                folder the user's.

        Raises:
            InvalidParameter, UnreadableCorpus, MissingPackage: see `Corpus.open`.
            StoreFailed: an object store did not answer.
        """
        specs = with_views(specs)
        with ExitStack() as mirrors, ExitStack() as opened:
            is_used = any(spec.store for spec in specs)
            cache = Cache(cache_dir or default_cache_dir(), cache_bytes, extent_bytes) if is_used else None
            served = {spec.name for spec in specs}
            for spec in specs:
                others = served - {spec.name}
                if missing := [name for name in spec.earlier if name not in others]:
                    accepted = (
                        f"names of other corpora that are served: {', '.join(sorted(others)) or 'none'}"
                    )
                    raise InvalidParameter.expected(f"earlier of corpus {spec.name}", accepted, missing[0])
            corpora = list[Corpus]()
            for spec in specs:
                with naming(spec.name):
                    corpus = (
                        open_corpus(spec)
                        if cache is None or spec.store is None
                        else mirrors.enter_context(Mirror(spec, cache)).open_corpus()
                    )
                corpora.append(opened.enter_context(corpus))
            opened.pop_all()
            return cls(
                corpora,
                mirrors.pop_all(),
                cache,
                tables or Tables(),
                reads_ahead=reads_ahead,
                lists_names=lists_names,
            )

    def close(self) -> None:
        """Close every corpus."""
        for corpus in self.corpora.values():
            corpus.close()
        self._mirrors.close()

    def corpus(self, name: str) -> Corpus:
        """Return a corpus by name.

        Raises:
            UnknownCorpus: naming the corpora that are served, unless that is a secret.
        """
        if name not in self.corpora:
            served = ", ".join(self.corpora) if self._lists_names else None
            detail = f"no corpus {name!r} is served here" + (f"; there are: {served}" if served else "")
            remedy = None if served else "GET /v1/corpora lists those that you may read"
            raise UnknownCorpus(detail, parameter="corpus", received=name, accepted=served, remedy=remedy)
        return self.corpora[name]

    def gatherer(self, name: str) -> Gatherer:
        """Return the gatherer over one corpus's shards."""
        return self._gatherers[self.corpus(name).name]

    def bind(self, plan: Plan, budget: Budget) -> BoundPlan:
        """Bind a plan to the open corpora, see `fit`."""
        return self.fit(plan, budget).bind()

    def fit(self, plan: Plan, budget: Budget, *, is_kept: bool = True) -> Fitted:
        """Find the corpora of a plan: add the fingerprints it lacks, check those it has; build its tables.

        A corpus whose content was exchanged still answers the plans of before, if the old content is served
        under another name that its `earlier` lists. Who may read the corpus may read that through a plan.

        Args:
            budget, is_kept: see `Tables.bind`.

        Raises:
            UnknownCorpus: a source is not served here.
            FingerprintMismatch: a corpus has other content than the plan was made for.
            InvalidPlan: the plan does not fit the corpora, see `Sampler`, `check_tokenizers`, `check_eots`.
        """
        chosen: dict[str, Corpus] = {}
        fingerprints = {}
        for name in plan.sources:
            corpus = self.corpus(name)
            wanted = fingerprints[name] = plan.fingerprints.get(name, corpus.fingerprint)
            holders = (corpus, *(self.corpora[each] for each in corpus.earlier))
            found = next((each for each in holders if wanted in each.fingerprints.values()), None)
            if found is None:
                raise _mismatch(corpus, wanted)
            chosen[name] = found
        plan = plan.bind(fingerprints)
        check_tokenizers(plan, chosen)
        check_eots(plan, chosen)
        plan = with_documents(plan, chosen, budget)
        plan, values = with_values(plan, chosen, self._tables, budget)
        plan, tables = self._tables.bind(plan, chosen, budget, is_kept=is_kept)
        key = tuple(chosen.items())
        if (opened := self._opened.get(key)) is None:
            opened = self._opened[key] = ShardList(chosen, reads_ahead=self._reads_ahead)
        return Fitted(plan, opened, tables, values)


def _mismatch(corpus: Corpus, wanted: str) -> FingerprintMismatch:
    kind = wanted.partition("-")[0]
    if have := corpus.fingerprints.get(kind):
        found = f"has {have}"
        remedy = "serve the corpus that the plan was made for, and name it in `earlier`"
        if corpus.num_masks:
            remedy += "; or leave its loss masks out (mask=no), if the plan was made without them"
    else:
        found = f"knows no {kind!r} fingerprint of it, only {corpus.fingerprint}"
        remedy = "run `corpus-server verify --record` on it, or copy its hashes file too"
    return FingerprintMismatch(
        f"corpus {corpus.name!r} has other content than the plan was made for: the plan says {wanted}, "
        f"this server {found}",
        parameter=f"fingerprints.{corpus.name}",
        received=wanted,
        accepted=", ".join(corpus.fingerprints.values()),
        remedy=remedy,
    )
