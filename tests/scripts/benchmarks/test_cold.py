"""The smoke form of the cold axis: what is measured came from the disk, and is the corpus."""

from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks import corpus, disk, rendering
from scripts.benchmarks.axes import cold
from scripts.benchmarks.report import Options, Report
from tests.corpora import write_raw
from tests.pages import drop, resident_of


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The axis itself compares batches with the corpus, and refuses figures of data that were in memory."""
    folder = tmp_path_factory.mktemp("cache")
    drop(write_raw(folder / "probe", np.arange(5000)))  # skips where pages cannot be dropped
    return cold.measure(Options(cache=folder, smoke=True))


def test_every_way_to_read_is_measured(report: Report) -> None:
    (its,) = report.data["shapes"].values()
    limits = {cold.THREADS, cold.FIO} if disk.has_fio() else {cold.THREADS}
    assert set(its["windows_per_second"]) == {*limits, *cold.MODES, cold.WARM}
    assert set(its["depths"]) == limits
    machine = {cold.OF_MACHINE} if disk.has_fio() else set()
    assert set(report.data["beside"]["p99_of_alone"]) == {
        *cold.MODES,
        cold.PACED,
        cold.OTHER,
        cold.OTHER_PACED,
        *machine,
    }
    assert its["limit"] in limits
    assert all(share["lowest"] >= 1 for share in its["read_per_delivered_byte"].values())


def test_the_targets_are_of_reading_ahead_by_plan(report: Report) -> None:
    (its,) = report.data["shapes"].values()
    reached = [target.reached for target in report.targets]
    assert reached == [
        its["of_limit"][cold.PLAN]["median"],
        its["of_none"][cold.PLAN]["median"],
        report.data["beside"]["p99_of_alone"][cold.PLAN]["median"],
    ]


def test_the_report_renders(report: Report, tmp_path: Path) -> None:
    (path,) = rendering.write_plots(report, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [table.title for table in rendering.tables_of(report)][-1] == "targets"


def test_a_file_that_stays_in_memory_is_refused(tmp_path: Path) -> None:
    """As is one that somebody has mapped and touched."""
    path = corpus.make(tmp_path, 10**6)
    disk.drop(path)
    assert not resident_of(path).any()
    touched = np.memmap(path, np.uint16, "r")
    assert touched.sum()
    with pytest.raises(RuntimeError, match=r"100% of .* stay in memory; end the processes that map it"):
        disk.drop(path)


def test_figures_of_resident_data_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"ours: of each byte delivered 0\.25 came from disk"):
        cold._check_cold("ours", 0.25)


@pytest.mark.parametrize("depth", [1, 7])
def test_threads_read_every_window_once(tmp_path: Path, depth: int) -> None:
    path = corpus.make(tmp_path, 10**6)
    offsets = np.arange(0, 10**6, 5000)
    assert disk.read_parallel(path, offsets, 100, depth=depth, seconds=60).num_windows == len(offsets)


@pytest.mark.skipif(not disk.has_fio(), reason="fio is not installed")
def test_fio_reads_every_window_once(tmp_path: Path) -> None:
    path = corpus.make(tmp_path, 10**6)
    drop(path)
    offsets = np.arange(0, 10**6, 5000)
    assert disk.read_with_fio(path, offsets, 100, depth=7).num_windows == len(offsets)
    assert resident_of(path)[offsets // 4096].all()
