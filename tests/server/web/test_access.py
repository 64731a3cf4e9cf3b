"""Who may ask for what, seen from outside: tokens and their scopes, on both ways through the server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from corpus_server.admission import Access
from corpus_server.admission.access import KEYS
from corpus_server.admission.request import SCOPES
from corpus_server.errors import InvalidParameter
from tests.corpora import some_tokens, write_raw
from tests.recorded import Record, write_part
from tests.serving import RunningServer, check_problem, host_and_port
from tests.tokens import Tokens, plan, post

HOUR = timedelta(hours=1)
STEP = {"seq_len": 16, "batch_size": 8, "step": 3}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    names = ("web", "code")
    return {
        name: write_raw(folder / f"{name}.bin", some_tokens(200_000, seed=k)) for k, name in enumerate(names)
    }


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    found = Tokens(tmp_path_factory.mktemp("tokens") / "tokens.toml")
    found.add("all", "read:*", *SCOPES)
    found.add("web", "read:web")
    found.add("planner", "read:web", "plans")
    found.add("inspector", "read:web", "inspect")
    found.add("prometheus", "metrics")
    found.add("gone", "read:gone", "plans")
    found.add("old", "read:*", expires=datetime.now(UTC) - HOUR)
    found.add("young", "read:*", expires=datetime.now(UTC) + HOUR)
    return found


@pytest.fixture(scope="module")
def server(
    corpora: dict[str, Path], tokens: Tokens, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    with RunningServer(corpora, folder, arguments=["--tokens", str(tokens.path)]) as running:
        yield running


ROUTES = [
    "/docs",
    "/openapi.json",
    "/metrics",
    "/v1/live",
    "/v1/corpora",
    "/v1/corpora/web",
    "/v1/corpora/none",
    "/v1/corpora/web/tokens",
    "/v1/plans",
    f"/v1/plans/{'0' * 64}",
    f"/v1/plans/{'0' * 64}/receipt?step=1",
    "/v1/batches?corpus=web&seq_len=16&batch_size=8&step=3",
    "/v1/indices?corpus=web&seq_len=16&batch_size=8&step=3",
    "/v1/batches?nonsense",
    "/nothing/here",
]


@pytest.mark.parametrize("route", ["/", "/page/plans", "/page/corpora/web", "/page/static/api.js"])
def test_the_page_needs_no_token_and_holds_nothing_of_a_corpus(server: RunningServer, route: str) -> None:
    """A browser cannot send a token for it; its scripts send one with what they ask."""
    shown = server.get(route)
    assert shown.status == 200
    described = server.get("/v1/corpora/web")
    check_problem(described, 401, "unauthorized")
    assert b"fingerprint-" not in shown.body
    assert b"sampled-" not in shown.body


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_asks_for_a_token(server: RunningServer, tokens: Tokens, route: str) -> None:
    """No, a wrong, an expired and a mangled token; a wrong one is told the same as one that has expired."""
    missing = server.get(route)
    check_problem(missing, 401, "unauthorized")
    assert missing.headers["WWW-Authenticate"] == "Bearer"
    bodies = set()
    for given in (
        "Bearer nonsense",
        f"Bearer {tokens.secrets['old']}",
        f"Bearer {tokens.secrets['all'][:-1]}",
        f"Basic {tokens.secrets['all']}",
        "Bearer",
        "",
    ):
        refused = server.get(route, headers={"Authorization": given})
        check_problem(refused, 401, "unauthorized")
        assert refused.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
        bodies.add(refused.body)
    assert len(bodies) == 1


def test_a_post_asks_for_a_token_before_it_reads_the_body(server: RunningServer) -> None:
    with socket.create_connection(host_and_port(server.url), timeout=20) as connection:
        connection.sendall(b"POST /v1/plans HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 401"


@pytest.mark.parametrize("name", ["all", "web", "young"])
def test_a_valid_token_gets_the_same_bytes_whatever_else_it_expects(
    server: RunningServer, tokens: Tokens, name: str
) -> None:
    response = server.get("/v1/batches", **STEP, corpus="web", headers=tokens.header(name))
    other = server.get("/v1/batches", **STEP, corpus="web", headers={**tokens.header(name), "Expect": "x"})
    assert (response.status, other.status) == (200, 200)
    assert response.body == other.body


READS_CODE = [
    "/v1/corpora/code",
    "/v1/corpora/code/tokens?count=3",
    "/v1/corpora/code/documents/0",
    "/v1/batches?corpus=code&seq_len=16&batch_size=8&step=3",
    "/v1/indices?corpus=code&seq_len=16&batch_size=8&step=3",
    "/v1/lookup?corpus=code&seq_len=16&batch_size=8&token=5",
    "/v1/plans/{plan}",
    "/v1/plans/{plan}/usage?step=5",
    "/v1/plans/{plan}/shards?step=5",
    "/v1/plans/{plan}/receipt?step=5",
    "/v1/batches?plan={plan}&step=3",
    "/v1/indices?plan={plan}&step=3",
    "/v1/lookup?plan={plan}&corpus=web&token=5",
]


@pytest.mark.parametrize("route", READS_CODE)
def test_a_token_reads_only_its_corpora(server: RunningServer, tokens: Tokens, route: str) -> None:
    mixed = post(server, plan("web", "code"), tokens.header("all")).json()["id"]
    target = route.format(plan=mixed)
    check_problem(server.get(target, headers=tokens.header("web")), 403, "forbidden")
    assert server.get(target, headers=tokens.header("all")).status in (200, 404)  # 404: it has no documents


def test_a_corpus_that_does_not_exist_looks_like_one_that_may_not_be_read(
    server: RunningServer, tokens: Tokens
) -> None:
    for route in (
        "/v1/corpora/{}",
        "/v1/corpora/{}/tokens",
        "/v1/batches?corpus={}&seq_len=4&batch_size=1&step=0",
    ):
        refused = [server.get(route.format(name), headers=tokens.header("web")) for name in ("code", "none")]
        texts = {response.body.replace(b"code", b"none") for response in refused}
        assert {response.status for response in refused} == {403}
        assert len(texts) == 1
    refused = [post(server, plan("web", name), tokens.header("planner")) for name in ("code", "none")]
    assert {response.status for response in refused} == {403}
    assert len({response.body.replace(b"code", b"none") for response in refused}) == 1


def test_a_proxy_is_told_who_may_have_what(server: RunningServer, tokens: Tokens) -> None:
    """Whatever a shared cache keeps, by whichever part of the URL it names a corpus."""
    mixed = post(server, plan("web", "code"), tokens.header("all")).json()["id"]
    own = post(server, plan("web"), tokens.header("all")).json()["id"]

    def told(name: str, target: str) -> tuple[int, str | None]:
        response = server.get("/v1/access", headers={**tokens.header(name), "X-Original-URI": target})
        return response.status, response.headers["Corpus-Access"]

    for route in (*READS_CODE, "/v1/plans/{plan}/rows?step=5", "/%76%31/plans/{plan}/receipt?step=5"):
        target = route.format(plan=mixed)
        assert told("web", target) == (403, None), target
        assert told("all", target) == (204, "granted")
        assert told("web", route.replace("code", "web").format(plan=own)) == (204, "granted")
    assert told("web", f"/v1/plans/{own}/diff?other={mixed}") == (403, None)
    assert told("web", "/v1/plans") == (403, None)
    assert told("prometheus", "/metrics") == (204, "granted")
    assert told("all", f"/v1/plans/{'0' * 64}/receipt?step=5") == (204, "unknown")


def test_nobody_learns_the_names_of_others(server: RunningServer, tokens: Tokens) -> None:
    """Neither strangers nor a token for a corpus that is served no more."""
    assert server.get("/readyz").json() == {"status": "ready"}
    for response in (
        server.get("/v1/corpora/gone", headers=tokens.header("gone")),
        server.get("/v1/batches", **STEP, corpus="gone", headers=tokens.header("gone")),
        post(server, plan("gone"), tokens.header("gone")),
    ):
        check_problem(response, 404, "unknown-corpus", parameter="corpus")
        assert b"web" not in response.body
        assert b"code" not in response.body


SPELLINGS = [
    *("{}%0A", "{}%0a", "{}\n", "{}%00", "{}/", "/{}", "{}%2F", "{};a", "{}%20", "{}?a=1", "{}%3F"),
    *("//v1/plans", "/V1/plans", "/v1/PLANS", "/v1/%70lans", "/%76%31%2Fplans", "/v1/./plans", "/v1//plans"),
    *(
        "/v1/x/../plans",
        "/v1%2fplans",
        "/%2e/v1/plans",
        "/v1/plans%250A",
        "/v1/pl\xe4ns",
        "/METRICS",
        "/%6detrics",
    ),
]


@pytest.mark.parametrize("path", ["/v1/plans", "/v1/live", "/metrics", "/docs", "/openapi.json"])
def test_no_odd_spelling_of_a_path_needs_another_scope(
    server: RunningServer, tokens: Tokens, path: str
) -> None:
    """Catalogue row 52. The failure was: before `%0A` the router found the path, the check another one."""
    assert server.get(path, headers=tokens.header("all")).status == 200
    for spelled in SPELLINGS:
        target = spelled.format(path).encode("latin-1")
        head = [b"GET " + target + b" HTTP/1.1", b"Host: x", b"Connection: close"]
        head += [f"{name}: {value}".encode() for name, value in tokens.header("web").items()]
        with socket.create_connection(host_and_port(server.url), timeout=20) as connection:
            connection.sendall(b"\r\n".join([*head, b"", b""]))
            status = int(connection.makefile("rb").readline().split()[1])
        assert status in (400, 403, 404), (spelled, status)


def test_the_list_of_corpora_has_those_that_may_be_read(server: RunningServer, tokens: Tokens) -> None:
    def names(token: str) -> list[str]:
        response = server.get("/v1/corpora", headers=tokens.header(token))
        return [each["name"] for each in response.json()["corpora"]]

    assert names("web") == ["web"]
    assert sorted(names("all")) == ["code", "web"]


def test_the_list_of_plans_has_those_whose_corpora_may_be_read(server: RunningServer, tokens: Tokens) -> None:
    """Newer plans of other corpora take none of their places."""
    own, mixed, other = (
        post(server, {**plan(*names), "seed": 71}, tokens.header("all")).json()["id"]
        for names in (["web"], ["web", "code"], ["code"])
    )

    def listed(token: str, **query: int) -> list[str]:
        response = server.get("/v1/plans", **query, headers=tokens.header(token))
        assert response.status == 200
        return [each["id"] for each in response.json()["plans"]]

    assert {own, mixed, other} <= set(listed("all"))
    assert own in listed("inspector")
    assert not {mixed, other} & set(listed("inspector"))
    assert listed("inspector", limit=1) == [own]
    kept = server.get("/v1/plans", headers=tokens.header("inspector")).body
    code = server.get("/v1/corpora/code", headers=tokens.header("all")).json()["fingerprint"]
    assert code.encode() not in kept


def test_neither_side_of_a_comparison_may_be_of_a_corpus_that_may_not_be_read(
    server: RunningServer, tokens: Tokens
) -> None:
    """The refusal names no fingerprint; an inline look-up is refused like one by a plan's id."""
    own, mixed, other = (
        post(server, plan(*names), tokens.header("all")).json()["id"]
        for names in (["web"], ["web", "code"], ["code"])
    )
    code = server.get("/v1/corpora/code", headers=tokens.header("all")).json()["fingerprint"]
    for target in (
        *(f"/v1/plans/{own}/diff?other={each}" for each in (mixed, other)),
        *(f"/v1/plans/{each}/diff?other={own}" for each in (mixed, other)),
        f"/v1/lookup?plan={mixed}&corpus=web&token=5",
        f"/v1/lookup?plan={other}&corpus=code&token=5",
        "/v1/lookup?corpus=code&seq_len=16&batch_size=8&token=5",
    ):
        for name in ("web", "inspector"):
            refused = server.get(target, headers=tokens.header(name))
            check_problem(refused, 403, "forbidden")
            assert code.encode() not in refused.body
        assert server.get(target, headers=tokens.header("all")).status == 200, target


