"""The corpora that a process has open, and plans bound to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np

from corpus_server.corpus import Corpus
from corpus_server.errors import FingerprintMismatch, UnknownCorpus
from corpus_server.gather import Gatherer
from corpus_server.plan import Plan, Sampler
from corpus_server.settings import CorpusSpec
from corpus_server.shard import Shard


class BoundPlan:
    """A plan together with the open corpora that hold its tokens.

    Attributes:
        plan: with its fingerprints.
        sampler: (step, rank) to windows.
        gatherer: windows to tokens; its shard numbers are the sampler's.
        shards: the plan's shard list: (corpus name, shard).
        dtype: type of the answers, the widest of the sources.
    """

    def __init__(self, plan: Plan, corpora: Mapping[str, Corpus]) -> None:
        self.plan = plan
        self.corpora = {name: corpora[name] for name in plan.sources}
        self.shards: list[tuple[str, Shard]] = [
            (name, shard) for name, corpus in self.corpora.items() for shard in corpus.shards
        ]
        self.sampler = Sampler(
            plan, {name: [shard.num_tokens for shard in c.shards] for name, c in self.corpora.items()}
        )
        self.gatherer = Gatherer([shard for _, shard in self.shards])
        self.dtype: np.dtype[np.integer] = np.result_type(*(c.dtype for c in self.corpora.values()))

    def describe(self) -> dict[str, Any]:
        """Return the JSON object of the plan's route."""
        (stage,) = self.plan.stages
        return {
            "id": self.plan.id,
            "plan": self.plan.to_json(),
            "sources": {
                name: {
                    "num_windows": source.windows.num_windows,
                    "steps_per_epoch": self.sampler.steps_per_epoch(name),
                    "weight": stage.to_json()["mixture"][name],
                    "weight_65536": 65536,
                    "fingerprint": self.plan.fingerprints[name],
                }
                for name, source in self.sampler.sources.items()
            },
            "dtype": self.dtype.name,
            "shards": [{"corpus": name, **shard.describe()} for name, shard in self.shards],
        }


class Catalog:
    """Open corpora by name; a context manager that closes them."""

    def __init__(self, corpora: Iterable[Corpus]) -> None:
        self.corpora = {corpus.name: corpus for corpus in corpora}
        self._gatherers = {name: Gatherer(corpus.shards) for name, corpus in self.corpora.items()}

    @classmethod
    def open(cls, specs: Iterable[CorpusSpec]) -> Catalog:
        """Open every corpus, or none.

        Raises:
            UnreadableCorpus: naming the corpus, the file and what is wrong with it.
        """
        with ExitStack() as opened:
            corpora = [
                opened.enter_context(
                    Corpus.open(spec.path, name=spec.name, dtype=spec.dtype, tokenizer=spec.tokenizer)
                )
                for spec in specs
            ]
            catalog = cls(corpora)
            opened.pop_all()
        return catalog

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every corpus; idempotent."""
        for corpus in self.corpora.values():
            corpus.close()

    def corpus(self, name: str) -> Corpus:
        """Return a corpus by name.

        Raises:
            UnknownCorpus: naming those that there are.
        """
        try:
            return self.corpora[name]
        except KeyError:
            served = ", ".join(self.corpora)
            raise UnknownCorpus(
                f"no corpus {name!r} is served here; there are: {served}",
                parameter="corpus",
                received=name,
                accepted=served,
            ) from None

    def gatherer(self, name: str) -> Gatherer:
        """Return the gatherer over one corpus's shards."""
        return self._gatherers[self.corpus(name).name]

    def bind(self, plan: Plan) -> BoundPlan:
        """Bind a plan to the corpora here: fill in fingerprints it lacks, check those it has.

        Raises:
            UnknownCorpus: a source is not served here.
            FingerprintMismatch: a corpus here has other content than the plan was made for.
            InvalidPlan: a source has no window.
        """
        fingerprints = {}
        for name in plan.sources:
            corpus = self.corpus(name)
            wanted = plan.fingerprints.get(name, corpus.fingerprint)
            if wanted not in corpus.fingerprints.values():
                kind = wanted.partition("-")[0]
                have = corpus.fingerprints.get(kind)
                raise FingerprintMismatch(
                    f"corpus {name!r} has other content than the plan was made for: the plan says {wanted}, "
                    + (
                        f"this server has {have}"
                        if have
                        else f"this server knows no {kind!r} fingerprint of it, only {corpus.fingerprint}"
                    ),
                    parameter=f"fingerprints.{name}",
                    received=wanted,
                    accepted=", ".join(corpus.fingerprints.values()),
                    remedy=(
                        "serve the corpus that the plan was made for"
                        if have
                        else "run `corpus-server verify --record` on it, or copy its hashes file too"
                    ),
                )
            fingerprints[name] = wanted
        return BoundPlan(plan.bind(fingerprints), self.corpora)
