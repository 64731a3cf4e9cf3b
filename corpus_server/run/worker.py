"""One worker process, a copy of the template (`run/template.py`).

A worker ends in three phases, of which the last two end early when no connection is left. The first one is
left out where nobody asks: there is no connection, and none was made within twice `drain_seconds`, as a load
balancer does:

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
import math
import os
import pickle
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from corpus_server import live
from corpus_server.errors import CorpusServerError
from corpus_server.http.connection import Connection, Shared
from corpus_server.metrics import shared
from corpus_server.responses.service import Service
from corpus_server.responses.tracing import start_tracing, stop_tracing
from corpus_server.run.accepting import Acceptor
from corpus_server.run.listening import server_context, take_no_more
from corpus_server.run.logs import log_to_stderr
from corpus_server.run.process import (
    BEAT,
    BEAT_SECONDS,
    MAX_MESSAGE_BYTES,
    PID,
    RETIRE,
    TERMINATE,
    Orders,
    name_process,
)
from corpus_server.web.app import create_app

_log = logging.getLogger("corpus_server")

MISTAKE = 2
_POLL_SECONDS = 0.02
_ACCEPT_SECONDS = 0.1  # from the last new connection until all that wait are accepted
_CLEAN_UP_SECONDS = 0.5  # beyond the grace, for closing files and threads that do not hang


def main(handed: Sequence[int]) -> None:
    """Serve until the supervisor says otherwise; report to it what keeps this worker from starting.

    Args:
        handed: descriptors of the channel, the `Orders` and the listeners.
    """
    name_process("corpus-worker")
    first, second, *rest = handed
    channel = socket.socket(fileno=first)
    channel.send(b"%b%d" % (PID, os.getpid()))
    with open(second, "rb") as file:  # noqa: PTH123
        orders: Orders = pickle.load(file)
    listeners = [socket.socket(fileno=number) for number in rest]
    shared.share(orders.metrics_folder)
    log_to_stderr(orders.settings)
    start_tracing()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(orders, channel, listeners))
    except Exception as error:  # noqa: BLE001 - such as a lack of threads or memory
        if not isinstance(error, CorpusServerError | OSError):
            _log.error("this worker ends", exc_info=error)
        # Not printed here: with several workers, everyone meets the same mistake.
        reason = error.with_remedy if isinstance(error, CorpusServerError) else str(error)
        channel.send((reason or type(error).__name__).encode(errors="backslashreplace")[:MAX_MESSAGE_BYTES])
        sys.exit(MISTAKE)


async def _serve(orders: Orders, channel: socket.socket, listeners: list[socket.socket]) -> None:
    loop, settings = asyncio.get_running_loop(), orders.settings
    channel.setblocking(False)
    gateway = create_app(settings)
    async with gateway.app.router.lifespan_context(gateway.app):
        service: Service = gateway.app.state.service
        if orders.names_corpora:
            _name_corpora(service)
        tls = server_context(settings)
        server = _server(gateway)
        serving = loop.create_task(server.serve([]))
        while not server.started:
            done, _ = await asyncio.wait([serving], timeout=_POLL_SECONDS)
            for each in done:
                await each  # raises what kept it from starting
        state = cast("Shared", server.server_state)
        acceptors = [
            Acceptor(
                listener,
                partial(Connection, service, gateway, state),
                None if listener.family == socket.AF_UNIX else tls,  # Unix sockets have no TLS
                lambda: len(state.connections),
                shares=settings.workers > 1,
            )
            for listener in listeners
        ]
        # Before the first beat, the supervisor does not take this worker for ready.
        publish = partial(service.run_probe, live.publish)
        background = [
            loop.create_task(_repeat(BEAT_SECONDS, "the beat", partial(_beat, channel))),
            loop.create_task(_repeat(shared.PUBLISH_SECONDS, "sharing counts with other workers", publish)),
        ]
        command = await loop.sock_recv(channel, 1)
        service.admission.closing = True
        end = loop.time() + settings.grace_seconds
        if command == TERMINATE:
            service.draining = True
            unused_seconds = loop.time() - max((each.taken_at for each in acceptors), default=-math.inf)
            is_used = bool(state.connections) or unused_seconds < 2 * settings.drain_seconds
            if is_used:
                await asyncio.sleep(min(settings.drain_seconds, settings.grace_seconds))
            if is_used or settings.workers == 1:  # else the others may be asked at the same sockets
                for acceptor, listener in zip(acceptors, listeners, strict=True):
                    take_no_more(listener)
                    acceptor.hurry()
                await asyncio.sleep(min(_ACCEPT_SECONDS, end - loop.time()))
        for acceptor in acceptors:
            acceptor.close()
        if command == RETIRE:
            # The server may end, or the supervisor die, meanwhile.
            told = loop.create_task(loop.sock_recv(channel, 1))
            await _wait_until(lambda: told.done() or not state.connections, end)
            end = loop.time() + settings.grace_seconds
        # Python itself would wait for ever for a thread in a hung read. This says where the threads hang.
        faulthandler.dump_traceback_later(max(0.0, end - loop.time()) + _CLEAN_UP_SECONDS, exit=True)
        server.should_exit = True  # closes each connection: at once when idle, else after its response
        await _wait_until(lambda: not state.connections, end)
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.wait([serving], timeout=_CLEAN_UP_SECONDS)
        for task in background:
            task.cancel()
    with contextlib.suppress(OSError):
        await asyncio.to_thread(shared.publish)
    await asyncio.to_thread(stop_tracing)


def _server(app: ASGIApp) -> uvicorn.Server:
    """Return what holds the connections: uvicorn's server, which listens nowhere itself."""
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", Connection),
        ws="none",
        lifespan="off",  # uvicorn would log a traceback where the start fails; `_serve` raises the error
        log_config=None,
        log_level="warning",
        server_header=False,
    )
    config.load()
    return uvicorn.Server(config)


async def _beat(channel: socket.socket) -> None:
    """Tell the supervisor that the event loop turns."""
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


def _name_corpora(service: Service) -> None:
    """Say in the log what is served, and which corpora hold ids that their tokenizers do not have."""
    for corpus in service.catalog.corpora.values():
        num_shards = len(corpus.shards)
        kind, _, digits = corpus.fingerprint.rpartition("-")
        _log.info(
            "%s: %s %s tokens, %d shard%s, %s%s",
            corpus.name,
            f"{corpus.num_tokens:,}",
            corpus.dtype.name,
            num_shards,
            "" if num_shards == 1 else "s",
            f"{corpus.num_masks} loss masks, " if corpus.num_masks else "",
            f"{kind}-{digits[:8]}",
        )

    def warn() -> None:
        for corpus in service.catalog.corpora.values():
            for warning in corpus.warnings():
                _log.warning("%s", warning)

    # Reads a tokenizer, which takes longer than all else of a start.
    threading.Thread(target=warn, name="vocabulary", daemon=True).start()
