"""Copy rows of local shards straight into the memory that the device reads.

All maps lie in one address space, so windows of any number of shards of one type are rows of one strided
view. Torch copies rows to where they belong; NumPy's fancy index would make an array of its own first, and
copying that on costs half as much again.

One thread copies. Torch's others would spin between two gathers, and take the cores from the server and the
model: on two cores, both of them brought a fifth of one's throughput at times.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from corpus_client import errors
from corpus_client.network.control import ShardDescription

Tokens = npt.NDArray[np.integer]
Indices = npt.NDArray[np.int64]

MAX_OPEN_FILES = 1 << 20

NO_SHARD = -1
"""Stands for a shard's number at the end of a row that a token id fills."""

PIECE_BYTES = 256 << 10
"""Where shards are of several types: NumPy's temporary copy of a piece stays in the cache."""

CHUNK_TOKENS = 256
"""Of pieces of rows: half or twice as many take a tenth longer for documents of some hundred tokens."""

CHUNKS_AT_ONCE = 512
"""Of pieces of rows; they stay in the cache until they are at their places."""

_CHANGED = "close all loaders of this path, and make them anew"
"""What to do where the server that a loader started reads the same file: it has the file as it was then."""

_SIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.int16), 4: np.dtype(np.int32)}
"""By itemsize: torch cannot index every unsigned type, and a copy does not look at the sign."""


class LocalShard:
    """One mapped shard.

    tokens: `(num_tokens,)` as stored, read-only; valid until `close`.
    """

    def __init__(self, path: Path, described: ShardDescription, *, is_served: bool = False) -> None:
        self.path = path
        self.remedy = _CHANGED if is_served else ""
        self.described = described
        self.tokens: Tokens = np.empty(0, described.dtype)
        try:
            with path.open("rb") as file:
                self._opened = _identity(os.fstat(file.fileno()))
                if self._opened[0] == described.size_bytes and described.num_tokens:
                    self.tokens = self._mapped(file)
        except OSError as error:
            if error.errno == errno.EMFILE:
                limit = _open_files()[0]
                raise errors.InvalidArgument(
                    f"local_root needs a file descriptor for each shard, and this process may have {limit:,}"
                    "; raise the limit (ulimit -Hn, or LimitNOFILE= of systemd), or leave local_root out"
                ) from error
            raise errors.LocalCopyMismatch(
                f"corpus {described.corpus!r}: shard {described.name} must lie at {path}, "
                f"got {error.strerror}; {self.remedy or 'is local_root right?'}"
            ) from error
        if self._opened[0] != described.size_bytes:
            raise errors.LocalCopyMismatch(
                f"corpus {described.corpus!r}: {path} must have {described.size_bytes:,} bytes, "
                f"got {self._opened[0]:,}; {self.remedy or 'was the copy interrupted?'}"
            )
        self.address = self.tokens.ctypes.data

    def _mapped(self, file: BinaryIO) -> Tokens:
        """Return the shard's tokens in a map, which keeps a descriptor of its own."""
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            view.madvise(mmap.MADV_RANDOM)  # else a cold window of 2 KiB reads megabytes ahead
        dtype, described = np.dtype(self.described.dtype).newbyteorder("<"), self.described
        return np.frombuffer(view, dtype, count=described.num_tokens, offset=described.data_offset)

    def check_unchanged(self) -> None:
        """Raise unless the file still has the size and time it was opened with."""
        try:
            now = _identity(self.path.stat())
        except OSError:
            now = None
        if now != self._opened:
            raise errors.LocalCopyMismatch(
                f"{self.path} changed while it was in use; {self.remedy or 'copy it again'}"
            )

    def close(self) -> None:
        """Drop the map, which goes with the last view of it."""
        self.tokens = np.empty(0, self.described.dtype)


