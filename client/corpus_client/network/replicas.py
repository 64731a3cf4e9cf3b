"""Requests over the replicas of one service: retries failures and avoids slow servers.

Any replica answers any request with the same bytes, so a failure is answered by asking again: at once
elsewhere, after a back-off here, until the request's deadline. A response that begins far later than usual is
asked for a second time (a hedged request), on another connection: whichever comes first is right. One thread
does all of it, and it alone writes to the caller's buffer.
"""

from __future__ import annotations

import json
import logging
import math
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
from corpus_client.network.transport import LOOK_SECONDS, Buffer, Connection, first_arrived
from corpus_client.network.wire import ArrayRequest
from corpus_client.observe.attribution import Phase
from corpus_client.observe.recorder import Recorder

STALL_SECONDS = 1.0
"""Longest silence of a replica while another one works."""

HEDGE_SHARE, MAX_HEDGES = 0.02, 8.0
"""Of all requests, how many may be sent again because a response is late, and how many at once."""

OPEN_SECONDS = 0.01
"""Between two looks at whether the connection for a hedged request is open."""

FIRST_SECONDS = 0.5
"""For the first replica to be reached, before another one is asked to bind the plan."""

BIND_SECONDS = 1.0
"""For all replicas to accept the plan, once one has; a slower one is told when it is used."""

T = TypeVar("T")

log = logging.getLogger("corpus_client")

