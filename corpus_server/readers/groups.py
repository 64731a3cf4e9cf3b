"""Read ahead for bounded shuffles: whole groups, block by block, and drop the groups that were read.

    group          c - 1       c            c + 1          c + 2
    requests                   are here
    page cache     dropped     read         being read

So the disk reads large chunks in sequence, and training at random in memory. A source needs room for three
groups: while requests cross the border of two groups, the first is kept and the third is begun.

Only what this plan brought in is dropped, and only if no other plan that is being read uses the corpus. Each
worker process keeps account of its own. The kernel keeps pages that another process has mapped, so each
group is dropped again one group later, when the other processes have left it, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.shards import contents
from corpus_server.read.bound_plan import BoundPlan

# Tokens of one turn, 4 MiB of uint16: large enough for a disk's sequential rate, and read in some ms, so that
# other readers wait little.
_CHUNK_TOKENS = 2 << 20

# The kernel reads no more of a range than the larger of the disk's read_ahead_kb, 128 by default, and its
# max_sectors_kb.
_RANGE_BYTES = 128 << 10

_SAMPLES = 8  # tokens of a chunk; if all are resident, the chunk is left alone

# A look at where requests are costs up to 1 ms with a mixture, so it is not done for each request.
_LOOK_SECONDS = 0.01

# A group is kept until so many requests in a row were beyond it: requests of several ranks and connections
# come out of order.
_KEPT_REQUESTS = 64

Extent = tuple[int, int, int]  # shard number, tokens [start, stop)


@dataclass(slots=True)
class _Block:
    """One of the blocks of a group: the part of it that is still to be read, and what was read from disk."""

    shard: int
    start: int
    stop: int
    read: list[tuple[int, int]] = field(default_factory=list)
    unread: int = 0  # the first token that is still to be read


class Groups:
    """The groups of one plan in the page cache.

    `note` and `take_steps` are brief; the rest may block. All but `note` belongs to one thread.

    Args:
        bound: a plan of a bounded shuffle.

    Attributes:
        num_readers: of the plan; when there is none any more, `drop_all`.
        admitted_bytes: of the budget for prefetching; 0 if the groups do not fit.
        rests_until: after a failure, the monotonic time before which requests cause no turn.
    """

    def __init__(self, bound: BoundPlan) -> None:
        self.bound = bound
        self.num_readers = self.admitted_bytes = 0
        self.is_refusal_logged, self.rests_until = False, 0.0
        # Of requests since the latest look; bounded, because the thread that looks may hang in a read.
        self._steps: deque[int] = deque(maxlen=_KEPT_REQUESTS)
        self._num_requests = 0
        self._look_at = float("-inf")  # monotonic time of the next look
        self._at: dict[int, int] = {}  # by source, the number of the group that requests are in
        self._latest_before: dict[int, int] = {}  # by source, the latest request before that group
        self._groups: dict[tuple[int, int], list[_Block]] = {}  # by source and number
        self._dropped: dict[tuple[int, int], list[_Block]] = {}  # at the latest change of groups
        self._to_drop: deque[_Block] = deque()
        self._others: Collection[Corpus] = ()

    @cached_property
    def num_bytes(self) -> int:
        """The page cache that reading ahead takes: three groups of each source, or all of it.

        Adding it up takes ms with many shards.
        """
        plan, sampler = self.bound.plan, self.bound.sampler
        total = 0
        for source, name in enumerate(plan.sources):
            tokens = sampler.reach(source, 3)
            corpus = self.bound.corpora[name]
            token_bytes = corpus.dtype.itemsize + (corpus.mask_dtype.itemsize if corpus.num_masks else 0)
            total += min(tokens * token_bytes, sum(each.data_bytes for each in contents(corpus.shards)))
        return total

    def note(self, step: int, now: float) -> bool:
        """Note a request; return whether it is time to look where requests are."""
        self._steps.append(step)
        self._num_requests += 1
        return now >= self._look_at

    def take_steps(self, now: float) -> list[int]:
        """Return the steps that were noted since the latest look, if it is time for another one."""
        if now < self._look_at:
            return []
        self._look_at = now + _LOOK_SECONDS
        return [self._steps.popleft() for _ in range(len(self._steps))]

    def look(self, steps: Sequence[int], others: Collection[Corpus]) -> None:
        """Find out which groups requests for these steps are in, and which were left.

        Args:
            others: corpora of other plans that are being read; nothing of theirs is dropped.
        """
        sampler = self.bound.sampler
        lowest, highest = sampler.group_numbers(min(steps)), sampler.group_numbers(max(steps))
        wanted: list[tuple[int, int]] = []
        for source, number in highest.items():
            at = self._at.get(source, number)
            if number == at + 1 or at - 1 in (number, lowest.get(source)):
                self._latest_before[source] = self._num_requests
            self._at[source] = at = max(at, number) if abs(number - at) == 1 else number
            latest = self._latest_before.get(source, -_KEPT_REQUESTS)
            is_kept = at > 0 and self._num_requests - latest < _KEPT_REQUESTS
            wanted += [(source, each) for each in (at, at + 1, *([at - 1] if is_kept else []))]
        self._others = others
        left = {key: self._groups.pop(key) for key in sorted(self._groups.keys() - set(wanted))}
        if left:
            self._drop(self._to_drop)
            again = [group for key, group in self._dropped.items() if key not in wanted]
            self._to_drop = deque(block for group in (*again, *left.values()) for block in group)
            self._dropped = left
        for key in wanted:
            if key not in self._groups:
                self._groups[key] = [
                    _Block(*extent, unread=extent[1]) for extent in sampler.group_extents(*key)
                ]

    def read_chunk(self) -> int:
        """Start to read the next chunk that is not resident, and drop a block that was left.

        Returns the bytes that are read; 0 when all is done. One block for each chunk, because the disk
        would be idle while two whole groups are dropped.
        """
        num_bytes = self._read_chunk()
        if self._to_drop and num_bytes:
            self._drop([self._to_drop.popleft()])
        elif self._to_drop:
            self._drop(self._to_drop)
            self._to_drop.clear()
        return num_bytes

    def _read_chunk(self) -> int:
        gatherer = self.bound.gatherer
        # The groups that requests are in come before the next ones.
        for _, group in sorted(self._groups.items(), key=lambda item: item[0][1] - self._at[item[0][0]]):
            for block in group:
                itemsize = self.bound.shards[block.shard][1].dtype.itemsize
                while (start := block.unread) < block.stop:
                    stop = block.unread = min(start + _CHUNK_TOKENS, block.stop)
                    if gatherer.are_resident(
                        _places(block.shard, start, stop, max(1, (stop - start) // _SAMPLES))
                    ):
                        continue
                    ranges = _places(block.shard, start, stop, _RANGE_BYTES // itemsize)
                    self.bound.read_ahead(ranges, np.diff(ranges[:, 1], append=stop))
                    block.read.append((start, stop))
                    return (stop - start) * itemsize
        return 0

    def drop_all(self, others: Collection[Corpus]) -> None:
        """Drop what was read, because nobody asks any more."""
        self._others = others
        groups = (*self._dropped.values(), *self._groups.values())
        self._drop([*self._to_drop, *(block for group in groups for block in group)])
        self._groups.clear()

    def _drop(self, blocks: Iterable[_Block]) -> None:
        for block in blocks:
            name, shard = self.bound.shards[block.shard]
            if self.bound.corpora[name] in self._others:
                continue
            # Another process may have read any part of the block, and can drop only what this one released.
            shard.release(block.start, block.stop)
            for start, stop in block.read:
                shard.drop(start, stop)


def _places(shard: int, start: int, stop: int, spread: int) -> NDArray[np.int64]:
    """Return every `spread`-th token of tokens [start, stop): `(k, 2) int64`, shard number and token."""
    tokens = np.arange(start, stop, spread)
    return np.stack([np.full_like(tokens, shard), tokens], axis=1)
