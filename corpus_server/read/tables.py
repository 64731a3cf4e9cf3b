"""The tables of plans whose order has one: built once, kept in a folder beside the plans, and mapped.

    STATE_DIR/megatron/KEY/begins.npy ...    KEY: digest of what decides the table

Losing the folder loses nothing but time. Any process may remove a table that another one has mapped: the
files stay until the last map is gone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import xxhash

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.publish import publishing_folder
from corpus_server.errors import FingerprintMismatch, Overloaded
from corpus_server.plan import Plan
from corpus_server.plan.orders.order import Table, Tabled
from corpus_server.plan.streams import Sequences
from corpus_server.read.apart import run_apart

MAX_BYTES: Final = 16 * 2**30
"""Of all tables in a folder; those that were not used for the longest time make room."""

_FORMAT: Final = 1
"""Of the arrays; another one gets other keys, so that no process reads what it does not know."""

_MOST_SHUFFLED: Final = 1 << 18
"""Elements. NumPy shuffles without letting another thread run, 10^7 elements for some seconds; the start of a
process takes as long as shuffling a million."""

_IS_BUILT: Final = "the table of a plan is being built"

_log = logging.getLogger(__name__)


class _Job(NamedTuple):
    """What decides a table."""

    order: Tabled
    sequences: Mapping[str, Sequences]
    seq_len: int
    seed: int
    is_large: bool

    def build(self) -> Table:
        return self.order.build(self.sequences, seq_len=self.seq_len, seed=self.seed)


class Tables:
    """Tables by plan; safe to use from several threads and processes.

    Args:
        folder: where tables are kept, made at need; None: nowhere, each is built in memory.
        max_bytes: of all tables; the newest stays, however large it is.
    """

    def __init__(self, folder: Path | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._building = threading.Lock()

    def bind(self, plan: Plan, corpora: Mapping[str, Corpus]) -> tuple[Plan, Table | None]:
        """Return the plan with the digests of its documents, and its table; None if its order has none.

        Args:
            plan: with its fingerprints.

        Raises:
            FingerprintMismatch: a corpus has other documents than the plan was made for.
            InvalidPlan, UnknownDocument, InvalidParameter: the corpora have no such table.
            Overloaded: a table is being built; ask again.
        """
        order = plan.order.tabled
        if order is None:
            return plan, None
        first, sequences, digests = 0, {}, {}
        for name in plan.sources:
            starts, lengths = corpora[name].sequences()
            digests[name] = f"xxh3-{_digest(starts, lengths)}"
            sequences[name] = Sequences(first + starts, lengths)
            first += corpora[name].num_tokens
        if order.documents and order.documents != digests:
            raise FingerprintMismatch(
                "the documents of the plan's corpora are others than those that it was made for: "
                f"the plan says {dict(order.documents)}, this server {digests}",
                parameter=f"order.{plan.order.name}.documents",
                remedy="serve the document indices that the plan was made for",
            )
        plan = replace(plan, order=order.with_documents(digests))
        is_large = order.check_size(sequences, seq_len=plan.seq_len) > _MOST_SHUFFLED
        return plan, self._table(_Job(order, sequences, plan.seq_len, plan.seed, is_large), _key(plan))

    def _table(self, job: _Job, key: str) -> Table:
        if self._folder is None:
            return job.build()
        path = self._folder / key
        if (table := _mapped(path, job.order)) is not None:
            return table
        # A second request for a table of minutes should not take a second thread and twice the memory.
        if not self._building.acquire(blocking=False):
            raise Overloaded(_IS_BUILT)
        try:
            return self._built(path, job)
        finally:
            self._building.release()

    def _built(self, path: Path, job: _Job) -> Table:
        """Build a table and publish it; return it from memory if it cannot be kept."""
        table = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with publishing_folder(path) as folder:
                if job.is_large:
                    run_apart("the table of a plan could not be built", _build_here, folder, job)
                else:
                    table = job.build()
                    _write(folder, job.order, table)
            self._make_room(path)
        except BlockingIOError as error:
            raise Overloaded(_IS_BUILT) from error  # by another process
        except OSError as error:  # a full disk, or another process was faster
            _log.warning("the table %s of a plan was not kept: %s", path.name, error)
        return _mapped(path, job.order) or table or job.build()

    def _make_room(self, newest: Path) -> None:
        """Remove the tables that were not used for the longest time."""
        assert self._folder is not None
        left = self._max_bytes
        kept = [each for each in self._folder.iterdir() if not each.name.startswith(".")]
        for path in sorted(kept, key=lambda each: (each == newest, each.stat().st_mtime), reverse=True):
            left -= sum(file.stat().st_size for file in path.iterdir())
            if left < 0 and path != newest:
                shutil.rmtree(path, ignore_errors=True)


def _build_here(folder: Path, job: _Job) -> None:
    _write(folder, job.order, job.build())


def _write(folder: Path, order: Tabled, table: Table) -> None:
    for name, array in zip(order.table._fields, table, strict=True):
        with (folder / f"{name}.npy").open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())


def _mapped(path: Path, order: Tabled) -> Table | None:
    """Map the table in a folder and note its use; None if it is not there or damaged."""
    try:
        files = [path / f"{name}.npy" for name in order.table._fields]
        arrays = [np.load(file, mmap_mode="r", allow_pickle=False) for file in files]
        os.utime(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        _log.warning("a damaged table is built again: %s: %s", path, error)
        shutil.rmtree(path, ignore_errors=True)
        return None
    # Plain arrays: those of class memmap cost more at each use.
    table: Table = order.table(*(array.view(np.ndarray) for array in arrays))
    return table


def _key(plan: Plan) -> str:
    """Return the digest of what decides the table: stages and skips do not."""
    decides = {**plan.arithmetic, "sources": plan.sources, "tokens": dict(plan.fingerprints)}
    text = json.dumps({"format": _FORMAT, **decides}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(*arrays: np.ndarray) -> str:
    digest = xxhash.xxh3_128()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype="<i8").data)
    return digest.hexdigest()
