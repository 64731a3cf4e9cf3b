"""What HTTP promises: lengths, caching, negotiation, HEAD, pipelining."""

from __future__ import annotations

import pytest

from tests.serving import RunningServer

BATCH = "/v1/batches?corpus=web&seq_len=16&batch_size=12&step=5"
RANGE = "/v1/corpora/text/tokens?start=1&count=50"
DOCUMENT = "/v1/corpora/docs/documents/1?x="[:-3]
INDICES = "/v1/indices?corpus=web&seq_len=16&batch_size=12&step=5"


def with_format(target: str, chosen: str) -> str:
    return f"{target}{'&' if '?' in target else '?'}format={chosen}"


TOKEN_TARGETS = [
    with_format(target, chosen)
    for target, formats in (
        (BATCH, ("raw", "npy", "json")),
        (RANGE, ("raw", "npy", "json", "text")),
        (DOCUMENT, ("raw", "npy", "json")),
        (INDICES, ("raw", "npy", "json")),
    )
    for chosen in formats
]
CONTENT_TYPES = {
    "raw": "application/octet-stream",
    "npy": "application/x-npy",
    "json": "application/json",
    "text": "text/plain; charset=utf-8",
}


TEXT_TARGETS = [target for target in TOKEN_TARGETS if target.endswith("=text")]
KEPT_TARGETS = [target for target in TOKEN_TARGETS if target not in TEXT_TARGETS]


@pytest.mark.parametrize("target", TOKEN_TARGETS)
def test_a_response_has_an_exact_length(server: RunningServer, target: str) -> None:
    response = server.get(target)
    assert response.status == 200
    assert int(response.headers["Content-Length"]) == len(response.body) > 0
    assert response.headers["Transfer-Encoding"] is None
    assert response.headers["Content-Type"] == CONTENT_TYPES[target.rpartition("=")[2]]
    assert response.headers.get_all("Content-Type") == [response.headers["Content-Type"]]


@pytest.mark.parametrize("target", KEPT_TARGETS)
def test_a_response_may_be_kept(server: RunningServer, target: str) -> None:
    response = server.get(target)
    assert response.headers["Cache-Control"] == "public, no-cache"
    assert response.headers["Vary"] is None
    assert response.headers["ETag"].startswith('"')


@pytest.mark.parametrize(
    "target",
    [
        *TEXT_TARGETS,
        "/v1/batches?plan=PLAN&step=3&format=text",
        "/v1/plans/PLAN/rows?step=3",
        "/v1/corpora/text/spans",
        "/v1/corpora/text/statistics",
    ],
)
def test_what_a_tokenizer_says_is_kept_nowhere(server: RunningServer, target: str) -> None:
    """The corpus may be served with another tokenizer after a restart; neither plan nor fingerprint tell."""
    plan = {"seq_len": 16, "stages": [{"global_batch_size": 12, "mixture": {"text": 1}}]}
    plan_id = server.post_plan(plan).json()["id"]  # posted: every worker knows it
    response = server.get(target.replace("PLAN", plan_id), headers={"If-None-Match": "*"})
    assert (response.status, response.headers["Cache-Control"], response.headers["ETag"]) == (
        200,
        "no-store",
        None,
    )
    assert response.body


@pytest.mark.parametrize("target", [BATCH, INDICES, "/v1/lookup?corpus=web&seq_len=16&batch_size=12&token=5"])
def test_only_what_a_plan_s_id_names_is_immutable(server: RunningServer, target: str) -> None:
    """Another corpus may be called `web` after a restart; a plan is bound to its corpora's fingerprints."""
    spelled = server.get(target)
    assert spelled.headers["Cache-Control"] == "public, no-cache"
    server.post_plan({"seq_len": 16, "stages": [{"global_batch_size": 12, "mixture": {"web": 1}}]})
    route, _, query = target.partition("?")
    rest = query.removeprefix("corpus=web&seq_len=16&batch_size=12")
    named = server.get(f"{route}?plan={spelled.headers['Corpus-Plan']}{rest}")
    assert named.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    assert (named.body, named.headers["ETag"]) == (spelled.body, spelled.headers["ETag"])


