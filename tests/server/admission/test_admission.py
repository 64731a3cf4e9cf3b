"""The gate: slots, stalled readers, bodies in flight, and what a head may look like."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from corpus_server.admission import admission as gate_module
from corpus_server.admission.access import ANYONE, Access, Caller, Limits
from corpus_server.admission.admission import (
    BURST_SECONDS,
    LOOK_SECONDS,
    MAX_BODIES_BYTES,
    MAX_BODY_BYTES,
    MAX_BYTES,
    MAX_FOLLOWERS,
    MAX_ROWS,
    MAX_URL_BYTES,
    SMALL_BODY_BYTES,
    SMALL_BYTES,
    STALLED_SECONDS,
    Admission,
    Slot,
)
from corpus_server.admission.request import MAX_HEAD_BYTES, RequestHead
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import (
    AnswerTooLarge,
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
        max_concurrent_answers=4,
        max_answer_bytes=1000,
        max_text_tokens=10,
        max_connections=5,
        max_connections_per_address=2,
    )
    return Admission(settings, Access(None))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(gate_module.time, "monotonic", lambda: now[0])
    return now


def shared_gate(folder: Path, num_tokens: int) -> Admission:
    """Return the gate of a process that has ten slots and so many tokens."""
    tokens = Tokens(folder / "tokens.toml")
    for number in range(num_tokens):
        tokens.add(f"token-{number}", "read:*")
    settings = Settings(corpora=(CorpusSpec(name="a", path=Path("a")),), max_concurrent_answers=10)
    return Admission(settings, Access(tokens.path))


def token(name: str, **limits: int) -> Caller:
    return Caller(name, frozenset(("read:*",)), limits=Limits(**limits))


def test_slots_are_given_up_to_the_limit_and_given_back(gate: Admission) -> None:
    assert (gate.closing, gate.num_bytes, gate.slots) == (False, 0, set())
    slots = [gate.admit(ANYONE) for _ in range(4)]
    with pytest.raises(Overloaded, match=r"^4 answers are under way in this process$"):
        gate.admit(ANYONE)
    slots[0].release()
    slots[0].release()
    gate.admit(ANYONE)
    with pytest.raises(Overloaded):
        gate.admit(ANYONE)


def test_stalled_readers_keep_half_of_the_slots(gate: Admission, clock: list[float]) -> None:
    clients = [Client(1000 + k) for k in range(4)]
    for client in clients:
        gate.admit(ANYONE, client)
    for seconds in (0.0, 1.9):  # seen for the first time, and not for long enough
        clock[0] += seconds
        with pytest.raises(Overloaded):
            gate.admit(ANYONE, Client(0))
    clients[3].unsent_bytes -= 1  # it is slow, but it moves
    clock[0] += 0.2
    gate.admit(ANYONE, Client(0))
    assert [client.is_cut for client in clients].count(True) == 1
    with pytest.raises(Overloaded):  # two stalled ones are half of four
        gate.admit(ANYONE, Client(0))
    assert not clients[3].is_cut


def test_readers_that_keep_up_are_never_cut(gate: Admission, clock: list[float]) -> None:
    clients = [Client(0) for _ in range(4)]
    for client in clients:
        gate.admit(ANYONE, client)
    for _ in range(5):
        clock[0] += 10.0
        with pytest.raises(Overloaded):
            gate.admit(ANYONE, Client(0))
    assert not any(client.is_cut for client in clients)


def test_bytes_are_admitted_up_to_their_limit(gate: Admission) -> None:
    """Whatever fits in part is begun: else an answer above the limit could never be had."""
    slots = [gate.admit(ANYONE) for _ in range(4)]
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
    gate.admit(ANYONE, stalled).charge(MAX_BYTES // 2 + 1)
    gate.admit(ANYONE, moving).charge(MAX_BYTES // 2)
    for seconds in (0.0, STALLED_SECONDS):
        clock[0] += seconds
        gate.admit(ANYONE).release()
        assert not stalled.is_cut
    clock[0] += 2 * LOOK_SECONDS
    gate.admit(ANYONE)
    assert (stalled.is_cut, moving.is_cut) == (True, False)
    assert gate.num_bytes == MAX_BYTES // 2


def test_a_burst_does_not_look_for_stalled_readers_at_each_refusal(
    gate: Admission, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Slot] = []
    monkeypatch.setattr(Slot, "stalled_seconds", lambda slot, _: looks.append(slot) or 0.0)
    for _ in range(4):
        gate.admit(ANYONE, Client(0))
    for seconds in (0.0, 0.0, 2 * LOOK_SECONDS, 0.0):
        clock[0] += seconds
        with pytest.raises(Overloaded):
            gate.admit(ANYONE, Client(0))
    assert len(looks) == 2 * 4


def test_bodies_in_flight_are_bounded_together_and_one_by_one(gate: Admission) -> None:
    with gate.receiving() as first, gate.receiving() as second, gate.receiving() as third:
        first(MAX_BODY_BYTES // 4)
        first(MAX_BODY_BYTES // 4 * 3)
        second(MAX_BODIES_BYTES - MAX_BODY_BYTES // 4 * 3)
        third(SMALL_BODY_BYTES)
        with pytest.raises(
            Overloaded, match=f"^{MAX_BODIES_BYTES} bytes of other bodies are being received$"
        ):
            third(SMALL_BODY_BYTES + 1)
        with pytest.raises(BodyTooLarge, match=f"^a plan must have at most {MAX_BODY_BYTES} bytes$"):
            first(MAX_BODY_BYTES + 1)
    for _ in range(2):
        with gate.receiving() as again:
            again(MAX_BODY_BYTES)
            with gate.receiving() as small:
                small(SMALL_BODY_BYTES)


@pytest.mark.parametrize(
    ("target", "headers", "error", "detail"),
    [
        (
            b"/v1/batches?step=3#&step=7",
            {},
            BadRequest,
            "a request's target must not hold '#': fragments are not sent to servers (RFC 9110, 7.1)",
        ),
        (
            b"/" + b"a" * MAX_URL_BYTES,
            {},
            UrlTooLong,
            f"the URL must have at most {MAX_URL_BYTES} bytes, got {MAX_URL_BYTES + 1}",
        ),
        (
            b"/",
            {"x": "a" * MAX_HEAD_BYTES},
            HeadTooLarge,
            f"a request's head must have at most {MAX_HEAD_BYTES} bytes",
        ),
        (
            b"/",
            {"content-length": str(SMALL_BODY_BYTES + 1)},
            BodyTooLarge,
            f"the body of this request must have at most {SMALL_BODY_BYTES} bytes, got "
            f"{SMALL_BODY_BYTES + 1}",
        ),
    ],
    ids=["fragment", "url", "head", "body"],
)
def test_a_head_is_refused_by_what_it_says(
    gate: Admission, target: bytes, headers: dict[str, str], error: type[CorpusServerError], detail: str
) -> None:
    with pytest.raises(error) as refused:
        gate.check(RequestHead("GET", target, headers))
    assert refused.value.detail == detail
    if error is BadRequest:
        assert refused.value.remedy == "leave the fragment out, or write %23 for a '#' in a value"


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        (b"/v1/batches?step=3", {"host": "x"}),
        (b"/".ljust(MAX_URL_BYTES, b"a"), {}),
        (b"/", {"x": "a" * (MAX_HEAD_BYTES - 2), "y": ""}),
        (b"/", {"content-length": str(SMALL_BODY_BYTES)}),
        (b"/", {"content-length": "-5"}),
    ],
    ids=["small", "url", "head", "body", "left to the parser"],
)
def test_a_head_at_its_limits_passes(gate: Admission, target: bytes, headers: dict[str, str]) -> None:
    assert gate.check(RequestHead("GET", target, headers)) is ANYONE


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
    scopes = {"read": "read:web", "plans": "plans", "inspect": "inspect", "metrics": "metrics"}
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


@pytest.mark.parametrize("target", [b"/", b"/healthz", b"/readyz", b"/v1/access", b"/page/app.js", b"/?a=b"])
def test_some_paths_need_no_token(tmp_path: Path, target: bytes) -> None:
    gate = shared_gate(tmp_path, 1)
    assert gate.check(RequestHead("GET", target, {})) is ANYONE


def test_sizes_are_refused_above_their_limits(gate: Admission) -> None:
    gate.check_size(1000, "count")
    gate.check_text_size(10, "count")
    gate.check_rows(MAX_ROWS // 4, 4)
    gate.check_shards(gate._settings.cache_bytes)


CACHE_BYTES = Settings(corpora=(CorpusSpec(name="a", path=Path("a")),)).cache_bytes


@pytest.mark.parametrize(
    ("check", "detail", "parameter", "received", "accepted", "remedy"),
    [
        (
            lambda gate: gate.check_size(1001, "stop"),
            "an answer holds at most 1000 bytes, this one would hold 1001",
            "stop",
            1001,
            "at most 1000 bytes",
            "a smaller stop, or --max-answer-bytes when starting the server",
        ),
        (
            lambda gate: gate.check_text_size(11, "stop"),
            "an answer of format json or text holds at most 10 tokens, this one would hold 11",
            "stop",
            11,
            "at most 10 tokens",
            "format=raw or format=npy, or ask for less",
        ),
        (
            lambda gate: gate.check_rows(MAX_ROWS // 4 + 1, 4),
            f"an answer holds at most {MAX_ROWS} rows, this one would hold {MAX_ROWS + 4}",
            "count",
            MAX_ROWS + 4,
            f"at most {MAX_ROWS} rows",
            f"ask for at most {MAX_ROWS // 4} steps",
        ),
        (
            lambda gate: gate.check_shards(CACHE_BYTES + 1),
            f"the cache for the shards of an answer holds at most {CACHE_BYTES} bytes, this one would hold "
            f"{CACHE_BYTES + 1}",
            "count",
            CACHE_BYTES + 1,
            f"at most {CACHE_BYTES} bytes",
            "ask for fewer steps, or give a larger --cache-bytes when starting the server",
        ),
    ],
    ids=["size", "text", "rows", "shards"],
)
def test_what_is_too_large_says_what_would_do(
    gate: Admission,
    check: Callable[[Admission], None],
    detail: str,
    parameter: str,
    received: int,
    accepted: str,
    remedy: str,
) -> None:
    with pytest.raises(AnswerTooLarge) as refused:
        check(gate)
    error = refused.value
    assert (error.detail, error.parameter, error.received, error.accepted, error.remedy) == (
        detail,
        parameter,
        received,
        accepted,
        remedy,
    )


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 10), (2, 8), (3, 8)])
def test_one_of_several_tokens_leaves_slots_free_for_the_others(
    tmp_path: Path, num_tokens: int, most: int
) -> None:
    """Up to four times what is free then, of slots and of short answers; a single token may have all."""
    gate, one, other = shared_gate(tmp_path, num_tokens), token("token-0"), token("token-1")
    for _ in range(most):
        gate.admit(one)
    with pytest.raises(Overloaded, match=f"^{most} answers are under way in this process$"):
        gate.admit(one)
    with contextlib.ExitStack() as stack:
        for _ in range(most):
            stack.enter_context(gate.short(one))
        with pytest.raises(Overloaded, match=f"^{most} answers are under way"), gate.short(one):
            pass
        if most < 10:
            gate.admit(other)
            stack.enter_context(gate.short(other))


@pytest.mark.parametrize(("num_tokens", "share"), [(1, 1.0), (2, 0.8)])
def test_one_of_several_tokens_leaves_bytes_free_for_the_others(
    tmp_path: Path, num_tokens: int, share: float
) -> None:
    gate, one = shared_gate(tmp_path, num_tokens), token("token-0")
    slots = [gate.admit(one) for _ in range(4)]
    most = int(MAX_BYTES * share) + 1
    slots[0].charge(most - 2)
    slots[1].charge(SMALL_BYTES + 1)
    with pytest.raises(Overloaded, match=f"^{most - 1 + SMALL_BYTES} bytes of answers are under way in this"):
        slots[2].charge(SMALL_BYTES + 1)
    slots[1].release()
    slots[2].charge(2)
    with pytest.raises(Overloaded, match=f"^{most} bytes of answers"):
        slots[3].charge(SMALL_BYTES + 1)
    assert slots[3].num_bytes == 0
    if num_tokens > 1:
        gate.admit(token("token-1")).charge(SMALL_BYTES + 1)


def test_a_token_has_limits_of_its_own(gate: Admission) -> None:
    for limits, detail in (
        ({"max_requests": 2}, "token 'max_requests' may have 2 responses under way"),
        ({"max_bytes": 30}, "token 'max_bytes' may have 30 bytes under way"),
    ):
        caller = token(*limits, **limits)
        slots = [gate.admit(caller) for _ in range(2 if "max_requests" in limits else 1)]
        slots[0].charge(29)
        if "max_bytes" in limits:
            slots.append(gate.admit(caller))
            slots[1].charge(1)
        with pytest.raises(TooManyRequests) as refused:
            gate.admit(caller)
        assert (refused.value.detail, refused.value.retry_after_seconds) == (detail, 1)
        gate.admit(ANYONE).release()
        slots[1].release()
        again = gate.admit(caller)
        again.charge(1)
        with pytest.raises(TooManyRequests):
            gate.admit(caller)
        again.release()
        slots[0].release()


def test_bytes_per_second_are_paid_for_over_time(gate: Admission, clock: list[float]) -> None:
    """What was taken is within the limit after its seconds, but for one second's worth at once."""
    caller = token("slow", max_bytes_per_second=10)
    for num_bytes, seconds in ((10, 0.0), (5, 0.5), (20, 2.5)):
        slot = gate.admit(caller)
        slot.charge(num_bytes)
        slot.release()  # bytes that are sent have been taken all the same
        assert gate.num_bytes == 0
        if seconds:
            with pytest.raises(TooManyRequests) as refused:
                gate.admit(caller)
            assert refused.value.detail == "token 'slow' may take 10 bytes per second"
            assert refused.value.retry_after_seconds == (1 if seconds == 0.5 else 2)
        clock[0] += 0.5 if seconds == 0.5 else 2.0 - BURST_SECONDS if seconds else 0.0
    clock[0] += 100.0  # nobody saves up more than that second
    for allowed in (True, False):
        with contextlib.nullcontext() if allowed else pytest.raises(TooManyRequests):
            gate.admit(caller).charge(11)


