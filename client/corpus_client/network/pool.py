"""The servers behind a loader: looked up, connected to, chosen, left alone when they fail.

Everything that may block for seconds (name service, connecting, TLS, posting a plan) happens in short-lived
background threads. The thread that wants batches only waits for the first server that is ready, so one that
does not answer delays nothing while another one does, and `stop` wakes it at once. So it waits for the
response to a question, too.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from corpus_client import errors
from corpus_client.network import control
from corpus_client.network.asking import HttpClient
from corpus_client.network.control import BoundPlan, Question
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.options import Network
from corpus_client.network.own_server import OwnServer
from corpus_client.network.replica import Replica, may_pass
from corpus_client.network.transport import LOOK_SECONDS, Connection
from corpus_client.observe.recorder import Recorder

LOOKUP_SECONDS = 30.0
"""Between two look-ups of a name: usual lifetime of a record for services that come and go."""

LOOKUP_TRIES = 3
"""A second apart, while the name service does not answer at all."""

TELL_FIRST_SECONDS, TELL_SECONDS = 1.0, 10.0
"""After which, and then how often, the log says that a request waits for a server."""

REACH_SECONDS, HERE_SECONDS = 30.0, 5.0
"""For the first connection of a new loader to any server; to those of this host: one may be starting."""

_OTHER_CORPORA = frozenset({"fingerprint-mismatch", "unknown-corpus"})  # kinds of `ServerError`

T = TypeVar("T")

log = logging.getLogger("corpus_client")


class Stopped(Exception):
    """The servers were let go of from another thread; never leaves this package."""


@dataclass(slots=True)
class _Name:
    """A host given by name, to be looked up (again) when it is `due`; infinite while that is being done."""

    endpoint: Endpoint
    due: float = 0.0
    num_failures: int = 0
    found: bool = False
    refused: Exception | None = None


class Pool:
    """Servers and their open connections; every method may be called from any thread.

    changed: guards everything here and in the replicas; notified of whatever a waiting thread may want.
    """

    def __init__(
        self,
        urls: Sequence[str],
        network: Network,
        recorder: Recorder,
        plan: BoundPlan | None = None,
        own_server: OwnServer | None = None,
    ) -> None:
        self.network = network
        self._own_server = own_server
        self.changed = threading.Condition()
        self.plan = plan
        self._recorder = recorder
        self._names: list[_Name] = []
        self._replicas: list[Replica] = []
        self._clients: dict[Endpoint, HttpClient] = {}  # that no thread uses
        self.was_reached = False  # whether any of the servers was ever connected to
        self._stopped = False
        self._num_background = 0
        self._last_error: Exception | None = None
        self._last_failure = "nothing came in time"
        self._last_failed_at = -math.inf
        self._told_at = 0.0  # when the log said last that a request waits
        for endpoint in [Endpoint.parse(url, network) for url in dict.fromkeys(urls)]:
            if endpoint.address is None:
                self._names.append(_Name(endpoint))
            else:
                self._replicas.append(Replica(endpoint))
        if plan is not None:
            # Else all clients of a service would begin with the same server. Where the plan is still to be
            # agreed on, the first server decides which corpus is meant.
            random.shuffle(self._replicas)

    def live(self) -> list[Replica]:
        """Return the replicas that may be used, or raise why there is none; look names up that are due."""
        with self.changed:
            if self._stopped:
                raise Stopped
            for name in self._names:
                if name.due <= time.monotonic():
                    name.due = math.inf
                    self.run(self._look_up, name)
            live = [replica for replica in self._replicas if replica.usable]
            known = all(name.found or name.refused for name in self._names)
            if not live and known and (refusal := self.refusal()) is not None:
                raise refusal
            return live

    def reach_seconds(self) -> float:
        """Return how long to try to connect to any server; one that is not there on this host refuses."""
        if self.network.reach_seconds is not None:
            return self.network.reach_seconds
        with self.changed:
            are_here = [each.endpoint.is_here for each in self._replicas]
            return HERE_SECONDS if self.looked_up() and are_here and all(are_here) else REACH_SECONDS

    def looked_up(self) -> bool:
        """Return whether every name's first look-up has ended, well or not."""
        return all(name.found or name.num_failures for name in self._names)

    def settled(self) -> bool:
        """Connect to the servers; return whether the first can be asked, or not for now."""
        self.ready(idle=True)
        return self.looked_up() and not (self._replicas and self._replicas[0].opening)

    def refusal(self) -> Exception | None:
        """Return why servers are not used any more, as one error; None: all are in use."""
        every = [name.refused for name in self._names] + [replica.refused for replica in self._replicas]
        refused = [error for error in every if error is not None]
        if len(refused) > 1:
            return errors.ReplicaUnusable("; ".join(map(str, refused)))
        return refused[0] if refused else None

    def ready(self, *, idle: bool, instead_of: Replica | None = None) -> tuple[Replica, Connection] | None:
        """Return the best replica and an open connection to it, if any; open more behind.

        idle: only a connection with no pending response.
        instead_of: a replica to leave out while another one works.
        """
        with self.changed:
            now = time.monotonic()
            found, without = [], []
            left_out = instead_of if instead_of is not None and self.others(instead_of) else None
            for replica in self.live():
                if replica is left_out:
                    continue
                connection = replica.connection(idle=idle)
                if connection is None:
                    without.append(replica)
                elif replica.retry_at <= now:
                    found.append((replica, connection))
            healthy = any(replica.probe_at <= now for replica, _ in found)
            # A busy one gets a second connection only where no other is idle.
            for replica in [] if idle and healthy else without:
                if not replica.opening and (replica.probe_at if healthy else replica.retry_at) <= now:
                    replica.opening = Connection(replica.endpoint, self.network, recorder=self._recorder)
                    self.run(self._open, replica, replica.opening)
            return min(found, key=lambda each: each[0].cost(now), default=None)

    def acquire(
        self, deadline: float, *, idle: bool, since: float | None = None
    ) -> tuple[Replica, Connection] | None:
        """Wait for what `ready` returns; None: the deadline passed.

        since: when the request began to wait; then wait also while all servers are left alone after failures.
        """
        with self.changed:
            while (found := self.ready(idle=idle)) is None and time.monotonic() < deadline:
                if since is None and not self._num_background:
                    break
                now, told_at = time.monotonic(), 0.0 if since is None else self._tell_waiting(since, deadline)
                retries, look_ups = (
                    (each.retry_at for each in self._replicas),
                    (each.due for each in self._names),
                )
                # A deadline that has passed since it was looked at counts; the other times are over then.
                times = [deadline, *(each for each in (told_at, *retries, *look_ups) if each > now)]
                self.changed.wait(max(0.0, min(times) - now))
            return found

    def _tell_waiting(self, since: float, deadline: float) -> float:
        """Let the log say now and then that a request waits, and for how long at most; return when next."""
        now = time.monotonic()
        due = self._told_at + TELL_SECONDS if self._told_at > since else since + TELL_FIRST_SECONDS
        if now < due:
            return due
        self._told_at = now
        log.warning(
            "no response for %.0f s, waiting up to %.0f s in all; last: %s",
            *(now - since, deadline - since, self._last_failure),
        )
        return now + TELL_SECONDS

    def deadline_exceeded(
        self, started: float, seconds: float, option: str, unfinished: tuple[Replica, Exception] | None = None
    ) -> errors.DeadlineExceeded:
        """Return what to raise after so many seconds, with the last failure as its cause.

        option: by which a user says how many.
        unfinished: an attempt that had less than its time; it counts only if nothing else failed since then.
        """
        if unfinished is not None and self._last_failed_at < started:
            self._note_failure(unfinished[1], named(*unfinished))
        names = ", ".join(each.endpoint.name for each in self._replicas or self._names)
        answered = isinstance(self._last_error, errors.ServerError | errors.ResponseCorrupt)
        hint = "" if answered else "is the server running? "
        error = errors.DeadlineExceeded(
            f"no good response from {names} within {seconds:g} s; last: {self._last_failure}; {hint}"
            f"{option}= sets how long to wait"
        )
        error.__cause__ = self._last_error
        return error

    def others(self, replica: Replica) -> bool:
        """Return whether another replica works, so that this one need not be waited for."""
        with self.changed:
            now = time.monotonic()
            return any(
                other.probe_at <= now and other.usable and other.connection(idle=False) is not None
                for other in self._replicas
                if other is not replica
            )

    def introduce(self, replica: Replica) -> None:
        """Make the plan known there; raise `ReplicaRefused` if it would give other tokens."""
        if (plan := self.plan) is None:
            return
        try:
            plan_id = self._introduced(replica.endpoint, plan)
        except errors.ServerError as error:
            if error.passing or isinstance(error, errors.AccessDenied):
                raise
            raise _refused(replica, plan, error) from error
        if plan_id != plan.plan_id:
            raise errors.ReplicaRefused(
                f"{replica.endpoint.name} makes plan {plan_id} of the plan {plan.plan_id}: "
                "does it run another version?"
            )
        replica.plan_in_doubt = False

    def refusal_of(self, replica: Replica, error: Exception) -> errors.ReplicaRefused | None:
        """Return what an error says of a replica that kept the plan and has other corpora now; else None."""
        if self.plan is not None and isinstance(error, errors.ServerError) and error.kind in _OTHER_CORPORA:
            return _refused(replica, self.plan, error)
        return None

    def _introduced(self, endpoint: Endpoint, plan: BoundPlan) -> str:
        """Post as much of a plan, from its end, as the server does not know; return its id there."""
        questions = control.introductions(plan)
        first = len(questions) - 1
        while True:
            try:
                plan_id = self._ask(endpoint, questions[first]())
                break
            except errors.UnknownPlan:
                if first == 0:
                    raise
                first -= 1
        for question in questions[first + 1 :]:
            plan_id = self._ask(endpoint, question())
        return plan_id

    def follow(self, plan: BoundPlan) -> None:
        """Introduce this plan from now on; it continues the one so far."""
        with self.changed:
            self.plan = plan

    def ask(
        self, question: Question[T], connection: Connection, *, deadline: float, patience: Callable[[], float]
    ) -> T:
        """Return the response of the server to which there is this connection, as `receive_into` does."""
        endpoint, response = connection.endpoint, Future[T]()

        def ask() -> None:
            try:
                response.set_result(self._ask(endpoint, question))
            except Exception as error:  # noqa: BLE001 - raised again by whoever waits
                response.set_exception(error)

        started = time.monotonic()
        with self.changed:
            self.run(copy_context().run, ask)  # a trace's span keeps its parent
            while not response.done():
                left = min(deadline, started + patience()) - time.monotonic()
                if self._stopped:
                    raise Stopped
                if left <= 0:
                    raise errors.NoProgress(f"{endpoint.name}: a question was not answered in time")
                self.changed.wait(min(left, LOOK_SECONDS))
        return response.result()

    def _ask(self, endpoint: Endpoint, question: Question[T]) -> T:
        with self.changed:
            client = self._clients.pop(endpoint, None)
        client = client or HttpClient(endpoint, self.network)  # without the lock: nothing is awaited under it
        try:
            return client.ask(question)
        finally:
            with self.changed:
                if self._stopped or endpoint in self._clients:
                    client.close()
                else:
                    self._clients[endpoint] = client

    def failed(self, replica: Replica, error: Exception) -> None:
        """Leave a replica alone: for a while, or for good if asking again cannot help."""
        with self.changed:
            if self._stopped:
                raise Stopped
            self._note_failure(error, named(replica, error))
            for connection in list(replica.connections):
                if not connection.num_in_flight:
                    self.discard(replica, connection)  # the same restart broke it, in all likelihood
            if isinstance(error, errors.UnknownPlan | errors.ResponseCorrupt | errors.NoProgress):
                # After a wrong plan header posting the plan tells chance from error. A silent server must
                # answer that, in the background, before the loop waits for it again.
                replica.plan_in_doubt = True
            # A page of a proxy may pass, in the midst of a run; of a server that never answered, it stays.
            is_other = isinstance(error, errors.NotCorpusServer) and not replica.has_answered
            if is_other or not may_pass(error):
                replica.refused = error
                log.error("%s; this server is not used any more", named(replica, error))
            elif not (isinstance(error, errors.ConnectionFailed) and error.stale):
                delay = replica.leave_alone(error, time.monotonic(), self.network.attempt_seconds)
                # From the first failure on, then ever more rarely. Of a name's addresses one may be out of
                # reach for good (IPv6, say); that is no news while another one works. Nor is a new replica
                # that does not know the plan yet: the plan is posted to it next.
                no_news = (isinstance(error, errors.UnknownPlan) and replica.num_failures == 1) or any(
                    each.endpoint.url == replica.endpoint.url and not each.num_failures
                    for each in self._replicas
                )
                if replica.num_failures & (replica.num_failures - 1) == 0:
                    log.log(
                        logging.INFO if no_news else logging.WARNING,
                        "%s; failure %d in a row, asked again in %.2f s",
                        *(named(replica, error), replica.num_failures, delay),
                    )
            self.changed.notify_all()

    def _note_failure(self, error: Exception, said: str) -> None:
        self._last_error, self._last_failure, self._last_failed_at = error, said, time.monotonic()

    def discard(self, replica: Replica, connection: Connection) -> None:
        """Close a connection."""
        with self.changed:
            connection.close()
            with suppress(ValueError):
                replica.connections.remove(connection)

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function that may block, in a thread of its own."""

        def background() -> None:
            try:
                with suppress(Stopped):
                    function(*arguments)
            finally:
                with self.changed:
                    self._num_background -= 1
                    self.changed.notify_all()

        with self.changed:
            self._num_background += 1
        threading.Thread(target=background, name="corpus-network", daemon=True).start()

    def stop(self) -> None:
        """Wake whoever waits here with `Stopped`, for good."""
        with self.changed:
            self._stopped = True
            self.changed.notify_all()
            for replica in self._replicas:
                for connection in filter(None, (*replica.connections, replica.opening)):
                    connection.abort()

    def close(self) -> None:
        """Close every connection; idempotent. A thread that still asks closes its client itself."""
        self.stop()
        with self.changed:
            while self._clients:
                self._clients.popitem()[1].close()
            for replica in self._replicas:
                for connection in list(replica.connections):
                    self.discard(replica, connection)

    def _look_up(self, name: _Name) -> None:
        """Compare a name's addresses with the replicas."""
        try:
            found = name.endpoint.resolve()
        except errors.CorpusClientError as error:
            with self.changed:
                name.num_failures += 1
                name.due = time.monotonic() + 1.0
                self._note_failure(error, str(error))
                if not may_pass(error) or name.num_failures >= LOOKUP_TRIES:
                    name.due, name.refused = math.inf, error
                log.warning("%s", error)
            return
        with self.changed:
            name.due, name.found, name.num_failures = time.monotonic() + LOOKUP_SECONDS, True, 0
            mine = [each for each in self._replicas if each.endpoint.url == name.endpoint.url]
            known = {each.endpoint.address for each in mine}
            for endpoint in random.sample(found, len(found)):
                if endpoint.address not in known:
                    self._replicas.append(Replica(endpoint))
            for replica in mine:
                replica.gone = replica.endpoint.address not in {each.address for each in found}
                if replica.gone and not replica.num_in_flight and not replica.opening:
                    self._replicas.remove(replica)
                    if (client := self._clients.pop(replica.endpoint, None)) is not None:
                        client.close()
                    for connection in list(replica.connections):
                        self.discard(replica, connection)

    def _open(self, replica: Replica, connection: Connection) -> None:
        """Open one more connection; `stop` aborts it meanwhile."""
        try:
            if self._own_server is not None:
                self._own_server.revive()
            if replica.plan_in_doubt:
                self.introduce(replica)
            connection.open(time.monotonic() + self.network.connect_seconds)
        except Exception as error:  # noqa: BLE001 - an unknown one is raised once no other server is left
            with self.changed:
                replica.opening = None
                connection.close()
                self.failed(replica, error)
        else:
            with self.changed:
                replica.opening = None
                self.was_reached = True
                replica.connections.append(connection)
                if self._stopped:
                    self.discard(replica, connection)


def _refused(replica: Replica, plan: BoundPlan, error: errors.ServerError) -> errors.ReplicaRefused:
    return errors.ReplicaRefused(f"{replica.endpoint.name} refuses the plan {plan.plan_id}: {error}")


def named(replica: Replica, error: Exception) -> str:
    """Return the error with the replica's name, which an error response of the server does not hold."""
    return f"{replica.endpoint.name}: {error}" if isinstance(error, errors.ServerError) else str(error)
