"""How token responses leave: checksums at their end, threads and loop by turns, other servers' protocols."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import xxhash

from tests.raw_http import RawConnection, get
from tests.serving import RunningServer

TAIL_BYTES = 8
BATCH = "/v1/batches?corpus=big&seq_len=1024&batch_size=64&step=5"
TARGETS = [
    BATCH,
    BATCH + "&count=20",  # more than is ever held at a time
    "/v1/batches?corpus=big&seq_len=1&batch_size=10000&step=5",  # small, and located in parts
    "/v1/corpora/big/tokens?start=7&count=900001&format=raw",
    "/v1/corpora/big/tokens?start=7&count=0&format=raw",
    "/v1/indices?corpus=big&seq_len=1024&batch_size=64&step=5&format=raw",
]


@pytest.mark.parametrize("target", TARGETS)
def test_a_tail_is_the_header_s_checksum_after_the_same_array(roomy: RunningServer, target: str) -> None:
    with_header, with_tail = roomy.get(target), roomy.get(target + "&checksum=tail")
    array, tail = with_tail.body[:-TAIL_BYTES], with_tail.body[-TAIL_BYTES:]
    assert array == with_header.body == roomy.get(target + "&checksum=false").body
    assert with_header.headers["Corpus-Checksum"] == f"xxh3-64={tail.hex()}"
    assert tail == xxhash.xxh3_64_digest(array)
    assert with_tail.headers["Corpus-Checksum"] == "xxh3-64=tail"
    assert int(with_tail.headers["Content-Length"]) == len(array) + TAIL_BYTES
    for name in ("Corpus-Shape", "Corpus-Dtype", "Corpus-Plan", "Cache-Control", "Content-Type"):
        assert with_tail.headers[name] == with_header.headers[name]


def test_with_a_tail_it_is_another_representation(roomy: RunningServer) -> None:
    """A cache that compares tags must never give one for the other."""
    tag = roomy.get(BATCH).headers["ETag"]
    tail = roomy.get(BATCH + "&checksum=tail")
    assert tail.headers["ETag"] not in (tag, None)
    kept = roomy.get(BATCH + "&checksum=tail", headers={"If-None-Match": tail.headers["ETag"]})
    assert (kept.status, kept.body) == (304, b"")
    assert roomy.get(BATCH + "&checksum=tail", headers={"If-None-Match": tag}).status == 200


def test_head_of_a_tail(roomy: RunningServer) -> None:
    head = roomy.get(BATCH + "&checksum=tail", method="HEAD")
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", str(64 * 1025 * 2 + 8))


@pytest.mark.parametrize("chosen", ["npy", "json"])
@pytest.mark.parametrize("target", [BATCH, "/v1/corpora/big/tokens?start=7", "/v1/indices" + BATCH[11:]])
def test_only_raw_arrays_have_tails(roomy: RunningServer, target: str, chosen: str) -> None:
    response = roomy.get(f"{target}&checksum=tail&format={chosen}")
    assert (response.status, response.json()["type"]) == (422, "invalid-parameter")


def test_a_response_waits_for_what_the_loop_still_sends(roomy: RunningServer) -> None:
    """A large JSON response to a slow reader, and at once tokens, which a thread would send past it."""
    targets = [
        BATCH + "&count=4&format=json",
        BATCH,
        BATCH + "&count=20&checksum=tail",
        BATCH + "&format=json",
    ]
    expected = [roomy.get(target).body for target in targets]
    with RawConnection(roomy, receive_buffer=4096) as connection:
        connection.send(*map(get, targets))
        time.sleep(0.3)
        assert [connection.read().body for _ in targets] == expected


def test_a_reader_that_breaks_off_leaves_nothing_behind(roomy: RunningServer) -> None:
    num_descriptors = len(list(Path(f"/proc/{roomy.worker_pid}/fd").iterdir()))
    for _ in range(5):
        with RawConnection(roomy, receive_buffer=4096) as connection:
            connection.send(get(f"{BATCH}&count=200&checksum=tail"))
            connection.await_some(12)
    roomy.wait_until_idle()
    assert "unexpected=" not in roomy.log()
    assert len(list(Path(f"/proc/{roomy.worker_pid}/fd").iterdir())) <= num_descriptors + 1
    assert roomy.get(BATCH).status == 200
