"""An axis runs in its quick form, measures everybody it promises, and its report can be shown.

Every run of the tests takes one axis, whose parts the others share; `CORPUS_AXES=1` takes all of them.
"""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.benchmarks.__main__ import find_axes
from scripts.benchmarks.axes import cold, latency, lone, paced, peers, scaling, turns
from scripts.benchmarks.contest import NOW, UNCHECKED
from scripts.benchmarks.report import Options, Report, Run
from tests.corpora import write_raw
from tests.docker.proxy import NGINX
from tests.pages import drop

every_axis = pytest.mark.skipif(os.environ.get("CORPUS_AXES") != "1", reason="CORPUS_AXES=1 runs every axis")
SHORT = "latency"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return Options(cache=tmp_path_factory.mktemp("bench"), rounds=1, seconds=0.2, quick=True)


def check_whole(report: Report, name: str) -> set[str]:
    """Return the contenders in its tables."""
    run = Run(title="", command="", machine={}, reports={name: report})
    assert json.loads(run.to_json())["axes"][name]["data"]
    assert f"## {name}" in run.to_markdown()
    for table in report.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title
    for target in report.targets:
        assert math.isfinite(target.reached), target.figure
    return {row[0] for table in report.tables for row in table.rows}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == SHORT else every_axis)
        for name in sorted(set(find_axes()) - {"cold", "throughput"})
    ],
)
def test_an_axis_runs_and_can_be_shown(name: str, options: Options) -> None:
    """The axes themselves compare what they measure with the corpus."""
    report = find_axes()[name].measure(options)
    contenders = check_whole(report, name)
    assert report.targets
    if name == "latency":
        cached = {latency.CACHED} if NGINX.find() else set()
        assert {NOW, NOW + UNCHECKED, latency.LIMIT, *cached} <= contenders
    if name == "scaling":
        pairs = [(workers, clients) for workers in scaling.QUICK_WORKERS for clients in scaling.QUICK_CLIENTS]
        for kind in (scaling.OURS, scaling.BARE):
            assert {f"{kind}, {workers} x {clients}" for workers, clients in pairs} <= contenders
    if name == "peers":
        everybody = {peers.FLIGHT, peers.NANOGPT, peers.GATHER, peers.INDICES, peers.UDS}
        assert {NOW, *everybody} <= contenders
    if name == "lone":
        assert {NOW, NOW + lone.INLINE, NOW + lone.HEALTH, lone.UVICORN, lone.LOOP} <= contenders
    if name == "turns":
        assert {f"{NOW}, {load}" for load in (turns.NOTHING, turns.READERS)} <= contenders
        assert {"windows bound", "the page", "/metrics"} <= contenders
    if name == "paced":
        assert contenders == {f"{NOW}, {clock}" for clock in paced.CLOCKS}


@every_axis
@pytest.mark.parametrize("part", cold.PARTS)
def test_data_of_the_cold_axis_come_from_the_disk(part: str, options: Options, tmp_path: Path) -> None:
    drop(write_raw(tmp_path / "probe", range(5000)))  # skips where pages cannot be dropped
    report = cold.measure(replace(options, only=(part,)))
    contenders = check_whole(report, "cold")
    if part == "windows":
        assert {cold.LIMIT, *cold.MODES} <= contenders
        its = report.data["64 x 1,025"].values()
        assert all(each[cold.FROM_DISK]["lowest"] >= 1 for each in its)
    else:
        assert cold.BOUNDED in contenders
