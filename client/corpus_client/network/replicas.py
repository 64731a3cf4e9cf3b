"""Requests over the replicas of one service: retries failures and avoids slow servers.

Any replica answers any request with the same bytes, so a failure is answered by asking again: at once
elsewhere, after a back-off here, until the request's deadline. One thread does all of it, and it alone writes
to the caller's buffer.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from corpus_client import errors
from corpus_client.network import chain, control, wire
from corpus_client.network.control import BoundPlan, Question
from corpus_client.network.options import Network
from corpus_client.network.own_server import OwnServer
from corpus_client.network.pool import Pool
from corpus_client.network.replica import Replica, may_pass
from corpus_client.network.transport import Buffer, Connection
from corpus_client.network.wire import ArrayRequest
from corpus_client.observe.recorder import Recorder

STALL_SECONDS = 1.0
"""Longest silence of a replica while another one works."""

FIRST_SECONDS = 0.5
"""For the first replica to be reached, before another one is asked to bind the plan."""

BIND_SECONDS = 1.0
"""For all replicas to accept the plan, once one has; a slower one is told when it is used."""

T = TypeVar("T")

log = logging.getLogger("corpus_client")


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request on a connection; `started` is when its response began to be awaited."""

    replica: Replica
    connection: Connection
    sent_at: float
    started: float


@dataclass(slots=True)
class Exchange:
    """A request and where it is on its way; nowhere: it waits to be sent (again)."""

    request: ArrayRequest
    attempt: _Attempt | None = None


