"""Mistakes and abuse: a complete problem document, decided before anything is allocated."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from corpus_server.web.problems import STATUS
from tests.conftest import ServedCorpus
from tests.reference import one_source
from tests.serving import Answer, RunningServer, host_and_port

WEB = {"corpus": "web", "seq_len": 16, "batch_size": 12}
STEP = {**WEB, "step": 0}


def check_problem(answer: Answer, status: int, slug: str, *, parameter: str | None = None) -> dict[str, Any]:
    """Check that an answer is a complete problem document and return it."""
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["Cache-Control"] == "no-store"
    document: dict[str, Any] = answer.json()
    assert (answer.status, document["status"], document["type"]) == (status, status, slug), document
    assert document["title"] == slug.replace("-", " ").capitalize()
    assert document["detail"]
    assert set(document) - {"parameter", "received", "accepted", "remedy"} == {
        *("type", "title", "status", "detail")
    }
    if parameter is not None:
        assert document["parameter"] == parameter
    return document


NO_INTEGERS = [
    *("", " ", "-1", "+1", " 1", "1 ", "1.0", "1e3", "0x10", "1_000", "NaN", "inf", "-0", "null", "true"),
    *(
        "[1]",
        "{}",
        "\uff11",
        "\u0663",
        "1\n",
        "1\x00",
        "18446744073709551616",
        "9" * 30,
        "9" * 5000,
        "-" + "9" * 30,
    ),
]
INTEGERS = ("step", "count", "rank", "world_size", "seq_len", "batch_size", "seed", "stride")


@pytest.mark.parametrize("parameter", INTEGERS)
def test_what_is_no_integer_in_range_is_refused(server: RunningServer, parameter: str) -> None:
    """Catalogue row 25: boolean, NaN, negative, huge; each names the parameter, the value and the range."""
    for value in NO_INTEGERS:
        answer = server.get("/v1/batches", **{**STEP, parameter: value})
        document = check_problem(answer, 422, "invalid-parameter", parameter=parameter)
        assert document["detail"].startswith(f"{parameter} must be an integer in [")
        assert document["received"].removesuffix("...") == value[:200]
        assert document["accepted"].startswith("an integer in [")


@pytest.mark.parametrize("parameter", ["start", "count"])
def test_a_range_is_checked_likewise(server: RunningServer, parameter: str) -> None:
    for value in NO_INTEGERS:
        answer = server.get("/v1/corpora/web/tokens", **{parameter: value})
        check_problem(answer, 422, "invalid-parameter", parameter=parameter)


@pytest.mark.parametrize(
    ("change", "parameter", "accepted"),
    [
        ({"step": 2**40 + 1}, "step", f"an integer in [0, {2**40}]"),
        ({"count": 0}, "count", "an integer in [1, 4096]"),
        ({"count": 4097}, "count", "an integer in [1, 4096]"),
        ({"seq_len": 2**20 + 1}, "seq_len", "an integer in [1, 1048576]"),
        ({"batch_size": 0}, "batch_size", "an integer in [1, 1048576]"),
        ({"seed": 2**64}, "seed", f"an integer in [0, {2**64 - 1}]"),
        ({"world_size": 5}, "world_size", "one of 1, 2, 3, 4, 6, 12"),
        ({"world_size": 3, "rank": 3}, "rank", "[0, 3)"),
        ({"step": 2**40, "count": 2}, "step", f"[0, {2**40}]"),
        ({"order": "Shuffle"}, "order", "'shuffle', 'sequential' or 'random'"),
        ({"format": "csv"}, "format", "'raw', 'npy', 'json' or 'text'"),
        ({"checksum": "1"}, "checksum", "'true' or 'false'"),
        ({"plan": "xyz"}, "plan", "^[0-9a-f]{64}$"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("route", ["batches", "indices"])
def test_the_range_accepted_is_named(
    server: RunningServer, route: str, change: dict[str, Any], parameter: str, accepted: str
) -> None:
    answer = server.get(f"/v1/{route}", **{**STEP, **change})
    document = check_problem(answer, 422, "invalid-parameter", parameter=parameter)
    assert document["accepted"] == accepted
    assert document["received"] in (change[parameter], str(change[parameter]))


def private_bytes(server: RunningServer) -> int:
    """Return what the workers hold in memory of their own."""
    return sum(psutil.Process(pid).memory_full_info().uss for pid in server.worker_pids())


HUGE = {"seq_len": 2**20, "batch_size": 2**20, "step": 2**40 - 4096, "count": 4096}


@pytest.mark.parametrize(
    "query",
    [
        {"corpus": "sparse", **HUGE},
        {"corpus": "sparse", **HUGE, "format": "npy"},
        {"corpus": "sparse", **HUGE, "format": "json"},
        {"corpus": "sparse", **HUGE, "format": "text"},
        {"corpus": "sparse", **HUGE, "seq_len": 1},
        {"corpus": "sparse", **HUGE, "world_size": 1024},
        {"corpus": "sparse", "seq_len": 2**20, "batch_size": 32, "step": 0},
    ],
    ids=["raw", "npy", "json", "text", "short", "ranks", "just-above"],
)
@pytest.mark.parametrize("route", ["batches", "indices"])
def test_a_huge_product_is_refused_before_it_is_allocated(
    sparse: RunningServer, route: str, query: dict[str, Any]
) -> None:
    """Catalogue row 25: each factor is in range, together they are petabytes."""
    before = private_bytes(sparse)
    for _ in range(5):
        answer = sparse.get(f"/v1/{route}", **query)
        if route == "indices" and query["batch_size"] == 32:
            assert answer.status == 200
        elif route == "indices" and query.get("format") == "text":
            check_problem(answer, 422, answer.json()["type"])
        else:
            document = check_problem(answer, 422, "answer-too-large", parameter="count")
            limit = 2**20 if "tokens" in document["accepted"] else 2**26
            assert document["accepted"].startswith(f"at most {limit} ")
            assert document["received"] > limit
            assert document["remedy"]
    assert private_bytes(sparse) - before < 2**24


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server over a file that is large enough for every range, and takes no disk space."""
    folder = tmp_path_factory.mktemp("sparse")
    with (folder / "sparse.bin").open("wb") as file:
        file.truncate(2**33)
    with RunningServer({"sparse": folder / "sparse.bin"}, folder) as running:
        running.get("/v1/batches", corpus="sparse", seq_len=2, batch_size=2, step=0)
        yield running


