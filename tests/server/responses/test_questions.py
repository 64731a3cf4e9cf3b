"""The costly questions about a plan, whole: receipts, shards, usage and look-ups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash

from corpus_server.admission.request import ANYONE, RequestHead
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import ResponseTooLarge
from corpus_server.responses.question import StepQuery
from corpus_server.responses.questions import plans
from corpus_server.responses.questions.lookup import LookupQuery, lookup
from corpus_server.responses.questions.plans import ShardsQuery, receipt, shards
from corpus_server.responses.response import Response
from corpus_server.responses.service import Service
from corpus_server.settings import Settings
from corpus_server.work import Budget, Limits
from tests.corpora import some_tokens, write_megatron, write_raw
from tests.reference import one_source
from tests.server.http.making import body
from tests.stores import WebServer

SEQ_LEN, ROWS = 9, 6
PLAN: dict[str, Any] = {**one_source("web", SEQ_LEN, ROWS, seed=5), "skip_steps": [[4, 6]]}
LENGTHS = (200, 150, 400)
DOCUMENTS = ([1, 2, 3, 9], [4, 9], [5, 6, 7, 8, 9])
GET = RequestHead("GET", b"/", {})


def naming(plan_id: str) -> RequestHead:
    """A request whose URL names the plan by its whole id, so that its response is immutable."""
    return RequestHead("GET", f"/?plan={plan_id}".encode(), {})


IMMUTABLE = "public, max-age=31536000, immutable"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A process with three shards here, one elsewhere, and a few documents."""
    folder = tmp_path_factory.mktemp("questions")
    (folder / "web").mkdir()
    for number, length in enumerate(LENGTHS):
        write_raw(folder / "web" / f"{number}.bin", some_tokens(length, seed=number))
    docs = write_megatron(folder / "docs", DOCUMENTS)
    with WebServer({"/far.bin": some_tokens(1000).tobytes()}) as store:
        specs = (
            CorpusSpec(name="web", path=folder / "web"),
            CorpusSpec(name="docs", path=docs),
            CorpusSpec.parse(f"far={store.url}/far.bin"),
        )
        with Service.open(
            Settings(corpora=specs, state_dir=folder / "state", cache_dir=folder / "cache", cache_bytes=10**6)
        ) as service:
            yield service


def post(service: Service, document: dict[str, Any]) -> str:
    return service.plans.keep_document(json.dumps(document).encode(), ANYONE, Budget())[0].plan.id


@pytest.fixture(scope="module")
def plan_id(service: Service) -> str:
    return post(service, PLAN)


def located(service: Service, plan_id: str, step: int) -> np.ndarray:
    """Shard and start of each row, `(rows, 2)`."""
    return service.plan(plan_id, GET.caller, Budget()).sampler.locate(step).reshape(-1, 2)


@pytest.mark.parametrize(("step", "plan_step"), [(3, 3), (4, 6)])
def test_a_receipt_is_the_checksum_of_all_rows(
    service: Service, plan_id: str, step: int, plan_step: int
) -> None:
    parts = [some_tokens(length, seed=number) for number, length in enumerate(LENGTHS)]
    rows = [parts[shard][start : start + SEQ_LEN + 1] for shard, start in located(service, plan_id, step)]
    response = receipt(service, plan_id, StepQuery(step=str(step)), naming(plan_id), Budget())
    assert json.loads(body(response)) == {
        "plan": plan_id,
        "step": step,
        "plan_step": plan_step,
        "global_batch_size": ROWS,
        "digest": f"xxh3-64={xxhash.xxh3_64_hexdigest(np.stack(rows).astype('<u2').tobytes())}",
    }
    assert response.headers["ETag"] == f'"{plan_id}.receipt.{step}"'
    assert (response.headers["Cache-Control"], response.headers["Corpus-Plan"]) == (IMMUTABLE, plan_id)


def test_a_receipt_reads_at_most_so_many_bytes(service: Service, plan_id: str) -> None:
    size = ROWS * (SEQ_LEN + 1) * 2

    def ask(most: int) -> Response:
        return receipt(service, plan_id, StepQuery(step="3"), GET, Budget(Limits(num_bytes=most)))

    assert ask(size).status == 200
    with pytest.raises(ResponseTooLarge) as refused:
        ask(size - 1)
    assert refused.value.detail == f"a question takes at most {size - 1} bytes, this one would take {size}"
    assert refused.value.parameter == "step"
    assert refused.value.remedy == "compare the checksums of the ranks' batches instead"


