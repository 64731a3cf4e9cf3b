"""What people look at, whole: rows, ranges, samples, places of a text, two plans beside each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.admission.admission import Admission
from corpus_server.admission.request import ANYONE, RequestHead
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import ResponseTooLarge
from corpus_server.responses.questions import samples
from corpus_server.responses.questions.ranges import SpansQuery, spans
from corpus_server.responses.questions.rows import RowsQuery, rows
from corpus_server.responses.questions.samples import SearchQuery, StatisticsQuery, search, statistics
from corpus_server.responses.service import Service
from corpus_server.settings import Settings
from corpus_server.work import Budget, ClientLeft
from tests.corpora import write_megatron, write_raw
from tests.reference import one_source
from tests.server.http.making import body
from tests.stores import WebServer

SEQ_LEN, ROWS = 9, 6
DOCUMENTS = [[k, 50 + k, 1, *range(k)] for k in range(2, 21)]  # 5 to 23 tokens
NUM_TOKENS = sum(map(len, DOCUMENTS))
GET = RequestHead("GET", b"/", {})
PLAN: dict[str, Any] = {
    "seq_len": SEQ_LEN,
    "seed": 5,
    "stages": [{"from_step": 0, "global_batch_size": ROWS, "mixture": {"docs": 1, "ids": 1}}],
    "skip_steps": [[4, 6]],
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve documents, two shards of ids that all differ, and a corpus of another machine."""
    folder = tmp_path_factory.mktemp("inspection")
    for name in ("ids", "parts"):
        (folder / name).mkdir()
    for number, part in enumerate(np.split(np.arange(110), [70])):
        write_raw(folder / "ids" / f"{number}.bin", part)
    write_megatron(folder / "docs", DOCUMENTS)
    for name in ("a", "b"):
        write_megatron(folder / "parts" / name, [[1, 2, 3], [4, 5]])
    write_megatron(folder / "many", [[1]] * 2048)
    write_megatron(folder / "letters", [list(b"some text ")] * 12, dtype="uint8")
    with WebServer({"/far.bin": b"some text " * 40}) as store:
        specs = (
            *(CorpusSpec(name=name, path=folder / f"{name}.bin") for name in ("docs", "many", "letters")),
            *(CorpusSpec(name=name, path=folder / name) for name in ("ids", "parts")),
            CorpusSpec.parse(f"far={store.url}/far.bin,dtype=uint8"),
        )
        settings = Settings(
            corpora=specs, state_dir=folder / "state", cache_dir=folder / "cache", cache_bytes=10**6
        )
        with Service.open(settings) as service:
            yield service


@pytest.fixture
def text(tmp_path: Path) -> Iterator[Callable[[bytes], Service]]:
    """Return what serves a text as corpus `text`, a byte a token."""
    opened = []

    def serve(content: bytes) -> Service:
        path = write_raw(tmp_path / "text.bin", np.frombuffer(content, np.uint8), dtype="uint8")
        spec = CorpusSpec(name="text", path=path, dtype="uint8")
        opened.append(Service.open(Settings(corpora=(spec,), state_dir=tmp_path / "state")))
        return opened[-1].__enter__()

    yield serve
    for each in opened:
        each.__exit__(None, None, None)


