"""Servers whose corpora lie in an object store, and what its faults do to those who ask."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from corpus_client import CorpusLoader, Staging
from tests import stores
from tests.buckets import NAME, Bucket
from tests.corpora import some_tokens
from tests.server.stores.served import (
    SEQ_LEN,
    SHARD_BYTES,
    SHARD_TOKENS,
    SHARD_WINDOWS,
    document,
    metrics,
    shards,
    windows,
)
from tests.serving import Response, RunningServer, check_problem, wait_until
from tests.stores import Faults, Reply, WebServer, once_staged

pytest.importorskip("obstore")

SMALL = {"device": "cpu", "dtype": None, "staging": Staging(prefetch_bytes=20_000)}
"""Otherwise the client would ask for more steps at a time than the cache of these tests holds."""

NUM_SHARDS, CACHE_SHARDS = 10, 5
WAIT_SECONDS = 1.0  # of a request for its extents, see `hasty_worker`
FAULTS = ("short", "whole", "shifted", "expired", "forbidden", "changed")
NAMES = (
    *FAULTS,
    "killed",
    "late",
    "slow",
    "slower",
    "masked",
    "placed",
    "copied",
    "folder",
    "replaced",
    "sealed",
    "gone",
)
HASTY = "import corpus_server.run.process as s; s.TEMPLATE_MODULE = 'tests.server.stores.hasty_worker'"


def arguments(cache: Path, num_shards: int, extent_bytes: int) -> tuple[str, ...]:
    options = {
        "--cache-dir": cache,
        "--cache-bytes": num_shards * SHARD_BYTES,
        "--extent-bytes": extent_bytes,
    }
    return tuple(str(each) for option in options.items() for each in option)


@pytest.fixture(scope="module")
def web() -> Iterator[WebServer]:
    """A file for each name, of other tokens than the others; two have masks."""
    files = {f"/{name}.bin": some_tokens(SHARD_TOKENS, seed=n).tobytes() for n, name in enumerate(NAMES)}
    files["/masked.bin.mask.npy"] = bytes(SHARD_TOKENS)
    files["/placed.bin.mask.npy"] = bytes([1, 0]) * (SHARD_TOKENS // 2)
    with WebServer(files) as running:
        yield running


@pytest.fixture(autouse=True)
def right(request: pytest.FixtureRequest) -> Iterator[None]:
    """No fault is left to the next test."""
    yield
    if "web" in request.fixturenames:
        request.getfixturevalue("web").fault = lambda path, reply: None


@dataclass
class Served:
    """A server of one corpus for each file of the web server, its cache, and what it must answer."""

    web: WebServer
    server: RunningServer
    cache: Path

    def ask(self, name: str) -> Response:
        """Ask for the first batch of a corpus."""
        query = {"corpus": name, "seq_len": SEQ_LEN, "batch_size": 8, "order": "sequential", "step": 0}
        return self.server.get("/v1/batches", **query)

    def answer(self, name: str) -> Response:
        """Ask for it until it is no more a matter of time."""
        return once_staged(lambda: self.ask(name))

    def is_right(self, name: str) -> bool:
        """Ask for the first batch; tell whether it is that of the file."""
        response = self.answer(name)
        return response.status == 200 and response.body == self.expected(name)

    def expected(self, name: str) -> bytes:
        return windows({name: self.web.files[f"/{name}.bin"]})[:8].tobytes()

    def copies(self) -> set[Path]:
        """Return the extents in the cache."""
        return set((self.cache / "extents").glob("*/*/tokens"))

    def unfinished(self) -> set[Path]:
        return set((self.cache / "extents").glob("*/*/.tokens.tmp"))


def serving(web: WebServer, folder: Path, extent_bytes: int, names: Sequence[str]) -> Served:
    server = RunningServer(
        {name: f"{web.url}/{name}.bin" for name in names},
        folder,
        arguments=arguments(folder / "cache", 100, extent_bytes),
        prelude=HASTY,
    )
    return Served(web, server, folder / "cache")


@pytest.fixture(scope="module")
def served(web: WebServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Each file is one extent."""
    its = serving(web, tmp_path_factory.mktemp("served"), 2**24, NAMES)
    with its.server:
        yield its