@pytest.mark.parametrize("target", TOKEN_TARGETS)
def test_head_has_the_headers_and_no_body(server: RunningServer, target: str) -> None:
    get, head = server.get(target), server.get(target, method="HEAD")
    assert (head.status, head.body) == (200, b"")
    # Checksum and timing are known only when the whole response is made (RFC 9110, 9.3.2).
    optional = {"date", "corpus-checksum", "server-timing"}
    got = {name.lower(): value for name, value in get.headers.items() if name.lower() not in optional}
    assert got == {name.lower(): v for name, v in head.headers.items() if name.lower() not in optional}


@pytest.mark.parametrize("target", KEPT_TARGETS)
def test_a_response_that_the_caller_holds_is_not_sent_again(server: RunningServer, target: str) -> None:
    etag = server.get(target).headers["ETag"]
    for given in (etag, f'"other", {etag}', f"W/{etag}", "*"):
        unchanged = server.get(target, headers={"If-None-Match": given})
        assert (unchanged.status, unchanged.body) == (304, b"")
        assert unchanged.headers["ETag"] == etag
        assert unchanged.headers["Cache-Control"] == "public, no-cache"
    assert server.get(target, headers={"If-None-Match": '"other"'}).status == 200


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (BATCH + "&rank=1", 422),
        (BATCH + "&rank=x", 422),
        (BATCH + "&format=text", 422),  # the corpus has no tokenizer
        (BATCH.replace("batch_size=12", "batch_size=100000") + "&format=json", 422),
        (RANGE.replace("text", "web") + "&format=text", 422),
        (RANGE.replace("count=50", "count=500000000"), 422),
        (INDICES + "&format=text", 422),
        (BATCH.replace("web", "nowhere"), 404),
        ("/v1/corpora/docs/documents/99", 404),
    ],
)
def test_a_condition_does_not_hide_a_mistake(server: RunningServer, target: str, status: int) -> None:
    """RFC 9110, 13.2.1: it is ignored where the response without it would be an error."""
    plain = server.get(target)
    conditional = server.get(target, headers={"If-None-Match": "*"})
    assert (plain.status, plain.body) == (status, conditional.body)
    assert conditional.status == status


def test_different_responses_have_different_etags(server: RunningServer) -> None:
    targets = [
        *TOKEN_TARGETS,
        BATCH.replace("step=5", "step=6"),
        BATCH + "&count=2",
        BATCH + "&world_size=2",
        BATCH + "&world_size=2&rank=1",
        BATCH + "&seed=1",
        BATCH + "&order=sequential",
        BATCH + "&stride=17",
        RANGE.replace("start=1", "start=2"),
        RANGE.replace("text", "words"),
    ]
    # A document and the same range of tokens are two resources, each with tags of its own.
    etags = [server.get(target).headers["ETag"] for target in targets]
    assert len(set(etags)) == len(targets)


@pytest.mark.parametrize("accept", ["application/json", "application/x-npy", "application/octet-stream"])
def test_the_accept_header_chooses_as_format_does(server: RunningServer, accept: str) -> None:
    chosen = next(name for name, media_type in CONTENT_TYPES.items() if media_type == accept)
    response = server.get(BATCH, headers={"Accept": accept})
    assert response.headers["Vary"] == "Accept"
    assert response.headers["Content-Type"] == accept
    assert response.body == server.get(with_format(BATCH, chosen)).body


def test_format_goes_before_accept(server: RunningServer) -> None:
    response = server.get(BATCH + "&format=npy", headers={"Accept": "application/json"})
    assert response.headers["Content-Type"] == "application/x-npy"


@pytest.mark.parametrize("target", [BATCH, RANGE, with_format(BATCH, "npy"), with_format(INDICES, "raw")])
def test_without_a_checksum_the_same_bytes(server: RunningServer, target: str) -> None:
    plain, summed = server.get(target + "&checksum=false"), server.get(target + "&checksum=true")
    assert plain.headers["Corpus-Checksum"] is None
    assert summed.headers["Corpus-Checksum"] is not None
    assert plain.body == summed.body
