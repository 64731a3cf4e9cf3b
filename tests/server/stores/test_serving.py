"""Servers whose corpus lies in an object store, and what its faults do to those who ask."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from corpus_client import CorpusLoader, Staging
from corpus_server.corpus.index import index
from tests import stores
from tests.corpora import some_tokens, spec, write_npy
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


def document(order: object = None, rows: int = 8, block_windows: int = SHARD_WINDOWS) -> dict[str, object]:
    bounded = {"shuffle": {"block_windows": block_windows, "group_blocks": 2}}
    stages = [{"global_batch_size": rows, "mixture": {"web": 1.0}}]
    return {"seq_len": SEQ_LEN, "order": order or bounded, "stages": stages}


def start(
    url: str, folder: Path, *, num_shards: int = 5, workers: int = 1, extent_bytes: int = 2**24
) -> RunningServer:
    folder.mkdir(exist_ok=True)
    options = {
        "--cache-dir": folder.parent / "cache",
        "--cache-bytes": num_shards * SHARD_BYTES,
        "--extent-bytes": extent_bytes,
    }
    arguments = tuple(str(each) for option in options.items() for each in option)
    return RunningServer({"web": url}, folder, workers=workers, arguments=arguments)


def files_of(cache: Path) -> list[str]:
    return sorted(
        (Path(folder) / name).relative_to(cache).as_posix()
        for folder, _, names in os.walk(cache)  # which takes it that a folder is removed meanwhile
        for name in names
    )


@pytest.fixture
def web() -> Iterator[WebServer]:
    content = some_tokens(SHARD_TOKENS).tobytes()
    with WebServer({"/web.bin": content}) as running:
        yield running


def metrics(server: RunningServer) -> dict[str, float]:
    lines = server.get("/metrics").body.decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def first_batch(server: RunningServer, step: int = 0) -> Response:
    return server.get("/v1/batches", corpus="web", seq_len=99, batch_size=8, order="sequential", step=step)


def expected(web: WebServer) -> bytes:
    return windows({"web": web.files["/web.bin"]})[:8].tobytes()


@pytest.mark.parametrize(
    ("extent_bytes", "block_windows"), [(4096, SHARD_WINDOWS), (2**24, SHARD_WINDOWS), (32768, 130)]
)
def test_batches_are_those_of_local_files(
    tmp_path: Path, bucket: Bucket, extent_bytes: int, block_windows: int
) -> None:
    """A shard has ten extents, the last one shorter, or one, or those of its blocks; groups come and go."""
    objects = shards()
    local = tmp_path / "local" / "web"
    local.mkdir(parents=True)
    for name, content in objects.items():
        (local.parent / name).write_bytes(content)
    url = bucket(objects)
    there = start(f"{url}/web", tmp_path / "a", extent_bytes=extent_bytes)
    with there, RunningServer({"web": local}, tmp_path) as here:
        asked = document(block_windows=block_windows)
        plan = here.post_plan(asked).json()["id"]
        assert there.post_plan(asked).json()["id"] == plan
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
        counted = metrics(there)
    assert counted["corpus_staging_waits_total"] > 0
    # More than the cache holds, five shards, came and went.
    assert counted["corpus_staged_bytes_total"] > 5 * SHARD_BYTES
    assert counted["corpus_evicted_extents_total"] > 0
    largest = min(extent_bytes, SHARD_BYTES)
    assert counted["corpus_staged_bytes_total"] <= counted["corpus_staged_extents_total"] * largest


def test_files_of_a_mounted_disk_are_staged_as_objects_are(tmp_path: Path) -> None:
    """Plans are the same with and without `file://`. A replaced file is refused, and so is a link."""
    folder = tmp_path / "mounted" / "web"
    folder.mkdir(parents=True)
    for name, content in shards().items():
        (folder.parent / name).write_bytes(content)
    with (
        start(f"file://{folder}", tmp_path / "a") as staged,
        RunningServer({"web": folder}, tmp_path) as here,
    ):
        plan = here.post_plan(document()).json()["id"]
        assert staged.post_plan(document()).json()["id"] == plan
        for step in (0, 1, 100, 400, 3):
            ours, theirs = (server.get("/v1/batches", plan=plan, step=step) for server in (staged, here))
            assert (ours.status, ours.body) == (200, theirs.body)
        copies = list((tmp_path / "cache" / "extents").glob("*/tokens"))
        assert 0 < len(copies) <= 5
        corpora = [server.get("/v1/corpora").json()["corpora"][0] for server in (staged, here)]
        assert corpora[0]["fingerprint"] == corpora[1]["fingerprint"]
        assert str(tmp_path) not in json.dumps(corpora[0])
        for name in shards():
            (folder.parent / f"{name}.new").write_bytes(bytes(SHARD_BYTES))
            (folder.parent / f"{name}.new").rename(folder.parent / name)
        last = NUM_SHARDS * SHARD_WINDOWS // 8 - 1
        check_problem(staged.get("/v1/batches", plan=plan, step=last), 503, "corpus-changed")
    (folder / "020.bin").symlink_to(folder / "000.bin")
    with pytest.raises(RuntimeError, match="symbolic link"):
        start(f"file://{folder}", tmp_path / "b").start()


def test_random_plans_over_extents_give_the_rows_of_local_files(tmp_path: Path, bucket: Bucket) -> None:
    """Shards of all sizes with headers and a mask; windows of all lengths, also longer than an extent."""
    random, local = np.random.default_rng(7), tmp_path / "local" / "web"
    local.mkdir(parents=True)
    for number in range(6):
        write_npy(local / f"{number}.npy", some_tokens(int(random.integers(3000, 30_000)), seed=number))
    masked = local / "1.npy"
    np.save(local / "1.npy.mask.npy", random.integers(0, 2, np.load(masked).size).astype(bool))
    url = bucket({f"web/{name}": content for name, content in stores.contents(local).items()})
    there = start(f"{url}/web", tmp_path / "a", num_shards=12, extent_bytes=4096)
    with there, RunningServer({"web": local}, tmp_path) as here:
        for seed in range(12):
            block, group, seq_len = (int(random.integers(*each)) for each in ((1, 400), (1, 6), (1, 2600)))
            bounded = {"shuffle": {"block_windows": block, "group_blocks": group}}
            asked = document((bounded, "sequential", "shuffle")[seed % 3], rows=int(random.integers(1, 9)))
            asked |= {"seq_len": seq_len, "seed": seed, "stride": int(random.integers(1, seq_len + 1))}
            plan = here.post_plan(asked).json()["id"]
            assert there.post_plan(asked).json()["id"] == plan
            for step in random.integers(0, 500, 5).tolist():
                query = {"plan": plan, "step": step, "count": 2, "format": "raw", "with": "loss_mask"}
                ours, theirs = (server.get("/v1/batches", **query) for server in (there, here))
                assert (ours.status, ours.body) == (200, theirs.body), (asked, step)


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
    there = start(f"{url}/web", tmp_path / "a", extent_bytes=4096)
    with there, RunningServer({"web": local}, tmp_path) as here:
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
        refused = check_problem(there.get("/v1/batches", plan=plans[2], step=0), 422, "cache-too-small")
        assert "bounded shuffle, for example" in refused["remedy"]
        # A row holds pieces of two documents in the mean, and a step fetches extents, not shards.
        assert "each step of 8 rows reads pieces of up to 16 of 200 extents at random" in refused["detail"]
        assert "800,000 bytes together: about 12 of them, 48,000 bytes" in refused["detail"]
        wide = {"shuffle": {"block_windows": 200, "group_blocks": 4}}
        plan = there.post_plan({**document(wide), "rows": {"documents": {}}}).json()["id"]
        refused = check_problem(there.get("/v1/batches", plan=plan, step=0), 422, "cache-too-small")
        assert "shards count as a whole: a row may lie anywhere in its shard" in refused["detail"]


@pytest.mark.parametrize("eot_at", ["first", "last"])
def test_rows_of_shards_that_are_cut_inside_documents_are_those_of_local_files(
    tmp_path: Path, bucket: Bucket, eot_at: str
) -> None:
    """Both ends of each object are read when it is opened, so open documents are known without a request."""
    local = tmp_path / "local" / "web"
    local.mkdir(parents=True)
    for name, content in shards().items():
        tokens = np.frombuffer(content, "<u2") % 97 + 1
        tokens[5::40] = 0
        (local.parent / name).write_bytes(tokens.tobytes())
    index(replace(spec(local, eot=0), eot_at=eot_at))
    url = bucket({f"web/{name}": content for name, content in stores.contents(local).items()})
    arguments = [f"web={local},eot_at={eot_at}"]
    there = start(f"{url}/web,eot_at={eot_at}", tmp_path / "a", extent_bytes=4096)
    with there, RunningServer({}, tmp_path, arguments=arguments) as here:
        asked = {**document("sequential"), "rows": "documents"}
        plan = here.post_plan(asked).json()
        assert there.post_plan(asked).json()["id"] == plan["id"]
        bodies = [
            [server.get("/v1/batches", plan=plan["id"], step=step) for step in range(0, 300, 50)]
            for server in (there, here)
        ]
        assert [each.status for each in bodies[0]] == [200] * 6
        assert [each.body for each in bodies[0]] == [each.body for each in bodies[1]]


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
        copies = (tmp_path / "cache" / "extents").glob("*/tokens")
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
            assert len(list((tmp_path / "cache" / "extents").glob("*/tokens"))) == num_copies


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


@pytest.mark.parametrize("extent_bytes", [4096, 2**24])
@pytest.mark.parametrize("name", ["short", "whole", "shifted", "expired", "forbidden", "changed"])
def test_a_store_that_fails_gives_errors_and_never_tokens(
    tmp_path: Path, web: WebServer, name: str, extent_bytes: int
) -> None:
    """The log says it in one line, for all extents."""
    with start(f"{web.url}/web.bin", tmp_path / "a", extent_bytes=extent_bytes) as server:
        web.fault = Faults(getattr(stores, name))
        response = first_batch(server)
        problem = check_problem(response, 503, "corpus-changed" if name == "changed" else "store-failed")
        assert "web.bin" in problem["detail"]
        assert name not in ("expired", "forbidden") or "credentials" in problem["remedy"]
        assert [each for each in files_of(tmp_path / "cache") if each.endswith("/tokens")] == []
        assert server.log().count("was not staged") == 1
        web.fault = lambda path, reply: None
        deadline = time.monotonic() + 20
        while (response := first_batch(server)).status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert response.body == expected(web)


def test_a_copy_in_the_cache_that_changes_is_staged_anew(tmp_path: Path, web: WebServer) -> None:
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        assert first_batch(server).status == 200
        (copy,) = (tmp_path / "cache" / "extents").glob("*/tokens")
        with copy.open("r+b") as file:
            file.write(bytes(100))
        response = first_batch(server)
        assert (response.status, response.body) == (200, expected(web))


@pytest.mark.parametrize("extent_bytes", [4096, 2**24])
def test_a_server_killed_while_it_stages_leaves_nothing(
    tmp_path: Path, web: WebServer, extent_bytes: int
) -> None:
    with start(f"{web.url}/web.bin", tmp_path / "a", extent_bytes=extent_bytes) as server:
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
        assert [each for each in files_of(cache) if each.startswith("extents")] == []
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


def test_servers_that_share_a_cache_have_one_limit(tmp_path: Path, bucket: Bucket) -> None:
    """With limits of their own, the smaller one starved: its plans were refused, or found no room."""
    url = f"{bucket(shards())}/web"
    groups = {"shuffle": {"block_windows": SHARD_WINDOWS, "group_blocks": 2}}  # two of them need 4 shards
    with start(url, tmp_path / "a") as one, start(url, tmp_path / "b", num_shards=2, workers=2) as two:
        for server in (one, two):
            plan = server.post_plan(document(groups)).json()["id"]
            assert server.get("/v1/batches", plan=plan, step=0).status == 200
            assert metrics(server)["corpus_cache_bytes"] == 5 * SHARD_BYTES
        said = f"holds at most {5 * SHARD_BYTES} bytes, as others have it that use it now"
        assert said in two.log()
        assert "holds at most" not in one.log()
    with start(url, tmp_path / "c", num_shards=2) as server:  # nobody else uses it
        assert metrics(server)["corpus_cache_bytes"] == 2 * SHARD_BYTES
        assert "holds at most" not in server.log()
        plan = server.post_plan(document(groups)).json()["id"]
        check_problem(server.get("/v1/batches", plan=plan, step=0), 422, "cache-too-small", parameter="plan")


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
        held = sum(path.stat().st_size for path in (tmp_path / "cache" / "extents").glob("*/*"))
    rows_seen = sorted(row.tobytes() for batch in seen for row in batch)
    assert rows_seen == sorted(row.tobytes() for row in windows(objects))
    assert held <= 5 * SHARD_BYTES
    assert len(late) <= 1, late  # the restart


@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_a_loader_says_that_it_waits_for_the_bucket(tmp_path: Path, web: WebServer, seconds: float) -> None:
    """A response waits for 3 s; after that it is refused, and the loader waits until it asks again."""
    plan = {"seq_len": SEQ_LEN, "stages": [{"global_batch_size": 8, "mixture": {"web": 1.0}}]}
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        web.fault = Faults(stores.after(seconds))
        with CorpusLoader(server.url, plan=plan, **SMALL) as loader:
            next(loader)
            stats = loader.stats()
        assert stats.wait.cause == "bucket"
        assert seconds * 0.9 <= stats.wait.bucket <= stats.wait_seconds


def test_what_is_staged_is_seen_and_what_workers_share_counts_once(tmp_path: Path, bucket: Bucket) -> None:
    """Also by a server that finds extents in its cache: they are told from those of the bucket."""
    rows, last = 8, 10
    steps = -(-NUM_SHARDS * SHARD_WINDOWS // rows)

    def ask() -> dict[str, float]:
        """Ask for some steps on connections of their own; return the metrics when they say so."""
        for step in range(last + 1):
            assert server.get("/v1/batches", plan=plan, step=step).status == 200
        deadline = time.monotonic() + 60
        while True:
            numbers = metrics(server)
            unread = numbers.get(f'corpus_unread_steps{{corpus="web",plan="{plan}"}}')
            staged = numbers.get(f'corpus_staged_steps{{plan="{plan}"}}', 0)
            if staged > 0 and unread is not None and numbers["corpus_held_extents"] > 0:
                return numbers
            assert time.monotonic() < deadline, numbers
            time.sleep(0.1)

    with start(f"{bucket(shards())}/web", tmp_path / "a", workers=2, extent_bytes=4096) as server:
        plan = server.post_plan(document("sequential", rows)).json()["id"]
        first = ask()
        assert first["corpus_cache_bytes"] == 5 * SHARD_BYTES
        assert 0 < first["corpus_held_bytes"] <= 5 * SHARD_BYTES
        assert 0 < first["corpus_held_extents"] <= 5 * -(-SHARD_BYTES // 4096)
        # A worker may have had no request since the first one.
        unread = first[f'corpus_unread_steps{{corpus="web",plan="{plan}"}}']
        assert steps - last <= unread <= steps
        # The cache holds a quarter of the steps.
        assert first[f'corpus_staged_steps{{plan="{plan}"}}'] <= steps / 4
        deadline = time.monotonic() + 60
        while not (its := server.get("/v1/live").json()["plans"]) or its[0]["staging"] is None:
            assert time.monotonic() < deadline, its
            time.sleep(0.1)
        assert its[0]["plan"] == plan
        assert set(its[0]["staging"]["unread_seconds"]) == {"web"}
        assert server.get("/v1/live").json()["cache"]["max_bytes"] == 5 * SHARD_BYTES
        server.restart()
        assert ask()["corpus_found_bytes_total"] > 0


def test_copies_that_were_changed_while_no_server_ran_are_staged_anew(tmp_path: Path, web: WebServer) -> None:
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        assert first_batch(server).body == expected(web)
        server.stop()
        for path in (tmp_path / "cache").glob("extents/*/tokens"):
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
        server.start()
        assert first_batch(server).body == expected(web)
        assert server.log().count("was changed in the cache: such ones are staged anew") == 1


def test_a_cache_that_was_removed_is_no_failure_of_the_server(tmp_path: Path, web: WebServer) -> None:
    with start(f"{web.url}/web.bin", tmp_path / "a") as server:
        assert first_batch(server).body == expected(web)
        shutil.rmtree(tmp_path / "cache")
        check_problem(first_batch(server), 503, "cache-full")
        server.restart()
        assert first_batch(server).body == expected(web)
