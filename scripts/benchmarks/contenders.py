"""Everybody who takes part in the throughput axis, ours first."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from scripts.benchmarks.contender import Contender, Shape
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.ours import Ours
from scripts.benchmarks.peers.bare import Bare
from scripts.benchmarks.peers.flight import Flight
from scripts.benchmarks.peers.grpc_stream import GrpcStream
from scripts.benchmarks.peers.local import Gather, NanoGpt
from scripts.benchmarks.peers.naive import Naive
from scripts.benchmarks.servers import Address, serving, spawn_peer

OURS, UNCHECKED, INDICES, UDS = "ours", "ours, verify=False", "ours, indices", "ours, Unix socket"
GRPC, FLIGHT, NAIVE = "gRPC stream", "Arrow Flight DoGet", "naive FastAPI + httpx"
NANOGPT, GATHER = "nanoGPT idiom, int64", "gather in process"
SENDINGS = ("gather", "sendmsg")
TCP_LIMITS = tuple(f"bare TCP + {sending}" for sending in SENDINGS)
UNIX_LIMITS = tuple(f"bare Unix socket + {sending}" for sending in SENDINGS)
Servers = dict[str, Address]


@contextmanager
def servers(path: Path) -> Iterator[Servers]:
    """Start every server over a corpus; yield their addresses by name."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = {OURS: serving({NAME: path}), UDS: serving({NAME: path}, uds=folder / "socket")}
        peers = {
            GRPC: spawn_peer("grpc_stream", path),
            FLIGHT: spawn_peer("flight", path),
            NAIVE: spawn_peer("naive", path),
        }
        for transport, names in (("tcp", TCP_LIMITS), ("unix", UNIX_LIMITS)):
            for sending, name in zip(SENDINGS, names, strict=True):
                peers[name] = spawn_peer("bare", path, transport, sending)
        with ThreadPoolExecutor(len(ours) + len(peers)) as pool:  # most of a start is waiting
            our_own = {name: pool.submit(stack.enter_context, its) for name, its in ours.items()}
            theirs = {name: pool.submit(stack.enter_context, its) for name, its in peers.items()}
        yield {name: its.result().address for name, its in our_own.items()} | {
            name: its.result() for name, its in theirs.items()
        }


@contextmanager
def contenders(path: Path, shape: Shape, at: Servers) -> Iterator[list[Contender]]:
    """Connect everybody for one shape.

    Args:
        path: the corpus, uint16.
        at: from `servers`.
    """
    num_tokens = path.stat().st_size // 2
    makers: list[Callable[[], Contender]] = [
        lambda: Ours(OURS, *at[OURS], shape, path),
        lambda: Ours(UNCHECKED, *at[OURS], shape, path, verify=False),
        lambda: Ours(INDICES, *at[OURS], shape, path, source="indices", local_root=path.parent),
        lambda: Ours(UDS, *at[UDS], shape, path),
    ]
    makers += [partial(Bare, name, *at[name], shape, num_tokens) for name in (*TCP_LIMITS, *UNIX_LIMITS)]
    makers += [
        lambda: GrpcStream(GRPC, *at[GRPC], shape, num_tokens),
        lambda: Flight(FLIGHT, *at[FLIGHT], shape, num_tokens),
        lambda: Naive(NAIVE, *at[NAIVE], shape, num_tokens),
        lambda: NanoGpt(NANOGPT, path, shape),
        lambda: Gather(GATHER, path, shape),
    ]
    with ExitStack() as stack:
        yield [stack.enter_context(closing(make())) for make in makers]
