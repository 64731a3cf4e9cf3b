"""The smoke form of the latency axis: one request at a time, each answer compared with the corpus."""

from pathlib import Path

import pytest

from scripts.benchmarks import rendering
from scripts.benchmarks.axes import latency
from scripts.benchmarks.measure import Series, measure, paired_ratios, spread
from scripts.benchmarks.report import Options, Report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The axis itself compares the first batches of every contender with the corpus."""
    return latency.measure(Options(cache=tmp_path_factory.mktemp("cache"), smoke=True))


def test_everybody_is_measured(report: Report) -> None:
    assert set(report.data["contenders"]) == {
        *(latency.OURS, latency.UNCHECKED, latency.UDS),
        *(latency.LIMIT, latency.UNIX_LIMIT, latency.NAIVE),
    }
    for its in report.data["contenders"].values():
        assert 0 < its["p50_ms"]["median"] <= its["p99_ms"]["median"]
        assert its["distribution_ms"] == sorted(its["distribution_ms"])


def test_the_targets_are_of_ours(report: Report) -> None:
    ours = report.data["contenders"][latency.OURS]
    reached = [target.reached for target in report.targets]
    assert reached == [ours["p50_of_limit"]["median"], ours["p99_of_p50"]["median"]]


def test_the_report_renders(report: Report, tmp_path: Path) -> None:
    (path,) = rendering.write_plots(report, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [table.title for table in rendering.tables_of(report)][-1] == "targets"


def test_ratios_are_taken_round_by_round() -> None:
    """Of medians alone it would be 2 / 4."""
    assert paired_ratios([1, 2, 8], [4, 1, 16]) == {"median": 0.5, "lowest": 0.25, "highest": 2.0}
    assert spread([3, 1, 2]) == {"median": 2, "lowest": 1, "highest": 3}


def test_a_series_has_a_figure_for_each_round() -> None:
    class Counting:
        name = "counting"
        pids: tuple[int, ...] = ()
        ahead_bytes = 0

        def next(self) -> None:
            pass

    series: dict[str, Series] = measure(
        [Counting()],  # type: ignore[list-item]
        latency.SMOKE_SHAPE,
        rounds=3,
        seconds=0.001,
    )
    its = series["counting"]
    lengths = [len(its.tokens_per_second), len(its.cpu_seconds_per_billion), len(its.batch_seconds)]
    assert lengths == [3, 3, 3]
    assert all(seconds for seconds in its.batch_seconds)
