"""Rows of corpora in object stores are those of the same files on this machine, however they are cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.index import index
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import UnreadableCorpus
from tests import stores
from tests.buckets import NAME, Bucket
from tests.corpora import some_tokens, spec, write_npy, write_raw
from tests.metadata import write_metadata
from tests.server.stores.served import SEQ_LEN, SHARD_BYTES, SHARD_TOKENS, SHARD_WINDOWS, document, metrics
from tests.serving import Response, RunningServer, check_problem, wait_until
from tests.stores import once_staged

pytest.importorskip("obstore")

NUM_SHARDS = 20
CACHE_SHARDS = {4096: 100, 32768: 60, 2**24: 10}
"""Whose tokens a cache holds, by the size of extents. Where it is less than is read, groups come and go."""


def write_corpora(folder: Path) -> int:
    """Write all corpora; return how many documents `documents` has."""
    for name in ("web", "listed", "documents", "first", "last", "sizes", "short"):
        (folder / name).mkdir()
    for number in range(NUM_SHARDS):
        tokens = some_tokens(SHARD_TOKENS, seed=number)
        for name in ("web", "listed"):
            write_raw(folder / name / f"{number:03}.bin", tokens)
        # A document has about 100 tokens.
        write_raw(folder / "documents" / f"{number:03}.bin", np.append(tokens[:-1] % 100, 0))
        if number < 8:
            cut = tokens % 97 + 1
            cut[5::40] = 0
            for name in ("first", "last"):
                write_raw(folder / name / f"{number:03}.bin", cut)
    for name in ("first", "last"):
        index(replace(spec(folder / name, eot=0), eot_at=name))
    num_documents = index(spec(folder / "documents", eot=0)).num_documents
    write_metadata(folder / "documents" / "documents", {"id": list(range(num_documents))})
    random = np.random.default_rng(7)
    for number in range(6):
        tokens = some_tokens(int(random.integers(3000, 30_000)), seed=number)
        write_npy(folder / "sizes" / f"{number}.npy", tokens)
        if number == 1:
            np.save(folder / "sizes" / "1.npy.mask.npy", random.integers(0, 2, tokens.size).astype(bool))
    for number in range(2):
        write_raw(folder / "short" / f"{number}.bin", some_tokens(SHARD_TOKENS, seed=number))
    shutil.copytree(folder / "web", folder / "mounted")
    return num_documents


@dataclass
class World:
    """The corpora on this machine, a server of those files, and one for each size of extents of a bucket."""

    folder: Path
    num_documents: int
    here: RunningServer
    there: dict[int, RunningServer]

    def plan(self, extent_bytes: int, asked: object) -> str:
        """Post a plan to both servers; return its id, which is the same."""
        plan: str = self.here.post_plan(asked).json()["id"]
        assert self.there[extent_bytes].post_plan(asked).json()["id"] == plan
        return plan

    def ask(self, extent_bytes: int, path: str, **query: object) -> Response:
        """Ask both servers; return the response, which is the same."""
        ours = once_staged(lambda: self.there[extent_bytes].get(path, **query))
        theirs = self.here.get(path, **query)
        assert (ours.status, ours.body) == (200, theirs.body), (path, query)
        assert ours.headers["Corpus-Checksum"] == theirs.headers["Corpus-Checksum"]
        return ours

    def refused(self, extent_bytes: int, asked: object) -> dict[str, Any]:
        """Post a plan whose order the cache is too small for; return the refusal of its batches."""
        server = self.there[extent_bytes]
        plan = server.post_plan(asked).json()["id"]
        # Where nothing is read, nothing is refused.
        assert server.get("/v1/indices", plan=plan, step=0).status == 200
        response = server.get("/v1/batches", plan=plan, step=0)
        return check_problem(response, 422, "cache-too-small", parameter="plan")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("corpora")
    num_documents = write_corpora(folder)
    options = {"first": ",eot_at=first", "last": ",eot_at=last"}
    of_size = {
        4096: ("web", "documents", "first", "last", "sizes"),
        32768: ("web", "sizes", "short"),
        2**24: ("web", "listed", "documents"),
    }
    with ExitStack() as stack:
        bucket = stack.enter_context(Bucket(objects=dict(stores.contents(folder))))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in bucket.environment.items():
            patch.setenv(name, value)
        there = {}
        for extent_bytes, names in of_size.items():
            its = tmp_path_factory.mktemp("server")
            corpora = {name: f"s3://{NAME}/{name}{options.get(name, '')}" for name in names}
            if extent_bytes == 2**24:
                corpora["mounted"] = f"file://{folder}/mounted"
            arguments = {
                "--cache-dir": its / "cache",
                "--cache-bytes": CACHE_SHARDS[extent_bytes] * SHARD_BYTES,
                "--extent-bytes": extent_bytes,
            }
            words = [str(each) for option in arguments.items() for each in option]
            there[extent_bytes] = stack.enter_context(RunningServer(corpora, its, arguments=words))
        local = {
            each.name: f"{each}{options.get(each.name, '')}" for each in folder.iterdir() if each.is_dir()
        }
        here = stack.enter_context(RunningServer(local, tmp_path_factory.mktemp("here")))
        yield World(folder, num_documents, here, there)


def test_the_shards_of_the_next_steps_are_listed_and_staged(world: World) -> None:
    server, plan = world.there[2**24], world.plan(2**24, document(rows=4, name="listed"))
    steps = 2 * SHARD_WINDOWS // 4  # the first group, but for the rest of a division
    listed = server.get(f"/v1/plans/{plan}/shards", step=0, count=steps).json()
    assert [each["is_local"] for each in listed["shards"]] == [False, False]
    assert listed["num_bytes"] == 2 * SHARD_BYTES
    assert sum(each["num_rows"] for each in listed["shards"]) == 4 * steps
    indices = server.get("/v1/indices", plan=plan, step=0, count=steps).json()
    used = {indices["shards"][shard]["name"] for batch in indices["indices"] for shard, _ in batch}
    assert {each["name"] for each in listed["shards"]} == used
    assert once_staged(lambda: server.get("/v1/batches", plan=plan, step=0)).status == 200

    def is_local() -> bool:
        """The next group comes without being asked for."""
        its = server.get(f"/v1/plans/{plan}/shards", step=0, count=2 * steps).json()["shards"]
        return all(each["is_local"] for each in its)

    wait_until(is_local)
    check_problem(
        server.get(f"/v1/plans/{plan}/shards", step=0, count=5000),
        422,
        "invalid-parameter",
        parameter="count",
    )


@pytest.mark.parametrize(
    ("extent_bytes", "block_windows"), [(4096, SHARD_WINDOWS), (2**24, SHARD_WINDOWS), (32768, 130)]
)
def test_batches_are_those_of_local_files(world: World, extent_bytes: int, block_windows: int) -> None:
    """A shard has ten extents, the last one shorter, or one, or those of its blocks."""
    before = metrics(world.there[extent_bytes])
    plan = world.plan(extent_bytes, document(block_windows=block_windows))
    for step in (0, 1, 2, 100, 101, 200, 300, 400, 3):
        world.ask(extent_bytes, "/v1/batches", plan=plan, step=step, count=2)
    world.ask(extent_bytes, "/v1/corpora/web/tokens", start=19_990, count=100)
    receipt = f"/v1/plans/{plan}/receipt"
    ours = once_staged(lambda: world.there[extent_bytes].get(receipt, step=30))
    assert (ours.status, ours.body) == (200, world.here.get(receipt, step=30).body)
    now = metrics(world.there[extent_bytes])

    def counted(name: str) -> float:
        return now[f"corpus_{name}_total"] - before[f"corpus_{name}_total"]

    assert counted("staging_waits") > 0
    if CACHE_SHARDS[extent_bytes] < NUM_SHARDS:
        assert counted("evicted_extents") > 0
        assert counted("staged_bytes") > CACHE_SHARDS[extent_bytes] * SHARD_BYTES
    most = counted("staged_extents") + 12  # on their way: they count once they are whole, their bytes at once
    assert counted("staged_bytes") <= most * min(extent_bytes, SHARD_BYTES)
    assert now["corpus_held_bytes"] <= now["corpus_cache_bytes"] == CACHE_SHARDS[extent_bytes] * SHARD_BYTES


def test_rows_of_two_extents_that_begin_at_one_byte_are_those_of_local_files(world: World) -> None:
    """Of a block that has three windows in the second shard, and of the next block.

    The failure was: one extent was taken for the other, was not mapped, and the worker ended with SIGSEGV.
    """
    block_windows = 68
    in_short = -SHARD_WINDOWS % block_windows
    bounded = {"shuffle": {"block_windows": block_windows, "group_blocks": 8}}
    plan = world.plan(32768, document(bounded, name="short"))
    indices = world.here.get("/v1/indices", plan=plan, step=0, count=2 * SHARD_WINDOWS // 8).json()["indices"]
    num_asked = 0
    for step, rows in enumerate(indices):
        windows = [start // SEQ_LEN for shard, start in rows if shard == 1]
        if (
            windows
            and windows[0] < in_short
            and any(in_short <= each < in_short + block_windows for each in windows)
        ):
            world.ask(32768, "/v1/batches", plan=plan, step=step)
            num_asked += 1
    assert num_asked > 0


def test_files_of_a_mounted_disk_are_staged_as_objects_are(world: World, tmp_path: Path) -> None:
    """Plans are the same with and without `file://`. A replaced file is refused, and so is a link."""
    plan = world.plan(2**24, document(name="mounted"))
    for step in (0, 1, 100, 400, 3):
        world.ask(2**24, "/v1/batches", plan=plan, step=step)
    staged = world.there[2**24].get("/v1/corpora/mounted").json()
    assert staged["fingerprint"] == world.here.get("/v1/corpora/mounted").json()["fingerprint"]
    assert str(world.folder) not in json.dumps(staged)
    folder = world.folder / "mounted"
    for path in list(folder.iterdir()):
        path.with_suffix(".new").write_bytes(bytes(SHARD_BYTES))
        path.with_suffix(".new").rename(path)
    last = NUM_SHARDS * SHARD_WINDOWS // 8 - 1
    check_problem(world.there[2**24].get("/v1/batches", plan=plan, step=last), 503, "corpus-changed")
    (folder / "020.bin").symlink_to(folder / "000.bin")
    with pytest.raises(UnreadableCorpus, match="symbolic link"):
        Catalog.open([CorpusSpec.parse(f"web=file://{folder}")], cache_dir=tmp_path, cache_bytes=10**9)


@pytest.mark.parametrize("extent_bytes", [4096, 32768])
def test_random_plans_over_extents_give_the_rows_of_local_files(world: World, extent_bytes: int) -> None:
    """Shards of all sizes with headers and a mask; windows of all lengths, also longer than an extent."""
    random = np.random.default_rng(extent_bytes)
    for seed in range(6):
        block, group, seq_len = (int(random.integers(*each)) for each in ((1, 400), (1, 6), (1, 2600)))
        bounded = {"shuffle": {"block_windows": block, "group_blocks": group}}
        order = (bounded, "sequential", "shuffle")[seed % 3] if extent_bytes == 4096 else bounded
        asked = document(order, rows=int(random.integers(1, 9)), name="sizes")
        asked |= {"seq_len": seq_len, "seed": seed, "stride": int(random.integers(1, seq_len + 1))}
        plan = world.plan(extent_bytes, asked)
        for step in random.integers(0, 500, 5).tolist():
            query = {"plan": plan, "step": step, "count": 2, "format": "raw", "with": "loss_mask"}
            world.ask(extent_bytes, "/v1/batches", **query)


def test_rows_of_documents_are_those_of_local_files(world: World) -> None:
    """A row lies in one shard, so a cache of some shards is enough; full shuffle needs all of them."""
    for order in ("sequential", {"shuffle": {"block_windows": 200, "group_blocks": 1}}):
        rows = {"block_documents": 1000, "balance_ranks": order == "sequential"}
        plan = world.plan(4096, document(order, name="documents") | {"rows": {"documents": rows}})
        for step in (0, 1, 60, 61, 300):
            world.ask(4096, "/v1/batches", plan=plan, step=step, rank=1, world_size=2)
    for number in (0, world.num_documents - 1):
        path = f"/v1/corpora/documents/documents/{number}"
        found = world.there[4096].get(path).json()
        assert found == world.here.get(path).json()
        assert found["metadata"] == {"id": number}

    def refused(order: object) -> dict[str, Any]:
        asked = document(order, name="documents") | {"rows": {"documents": {}}}
        return world.refused(2**24, asked)

    problem = refused("shuffle")
    assert "bounded shuffle, for example" in problem["remedy"]
    # A row holds pieces of two documents in the mean, and a step fetches extents, not shards.
    assert "each step of 8 rows reads pieces anywhere in 20 extents" in problem["detail"]
    assert "at most 16 of them; about 8 of those are not in the cache" in problem["detail"]
    assert "each step would fetch 320,000 bytes" in problem["detail"]
    problem = refused({"shuffle": {"block_windows": 200, "group_blocks": 6}})
    assert "shards count as a whole: a row may lie anywhere in its shard" in problem["detail"]


@pytest.mark.parametrize("name", ["first", "last"])
def test_rows_of_shards_that_are_cut_inside_documents_are_those_of_local_files(
    world: World, name: str
) -> None:
    """Both ends of each object are read when it is opened, so open documents are known without a request."""
    plan = world.plan(4096, document("sequential", name=name) | {"rows": "documents"})
    for step in (0, 50, 100, 150):
        world.ask(4096, "/v1/batches", plan=plan, step=step)


def test_full_shuffle_is_refused_with_the_arithmetic(world: World) -> None:
    problem = world.refused(2**24, document("shuffle"))
    assert f"{CACHE_SHARDS[2**24] * SHARD_BYTES:,} bytes" in problem["detail"]
    assert f"{NUM_SHARDS * SHARD_BYTES:,} bytes" in problem["detail"]
    assert "group_blocks" in problem["remedy"]
    bounded = {"shuffle": {"block_windows": SHARD_WINDOWS, "group_blocks": CACHE_SHARDS[2**24] // 2 + 1}}
    world.refused(2**24, document(bounded))
    plan = world.there[2**24].post_plan(document()).json()["id"]
    many = world.there[2**24].get("/v1/batches", plan=plan, step=0, count=400)
    check_problem(many, 422, "response-too-large", parameter="count")