@pytest.fixture(scope="module")
def in_parts(web: WebServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Each file has ten extents."""
    its = serving(web, tmp_path_factory.mktemp("parts"), 4096, (*FAULTS, "killed"))
    with its.server:
        yield its


def only(name: str, fault: stores.Fault) -> stores.Fault:
    """Return a fault of one file."""
    return lambda path, reply: fault(path, reply) if path.startswith(f"/{name}.bin") else None


def test_a_request_that_would_wait_too_long_is_told_when_to_come_again(
    served: Served, web: WebServer
) -> None:
    comes = threading.Event()

    def hold(reply: Reply) -> None:
        comes.wait(60)

    web.fault = only("late", Faults(hold))
    began = time.monotonic()
    # All slots of gather threads: whoever waits holds none.
    responses: list[Response] = []
    asking = [threading.Thread(target=lambda: responses.append(served.ask("late"))) for _ in range(8)]
    for thread in asking:
        thread.start()
    query = {"corpus": "late", "seq_len": SEQ_LEN, "batch_size": 8, "step": 0}
    assert served.server.get("/v1/indices", **query).status == 200
    for thread in asking:
        thread.join()
    for response in responses:
        check_problem(response, 503, "not-staged")
        assert 1 <= int(response.headers["Retry-After"]) <= 60
    assert time.monotonic() - began >= WAIT_SECONDS
    assert "never retrieved" not in served.server.log()
    comes.set()
    assert served.is_right("late")


@pytest.mark.parametrize("kind", ["served", "in_parts"])
def test_a_store_that_fails_gives_errors_and_never_tokens(
    request: pytest.FixtureRequest, web: WebServer, kind: str
) -> None:
    """The log says it in one line, for all extents of a corpus."""
    its: Served = request.getfixturevalue(kind)
    faults = {f"/{name}.bin": Faults(getattr(stores, name)) for name in FAULTS}
    copies = its.copies()

    def fail(path: str, reply: Reply) -> None:
        if path in faults:
            faults[path](path, reply)

    web.fault = fail
    for name in FAULTS:
        problem = check_problem(
            its.answer(name), 503, "corpus-changed" if name == "changed" else "store-failed"
        )
        assert f"{name}.bin" in problem["detail"]
        assert name not in ("expired", "forbidden") or "credentials" in problem["remedy"]
        said = [
            line
            for line in its.server.log().splitlines()
            if "was not staged" in line and f"{name}.bin" in line
        ]
        assert len(said) == 1, said
    assert its.copies() == copies
    faults.clear()
    for name in FAULTS:
        wait_until(lambda name=name: its.is_right(name), name)


def test_a_copy_in_the_cache_that_changes_is_staged_anew(served: Served) -> None:
    before = served.copies()
    assert served.is_right("copied")
    (copy,) = served.copies() - before
    with copy.open("r+b") as file:
        file.write(bytes(100))
    assert served.is_right("copied")


def test_a_folder_in_the_place_of_a_copy_is_removed_and_it_is_staged_anew(served: Served) -> None:
    before = served.copies()
    assert served.is_right("folder")
    (copy,) = served.copies() - before
    copy.unlink()
    copy.mkdir()
    wait_until(lambda: served.is_right("folder"), seconds=30)
    assert copy.is_file()


def test_a_loss_mask_is_staged_with_its_shard(served: Served) -> None:
    before = served.copies()
    assert served.is_right("masked")
    sizes = sorted(copy.stat().st_size for copy in served.copies() - before)
    assert sizes == [SHARD_TOKENS, SHARD_BYTES]


def test_where_rows_lie_is_told_without_staging_and_their_masks_with_it(served: Served) -> None:
    rows = {"corpus": "placed", "seq_len": SEQ_LEN, "batch_size": 8, "order": "sequential"}
    before = served.copies()
    for names, beside, num_copies in (
        ("sources", bytes(16), 0),
        ("loss_mask", (bytes([1, 0] * 50) + bytes([0, 1] * 50)) * 4, 2),
    ):
        query = {**rows, "step": 0, "format": "raw", "with": names}
        response = once_staged(lambda query=query: served.server.get("/v1/indices", **query))
        assert (response.status, response.body[128:]) == (200, beside)
        assert len(served.copies() - before) == num_copies


@pytest.mark.parametrize(("name", "seconds"), [("slow", 0.5), ("slower", 1.5 * WAIT_SECONDS)])
def test_a_loader_says_that_it_waits_for_the_bucket(
    served: Served, web: WebServer, name: str, seconds: float
) -> None:
    """A response waits for a second here; then it is refused, and the loader waits until it asks again."""
    plan = {"seq_len": SEQ_LEN, "stages": [{"global_batch_size": 8, "mixture": {name: 1.0}}]}
    web.fault = only(name, Faults(stores.after(seconds)))
    with CorpusLoader(served.server.url, plan=plan, **SMALL) as loader:
        next(loader)
        stats = loader.stats()
    assert seconds * 0.9 <= stats.wait.bucket <= stats.wait_seconds
    # A busy machine may hold up the server, or the loader, for longer than the bucket does.
    assert stats.wait.cause == "bucket" or stats.wait.bucket < stats.wait_seconds / 2


def test_an_object_that_is_replaced_is_refused_until_the_server_is_restarted(
    served: Served, web: WebServer
) -> None:
    old, web.files["/replaced.bin"] = web.files["/replaced.bin"], bytes(SHARD_BYTES)
    check_problem(served.answer("replaced"), 503, "corpus-changed")
    served.server.restart()
    assert served.is_right("replaced")
    assert served.answer("replaced").body != old[: len(served.expected("replaced"))]


def test_copies_that_were_changed_while_no_server_ran_are_staged_anew(served: Served) -> None:
    assert served.is_right("sealed")
    served.server.stop()
    for path in served.copies():
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    served.server.start()
    assert served.is_right("sealed")
    assert served.server.log().count("was changed in the cache: such ones are staged anew") == 1


def test_a_server_killed_while_it_stages_leaves_nothing(in_parts: Served, web: WebServer) -> None:
    web.fault = only("killed", Faults(stores.after(60.0)))

    def ask() -> None:
        with contextlib.suppress(OSError):
            in_parts.ask("killed")

    copies = in_parts.copies()
    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(in_parts.unfinished)
    in_parts.server.kill()
    asking.join()
    assert in_parts.unfinished()
    web.fault = lambda path, reply: None
    in_parts.server.start()
    assert in_parts.unfinished() == set()
    assert set((in_parts.cache / "extents").glob("*/*")) == {each.parent for each in copies}
    assert in_parts.is_right("killed")


def test_a_cache_that_was_removed_is_no_failure_of_the_server(served: Served) -> None:
    assert served.is_right("gone")
    shutil.rmtree(served.cache)
    problem = check_problem(served.ask("gone"), 503, "cache-full")
    assert "somebody removed the folder" in str(problem)
    served.server.restart()
    assert served.is_right("gone")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with Bucket(objects=dict(shards(NUM_SHARDS))) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


URL = f"s3://{NAME}/web"


def test_servers_that_share_a_cache_fetch_once_and_have_one_limit(tmp_path: Path, bucket: Bucket) -> None:
    """With limits of their own, the smaller one starved: its plans were refused, or found no room."""
    groups = document({"shuffle": {"block_windows": SHARD_WINDOWS, "group_blocks": 2}})  # two need 4 shards
    one, two = (
        RunningServer(
            {"web": URL},
            tmp_path / name,
            workers=workers,
            arguments=arguments(tmp_path / "cache", most, 2**24),
        )
        for name, workers, most in (("one", 1, CACHE_SHARDS), ("two", 2, 2))
    )
    with one, two:
        plan = one.post_plan(groups).json()["id"]
        assert two.post_plan(groups).json()["id"] == plan
        bucket.gets.clear()
        bucket.fault = Faults(stores.after(0.5))
        responses: list[Response] = []
        asking = [
            threading.Thread(
                target=lambda each=each: responses.append(each.get("/v1/batches", plan=plan, step=0))
            )
            for each in (one, two)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert [each.status for each in responses] == [200, 200]
        assert responses[0].body == responses[1].body
        assert len(bucket.gets) == len(set(bucket.gets)) > 0
        for server in (one, two):
            assert metrics(server)["corpus_cache_bytes"] == CACHE_SHARDS * SHARD_BYTES
        said = f"holds at most {CACHE_SHARDS * SHARD_BYTES} bytes: another process uses it with this limit"
        assert said in two.log()
        assert "holds at most" not in one.log()
        one.kill()
        two.restart()  # nobody else uses the cache
        assert metrics(two)["corpus_cache_bytes"] == 2 * SHARD_BYTES
        assert "holds at most" not in two.log()
        check_problem(two.get("/v1/batches", plan=plan, step=0), 422, "cache-too-small", parameter="plan")


@pytest.fixture
def workers(tmp_path: Path, bucket: Bucket) -> Iterator[RunningServer]:
    """Two, that share a cache."""
    its = arguments(tmp_path / "cache", CACHE_SHARDS, 4096)
    with RunningServer({"web": URL}, tmp_path / "workers", workers=2, arguments=its) as server:
        yield server


def test_a_loop_over_more_than_the_cache_never_waits_and_what_is_staged_is_seen(
    tmp_path: Path, bucket: Bucket, workers: RunningServer
) -> None:
    """Ten shards, room for five, groups of two: every window once, in spite of a server killed and restarted.
    No request is told to come again since its extents are not there.

    What both workers share counts once, and what they find in the cache is told from what they fetch.
    """
    rows = 10
    plan, num_steps = document(rows=rows), NUM_SHARDS * SHARD_WINDOWS // rows
    plan_id = workers.post_plan(plan).json()["id"]
    seen: list[np.ndarray] = []

    def see() -> None:
        staged, unread = (
            f'corpus_staged_steps{{plan="{plan_id}"}}',
            f'corpus_unread_steps{{corpus="web",plan="{plan_id}"}}',
        )

        def numbers() -> dict[str, float]:
            found = metrics(workers)
            is_known = found.get(staged, 0) > 0 and unread in found and found["corpus_held_extents"] > 0
            return found if is_known else {}

        wait_until(numbers)
        its = numbers()
        assert its["corpus_cache_bytes"] == CACHE_SHARDS * SHARD_BYTES
        assert 0 < its["corpus_held_bytes"] <= CACHE_SHARDS * SHARD_BYTES
        assert 0 < its["corpus_held_extents"] <= CACHE_SHARDS * -(-SHARD_BYTES // 4096)
        # A worker may have had no request since the first one, or one of a step that the loader prefetches.
        assert num_steps - len(seen) - 20 <= its[unread] <= num_steps
        assert its[staged] <= num_steps * CACHE_SHARDS / NUM_SHARDS
        wait_until(
            lambda: (found := workers.get("/v1/live").json()["plans"]) and found[0]["staging"] is not None
        )
        live = workers.get("/v1/live").json()
        assert live["plans"][0]["plan"] == plan_id
        assert set(live["plans"][0]["staging"]["unread_seconds"]) == {"web"}
        assert live["cache"]["max_bytes"] == CACHE_SHARDS * SHARD_BYTES

    def num_refused() -> float:
        found = metrics(workers).items()
        return sum(number for name, number in found if 'route="/v1/batches",status="503"' in name)

    with CorpusLoader(workers.url, plan=plan, **SMALL) as loader:
        batches = iter(loader)
        for step in range(num_steps):
            batch = next(batches)
            seen.append(np.concatenate([batch.inputs.numpy(), batch.targets.numpy()[:, -1:]], axis=1))
            time.sleep(0.005)
            if step == 20:
                see()
            if step == num_steps // 2:
                workers.wait_until_idle()
                assert num_refused() == 0
                workers.restart()
    held = sum(path.stat().st_size for path in (tmp_path / "cache" / "extents").glob("*/*/*"))
    rows_seen = sorted(row.tobytes() for batch in seen for row in batch)
    assert rows_seen == sorted(row.tobytes() for row in windows(shards(NUM_SHARDS)))
    assert held <= CACHE_SHARDS * SHARD_BYTES
    workers.wait_until_idle()
    assert num_refused() == 0
    wait_until(lambda: metrics(workers)["corpus_found_bytes_total"] > 0)


def test_a_start_says_for_which_store_it_waits(tmp_path: Path) -> None:
    """Until then a server that waits for its bucket looks like one that hangs."""
    goes_on = threading.Event()
    with WebServer({"/web.bin": some_tokens(SHARD_TOKENS).tobytes()}) as store:
        store.fault = lambda path, reply: goes_on.wait(60) and None
        url = f"{store.url}/web.bin"
        server = RunningServer({"web": url}, tmp_path, arguments=("--cache-dir", str(tmp_path / "cache")))
        with ThreadPoolExecutor(1) as threads:
            started = threads.submit(server.start)
            try:
                wait_until(
                    lambda: (tmp_path / "server.log").exists() and f"web: opening {url}" in server.log()
                )
                assert not started.done()
            finally:
                goes_on.set()
                started.result()
                server.kill()
