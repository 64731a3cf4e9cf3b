"""`local_root=`: the same bytes from a local copy, and no other copy is taken for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from urllib.parse import parse_qsl

import numpy as np
import pytest

from corpus_client import CorpusLoader, errors
from corpus_client.network import wire
from corpus_client.network.control import BoundPlan, Question, ShardDescription
from corpus_client.network.replicas import Exchange, Replicas
from corpus_client.network.transport import Buffer
from corpus_client.network.wire import ArrayRequest
from corpus_client.plan.requests import AheadRequests
from corpus_client.staging import local
from corpus_client.staging.gather import LocalShard
from corpus_client.staging.options import LocalRoot
from tests.client.conftest import num_descriptors
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

MakeLoader = Callable[..., CorpusLoader]


def open_shards(plan: BoundPlan, root: LocalRoot) -> list[LocalShard]:
    return local.open_shards(plan, local.places_in(plan, root))


@pytest.fixture
def local_root(corpus: ReferenceCorpus, tmp_path: Path) -> Path:
    corpus.write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("order", ["sequential", "shuffle", "random"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_local_gather_equals_the_servers_batches(
    make_loader: MakeLoader, local_root: Path, world_size: int, order: str
) -> None:
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "order": order, "dtype": None, "num_steps": 40}
        here = make_loader(local_root=local_root, **options)
        there = make_loader(**options)
        for ours, theirs in zip(here, there, strict=True):
            assert ours.step == theirs.step
            assert ours.tokens.numpy().tobytes() == theirs.tokens.numpy().tobytes()
        assert 0 < here.stats().received_bytes < there.stats().received_bytes


def test_data_offset_and_mixed_dtypes(make_loader: MakeLoader, tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    shards = [draw.integers(0, 250, 900).astype(dtype) for dtype in ("uint8", "uint16", "uint8")]
    mixed = ReferenceCorpus("web", shards, data_offset=64)
    mixed.write(tmp_path)
    with ReferenceServer([mixed]) as server:
        options = {"dtype": None, "num_steps": 20, "order": "shuffle"}
        here = make_loader(server.url, local_root={"web": tmp_path}, **options)
        there = make_loader(server.url, **options)
        for ours, theirs in zip(here, there, strict=True):
            assert ours.tokens.numpy().tobytes() == theirs.tokens.numpy().tobytes()


@pytest.mark.parametrize("at", [0, -2])
def test_another_corpus_of_the_same_sizes_is_refused(
    make_loader: MakeLoader, local_root: Path, at: int
) -> None:
    path = local_root / "00001.bin"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(errors.LocalCopyMismatch, match=r"00001.bin holds other tokens .* another corpus\?"):
        make_loader(local_root=local_root)


@pytest.mark.parametrize("change", ["cut", "size and mtime kept"])
def test_change_under_the_run_is_found(make_loader: MakeLoader, local_root: Path, change: str) -> None:
    loader = make_loader(local_root=local_root, num_steps=1000, prefetch_bytes=1 << 13)
    next(loader)
    for name in ("00000.bin", "00001.bin", "00002.bin"):
        path = local_root / name
        before = path.stat()
        with path.open("r+b") as file:
            file.truncate(before.st_size - 2) if change == "cut" else file.write(bytes(100))
        if change != "cut":
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(errors.LocalCopyMismatch, match="changed while it was in use"):
        list(loader)


def described(corpus: str, name: str, num_tokens: int = 1) -> ShardDescription:
    return ShardDescription(
        corpus=corpus,
        name=name,
        file=name,
        num_tokens=num_tokens,
        dtype="uint8",
        data_offset=0,
        size_bytes=num_tokens,
    )


def plan_of(*shards: ShardDescription) -> BoundPlan:
    return cast("BoundPlan", SimpleNamespace(shards=shards, dtype="uint8", views=()))


@pytest.mark.parametrize("name", ["../x", "deep/../../x", "/etc/passwd"])
def test_shard_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(errors.LocalCopyMismatch) as caught:
        open_shards(plan_of(described("c", name)), tmp_path)
    assert str(caught.value) == f"shard file {name!r} leads out of {tmp_path}"


def test_a_shard_may_be_a_link_to_a_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"ab")
    root = tmp_path / "snapshot"
    root.mkdir()
    (root / "0.bin").symlink_to(tmp_path / "blob")
    (shard,) = open_shards(plan_of(described("c", "0.bin", 2)), root)
    assert shard.tokens.tobytes() == b"ab"
    shard.close()


def test_each_corpus_may_have_its_own_folder(tmp_path: Path) -> None:
    plan = plan_of(described("a", "0.bin", 2), described("b", "0.bin", 3), described("b", "deep/1.bin", 1))
    for name, content in (("x/0.bin", b"ab"), ("y/0.bin", b"cde"), ("y/deep/1.bin", b"f")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    shards = open_shards(plan, {"a": tmp_path / "x", "b": str(tmp_path / "y"), "c": "/none"})
    assert [shard.tokens.tobytes() for shard in shards] == [b"ab", b"cde", b"f"]
    for shard in shards:
        shard.close()
    with pytest.raises(errors.InvalidArgument) as caught:
        open_shards(plan, {"c": tmp_path, "a": tmp_path / "x"})
    assert str(caught.value) == "local_root must name a folder for corpus 'b', got ['a', 'c']"


def test_a_file_stands_for_the_shard_of_its_name_only(tmp_path: Path) -> None:
    for name in ("0.bin", "1.bin"):
        (tmp_path / name).write_bytes(b"a")
    (shard,) = open_shards(plan_of(described("a", "1.bin")), tmp_path / "1.bin")
    shard.close()
    with pytest.raises(errors.LocalCopyMismatch) as caught:
        open_shards(plan_of(described("a", "1.bin")), tmp_path / "0.bin")
    assert str(caught.value) == (
        f"corpus 'a': shard 1.bin must lie at {tmp_path}/0.bin/1.bin, got Not a directory; "
        "is local_root right?"
    )
    (tmp_path / "1.bin").unlink()
    (tmp_path / "1.bin").mkdir()
    (tmp_path / "1.bin" / "1.bin").write_bytes(b"b")
    (shard,) = open_shards(plan_of(described("a", "1.bin")), tmp_path / "1.bin")
    assert shard.tokens.tobytes() == b"b"
    shard.close()


def test_shards_that_were_opened_are_closed_when_one_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "0.bin").write_bytes(b"a")
    before = num_descriptors()
    with pytest.raises(errors.LocalCopyMismatch, match=r"1\.bin must lie at"):
        open_shards(plan_of(described("a", "0.bin"), described("a", "1.bin")), tmp_path)
    assert num_descriptors() <= before


def test_pieces_of_too_few_rows_are_refused(tmp_path: Path) -> None:
    """Else the next rows would take their places."""
    (tmp_path / "0.bin").write_bytes(bytes(100))
    request = wire.steps_request(
        "/v1/indices", (1, 2, 10), "int64", step=0, verify=True, are_pieces=True, plan="ab"
    )

    def finish(exchange: object, memory: Callable[[int], memoryview]) -> None:
        memory(32)[:] = np.array([(0, 0, 0, 10)], "<i8").tobytes()

    requests = SimpleNamespace(finish=finish, stop=None)
    ahead = SimpleNamespace(requests=requests, next=lambda: (SimpleNamespace(request=request), 10))
    plan = plan_of(described("a", "0.bin", 100))
    (shard,) = open_shards(plan, tmp_path)
    source = local.LocalSource(cast("AheadRequests", ahead), plan, [shard])
    with closing(shard), pytest.raises(errors.ResponseCorrupt, match="indices must be of 2 rows, got 1"):
        source.finish((2, 10), memoryview(bytearray(20)))


class Served:
    """A server of corpora of uint8 tokens, which notes what it is asked for."""

    def __init__(self, **corpora: bytes) -> None:
        self.corpora = corpora
        self.asked: list[tuple[str, int, int]] = []

    def ask(self, question: Question[object]) -> tuple[str, bytes]:
        route, _, query = question.path.partition("?")
        corpus, (_, start), (_, count) = route.split("/")[3], *parse_qsl(query)[:2]
        return self.tokens(corpus, int(start), int(count))

    def tokens(self, corpus: str, start: int, count: int) -> tuple[str, bytes]:
        self.asked.append((corpus, start, count))
        return "uint8", self.corpora[corpus][start : start + count]


def copies_of(corpus: str, content: bytes, *sizes: int) -> list[LocalShard]:
    """Return shards of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return [
        cast(
            "LocalShard",
            SimpleNamespace(
                described=described(corpus, f"{number}.bin", size),
                path=Path(f"/copy/{number}.bin"),
                remedy="",
                tokens=np.frombuffer(content[end - size : end], np.uint8),
            ),
        )
        for number, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]


