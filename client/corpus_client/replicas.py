"""Replicas of one service: requests spread over them, failures ridden out.

Any replica answers any request with the same bytes, so a failure is answered by asking again: at
once elsewhere, after a back-off here, until the request's deadline.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from corpus_client import errors
from corpus_client.attribution import Stopwatch
from corpus_client.control import TIMEOUT_SECONDS, BoundPlan, ControlPlane
from corpus_client.endpoint import Endpoint
from corpus_client.transport import Connection
from corpus_client.wire import ArrayRequest

BACKOFF_FIRST_SECONDS = 0.05
BACKOFF_LAST_SECONDS = 2.0
PROBE_LAST_SECONDS = 30.0

T = TypeVar("T")

log = logging.getLogger("corpus_client")


class Stopped(Exception):
    """The replicas were stopped from another thread; never leaves this package."""


@dataclass(slots=True)
class Replica:
    """One server.

    Args:
        connections: open ones; requests are sent on the last, an older one is closed behind its last answer.
        retry_at: `time.monotonic` seconds before which it is left alone.
        probe_at: before it, replicas that work are preferred.
        knows_plan: whether the bound plan was accepted there.
        refused: why it is not used any more, or "".
    """

    endpoint: Endpoint
    control: ControlPlane
    connections: list[Connection] = field(default_factory=list)
    num_in_flight: int = 0
    num_failures: int = 0
    retry_at: float = 0.0
    probe_at: float = 0.0
    last_used: int = 0
    knows_plan: bool = False
    refused: str = ""


@dataclass(slots=True)
class Exchange:
    """A request on its way; without a connection it waits to be sent (again)."""

    request: ArrayRequest
    replica: Replica | None = None
    connection: Connection | None = None


class Replicas:
    """The servers behind one loader.

    `stop` may be called from any thread; everything else belongs to one thread at a time.

    Args:
        urls: base URLs of the replicas.
        headers: sent with every request (an authorization, say).
        deadline_seconds: for each request, counted from when its answer is awaited.
        progress_timeout_seconds: longest wait for the next byte before the request is repeated.
        plan: what `bind` returned for the same URLs; posted to each replica before its first request.
        stopwatch: of the thread that uses them; told what it does.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        headers: Mapping[str, str] | None = None,
        deadline_seconds: float = 300.0,
        progress_timeout_seconds: float = 30.0,
        plan: BoundPlan | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._stopwatch = stopwatch if stopwatch is not None else Stopwatch()
        endpoints = [Endpoint.parse(url) for url in urls]
        self._headers = dict(headers or {})
        self._deadline_seconds = deadline_seconds
        self._progress_timeout = progress_timeout_seconds
        timeout = min(TIMEOUT_SECONDS, deadline_seconds)
        self._replicas = [
            Replica(each, ControlPlane(each, headers=headers, timeout_seconds=timeout)) for each in endpoints
        ]
        self._plan = plan
        self._jitter = random.Random()
        self._num_sent = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self.num_retries = 0
        self.received_bytes = 0

    def __enter__(self) -> Replicas:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def bind(self, plan: Mapping[str, Any]) -> BoundPlan:
        """Post the plan to every replica that answers; wait for the first within the deadline.

        Raises:
            ReplicaRefused: a replica has another corpus under that name, or makes another plan of it.
        """
        self._plan = self.ask(lambda control: control.post_plan(plan))
        for replica in self._replicas:
            try:
                self._introduce_plan(replica)
            except (errors.TransportError, errors.ServerError) as error:
                self._penalise(replica, error)
                log.warning("%s is left out for now: %s", replica.endpoint.url, error)
            except errors.ReplicaRefused:
                pass  # collected below, so that one message names them all
        if any(replica.refused for replica in self._replicas):
            raise self._refusal()
        return self._plan

    def ask(self, question: Callable[[ControlPlane], T]) -> T:
        """The answer of whichever replica gives one first; it knows the plan then."""

        def attempt(replica: Replica, deadline: float) -> T:
            self._introduce_plan(replica)
            return question(replica.control)

        return self._persist(attempt)

    def begin(self, request: ArrayRequest) -> Exchange:
        """Send the request if a replica is ready; never waits for one. `finish` mends what fails here."""
        exchange = Exchange(request=request)
        now = time.monotonic()
        replica = min(self._live(), key=self._preference(now))
        if replica.retry_at <= now:
            try:
                self._send(exchange, replica, now + self._deadline_seconds)
            except (errors.TransportError, errors.ServerError) as error:
                self._raise_if_stopped()
                self._penalise(replica, error)
            except errors.ReplicaRefused:
                pass  # others may be left; `finish` finds out
        return exchange

    def finish(self, exchange: Exchange, buffer: memoryview) -> None:
        """Receive the right answer at the start of `buffer`, from whichever replica gives it.

        Raises:
            ServerError: the request itself is wrong (4xx).
            DeadlineExceeded: chained from the last failure.
            ReplicaRefused: no replica is left that has this plan.
        """

        def attempt(replica: Replica, deadline: float) -> None:
            if exchange.connection is None:
                self._send(exchange, replica, deadline, next_to_come=True)
            self._receive(exchange, buffer, deadline)

        if exchange.connection is not None and not exchange.connection.usable:
            self._recall(exchange)  # what was asked before it on that connection has failed
            self.num_retries += 1
        sent_to = exchange.replica if exchange.connection is not None else None
        self._persist(attempt, first=sent_to)

    def stop(self) -> None:
        """Wake whoever waits here with `Stopped`, for good."""
        self._stop.set()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.abort()

    def close(self) -> None:
        """Close every connection; by the thread that used them, or after it ended."""
        self.stop()
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            connection.close()
        for replica in self._replicas:
            replica.connections.clear()
            replica.control.close()

    def _persist(self, attempt: Callable[[Replica, float], T], first: Replica | None = None) -> T:
        """Try until it succeeds, the failure is the caller's, or the deadline has passed."""
        deadline = time.monotonic() + self._deadline_seconds
        last: Exception | None = None
        for tries in itertools.count():
            replica = first if first is not None else self._await_replica(deadline, tries, last)
            first = None
            self.num_retries += tries > 0
            try:
                answer = attempt(replica, deadline)
            except (errors.TransportError, errors.ServerError) as error:
                self._raise_if_stopped()
                if isinstance(error, errors.ServerError) and not (
                    error.passing or isinstance(error, errors.UnknownPlan)
                ):
                    raise
                self._penalise(replica, error)
                last = error
            except errors.ReplicaRefused as error:
                log.error("%s", error)
                last = error
            else:
                replica.num_failures = 0
                replica.retry_at = replica.probe_at = 0.0
                return answer
        raise AssertionError("unreachable")

    def _await_replica(self, deadline: float, tries: int, last: Exception | None) -> Replica:
        """The best replica, waited for if all are backing off."""
        live = self._live()
        now = time.monotonic()
        replica = min(live, key=self._preference(now))
        self._stopwatch.enter("retry")
        if self._stop.wait(max(0.0, min(replica.retry_at, deadline) - now)):
            raise Stopped
        if time.monotonic() >= deadline:
            names = ", ".join(each.endpoint.url for each in live)
            raise errors.DeadlineExceeded(
                f"no good answer from {names} within {self._deadline_seconds:g} s ({tries} tries); "
                f"last: {last}; is the server running? deadline_seconds= sets how long to wait"
            ) from last
        return replica

    def _preference(self, now: float) -> Callable[[Replica], tuple[float, float, int, int]]:
        """Ready before waiting, healthy before failing, then the least busy, then in turn."""
        return lambda replica: (
            max(replica.retry_at, now),
            max(replica.probe_at, now),
            replica.num_in_flight,
            replica.last_used,
        )

    def _live(self) -> list[Replica]:
        live = [replica for replica in self._replicas if not replica.refused]
        if not live:
            raise self._refusal()
        return live

    def _refusal(self) -> errors.ReplicaRefused:
        return errors.ReplicaRefused("; ".join(each.refused for each in self._replicas if each.refused))

    def _send(
        self, exchange: Exchange, replica: Replica, deadline: float, *, next_to_come: bool = False
    ) -> None:
        """Put the request on the wire. next_to_come: no other answer may come before its own."""
        self._stopwatch.enter("send")
        self._introduce_plan(replica)
        connection = replica.connections[-1] if replica.connections else self._connect(replica)
        if next_to_come and connection.num_waiting:
            connection = self._connect(replica)
        try:
            connection.send(exchange.request.path, deadline=deadline)
        except BaseException:
            self._discard(replica, connection)
            raise
        self._num_sent += 1
        replica.last_used = self._num_sent
        replica.num_in_flight += 1
        exchange.replica, exchange.connection = replica, connection

    def _receive(self, exchange: Exchange, buffer: memoryview, deadline: float) -> None:
        replica, connection = self._recall(exchange)
        try:
            connection.receive_into(buffer, exchange.request, deadline=deadline)
        finally:
            superseded = not connection.num_waiting and connection is not replica.connections[-1]
            if superseded or not connection.usable:
                self._discard(replica, connection)
        self.received_bytes += exchange.request.num_bytes

    def _recall(self, exchange: Exchange) -> tuple[Replica, Connection]:
        """Take an exchange off its connection."""
        replica, connection = exchange.replica, exchange.connection
        assert replica is not None
        assert connection is not None
        exchange.connection = None
        replica.num_in_flight -= 1
        return replica, connection

    def _connect(self, replica: Replica) -> Connection:
        connection = Connection(
            replica.endpoint,
            headers=self._headers,
            progress_timeout_seconds=self._progress_timeout,
            stopwatch=self._stopwatch,
        )
        with self._lock:
            self._connections.add(connection)
        # After the lock: `stop` either sees the connection or is seen here.
        self._raise_if_stopped()
        replica.connections.append(connection)
        return connection

    def _discard(self, replica: Replica, connection: Connection) -> None:
        connection.close()
        with suppress(ValueError):
            replica.connections.remove(connection)
        with self._lock:
            self._connections.discard(connection)

    def _introduce_plan(self, replica: Replica) -> None:
        """Make the plan known there, or refuse the replica by name."""
        if replica.knows_plan or self._plan is None:
            return
        try:
            there = replica.control.post_plan(self._plan.document)
        except errors.ServerError as error:
            if error.passing:
                raise
            replica.refused = f"{replica.endpoint.url} refuses the plan {self._plan.plan_id}: {error}"
            raise errors.ReplicaRefused(replica.refused) from error
        if there.plan_id != self._plan.plan_id:
            replica.refused = (
                f"{replica.endpoint.url} makes plan {there.plan_id} of the plan {self._plan.plan_id}: "
                "does it run another version?"
            )
            raise errors.ReplicaRefused(replica.refused)
        replica.knows_plan = True

    def _penalise(self, replica: Replica, error: errors.TransportError | errors.ServerError) -> None:
        """Leave the replica alone for a while that grows with its failures."""
        for connection in list(replica.connections):
            if not connection.num_waiting:
                self._discard(replica, connection)  # the same restart broke it, in all likelihood
        if isinstance(error, errors.ConnectionFailed) and error.stale:
            return
        if isinstance(error, errors.UnknownPlan | errors.AnswerCorrupt):
            replica.knows_plan = False  # a wrong plan header: posting the plan tells chance from error
        doublings = min(replica.num_failures, 16)
        replica.num_failures += 1
        delay = min(BACKOFF_LAST_SECONDS, BACKOFF_FIRST_SECONDS * 2**doublings)
        delay *= self._jitter.uniform(0.5, 1.0)
        if isinstance(error, errors.ServerError) and error.retry_after_seconds is not None:
            delay = max(delay, error.retry_after_seconds)
        now = time.monotonic()
        replica.retry_at = now + delay
        # While others work, a failing replica is probed ever more rarely: each probe may cost a timeout.
        replica.probe_at = now + min(PROBE_LAST_SECONDS, 2.0**doublings)

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise Stopped
