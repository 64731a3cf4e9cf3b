"""The gate: slots, stalled readers, bodies in flight, and what a head may look like."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from corpus_server.access import ANYONE, Access
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.data import gate as gate_module
from corpus_server.data.gate import (
    LOOK_SECONDS,
    MAX_BODIES_BYTES,
    MAX_BODY_BYTES,
    MAX_BYTES,
    MAX_ROWS,
    SMALL_BODY_BYTES,
    SMALL_BYTES,
    STALLED_SECONDS,
    Gate,
    Slot,
)
from corpus_server.data.head import MAX_HEAD_BYTES, RequestHead
from corpus_server.errors import (
    AnswerTooLarge,
    BadRequest,
    BodyTooLarge,
    CorpusServerError,
    HeadTooLarge,
    Overloaded,
    UrlTooLong,
)
from corpus_server.settings import Settings


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
def gate() -> Gate:
    corpora = (CorpusSpec(name="a", path=Path("a")),)
    settings = Settings(
        corpora=corpora,
        max_concurrent_answers=4,
        max_answer_bytes=1000,
        max_text_tokens=10,
        max_connections=5,
        max_connections_per_address=2,
    )
    return Gate(settings, Access(None))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(gate_module.time, "monotonic", lambda: now[0])
    return now


def test_slots_are_given_up_to_the_limit_and_given_back(gate: Gate) -> None:
    slots = [gate.admit(ANYONE) for _ in range(4)]
    with pytest.raises(Overloaded):
        gate.admit(ANYONE)
    slots[0].release()
    slots[0].release()
    gate.admit(ANYONE)
    with pytest.raises(Overloaded):
        gate.admit(ANYONE)


def test_stalled_readers_keep_half_of_the_slots(gate: Gate, clock: list[float]) -> None:
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


def test_readers_that_keep_up_are_never_cut(gate: Gate, clock: list[float]) -> None:
    clients = [Client(0) for _ in range(4)]
    for client in clients:
        gate.admit(ANYONE, client)
    for _ in range(5):
        clock[0] += 10.0
        with pytest.raises(Overloaded):
            gate.admit(ANYONE, Client(0))
    assert not any(client.is_cut for client in clients)


def test_bytes_are_admitted_up_to_their_limit(gate: Gate) -> None:
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


def test_stalled_readers_keep_half_of_the_bytes(gate: Gate, clock: list[float]) -> None:
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
    gate: Gate, clock: list[float], monkeypatch: pytest.MonkeyPatch
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


def test_bodies_in_flight_are_bounded_together_and_one_by_one(gate: Gate) -> None:
    with gate.receiving() as first, gate.receiving() as second, gate.receiving() as third:
        first(MAX_BODY_BYTES // 4)
        first(MAX_BODY_BYTES // 2)
        second(MAX_BODIES_BYTES - MAX_BODY_BYTES // 2)
        third(SMALL_BODY_BYTES)
        with pytest.raises(Overloaded):
            third(SMALL_BODY_BYTES + 1)
        with pytest.raises(BodyTooLarge):
            first(MAX_BODY_BYTES + 1)
    with gate.receiving() as again:
        again(MAX_BODY_BYTES)


@pytest.mark.parametrize(
    ("target", "headers", "error"),
    [
        (b"/v1/batches?step=3#&step=7", {}, BadRequest),
        (b"/" + b"a" * 8192, {}, UrlTooLong),
        (b"/", {"x": "a" * MAX_HEAD_BYTES}, HeadTooLarge),
    ],
    ids=["fragment", "url", "head"],
)
def test_a_head_is_refused_by_what_it_says(
    gate: Gate, target: bytes, headers: dict[str, str], error: type[CorpusServerError]
) -> None:
    with pytest.raises(error):
        gate.check(RequestHead("GET", target, headers))
    gate.check(RequestHead("GET", b"/v1/batches?step=3", {"host": "x"}))


def test_sizes_are_refused_above_their_limits(gate: Gate) -> None:
    gate.check_size(1000, "count")
    gate.check_text_size(10, "count")
    gate.check_rows(MAX_ROWS // 4, 4)
    for too_much in (
        lambda: gate.check_size(1001, "count"),
        lambda: gate.check_text_size(11, "count"),
        lambda: gate.check_rows(MAX_ROWS // 4 + 1, 4),
    ):
        with pytest.raises(AnswerTooLarge):
            too_much()


def test_short_answers_are_counted_apart_from_costly_ones(gate: Gate) -> None:
    slots = [gate.admit(ANYONE) for _ in range(4)]
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(gate.short(ANYONE))
        with pytest.raises(Overloaded), gate.short(ANYONE):
            pass
    with gate.short(ANYONE):
        assert len(slots) == 4


def test_connections_are_counted_by_address_and_all_together(gate: Gate) -> None:
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


@pytest.mark.parametrize(
    ("method", "target", "announced", "refused"),
    [
        ("POST", b"/v1/plans", MAX_BODY_BYTES, False),
        ("POST", b"/v1/plans", MAX_BODY_BYTES + 1, True),
        ("GET", b"/v1/plans", SMALL_BODY_BYTES + 1, True),
        ("POST", b"/v1/corpora", SMALL_BODY_BYTES, False),
        ("POST", b"/v1/corpora", 10**30, True),
    ],
)
def test_a_body_is_refused_by_its_announced_size(
    gate: Gate, method: str, target: bytes, announced: int, refused: bool
) -> None:
    head = RequestHead(method, target, {"content-length": str(announced)})
    with pytest.raises(BodyTooLarge) if refused else contextlib.nullcontext():
        gate.check(head)
