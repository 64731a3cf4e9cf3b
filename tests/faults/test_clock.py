"""A wall clock that jumps changes nothing: catalogue row 29."""

from __future__ import annotations

import ast
import itertools
import os
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from corpus_server.corpus_spec import CorpusSpec
from corpus_server.settings import Settings
from corpus_server.stores.cache import PLANNED_SECONDS, Cache
from corpus_server.web.app import create_app
from tests.corpora import some_tokens, write_raw
from tests.serving import ROOT

WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
WHERE = {
    "client/corpus_client/network/own_server.py": "a folder that was left outlives the process",
    "client/corpus_client/recording/losses.py": "of two sessions of a rank the later one counts",
    "client/corpus_client/tools/boms.py": "a document says when it was made",
    "corpus_server/admission/access.py": "a token expires on a date",
    "corpus_server/cli/token.py": "a token must not have expired when it is made",
    "corpus_server/responses/tracing.py": "a trace says when",
    "corpus_server/live/hour.py": "samples are shown over the time of day; a clock set back is seen",
    "corpus_server/plan_store/database.py": "a database that was set aside says when",
    "corpus_server/plan_store/links.py": "outlives the process",
    "corpus_server/plan_store/store.py": "outlives the process",
    "corpus_server/readers/registry.py": "when a rank asked last is shown",
    "corpus_server/stores/cache.py": "outlives the process",
}
"""Files that ask what time it is, and why; everything else asks how much time has passed."""

DAY = 86_400.0


def asks_what_time_it_is(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS for node in nodes)


def test_durations_are_measured_by_the_monotonic_clock() -> None:
    files = [*(ROOT / "corpus_server").rglob("*.py"), *(ROOT / "client" / "corpus_client").rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if asks_what_time_it_is(path)}
    assert found == set(WHERE)


def test_requests_are_answered_while_the_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day back and forth, each time that somebody asks for it."""
    tokens = some_tokens(10_000)
    path = write_raw(tmp_path / "web.bin", tokens)
    settings = Settings(corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path / "state")
    jumps, clock = itertools.cycle((0.0, DAY, -DAY, 10 * DAY)), time.time
    with TestClient(create_app(settings)) as client:
        monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))
        for seed in range(8):
            stages = [{"global_batch_size": 4, "mixture": {"web": 1}}]
            plan = {"seq_len": 16, "seed": seed, "order": "sequential", "stages": stages}
            posted = client.post("/v1/plans", json=plan)
            assert posted.status_code in (200, 201), posted.text
            response = client.get("/v1/batches", params={"plan": posted.json()["id"], "step": 1})
            assert response.content == b"".join(tokens[k * 16 : k * 16 + 17].tobytes() for k in range(4, 8))
        assert client.get("/readyz").status_code == 200
        assert len(client.get("/v1/plans").json()["plans"]) == 8


def test_a_clock_that_was_set_back_locks_no_room_in_the_cache(tmp_path: Path) -> None:
    """By its time a shard is planned for; a time that has not come yet says nothing."""
    cache = Cache(tmp_path / "cache", 1000)
    for key, age in (("o/a", -DAY), ("o/b", 0.0)):
        with cache.filling(key, 400, urgent=False) as file:
            file.write(bytes(400))
        os.utime(cache.extents / key, (time.time() - age,) * 2)
    with cache.filling("o/c", 400, urgent=False) as file:
        file.write(bytes(400))
    assert [each for each in "abc" if cache.has(f"o/{each}")] == ["b", "c"]
    assert PLANNED_SECONDS < DAY
