"""The tables of plans whose rows follow from some: built once, kept in a folder beside the plans, and mapped.

Plans share a table that the same things decide. Losing the folder loses nothing but time. Any process may
remove a table that another one has mapped: the files stay until the last map is gone.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np
import xxhash

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.publish import publishing_folder
from corpus_server.errors import FingerprintMismatch, Overloaded, ResponseTooLarge, StateUnavailable
from corpus_server.pieces import Int64Array
from corpus_server.plan import Plan
from corpus_server.plan.named import Named
from corpus_server.plan.streams import Sequences
from corpus_server.plan.tables import Job, Table
from corpus_server.read.apart import map_in_copies, run_apart
from corpus_server.read.ends import check_ends, open_documents
from corpus_server.read.table_files import TableInUse, key_of, mapped_table, write_table
from corpus_server.work import Budget, Jobs, shared

MAX_BYTES: Final = 16 * 2**30
"""Of all tables in a folder; those that were not used for the longest time make room."""

_MOST_IN_PROCESS: Final = 1 << 18
"""Documents and rows. NumPy shuffles without letting another thread run, 10^7 elements for some seconds; the
start of a process takes as long as shuffling a million, or packing so many documents."""

_IS_BUILT: Final = "the table of a plan is being built"

MAX_MEMORY_BYTES: Final = 64 * 2**20
"""Of the table of a plan that is spelled inline. What such plans have in memory counts among the bytes of
plans, see `known_plans.py`."""

MAX_ALL_MEMORY_BYTES: Final = 256 * 2**20
"""Of all tables of such plans: a reader keeps its plan for a minute, also when other plans push it out."""

_JOB_BYTES: Final = 16  # of a table for each document or row, about
_BUILDING_BYTES: Final = 24  # of memory while it is built; 16 to 25 were measured

_log = logging.getLogger(__name__)


def memory_bytes() -> int:
    """Return how much memory there is: of the machine, or of the container that this process runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:  # none, or version 1 of cgroups
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


class Documents:
    """The documents of an open corpus; can be pickled, and then holds what it has read.

    Attributes:
        content, eot_first, shard_ends, num_tokens: see `Lengths`.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.shard_ends: Sequence[int] = corpus.starts[1:]
        self.num_tokens = corpus.num_tokens
        self.content = f"{corpus.fingerprint} {corpus.eot}"
        self.num_documents = corpus.num_documents or 0
        self.eot_first = corpus.eot_first
        # Who keeps this keeps no corpus.
        self._read: Callable[[], Sequences] = partial(_sequences, ref(corpus))
        self._find_open: Callable[[], Int64Array] = partial(_open, ref(corpus))

    @cached_property
    def digest(self) -> str:
        """Digest of their places and lengths; reads them all."""
        return f"xxh3-{_digest(*self._read())}"

    def sequences(self) -> Sequences:
        """Read first token, corpus-wide, and length of each document."""
        return self._read()

    @cached_property
    def open_documents(self) -> Int64Array:
        """See `Lengths`; reads a token of each shard."""
        return self._find_open()

    @cached_property
    def digest_with_ends(self) -> str:
        """See `Lengths`."""
        if not self.eot_first and not self.open_documents.size:
            return self.digest
        starts, lengths = self._read()
        kinds = np.full(starts.size, 2 * self.eot_first, dtype=np.int64)
        kinds[self.open_documents] += 1
        return f"xxh3-{_digest(starts, lengths, kinds)}"

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs, which has no open corpus."""
        return {**self.__dict__, "_read": partial(Sequences, *self._read()), "_find_open": None}


def _sequences(corpus: ref[Corpus]) -> Sequences:
    found = corpus()
    assert found is not None  # whoever binds a plan has it open
    return Sequences(*found.sequences())


def _open(corpus: ref[Corpus]) -> Int64Array:
    found = corpus()
    assert found is not None
    return open_documents(found, *found.sequences())