_WARNED: set[str] = set()  # what servers said of plans: once a process, however many loaders have the plan


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request on a connection.

    started: when its response began to be awaited; began: when its first byte was there.
    """

    replica: Replica
    connection: Connection
    sent_at: float
    started: float
    began: float = 0.0


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
        self._spare_hedges = MAX_HEDGES

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
            post, seconds = control.post_plan(root), self.network.deadline_seconds
            receive = partial(pool.ask, post)
            pool.plan = bound = self._answered(None, receive, seconds, is_first=True)
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
        for said in set(bound.warnings) - _WARNED:
            _WARNED.add(said)
            log.warning("plan %s: %s", bound.plan_id[:12], said)
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
        is_first: bool = False,
    ) -> T:
        """Send a request until it has a right response; return what `receive` makes of that.

        path: of an array; None: `receive` asks, too.
        attempt: the request is on the wire already.
        is_first: perhaps no server was started; there is a limit for the first connection to any.
        """
        started = time.monotonic()
        deadline = started + seconds
        again = False
        waits_for: Phase = "send"  # the phase until the request is on the wire
        attempts: list[_Attempt] = []  # at most two, the older one first
        if attempt is not None:
            attempt.started = started
            if attempt.connection.usable:
                attempts.append(attempt)
            else:
                self._end(attempt)  # what was asked before it on that connection has failed
                again = True
        while True:
            while not attempts:
                self.recorder.enter(waits_for)
                found = self._reached(started, seconds, is_first=is_first)
                if (sent := self._send(path, *found)) is not None:
                    attempts.append(sent)
                self.recorder.num_retries += again
                again = False
            attempt = attempts[0]
            try:
                waited = not attempt.connection.arrived()
                if path is not None:
                    self.recorder.enter("response")
                    attempt = self._first(path, attempts, deadline) if waited else attempt
                    attempt.began = time.monotonic() if waited else attempt.started
                response = receive(
                    attempt.connection,
                    deadline=min(deadline, attempt.started + self.network.attempt_seconds),
                    patience=partial(self._patience, attempt),
                )
            except errors.CorpusClientError as raised:
                error = raised
                if path is not None:  # the plan was bound: what is wrong is the replica
                    error = self._pool.refusal_of(attempt.replica, raised) or raised
                attempts.remove(attempt)
                self._end(attempt)
                if (final := self._final(error)) is not None:
                    self._abandon(attempts)
                    if final is error:
                        raise
                    raise final from error
                if isinstance(error, errors.NoProgress) and time.monotonic() >= deadline:
                    self._abandon(attempts)
                    over = self._pool.deadline_exceeded(
                        started, seconds, "deadline_seconds", (attempt.replica, error)
                    )
                    raise over from over.__cause__
                self._pool.failed(attempt.replica, error)
                again = not attempts
                waits_for = "retry" if again else "send"
                if again and getattr(error, "kind", "") == "not-staged":
                    waits_for = "bucket"
                    self.recorder.enter(waits_for, staging_seconds=math.inf)  # all that it has waited
                continue
            except BaseException:
                # An interrupt (Ctrl-C): a response may still come, and must not be the next request's.
                self._abandon(attempts)
                raise
            attempts.remove(attempt)
            self._succeeded(attempt, attempts, waited=waited)
            return response

    def _reached(self, started: float, seconds: float, *, is_first: bool) -> tuple[Replica, Connection]:
        """Return a server and an idle connection to it, as soon as there is one; see `_answered`.

        Raises:
            DeadlineExceeded: there was none in time.
        """
        while True:
            option, most = "deadline_seconds", seconds
            reach = seconds if self._pool.was_reached or not is_first else self._pool.reach_seconds()
            if reach < seconds:
                option, most = "reach_seconds", reach
            if (found := self._pool.acquire(started + most, idle=True, since=started)) is not None:
                return found
            if option == "deadline_seconds" or not self._pool.was_reached:
                raise self._pool.deadline_exceeded(started, most, option)

    def _final(self, error: errors.CorpusClientError) -> errors.CorpusClientError | None:
        """Return what to raise after an error that asking again cannot help; None: it may."""
        if self.own_server is not None and getattr(error, "kind", "") == "corpus-changed":
            return errors.LocalCopyMismatch(
                f"{self.own_server.what}: {error}; a loader started this server, which has the files "
                "as they were then: close all loaders of this path, and make them anew"
            )
        return None if may_pass(error) or isinstance(error, errors.ReplicaUnusable) else error

    def _first(self, path: str, attempts: list[_Attempt], deadline: float) -> _Attempt:
        """Wait for the first byte of a response, and return its attempt; ask again if it is late.

        Raises:
            NoProgress: the replica of the first attempt was silent for too long; its connection is closed.
        """
        attempt = attempts[0]
        late_at = attempt.started + attempt.replica.late_after() if self._spare_hedges > 0 else math.inf
        while True:
            now = time.monotonic()
            left = min(deadline, attempt.started + self._patience(attempt)) - now
            if left <= 0:
                raise attempt.connection.give_up()
            if len(attempts) == 1 and late_at <= now:
                found = self._pool.ready(idle=True, instead_of=attempt.replica)
                if found is not None and (second := self._send(path, *found)) is not None:
                    attempts.append(second)
                    self.recorder.num_hedged += 1
                    # If the second one wins, all that waits behind the first one is sent again.
                    self._spare_hedges -= attempt.connection.num_in_flight
                left = min(left, LOOK_SECONDS if len(attempts) > 1 else OPEN_SECONDS)
            else:
                left = min(left, LOOK_SECONDS, late_at - now if len(attempts) == 1 else math.inf)
            connection = first_arrived([each.connection for each in attempts], left)
            if connection is not None:
                return next(each for each in attempts if each.connection is connection)

    def _succeeded(self, attempt: _Attempt, others: list[_Attempt], *, waited: bool) -> None:
        """Note that an attempt brought its response, before the others of the same request."""
        now = time.monotonic()
        self._abandon(others)
        replica = attempt.replica
        replica.latency.add(now - attempt.sent_at, now, waited=waited)
        replica.waits.append(attempt.began - attempt.started)
        replica.succeeded()
        self._end(attempt)
        for other in others:
            if other.replica is not replica and other.started < attempt.started:
                name, seconds = other.replica.endpoint.name, now - other.started
                late = errors.NoProgress(f"{name}: nothing came for {seconds:.1f} s, another server answered")
                self._pool.failed(other.replica, late)

    def _abandon(self, attempts: Sequence[_Attempt]) -> None:
        """Close the connections of attempts whose responses nobody will read."""
        for attempt in attempts:
            attempt.connection.close()
            self._end(attempt)

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
        self._spare_hedges = min(MAX_HEDGES, self._spare_hedges + HEDGE_SHARE)
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
