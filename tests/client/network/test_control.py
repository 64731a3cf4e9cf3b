"""What the control plane takes for an answer: of the right plan, step and length, and with its checksum."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import pytest
import xxhash

from corpus_client import errors
from corpus_client.network.control import ControlPlane
from corpus_client.network.endpoint import Endpoint

PLAN = "ab" * 32
DIGEST = "xxh3-64=" + "0" * 16
BODY = bytes(range(32))
TAIL = xxhash.xxh3_64_digest(BODY)


def ask(question: Callable[[ControlPlane], Any], **answer: Any) -> Any:
    """Return what the control plane makes of an answer."""
    with closing(ControlPlane(Endpoint.parse("http://127.0.0.1:1"))) as control:
        control._http.close()
        transport = httpx.MockTransport(lambda request: httpx.Response(200, **answer))
        control._http = httpx.Client(base_url="http://127.0.0.1:1", transport=transport)
        return question(control)


@pytest.mark.parametrize(
    "change", [{"plan": "cd" * 32}, {"step": 6}, {"digest": "xxh3-64=0"}, {"digest": None}, {"digest": 7}]
)
def test_only_the_receipt_of_the_step_is_taken(change: dict[str, object]) -> None:
    def receipt(control: ControlPlane) -> str:
        return control.receipt(PLAN, 5)

    right = {"plan": PLAN, "step": 5, "digest": DIGEST}
    assert ask(receipt, json=right) == DIGEST
    with pytest.raises(errors.AnswerCorrupt, match="not the receipt of step 5"):
        ask(receipt, json={**right, **change})


@pytest.mark.parametrize("found", [4, "5", None, 5.0])
def test_a_plan_step_is_never_before_its_training_step(found: object) -> None:
    assert ask(lambda control: control.plan_step(PLAN, 5), json={"plan_step": 5}) == 5
    with pytest.raises(errors.AnswerCorrupt, match="plan_step must be 5 or more"):
        ask(lambda control: control.plan_step(PLAN, 5), json={"plan_step": found})


@pytest.mark.parametrize("wrong", ["step", "checksum"])
def test_places_are_those_of_the_step_and_whole(wrong: str) -> None:
    def places(control: ControlPlane) -> bytes:
        return control.places(PLAN, 5)

    headers = {"Corpus-Plan": PLAN, "ETag": f'"{PLAN}.indices.5.1.0.1.raw+tail"'}
    assert ask(places, content=BODY + TAIL, headers=headers) == BODY
    if wrong == "step":
        headers["ETag"] = f'"{PLAN}.indices.6.1.0.1.raw+tail"'
    tail = bytes(8) if wrong == "checksum" else TAIL
    with pytest.raises(errors.AnswerCorrupt, match="etag" if wrong == "step" else "checksum"):
        ask(places, content=BODY + tail, headers=headers)


@pytest.mark.parametrize("wrong", ["Corpus-Shape", "Corpus-Dtype", "checksum"])
def test_tokens_are_as_many_as_were_asked_for_and_whole(wrong: str) -> None:
    def tokens(control: ControlPlane) -> tuple[str, bytes]:
        return control.tokens("web", 0, 16)

    headers = {"Corpus-Shape": "16", "Corpus-Dtype": "uint16", "Corpus-Checksum": "xxh3-64=tail"}
    assert ask(tokens, content=BODY + TAIL, headers=headers) == ("uint16", BODY)
    tail = bytes(8) if wrong == "checksum" else TAIL
    headers |= {wrong: "15" if wrong == "Corpus-Shape" else "int8"} if wrong in headers else {}
    with pytest.raises(errors.AnswerCorrupt, match=wrong.lower()):
        ask(tokens, content=BODY + tail, headers=headers)