class Tables:
    """Tables of plans; safe to use from several threads and processes.

    Args:
        folder: where tables are kept, made at need; None: nowhere, each is built in memory.
        jobs: where tables are built; None: by who asks.
        max_bytes: of all tables; the newest stays, however large it is.
    """

    def __init__(
        self, folder: Path | None = None, jobs: Jobs | None = None, *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._jobs = jobs
        self._in_memory: WeakValueDictionary[str, TableInUse] = WeakValueDictionary()
        self._digesting = threading.Lock()  # 10^8 documents take a second, and 2 GB meanwhile
        self._documents: WeakKeyDictionary[Corpus, Documents] = WeakKeyDictionary()

    def bind(
        self, plan: Plan, corpora: Mapping[str, Corpus], budget: Budget, *, is_kept: bool = True
    ) -> tuple[Plan, list[TableInUse]]:
        """Return the plan with the digests of its documents, and the tables that its rows follow from.

        Args:
            plan: with its fingerprints.
            budget: of who asks.
            is_kept: whether the plan is; the tables of others are memory's alone, and bounded.

        Raises:
            FingerprintMismatch: a corpus has other documents than the plan was made for.
            InvalidPlan, UnknownDocument, InvalidParameter: the corpora have no such table.
            ResponseTooLarge: a table is too large for memory.
            ClientLeft, Later, Overloaded: see `Jobs.result`; Overloaded, too, if another process builds it.
        """
        if (tabled := plan.tabled) is None:
            return plan, []
        plan.require_sources(f"{tabled.prefix}{tabled.digests_field}", tabled.digests)
        found = {name: self._documents_of(corpora[name]) for name in plan.sources}
        digests = self._digests(tabled, found) if tabled.digests_field else {}
        if any(tabled.digests.get(name, digest) != digest for name, digest in digests.items()):
            raise FingerprintMismatch(
                "the documents of the plan's corpora are others than those that it was made for: "
                f"the plan says {dict(tabled.digests)}, this server {digests}",
                parameter=f"{tabled.prefix}{tabled.digests_field}",
                remedy="serve the document indices that the plan was made for",
            )
        plan = plan if tabled.digests == digests else plan.with_digests(digests)
        decides = {**plan.arithmetic, "sources": plan.sources, "tokens": dict(plan.fingerprints)}
        jobs = [
            job
            for seq_len in plan.row_lengths
            for job in tabled.jobs(found, seq_len=seq_len, seed=plan.seed, decides=decides)
        ]
        return plan, [self.table(job, corpora, budget, is_kept=is_kept) for job in jobs]

    def _documents_of(self, corpus: Corpus) -> Documents:
        with self._digesting:
            if (found := self._documents.get(corpus)) is None:
                found = self._documents[corpus] = Documents(corpus)
            return found

    def _digests(self, tabled: Named, found: Mapping[str, Documents]) -> dict[str, str]:
        with self._digesting:
            return {name: tabled.digest_of(documents) for name, documents in found.items()}

    def table(
        self, job: Job, corpora: Mapping[str, Corpus], budget: Budget, *, is_kept: bool = True
    ) -> TableInUse:
        """Return a table, mapped if it was kept, else built; see `bind`."""
        key = key_of(job)
        if self._folder is not None and (mapped := mapped_table(self._folder / key, job)) is not None:
            return mapped
        size = job.size()
        num_bytes = size * _JOB_BYTES
        if (needed := size * _BUILDING_BYTES) > (memory := memory_bytes()):
            raise ResponseTooLarge(
                "the table of a plan, while it is built,",
                needed,
                memory,
                "bytes, this machine's memory",
                parameter="plan",
                remedy="bind the plan on a machine with more memory",
            )
        is_small = size <= _MOST_IN_PROCESS
        is_kept = is_kept and self._folder is not None
        if not is_kept:
            if (found := self._in_memory.get(key)) is not None:
                return found
            if self._folder is not None and num_bytes > MAX_MEMORY_BYTES:
                raise ResponseTooLarge(
                    "the table of a plan that is spelled inline",
                    num_bytes,
                    MAX_MEMORY_BYTES,
                    "bytes",
                    parameter="rows",
                    remedy="POST the plan to /v1/plans, whose tables are kept on disk",
                )
            in_memory = sum(each.num_bytes for each in list(self._in_memory.values()))
            if self._folder is not None and in_memory + num_bytes > MAX_ALL_MEMORY_BYTES:
                raise Overloaded(
                    f"tables of plans that are spelled inline take {in_memory} bytes of memory now"
                )
        build = self._built if is_kept else self._built_in_memory
        return shared(
            self._jobs,
            budget,
            ("table", key, is_kept),
            partial(build, key, job, corpora, is_small or not job.is_apart),
            is_small=is_small,
            what=_IS_BUILT,
        )

    def _built_in_memory(
        self, key: str, job: Job, corpora: Mapping[str, Corpus], is_here: bool, budget: Budget
    ) -> TableInUse:
        table = _build(_checked(job, corpora, budget), budget, is_here=is_here)
        found = self._in_memory[key] = TableInUse(table, sum(array.nbytes for array in table))
        return found

    def _built(
        self, key: str, job: Job, corpora: Mapping[str, Corpus], is_here: bool, budget: Budget
    ) -> TableInUse:
        """Build a table and publish it; return it from memory if it cannot be kept."""
        assert self._folder is not None
        path, table = self._folder / key, None
        job = _checked(job, corpora, budget)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with publishing_folder(path) as folder:
                if not is_here:
                    run_apart("the table of a plan could not be built", budget, _build_here, folder, job)
                else:
                    table = job.build()
                    write_table(folder, job, table)
            self._make_room(path)
        except BlockingIOError as error:
            raise Overloaded(_IS_BUILT) from error  # by another process
        except OSError as error:  # a full disk, or another process was faster
            _log.warning("the table %s of a plan was not kept: %s", path.name, error)
        if (mapped := mapped_table(path, job)) is not None:
            return mapped
        table = table or _build(job, budget, is_here=is_here)
        return TableInUse(table, sum(array.nbytes for array in table))

    def _make_room(self, newest: Path) -> None:
        """Remove the tables that were not used for the longest time."""
        assert self._folder is not None
        left = self._max_bytes
        kept = [each for each in self._folder.iterdir() if not each.name.startswith(".")]
        for path in sorted(kept, key=lambda each: (each == newest, each.stat().st_mtime), reverse=True):
            left -= sum(file.stat().st_size for file in path.iterdir())
            if left < 0 and path != newest:
                shutil.rmtree(path, ignore_errors=True)


def _build(job: Job, budget: Budget, *, is_here: bool) -> Table:
    """Build a table in memory: a large one in another process, whose memory ends with it."""
    if not is_here:
        return run_apart("the table of a plan could not be built", budget, _build_apart, job)
    return job.build()


def _build_apart(job: Job) -> Table:
    return job.build(run=map_in_copies)


def _checked(job: Job, corpora: Mapping[str, Corpus], budget: Budget) -> Job:
    """Return the job, whose corpora have documents that end as they must.

    Raises:
        InvalidPlan: naming the first document that does not.
    """
    for name in job.ends:
        check_ends(corpora[name], budget)
    return job


def _build_here(folder: Path, job: Job) -> None:
    """Build a table in its folder; on a full disk not in memory, for which it may be too large."""
    table = job.build(run=map_in_copies)
    try:
        write_table(folder, job, table)
    except OSError as error:
        raise StateUnavailable(f"the table of a plan cannot be kept: {error.strerror}") from error


def _digest(*arrays: np.ndarray) -> str:
    digest = xxhash.xxh3_128()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype="<i8").data)
    return digest.hexdigest()
