"""Random interleavings of requests on many connections, while files change: no wrong byte.

In the suite a few thousand requests; CORPUS_FUZZ_REQUESTS=100000 asks for more, CORPUS_FUZZ_SEED for others.
"""

from __future__ import annotations

import os

import pytest

from tests.server.http.episodes import WAYS_OUT
from tests.server.http.fuzz import run_round

SEED = int(os.environ.get("CORPUS_FUZZ_SEED", "1"))
REQUESTS_PER_ROUND = 3000
NUM_ROUNDS = -(-int(os.environ.get("CORPUS_FUZZ_REQUESTS", "6000")) // REQUESTS_PER_ROUND)


@pytest.mark.parametrize(
    ("round_number", "tls"), [*((number, False) for number in range(NUM_ROUNDS)), (1, True)]
)
def test_every_response_is_framed_in_order_and_right(round_number: int, tls: bool) -> None:
    """Catalogue row 30."""
    counts = run_round(SEED, round_number, REQUESTS_PER_ROUND, tls=tls)
    # With room for three responses, slow clients take it all, and thousands are refused in no time.
    assert counts["200"] > REQUESTS_PER_ROUND / (4 if round_number % 2 else 50), counts
    # What never occurred was not tested.
    for what in ("304", "corpus-changed", "invalid-parameter", "unknown-plan") if round_number % 2 else ():
        assert counts[what], (what, counts)
    for way_out in set(WAYS_OUT):
        assert counts[f"episode: {way_out}"], (way_out, counts)
