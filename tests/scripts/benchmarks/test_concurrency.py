"""The smoke form of the concurrency axis: real processes of workers against a real server."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks import rendering
from scripts.benchmarks.axes import concurrency
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.workers import Job
from tests.corpora import some_tokens, write_raw


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The axis itself compares every worker's last batch with the corpus."""
    return concurrency.measure(Options(cache=tmp_path_factory.mktemp("cache"), smoke=True))


def test_every_worker_takes_every_batch_and_each_has_a_request(report: Report) -> None:
    num_workers = report.data["processes"] * report.data["workers_each"]
    wanted = num_workers * round(report.data["seconds"] / report.data["period_seconds"])
    for its in report.data["clocks"].values():
        assert its["batches"] == wanted
        # Those of the first batches may have been sent before the start.
        assert wanted - 4 * num_workers <= its["requests"] <= wanted + 4 * num_workers
        assert 0 < its["p50_ms"] <= its["p99_ms"] <= its["longest_ms"]


def test_both_clocks_have_their_targets(report: Report, tmp_path: Path) -> None:
    assert [target.figure.split(": ")[1] for target in report.targets] == [
        *("late batches", "p99 of a request") * 2
    ]
    (path,) = rendering.write_plots(report, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def some_job(**fields: object) -> Job:
    values = {
        "url": "http://127.0.0.1:1",
        "ranks": [0, 1],
        "offsets": [0.0, 0.0],
        "world_size": 2,
        "rows": 2,
        "length": 9,
        "num_batches": 3,
        "period_seconds": 0.05,
    }
    return Job(**{**values, **fields})  # type: ignore[arg-type]


def test_a_worker_with_other_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.bin"
    write_raw(path, some_tokens(1000))
    digest = hashlib.sha256(np.zeros((2, 9), "uint16").tobytes()).hexdigest()
    with pytest.raises(RuntimeError, match="worker 1 must end with the windows of step 3"):
        concurrency.check_last([{"rank": 1, "last": (3, digest)}], some_job(), path)


def test_workers_that_cannot_start_fail_the_axis(capfd: pytest.CaptureFixture[str]) -> None:
    """What they wrote is shown."""
    with pytest.raises(RuntimeError, match="a process of workers ended with 1"):
        concurrency.run_jobs([some_job(url="nowhere")])
    assert "url must be" in capfd.readouterr().err