@pytest.fixture
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of four blocks of 16 tokens and four documents."""
    for name, value in (("BLOCK_TOKENS", 16), ("STATISTICS_BLOCKS", 4), ("SEARCH_BLOCKS", 4)):
        monkeypatch.setattr(samples, name, value)
    monkeypatch.setattr(samples, "SAMPLE_DOCUMENTS", 4)
    monkeypatch.setattr(samples, "TOP_TOKENS", 1000)


def found_by(work: Any) -> Any:
    return json.loads(body(work))


def post(service: Service, document: dict[str, Any]) -> str:
    return service.plans.keep_document(json.dumps(document).encode(), ANYONE, Budget())[0].plan.id


@pytest.fixture(scope="module")
def plan_id(service: Service) -> str:
    return post(service, PLAN)


def corpus_tokens(name: str) -> list[int]:
    return list(range(110)) if name == "ids" else [token for each in DOCUMENTS for token in each]


def document_at(token: int) -> int:
    return int(np.searchsorted(np.cumsum([len(each) for each in DOCUMENTS]), token, side="right"))


def check_spans(name: str, start: int, stop: int, spans: list[dict[str, Any]]) -> None:
    """Check that spans are the tokens [start, stop) of a corpus, cut where documents end."""
    at = start
    for span in spans:
        number = document_at(at) if name == "docs" else None
        assert (span["start"], span["document"], span["is_eot"], span["text"]) == (at, number, False, None)
        at += len(span["tokens"])
    assert at == stop
    assert [token for span in spans for token in span["tokens"]] == corpus_tokens(name)[start:stop]
    if name == "ids":
        assert len(spans) == (stop > start)
    elif stop > start:
        assert len(spans) == document_at(stop - 1) - document_at(start) + 1


@pytest.mark.parametrize(("step", "plan_step"), [(3, 3), (4, 6)])
@pytest.mark.parametrize(("first", "count"), [(0, 8), (2, 3), (2, 8), (5, 1)])
def test_rows_of_a_step_say_where_they_lie(
    service: Service, plan_id: str, step: int, plan_step: int, first: int, count: int
) -> None:
    query = RowsQuery(step=str(step), first=str(first), count=str(count))
    response = rows(service, plan_id, query, GET, Budget())
    found = json.loads(body(response))
    shown = found.pop("rows")
    assert found == {
        "plan": plan_id,
        "step": step,
        "plan_step": plan_step,
        "global_batch_size": ROWS,
        "first": first,
        "problems": [],
    }
    located = service.plan(plan_id, GET.caller, Budget()).sampler.locate(step).reshape(-1, 2).tolist()
    stop = min(ROWS, first + count)
    assert [row["row"] for row in shown] == list(range(first, stop))
    for row, (shard, start) in zip(shown, located[first:stop], strict=True):
        corpus, name, base = [("docs", "docs.bin", 0), ("ids", "0.bin", 0), ("ids", "1.bin", 70)][shard]
        assert (row["corpus"], row["shard"], row["start"]) == (corpus, name, base + start)
        assert row["documents"] == []
        check_spans(corpus, base + start, base + start + SEQ_LEN + 1, row["spans"])
    assert response.headers.items() >= {"Cache-Control": "no-store", "Corpus-Plan": plan_id}.items()


@pytest.mark.parametrize("step", [1, 4], ids=["in between", "the last one"])
def test_rows_of_joined_documents_show_each_where_it_lies(service: Service, step: int) -> None:
    """In Megatron's order a row may begin in one document and go on in another."""
    order = {"megatron": {"num_samples": 40, "blend": ["docs"], "split": [1, 0, 0], "part": "train"}}
    document = {**one_source("docs", 30, 8, seed=5), "order": order}
    found = found_by(rows(service, post(service, document), RowsQuery(step=str(step)), GET, Budget()))
    tokens = corpus_tokens("docs")
    num_joined = 0
    for row in found["rows"]:
        assert row["start"] == row["spans"][0]["start"]
        assert sum(len(span["tokens"]) for span in row["spans"]) == 31
        for span in row["spans"]:
            start, size = span["start"], len(span["tokens"])
            assert span["tokens"] == tokens[start : start + size]
            assert span["document"] == document_at(start)
        starts = [span["start"] for span in row["spans"]]
        num_joined += starts != sorted(starts)
    assert num_joined > 0