def test_followers_are_counted_until_they_end(gate: Admission) -> None:
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            for _ in range(MAX_FOLLOWERS):
                stack.enter_context(gate.following())
            with pytest.raises(Overloaded) as refused, gate.following():
                pass
            assert refused.value.detail == (
                f"this process sends {MAX_FOLLOWERS} streams of events, as many as it may"
            )


def test_readers_that_took_nothing_for_longest_are_dropped_first(tmp_path: Path, clock: list[float]) -> None:
    gate, one = shared_gate(tmp_path, 1), token("token-0")
    clients = [Client(1000) for _ in range(10)]
    slots = [gate.admit(one, client) for client in clients]
    for number in (9, 2, 5, 7, 0, 3, 8, 1, 6, 4):
        slots[number].stalled_seconds(clock[0] - STALLED_SECONDS - 20 + number)
    gate.admit(one)
    assert [client.is_cut for client in clients] == [True] * 5 + [False] * 5
    assert gate.slots >= set(slots[5:])
    assert not gate.slots & set(slots[:5])


HALF = MAX_BYTES // 2


@pytest.mark.parametrize(
    ("stalled_bytes", "moving_bytes", "dropped"),
    [
        pytest.param((HALF, 0), HALF, [], id="half"),
        pytest.param((HALF, 1), HALF, [0], id="one more"),
        pytest.param((HALF, HALF // 2), HALF, [0], id="the rest is less"),
        pytest.param((HALF + 1, 0), HALF - 1, [0], id="exactly all"),
        pytest.param((HALF + 1, 0), HALF - 2, [], id="not all"),
    ],
)
def test_no_more_readers_are_dropped_than_hold_too_many_bytes(
    gate: Admission, clock: list[float], stalled_bytes: tuple[int, ...], moving_bytes: int, dropped: list[int]
) -> None:
    clients = [Client(1000) for _ in stalled_bytes]
    for number, (client, num_bytes) in enumerate(zip(clients, stalled_bytes, strict=True)):
        slot = gate.admit(ANYONE, client)
        slot.charge(num_bytes)
        slot.stalled_seconds(clock[0] - 20 + number)
    gate.admit(ANYONE).charge(moving_bytes)
    gate.admit(ANYONE)
    assert [number for number, client in enumerate(clients) if client.is_cut] == dropped


@pytest.mark.parametrize("unsent_bytes", [0, 1, 2])
def test_a_reader_that_was_not_looked_at_before_is_not_stalled(gate: Admission, unsent_bytes: int) -> None:
    slot = gate.admit(ANYONE, Client(unsent_bytes))
    assert [slot.stalled_seconds(now) for now in (90.0, 95.0)] == [0.0, 5.0 if unsent_bytes else 0.0]
    unknown = gate.admit(ANYONE)
    assert [unknown.stalled_seconds(now) for now in (90.0, 95.0)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("stalled_for", "is_cut"), [(STALLED_SECONDS, False), (STALLED_SECONDS + 0.01, True)]
)
def test_a_reader_may_take_nothing_for_a_while(
    gate: Admission, clock: list[float], stalled_for: float, is_cut: bool
) -> None:
    clients = [Client(1000) for _ in range(4)]
    slots = [gate.admit(ANYONE, client) for client in clients]
    for slot in slots[:3]:
        slot.stalled_seconds(clock[0] - stalled_for)
    with contextlib.nullcontext() if is_cut else pytest.raises(Overloaded):
        gate.admit(ANYONE)
    assert any(client.is_cut for client in clients) == is_cut


def test_short_answers_are_counted_apart_from_costly_ones(gate: Admission) -> None:
    slots = [gate.admit(ANYONE) for _ in range(4)]
    for _ in range(2):  # all are given back
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(gate.short(ANYONE))
            with pytest.raises(Overloaded, match=r"^4 answers are under way"), gate.short(ANYONE):
                pass
    with gate.short(ANYONE):
        assert len(slots) == 4


def test_connections_are_counted_by_address_and_all_together(gate: Admission) -> None:
    def connect(address: str) -> asyncio.BaseTransport:
        # That of a Unix socket is no pair.
        transport = asyncio.BaseTransport({"peername": (address, 1) if address else ""})
        gate.connect(transport)
        return transport

    first, second = (connect("10.0.0.1") for _ in range(2))
    with pytest.raises(Overloaded, match=r"2 connections from 10\.0\.0\.1"):
        connect("10.0.0.1")
    gate.disconnect(second)  # of the third, which was refused, the door is told when it ends
    local = [connect("") for _ in range(3)]
    with pytest.raises(Overloaded, match="this process has 5 connections"):
        connect("10.0.0.2")
    for transport in (first, local[0]):
        gate.disconnect(transport)
    connect("10.0.0.2")


def test_an_address_has_room_for_each_connection_that_ended(gate: Admission) -> None:
    def connect() -> asyncio.BaseTransport:
        transport = asyncio.BaseTransport({"peername": ("10.0.0.1", 1)})
        gate.connect(transport)
        return transport

    for _ in range(3):
        transports = [connect(), connect()]
        gate.disconnect(transports.pop())
        transports.append(connect())
        refused = asyncio.BaseTransport({"peername": ("10.0.0.1", 1)})
        with pytest.raises(Overloaded):
            gate.connect(refused)
        for transport in (*transports, refused):
            gate.disconnect(transport)
    assert not list(gate._connections), "addresses would fill the memory"


@pytest.mark.parametrize(
    ("method", "target", "announced", "refused"),
    [
        ("POST", b"/v1/plans", MAX_BODY_BYTES, False),
        ("POST", b"/v1/plans", MAX_BODY_BYTES + 1, True),
        ("GET", b"/v1/plans", SMALL_BODY_BYTES + 1, True),
        ("POST", b"/v1/corpora", SMALL_BODY_BYTES, False),
        ("POST", b"/v1/corpora", 10**30, True),
        ("POST", b"/v1/plans", 10**19, True),
        ("GET", b"/v1/batches", SMALL_BODY_BYTES, False),
        ("GET", b"/v1/batches", SMALL_BODY_BYTES + 1, True),
    ],
)
def test_a_body_is_refused_by_its_announced_size(
    gate: Admission, method: str, target: bytes, announced: int, refused: bool
) -> None:
    head = RequestHead(method, target, {"content-length": str(announced)})
    with pytest.raises(BodyTooLarge) if refused else contextlib.nullcontext():
        gate.check(head)
