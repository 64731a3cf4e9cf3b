"""Bind the sockets, keep the worker processes running, and end them.

The supervisor opens no corpus and waits only in its event loop, so that nothing keeps it from restarting a
worker. Each worker is watched by a task of its own: one that hangs does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from corpus_server.errors import CorpusServerError, InvalidParameter
from corpus_server.metrics import FOLDER_VARIABLE, bury
from corpus_server.run.common import BEAT, BEAT_SECONDS, RETIRE, TERMINATE
from corpus_server.run.listening import listening, url
from corpus_server.run.logs import log_to_stderr
from corpus_server.run.tls import server_context
from corpus_server.settings import ENVIRONMENT_VARIABLE, Settings

START_SECONDS = 120  # until a worker is ready; opening many shards on a cold network disk takes a minute
SILENT_SECONDS = 30  # without a beat; the event loop never blocks for so long unless it hangs
EXIT_SECONDS = 5  # from the end of the channel to the end of the process
MAX_BACK_OFF_SECONDS = 10.0
MAX_FAILED_STARTS = 5  # in a row, before the first worker was ever ready
FIXED = ("host", "port", "uds", "state_dir")  # settings of the supervisor's own sockets and folders
WORKER_MODULE = "corpus_server.run.worker"

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_log = logging.getLogger("corpus_server")


def run(read_settings: Callable[[], Settings]) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends at once. SIGHUP replaces the workers one by one.

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
    with listening(settings) as sockets, _metrics_folder(settings) as metrics:
        environment = {
            **os.environ,
            ENVIRONMENT_VARIABLE: settings.to_json(),
            FOLDER_VARIABLE: str(metrics),
            # With -P: workers import from where this process did, and not from the current folder.
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        }
        asyncio.run(_Supervisor(settings, read_settings, sockets, environment).serve())


class _Worker:
    """A worker process and the channel to it."""

    def __init__(self, sockets: list[socket.socket], environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        handed = [each.fileno() for each in (theirs, *sockets)]
        command = [sys.executable, "-P", "-m", WORKER_MODULE, *map(str, handed)]
        # The worker inherits the mask: Ctrl+C and systemd signal the whole group, but only the supervisor
        # decides when a worker ends.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self.process = subprocess.Popen(command, pass_fds=handed, env=environment)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            theirs.close()

    async def hear(self, seconds: int) -> bytes:
        """Wait for a message; b"": the process ended, or was killed since none came for so many seconds."""
        # One reading for all the seconds: a timeout would cancel it, and a beat that comes in that moment
        # would be lost. Both come every second, so the same would happen to the next thirty.
        receiving = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._channel, 65536))
        # Counted second by second: a supervisor that was stopped for a minute must not take that for silence.
        for _ in range(seconds):
            await asyncio.wait({receiving}, timeout=1)
            if receiving.done():
                with contextlib.suppress(OSError):
                    return receiving.result()
                return b""
        receiving.cancel()
        self.process.kill()
        return b""

    def tell(self, command: bytes) -> None:
        """Send a command; a process that has ended misses it."""
        with contextlib.suppress(OSError):
            self._channel.send(command)

    async def reap(self) -> int:
        """Wait for the process to end and kill it if need be; return its exit code, negative for a signal."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + EXIT_SECONDS
        while (code := self.process.poll()) is None:
            if loop.time() > deadline:
                self.process.kill()
            await asyncio.sleep(0.01)
        self._channel.close()
        return code


@dataclass(eq=False)
class _Place:
    """One of the workers that should run, whichever process that is now."""

    environment: Mapping[str, str]  # of the next process
    worker: _Worker | None = None  # until the first process is started
    is_ready: bool = False
    leaving: bool = False  # it was asked to end, and gets no successor

    def leave(self, command: bytes) -> None:
        """Ask the process to end, for good; one that is not ready has nothing to complete."""
        self.leaving = True
        if self.worker is not None and self.is_ready:
            self.worker.tell(command)
        else:
            self.kill()

    def kill(self) -> None:
        """End the process at once."""
        if self.worker is not None:
            self.worker.process.kill()