class Replicas(AbstractContextManager["Replicas"]):
    """The servers behind one loader: base URLs, of whose host names each address is a replica.

    `stop` may be called from any thread; everything else belongs to one thread at a time.

    Args:
        urls: base URLs, or a server that is started if it does not run.
        plan: what `bind` returned for the same URLs; posted to a replica that does not know it.
        recorder: of the thread that uses them; measures and counts what it does.

    Raises:
        ServerNotStarted: there is no such server, and why.
    """

    def __init__(
        self,
        urls: str | Sequence[str] | OwnServer,
        network: Network | None = None,
        *,
        plan: BoundPlan | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.own_server = urls if isinstance(urls, OwnServer) else None
        if isinstance(urls, OwnServer):
            self._hold = urls.hold()
            urls.start()
            urls = urls.url
        urls = urls if isinstance(urls, Collection) and not isinstance(urls, str | bytes) else (urls,)
        if not urls:
            raise errors.InvalidArgument("urls must name at least one server, got none")
        self.recorder = recorder or Recorder()
        self.network = network if network is not None else Network()
        self._pool = Pool(urls, self.network, self.recorder, plan, self.own_server)
        self._num_sent = 0

    def __exit__(self, *_: object) -> None:
        self.close()

    def bind(self, plan: Mapping[str, Any], after: BoundPlan | None = None) -> BoundPlan:
        """Post the plan to every replica that answers soon; wait for the first within the deadline.

        Args:
            plan: with its decisions; with `after` a stage that continues that plan, of these replicas.

        Raises:
            InvalidArgument: the decisions are no lines of JSON.
            ReplicaRefused: a replica has another corpus under that name, or makes another plan of it.
            HostNotFound, CertificateRefused, AccessDenied: a replica cannot be used at all.
        """
        pool = self._pool
        with pool.changed:
            # If it can be reached, the first server decides which corpus is meant.
            pool.changed.wait_for(pool.settled, FIRST_SECONDS)
        if after is None:
            root, lines = _split(plan)
            pool.plan = bound = self.ask(control.post_plan(root))
        else:
            bound, lines = after, [control.json_text(plan).decode()]
        for part in chain.parts_of(lines):
            pool.plan = bound = self.ask(control.post_decisions(bound, part))
        with pool.changed:
            # A name that does not exist is an error now, not a warning in the middle of a run.
            pool.changed.wait_for(pool.looked_up, self.network.connect_seconds)
        _, *waiting = sorted(pool.live(), key=lambda each: -each.last_used)  # who answered was asked last

        def introduce(replica: Replica) -> None:
            try:
                pool.introduce(replica)
            except Exception as error:  # noqa: BLE001 - kept as the reason why the replica is refused
                pool.failed(replica, error)
            finally:
                waiting.remove(replica)

        with pool.changed:
            for replica in list(waiting):
                pool.run(introduce, replica)
            pool.changed.wait_for(lambda: not waiting, BIND_SECONDS)
            for replica in waiting:
                log.warning("%s has not answered yet; going on without it", replica.endpoint.name)
            if (refusal := pool.refusal()) is not None:
                raise refusal
        return bound

    def follow(self, plan: BoundPlan) -> None:
        """Go on by a plan that continues the one so far; from any thread."""
        self._pool.follow(plan)

    def ask(self, question: Question[T], *, deadline_seconds: float | None = None) -> T:
        """Return the response of whichever replica gives one; one that does not know the plan is told."""
        seconds = deadline_seconds or self.network.deadline_seconds
        return self._answered(None, partial(self._pool.ask, question), seconds)

    def begin(self, request: ArrayRequest) -> Exchange:
        """Send the request if a replica can be reached now; else `finish` sends it."""
        exchange = Exchange(request=request)
        self.recorder.enter("send")
        deadline = time.monotonic() + self.network.connect_seconds
        found = self._pool.acquire(deadline, idle=False)
        if found is not None:
            exchange.attempt = self._send(request.path, *found)
        return exchange

    def finish(self, exchange: Exchange, buffer: Buffer) -> None:
        """Receive the right response at the start of `buffer`, from whichever replica gives it.

        Raises:
            ServerError: the request itself is wrong (4xx).
            DeadlineExceeded, ReplicaRefused: no replica answered in time, or none is left that has this plan.
        """
        request, attempt = exchange.request, exchange.attempt
        exchange.attempt = None
        receive = partial(Connection.receive_into, buffer=buffer, request=request)
        headers = self._answered(request.path, receive, self.network.deadline_seconds, attempt)
        self.recorder.received_bytes += wire.array_bytes(headers, request)

    def _answered(
        self,
        path: str | None,
        receive: Callable[..., T],
        seconds: float,
        attempt: _Attempt | None = None,
    ) -> T:
        """Send a request until it has a right response; return what `receive` makes of that.

        path: of an array; None: `receive` asks, too.
        attempt: the request is on the wire already.
        """
        started = time.monotonic()
        deadline = started + seconds
        failed = again = False
        if attempt is not None:
            attempt.started = started
            if not attempt.connection.usable:
                self._end(attempt)  # what was asked before it on that connection has failed
                attempt, again = None, True
        while True:
            while attempt is None:
                self.recorder.enter("retry" if failed else "send")
                found = self._pool.acquire(deadline, idle=True, since=started)
                if found is None:
                    raise self._pool.deadline_exceeded(seconds)
                attempt = self._send(path, *found)
                self.recorder.num_retries += again
                again = False
            try:
                waited = not attempt.connection.arrived()
                response = receive(
                    attempt.connection,
                    deadline=min(deadline, attempt.started + self.network.attempt_seconds),
                    patience=partial(self._patience, attempt),
                )
            except errors.CorpusClientError as error:
                self._end(attempt)
                if not may_pass(error) and not isinstance(error, errors.ReplicaUnusable):
                    raise
                self._pool.failed(attempt.replica, error)
                attempt, failed, again = None, True, True
                continue
            except BaseException:
                # An interrupt (Ctrl-C): the response may still come, and must not be the next request's.
                attempt.connection.close()
                self._end(attempt)
                raise
            now = time.monotonic()
            attempt.replica.latency.add(now - attempt.sent_at, now, waited=waited)
            attempt.replica.succeeded()
            self._end(attempt)
            return response

    def stop(self) -> None:
        """Wake whoever waits here with `Stopped`, for good."""
        self._pool.stop()

    def close(self) -> None:
        """Close every connection; by the thread that used them, or after it ended."""
        self._pool.close()
        if self.own_server is not None:
            self._hold.close()

    def _send(self, path: str | None, replica: Replica, connection: Connection) -> _Attempt | None:
        """Put the request for an array on the wire; return its attempt, or None if that failed."""
        now = time.monotonic()
        attempt = _Attempt(replica, connection, now, now)
        self._num_sent += 1
        with self._pool.changed:
            # Before it is sent: from here on no other thread closes the connection.
            replica.last_used = self._num_sent
            replica.num_in_flight += 1
            connection.num_in_flight += 1
        try:
            if path is not None:
                connection.send(path, deadline=now + self.network.attempt_seconds)
        except (errors.TransportError, errors.ReplicaUnusable) as error:
            self._end(attempt)
            self._pool.failed(replica, error)
            return None
        return attempt

    def _patience(self, attempt: _Attempt) -> float:
        """Return the longest silence to accept from this replica."""
        longest = min(self.network.progress_seconds, self.network.attempt_seconds)
        return min(longest, STALL_SECONDS) if self._pool.others(attempt.replica) else longest

    def _end(self, attempt: _Attempt) -> None:
        """Take an attempt off its connection, which is closed if it broke or a newer one took its place."""
        replica, connection = attempt.replica, attempt.connection
        with self._pool.changed:
            replica.num_in_flight -= 1
            connection.num_in_flight -= 1
            superseded = not connection.num_in_flight and connection not in replica.connections[-1:]
            if superseded or not connection.usable:
                self._pool.discard(replica, connection)


def _split(plan: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    try:
        root, lines = chain.split(plan)
        if not all(isinstance(json.loads(line), list | dict) for line in lines):
            raise ValueError("one is no list and no object")
    except ValueError as error:
        raise errors.InvalidArgument(
            f"the plan's {chain.DECISIONS} must be lines of JSON: {error}"
        ) from error
    return root, lines