def allow_open_files() -> None:
    """Raise the soft limit of open files to the hard one: the usual 1,024 are for programs with select(2)."""
    soft, hard = _open_files()
    wanted = min(hard, MAX_OPEN_FILES)
    if soft < wanted:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _open_files() -> tuple[int, int]:
    """Return how many files this process may have open, and how many it may allow itself."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit on them
        return sys.maxsize, sys.maxsize
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return sys.maxsize if soft == unlimited else soft, sys.maxsize if hard == unlimited else hard


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


class Gatherer:
    """Gathers rows from a fixed list of open shards, which indices count; for one thread.

    Here each row is a window, and `PieceGatherer` joins several pieces.

    Args:
        row_tokens: tokens of a row.
        window: tokens of a window that is copied as a whole.
    """

    def __init__(self, shards: Sequence[LocalShard], row_tokens: int, *, window: int | None = None) -> None:
        self._shards = shards
        self._row_tokens = row_tokens
        self._window = row_tokens if window is None else window
        self._num_tokens = np.array([len(shard.tokens) for shard in shards], np.int64)
        self._numbers = self._starts = np.empty(0, np.int64)
        self._first_token = np.zeros(len(shards), np.int64)  # of each shard in the view of all
        self._all_windows = self._view_of_all()
        try:  # imported here: whoever brings their own torch needs threadpoolctl for local copies only
            from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
        except ModuleNotFoundError as error:
            raise errors.InvalidArgument(
                "a local copy of the shards needs threadpoolctl, which is not installed; "
                "pip install 'corpus-client[torch]'"
            ) from error
        # OpenMP counts its threads for each thread that calls it: nobody else is limited.
        self._openmp = ThreadpoolController().select(user_api="openmp")

    def select(self, indices: Indices) -> int:
        """Choose the rows that `gather` copies; return their number.

        indices: `(rows, 2) int64`: shard number, start token in that shard; at least one row.
        """
        numbers, starts = np.ascontiguousarray(indices.T)
        self._choose(numbers, starts, self._row_tokens)
        return len(indices)

    def gather(self, first: int, out: Tokens) -> None:
        """Copy selected rows from number `first` on; refuse shards that changed.

        out: `(rows, row_tokens)`, C order; any integer dtype that holds the shards' tokens.
        """
        part = self._part(first, len(out))
        touched = np.flatnonzero(np.bincount(self._numbers[part])).tolist()
        for number in touched:
            self._shards[number].check_unchanged()
        with self._openmp.limit(limits=1):
            self._fill(part, first, out)
        for number in touched:
            # After the copy: a file that was truncated under it reads zeros, not an error.
            self._shards[number].check_unchanged()

    def _choose(self, numbers: Indices, starts: Indices, lengths: Indices | int) -> None:
        """Keep what is copied, so many tokens each, once it is known to lie in the shards."""
        for number in (numbers.min(initial=0), numbers.max(initial=0)):
            if not 0 <= number < len(self._shards):
                raise errors.ResponseCorrupt(
                    f"shard numbers must be in [0, {len(self._shards)}), got {number}"
                )
        outside = (starts < 0) | (starts > self._num_tokens[numbers] - lengths)
        if outside.any():
            number, start = int(numbers[outside][0]), int(starts[outside][0])
            raise errors.ResponseCorrupt(f"a start lies outside {self._shards[number].path}: {start}")
        self._numbers, self._starts = numbers, starts

    def _part(self, first: int, num_rows: int) -> slice:
        """Return which of the selected windows or pieces these rows consist of."""
        return slice(first, first + num_rows)

    def _fill(self, part: slice, first: int, out: Tokens) -> None:
        self._copy(self._numbers[part], self._starts[part], out)

    def _copy(self, numbers: Indices, starts: Indices, out: Tokens) -> None:
        """Copy windows, `(k, window)`."""
        if self._all_windows is not None and self._shards[0].tokens.dtype == out.dtype:
            rows = torch.from_numpy(self._first_token[numbers] + starts)
            into = torch.from_numpy(out.view(_SIGNED[out.itemsize]))
            torch.index_select(self._all_windows, 0, rows, out=into)
            return
        rows_at_once = max(1, PIECE_BYTES // (self._window * out.itemsize))
        for number in np.unique(numbers).tolist():
            windows = np.lib.stride_tricks.sliding_window_view(self._shards[number].tokens, self._window)
            (places,) = np.nonzero(numbers == number)
            for at in range(0, len(places), rows_at_once):
                piece = places[at : at + rows_at_once]
                out[piece] = windows[starts[piece]]

    def _view_of_all(self) -> torch.Tensor | None:
        """Return the addresses that hold all shards, as rows of windows.

        None: the shards differ in type or alignment, or lie too far apart.
        """
        kinds = {(shard.tokens.dtype, shard.address % shard.tokens.itemsize) for shard in self._shards}
        if len(kinds) != 1 or not all(len(shard.tokens) for shard in self._shards):
            return None
        ((dtype, _),) = kinds
        lowest = min(shard.address for shard in self._shards)
        num_bytes = max(shard.address + shard.tokens.nbytes for shard in self._shards) - lowest
        num_tokens = num_bytes // dtype.itemsize
        if num_tokens < self._window or num_tokens * self._window >= 2**62:
            return None
        self._first_token[:] = [(shard.address - lowest) // dtype.itemsize for shard in self._shards]
        # What lies between the maps is never read, and nothing is written.
        memory = memoryview((ctypes.c_char * num_bytes).from_address(lowest))
        tokens = torch.from_numpy(np.frombuffer(memory, _SIGNED[dtype.itemsize]))
        return tokens.as_strided((num_tokens - self._window + 1, self._window), (1, 1))


class PieceGatherer(Gatherer):
    """Gathers rows that join pieces.

    Pieces are copied in chunks of one length, each a window, and then to their places. The last chunk of a
    piece reaches beyond its end; chunks are written in order, so the next piece overwrites what was too much.
    Where it would lead out of the shard or of the rows, a slice is copied instead.
    """

    def __init__(self, shards: Sequence[LocalShard], row_tokens: int) -> None:
        super().__init__(shards, row_tokens, window=CHUNK_TOKENS)
        self._counts = self._begins = np.empty(0, np.int64)  # begins: in all rows laid end to end
        self._ends = np.empty((0, 3), np.int64)  # of rows: begin, stop, token id

    def select(self, indices: Indices) -> int:
        """Choose the rows that `gather` copies; return their number.

        indices: `(pieces, 4) int64`: row, shard number, start token, tokens; of shard `NO_SHARD` are the ends
            of rows, which have a token id in place of a start.
        """
        rows, numbers, starts, counts = np.ascontiguousarray(indices.T)
        # A row whose documents are all excluded has a piece without tokens, and then the end that fills it.
        some = counts != 0
        rows, numbers, starts, counts = rows[some], numbers[some], starts[some], counts[some]
        stops = np.minimum(np.maximum(counts, 0), self._row_tokens).cumsum()
        begins = stops - counts
        num_rows, rest = divmod(int(stops[-1]), self._row_tokens) if len(stops) else (0, 0)
        right = (
            (counts > 0) & (begins // self._row_tokens == rows) & ((stops - 1) // self._row_tokens == rows)
        )
        if rest or not right.all():
            raise errors.ResponseCorrupt(
                f"pieces must make rows of {self._row_tokens} tokens, one after another"
            )
        is_own = numbers != NO_SHARD
        self._choose(numbers[is_own], starts[is_own], counts[is_own])
        self._counts, self._begins = counts[is_own], begins[is_own]
        self._ends = np.stack((begins, stops, starts), axis=1)[~is_own]
        return num_rows

    def _part(self, first: int, num_rows: int) -> slice:
        bounds = first * self._row_tokens, (first + num_rows) * self._row_tokens
        return slice(*self._begins.searchsorted(bounds).tolist())

    def _fill(self, part: slice, first: int, out: Tokens) -> None:
        flat, before = out.reshape(-1), first * self._row_tokens
        numbers, starts, counts = self._numbers[part], self._starts[part], self._counts[part]
        begins = self._begins[part] - before
        reach = -(-counts // CHUNK_TOKENS) * CHUNK_TOKENS
        leads_out = (starts + reach > self._num_tokens[numbers]) | (begins + reach > flat.size)
        reach -= leads_out * CHUNK_TOKENS
        num_chunks, skipped = reach // CHUNK_TOKENS, reach.cumsum() - reach
        steps = np.arange(0, reach.sum(), CHUNK_TOKENS)
        chunks, into = (np.repeat(each - skipped, num_chunks) + steps for each in (starts, begins))
        of_shard = np.repeat(numbers, num_chunks)
        shape = (max(0, flat.size - CHUNK_TOKENS + 1), CHUNK_TOKENS)
        places = np.lib.stride_tricks.as_strided(flat, shape, flat.strides * 2)
        copied = np.empty((min(len(chunks), CHUNKS_AT_ONCE), CHUNK_TOKENS), out.dtype)
        for at in range(0, len(chunks), CHUNKS_AT_ONCE):
            some = slice(at, at + CHUNKS_AT_ONCE)
            target = copied[: len(chunks[some])]
            self._copy(of_shard[some], chunks[some], target)
            places[into[some]] = target
        for each in np.flatnonzero(leads_out).tolist():
            done, count = int(reach[each]), int(counts[each])
            begin, start = int(begins[each]), int(starts[each])
            tokens = self._shards[int(numbers[each])].tokens
            flat[begin + done : begin + count] = tokens[start + done : start + count]
        low, high = self._ends[:, 0].searchsorted((before, before + flat.size)).tolist()
        for begin, stop, token in self._ends[low:high].tolist():
            flat[begin - before : stop - before] = token