@pytest.mark.parametrize(
    ("num_shards", "probed"),
    [
        (1, [0]),
        (2, [0, 1]),
        (7, [*range(7)]),
        (8, [*range(8)]),
        (9, [0, 1, 2, 3, 4, 5, 6, 8]),
        (20, [0, 2, 5, 8, 10, 13, 16, 19]),
    ],
)
def test_eight_shards_of_a_corpus_are_compared(num_shards: int, probed: list[int]) -> None:
    """The first and the last among them; each corpus is counted from its own start."""
    content = np.random.default_rng(0).bytes(10 * num_shards)
    served = Served(a=content, b=content)
    shards = [*copies_of("a", content, *[10] * num_shards), *copies_of("b", content, *[10] * num_shards)]
    local.check_shards(cast("Replicas", served), shards)
    assert served.asked == [(corpus, 10 * number, 10) for corpus in "ab" for number in probed]


def test_the_first_and_the_last_tokens_of_a_shard_are_compared() -> None:
    content = np.random.default_rng(0).bytes(10_000)
    served = Served(a=content)
    local.check_shards(cast("Replicas", served), copies_of("a", content, 100, 3000, 0, 2048, 2049))
    assert served.asked == [
        *[("a", 0, 100), ("a", 100, 2048), ("a", 1052, 2048)],
        *[("a", 3100, 2048), ("a", 5148, 2048), ("a", 5149, 2048)],
    ]


