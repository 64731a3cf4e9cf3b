"""Admission: slots, stalled readers, bodies in flight, and what a head may look like."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from corpus_server.admission import load as load_module
from corpus_server.admission.access import Access
from corpus_server.admission.admission import CHECKS, MAX_URL_BYTES, Admission
from corpus_server.admission.load import (
    BURST_SECONDS,
    LOOK_SECONDS,
    MAX_BODY_BYTES,
    MAX_BYTES,
    SMALL_BODY_BYTES,
    SMALL_BYTES,
    STALLED_SECONDS,
)
from corpus_server.admission.request import ANYONE, MAX_HEAD_BYTES, SCOPES, Caller, RequestHead
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import (
    BadRequest,
    BodyTooLarge,
    CorpusServerError,
    Forbidden,
    HeadTooLarge,
    Overloaded,
    TooManyRequests,
    Unauthorized,
    UrlTooLong,
)
from corpus_server.settings import Settings
from tests.tokens import Tokens


class Client(asyncio.WriteTransport):
    """A reader that takes what it is told to take."""

    def __init__(self, unsent_bytes: int) -> None:
        self.unsent_bytes = unsent_bytes
        self.is_cut = False

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def abort(self) -> None:
        self.is_cut = True


@pytest.fixture
def gate() -> Admission:
    corpora = (CorpusSpec(name="a", path=Path("a")),)
    settings = Settings(
        corpora=corpora,
        max_concurrent_responses=4,
        max_response_bytes=1000,
        max_text_tokens=10,
        max_connections=5,
        max_connections_per_address=2,
    )
    return Admission(settings, Access(None))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(load_module.time, "monotonic", lambda: now[0])
    return now


def shared_gate(folder: Path, num_tokens: int) -> Admission:
    """Return the admission of a process that has ten slots and so many tokens."""
    tokens = Tokens(folder / "tokens.toml")
    for number in range(num_tokens):
        tokens.add(f"token-{number}", "read:*")
    settings = Settings(corpora=(CorpusSpec(name="a", path=Path("a")),), max_concurrent_responses=10)
    return Admission(settings, Access(tokens.path))


def by(caller: Caller) -> RequestHead:
    """Return a request of somebody."""
    return RequestHead("GET", b"/v1/batches", {}, caller=caller)


def token(name: str, **limits: int) -> Caller:
    return Caller(name, frozenset(("read:*",)), **limits)


def test_stalled_readers_keep_half_of_the_slots(gate: Admission, clock: list[float]) -> None:
    clients = [Client(1000 + k) for k in range(4)]
    for client in clients:
        gate.admit(by(ANYONE), client)
    for seconds in (0.0, 1.9):  # seen for the first time, and not for long enough
        clock[0] += seconds
        with pytest.raises(Overloaded):
            gate.admit(by(ANYONE), Client(0))
    clients[3].unsent_bytes -= 1  # it is slow, but it moves
    clock[0] += 0.2
    gate.admit(by(ANYONE), Client(0))
    assert [client.is_cut for client in clients].count(True) == 1
    with pytest.raises(Overloaded):  # two stalled ones are half of four
        gate.admit(by(ANYONE), Client(0))
    assert not clients[3].is_cut


def test_bytes_are_admitted_up_to_their_limit(gate: Admission) -> None:
    """Whatever fits in part is begun: else a response above the limit could never be had."""
    slots = [gate.admit(by(ANYONE)) for _ in range(4)]
    large = SMALL_BYTES + 1
    slots[0].charge(MAX_BYTES - 1)
    slots[1].charge(large)
    with pytest.raises(Overloaded, match="bytes"):
        slots[2].charge(large)
    slots[2].charge(SMALL_BYTES)
    assert gate.num_bytes == MAX_BYTES - 1 + large + SMALL_BYTES
    for slot in slots[:3]:
        slot.release()
    slots[3].charge(large)
    assert gate.num_bytes == large


def test_stalled_readers_keep_half_of_the_bytes(gate: Admission, clock: list[float]) -> None:
    stalled, moving = Client(1000), Client(0)
    gate.admit(by(ANYONE), stalled).charge(MAX_BYTES // 2 + 1)
    gate.admit(by(ANYONE), moving).charge(MAX_BYTES // 2)
    for seconds in (0.0, STALLED_SECONDS):
        clock[0] += seconds
        gate.admit(by(ANYONE)).release()
        assert not stalled.is_cut
    clock[0] += 2 * LOOK_SECONDS
    gate.admit(by(ANYONE))
    assert (stalled.is_cut, moving.is_cut) == (True, False)
    assert gate.num_bytes == MAX_BYTES // 2


def test_bodies_in_flight_are_bounded_together_and_one_by_one(gate: Admission) -> None:
    with gate.receiving() as first, gate.receiving() as second, gate.receiving() as third:
        first(MAX_BODY_BYTES // 4)
        first(MAX_BODY_BYTES // 4 * 3)
        second(MAX_BODY_BYTES - MAX_BODY_BYTES // 4 * 3)
        third(SMALL_BODY_BYTES)
        with pytest.raises(Overloaded, match=f"^{MAX_BODY_BYTES} bytes of other bodies are being received$"):
            third(SMALL_BODY_BYTES + 1)
        with pytest.raises(BodyTooLarge, match=f"^a plan must have at most {MAX_BODY_BYTES} bytes$"):
            first(MAX_BODY_BYTES + 1)
    for _ in range(2):
        with gate.receiving() as again:
            again(MAX_BODY_BYTES)
            with gate.receiving() as small:
                small(SMALL_BODY_BYTES)


OTHER = "http://elsewhere"
FRAGMENT = "a request's target must not hold '#': fragments are not sent to servers (RFC 9110, 7.1)"
LONG_URL = f"the URL must have at most {MAX_URL_BYTES} bytes, got {MAX_URL_BYTES + 1}"
LARGE_HEAD = f"a request's head must have at most {MAX_HEAD_BYTES} bytes"
LARGE_BODY = f"the body of this request must have at most {SMALL_BODY_BYTES} bytes, got "
LARGE_PLAN = f"the body of this request must have at most {MAX_BODY_BYTES} bytes, got "
PAGE = "a request with an Origin header must have Content-Type: application/json"


def announced(num_bytes: int) -> dict[str, str]:
    return {"content-length": str(num_bytes)}


@pytest.mark.parametrize(
    ("method", "target", "headers", "refused"),
    [
        ("GET", "/v1/batches?step=3", {"host": "x"}, None),
        ("GET", "/v1/batches?step=3#&step=7", {}, (BadRequest, FRAGMENT)),
        ("GET", "/".ljust(MAX_URL_BYTES, "a"), {}, None),
        ("GET", "/".ljust(MAX_URL_BYTES + 1, "a"), {}, (UrlTooLong, LONG_URL)),
        ("GET", "/", {"x": "a" * (MAX_HEAD_BYTES - 2), "y": ""}, None),
        ("GET", "/", {"x": "a" * MAX_HEAD_BYTES}, (HeadTooLarge, LARGE_HEAD)),
        ("GET", "/", {"content-length": "-5"}, None),  # left to the parser
        ("GET", "/v1/plans", announced(SMALL_BODY_BYTES), None),
        ("GET", "/v1/plans", announced(SMALL_BODY_BYTES + 1), (BodyTooLarge, LARGE_BODY + "65537")),
        ("POST", "/v1/plans", announced(MAX_BODY_BYTES), None),
        ("POST", "/v1/plans", announced(MAX_BODY_BYTES + 1), (BodyTooLarge, LARGE_PLAN + "33554433")),
        ("POST", "/v1/plans", announced(10**19), (BodyTooLarge, LARGE_PLAN + str(10**19))),
        ("POST", "/v1/corpora", announced(SMALL_BODY_BYTES), None),
        ("POST", "/v1/corpora", announced(10**30), (BodyTooLarge, LARGE_BODY + str(10**19))),
        ("POST", "/v1/plans", {"origin": OTHER, "content-type": "text/plain"}, (Forbidden, PAGE)),
        ("POST", "/v1/plans", {"origin": OTHER}, (Forbidden, PAGE)),
        ("POST", "/v1/plans", {"origin": "null", "content-type": "application/json; charset=utf-8"}, None),
        ("POST", "/v1/plans", {"content-type": "text/plain"}, None),
        ("GET", "/v1/plans", {"origin": OTHER}, None),
    ],
)
def test_a_head_is_refused_by_what_it_says(
    gate: Admission,
    method: str,
    target: str,
    headers: dict[str, str],
    refused: tuple[type[CorpusServerError], str] | None,
) -> None:
    head = RequestHead(method, target.encode(), headers)
    if refused is None:
        assert gate.check(head) is ANYONE
    else:
        with pytest.raises(refused[0]) as caught:
            gate.check(head)
        assert caught.value.detail == refused[1]


@pytest.mark.parametrize(
    ("method", "target", "allowed"),
    [
        ("GET", b"/v1/batches?step=3", {"read"}),
        ("HEAD", b"/v1/corpora", {"read"}),
        ("GET", b"/v1/plans?after=x", {"inspect"}),
        ("GET", b"/v1/plans/abc", {"read"}),
        ("GET", b"/v1/live", {"metrics"}),
        ("GET", b"/metrics", {"metrics"}),
        ("GET", b"/docs", {"inspect"}),
        ("GET", b"/v1", {"inspect"}),
        ("GET", b"/v1/pl%61ns", {"inspect"}),
        ("GET", b"/%76%31/live?x=%61", {"metrics"}),
        ("GET", b"/%6Detrics", {"metrics"}),
        ("GET", b"/%76%31/corpora", {"read"}),
        ("POST", b"/v1/plans", {"plans"}),
        ("POST", b"/metrics", {"plans"}),
    ],
)
def test_each_path_asks_for_one_scope(tmp_path: Path, method: str, target: bytes, allowed: set[str]) -> None:
    tokens = Tokens(tmp_path / "tokens.toml")
    scopes = {"read": "read:web", **dict(zip(SCOPES, SCOPES, strict=True))}
    for name, scope in scopes.items():
        tokens.add(name, scope)
    gate = Admission(Settings(corpora=(CorpusSpec(name="a", path=Path("a")),)), Access(tokens.path))
    passed = set()
    for name in scopes:
        headers = {key.lower(): value for key, value in tokens.header(name).items()}
        with contextlib.suppress(Forbidden):
            passed.add(gate.check(RequestHead(method, target, headers)).name)
    assert passed == allowed
    with pytest.raises(Unauthorized):
        gate.check(RequestHead(method, target, {}))


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 10), (2, 8), (3, 8)])
def test_one_of_several_tokens_leaves_slots_free_for_the_others(
    tmp_path: Path, num_tokens: int, most: int
) -> None:
    """Up to four times what is free then, of slots and of short responses; a single token may have all."""
    gate, one, other = shared_gate(tmp_path, num_tokens), token("token-0"), token("token-1")
    for _ in range(most):
        gate.admit(by(one))
    with pytest.raises(Overloaded, match=f"^{most} responses are under way in this process$"):
        gate.admit(by(one))
    with contextlib.ExitStack() as stack:
        for _ in range(most):
            stack.enter_context(gate.short(one))
        with pytest.raises(Overloaded, match=f"^{most} responses are under way"), gate.short(one):
            pass
        if most < 10:
            gate.admit(by(other))
            stack.enter_context(gate.short(other))


@pytest.mark.parametrize(("num_tokens", "share"), [(1, 1.0), (2, 0.8)])
def test_one_of_several_tokens_leaves_bytes_free_for_the_others(
    tmp_path: Path, num_tokens: int, share: float
) -> None:
    gate, one = shared_gate(tmp_path, num_tokens), token("token-0")
    slots = [gate.admit(by(one)) for _ in range(4)]
    most = int(MAX_BYTES * share) + 1
    slots[0].charge(most - 2)
    slots[1].charge(SMALL_BYTES + 1)
    with pytest.raises(
        Overloaded, match=f"^{most - 1 + SMALL_BYTES} bytes of responses are under way in this"
    ):
        slots[2].charge(SMALL_BYTES + 1)
    slots[1].release()
    slots[2].charge(2)
    with pytest.raises(Overloaded, match=f"^{most} bytes of responses"):
        slots[3].charge(SMALL_BYTES + 1)
    assert slots[3].num_bytes == 0
    if num_tokens > 1:
        gate.admit(by(token("token-1"))).charge(SMALL_BYTES + 1)


def test_bytes_per_second_are_paid_for_over_time(gate: Admission, clock: list[float]) -> None:
    """What was taken is within the limit after its seconds, but for one second's worth at once."""
    caller = token("slow", max_bytes_per_second=10)
    for num_bytes, seconds in ((10, 0.0), (5, 0.5), (20, 2.5)):
        slot = gate.admit(by(caller))
        slot.charge(num_bytes)
        slot.release()  # bytes that are sent have been taken all the same
        assert gate.num_bytes == 0
        if seconds:
            with pytest.raises(TooManyRequests) as refused:
                gate.admit(by(caller))
            assert refused.value.detail == "token 'slow' may take 10 bytes per second"
            assert refused.value.retry_after_seconds == (1 if seconds == 0.5 else 2)
        clock[0] += 0.5 if seconds == 0.5 else 2.0 - BURST_SECONDS if seconds else 0.0
    clock[0] += 100.0  # nobody saves up more than that second
    for allowed in (True, False):
        with contextlib.nullcontext() if allowed else pytest.raises(TooManyRequests):
            gate.admit(by(caller)).charge(11)


