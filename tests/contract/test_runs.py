"""A run's name and the step that it trained reach page, plans, metrics and log, and decide nothing."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from corpus_client import ArrayLoader, CorpusIterableDataset, CorpusLoader, Staging, errors
from corpus_client.network import options
from corpus_server.admission import request
from tests.client.conftest import make_corpus
from tests.client.reference_server import ReferenceServer
from tests.conftest import ServedCorpus
from tests.serving import RunningServer, wait_until

SMALL: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12}
RUN = "gpt2-124m.a_1"


def test_names_of_headers_are_the_same() -> None:
    assert (options.RUN_HEADER, options.TRAINED_STEP_HEADER) == (request.RUN, request.TRAINED_STEP)


def test_what_a_run_trained_is_told_from_what_it_asked_for(
    corpora: dict[str, ServedCorpus], tmp_path: Path
) -> None:
    arguments = ["--log-format", "json", "--access-log", "all"]
    with RunningServer({"web": corpora["web"].path}, tmp_path, arguments=arguments) as server:
        few = Staging(prefetch_bytes=1 << 14)
        with CorpusLoader(server.url, **SMALL, device="cpu", run=RUN, staging=few) as loader:
            for batch in loader:
                if batch.step == 200:
                    break
            plan = loader.plan_id
        server.get("/v1/batches", plan=plan, step=7)

        def ranks() -> dict[str, Any]:
            shown = server.get("/v1/live").json()["plans"]
            return {each["run"]: each["ranks"][0] for each in shown if each["plan"] == plan}

        wait_until(lambda: set(ranks()) == {RUN, ""} and ranks()[RUN]["trained_step"])
        rank = ranks()[RUN]
        assert 100 < rank["trained_step"] <= 200 < rank["step"]
        assert (ranks()[""]["trained_step"], ranks()[""]["step"]) == (None, 7)
        assert [each["runs"] for each in server.get("/v1/plans", run=RUN).json()["plans"]] == [[RUN]]
        assert server.get("/v1/plans", run="other").json()["plans"] == []
        assert (
            f'corpus_plan_tokens_total{{plan="{plan}",run="{RUN}"}}' in server.get("/metrics").body.decode()
        )
        lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
        assert {line.get("run") for line in lines if line.get("route") == "/v1/batches"} == {RUN, None}


def test_a_loader_says_where_it_ends(corpora: dict[str, ServedCorpus], tmp_path: Path) -> None:
    """By its last step or by `close`. All 40 steps fit into what is prefetched, so no request for tokens says
    that any was trained. Four loaders at once, because the server looks every five seconds.
    """
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        f"{kind.__name__}.{num_steps}": (kind, {"num_steps": num_steps, **given})
        for kind, given in ((CorpusLoader, {"device": "cpu"}), (ArrayLoader, {}))
        for num_steps in (40, None)
    }
    with RunningServer({"web": corpora["web"].path}, tmp_path, workers=2) as server, ExitStack() as stack:

        def ranks() -> dict[str, dict[str, Any]]:
            shown = {plan["run"]: plan["ranks"] for plan in server.get("/v1/live").json()["plans"]}
            assert [len(each) for each in shown.values()] == [1] * len(shown)
            return {run: each[0] for run, each in shown.items()}

        def ranks_once(*, ended: bool) -> dict[str, dict[str, Any]]:
            """Return them when all are there and have ended, or none has."""
            found: dict[str, dict[str, Any]] = {}

            def are_so() -> bool:
                found.update(ranks())
                return set(found) == set(cases) and {each["has_ended"] for each in found.values()} == {ended}

            wait_until(are_so, ranks)
            return found

        url = server.url.replace("127.0.0.1", "localhost")  # which is looked up
        loaders = {run: kind(url, **SMALL, run=run, **given) for run, (kind, given) in cases.items()}
        for loader in loaders.values():
            stack.callback(loader.close)
            for _ in range(40):
                next(loader)
        ranks_once(ended=False)
        for run, loader in loaders.items():
            if cases[run][1]["num_steps"] is None:
                loader.close()
            else:
                assert next(loader, None) is None
        trained = {run: rank["trained_step"] for run, rank in ranks_once(ended=True).items()}
        assert trained == dict.fromkeys(cases, 39)
        for run, (kind, given) in cases.items():
            loaders[run].close()
            again = stack.enter_context(kind(server.url, **SMALL, run=run, **{**given, "num_steps": None}))
            next(again)
        ranks_once(ended=False)


def test_a_server_that_is_gone_delays_no_end(corpora: dict[str, ServedCorpus], tmp_path: Path) -> None:
    with RunningServer({"web": corpora["web"].path}, tmp_path) as server:
        loader = CorpusLoader(server.url, **SMALL, num_steps=3, device="cpu")
        assert [next(loader).step for _ in range(3)] == [0, 1, 2]
        server.kill()
        began = time.monotonic()
        assert next(loader, None) is None
        loader.close()
        assert time.monotonic() - began < options.Network().deadline_seconds / 10


@pytest.mark.parametrize("name", ["a" * 64, "a" * 65, "a, a"])
def test_a_name_decides_nothing(server: RunningServer, name: str) -> None:
    """One that is not well formed counts as none."""

    def response(**headers: str) -> tuple[int, bytes, dict[str, str]]:
        found = server.get("/v1/batches", corpus="web", seq_len=16, batch_size=8, step=3, headers=headers)
        said = {name.lower(): value for name, value in found.headers.items()}
        return found.status, found.body, {**said, "date": "", "server-timing": ""}

    assert response() == response(**{"Corpus-Run": name, "Corpus-Trained-Step": name})


@pytest.mark.parametrize("kind", [CorpusLoader, ArrayLoader])
def test_requests_say_the_last_step_that_was_yielded(kind: Any) -> None:
    """And none after a `seek`, until a step was yielded again."""
    with ReferenceServer([make_corpus()]) as server:
        options = (
            {"device": "cpu", "staging": Staging(prefetch_bytes=1 << 14)} if kind is CorpusLoader else {}
        )
        with kind(server.url, **SMALL, run=RUN, **options) as loader:
            for _ in range(800):
                last = next(loader).step
            said = [each.get("Corpus-Trained-Step") for each in server.array_headers]
            assert {each["Corpus-Run"] for each in server.headers} == {RUN}
            loader.seek(100_000)
            next(loader)
            asked = zip(server.paths, server.array_headers, strict=False)
            (sought,) = [each for path, each in asked if "step=100000&" in path]
            assert "Corpus-Trained-Step" not in sought
        assert said[0] is None
        steps = [int(step) for step in said if step is not None]
        assert steps == sorted(steps)
        assert last // 2 < steps[-1] <= last


@pytest.mark.parametrize("kind", [CorpusLoader, ArrayLoader, CorpusIterableDataset])
@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "a\n", 7])
def test_a_name_that_no_header_may_hold_is_refused(kind: Any, name: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="run must be a name of 1 to 64 letters, digits"):
        kind("http://127.0.0.1:9", **SMALL, run=name)
