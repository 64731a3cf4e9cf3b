"""growth, memory, start and replicas in their smallest form: right bytes, whole reports, no times."""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from scripts.benchmarks import corpus
from scripts.benchmarks.axes import growth, memory, replicas, start
from scripts.benchmarks.drive import Load, drive
from scripts.benchmarks.expected import Expected, plan_of
from scripts.benchmarks.private import Watch, private_bytes
from scripts.benchmarks.proxy import CONFIGURATION, find_nginx
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import batches_path, serving

MIB = 2**20


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return Options(cache=tmp_path_factory.mktemp("bench"), rounds=1, seconds=0.2, smoke=True)


@pytest.fixture(scope="module")
def path(options: Options) -> Path:
    return corpus.make(options.cache, 10**6)


def check_whole(report: Report) -> None:
    """Everything in a report can be shown."""
    assert json.loads(json.dumps(report.data)) is not None
    assert report.tables
    assert report.targets
    assert report.plots
    for table in report.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title
    for target in report.targets:
        assert math.isfinite(target.reached), target.figure
    for plot in report.plots:
        figure = Figure()
        plot.draw(figure)
        figure.savefig(io.BytesIO(), format="png")


def test_growth(options: Options) -> None:
    """Bytes are checked by the axis itself, on every connection."""
    report = growth.measure(options)
    check_whole(report)
    (shape,) = report.data["connections"]
    assert [each["connections"] for each in shape["counts"]] == [1, 8]
    assert all(each["million_tokens_per_second"] > 0 for each in shape["counts"])
    assert {each["stalled"] for each in report.data["waiting"]} == {False, True}
    assert all(each["bytes_before"] > 10 * MIB for each in report.data["waiting"])
    assert {(each["num_tokens"], each["step"]) for each in report.data["steps"]} == {
        (size, step) for size in (10**6, 10**12) for step in (1, 10**6, 10**12)
    }
    assert [each["plans"] for each in report.data["plans"]] == [5, 50]
    assert [each["num_tokens"] for each in report.data["opening"]] == [10**6, 10**12]
    for each in report.data["opening"]:
        assert all(each[name]["median"] > 0 for name in ("open", "first"))
        assert each["private"]["median"] > 10 * MIB


def test_memory(options: Options) -> None:
    report = memory.measure(options)
    check_whole(report)
    for each in report.data["server"]:
        assert 10 * MIB < each["start_bytes"] <= each["peak_bytes"]
        assert len(each["samples"]) > 1
        assert each["answers"]["small answers"]["num_answers"] > 0
    for each in report.data["loaders"]:
        # The ring is written from end to end, and nothing near a second one of it.
        assert 0.9 * each["prefetch_bytes"] < each["growth_bytes"] < 1.9 * each["prefetch_bytes"]
        assert each["num_batches"] > 1
        assert (each["batch_bytes"] > 0) == (each["dtype"] == "int64")


def test_start(options: Options) -> None:
    report = start.measure(options)
    check_whole(report)
    assert [each["num_tokens"] for each in report.data["loader"]] == [10**6, 10**12]
    for each in report.data["loader"]:
        assert all(seconds > 0 for seconds in each["parts"].values())
        assert each["seconds"]["median"] == pytest.approx(sum(each["parts"][name] for name in start.FIRST))
    (server,) = report.data["server"]
    assert server["parts"]["import the web application"] > 0
    assert server["seconds"]["median"] == pytest.approx(sum(server["parts"].values()))


def test_replicas(options: Options) -> None:
    report = replicas.measure(options)
    check_whole(report)
    one, two = report.data["spread"]
    assert one["requests"][0] > 0
    assert min(two["requests"]) > 0.4 * sum(two["requests"])
    cached = report.data["cached"]
    if find_nginx() is None or not CONFIGURATION.exists():
        assert isinstance(cached, str)
        return
    assert [(each["case"], each["requests_per_url"]) for each in cached] == [
        ("direct", replicas.PEERS),
        ("first", 1),
        ("again", 0),
    ]


def test_without_nginx_the_cache_is_skipped_by_name(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "find_nginx", lambda: None)
    report = replicas.measure(options)
    check_whole(report)
    assert report.data["cached"] == "nginx is not installed here"


def test_a_refused_request_is_asked_again_until_all_are_answered(path: Path) -> None:
    request = batches_path(corpus="bench", seq_len=1024, batch_size=512, step="")
    with serving({"bench": path}, arguments=("--max-concurrent-answers", "1")) as server:
        load = Load(ports=[server.port], path=request, connections=16, answers=2, pids=[server.pid])
        driven = drive(load)
    assert driven.num_refused > 0
    assert driven.num_answers == 32
    assert driven.num_bytes == 32 * 512 * 1025 * 2
    expected = Expected(path, plan_of(512, 1024))
    expected.check(driven.digests)
    assert sorted(step for step, _ in driven.digests) == list(range(16))
    with pytest.raises(SystemExit, match="step 3 was answered with other tokens"):
        expected.check([(3, dict(driven.digests)[4])])


def test_pages_of_a_corpus_are_no_private_memory(tmp_path: Path) -> None:
    path = tmp_path / "corpus" / "tokens.bin"
    path.parent.mkdir()
    path.write_bytes(bytes(32 * MIB))
    pid = os.getpid()
    before = private_bytes(pid)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert not any(mapped[:: mmap.PAGESIZE])
        assert private_bytes(pid) - before > 30 * MIB
        assert private_bytes(pid, leaving_out=[path.parent]) - before < 8 * MIB


def test_a_watch_sees_what_was_there_only_for_a_while() -> None:
    before = private_bytes(os.getpid())
    with Watch(os.getpid()) as watch:
        held = bytearray(os.urandom(64 * MIB))
        while len(watch.samples) < 8:
            time.sleep(0.01)
        del held
    assert watch.peak_bytes - before > 60 * MIB
