"""How fast answers come, by this machine's clock alone, and where the time of a large one goes."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, get_args

import numpy as np
import torch
import xxhash

from corpus_client import errors, wire
from corpus_client.buffers import RingSize
from corpus_client.control import BoundPlan
from corpus_client.device import STORED_DTYPES, widened
from corpus_client.doctor.findings import Check
from corpus_client.endpoint import Endpoint
from corpus_client.remote import RankSlice, steps_request

StageName = Literal["server", "network", "host_copy", "transfer"]
STAGES: tuple[StageName, ...] = get_args(StageName)

TIMEOUT_SECONDS = 30.0
REPEATS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One request on a connection that was open already.

    Args:
        first_byte_seconds: from sending it to the head of its answer.
        body_seconds: from there to the last byte.
    """

    first_byte_seconds: float
    body_seconds: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.first_byte_seconds + self.body_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Seconds that one request of the loader's size spends in each place, one after the other.

    Args:
        server: from the request to the first byte, less a round trip.
        network: receiving the body.
        host_copy: checking it, and without a GPU widening it.
        transfer: to the GPU and widening there; 0 without one.
        num_tokens: trained tokens (rows x seq_len) that it brings.
    """

    server: float
    network: float
    host_copy: float
    transfer: float
    num_tokens: int

    @property
    def seconds(self) -> dict[StageName, float]:
        """By stage."""
        return {name: float(getattr(self, name)) for name in STAGES}

    def tokens_per_second(self, stage: StageName) -> float:
        """What a stage would deliver if it were the only one."""
        return self.num_tokens / max(self.seconds[stage], 1e-9)


class Stopwatch:
    """A connection that times its requests."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._http = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TIMEOUT_SECONDS)
        if endpoint.tls is not None:
            self._http = http.client.HTTPSConnection(
                endpoint.host, endpoint.port, timeout=TIMEOUT_SECONDS, context=endpoint.tls
            )
        if endpoint.socket_path is not None:
            self._http.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._http.sock.settimeout(TIMEOUT_SECONDS)

    def __enter__(self) -> Stopwatch:
        try:
            if self._endpoint.socket_path is not None:
                self._http.sock.connect(self._endpoint.socket_path)
            else:
                self._http.connect()
                self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            self._http.close()
            raise errors.ConnectionFailed(f"{self._endpoint.url}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def time(self, path: str, buffer: memoryview) -> Timing:
        """Ask once; the body lies at the start of `buffer`, which must have room for all of it.

        Raises:
            CorpusClientError: the answer is an error, or is cut short.
        """
        try:
            began = time.perf_counter()
            self._http.request("GET", self._endpoint.prefix + path)
            response = self._http.getresponse()
            headed = time.perf_counter()
            if response.status != 200:
                raise wire.error_from_answer(response.status, response.headers, response.read())
            left = buffer
            while num_bytes := response.readinto(left):
                left = left[num_bytes:]
            ended = time.perf_counter()
            response.close()
        except (OSError, http.client.HTTPException) as error:
            raise errors.ConnectionFailed(f"{self._endpoint.url}: {type(error).__name__}: {error}") from error
        return Timing(first_byte_seconds=headed - began, body_seconds=ended - headed)


def latency(endpoint: Endpoint, plan: BoundPlan, num_requests: int) -> Check:
    """Round trips, unloaded: of nothing, and of one row."""
    rows, seq_len = plan.stages[0].global_batch_size, int(plan.document["seq_len"])
    one_row = RankSlice(rank=0, world_size=rows)
    buffer = memoryview(bytearray(65_536 + (seq_len + 1) * 8))

    def row_path(step: int) -> str:
        shape = (1, 1, seq_len + 1)
        return steps_request("/v1/batches", plan, one_row, step, shape, plan.dtype, verify=True).path

    with Stopwatch(endpoint) as stopwatch:
        trips = [stopwatch.time("/healthz", buffer).seconds for _ in range(num_requests + 1)][1:]
        batches = [stopwatch.time(row_path(step), buffer).seconds for step in range(num_requests + 1)][1:]
    (trip_p50, trip_p99), (row_p50, row_p99) = (
        np.percentile(trips, [50, 99]),
        np.percentile(batches, [50, 99]),
    )
    far = trip_p50 > 0.01
    return Check(
        name="latency",
        status="warn" if far else "ok",
        found=f"{endpoint.url}: /healthz {trip_p50 * 1e3:.2f} ms, {trip_p99 * 1e3:.2f} ms; "
        f"one row of {seq_len + 1} tokens {row_p50 * 1e3:.2f} ms, {row_p99 * 1e3:.2f} ms "
        f"(p50, p99 of {num_requests})",
        advice="the server is far away: keep more requests on the wire with in_flight=" if far else "",
        measured={
            "url": endpoint.url,
            "healthz_p50_seconds": float(trip_p50),
            "healthz_p99_seconds": float(trip_p99),
            "row_p50_seconds": float(row_p50),
            "row_p99_seconds": float(row_p99),
            "num_requests": num_requests,
        },
    )


def stages(
    endpoint: Endpoint, plan: BoundPlan, part: RankSlice, ring: RingSize, device: torch.device
) -> Stages:
    """Where the time of a request of the loader's size goes; medians of a few, one at a time."""
    count, seq_len = ring.steps_per_slot, int(plan.document["seq_len"])
    rows = plan.stages[0].global_batch_size // part.world_size
    shape, dtype = (count, rows, seq_len + 1), STORED_DTYPES[plan.dtype]
    num_bytes = ring.slot_bytes + wire.TAIL_BYTES
    storage = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = memoryview(storage.numpy().data)
    with Stopwatch(endpoint) as stopwatch:
        trip = median(lambda: stopwatch.time("/healthz", view).seconds)
        timings = []
        for number in range(REPEATS + 1):
            request = steps_request("/v1/batches", plan, part, number * count, shape, plan.dtype, verify=True)
            timings.append(stopwatch.time(request.path, view[: request.num_bytes + wire.TAIL_BYTES]))
    body = view[: request.num_bytes]
    stored = storage[: request.num_bytes].view(dtype).view(shape)
    checking = median(lambda: xxhash.xxh3_64_intdigest(body))
    if device.type == "cuda":
        host_copy, transfer = checking, median(lambda: _transfer(stored, device))
    else:
        host_copy, transfer = checking + median(lambda: _widen(stored)), 0.0
    return Stages(
        server=max(0.0, float(np.median([each.first_byte_seconds for each in timings[1:]])) - trip),
        network=float(np.median([each.body_seconds for each in timings[1:]])),
        host_copy=host_copy,
        transfer=transfer,
        num_tokens=count * rows * seq_len,
    )


def median(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of an action, after one that does not count."""
    action()
    seconds: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def percentages(found: Stages) -> str:
    """`server 20 %, network 55 %, ...` of a request's time."""
    whole = sum(found.seconds.values()) or 1.0
    shares = {name.replace("_", " "): seconds / whole for name, seconds in found.seconds.items() if seconds}
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def _widen(stored: torch.Tensor) -> None:
    for batch in stored:  # as a loader does: fresh memory for all of them at once costs far more
        widened(batch, torch.int64)


def _transfer(stored: torch.Tensor, device: torch.device) -> None:
    for batch in stored:
        batch.to(device, non_blocking=True).to(torch.int64)
    torch.cuda.synchronize(device)
