"""Files that change under a running server: never a wrong token, and whatever is intact goes on."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.corpus.index import index
from tests.corpora import (
    megatron_index,
    rewrite_in_place,
    some_tokens,
    spec,
    write_llmc,
    write_megatron,
    write_raw,
)
from tests.reference import batch, one_source
from tests.serving import RunningServer, check_problem, wait_until
from tests.views import write_corpus, write_view

SEQ_LEN, ROWS = 64, 8
PLANS = {name: one_source(name, SEQ_LEN, ROWS, order="sequential") for name in ("two", "other")}
QUERY = {"seq_len": SEQ_LEN, "batch_size": ROWS, "order": "sequential"}
NUM_TOKENS = 50_000  # 781 windows a shard: steps 0 to 96 read shard 0, step 97 both, 98 and on shard 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, seeds in (("two", (0, 1)), ("other", (2,))):
        (tmp_path / name).mkdir()
        for number, seed in enumerate(seeds):
            write_raw(tmp_path / name / f"{number}.bin", some_tokens(NUM_TOKENS, seed=seed))
    return tmp_path


@pytest.fixture
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A server of two workers, or of as many as the test's parameter says."""
    corpora = {name: folder / name for name in ("two", "other")}
    with RunningServer(corpora, folder, workers=getattr(request, "param", 2)) as running:
        yield running


def expected_batches(steps: range) -> dict[tuple[str, int], bytes]:
    shards = {"two": [some_tokens(NUM_TOKENS, seed=seed) for seed in (0, 1)]}
    shards["other"] = [some_tokens(NUM_TOKENS, seed=2)]
    return {
        (name, step): batch(PLANS[name], shards[name], step).astype("uint16").tobytes()
        for name in shards
        for step in steps
    }