@dataclass(eq=False)
class _Supervisor:
    _settings: Settings
    _read_settings: Callable[[], Settings]
    _sockets: list[socket.socket]
    _environment: Mapping[str, str]
    _places: dict[asyncio.Task[None], _Place] = field(default_factory=dict)
    _was_ready: bool = False
    _num_failed_starts: int = 0
    _is_to_renew: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self) -> None:
        """Run the workers until a signal comes, or until none can start."""
        loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[None] = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, self._on_stop)
        loop.add_signal_handler(signal.SIGINT, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_renew)
        for _ in range(self._settings.workers):
            self._add(self._environment)
        renewing = asyncio.create_task(self._renew_when_asked())
        try:
            await self._stop
        finally:
            renewing.cancel()
            await self._end()

    def _on_stop(self) -> None:
        if self._stop.done():
            self._kill_all()
        else:
            _log.info("ending; a second signal ends at once")
            self._stop.set_result(None)

    def _on_renew(self) -> None:
        self._is_to_renew.set()

    async def _renew_when_asked(self) -> None:
        while True:
            await self._is_to_renew.wait()
            self._is_to_renew.clear()  # first: what changes from now on is a reason to renew again
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
        # In a thread: files may lie on a disk that hangs.
        settings = await asyncio.to_thread(self._read_settings)
        if changed := [name for name in FIXED if getattr(settings, name) != getattr(self._settings, name)]:
            raise CorpusServerError(f"a changed {', '.join(changed)} needs a new start")
        environment = {**self._environment, ENVIRONMENT_VARIABLE: settings.to_json()}
        old = [place for place in self._places.values() if not place.leaving]
        for number in range(settings.workers):
            trial: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
            self._add(environment, trial)
            failure = await trial
            if failure is not None and number:
                _log.error("%s; some workers have the settings of before: send SIGHUP again", failure)
                return
            if failure is not None:
                raise CorpusServerError(failure)
            self._settings, self._environment = settings, environment
            for place in self._places.values():
                place.environment = environment
            if old:
                old.pop(0).leave(RETIRE)
        for place in old:
            place.leave(RETIRE)
        _log.info("all workers were replaced; corpora: %s", ", ".join(spec.name for spec in settings.corpora))

    def _add(self, environment: Mapping[str, str], trial: asyncio.Future[str | None] | None = None) -> None:
        place = _Place(environment)
        task = asyncio.create_task(self._keep(place, trial))
        self._places[task] = place
        task.add_done_callback(self._places.pop)

    async def _keep(self, place: _Place, trial: asyncio.Future[str | None] | None) -> None:
        """Keep a worker running until it is asked to leave.

        Args:
            trial: is told why the first process did not become ready, or None if it did; if it did not,
                there is no second one.
        """
        delay = 0.0
        while not place.leaving and not self._stop.done():
            place.is_ready = False
            try:
                place.worker = _Worker(self._sockets, place.environment)
            except OSError as error:
                failure = f"cannot start a worker: {error}"
            else:
                failure = await self._watch(place, place.worker, trial)
            if trial is not None and not trial.done():
                trial.set_result(failure)
                return
            if place.leaving or self._stop.done():
                return
            _log.error("%s", failure)
            # A worker that was ready is replaced at once, others after 0.1, 0.2, 0.4 ... seconds.
            delay = 0.0 if place.is_ready else min(2 * delay or 0.1, MAX_BACK_OFF_SECONDS)
            await asyncio.wait({self._stop}, timeout=delay)

    async def _watch(self, place: _Place, worker: _Worker, trial: asyncio.Future[str | None] | None) -> str:
        """Return, when the worker has ended, how."""
        heard = await worker.hear(START_SECONDS)
        if heard.startswith(BEAT):
            place.is_ready = True
            self._num_failed_starts = 0
            _log.info("worker %d is ready", worker.process.pid)
            if not self._was_ready:
                self._was_ready = True
                has_tls = self._settings.tls_certificate is not None
                urls = [url(each, tls=has_tls) for each in self._sockets]
                _log.info("running on %s (Ctrl+C ends it)", " and ".join(urls))
            if trial is not None and not trial.done():  # done: a successor of the process on trial
                trial.set_result(None)
        reason = ""
        while heard:
            reason = heard.strip(BEAT).decode(errors="replace")
            heard = await worker.hear(SILENT_SECONDS)
        code = await worker.reap()
        # Else its requests under way would be counted for ever.
        folder = Path(self._environment[FOLDER_VARIABLE])
        try:
            await asyncio.to_thread(bury, folder, worker.process.pid)
        except OSError as error:  # a full disk must not cost a worker
            _log.error("what worker %d counted is not added up: %s", worker.process.pid, error.strerror)
        how = f"worker {worker.process.pid} ended with {signal.Signals(-code).name if code < 0 else code}"
        if not self._was_ready and not self._stop.done():
            self._note_failed_start(code, reason, how)
        return f"{how}: {reason}" if reason else how

    def _note_failed_start(self, code: int, reason: str, how: str) -> None:
        """End the server if its first workers cannot start.

        An exit code means that the configuration is wrong, and another worker would fail, too. One that was
        killed by a signal may have better luck, but not for ever: there may be too little memory.
        """
        self._num_failed_starts += 1
        if code > 0:
            self._stop.set_exception(CorpusServerError(reason or f"{how} while starting"))
        elif self._num_failed_starts >= MAX_FAILED_STARTS:
            times = f"{self._num_failed_starts} workers in a row"
            self._stop.set_exception(
                CorpusServerError(f"{times} were killed while starting; the last: {how}")
            )

    async def _end(self) -> None:
        """End every worker within the grace, and kill what is left."""
        for each in self._sockets:
            each.close()  # else clients could go on to connect, to nobody
        for place in self._places.values():
            place.leave(TERMINATE)
        # A second more than the workers take themselves; beyond that, their event loops hang.
        await self._all_ended(self._settings.grace_seconds + BEAT_SECONDS)
        self._kill_all()
        # Bounded: a process in an uninterruptible read of a dead disk ends when the disk answers.
        await self._all_ended(BEAT_SECONDS)

    async def _all_ended(self, seconds: float) -> None:
        if self._places:
            await asyncio.wait(self._places, timeout=seconds)

    def _kill_all(self) -> None:
        for place in self._places.values():
            place.kill()


@contextmanager
def _metrics_folder(settings: Settings) -> Iterator[Path]:
    """Make a folder for the metrics that the workers share, named for this process; remove it at the end.

    A killed server leaves its folder behind; the next one to start here removes it.
    """
    parent = settings.state_dir / "metrics"
    folder = parent / str(os.getpid())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameter(
            f"state_dir {settings.state_dir} cannot be written: {error}; give another with --state-dir",
            parameter="state_dir",
        ) from error
    for old in parent.iterdir():
        if old.name.isdigit() and not Path(f"/proc/{old.name}").exists():
            shutil.rmtree(old, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
