"""`source="indices"`: the server says which windows, the tokens come from a local copy of the shards."""

from __future__ import annotations

import itertools
import mmap
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from corpus_client import errors
from corpus_client.control import BoundPlan, ControlPlane, ShardDescription
from corpus_client.gather import Gatherer, Selection, Tokens
from corpus_client.remote import RankSlice, steps_request
from corpus_client.replicas import Exchange, Replicas

PROBE_TOKENS = 2048
PROBE_SHARDS = 8

REQUEST_ROWS = 16_384
"""Whose indices one request asks for at most, or for as many as a slot holds: 256 KiB."""

LocalRoot = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]


class LocalShard:
    """One mapped shard.

    tokens: `(num_tokens,)` as stored, read-only; valid until `close`.
    """

    def __init__(self, path: Path, described: ShardDescription) -> None:
        self.path = path
        self.described = described
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise errors.LocalCopyMismatch(
                f"corpus {described.corpus!r}: shard {described.name} must lie at {path}, "
                f"got {error.strerror}; is local_root right?"
            ) from error
        status = os.fstat(self._file.fileno())
        self._opened = (status.st_size, status.st_mtime_ns)
        if status.st_size != described.size_bytes:
            self._file.close()
            raise errors.LocalCopyMismatch(
                f"corpus {described.corpus!r}: {path} must have {described.size_bytes:,} bytes, "
                f"got {status.st_size:,}; was the copy interrupted?"
            )
        self.tokens: Tokens = np.empty(0, described.dtype)
        if described.num_tokens:
            view = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            view.madvise(mmap.MADV_RANDOM)  # else a cold window of 2 KiB reads megabytes ahead
            dtype = np.dtype(described.dtype).newbyteorder("<")
            self.tokens = np.frombuffer(view, dtype, count=described.num_tokens, offset=described.data_offset)

    def check_unchanged(self) -> None:
        """Raise unless the file still has the size and time it was opened with."""
        status = os.fstat(self._file.fileno())
        if (status.st_size, status.st_mtime_ns) != self._opened:
            raise errors.LocalCopyMismatch(f"{self.path} changed while it was in use; copy it again")

    def close(self) -> None:
        """Close the file; the map goes with the last view of it."""
        self._file.close()
        self.tokens = np.empty(0, self.described.dtype)


def open_shards(plan: BoundPlan, local_root: LocalRoot) -> list[LocalShard]:
    """Map every shard of the plan, in the order that indices count them."""
    shards: list[LocalShard] = []
    try:
        for described in plan.shards:
            shards.append(LocalShard(_local_path(local_root, described), described))  # noqa: PERF401
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    return shards


def check_shards(replicas: Replicas, shards: Sequence[LocalShard]) -> None:
    """Compare first and last tokens of up to eight shards with the server's."""
    corpora = itertools.groupby(shards, key=lambda shard: shard.described.corpus)
    for corpus, group in corpora:
        start = 0
        placed = []
        for shard in group:
            placed.append((start, shard))
            start += shard.described.num_tokens
        for number in sorted({i * (len(placed) - 1) // (PROBE_SHARDS - 1) for i in range(PROBE_SHARDS)}):
            _check_shard(replicas, corpus, *placed[number])


def _check_shard(replicas: Replicas, corpus: str, start: int, shard: LocalShard) -> None:
    num_tokens = shard.described.num_tokens
    count = min(PROBE_TOKENS, num_tokens)
    for first in sorted({0, num_tokens - count} if count else ()):
        dtype, body = replicas.ask(
            partial(ControlPlane.tokens, corpus=corpus, start=start + first, count=count)
        )
        served = np.frombuffer(body, np.dtype(dtype).newbyteorder("<"))
        if not np.array_equal(served, shard.tokens[first : first + count]):
            raise errors.LocalCopyMismatch(
                f"corpus {corpus!r}: {shard.path} holds other tokens than the server's shard "
                f"{shard.described.name} (tokens {first:,} to {first + count:,}); is it another corpus?"
            )


def _local_path(local_root: LocalRoot, described: ShardDescription) -> Path:
    if isinstance(local_root, Mapping):
        if described.corpus not in local_root:
            raise errors.InvalidArgument(
                f"local_root must name a folder for corpus {described.corpus!r}, got {sorted(local_root)}"
            )
        root = Path(local_root[described.corpus])
    else:
        root = Path(local_root)
    if root.is_file() and root.name == described.name:
        return root
    path = root / described.name
    if not path.resolve().is_relative_to(root.resolve()):
        raise errors.LocalCopyMismatch(f"shard name {described.name!r} leads out of {root}")
    return path


class IndexFiller:
    """Receives indices, of many slots at a time, and gathers the tokens from local shards, which it owns.

    pieces: (first step, number of steps, rows) that requests ask for: together what slots are filled with,
        in the same order.
    in_flight: requests on the wire at a time; their answers wait in the kernel's buffers while no slot is
        free.
    """

    def __init__(
        self,
        replicas: Replicas,
        plan: BoundPlan,
        part: RankSlice,
        shards: Sequence[LocalShard],
        pieces: Iterator[tuple[int, int, int]],
        *,
        in_flight: int,
        seq_len: int,
        verify: bool,
    ) -> None:
        self._replicas = replicas
        self._plan = plan
        self._part = part
        self._shards = shards
        self._window = seq_len + 1
        self._gatherer = Gatherer(shards, self._window)
        self._verify = verify
        self._pieces = pieces
        self._in_flight = in_flight
        self._asked: deque[Exchange] = deque()
        self._received = bytearray()
        self._selection: Selection | None = None  # what was received last
        self._gathered = 0  # of it

    def begin(self, start_step: int, num_steps: int, num_rows: int) -> tuple[int, int]:
        """Have requests on the wire for steps of `num_rows` rows each, or for those behind them."""
        self._ask_ahead()
        return num_steps, num_rows

    def finish(self, ticket: tuple[int, int], view: memoryview) -> None:
        """Gather the steps' tokens: `(num_steps, rows, seq_len + 1)`, C order, as the server sends them."""
        num_rows = ticket[0] * ticket[1]
        out = np.frombuffer(view, self._plan.dtype, count=num_rows * self._window)
        out = out.reshape(num_rows, self._window)
        while len(out):
            if self._selection is None or self._gathered == len(self._selection):
                self._selection, self._gathered = self._receive(), 0
            count = min(len(self._selection) - self._gathered, len(out))
            self._selection.gather(self._gathered, out[:count])
            self._gathered += count
            out = out[count:]

    def _ask_ahead(self) -> None:
        while len(self._asked) < self._in_flight and (piece := next(self._pieces, None)) is not None:
            start_step, num_steps, num_rows = piece
            request = steps_request(
                "/v1/indices",
                self._plan,
                self._part,
                start_step,
                (num_steps, num_rows, 2),
                "int64",
                verify=self._verify,
            )
            self._asked.append(self._replicas.begin(request))

    def _receive(self) -> Selection:
        """The windows that the next answer names; those before them are gathered."""
        self._ask_ahead()
        exchange = self._asked.popleft()
        num_bytes = exchange.request.num_bytes
        if len(self._received) < num_bytes:
            self._received = bytearray(num_bytes)
        self._replicas.finish(exchange, memoryview(self._received))
        indices = np.frombuffer(self._received, "<i8", count=num_bytes // 8).reshape(-1, 2)
        return self._gatherer.select(indices)

    def stop(self) -> None:
        """Wake the fetcher thread."""
        self._replicas.stop()

    def close(self) -> None:
        """Close connections and files."""
        self._replicas.close()
        for shard in self._shards:
            shard.close()