@pytest.mark.parametrize("path", ["/v1/pl%61ns", "/v1/l%69ve", "/%6detrics", "/d%6Fcs"])
def test_another_spelling_of_a_path_asks_for_the_same_scope(
    server: RunningServer, tokens: Tokens, path: str
) -> None:
    for name in tokens.secrets:
        spelled, plain = (server.get(each, headers=tokens.header(name)) for each in (path, unquote(path)))
        assert spelled.status == plain.status


def test_no_shared_cache_may_keep_what_a_token_was_needed_for(
    server: RunningServer, tokens: Tokens, corpora: dict[str, Path], tmp_path: Path
) -> None:
    asked = "/v1/batches?corpus=web&seq_len=16&batch_size=8&step=3"
    response = server.get(asked, headers=tokens.header("all"))
    assert response.headers["Cache-Control"] == "private, no-cache"
    named = post(server, plan("web"), tokens.header("all")).json()["id"]
    for route in (f"/v1/batches?plan={named}&step=3", f"/v1/plans/{named}/receipt?step=3"):
        kept = server.get(route, headers=tokens.header("all")).headers["Cache-Control"]
        assert kept == "private, max-age=31536000, immutable"
    for route in (*ROUTES, f"/v1/plans/{named}", f"/v1/plans/{named}/shards?step=3", "/v1/access"):
        kept = server.get(route, headers=tokens.header("all")).headers["Cache-Control"]
        assert kept.startswith("private") or kept == "no-store", route
    with RunningServer(corpora, tmp_path) as open_to_all:
        assert open_to_all.get(asked).headers["Cache-Control"] == "public, no-cache"


