"""Every axis runs in its quick form, measures everybody it promises, and its report can be shown."""

import json
import math
from pathlib import Path

import pytest

from scripts.benchmarks import rendering
from scripts.benchmarks.__main__ import find_axes
from scripts.benchmarks.axes import cold, latency, paced, peers, scaling, throughput, tricks
from scripts.benchmarks.contest import NOW, QUICK_SHAPES, UNCHECKED
from scripts.benchmarks.peers.bare import SENDINGS
from scripts.benchmarks.proxy import NGINX
from scripts.benchmarks.report import Options, Report
from tests.corpora import write_raw
from tests.pages import drop


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return Options(cache=tmp_path_factory.mktemp("bench"), rounds=1, seconds=0.2, quick=True)


def check_whole(report: Report, name: str) -> None:
    run = rendering.Run(date="2026-01-01", command="", machine={}, reports={name: report}, failures={})
    assert json.loads(rendering.to_json(run))["axes"][name]["data"]
    assert f"## {name}" in rendering.to_markdown(run)
    assert report.tables
    for table in report.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title
    for target in report.targets:
        assert math.isfinite(target.reached), target.figure


@pytest.mark.parametrize("name", sorted(set(find_axes()) - {"cold", "throughput", "tricks"}))
def test_an_axis_runs_and_can_be_shown(name: str, options: Options) -> None:
    """The axes themselves compare what they measure with the corpus."""
    report = find_axes()[name].measure(options)
    check_whole(report, name)
    assert report.targets
    contenders = {row[0] for table in report.tables for row in table.rows}
    if name == "latency":
        cached = {latency.CACHED} if NGINX.find() else set()
        assert {NOW, NOW + UNCHECKED, latency.LIMIT, *cached} <= contenders
    if name == "scaling":
        pairs = [(workers, clients) for workers in scaling.QUICK_WORKERS for clients in scaling.QUICK_CLIENTS]
        for kind in (scaling.OURS, scaling.BARE):
            assert {f"{kind}, {workers} x {clients}" for workers, clients in pairs} <= contenders
    if name == "peers":
        everybody = {peers.GRPC, peers.FLIGHT, peers.NANOGPT, peers.GATHER, peers.INDICES, peers.UDS}
        assert {NOW, peers.UNIX_LIMIT, *everybody} <= contenders
    if name == "paced":
        assert contenders == {f"{NOW}, {clock}" for clock in paced.CLOCKS}


def test_throughput_takes_the_strongest_limit_of_each_round(options: Options) -> None:
    report = throughput.measure(options)
    check_whole(report, "throughput")
    for shape in QUICK_SHAPES:
        its = report.data[str(shape)]
        limits = [name for name in its["contenders"] if name.startswith("bare")]
        assert len(limits) == 2 * len(SENDINGS)
        (winner,) = its["limit"]
        assert its["contenders"][throughput.LIMIT] == its["contenders"][winner]
        speeds = [its["contenders"][name]["million_tokens_per_second"]["median"] for name in limits]
        assert its["contenders"][winner]["million_tokens_per_second"]["median"] == max(speeds)


def test_data_of_the_cold_axis_come_from_the_disk(options: Options, tmp_path: Path) -> None:
    drop(write_raw(tmp_path / "probe", range(5000)))  # skips where pages cannot be dropped
    report = cold.measure(options)
    check_whole(report, "cold")
    its = report.data["64 x 1,025"]
    assert set(its) == {cold.LIMIT, *cold.MODES}
    assert all(each[cold.FROM_DISK]["lowest"] >= 1 for each in its.values())


def test_figures_of_resident_data_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"ours: of each byte delivered 0\.25 came from disk"):
        cold._figures("ours", 1000.0, 0.25)


def test_a_trick_is_measured_off_against_on(options: Options, tmp_path: Path) -> None:
    drop(write_raw(tmp_path / "probe", range(5000)))
    name = "small steps located together"
    report = tricks.measure(Options(cache=options.cache, quick=True, only=(name,)))
    check_whole(report, "tricks")
    assert set(report.data["servers"]) == {"as it is", "off: small steps located together"}
    assert set(report.data["gains"][name]) == set(tricks.FIGURES)


def test_a_trick_that_does_not_exist_is_refused(options: Options) -> None:
    with pytest.raises(SystemExit, match=r"--only must name tricks of .*small steps.*, got .*'magic'"):
        tricks.measure(Options(cache=options.cache, quick=True, only=("magic",)))


@pytest.mark.parametrize(
    ("gain", "earns"),
    [((1.2, 1.1), True), ((1.2, 0.9), False), ((1.1, 1.1), False)],
)
def test_a_trick_earns_its_lines_in_every_round(gain: tuple[float, float], earns: bool) -> None:
    assert tricks._earns({"median": gain[0], "lowest": gain[1]}) is earns
