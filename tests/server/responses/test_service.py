"""The threads of a process and its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from corpus_server.admission.request import RequestHead
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import Overloaded
from corpus_server.responses import service as module
from corpus_server.responses import threads
from corpus_server.responses.service import Service
from corpus_server.settings import Settings
from corpus_server.work import Limits
from tests.corpora import some_tokens, write_raw
from tests.serving import wait_until

LONG = 30.0
GET = RequestHead("GET", b"/", {})


async def never() -> None:
    """Wait for a client that does not leave."""
    await asyncio.Event().wait()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    path = write_raw(tmp_path / "web.bin", some_tokens(1000))
    (tmp_path / "web.bin.mask.npy").write_bytes(bytes(1000))
    settings = Settings(
        corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path / "state", max_concurrent_responses=1
    )
    with Service.open(settings) as service:
        yield service


def begin_work(service: Service) -> tuple[threading.Thread, threading.Event]:
    """Give a gather thread work, from another loop; the event says that it has begun."""
    begun = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(service.gather_threads.run(begun.set)))
    thread.start()
    return thread, begun


def test_threads_begin_nothing_before_the_loop_has_refused_what_came(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "PAUSE_SECONDS", 2 * LONG)

    async def refuse_two() -> None:
        service.gather_threads.pause()
        service.gather_threads.pause()
        thread, begun = begin_work(service)
        assert not begun.wait(0.1)  # blocks the loop, as a burst of refusals does
        await asyncio.sleep(0)
        assert begun.wait(LONG)
        thread.join()

    asyncio.run(refuse_two())


def test_threads_go_on_however_long_the_loop_refuses(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "PAUSE_SECONDS", 0.01)

    async def refuse_for_long() -> None:
        service.gather_threads.pause()
        began = time.monotonic()
        thread, begun = begin_work(service)
        assert begun.wait(LONG)
        assert time.monotonic() - began >= 0.01
        thread.join()

    asyncio.run(refuse_for_long())


def settings(folder: Path, **more: int) -> Settings:
    path = write_raw(folder / "web.bin", some_tokens(1000))
    return Settings(corpora=(CorpusSpec(name="web", path=path),), state_dir=folder / "state", **more)  # type: ignore[arg-type]


def test_no_request_needs_a_new_thread(tmp_path: Path) -> None:
    """Catalogue row 37: a machine without threads refuses the start, in words, and no request afterwards."""
    no_thread = patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with (
        no_thread,
        pytest.raises(Overloaded, match="can't start new thread"),
        Service.open(settings(tmp_path)),
    ):
        pass

    async def ask_all(service: Service) -> None:
        asking = [ask() for _ in range(100) for ask in asks(service)]
        assert await asyncio.gather(*asking) == [0] * len(asking)

    def asks(service: Service) -> list[Callable[[], Awaitable[int]]]:
        return [partial(service.gather_threads.run, int), partial(service.run_probe, int)]

    with Service.open(settings(tmp_path)) as service, no_thread:
        asyncio.run(ask_all(service))
        assert asyncio.run(service.run(lambda _: 0, GET, never)) == 0
        assert asyncio.run(service.compute(lambda _: 0, service.budget(GET, Limits()), never)) == 0


def test_the_end_stops_all_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        end.wait(LONG)

    with Service.open(settings(tmp_path)) as service, contextlib.ExitStack() as stack:
        asyncio.run(service.run(lambda _: 0, GET, never))
        asyncio.run(service.run_probe(int))
        asyncio.run(service.gather_threads.run(int))
        stager_close = stack.enter_context(patch.object(service.stager, "close", wraps=service.stager.close))
        done: list[str] = []
        works = [hold] * service.settings.gather_threads + [lambda: done.append("what waits is dropped")]
        with asyncio.Runner() as runner:
            running = [runner.get_loop().create_task(service.gather_threads.run(each)) for each in works]
            runner.run(asyncio.sleep(0))
            assert held.wait(LONG)
            assert not any(each.done() for each in running)
            closing = threading.Thread(target=service.close)
            closing.start()
            wait_until(lambda: not service.gather_threads.are_wanted)  # what waits was dropped
            end.set()
            closing.join(LONG)
        assert not set(threading.enumerate()) - before
        assert not done
        stager_close.assert_called_once_with()
        service.close()


def test_probes_that_wait_share_one_look(service: Service) -> None:
    """What comes behind them waits for two at most, and nobody gets a look from before it asked."""
    hold, begun, looks = threading.Event(), threading.Event(), []

    def look() -> int:
        looks.append(len(looks))
        begun.set()
        hold.wait(LONG)
        return looks[-1]

    async def ask() -> tuple[list[int], int]:
        first = asyncio.ensure_future(service.run_probe(look))
        await asyncio.to_thread(begun.wait, LONG)
        others = [asyncio.ensure_future(service.run_probe(look)) for _ in range(100)]
        await asyncio.sleep(0)
        others[0].cancel()
        behind = asyncio.ensure_future(service.run_probe(lambda: len(looks)))
        await asyncio.sleep(0)
        hold.set()
        return [await first, *(await asyncio.gather(*others[1:]))], await behind

    responses, looks_before = asyncio.run(ask())
    assert responses == [0] + [1] * 99
    assert looks_before == 2


def test_a_process_whose_threads_all_hang_is_not_ready(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STUCK_SECONDS", 0.0)
    number = service.settings.gather_threads
    with contextlib.ExitStack() as stack:
        end = threading.Event()
        stack.callback(end.set)
        for k in range(1, number + 1):
            begun = threading.Event()

            def hang(begun: threading.Event = begun) -> None:
                begun.set()
                end.wait(LONG)

            work = service.gather_threads.run(hang)
            threading.Thread(target=asyncio.run, args=(work,), daemon=True).start()
            assert begun.wait(LONG)
            said = f"all {number} gather threads have waited for the disk for 0 s"
            assert service.why_not_ready() == (module.Unready(said) if k == number else None)
        monkeypatch.setattr(module, "_STUCK_SECONDS", LONG)
        assert service.why_not_ready() is None
    while service.gather_threads.num_stuck(0.0):
        time.sleep(0.001)


@pytest.mark.parametrize(("name", "size"), [("web.bin", 2000), ("web.bin.mask.npy", 1000)])
def test_a_process_whose_files_have_changed_is_not_ready(
    service: Service, tmp_path: Path, name: str, size: int
) -> None:
    (tmp_path / name).write_bytes(b"")
    said = f"corpus 'web': {name}: {size} bytes at opening, 0 now; a file must not change while it is read"
    unready = service.why_not_ready()
    assert unready is not None
    assert unready.detail == said