@pytest.mark.parametrize(
    ("at", "span"),
    [(100, "0 to 2,047"), (2147, "0 to 2,047"), (2148, "952 to 2,999"), (3099, "952 to 2,999")],
)
def test_a_token_that_differs_names_the_copy_and_the_place(at: int, span: str) -> None:
    content = bytearray(np.random.default_rng(0).bytes(4000))
    shards = copies_of("a", bytes(content), 100, 3000)
    content[at] ^= 1
    with pytest.raises(errors.LocalCopyMismatch) as caught:
        local.check_shards(cast("Replicas", Served(a=bytes(content))), shards)
    assert str(caught.value) == (
        f"corpus 'a': /copy/1.bin holds other tokens than the server's shard 1.bin (tokens {span}); "
        "is it another corpus?"
    )


@pytest.mark.parametrize("request_rows", [1, 150, 10_000])
@pytest.mark.parametrize("step_stride", [1, 3])
def test_one_request_names_the_windows_of_many_slots(
    make_loader: MakeLoader,
    server: ReferenceServer,
    local_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    request_rows: int,
    step_stride: int,
) -> None:
    """Slots of three steps, requests of up to 3, 4 or 256 of them: borders fall within either."""
    monkeypatch.setattr(local, "REQUEST_ROWS", request_rows)
    options = {"dtype": None, "order": "shuffle", "num_steps": 70, "step_stride": step_stride}
    slots = {"prefetch_bytes": 4 * 4096, "global_batch_size": 36}  # 1,224 bytes a step
    here = make_loader(local_root=local_root, **options, **slots)
    there = make_loader(**options, **slots)
    batches = [(batch.step, batch.tokens.numpy().tobytes()) for batch in here]
    num_requests = len(server.counts)
    assert batches == [(batch.step, batch.tokens.numpy().tobytes()) for batch in there]
    assert [step for step, _ in batches] == list(range(0, 70, step_stride))
    expected = {1: 25, 150: 19, 10_000: 7}[request_rows] if step_stride == 1 else len(batches)
    assert num_requests == expected
    assert sum(server.counts[:num_requests]) == len(batches)


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_as_many_requests_are_on_the_wire_as_were_chosen(
    make_loader: MakeLoader, local_root: Path, monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    begin, finish, on_wire, most = Replicas.begin, Replicas.finish, 0, 0

    def counted_begin(self: Replicas, request: ArrayRequest) -> Exchange:
        nonlocal on_wire, most
        on_wire += 1
        most = max(most, on_wire)
        return begin(self, request)

    def counted_finish(self: Replicas, exchange: Exchange, buffer: Buffer) -> None:
        nonlocal on_wire
        finish(self, exchange, buffer)
        on_wire -= 1

    monkeypatch.setattr(Replicas, "begin", counted_begin)
    monkeypatch.setattr(Replicas, "finish", counted_finish)
    monkeypatch.setattr(local, "REQUEST_ROWS", 1)
    options = {"in_flight": in_flight, "prefetch_bytes": (in_flight + 2) * 4096, "num_steps": 60}
    assert len(list(make_loader(local_root=local_root, **options))) == 60
    assert (most, on_wire) == (in_flight, 0)


SHARDS_CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from corpus_client import CorpusLoader, Staging, errors
options = {"corpus": "web", "seq_len": 16, "global_batch_size": 12, "device": "cpu", "num_steps": 3}
try:
    with CorpusLoader(sys.argv[3], **options, staging=Staging(local_root=sys.argv[4])) as loader:
        print(len(list(loader)))
except errors.InvalidArgument as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (128, 4096, "3"),
        (128, 300, "local_root needs a file descriptor for each shard, and this process may have 300; raise"),
    ],
)
def test_more_shards_than_files_may_be_open(tmp_path: Path, soft: int, hard: int, said: str) -> None:
    """The limit is raised as far as it goes; a shard takes one descriptor."""
    shards = [np.arange(n, n + 20, dtype=np.uint16) for n in range(700)]
    corpus = ReferenceCorpus("web", shards)
    corpus.write(tmp_path)
    with ReferenceServer([corpus]) as server:
        arguments = [str(soft), str(hard), server.url, str(tmp_path)]
        command = [sys.executable, "-c", SHARDS_CODE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(said), done.stderr
