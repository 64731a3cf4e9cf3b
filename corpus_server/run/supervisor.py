"""Bind the sockets, keep the worker processes running, and end them.

The supervisor opens no corpus and waits only in its event loop, so nothing delays the restart of a worker.
Each worker is watched by a task of its own: one that hangs does not delay the others. Any error in such a
task is logged, and the worker is replaced.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from corpus_server.daemon_thread import in_daemon_thread
from corpus_server.errors import CorpusServerError, InvalidParameter
from corpus_server.run.listening import listening, server_context, url
from corpus_server.run.logs import log_to_stderr
from corpus_server.run.metrics_folder import metrics_folder
from corpus_server.run.process import (
    BEAT,
    BEAT_SECONDS,
    ENDING_SIGNALS,
    RETIRE,
    TERMINATE,
    Children,
    Orders,
    Template,
    WorkerProcess,
    name_of_end,
)
from corpus_server.settings import Settings

START_SECONDS = 120  # until a worker is ready; opening many shards on a cold network disk takes a minute
SILENT_SECONDS = 4  # without a beat; the event loop never blocks for so long unless it hangs
MAX_BACK_OFF_SECONDS = 10.0
MAX_FAILED_STARTS = 5  # in a row, before the first worker was ever ready
MAX_NAMES = 20  # of corpora in a line of the log
FIXED = ("host", "port", "uds", "state_dir", "while_locked")
"""Settings of the supervisor's own sockets, folders and lock."""

_log = logging.getLogger("corpus_server")


def run(read_settings: Callable[[], Settings]) -> None:
    """Serve until a signal ends it; a second one ends at once. SIGHUP replaces the workers one by one.

    Args:
        read_settings: reads them anew, at the start and at each SIGHUP; raises CorpusServerError.

    Raises:
        InvalidParameter: nothing can listen there, or the state folder cannot be written.
        CorpusServerError: the workers cannot start.
    """
    settings = read_settings()
    log_to_stderr(settings)
    server_context(settings)  # a mistake is found before any worker starts
    if settings.reaches_beyond_loopback and settings.tokens is None:
        _log.warning("everybody who reaches this address may read every corpus: no tokens are asked for")
    if settings.tokens is not None and settings.reaches_beyond_loopback and settings.tls_certificate is None:
        _log.warning("tokens travel in clear text unless a proxy in front of this server speaks TLS")
    with listening(settings) as sockets, metrics_folder(settings.state_dir) as folder:
        asyncio.run(_Supervisor(settings, read_settings, sockets, folder).serve())


@dataclass(eq=False)
class _KeptWorker:
    """One of the workers that should run; its process may be replaced at any time.

    Attributes:
        settings: of the next process.
        trial: receives None when the first process is ready, or the reason why it is not; in the latter case
            no second one is started. Without a trial, processes are started until one is ready.
        is_ending: it was asked to end, and is not replaced.
        names_corpora: see `Orders`.
    """

    settings: Settings
    names_corpora: bool = False
    trial: asyncio.Future[str | None] | None = None
    process: WorkerProcess | None = None
    is_ready: bool = False
    is_ending: bool = False

    def end(self, command: bytes) -> None:
        """Ask the process to end, and do not replace it. One that is not ready has nothing to complete."""
        self.is_ending = True
        if self.process is not None and self.is_ready:
            self.process.tell(command)
        else:
            self.kill()

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None:
            self.process.kill()

    def tell_trial(self, failure: str | None) -> bool:
        """Report how the first process started; return False for later ones."""
        if self.trial is None or self.trial.done():
            return False
        self.trial.set_result(failure)
        return True


