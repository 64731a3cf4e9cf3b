"""Servers whose corpus lies in an object store, and what its faults do to those who ask."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from corpus_client import CorpusLoader, Staging
from corpus_server.corpus.index import index
from tests import stores
from tests.corpora import some_tokens, spec
from tests.metadata import write_metadata
from tests.serving import Response, RunningServer, check_problem
from tests.stores import Faults, WebServer

Bucket = Callable[[Mapping[str, bytes]], str]

SMALL = {"device": "cpu", "dtype": None, "staging": Staging(prefetch_bytes=20_000)}
"""Otherwise the client would ask for more steps at a time than the cache of these tests holds."""

NUM_SHARDS = 20
SHARD_TOKENS = 20_000
SEQ_LEN = 99  # 201 windows a shard
SHARD_WINDOWS = (SHARD_TOKENS - SEQ_LEN - 1) // SEQ_LEN + 1
SHARD_BYTES = 2 * SHARD_TOKENS


def shards() -> dict[str, bytes]:
    return {f"web/{n:03}.bin": some_tokens(SHARD_TOKENS, seed=n).tobytes() for n in range(NUM_SHARDS)}


def windows(contents: Mapping[str, bytes]) -> np.ndarray:
    """Return all windows of shards, in order."""
    found = []
    for _, content in sorted(contents.items()):
        tokens = np.frombuffer(content, "<u2")
        starts = range(0, SHARD_WINDOWS * SEQ_LEN, SEQ_LEN)
        found += [tokens[start : start + SEQ_LEN + 1] for start in starts]
    return np.stack(found)


def document(order: object = None, rows: int = 8) -> dict[str, object]:
    bounded = {"shuffle": {"block_windows": SHARD_WINDOWS, "group_blocks": 2}}
    stages = [{"global_batch_size": rows, "mixture": {"web": 1.0}}]
    return {"seq_len": SEQ_LEN, "order": order or bounded, "stages": stages}


def start(url: str, folder: Path, *, num_shards: int = 5, workers: int = 1) -> RunningServer:
    folder.mkdir(exist_ok=True)
    cache_bytes = str(num_shards * SHARD_BYTES)
    arguments = ("--cache-dir", str(folder.parent / "cache"), "--cache-bytes", cache_bytes)
    return RunningServer({"web": url}, folder, workers=workers, arguments=arguments)


def files_of(cache: Path) -> list[str]:
    return sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())


@pytest.fixture
def web() -> Iterator[WebServer]:
    content = some_tokens(SHARD_TOKENS).tobytes()
    with WebServer({"/web.bin": content}) as running:
        yield running


def first_batch(server: RunningServer, step: int = 0) -> Response:
    return server.get("/v1/batches", corpus="web", seq_len=99, batch_size=8, order="sequential", step=step)


def expected(web: WebServer) -> bytes:
    return windows({"web": web.files["/web.bin"]})[:8].tobytes()


def test_batches_are_those_of_local_files(tmp_path: Path, bucket: Bucket) -> None:
    objects = shards()
    local = tmp_path / "local" / "web"
    local.mkdir(parents=True)
    for name, content in objects.items():
        (local.parent / name).write_bytes(content)
    url = bucket(objects)
    with start(f"{url}/web", tmp_path / "a") as there, RunningServer({"web": local}, tmp_path) as here:
        plan = here.post_plan(document()).json()["id"]
        assert there.post_plan(document()).json()["id"] == plan
        for step in (0, 1, 2, 100, 101, 400, 3):
            query = {"plan": plan, "step": step, "count": 2}
            ours, theirs = (server.get("/v1/batches", **query) for server in (there, here))
            assert (ours.status, ours.body) == (200, theirs.body)
            assert ours.headers["Corpus-Checksum"] == theirs.headers["Corpus-Checksum"]
        for path, query in {
            "/v1/corpora/web/tokens": {"start": 19_990, "count": 100},
            f"/v1/plans/{plan}/receipt": {"step": 30},
        }.items():
            ours, theirs = (server.get(path, **query) for server in (there, here))
            assert (ours.status, ours.body) == (200, theirs.body)
        lines = there.get("/metrics").body.decode().splitlines()
    counted = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
    assert counted["corpus_staging_waits_total"] > 0
    # More than the cache holds, five shards, came and went.
    assert counted["corpus_staged_shards_total"] > 5
    assert counted["corpus_evicted_shards_total"] > 0
    assert counted["corpus_staged_bytes_total"] >= counted["corpus_staged_shards_total"] * SHARD_BYTES


def test_rows_of_documents_are_those_of_local_files(tmp_path: Path, bucket: Bucket) -> None:
    """A row lies in one shard, so a cache of some shards is enough; full shuffle needs all of them."""
    local = tmp_path / "local" / "web"
    local.mkdir(parents=True)
    for name, content in shards().items():
        tokens = np.frombuffer(content, "<u2") % 100  # a document has about 100 tokens
        (local.parent / name).write_bytes(np.append(tokens[:-1], np.uint16(0)).tobytes())
    num_documents = index(spec(local, eot=0)).num_documents
    write_metadata(local / "documents", {"id": list(range(num_documents))})
    url = bucket({f"web/{name}": content for name, content in stores.contents(local).items()})
    with start(f"{url}/web", tmp_path / "a") as there, RunningServer({"web": local}, tmp_path) as here:
        plans = []
        for order in ("sequential", {"shuffle": {"block_windows": 200, "group_blocks": 1}}, "shuffle"):
            rows = {"block_documents": 1000, "balance_ranks": order == "sequential"}
            asked = {**document(order), "rows": {"documents": rows}}
            plans.append(here.post_plan(asked).json()["id"])
            assert there.post_plan(asked).json()["id"] == plans[-1]
        for plan, step in itertools.product(plans[:2], (0, 1, 60, 61, 300)):
            part = {"plan": plan, "step": step, "rank": 1, "world_size": 2}
            ours, theirs = (server.get("/v1/batches", **part) for server in (there, here))
            assert (ours.status, ours.body) == (200, theirs.body)
        for number in (0, num_documents - 1):
            path = f"/v1/corpora/web/documents/{number}"
            assert there.get(path).json() == here.get(path).json()
            assert there.get(path).json()["metadata"] == {"id": number}
        refused = there.get("/v1/batches", plan=plans[2], step=0)
        assert "bounded shuffle, for example" in check_problem(refused, 422, "cache-too-small")["remedy"]


def test_the_shards_of_the_next_steps_are_listed_and_staged(tmp_path: Path, bucket: Bucket) -> None:
    with start(f"{bucket(shards())}/web", tmp_path / "a") as server:
        plan = server.post_plan(document(rows=4)).json()["id"]
        steps = 2 * SHARD_WINDOWS // 4  # the first group, but for the rest of a division
        listed = server.get(f"/v1/plans/{plan}/shards", step=0, count=steps).json()
        assert [each["is_local"] for each in listed["shards"]] == [False, False]
        assert listed["num_bytes"] == 2 * SHARD_BYTES
        assert sum(each["num_rows"] for each in listed["shards"]) == 4 * steps
        indices = server.get("/v1/indices", plan=plan, step=0, count=steps).json()
        used = {indices["shards"][shard]["name"] for batch in indices["indices"] for shard, _ in batch}
        assert {each["name"] for each in listed["shards"]} == used
        assert server.get("/v1/batches", plan=plan, step=0).status == 200
        deadline = time.monotonic() + 20
        while True:  # the next group comes without being asked for
            listed = server.get(f"/v1/plans/{plan}/shards", step=0, count=2 * steps).json()
            if all(each["is_local"] for each in listed["shards"]):
                break
            assert time.monotonic() < deadline, listed
            time.sleep(0.05)
        check_problem(
            server.get(f"/v1/plans/{plan}/shards", step=0, count=5000),
            422,
            "invalid-parameter",
            parameter="count",
        )


def test_a_loss_mask_is_staged_with_its_shard(tmp_path: Path, web: WebServer) -> None:
    web.files["/web.bin.mask.npy"] = bytes(SHARD_TOKENS)
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        response = first_batch(server)
        assert (response.status, response.body) == (200, expected(web))
        copies = (tmp_path / "cache" / "shards").glob("*/tokens")
        assert sorted(copy.stat().st_size for copy in copies) == [SHARD_TOKENS, SHARD_BYTES]


def test_where_rows_lie_is_told_without_staging_and_their_masks_with_it(
    tmp_path: Path, web: WebServer
) -> None:
    web.files["/web.bin.mask.npy"] = bytes([1, 0]) * (SHARD_TOKENS // 2)
    rows = {
        "corpus": "web",
        "seq_len": 99,
        "batch_size": 8,
        "order": "sequential",
        "step": 0,
        "format": "raw",
    }
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        for names, beside, num_copies in (
            ("sources", bytes(16), 0),
            ("loss_mask", (bytes([1, 0] * 50) + bytes([0, 1] * 50)) * 4, 2),
        ):
            response = server.get("/v1/indices", **rows, **{"with": names})
            assert (response.status, response.body[128:]) == (200, beside)
            assert len(list((tmp_path / "cache" / "shards").glob("*/tokens"))) == num_copies


def test_full_shuffle_is_refused_with_the_arithmetic(tmp_path: Path, bucket: Bucket) -> None:
    with start(f"{bucket(shards())}/web", tmp_path / "a") as server:
        plan = server.post_plan(document("shuffle")).json()["id"]
        problem = check_problem(
            server.get("/v1/batches", plan=plan, step=0), 422, "cache-too-small", parameter="plan"
        )
        assert f"{5 * SHARD_BYTES:,} bytes" in problem["detail"]
        assert f"{NUM_SHARDS * SHARD_BYTES:,} bytes" in problem["detail"]
        assert "group_blocks" in problem["remedy"]
        bounded = server.post_plan(document()).json()["id"]
        many = server.get("/v1/batches", plan=bounded, step=0, count=400)
        check_problem(many, 422, "response-too-large", parameter="count")
        # Where nothing is read, nothing is refused.
        assert server.get("/v1/indices", plan=plan, step=0).status == 200
        wide = {"shuffle": {"block_windows": SHARD_WINDOWS, "group_blocks": 3}}
        plan = server.post_plan(document(wide)).json()["id"]
        check_problem(server.get("/v1/batches", plan=plan, step=0), 422, "cache-too-small", parameter="plan")


def test_a_request_that_would_wait_too_long_is_told_when_to_come_again(
    tmp_path: Path, web: WebServer
) -> None:
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        web.fault = Faults(stores.after(8.0))
        began = time.monotonic()
        # All slots of gather threads: whoever waits holds none.
        responses: list[Response] = []
        asking = [threading.Thread(target=lambda: responses.append(first_batch(server))) for _ in range(8)]
        for thread in asking:
            thread.start()
        time.sleep(0.5)
        assert server.get("/v1/indices", corpus="web", seq_len=99, batch_size=8, step=0).status == 200
        assert time.monotonic() - began < 2.5
        for thread in asking:
            thread.join()
        for response in responses:
            check_problem(response, 503, "not-staged")
            assert 1 <= int(response.headers["Retry-After"]) <= 60
        assert time.monotonic() - began < 7
        assert "never retrieved" not in server.log()


@pytest.mark.parametrize("name", ["short", "whole", "shifted", "expired", "forbidden", "changed"])
def test_a_store_that_fails_gives_errors_and_never_tokens(tmp_path: Path, web: WebServer, name: str) -> None:
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        web.fault = Faults(getattr(stores, name))
        response = first_batch(server)
        problem = check_problem(response, 503, "corpus-changed" if name == "changed" else "store-failed")
        assert "web.bin" in problem["detail"]
        assert name not in ("expired", "forbidden") or "credentials" in problem["remedy"]
        assert [each for each in files_of(tmp_path / "cache") if each.startswith("shards")] == []
        web.fault = lambda path, reply: None
        deadline = time.monotonic() + 20
        while (response := first_batch(server)).status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert response.body == expected(web)


def test_a_copy_in_the_cache_that_changes_is_staged_anew(tmp_path: Path, web: WebServer) -> None:
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        assert first_batch(server).status == 200
        (copy,) = (tmp_path / "cache" / "shards").glob("*/tokens")
        with copy.open("r+b") as file:
            file.write(bytes(100))
        response = first_batch(server)
        assert (response.status, response.body) == (200, expected(web))


def test_a_server_killed_while_it_stages_leaves_nothing(tmp_path: Path, web: WebServer) -> None:
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        web.fault = Faults(stores.after(60.0))

        def ask() -> None:
            with contextlib.suppress(OSError):
                first_batch(server)

        asking = threading.Thread(target=ask)
        asking.start()
        cache = tmp_path / "cache"
        while not [each for each in files_of(cache) if each.endswith(".tokens.tmp")]:
            time.sleep(0.02)
        server.kill()
        asking.join()
        assert [each for each in files_of(cache) if each.endswith(".tokens.tmp")]
        web.fault = lambda path, reply: None
        server.start()
        assert [each for each in files_of(cache) if each.startswith("shards")] == []
        assert first_batch(server).body == expected(web)


def test_two_servers_share_a_cache(tmp_path: Path, web: WebServer) -> None:
    # One range: `after` shows which server fetches it.
    with (
        start(f"{web.url}/web.bin", tmp_path / "a") as one,
        start(f"{web.url}/web.bin", tmp_path / "b") as two,
    ):
        web.gets.clear()
        web.fault = Faults(stores.after(1.0))
        responses: list[Response] = []
        asking = [
            threading.Thread(target=lambda each=each: responses.append(first_batch(each)))
            for each in (one, two)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert [response.body for response in responses] == [expected(web)] * 2
        assert len(web.gets) == 1


def test_an_object_that_is_replaced_is_refused_until_the_server_is_restarted(
    tmp_path: Path, web: WebServer
) -> None:
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        old, web.files["/web.bin"] = web.files["/web.bin"], some_tokens(SHARD_TOKENS, seed=9).tobytes()
        check_problem(first_batch(server), 503, "corpus-changed")
        server.restart()
        assert first_batch(server).body == expected(web)
        assert hashlib.md5(old).digest() != hashlib.md5(web.files["/web.bin"]).digest()


def test_a_loop_over_more_than_the_cache_never_waits_after_the_first_group(
    tmp_path: Path, bucket: Bucket
) -> None:
    """20 shards, room for 5, groups of 2: every window once, in spite of a server killed and restarted.

    Two workers share the cache.
    """
    objects = shards()
    url = bucket(objects)
    rows = 8
    with start(f"{url}/web", tmp_path / "a", workers=2) as server:
        plan = document(rows=rows)
        steps = NUM_SHARDS * SHARD_WINDOWS // rows
        seen, waits = [], []
        with CorpusLoader(server.url, plan=plan, **SMALL) as loader:
            batches = iter(loader)
            for step in range(steps):
                began = time.monotonic()
                batch = next(batches)
                waits.append(time.monotonic() - began)
                seen.append(np.concatenate([batch.inputs.numpy(), batch.targets.numpy()[:, -1:]], axis=1))
                time.sleep(0.015)
                if step == steps // 2:
                    server.restart()
            late = [round(wait, 2) for step, wait in enumerate(waits) if wait > 1.0 and step > 0]
        held = sum(path.stat().st_size for path in (tmp_path / "cache" / "shards").glob("*/*"))
    rows_seen = sorted(row.tobytes() for batch in seen for row in batch)
    assert rows_seen == sorted(row.tobytes() for row in windows(objects))
    assert held <= 5 * SHARD_BYTES
    assert len(late) <= 1, late  # the restart


def test_a_cache_that_was_removed_is_no_failure_of_the_server(tmp_path: Path, web: WebServer) -> None:
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        assert first_batch(server).body == expected(web)
        shutil.rmtree(tmp_path / "cache")
        check_problem(first_batch(server), 503, "cache-full")
        server.restart()
        assert first_batch(server).body == expected(web)
