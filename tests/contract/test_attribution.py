"""The client tells the server's time from the network's by the server's own word."""

from __future__ import annotations

from corpus_client import CorpusLoader
from tests.serving import RunningServer


def test_server_says_how_long_it_took_and_the_client_believes_it_within_what_it_saw(
    server: RunningServer,
) -> None:
    with CorpusLoader(server.url, corpus="web", seq_len=16, global_batch_size=12, device="cpu") as loader:
        for _ in range(40):
            next(loader)
        fetch = loader.stats().fetch
    assert 0 < fetch.server <= fetch.response


def test_every_token_response_says_it(server: RunningServer) -> None:
    batch = "/v1/batches?corpus=web&seq_len=8&batch_size=2&step=0"
    for path in ("/v1/corpora/web/tokens?start=0&count=10", batch):
        timing = server.get(path).headers["Server-Timing"]
        name, _, milliseconds = timing.partition(";dur=")
        assert name == "response"
        assert float(milliseconds) > 0