class _Supervisor:
    """Keeps the workers running; see `run`."""

    def __init__(
        self,
        settings: Settings,
        read_settings: Callable[[], Settings],
        sockets: list[socket.socket],
        metrics_folder: Path,
    ) -> None:
        self._settings = settings
        self._read_settings = read_settings
        self._sockets = sockets
        self._metrics_folder = metrics_folder
        self._kept: dict[asyncio.Task[None], _KeptWorker] = {}
        self._was_ready = False  # some worker
        self._num_failed_starts = 0  # before that
        self._is_to_renew = asyncio.Event()

    async def serve(self) -> None:
        """Run the workers until a signal comes, or until none can start."""
        loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[None] = loop.create_future()
        for each in ENDING_SIGNALS:
            loop.add_signal_handler(each, self._on_stop, each)
        loop.add_signal_handler(signal.SIGHUP, self._is_to_renew.set)
        self._children, self._template = Children(), Template()
        for number in range(self._settings.workers):
            self._add(_KeptWorker(self._settings, names_corpora=not number))
        tasks = [asyncio.create_task(self._renew_when_asked())]
        if (path := self._settings.while_locked) is not None:
            tasks.append(asyncio.create_task(self._end_when_unlocked(path)))
        try:
            await self._stop
        finally:
            for task in tasks:
                task.cancel()
            await self._end()

    def _on_stop(self, number: int) -> None:
        if self._stop.done():
            for kept in self._kept.values():
                kept.kill()
        else:
            _log.info("%s: ending; a second signal ends at once", name_of_end(-number))
            self._stop.set_result(None)

    async def _end(self) -> None:
        """End every worker within the grace, and kill what is left."""
        for each in self._sockets:
            each.close()  # else clients could go on to connect, to nobody
        self._template.close()  # whose request may be under way
        # A second more than the workers take themselves; beyond that, their event loops hang. Those killed
        # are waited for within bounds, too: a process in a read of a dead disk ends when the disk answers.
        terms = (
            (lambda kept: kept.end(TERMINATE), self._settings.grace_seconds + BEAT_SECONDS),
            (_KeptWorker.kill, BEAT_SECONDS),
        )
        for end, seconds in terms:
            for kept in self._kept.values():
                end(kept)
            if self._kept:
                await asyncio.wait(self._kept, timeout=seconds)
        # Nothing is to end once nobody hears of it.
        if self._template.pid:
            await asyncio.wait({self._children.end_of(self._template.pid)}, timeout=BEAT_SECONDS)
        self._children.close()

    async def _end_when_unlocked(self, path: Path) -> None:
        """End the server once no other process holds a lock on a file.

        The kernel releases the lock of a process however it ends. This one holds the lock from then on until
        it ends: a process that comes too late waits for that, and then starts a server of its own.
        """
        try:
            await in_daemon_thread(partial(_lock, path), "lock")
        except OSError as error:
            failure = InvalidParameter(
                f"while_locked {path} cannot be locked: {error.strerror}; it must be a file that is there",
                parameter="while_locked",
            )
            if not self._stop.done():
                self._stop.set_exception(failure)
            return
        if not self._stop.done():
            _log.info("no process holds %s any more: ending", path)
            self._stop.set_result(None)

    async def _renew_when_asked(self) -> None:
        while True:
            await self._is_to_renew.wait()
            self._is_to_renew.clear()  # first: what changes from now on is a reason to renew again
            _log.info("SIGHUP: reading the configuration and starting new workers")
            try:
                await self._renew()
            except (CorpusServerError, OSError) as error:
                _log.error("%s; nothing was changed, the old workers go on", error)
            except Exception as error:  # noqa: BLE001 - else no SIGHUP would be heeded any more
                _log.error("nothing was changed, the old workers go on", exc_info=error)

    async def _renew(self) -> None:
        """Read the settings again and replace the workers one by one.

        A new worker is ready before an old one stops accepting. The first one opens the corpora before
        anything else is done, and so finds the mistakes in the settings.

        Raises:
            CorpusServerError: there is one.
        """
        settings = await in_daemon_thread(self._read_settings, "settings")
        if changed := [name for name in FIXED if getattr(settings, name) != getattr(self._settings, name)]:
            raise CorpusServerError(f"a changed {', '.join(changed)} needs a new start")
        old = [kept for kept in self._kept.values() if not kept.is_ending]
        for number in range(settings.workers):
            trial: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
            self._add(_KeptWorker(settings, trial=trial))
            failure = await trial
            if failure is not None and number:
                _log.error("%s; some workers have the settings of before: send SIGHUP again", failure)
                return
            if failure is not None:
                raise CorpusServerError(failure)
            for kept in self._kept.values():
                kept.settings = settings
            if old:
                old.pop(0).end(RETIRE)
        for kept in old:
            kept.end(RETIRE)
        names = [spec.name for spec in settings.corpora]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        _log.info("all workers were replaced; corpora: %s%s", ", ".join(names[:MAX_NAMES]), more)

    def _add(self, kept: _KeptWorker) -> None:
        task = asyncio.create_task(self._keep(kept))
        self._kept[task] = kept
        task.add_done_callback(self._kept.pop)

    async def _keep(self, kept: _KeptWorker) -> None:
        """Keep a worker running until it is asked to end."""
        delay = 0.0
        while not kept.is_ending and not self._stop.done():
            kept.is_ready = False
            failure = await self._run_one(kept)
            if kept.tell_trial(failure) or kept.is_ending or self._stop.done():
                return
            _log.error("%s", failure)
            # A worker that was ready is replaced at once, others after 0.1, 0.2, 0.4 ... seconds.
            delay = 0.0 if kept.is_ready else min(2 * delay or 0.1, MAX_BACK_OFF_SECONDS)
            await asyncio.wait({self._stop}, timeout=delay)

    async def _run_one(self, kept: _KeptWorker) -> str:
        """Run one process to its end; return how it ended, or why it did not start."""
        process = kept.process = None
        try:
            process = WorkerProcess(self._children)
            names_corpora = kept.names_corpora and not self._was_ready
            orders = Orders(
                settings=kept.settings, metrics_folder=self._metrics_folder, names_corpora=names_corpora
            )
            await process.start(self._template, self._sockets, orders)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
            if process is not None:
                process.close()
            failure = f"cannot start a worker: {error or type(error).__name__}"
            self._note_failed_start(failure)
            return failure
        try:
            kept.process = process
            if kept.is_ending or self._stop.done():  # since it was asked for
                process.kill()
            return await self._watch(kept, process)
        except Exception as error:  # noqa: BLE001 - whatever it is, the worker gets a successor
            _log.error("worker %d is replaced because watching it failed", process.pid, exc_info=error)
            kept.is_ready = False  # not at once: the next one may fail in the same way
            process.kill()
            return _end(process, await process.reap())

    async def _watch(self, kept: _KeptWorker, process: WorkerProcess) -> str:
        """Return, when the worker has ended, how."""
        heard = await process.hear(START_SECONDS)
        if heard.startswith(BEAT):
            kept.is_ready = True
            _log.info("worker %d is ready", process.pid)
            if not self._was_ready:
                self._was_ready = True
                has_tls = self._settings.tls_certificate is not None
                urls = [url(each, tls=has_tls) for each in self._sockets]
                _log.info("running on %s (Ctrl+C ends it)", " and ".join(urls))
            kept.tell_trial(None)
        reason = ""
        while heard:
            reason = heard.strip(BEAT).decode(errors="replace")
            heard = await process.hear(SILENT_SECONDS)
        code = await process.reap()
        # In a thread: the successor does not wait for the state folder's disk.
        threading.Thread(target=self._end_counts, args=(process.pid,), name="metrics", daemon=True).start()
        how = _end(process, code)
        if code:
            # Above 0, the configuration is wrong, and another worker would fail, too.
            self._note_failed_start(reason or how, max_starts=1 if code > 0 else MAX_FAILED_STARTS)
        return f"{how}: {reason}" if reason else how

    def _end_counts(self, pid: int) -> None:
        """Mark what a worker counted as of the past (`metrics/shared.py`); the workers add it up.

        Its requests under way would be counted for ever, and another process may get its number.
        """
        path = self._metrics_folder / f"{pid}.json"
        with suppress(OSError):  # the server ends, or its folder was deleted
            path.rename(path.with_name(f"{pid}-{time.monotonic_ns()}.ended"))

    def _note_failed_start(self, failure: str, max_starts: int = MAX_FAILED_STARTS) -> None:
        """End the server if its first workers cannot start."""
        self._num_failed_starts += 1
        if self._was_ready or self._stop.done() or self._num_failed_starts < max_starts:
            return
        if max_starts > 1:
            failure = f"{self._num_failed_starts} workers in a row did not start; the last: {failure}"
        self._stop.set_exception(CorpusServerError(failure))


def _lock(path: Path) -> None:
    """Wait until this process alone has a lock on a file, which it keeps to its end."""
    fcntl.flock(os.open(path, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX)


def _end(process: WorkerProcess, code: int | None) -> str:
    """Say how a worker ended."""
    if code is None:
        return f"worker {process.pid} was killed, but does not end: it waits for a disk"
    return f"worker {process.pid} ended with {name_of_end(code)}"