def test_a_row_over_two_shards_names_the_one_that_it_begins_in(service: Service) -> None:
    order = {"megatron": {"num_samples": 40, "blend": ["parts"], "split": [1, 0, 0], "part": "train"}}
    document = {**one_source("parts", 4, 8, seed=5), "order": order}
    found = found_by(rows(service, post(service, document), RowsQuery(step="1"), GET, Budget()))["rows"]
    shards = [[span["start"] // 5 for span in row["spans"]] for row in found]
    assert [row["shard"] for row in found] == ["ab"[each[0]] + ".bin" for each in shards]
    assert any(each[0] != each[-1] for each in shards)


@pytest.mark.parametrize(
    ("ask", "fits"),
    [
        (
            lambda service, plan: rows(
                service, plan, RowsQuery(step="3", first="2", count="3"), GET, Budget()
            ),
            30,
        ),
        (lambda service, _: spans_of(service, "ids", 20, 30), 30),
    ],
    ids=["rows", "spans"],
)
def test_no_more_is_shown_than_a_text_may_have(
    service: Service, plan_id: str, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Any], fits: int
) -> None:
    for limit in (fits, fits - 1):
        gate = Admission(replace(service.settings, max_text_tokens=limit), service.access)
        monkeypatch.setattr(service, "admission", gate)
        if limit == fits:
            assert ask(service, plan_id).status == 200
        else:
            with pytest.raises(ResponseTooLarge, match=f"would take {fits}"):
                ask(service, plan_id)


def spans_of(service: Service, name: str, start: int, count: int) -> Any:
    query = SpansQuery(start=str(start), count=str(count))
    return spans(service, name, query, GET, Budget())


@pytest.mark.parametrize("name", ["docs", "ids"])
@pytest.mark.parametrize(("start", "count"), [(0, 7), (60, 30), (100, 1000), (None, 10)])
def test_a_range_is_shown_where_documents_end(
    service: Service, name: str, start: int | None, count: int
) -> None:
    total = len(corpus_tokens(name))
    start = total if start is None else start
    stop = min(start + count, total)
    response = spans_of(service, name, start, count)
    found = json.loads(body(response))
    check_spans(name, start, stop, found.pop("spans"))
    assert found == {
        "corpus": name,
        "start": start,
        "base_start": start if start < total else None,
        "stop": stop,
        "num_tokens": total,
    }
    assert response.headers["Cache-Control"] == "no-store"


def statistics_of(service: Service, name: str, seed: int = 0) -> Any:
    return statistics(service, name, StatisticsQuery(seed=str(seed)), GET, Budget())


def test_statistics_of_a_small_corpus_are_of_all_of_it(service: Service) -> None:
    response = statistics_of(service, "docs", seed=3)
    tokens = corpus_tokens("docs")
    counts = sorted((-tokens.count(token), token) for token in set(tokens))
    assert json.loads(body(response)) == {
        "corpus": "docs",
        "num_tokens": NUM_TOKENS,
        "num_sampled_tokens": NUM_TOKENS,
        "num_distinct_tokens": len(counts),
        "top_tokens": [
            {"token": token, "count": -count, "text": None} for count, token in counts[: samples.TOP_TOKENS]
        ],
        "counts_by_rank": [[k, -counts[k - 1][0]] for k in (1, 2, 4, 8, 16, 32)],
        "num_documents": 19,
        "document_lengths": {
            "num_sampled": 19,
            "mean": 14.0,
            # The smallest length up to which so many have been counted.
            "quantiles": {"0.0": 5, "0.05": 5, "0.25": 9, "0.5": 14, "0.75": 19, "0.95": 23, "1.0": 23},
            "histogram": [[0, 0], [1, 0], [2, 0], [4, 3], [8, 8], [16, 8]],
        },
    }
    assert response.headers["Cache-Control"] == "no-store"


def test_many_documents_are_read_until_nobody_waits(service: Service) -> None:
    asked = iter(range(100))
    budget = Budget(has_left=lambda: next(asked) > 50)
    with pytest.raises(ClientLeft):
        statistics(service, "many", StatisticsQuery(seed="0"), GET, budget)


@pytest.mark.usefixtures("small_samples")
def test_a_sample_has_one_block_somewhere_in_each_part(service: Service) -> None:
    """Of 110 tokens, a block of 16 in each of four parts of 27: it begins at one of the first 12."""
    begun = set()
    for seed in range(80):
        found = found_by(statistics_of(service, "ids", seed))
        tokens = [each["token"] for each in found["top_tokens"]]
        assert found["num_sampled_tokens"] == found["num_distinct_tokens"] == len(tokens) == 64
        for part in range(4):
            block = tokens[16 * part : 16 * part + 16]
            assert block == list(range(block[0], block[0] + 16))
            begun.add(block[0] - 27 * part)
    assert begun == set(range(12))


@pytest.mark.usefixtures("small_samples")
def test_a_sample_is_of_any_document(service: Service) -> None:
    lengths = [found_by(statistics_of(service, "docs", seed))["document_lengths"] for seed in range(40)]
    assert {each["num_sampled"] for each in lengths} == {4}
    assert min(each["quantiles"]["0.0"] for each in lengths) == 5
    assert max(each["quantiles"]["1.0"] for each in lengths) == 23


def search_of(service: Service, name: str, **given: str) -> Any:
    return search(service, name, SearchQuery.model_validate(given), GET, Budget())


def test_a_look_at_a_corpus_elsewhere_fetches_nothing(service: Service) -> None:
    def looked_at() -> tuple[int, int, int]:
        counted = found_by(statistics_of(service, "far"))
        found = found_by(search_of(service, "far", text="text", limit="100"))
        assert counted["num_tokens"] == found["num_tokens"] == 400
        return counted["num_sampled_tokens"], found["num_searched_tokens"], len(found["found"])

    assert looked_at() == (0, 0, 0)
    assert found_by(statistics_of(service, "far"))["counts_by_rank"] == []
    spans_of(service, "far", 0, 10)
    assert looked_at() == (400, 400, 40)


@pytest.mark.usefixtures("small_samples")
@pytest.mark.parametrize(
    ("content", "sought", "limit"),
    [
        pytest.param("ab" + "-" * 60, "ab", 9, id="at the start"),
        pytest.param("-" * 60 + "ab", "ab", 9, id="at the end"),
        pytest.param("-" * 15 + "ab" + "-" * 30, "ab", 9, id="across blocks"),
        pytest.param("-" * 16 + "ab" + "-" * 30, "ab", 9, id="first of a block"),
        pytest.param("-" * 14 + "ab" + "-" * 30, "ab", 9, id="last of a block"),
        pytest.param("-" * 13 + "\xe9\xe9" + "-" * 30, "\xe9\xe9", 9, id="bytes across blocks"),
        pytest.param("\xe9" * 12 + "ab" + "\xe9" * 9, "ab", 9, id="behind longer characters"),
        pytest.param("-" * 10 + "abcdefghijklmnopqrstuvwxyz" + "-" * 9, "abcdefghijklmnop", 9, id="long"),
        pytest.param("ab-" * 20, "ab", 3, id="limit"),
        pytest.param("ab-" * 20, "ab", 6, id="limit at the end of a block"),
        pytest.param("ab-" * 20, "ab", 100, id="many"),
        pytest.param("aaaaaaa", "aa", 100, id="one after another"),
        pytest.param("-" * 40, "ab", 100, id="nowhere"),
    ],
)
def test_a_text_is_found_with_what_stands_around_it(
    text: Callable[[bytes], Service], content: str, sought: str, limit: int
) -> None:
    service = text(content.encode())
    found = found_by(search_of(service, "text", text=sought, limit=str(limit)))
    places = []
    at = content.find(sought)
    while at >= 0:
        places.append(at)
        at = content.find(sought, at + len(sought))
    shown = found.pop("found")
    assert [each["token"] for each in shown] == [len(content[:at].encode()) for at in places[:limit]]
    for at, each in zip(places, shown, strict=False):
        end = at + len(sought)
        assert (each["text"], each["document"]) == (sought, None)
        # Around it only its block is shown.
        assert content[:at].endswith(each["before"])
        assert content[end:].startswith(each["after"].rstrip("\ufffd"))
        assert len(each["before"].encode()) == len(content[:at].encode()) % 16
    num_searched = len(content.encode())
    if len(places) >= limit:
        num_searched = 16 * (shown[-1]["token"] // 16 + 1)
    share = "less than 1" if not num_searched else 100 * num_searched // len(content.encode())
    assert found == {
        "searched": f"{num_searched:,} of {len(content.encode()):,} tokens ({share} %)",
        "complete": len(shown) < limit,
        "corpus": "text",
        "text": sought,
        "num_tokens": len(content.encode()),
        "num_searched_tokens": num_searched,
        "next_start": None,
    }


@pytest.mark.usefixtures("small_samples")
def test_a_text_is_found_in_its_document(service: Service) -> None:
    found = found_by(search_of(service, "letters", text="text", limit="100"))["found"]
    assert all(each["token"] % 10 == 5 for each in found)
    assert [each["document"] for each in found] == [each["token"] // 10 for each in found]
    assert len(found) > 2


def test_so_much_is_shown_around_a_text(text: Callable[[bytes], Service]) -> None:
    before, after = "".join(map(chr, range(33, 123))), "".join(map(chr, range(122, 32, -1)))
    response = search_of(text(f"{before}\0{after}".encode()), "text", text="\0")
    (found,) = json.loads(body(response))["found"]
    assert (found["before"], found["after"]) == (before[-80:], after[:80])
    assert response.headers["Cache-Control"] == "no-store"