def test_no_response_and_no_log_holds_a_token_or_a_path(
    server: RunningServer, tokens: Tokens, corpora: dict[str, Path]
) -> None:
    for name in tokens.secrets:
        for route in (*ROUTES, *READS_CODE):
            text = server.get(route, headers=tokens.header(name)).body.decode("latin-1")
            assert not any(secret in text for secret in tokens.secrets.values())
            assert str(corpora["web"].parent) not in text
            assert str(server.folder) not in text
    for secret in (*tokens.secrets.values(), str(server.folder), "Traceback"):
        assert secret not in server.log()


TABLE_OF_A = f'[tokens.a]\nsha256 = "{"0" * 64}"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokens = 3", "expected tables"),
        ("[token.a]\nscopes = []", "got token"),
        ("[tokens.a]\nscopes = []", "sha256 must be 64"),
        (TABLE_OF_A, "scopes must be a list"),
        (f'{TABLE_OF_A}scopes = ["reed:web"]', "reed:web"),
        (f"{TABLE_OF_A}scopes = []\nexpires = 2027-01-01", "a time like"),
        *(
            (
                f"{TABLE_OF_A}{key}.no = 'such'\n{'' if key == 'scopes' else 'scopes = []'}",
                f"{key} must be .*'such'",
            )
            for key in KEYS
        ),
        (f"{TABLE_OF_A}scopes = []\nmax_plans = 0", r"in \[1, 2\^63\)"),
        (f"{TABLE_OF_A}scopes = []\nmax_plans = {2**63}", r"in \[1, 2\^63\)"),
        (f"{TABLE_OF_A}scopes = []\nsecret = 1", "unknown secret"),
        ("".join(f'[tokens.{n}]\nsha256 = "{"0" * 64}"\nscopes = []\n' for n in "ab"), "are the same token"),
        ("[", "cannot be read"),
        ("a = " + "9" * 5000, "cannot be read"),
        ("", "expected tokens, found none"),
        ("# tokens of the cluster", "expected tokens, found none"),
        ('[tokens.a]\nsha256 = "corpus_secret"\nscopes = []', "sha256 must be 64 .* got 13 characters"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    """The file is read before any worker starts; `test_start.py` shows the line."""
    (tmp_path / "tokens.toml").write_text(text)
    with pytest.raises(InvalidParameter, match=said) as failed:
        Access(tmp_path / "tokens.toml")
    assert "corpus_secret" not in failed.value.detail
    assert "\n" not in failed.value.detail


def test_a_client_trains_with_a_token_from_a_file(
    corpora: dict[str, Path], tmp_path: Path, server: RunningServer, tokens: Tokens
) -> None:
    from corpus_client import ArrayLoader, Network

    file = tmp_path / "token"
    file.write_text(tokens.secrets["planner"] + "\n")
    options = {"corpus": "web", "seq_len": 16, "global_batch_size": 8, "num_steps": 3}
    with ArrayLoader(server.url, **options, network=Network(auth=file)) as loader:
        rows = [np.array(batch.inputs) for batch in loader]
    expected = server.get("/v1/batches", **{**STEP, "step": 2}, corpus="web", headers=tokens.header("all"))
    assert np.array_equal(rows[2], expected.array().reshape(8, 17)[:, :-1])


@pytest.mark.parametrize(("allow", "is_allowed"), [("10.0.0.0/8,127.0.0.1", True), ("10.0.0.0/8", False)])
def test_only_allowed_networks_are_answered(
    corpora: dict[str, Path], tmp_path: Path, allow: str, is_allowed: bool
) -> None:
    """On both ways; others learn from a probe that the server is ready, and no name."""
    with RunningServer(corpora, tmp_path, arguments=["--allow", allow]) as running:
        for path in ("/v1/batches", "/%76%31/batches", "/v1/corpora", "/metrics", "/"):
            response = running.get(path, **({"corpus": "web", **STEP} if "batches" in path else {}))
            if is_allowed:
                assert response.status == 200
            else:
                document = check_problem(response, 403, "forbidden")
                assert document["detail"] == "127.0.0.1 is in no network that this server serves"
                assert document["remedy"] == "ask from another network"
        assert running.get("/healthz").json() == {"status": "alive"}
        assert running.get("/readyz").json() == {"status": "ready"}


def test_strangers_learn_no_file_that_changed(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "secret-project.bin", some_tokens(5000))
    known = Tokens(tmp_path / "tokens.toml")
    known.add("web", "read:web")
    with RunningServer({"web": path}, tmp_path, arguments=["--tokens", str(known.path)]) as server:
        path.write_bytes(b"")
        problem = check_problem(server.get("/readyz"), 503, "not-ready")
    assert problem["detail"] == "a file of a corpus changed, or cannot be read"
    assert "secret" not in str(problem)
    with RunningServer({"web": write_raw(path, some_tokens(5000))}, tmp_path) as server:
        path.write_bytes(b"")
        assert "secret-project.bin" in check_problem(server.get("/readyz"), 503, "not-ready")["detail"]


def test_a_recording_that_may_not_be_read_is_as_unknown_as_one_that_is_not_there(tmp_path: Path) -> None:
    """The refusal named the scope that was lacking, and so a corpus and that the name was right."""
    path = write_raw(tmp_path / "web.bin", some_tokens(5000))
    known = Tokens(tmp_path / "tokens.toml")
    known.add("web", "read:web")
    (tmp_path / "losses").mkdir()
    write_part(
        tmp_path / "losses" / "kept", [Record(1, 0, "secret", 2.0)], rank=0, world_size=1, plan="a" * 64
    )
    arguments = ["--tokens", str(known.path), "--record-dir", str(tmp_path / "losses")]
    with RunningServer({"web": path}, tmp_path, arguments=arguments) as server:
        for asked in ("losses", "spikes"):
            responses = [
                server.get(f"/v1/recordings/{name}/{asked}", headers=known.header("web"))
                for name in ("kept", "none")
            ]
            for response in responses:
                check_problem(response, 404, "unknown-recording", parameter="recording")
            assert responses[0].body.replace(b"kept", b"none") == responses[1].body