def test_ranges_outside_the_corpus(server: RunningServer, corpora: dict[str, ServedCorpus]) -> None:
    size = corpora["web"].tokens.size
    assert server.get("/v1/corpora/web/tokens", start=size, count=0).status == 200
    for query in ({"start": size, "count": 1}, {"start": size + 1}, {"start": 0, "count": 2**63 - 1}):
        document = check_problem(
            server.get("/v1/corpora/web/tokens", **query), 422, "invalid-parameter", parameter="count"
        )
        assert document["accepted"] == f"start + count <= {size}"


@pytest.mark.parametrize(
    ("route", "query", "parameter"),
    [
        ("/v1/batches", {**WEB, "stepp": 1}, "stepp"),
        ("/v1/batches", {**STEP, "Step": 1}, "Step"),
        ("/v1/indices", {**STEP, "global_batch_size": 1}, "global_batch_size"),
        ("/v1/corpora/web/tokens", {"step": 1}, "step"),
        ("/v1/corpora/docs/documents/0", {"start": 1}, "start"),
        ("/v1/plans", {"limits": 1}, "limits"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_unknown_parameter_is_refused_by_name(
    server: RunningServer, route: str, query: dict[str, Any], parameter: str
) -> None:
    """A typing error must not silently train on a default."""
    document = check_problem(server.get(route, **query), 422, "invalid-parameter", parameter=parameter)
    assert document["detail"] == f"unknown parameter {parameter!r}"


def test_a_parameter_given_twice_is_refused(server: RunningServer) -> None:
    answer = server.get("/v1/batches?corpus=web&seq_len=16&batch_size=12&step=1&step=2")
    document = check_problem(answer, 422, "invalid-parameter", parameter="step")
    assert document["detail"] == "step is given twice"


def test_what_is_missing_is_named(server: RunningServer) -> None:
    check_problem(server.get("/v1/batches", **WEB), 422, "invalid-parameter", parameter="step")
    for left_out in WEB:
        query = {name: value for name, value in STEP.items() if name != left_out}
        check_problem(server.get("/v1/batches", **query), 422, "invalid-parameter", parameter=left_out)


def test_a_plan_is_named_or_spelled_but_not_both(server: RunningServer) -> None:
    plan_id = server.post_plan(one_source("web", 16, 12)).json()["id"]
    answer = server.get("/v1/batches", plan=plan_id, seq_len=16, step=0)
    check_problem(answer, 422, "invalid-parameter", parameter="seq_len")


def test_an_unknown_plan_says_what_to_do(server: RunningServer) -> None:
    for target in (f"/v1/plans/{'0' * 64}", f"/v1/batches?plan={'0' * 64}&step=0"):
        document = check_problem(server.get(target), 404, "unknown-plan", parameter="plan")
        assert "POST" in document["remedy"]
        assert document["received"] == "0" * 64


def test_a_plan_for_other_content_is_refused(server: RunningServer) -> None:
    other = "sampled-" + "f" * 64
    answer = server.post_plan(one_source("web", 16, 12, fingerprints={"web": other}))
    document = check_problem(answer, 409, "fingerprint-mismatch", parameter="fingerprints.web")
    assert document["received"] == other
    assert document["accepted"] == server.get("/v1/corpora/web").json()["fingerprint"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "must be a plan document in JSON"),
        (b"\xff\xfe", "must be a plan document in JSON"),
        (b"plan", "must be a plan document in JSON"),
        (b'{"seq_len": NaN}', "NaN is not JSON"),
        (b'{"seq_len": -Infinity}', "-Infinity is not JSON"),
        (b'{"seq_len": ' + b"9" * 10_000 + b"}", "must be a plan document in JSON"),
        (b"[" * 100_000, "must be a plan document in JSON"),
        (b'{"seq_len": 1e400, "stages": []}', "got inf"),
        (b"[]", "plan must be a JSON object, got list"),
        (b"null", "plan must be a JSON object"),
        (b"{}", "plan lacks seq_len, stages"),
        (b'{"seq_len": 8, "stages": [], "sed": 1}', "did you mean 'seed'"),
        (b'{"seq_len": 8, "seq_len": 9, "stages": []}', "seq_len is given twice"),
        (json.dumps(one_source("docs", 8, 4, stride=0)).encode(), "stride must be an integer in [1, "),
        (json.dumps(one_source("docs", 11, 4)).encode(), "the longest has 11"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_plan_is_refused(server: RunningServer, body: bytes, message: str) -> None:
    document = check_problem(server.get("/v1/plans", method="POST", body=body), 422, "invalid-plan")
    assert message in document["detail"]


def test_text_without_a_tokenizer(server: RunningServer) -> None:
    for answer in (
        server.get("/v1/corpora/web/tokens", format="text"),
        server.get("/v1/batches", **STEP, format="text"),
    ):
        assert check_problem(answer, 422, "text-unavailable", parameter="format")["remedy"]
    check_problem(server.get("/v1/indices", **STEP, format="text"), 422, "invalid-parameter")


@pytest.mark.parametrize("number", ["3", "4", "9999999999999999999"])
def test_a_document_that_is_not_there(server: RunningServer, number: str) -> None:
    document = check_problem(server.get(f"/v1/corpora/docs/documents/{number}"), 404, "unknown-document")
    assert document["accepted"] == "[0, 3)"
    check_problem(server.get("/v1/corpora/web/documents/0"), 404, "unknown-document")


def test_a_method_or_a_route_that_is_not_there(server: RunningServer) -> None:
    check_problem(server.get("/v2/batches"), 404, "not-found")
    check_problem(server.get("/"), 404, "not-found")
    for method, target in (("DELETE", "/v1/plans"), ("POST", "/v1/batches"), ("PUT", "/v1/corpora/web")):
        answer = server.get(target, method=method)
        check_problem(answer, 405, "method-not-allowed")
        assert answer.headers["Allow"]


NAMES = [
    *("..", ".", "../web", "../../etc/passwd", "/etc/passwd", "web/../web", "web/1.bin", "1.bin", "web/"),
    *(
        "WEB",
        "web ",
        " web",
        "web\x00",
        "\x00",
        "web\n",
        "we\u200bb",
        "\uff57eb",
        "w\u0435b",
        "\u202eweb",
        "web.",
        "~",
    ),
    *("file:///etc/passwd", "%2e%2e", "..%2f..%2fetc%2fpasswd", "web;", "web?", "web#", "😀", "a" * 128),
]


@pytest.mark.parametrize("suffix", ["", "/tokens", "/documents/0"])
def test_names_that_are_not_served_are_not_found(
    server: RunningServer, corpora: dict[str, ServedCorpus], suffix: str
) -> None:
    """Catalogue row 26: traversal, NUL, look-alikes; and nothing but the served files is ever open."""
    for name in NAMES:
        for spelled in (quote(name, safe=""), quote(name, safe="/.")):
            answer = server.get(f"/v1/corpora/{spelled}{suffix}")
            assert answer.status == 404, spelled
            check_problem(answer, 404, answer.json()["type"])
    allowed = [corpora["web"].path.parent, server.folder]
    for pid in server.worker_pids():
        opened = [Path(file.path) for file in psutil.Process(pid).open_files()]
        assert len(opened) >= 8
        assert [path for path in opened if not any(path.is_relative_to(root) for root in allowed)] == []


@pytest.mark.parametrize("name", NAMES)
def test_names_in_parameters_and_plans_are_not_found_either(server: RunningServer, name: str) -> None:
    document = check_problem(server.get("/v1/batches", **{**STEP, "corpus": name}), 404, "unknown-corpus")
    assert document["accepted"] == "web, mixed, docs, text, words"
    check_problem(server.post_plan(one_source(name, 16, 12)), 404, "unknown-corpus")


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/corpora/\xff\xfe",
        b"/v1/corpora/%ff%fe/tokens",
        b"/v1/corpora/%",
        b"/v1/corpora/%zz",
        b"/v1/corpora/%00",
        b"/v1/corpora/%ed%a0%80",
        b"/../../etc/passwd",
        b"/v1/corpora/web/../../../../etc/passwd",
        b"//etc/passwd",
        b"/v1/corpora?name=\xc3\x28",
        b"*",
        b"http://example.org/etc/passwd",
    ],
    ids=repr,
)
def test_odd_bytes_in_a_target_end_in_a_4xx(server: RunningServer, target: bytes) -> None:
    pids = server.worker_pids()
    with socket.create_connection(host_and_port(server.url), timeout=10) as connection:
        connection.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b""
        while part := connection.recv(65536):
            received += part
    assert received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200 OK")), received[:200]
    if b"name=" not in target:
        assert received.startswith(b"HTTP/1.1 4")
    assert server.worker_pids() == pids


def test_a_long_url_is_refused(server: RunningServer) -> None:
    check_problem(server.get("/v1/corpora/" + "a" * 9000), 414, "url-too-long")
    check_problem(server.get("/v1/batches", **STEP, x="a" * 9000), 414, "url-too-long")


def test_every_status_of_the_table_is_an_error() -> None:
    assert {status // 100 for status in STATUS.values()} == {4, 5}
    assert len({error.slug for error in STATUS}) == len(STATUS)


def test_what_is_echoed_is_short(server: RunningServer) -> None:
    answer = server.get("/v1/batches", **{**STEP, "corpus": "x" * 100, "order": "y" * 5000})
    assert len(answer.body) < 1500
    assert json.loads(answer.body)["received"] == "y" * 200 + "..."
