"""`corpus-client overlap`, run for real on the CPU, with a real server for (e)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from corpus_client.cli import app
from corpus_client.errors import InvalidArgument
from corpus_client.tools import overlap
from corpus_client.tools.comparison import TITLES, drawn, make_step, steps_of
from corpus_client.tools.feeds import FEEDS, Feed, TokenFile, opened
from corpus_client.tools.loads import TrainStep
from corpus_client.tools.recording import Recorder
from corpus_client.tools.timeline import WAYS
from corpus_client.tools.timing import HostMeter
from tests.client.reference_server import ReferenceServer

run = partial(CliRunner().invoke, env={"COLUMNS": "500"})
CPU = torch.device("cpu")
TINY = ["overlap", "--device", "cpu", "--step-ms", "0.5", "--batch", "4kB", "--seq-len", "16",
        "--steps", "3", "--rounds", "1", "--workers", "1"]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    path = tmp_path / "tokens.bin"
    np.random.default_rng(5).integers(0, 2**16, 5000, np.uint16).tofile(path)
    return TokenFile(path=path, dtype="uint16", rows=6, window=17)


def make_feed(tokens: TokenFile, record: Recorder | None = None) -> Feed:
    return Feed(tokens=tokens, device=CPU, record=record or Recorder(CPU, active=False), workers=1)


@pytest.mark.parametrize("name", ["pageable", "pinned", "pinned-async", "dataloader"])
def test_every_way_brings_the_same_windows(tokens: TokenFile, name: str) -> None:
    expected = np.fromfile(tokens.path, np.uint16)
    with opened(name, make_feed(tokens)) as batches:
        for step, batch in enumerate(islice(batches, 5)):
            starts = np.random.default_rng(step).integers(0, 5000 - 16, 6)
            assert batch.dtype == torch.int64
            assert batch.tolist() == [expected[start : start + 17].tolist() for start in starts]


def test_full_slots_bring_what_lies_in_them(tokens: TokenFile) -> None:
    held = [tokens.batch(number).to(torch.int64).tolist() for number in range(4)]
    with opened("full-slots", make_feed(tokens)) as batches:
        for batch in islice(batches, 9):
            assert batch.tolist() in held


def test_the_constant_batch_is_the_first_one(tokens: TokenFile) -> None:
    with opened("constant", make_feed(tokens)) as batches:
        first, second = islice(batches, 2)
    assert first is second
    assert first.tolist() == tokens.batch(0).tolist()


def test_every_way_has_a_title_and_a_feed() -> None:
    assert {way.name for way in WAYS} | {"full-slots"} == set(FEEDS) == set(TITLES)


def test_a_step_reads_every_token_and_learns(tokens: TokenFile) -> None:
    sample = tokens.batch(0).to(torch.int64)
    step = TrainStep(HostMeter(), sample, 0.002)
    losses = [step(sample).item() for _ in range(60)]
    assert losses[-1] < losses[0]
    assert step.token_sum.item() == 60 * int(sample.sum())


def test_a_longer_step_has_more_products(tokens: TokenFile) -> None:
    """Far enough apart that a busy machine does not turn them round."""
    sample = tokens.batch(0).to(torch.int64)
    short, long = (TrainStep(HostMeter(), sample, seconds) for seconds in (1e-5, 0.2))
    work = [step.num_products * step._products.width**3 for step in (short, long)]
    assert work[0] < work[1]


def test_a_run_counts_its_steps_and_draws_them_in_order(tokens: TokenFile) -> None:
    step, meter = make_step(make_feed(tokens), 0.0005)
    assert len(steps_of("pageable", make_feed(tokens), step, meter, 20)) == 12
    spans = drawn("pageable", lambda record: make_feed(tokens, record), step, meter)
    assert [span.step for span in spans if span.kind == "compute" and span.step >= 0] == list(range(6))
    assert min(span.start for span in spans) == 0
    for kinds in (("fetch", "copy"), ("copy", "compute")):
        for number in range(6):
            before, after = (next(s for s in spans if s.kind == kind and s.step == number) for kind in kinds)
            assert 0 <= before.start <= before.stop <= after.start


def test_json_for_machines_with_a_server(server: ReferenceServer, tmp_path: Path) -> None:
    done = run(app, [*TINY, server.url, "--corpus", "web", "--json", "--plots", str(tmp_path)])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    names = ["pageable", "dataloader", "corpus-loader", "full-slots", "constant"]
    assert [each["name"] for each in report["outcomes"]] == names
    assert (report["rows"], report["seq_len"], report["batch_bytes"]) == (117, 16, 117 * 17 * 2)
    for each in report["outcomes"]:
        assert each["num_steps"] == 3
        assert 0 < each["median_seconds"] <= each["p95_seconds"]
        assert each["stall_low"] <= each["stall"] <= each["stall_high"]
        assert each["spans"]
    assert report["outcomes"][-1]["stall"] == 0
    [missing] = report["missing"]
    assert missing.startswith("(b) and (c): on the CPU nothing is page-locked")
    assert (tmp_path / "overlap-timeline.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_server_the_loader_is_left_out_and_it_says_how_to_start_one(tokens: TokenFile) -> None:
    done = run(app, [*TINY, "--local", str(tokens.path)])
    assert done.exit_code == 0, done.output
    assert (
        "left out: (e) CorpusLoader: no server was named. Start one with 'corpus-server serve" in done.stdout
    )
    for words in ("(a) pageable memory", "(d) torch DataLoader", "(e') ", "(f) one batch", "stall", "p95"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1"], "a URL and --corpus go together"),
        (["--local", "/no/such/file"], "a token file must be readable, got /no/such/file"),
        (["--dtype", "float32", "--local", "/dev/null"], "dtype must be one of uint8, uint16, uint32, int32"),
        (["--local", "/dev/null"], "/dev/null must hold a window of 17 tokens, it holds 0"),
        (["--explain", "--fetch-ms", "-1"], "fetch must be in [0, 1e6) seconds"),
        (["--device", "tpu"], "device must be 'cpu', 'cuda' or 'cuda:N'"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(arguments: list[str], message: str) -> None:
    done = run(app, [*TINY, *arguments])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_a_batch_beyond_a_quarter_of_the_free_memory_is_refused(
    tokens: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "measurable_bytes", lambda device: 1000)
    with pytest.raises(InvalidArgument, match="batch must be at most 62 B, got 204 B"):
        overlap.measure(partial(make_feed, tokens), 0.001, 2, 1)  # type: ignore[arg-type]


def test_the_explanation_says_that_nothing_was_measured(tmp_path: Path) -> None:
    stated = [
        "overlap",
        "--explain",
        "--fetch-ms",
        "8",
        "--copy-ms",
        "1",
        "--transfer-ms",
        "1",
        "--step-ms",
        "5",
    ]
    shown = run(app, [*stated, "--plots", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "computed from stated durations, not measured" in shown.stdout
    assert (tmp_path / "overlap-explained.png").stat().st_size > 20_000
    explained = json.loads(run(app, [*stated, "--json"]).stdout)
    assert explained["note"] == "computed from stated durations, not measured"
    assert {way["name"]: way["step_seconds"] for way in explained["ways"]} == pytest.approx(
        {"pageable": 0.010, "pinned": 0.010, "pinned-async": 0.009, "dataloader": 0.006,
         "corpus-loader": 0.008, "constant": 0.005}
    )  # fmt: skip
    assert explained["ways"][-1]["stall"] == 0