class Load:
    """Threads that ask for random steps and sort the responses.

    Attributes:
        wrong: (corpus, step) answered with other tokens than were written.
        refused: (corpus, step) answered 503 corpus-changed.
        other: statuses that should not occur.
        broken: connections that ended early, as those of a killed worker do.
    """

    def __init__(self, server: RunningServer, steps: range) -> None:
        self._server = server
        self._expected = expected_batches(steps)
        self._stop = threading.Event()
        self.answered = 0
        self.wrong: list[tuple[str, int]] = []
        self.refused: set[tuple[str, int]] = set()
        self.other: list[tuple[str, int, int]] = []
        self.broken = 0
        self._threads = [threading.Thread(target=self._work, args=(seed,)) for seed in range(3)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _work(self, seed: int) -> None:
        draw = random.Random(seed)
        keys = sorted(self._expected)
        while not self._stop.is_set():
            name, step = draw.choice(keys)
            try:
                response = self._server.get("/v1/batches", corpus=name, step=step, **QUERY)
            except (OSError, http.client.HTTPException):
                self.broken += 1
                continue
            self.answered += 1
            if response.status == 200 and response.body != self._expected[name, step]:
                self.wrong.append((name, step))
            elif response.status == 503 and response.json()["type"] == "corpus-changed":
                self.refused.add((name, step))
            elif response.status != 200:
                self.other.append((name, step, response.status))


@pytest.mark.parametrize(
    ("server", "keep"), [(1, 60_000), (2, 60_001), (2, 4096), (1, 0)], indirect=["server"]
)
def test_a_shard_is_truncated_under_load(server: RunningServer, folder: Path, keep: int) -> None:
    """Catalogue row 13: to the middle of a page, to the middle of a token, to a whole page, to nothing."""
    steps = range(80, 120)
    pids = server.worker_pids()
    with Load(server, steps) as load:
        wait_until(lambda: load.answered > 50)
        assert load.refused == set()
        os.truncate(folder / "two" / "1.bin", keep)
        answered = load.answered
        wait_until(lambda: load.refused and load.answered > answered + 50)
    assert (load.wrong, load.other, load.broken) == ([], [], 0)
    assert load.refused
    assert load.refused <= {("two", step) for step in steps if step >= 97}
    for step, status in ((0, 200), (96, 200), (97, 503), (98, 503), (150, 503)):
        response = server.get("/v1/batches", corpus="two", step=step, **QUERY)
        assert response.status == status, step
        if status == 503:
            assert response.json()["type"] == "corpus-changed"
            assert f"1.bin: 100000 bytes at opening, {keep} now" in response.json()["detail"]
            assert response.headers["ETag"] is None
    assert server.get("/v1/batches", corpus="other", step=0, **QUERY).status == 200
    assert server.get("/v1/corpora/two/tokens", start=NUM_TOKENS - 9, count=10).status == 503
    assert server.get("/v1/corpora/two/tokens", start=NUM_TOKENS - 9, count=9).status == 200
    assert server.worker_pids() == pids


def test_a_shard_that_is_written_to_is_refused(tmp_path: Path) -> None:
    """Catalogue row 14: no mixed versions."""
    changes = ("extended", "written", "rewritten")
    corpora = {}
    for name in (*changes, "intact"):
        (tmp_path / name).mkdir()
        for number in range(2):
            write_raw(tmp_path / name / f"{number}.bin", some_tokens(NUM_TOKENS, seed=number))
        corpora[name] = tmp_path / name
    with RunningServer(corpora, tmp_path, workers=2) as server:
        assert server.get("/readyz").status == 200
        for change in changes:
            path = tmp_path / change / "1.bin"
            if change == "rewritten":  # its modification time is restored
                rewrite_in_place(path, b"\x01\x02")
            else:
                with path.open("ab" if change == "extended" else "r+b") as file:
                    file.write(b"\x01\x02")
            refused = server.get("/v1/batches", corpus=change, step=150, **QUERY)
            assert refused.json()["type"] == "corpus-changed", change
            for name, step in ((change, 0), ("intact", 150)):
                assert server.get("/v1/batches", corpus=name, step=step, **QUERY).status == 200
        ready = server.get("/readyz")
        assert (ready.status, ready.json()["type"]) == (503, "not-ready")
        assert "1.bin" in ready.json()["detail"]
        assert server.get("/healthz").status == 200


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_view_that_is_truncated_is_refused(tmp_path: Path, keep: float) -> None:
    """Its zeros are taken for no places, and their errors for none of the server's."""
    lengths = [3, 5, 2, 9, 1, 30] * 200
    web = write_corpus(tmp_path / "web", [lengths])
    view = write_view(web, [1, 0, 2, 1, 1, 3] * 200, tmp_path / "v.view")
    arguments = [f"web={web},eot=0,dtype=uint32", f"v=web?view={view}"]
    with RunningServer({}, tmp_path / "server", arguments=arguments) as server:
        plan = server.post_plan(one_source("v", 16, 8)).json()["id"]
        targets: list[tuple[str, dict[str, object]]] = [
            ("/v1/batches", {"plan": plan, "step": 1}),
            ("/v1/batches", {"corpus": "v", "seq_len": 9, "batch_size": 2, "step": 0}),
            ("/v1/corpora/v/tokens", {"start": 5, "count": 500}),
            ("/v1/corpora/v/documents/7", {}),
            ("/v1/lookup", {"plan": plan, "corpus": "v", "document": 7}),
            ("/v1/lookup", {"plan": plan, "corpus": "v", "token": 7}),
        ]
        assert [server.get(path, **query).status for path, query in targets] == [200] * len(targets)
        os.truncate(view, int(keep * view.stat().st_size))
        for path, query in targets:
            check_problem(server.get(path, **query), 503, "corpus-changed")
        assert server.get("/v1/corpora/web/tokens", start=5, count=500).status == 200


def test_no_plan_is_refused_for_good_by_the_zeros_of_a_truncated_file(tmp_path: Path) -> None:
    """With the digests of its documents or without; a client gives up at a 4xx, and tries others at a 503."""
    paths = dict[str, Path]()
    for keep in (0, 20_000, 39_999):
        for kind, name in (
            ("meg", "0.bin"),
            ("meg", "0.idx"),
            ("llmc", "0.bin"),
            ("llmc", "0.bin.documents"),
        ):
            folder = tmp_path / f"{kind}-{name}-{keep}"
            folder.mkdir()
            if kind == "llmc":
                write_llmc(folder / "0.bin", [9, *range(10, 40)] * 6000)
                index(spec(folder, eot=9))
            else:
                write_megatron(folder / "0", [[*range(10, 29), 9]] * 6000)
            paths[folder.name] = folder / name
    corpora = {name: f"{path.parent},eot=9" for name, path in paths.items()}
    bare = {name: one_source(name, 64, 2, rows="documents") for name in corpora}
    arguments = [f"{name}={path}" for name, path in corpora.items()]
    with RunningServer({}, tmp_path / "before", arguments=arguments) as server:
        canonical = {name: server.post_plan(plan).json()["plan"] for name, plan in bare.items()}
    with RunningServer({}, tmp_path / "server", arguments=arguments) as server:
        for name, path in paths.items():
            os.truncate(path, int(name.rpartition("-")[2]))
            for plan in (bare[name], canonical[name]):
                check_problem(server.post_plan(plan), 503, "corpus-changed")


BESIDE = {
    "plain": ("plain.bin", "/v1/corpora/plain/tokens", {"start": 1, "count": 499}),
    "v": ("v.view", "/v1/corpora/v/tokens", {"start": 1, "count": 90}),
    "web": ("web/0.bin.documents", "/v1/corpora/web/documents/7", {}),
    "pair": ("pair.idx", "/v1/corpora/pair/documents/2", {}),
    "masked": (
        "masked.bin.mask.npy",
        "/v1/indices",
        {"corpus": "masked", "seq_len": 9, "batch_size": 8, "step": 0, "with": "loss_mask", "format": "raw"},
    ),
}
"""Of corpora one file each, and what reads it."""


def start_with_files_beside(folder: Path) -> RunningServer:
    """Return a server of the corpora of `BESIDE`; the view is of a corpus of its own."""
    web, viewed = (write_corpus(folder / name, [[5] * 100]) for name in ("web", "viewed"))
    write_view(viewed, [n % 3 for n in range(100)], folder / "v.view")
    plain, pair, masked = (
        write_raw(folder / f"{name}.bin", some_tokens(500)) for name in ("plain", "pair", "masked")
    )
    pair.with_suffix(".idx").write_bytes(megatron_index([100] * 5))
    np.save(f"{masked}.mask.npy", np.ones(500, np.uint8))
    options = "eot=0,dtype=uint32"
    arguments = [f"web={web},{options}", f"v={viewed}?view={folder / 'v.view'},{options}"]
    corpora = {"plain": plain, "pair": pair, "masked": masked}
    return RunningServer(corpora, folder / "server", arguments=arguments)


@pytest.mark.parametrize("change", ["truncated", "rewritten"])
@pytest.mark.parametrize("name", BESIDE)
def test_a_changed_file_is_named_with_its_corpus_and_no_plan_is_accepted(
    tmp_path: Path, name: str, change: str
) -> None:
    """Of windows, too, which need no index: training would end in the middle."""
    file, path, query = BESIDE[name]
    other = "masked" if name == "plain" else "plain"
    with start_with_files_beside(tmp_path) as server:
        assert server.get(path, **query).status == 200
        assert server.post_plan(one_source(name, 16, 8, seed=1)).status == 200
        if change == "truncated":
            os.truncate(tmp_path / file, 10)
        else:
            rewrite_in_place(tmp_path / file, (tmp_path / file).read_bytes())
        mixture = {"seq_len": 16, "stages": [{"global_batch_size": 8, "mixture": {name: 1, other: 1}}]}
        for response, slug in (
            (server.get(path, **query), "corpus-changed"),
            (server.post_plan(one_source(name, 16, 8, seed=2)), "corpus-changed"),
            (server.post_plan(mixture), "corpus-changed"),
            (server.get("/readyz"), "not-ready"),
        ):
            problem = check_problem(response, 503, slug)
            assert f"corpus {name!r}: {Path(file).name}: " in problem["detail"]
            assert problem["detail"].count(f"corpus {name!r}") == 1
        assert server.post_plan(one_source(other, 16, 8)).status == 200


def test_a_shard_that_is_replaced_keeps_its_old_tokens(server: RunningServer, folder: Path) -> None:
    """Catalogue rows 14 and 26: the open file is what is served, until a restart."""
    first, second, other = folder / "two" / "0.bin", folder / "two" / "1.bin", folder / "other" / "0.bin"
    with Load(server, range(90, 105)) as load:
        wait_until(lambda: load.answered > 10)
        write_raw(first.with_name("new"), some_tokens(NUM_TOKENS, seed=9)).replace(first)
        second.unlink()
        second.symlink_to("/etc/passwd")
        other.unlink()
        answered = load.answered
        wait_until(lambda: load.answered > answered + 20)
    assert (load.wrong, load.refused, load.other, load.broken) == ([], set(), [], 0)


def test_a_file_cut_in_the_midst_of_a_response_ends_the_response_early(tmp_path: Path) -> None:
    """What came is right, and the missing rest betrays itself by the length."""
    tokens = some_tokens(20_000_000, seed=4)
    path = write_raw(tmp_path / "large.bin", tokens)
    with RunningServer({"large": path}, tmp_path) as server:
        connection = server.connect()
        connection.request("GET", "/v1/corpora/large/tokens?count=20000000&checksum=false")
        response = connection.getresponse()
        received = response.read(1_000_000)
        os.truncate(path, 30_000_000)
        with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
            while part := response.read(1_000_000):
                received += part
        connection.close()
        assert len(received) < 40_000_000
        assert tokens.tobytes().startswith(received)
        lines = server.log().splitlines()
        assert len([line for line in lines if "large.bin: 40000000 bytes at opening" in line]) == 1
        assert not [line for line in lines if "unexpected=" in line or "ASGI" in line]
        assert server.get("/healthz").status == 200


def test_two_servers_may_serve_the_same_corpus(server: RunningServer, folder: Path) -> None:
    """Catalogue row 12: from folders of their own, with the same plan ids."""
    second = folder / "second"
    second.mkdir()
    with contextlib.ExitStack() as opened:
        other = opened.enter_context(RunningServer({"two": folder / "two"}, second))
        assert other.post_plan(PLANS["two"]).json() == server.post_plan(PLANS["two"]).json()
    assert sorted(path.name for path in (folder / "two").iterdir()) == ["0.bin", "1.bin"]
