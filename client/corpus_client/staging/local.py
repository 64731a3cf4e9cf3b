"""`local_root=`: the server says which windows or pieces, the tokens come from a local copy of the shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from corpus_client import errors
from corpus_client.network import control, wire
from corpus_client.network.control import BoundPlan, ShardDescription
from corpus_client.network.layout import Beside, arrays_of, parts, starts
from corpus_client.network.replicas import Replicas
from corpus_client.plan.requests import AheadRequests
from corpus_client.staging.gather import Gatherer, LocalShard, PieceGatherer, allow_open_files
from corpus_client.staging.options import LocalRoot

MANY_SHARDS = 256
"""Each takes a file descriptor, and twice while another loader opens: above it the limit is raised."""

PROBE_TOKENS = 2048
PROBE_SHARDS = 8

REQUEST_ROWS = 16_384
"""Most rows per index request, unless a slot holds more: 256 KiB, which a server does not count in flight."""

OWN_ROWS, OWN_STEPS = 65_536, 1024
"""The same of windows, and steps, where the server is the loader's own: nobody else has to wait for it.

With a quarter as many, batches of 64 x 1,025 have 0.85 of the speed where the server waits for a core.
"""


class Places(NamedTuple):
    """Where the files of shards lie on this host; `are_served`: the files that the server itself reads."""

    find: Callable[[ShardDescription], Path]
    are_served: bool = False


def places_in(plan: BoundPlan, local_root: LocalRoot) -> Places:
    """Return where the shards lie in a copy of their corpora."""
    if plan.views:
        raise errors.InvalidArgument(
            f"{', '.join(plan.views)}: a view is read without local_root, got {local_root!r}; leave it out"
        )
    return Places(partial(_local_path, local_root))


def places_of_server(replicas: Replicas, plan: BoundPlan) -> Places | None:
    """Return where a server on this host reads the shards; None: not all are files that it can name."""
    if plan.views:
        return None
    paths: dict[str, Mapping[str, str]] = {
        name: replicas.ask(control.get(f"{wire.corpus_path(name)}/paths"))["paths"] for name in plan.sources
    }
    if not all(each.file in paths[each.corpus] for each in plan.shards):
        return None  # of an object store
    return Places(lambda described: Path(paths[described.corpus][described.file]), are_served=True)


def open_shards(plan: BoundPlan, places: Places) -> list[LocalShard]:
    """Map every shard of the plan, in the order that indices count them."""
    if len(plan.shards) > MANY_SHARDS:
        allow_open_files()
    with ExitStack() as on_error:
        shards = [
            on_error.enter_context(closing(LocalShard(places.find(each), each, is_served=places.are_served)))
            for each in plan.shards
        ]
        on_error.pop_all()
    return shards


def check_shards(replicas: Replicas, shards: Sequence[LocalShard]) -> None:
    """Compare first and last tokens of up to eight shards of each corpus with the server's."""
    for corpus, group in itertools.groupby(shards, key=lambda shard: shard.described.corpus):
        copies = list(group)
        starts = [0, *itertools.accumulate(shard.described.num_tokens for shard in copies)]
        for number in sorted({i * (len(copies) - 1) // (PROBE_SHARDS - 1) for i in range(PROBE_SHARDS)}):
            _check_shard(replicas, corpus, starts[number], copies[number])


def _check_shard(replicas: Replicas, corpus: str, start: int, shard: LocalShard) -> None:
    num_tokens = shard.described.num_tokens
    count = min(PROBE_TOKENS, num_tokens)
    for first in sorted({0, num_tokens - count} if count else ()):
        dtype, body = replicas.ask(control.tokens(corpus, start + first, count))
        served = np.frombuffer(body, np.dtype(dtype).newbyteorder("<"))
        if not np.array_equal(served, shard.tokens[first : first + count]):
            raise errors.LocalCopyMismatch(
                f"corpus {corpus!r}: {shard.path} holds other tokens than the server's shard "
                f"{shard.described.name} (tokens {first:,} to {first + count - 1:,}); "
                f"{shard.remedy or 'is it another corpus?'}"
            )


def _local_path(local_root: LocalRoot, described: ShardDescription) -> Path:
    if isinstance(local_root, Mapping):
        if described.corpus not in local_root:
            raise errors.InvalidArgument(
                f"local_root must name a folder for corpus {described.corpus!r}, got {sorted(local_root)}"
            )
        local_root = local_root[described.corpus]
    root = Path(local_root)
    if root.is_file() and root.name == described.file:
        return root
    # The name comes from a server. Links in the folder are the user's own, as in the cache of a model hub.
    name = PurePosixPath(described.file)
    if name.is_absolute() or ".." in name.parts:
        raise errors.LocalCopyMismatch(f"shard file {described.file!r} leads out of {root}")
    return root / name


class LocalSource:
    """Receives indices, of many slots at a time, and gathers the tokens from local shards, which it owns.

    The responses wait in the kernel's buffers while no slot is free.
    """

    def __init__(
        self, ahead: AheadRequests, plan: BoundPlan, shards: list[LocalShard], beside: Sequence[Beside] = ()
    ) -> None:
        self._ahead, self._requests = ahead, ahead.requests
        self._dtype = plan.dtype
        self._shards = shards
        self._named = beside
        self._beside: list[npt.NDArray[Any]] = []  # of the response received last: `(rows, ...)` each
        self._gatherers: dict[int, Gatherer] = {}  # by tokens of a row
        self._num_selected = self._num_gathered = 0  # rows of the response received last
        self.stop = self._requests.stop

    def begin(self, start_step: int, num_steps: int, shape: tuple[int, int]) -> tuple[int, int]:
        """Have requests on the wire for steps with batches of this shape, or for those after them."""
        self._ahead.ask()
        return num_steps * shape[0], shape[1]

    def finish(self, ticket: tuple[int, int], view: memoryview) -> None:
        """Gather the steps' tokens: `(num_steps, rows, seq_len + 1)`, C order, as the server sends them."""
        out = np.frombuffer(view, self._dtype, count=ticket[0] * ticket[1]).reshape(ticket)
        named = arrays_of(self._named, 1, ticket)
        beside = [np.ndarray(*part)[0] for part in parts(view, named, out.nbytes)]
        while len(out):
            if self._num_gathered == self._num_selected:
                self._receive()
            first = self._num_gathered
            count = min(self._num_selected - first, len(out))
            self._gatherers[ticket[1]].gather(first, out[:count])
            for array, received in zip(beside, self._beside, strict=True):
                array[:count] = received[first : first + count]
            self._num_gathered += count
            out, beside = out[count:], [array[count:] for array in beside]

    def follow(self, plan: BoundPlan) -> bool:
        """Return False: requests for more than the slots are on the wire; see `Source.follow`."""
        return False

    def close(self) -> None:
        """Close connections and files."""
        self._requests.close()
        for shard in self._shards:
            shard.close()

    def _receive(self) -> None:
        """Select the rows that the next response names; those before them are gathered."""
        exchange, row_tokens = self._ahead.next()
        request, body = exchange.request, np.empty(0, np.uint8)

        def memory(num_bytes: int) -> memoryview:
            nonlocal body
            body = np.empty(num_bytes, np.uint8)
            return body.data

        self._requests.finish(exchange, memory)
        if row_tokens not in self._gatherers:
            kind = Gatherer if request.is_exact else PieceGatherer
            self._gatherers[row_tokens] = kind(self._shards, row_tokens)
        # Places are of 8 bytes each, so nothing lies between them and what is beside them.
        place_bytes = len(body) - starts(0, request.beside)[-1]
        beside = (np.ndarray(*part) for part in parts(body.data, request.beside, place_bytes))
        self._beside = [array.reshape(-1, *array.shape[2:]) for array in beside]
        indices = body[:place_bytes].view("<i8").reshape(-1, request.shape[-1])
        self._num_selected, self._num_gathered = self._gatherers[row_tokens].select(indices), 0
        num_rows = math.prod(request.shape[:-1]) // (1 if request.is_exact else row_tokens)
        if self._num_selected != num_rows:
            raise errors.ResponseCorrupt(f"indices must be of {num_rows} rows, got {self._num_selected}")