@pytest.mark.parametrize("rows_at_once", [4, 65536])
@pytest.mark.parametrize(("step", "count"), [(0, 1), (0, 4), (3, 1), (3, 4)])
def test_the_shards_of_some_steps_come_in_the_order_of_their_use(
    service: Service,
    plan_id: str,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    count: int,
    rows_at_once: int,
) -> None:
    monkeypatch.setattr(plans, "_ROWS_AT_ONCE", rows_at_once)
    response = shards(service, plan_id, ShardsQuery(step=str(step), count=str(count)), GET, Budget())
    uses = {each: located(service, plan_id, each)[:, 0].tolist() for each in range(step, step + count)}
    firsts: dict[int, int] = {}
    for each, numbers in uses.items():
        for number in sorted(numbers):
            firsts.setdefault(number, each)
    listed = [
        {
            "corpus": "web",
            "name": f"{number}.bin",
            "size_bytes": 2 * LENGTHS[number],
            "first_step": first,
            "num_rows": sum(numbers.count(number) for numbers in uses.values()),
            "is_local": True,
            "local_bytes": 2 * LENGTHS[number],
        }
        for number, first in sorted(firsts.items(), key=lambda each: (each[1], each[0]))
    ]
    assert json.loads(body(response)) == {
        "plan": plan_id,
        "step": step,
        "count": count,
        "num_bytes": sum(each["size_bytes"] for each in listed),
        "shards": listed,
    }
    assert (response.headers["Cache-Control"], response.headers["Corpus-Plan"]) == ("no-store", plan_id)


def test_a_shard_elsewhere_is_not_local_until_it_has_come(service: Service) -> None:
    plan_id = post(service, one_source("far", SEQ_LEN, ROWS, order="sequential"))

    def is_local() -> list[bool]:
        found = shards(service, plan_id, ShardsQuery(step="3"), GET, Budget())
        return [each["is_local"] for each in json.loads(body(found))["shards"]]

    assert is_local() == [False]
    receipt(service, plan_id, StepQuery(step="3"), GET, Budget())
    assert is_local() == [True]


def test_the_shards_of_at_most_so_many_rows_are_listed(service: Service, plan_id: str) -> None:
    def ask(count: str) -> Response:
        budget = Budget(Limits(rows=2 * ROWS))
        return shards(service, plan_id, ShardsQuery(step="3", count=count), GET, budget)

    assert ask("2").status == 200
    with pytest.raises(ResponseTooLarge, match="at most 12 rows, this one would take 18") as refused:
        ask("3")
    assert refused.value.remedy == "ask for at most 2 steps"


def docs_plan(service: Service) -> str:
    return post(service, {**one_source("docs", 4, 2, seed=9), "stride": 2})


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ({"token": "5"}, 5, 6),
        ({"token": "10"}, 10, 11),
        ({"start": "0", "stop": "11"}, 0, 11),
        ({"start": "4", "stop": "5"}, 4, 5),
        ({"document": "1"}, 4, 6),
    ],
    ids=str,
)
def test_what_is_looked_up_is_named_in_one_of_three_ways(
    service: Service, asked: dict[str, str], start: int, stop: int
) -> None:
    plan_id = docs_plan(service)
    response = lookup(service, LookupQuery(plan=plan_id, epochs="3", **asked), naming(plan_id), Budget())
    found = json.loads(body(response))
    rows = found.pop("rows")
    assert found == {
        "plan": plan_id,
        "corpus": "docs",
        "start": start,
        "stop": stop,
        "epochs": 3,
        "num_found": len(rows),
        "truncated": False,
    }
    assert rows
    for row in rows:
        assert row["start"] < stop
        assert row["start"] + 5 > start
    assert response.headers["ETag"] == f'"{plan_id}.lookup.docs.{start}.{stop}.3.1000"'
    # An index made anew may say that the document lies elsewhere.
    assert response.headers["Cache-Control"] == ("public, no-cache" if "document" in asked else IMMUTABLE)
