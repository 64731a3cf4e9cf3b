"""The trace is what Perfetto reads, holds the last steps and no more; NVTX ranges nest."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corpus_client import CorpusLoader, errors

MakeLoader = Callable[..., CorpusLoader]
PHASES = {"send", "response", "receive", "host", "retry", "idle"}


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Spans by the name of their thread; checks every event against the format on the way."""
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    names: dict[tuple[int, int], str] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["args"]["name"]
                rows[event["args"]["name"]] = []
        else:
            assert event["ph"] == "X"
            assert event["ts"] > 0
            assert event["dur"] >= 0
            rows[names[event["pid"], event["tid"]]].append(event)
    return rows


def test_last_steps_lie_in_rows_without_overlap(make_loader: MakeLoader, tmp_path: Path) -> None:
    loader = make_loader(trace_steps=20, num_steps=50)
    for _ in loader:
        pass
    loader.trace(tmp_path / "trace.json")
    rows = rows_of(tmp_path / "trace.json")
    assert list(rows) == ["requests", "fetcher", "transfers", "training loop"]
    for spans in rows.values():
        for one, other in itertools.pairwise(spans):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01  # microseconds
    waits = [span for span in rows["training loop"] if span["name"] == "wait"]
    steps = [span["args"]["step"] for span in waits if span["args"]]
    assert steps == list(range(31, 50))  # the last of the 20 waits found the end
    assert {span["name"] for span in rows["fetcher"]} <= PHASES
    first_steps = [span["args"]["first_step"] for span in rows["transfers"]]
    assert first_steps == list(range(first_steps[0], 50))
    assert 28 <= first_steps[0] <= 31


def test_requests_name_their_steps(make_loader: MakeLoader, tmp_path: Path) -> None:
    loader = make_loader(trace_steps=50, num_steps=10)
    list(loader)
    loader.trace(tmp_path / "trace.json")
    rows = rows_of(tmp_path / "trace.json")
    assert [(span["args"]["first_step"], span["args"]["steps"]) for span in rows["requests"]] == [
        (0, 1),
        (1, 2),
        (3, 4),
        (7, 3),
    ]
    for request in rows["requests"]:
        during = [
            span["name"]
            for span in rows["fetcher"]
            if request["ts"] <= span["ts"] < request["ts"] + request["dur"]
        ]
        assert {"response", "receive", "host"} <= set(during)


def test_transfer_happens_in_the_wait_for_its_step(make_loader: MakeLoader, tmp_path: Path) -> None:
    """On the CPU a batch is copied when it is asked for."""
    loader = make_loader(trace_steps=50, num_steps=10)
    list(loader)
    loader.trace(str(tmp_path / "trace.json"))
    rows = rows_of(tmp_path / "trace.json")
    waits = {span["args"].get("step"): span for span in rows["training loop"] if span["name"] == "wait"}
    transfers = {span["args"]["first_step"]: span for span in rows["transfers"]}
    assert set(transfers) == set(range(10))
    for step, transfer in transfers.items():
        wait = waits[step]
        assert wait["ts"] <= transfer["ts"]
        assert transfer["ts"] + transfer["dur"] <= wait["ts"] + wait["dur"] + 0.01
    assert loader.stats().transfer_seconds == pytest.approx(
        sum(transfer["dur"] for transfer in transfers.values()) / 1e6
    )


def test_trace_without_steps_says_how_to_get_them(make_loader: MakeLoader, tmp_path: Path) -> None:
    loader = make_loader()
    next(loader)
    with pytest.raises(errors.InvalidArgument, match=r"pass staging=Staging\(trace_steps=200\)"):
        loader.trace(tmp_path / "trace.json")
    assert loader.stats().transfer_seconds == 0.0
