"""One worker process: `python -m corpus_server.run.worker CHANNEL SETTINGS LISTENER...`, all descriptors.

A worker ends in three phases, of which the last two end early when no connection is left:

    TERMINATE   /readyz says 503, still listening, responses say `Connection: close`      drain_seconds
    RETIRE      not listening, responses say `Connection: close`                          grace_seconds
    both        idle connections are closed, responses in flight complete         the rest of grace_seconds
                everything is cut

While retiring, a connection is closed only after a response: a request may be on its way on an idle one.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import pickle
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import uvloop

from corpus_server import live, metrics
from corpus_server.answers.service import Service
from corpus_server.answers.tracing import start_tracing, stop_tracing
from corpus_server.errors import CorpusServerError
from corpus_server.http.connection import Connection, Shared
from corpus_server.run.listening import BACKLOG, server_context, take_no_more
from corpus_server.run.logs import log_to_stderr
from corpus_server.run.process import BEAT, BEAT_SECONDS, RETIRE, TERMINATE
from corpus_server.settings import Settings
from corpus_server.web.app import create_app

_log = logging.getLogger("corpus_server")

MISTAKE = 2
_POLL_SECONDS = 0.02
_ACCEPT_SECONDS = 0.1  # from the last new connection until all that wait are accepted
_CLEAN_UP_SECONDS = 0.5  # beyond the grace, for closing files and threads that do not hang


def main() -> None:
    """Serve until the supervisor says otherwise; report to it what keeps this worker from starting."""
    first, second, *rest = map(int, sys.argv[1:])
    channel = socket.socket(fileno=first)
    with open(second, "rb") as file:  # noqa: PTH123
        settings: Settings = pickle.load(file)
    listeners = [socket.socket(fileno=number) for number in rest]
    log_to_stderr(settings)
    start_tracing()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, channel, listeners))
    except Exception as error:  # noqa: BLE001 - such as a lack of threads or memory
        if not isinstance(error, CorpusServerError | OSError):
            _log.error("this worker ends", exc_info=error)
        # Not printed here: with several workers, everyone meets the same mistake.
        channel.send((str(error) or type(error).__name__).encode())
        sys.exit(MISTAKE)


async def _serve(settings: Settings, channel: socket.socket, listeners: list[socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    gateway = create_app(settings)
    async with gateway.app.router.lifespan_context(gateway.app):
        service: Service = gateway.app.state.service
        shared = Shared()
        connect = partial(Connection, service, gateway, shared)
        tls = server_context(settings)
        servers = [
            # Unix sockets have no TLS.
            await loop.create_server(
                connect, sock=each, ssl=None if each.family == socket.AF_UNIX else tls, backlog=BACKLOG
            )
            for each in listeners
        ]
        # Before the first beat, the supervisor does not take this worker for ready.
        publish = partial(service.run_probe, live.publish)
        background = [
            loop.create_task(_repeat(BEAT_SECONDS, "the beat", partial(_beat, channel, shared))),
            loop.create_task(_repeat(metrics.PUBLISH_SECONDS, "sharing counts with other workers", publish)),
        ]
        command = await loop.sock_recv(channel, 1)
        service.admission.closing = True
        end = loop.time() + settings.grace_seconds
        if command == TERMINATE:
            service.draining = True
            await asyncio.sleep(min(settings.drain_seconds, settings.grace_seconds))
            for listener in listeners:
                take_no_more(listener)
            await asyncio.sleep(min(_ACCEPT_SECONDS, end - loop.time()))
        for server in servers:
            server.close()
        if command == RETIRE:
            # The server may end, or the supervisor die, meanwhile.
            told = loop.create_task(loop.sock_recv(channel, 1))
            await _wait_until(lambda: told.done() or not shared.connections, end)
            end = loop.time() + settings.grace_seconds
        # Python itself would wait for ever for a thread in a hung read. This says where the threads hang.
        faulthandler.dump_traceback_later(max(0.0, end - loop.time()) + _CLEAN_UP_SECONDS, exit=True)
        for connection in list(shared.connections):
            connection.shutdown()  # at once when idle, else after its response
        await _wait_until(lambda: not shared.connections, end)
        for connection in list(shared.connections):
            connection.transport.abort()
        await _wait_until(lambda: not shared.connections, end + _CLEAN_UP_SECONDS)
        for task in background:
            task.cancel()
    with contextlib.suppress(OSError):
        await asyncio.to_thread(metrics.publish)
    await asyncio.to_thread(stop_tracing)


async def _beat(channel: socket.socket, shared: Shared) -> None:
    """Tell the supervisor that the event loop turns."""
    shared.renew_date()
    with contextlib.suppress(OSError):  # the supervisor is gone; who reads the channel ends this worker
        channel.send(BEAT)


async def _repeat(seconds: float, what: str, work: Callable[[], Awaitable[object]]) -> None:
    """Do something again and again, whatever fails; the same failure is logged once."""
    failure = ""
    while True:
        try:
            await work()
            failure = ""
        except Exception as error:  # noqa: BLE001 - else it would end in silence
            if failure != (failure := f"{type(error).__name__}: {error}"):
                _log.error("%s failed: %s", what, getattr(error, "strerror", None) or failure)
        await asyncio.sleep(seconds)


async def _wait_until(condition: Callable[[], bool], end: float) -> None:
    """Wait until a condition holds, or the loop's clock says `end`."""
    while not condition() and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