def test_readers_that_took_nothing_for_longest_are_dropped_first(tmp_path: Path, clock: list[float]) -> None:
    gate, one = shared_gate(tmp_path, 1), token("token-0")
    clients = [Client(1000) for _ in range(10)]
    slots = [gate.admit(by(one), client) for client in clients]
    for number in (9, 2, 5, 7, 0, 3, 8, 1, 6, 4):
        slots[number].stalled_seconds(clock[0] - STALLED_SECONDS - 20 + number)
    gate.admit(by(one))
    assert [client.is_cut for client in clients] == [True] * 5 + [False] * 5
    assert gate.slots >= set(slots[5:])
    assert not gate.slots & set(slots[:5])


def test_connections_are_counted_by_address_and_all_together(gate: Admission) -> None:
    def connect(address: str) -> None:
        gate.connect(address)
        gate.check(RequestHead("", b"", {}, address=address), "connection")

    for _ in range(2):
        connect("10.0.0.1")
    with pytest.raises(Overloaded, match=r"2 connections from 10\.0\.0\.1"):
        connect("10.0.0.1")
    gate.disconnect("10.0.0.1")  # the third, which was refused, is counted until it ends
    for _ in range(3):
        connect("")  # a Unix socket
    with pytest.raises(Overloaded, match="this process has 5 connections"):
        connect("10.0.0.2")
    for address in ("10.0.0.1", ""):
        gate.disconnect(address)
    connect("10.0.0.2")


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", False),
        ("10.0.0.0", True),
        ("10.255.255.255", True),
        ("11.0.0.0", False),
        ("::ffff:10.1.2.3", True),  # IPv4 on a socket of IPv6
        ("::ffff:11.1.2.3", False),
        ("fd00::7", True),
        ("fe80::1%eth0", False),
        ("::1", False),
        ("", True),  # a Unix socket
        ("testclient", False),  # what another ASGI server may say
    ],
)
def test_only_allowed_networks_are_served(address: str, is_allowed: bool) -> None:
    """Before anybody's token; a probe of health may come from anywhere, however its path is spelled."""
    spec = CorpusSpec(name="a", path=Path("a"))
    gate = Admission(Settings(corpora=(spec,), allow="10.0.0.0/8,127.0.0.1,fd00::/8"), Access(None))
    gate.connect(address)
    gate.check(RequestHead("", b"", {}, address=address), "connection")
    for target in (b"/healthz", b"/readyz?x=1", b"/%68ealthz"):
        assert gate.check(RequestHead("GET", target, {}, address=address)) is ANYONE
    for target in (b"/v1/batches?step=3", b"/v1/access", b"/metrics", b"/", b"/page/x", b"/healthz/x"):
        head = RequestHead("GET", target, {}, address=address)
        if is_allowed:
            assert gate.check(head) is ANYONE
            continue
        with pytest.raises(Forbidden) as caught:
            gate.check(head)
        assert caught.value.detail == f"{address} is in no network that this server serves"


def test_without_allowed_networks_every_address_is_served(gate: Admission) -> None:
    assert gate.check(RequestHead("GET", b"/v1/corpora", {}, address="8.8.8.8")) is ANYONE


def test_every_check_has_a_name_and_says_whom_it_lets_pass() -> None:
    assert len({each.name for each in CHECKS}) == len(CHECKS)
    assert all(str(each.ask.__doc__).endswith(".") for each in CHECKS)
