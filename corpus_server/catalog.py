"""The corpora that a process has open, and plans bound to them."""

from __future__ import annotations

import json
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

    def __init__(self, plan: Plan, corpora: Mapping[str, Corpus], *, reads_ahead: bool = True) -> None:
        self.plan = plan
        self.corpora = {name: corpora[name] for name in plan.sources}
        self.shards: list[tuple[str, Shard]] = [
            (name, shard) for name, corpus in self.corpora.items() for shard in corpus.shards
        ]
        self.sampler = Sampler(
            plan, {name: [shard.num_tokens for shard in c.shards] for name, c in self.corpora.items()}
        )
        self.gatherer = Gatherer([shard for _, shard in self.shards], reads_ahead=reads_ahead)
        self.dtype: np.dtype[np.integer] = np.result_type(*(c.dtype for c in self.corpora.values()))

    def describe(self) -> dict[str, Any]:
        """Return what follows from the plan and the corpora here."""
        sampler, timeline = self.sampler, self.sampler.timeline
        return {
            "sources": {
                name: {
                    "num_windows": num_windows,
                    "steps_per_epoch": sampler.steps_per_epoch(name),
                    "fingerprint": self.plan.fingerprints[name],
                }
                for name, num_windows in zip(self.plan.sources, sampler.num_windows.tolist(), strict=True)
            },
            "stages": [
                {
                    "from_step": placed.stage.from_step,
                    "first_step": timeline.first_training_step(placed.number),
                    "global_batch_size": placed.stage.global_batch_size,
                    "weights_65536": placed.stage.units,
                    "positions": dict(zip(self.plan.sources, placed.positions.tolist(), strict=True)),
                    "excluded_windows": {}
                    if exclusion is None
                    else dict(zip(self.plan.sources, exclusion.num_excluded.tolist(), strict=True)),
                }
                for placed, exclusion in zip(timeline.stages, sampler.exclusions, strict=True)
            ],
            "dtype": self.dtype.name,
            "shards": [{"corpus": name, **shard.describe()} for name, shard in self.shards],
        }

    def to_json(self) -> bytes:
        """Return the JSON text of the plan's route: id, plan and description.

        The plan's own text is what its id was made of already; with a million exclusions it is 20 MB.
        """
        described = json.dumps(self.describe(), separators=(",", ":"))
        return f'{{"id":"{self.plan.id}","plan":{self.plan.canonical_json()},{described[1:]}'.encode()


class Catalog:
    """Open corpora by name; a context manager that closes them.

    Args:
        corpora: open.
        reads_ahead: of the gatherers; see there.
    """

    def __init__(self, corpora: Iterable[Corpus], *, reads_ahead: bool = True) -> None:
        self.corpora = {corpus.name: corpus for corpus in corpora}
        self._reads_ahead = reads_ahead
        self._gatherers = {
            name: Gatherer(corpus.shards, reads_ahead=reads_ahead) for name, corpus in self.corpora.items()
        }

    @classmethod
    def open(cls, specs: Iterable[CorpusSpec], *, reads_ahead: bool = True) -> Catalog:
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
            catalog = cls(corpora, reads_ahead=reads_ahead)
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
        return BoundPlan(plan.bind(fingerprints), self.corpora, reads_ahead=self._reads_ahead)
