"""Copy rows of local shards straight into the memory that the device reads.

All maps lie in one address space, so windows of any number of shards of one type are items of one memory,
which may begin at any byte: NumPy copies them by an index, some at a time, which stay in the cache until they
are at their places.
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

from corpus_client import errors
from corpus_client.network.control import ShardDescription
from corpus_client.staging.guard import GuardedMap, guard
from corpus_client.user_files import without_waiting

Tokens = npt.NDArray[np.integer]
Indices = npt.NDArray[np.int64]

MAX_OPEN_FILES = 1 << 20

NO_SHARD = -1
"""Stands for a shard's number at the end of a row that a token id fills."""

PIECE_BYTES = 256 << 10
"""That are copied at once: NumPy makes an array of them, which stays in the cache until it is copied on. Half
as many take 1.03 to 1.08 times as long, twice as many 1.02 to 1.08."""

CHUNK_TOKENS = 256
"""Of pieces of rows: half or twice as many take a tenth longer for documents of some hundred tokens."""

_CHANGED = "close all loaders of this path, and make them anew"
"""What to do where the server that a loader started reads the same file: it has the file as it was then."""

_MOST_ITEM_BYTES = 2**63  # of an item, times the items: NumPy's limit


class LocalShard:
    """One mapped shard.

    tokens: `(num_tokens,)` as stored, read-only; valid until `close`.
    """

    def __init__(self, path: Path, described: ShardDescription, *, is_served: bool = False) -> None:
        self.path = path
        self.remedy = _CHANGED if is_served else ""
        self.described = described
        self.tokens: Tokens = np.empty(0, described.dtype)
        self._guarded: GuardedMap | None = None
        try:
            with open(path, "rb", opener=without_waiting) as file:
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
        self._guarded = guard(view, np.frombuffer(view, np.uint8).ctypes.data)
        return np.frombuffer(view, dtype, count=described.num_tokens, offset=described.data_offset)

    def check_unchanged(self) -> None:
        """Raise unless the file has the size and times it was opened with, and all that was read came."""
        try:
            now = _identity(self.path.stat())
        except OSError:
            now = None
        if now != self._opened:
            raise errors.LocalCopyMismatch(
                f"{self.path} changed while it was in use; {self.remedy or 'copy it again'}"
            )
        if self._guarded is not None and self._guarded.num_faults:
            raise errors.LocalCopyMismatch(
                f"{self.path}: the disk did not deliver {self._guarded.num_faults} pages; look at this "
                f"machine's kernel log, then {self.remedy or 'copy it again'}"
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


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns  # no program can set the last one back


class Gatherer:
    """Gathers rows from a fixed list of open shards, which indices count; for one thread.

    Here each row is a window, and `PieceGatherer` joins several pieces.

    Args:
        row_tokens: tokens of a row.
    """

    def __init__(self, shards: Sequence[LocalShard], row_tokens: int) -> None:
        self._shards = shards
        self._row_tokens = row_tokens
        self._num_tokens = np.array([len(shard.tokens) for shard in shards], np.int64)
        self._numbers = self._starts = np.empty(0, np.int64)
        addresses = np.array([shard.address for shard in shards], np.int64)
        ends = addresses + [shard.tokens.nbytes for shard in shards]
        self._first_byte = addresses - addresses.min()  # of each shard in the memory of all
        # What lies between the maps is never read, and nothing is written.
        all_bytes = (ctypes.c_char * int(ends.max() - addresses.min())).from_address(int(addresses.min()))
        self._memory = memoryview(all_bytes).cast("B")
        self._dtypes = {shard.tokens.dtype for shard in shards}

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
        rows = out.reshape(-1).view(np.dtype((np.void, self._row_tokens * out.itemsize)))
        self._copy(self._numbers[part], self._starts[part], out.dtype, rows)

    def _copy(
        self,
        numbers: Indices,
        starts: Indices,
        dtype: np.dtype[np.integer],
        out: npt.NDArray[np.void],
        into: Indices | None = None,
    ) -> None:
        """Copy windows as long as an item to items, one after another, or to these: later ones lie above."""
        windows_at_once = max(1, PIECE_BYTES // out.itemsize)
        for at in range(0, len(starts), windows_at_once):
            some = slice(at, at + windows_at_once)
            windows = self._windows(numbers[some], starts[some], dtype, out.itemsize)
            out[some if into is None else into[some]] = windows.view(out.dtype)

    def _windows(
        self, numbers: Indices, starts: Indices, dtype: np.dtype[np.integer], size: int
    ) -> npt.NDArray[Any]:
        """Return windows of so many bytes of a type one after another, as bytes or as numbers."""
        if self._dtypes == {dtype} and size * len(self._memory) < _MOST_ITEM_BYTES:
            places = self._first_byte[numbers] + starts * dtype.itemsize
            # The processor waits for the first bytes of all windows at once. The copy would wait for those of
            # one after another, and takes 1.08 to 1.16 times as long.
            _items(self._memory, 1)[places]
            return np.asarray(_items(self._memory, size)[places])
        found = np.empty((len(numbers), size // dtype.itemsize), dtype)
        for number in np.unique(numbers).tolist():
            its, tokens = numbers == number, self._shards[number].tokens
            found[its] = np.lib.stride_tricks.sliding_window_view(tokens, found.shape[1])[starts[its]]
        return found.reshape(-1)


def _items(memory: memoryview, size: int) -> npt.NDArray[np.void]:
    """Return the view of memory whose item k is the `size` bytes from byte k on."""
    return np.ndarray(max(0, len(memory) - size + 1), np.dtype((np.void, size)), memory, 0, (1,))


class PieceGatherer(Gatherer):
    """Gathers rows that join pieces.

    Pieces are copied in chunks of one length, each a window, and then to their places. The last chunk of a
    piece reaches beyond its end; chunks are written in order, so the next piece overwrites what was too much.
    Where it would lead out of the shard or of the rows, a slice is copied instead.
    """

    def __init__(self, shards: Sequence[LocalShard], row_tokens: int) -> None:
        super().__init__(shards, row_tokens)
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
        anywhere = _items(out.data.cast("B"), CHUNK_TOKENS * out.itemsize)
        self._copy(np.repeat(numbers, num_chunks), chunks, out.dtype, anywhere, into * out.itemsize)
        for each in np.flatnonzero(leads_out).tolist():
            done, count = int(reach[each]), int(counts[each])
            begin, start = int(begins[each]), int(starts[each])
            tokens = self._shards[int(numbers[each])].tokens
            flat[begin + done : begin + count] = tokens[start + done : start + count]
        low, high = self._ends[:, 0].searchsorted((before, before + flat.size)).tolist()
        begins, stops, tokens = self._ends[low:high].T
        counts = stops - begins
        places = np.repeat(begins - before - (counts.cumsum() - counts), counts)
        flat[places + np.arange(places.size)] = np.repeat(tokens, counts)
