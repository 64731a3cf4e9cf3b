"""A trainer reads a view: of a corpus in a store, and beside a local copy of its corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from corpus_client.errors import InvalidArgument
from tests.contract.conftest import make_loader, take
from tests.serving import RunningServer
from tests.stores import WebServer
from tests.views import write_corpus, write_view


def test_a_local_copy_of_the_corpus_is_none_of_the_view(tmp_path: Path) -> None:
    web = write_corpus(tmp_path / "web", [[5] * 100])
    hq = write_view(web, [n % 3 for n in range(100)], tmp_path / "hq.view")
    (tmp_path / "server").mkdir()
    arguments = [f"web={web},dtype=uint32", f"hq=web?view={hq}"]
    with (
        RunningServer({}, tmp_path / "server", arguments=arguments) as server,
        pytest.raises(InvalidArgument, match="hq: a view is read without local_root"),
        make_loader(server.url, corpus="hq", seq_len=32, dtype=None, local_root=web) as batches,
    ):
        next(batches)


def test_a_view_of_a_corpus_in_a_store_has_the_rows_of_a_copy(tmp_path: Path) -> None:
    web = write_corpus(tmp_path / "web", [list(range(1, 60))])
    hq = write_view(web, [n % 3 for n in range(59)], tmp_path / "hq.view")
    files = {f"/{path.name}": path.read_bytes() for path in web.iterdir()}
    (tmp_path / "server").mkdir()
    found = []
    with WebServer(files) as store:
        for path in (web, f"{store.url}/0.bin"):
            arguments = [f"hq={path}?view={hq},dtype=uint32", "--cache-dir", str(tmp_path / "cache")]
            with (
                RunningServer({}, tmp_path / "server", arguments=arguments) as server,
                make_loader(server.url, corpus="hq", seq_len=32, dtype=None) as batches,
            ):
                found.append(take(batches, 10))
    assert all((a[1] == b[1]).all() for a, b in zip(*found, strict=True))
