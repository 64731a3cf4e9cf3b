"""The smoke form of the throughput axis: everybody runs, and delivers the tokens it says."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from scripts.benchmarks import contenders as them
from scripts.benchmarks import rendering
from scripts.benchmarks.axes import throughput
from scripts.benchmarks.contender import Shape, check, windows_of
from scripts.benchmarks.report import Options, Report
from tests.corpora import some_tokens, write_raw

EVERYBODY = {
    *(them.OURS, them.UNCHECKED, them.INDICES, them.UDS, *them.TCP_LIMITS, *them.UNIX_LIMITS),
    *(them.GRPC, them.FLIGHT, them.NAIVE, them.NANOGPT, them.GATHER),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The axis itself compares the first batches of every contender with the corpus."""
    return throughput.measure(Options(cache=tmp_path_factory.mktemp("cache"), smoke=True))


def test_every_contender_is_measured_at_every_shape(report: Report) -> None:
    assert set(report.data["shapes"]) == {str(shape) for shape in throughput.SMOKE_SHAPES}
    for figures in report.data["shapes"].values():
        assert set(figures["contenders"]) == EVERYBODY
        for its in figures["contenders"].values():
            assert its["million_tokens_per_second"]["median"] > 0
            assert its["cpu_seconds_per_billion_tokens"]["median"] > 0


def test_ours_has_a_target_against_each_limit_and_peer(report: Report) -> None:
    figures = [target.figure for target in report.targets]
    for shape in throughput.SMOKE_SHAPES:
        of_shape = [figure for figure in figures if figure.startswith(f"{shape}: ")]
        assert len(of_shape) == 7, of_shape
        for name in (them.GRPC, them.FLIGHT, them.NANOGPT, them.GATHER):
            assert any(figure.endswith(f"/ {name}") for figure in of_shape)


def test_the_report_renders(report: Report, tmp_path: Path) -> None:
    run = rendering.Run(
        date="2026-01-01", command="scripts/bench", machine={}, reports={"throughput": report}, failures={}
    )
    assert json.loads(rendering.to_json(run))["axes"]["throughput"]["data"] == report.data
    page = rendering.to_markdown(run, {}, title="bench")
    shown = io.StringIO()
    rendering.show(run, Console(width=200, file=shown))
    for name in EVERYBODY:
        assert f"| {name} |" in page
        assert name in shown.getvalue()
    plots = rendering.write_plots(report, tmp_path / "plots")
    assert [path.name for path in plots] == ["throughput.png", "cpu.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)


class Shifted:
    """Delivers windows that begin one token late."""

    name = "shifted"
    pids: tuple[int, ...] = ()
    ahead_bytes = 0

    def __init__(self, tokens: np.ndarray, shape: Shape, late: int) -> None:
        self._tokens, self._shape, self._late = tokens, shape, late

    def next(self) -> torch.Tensor:
        length = self._shape.length
        return torch.from_numpy(
            np.stack([self._tokens[at + self._late :][:length] for at in self.starts(0).tolist()])
        )

    def starts(self, step: int) -> np.ndarray:
        return np.arange(self._shape.rows) * 10

    def close(self) -> None:
        pass


def test_a_contender_that_delivers_other_tokens_is_refused(tmp_path: Path) -> None:
    shape, tokens = Shape(rows=4, length=9), some_tokens(100)
    write_raw(tmp_path / "corpus.bin", tokens)
    check(Shifted(tokens, shape, late=0), tmp_path / "corpus.bin", shape)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="shifted: step 0 of 4 x 9 must hold the windows at"):
        check(Shifted(tokens, shape, late=1), tmp_path / "corpus.bin", shape)  # type: ignore[arg-type]


def test_inputs_and_targets_that_do_not_belong_together_are_refused() -> None:
    tokens = torch.arange(10).view(2, 5)
    assert windows_of((tokens[:, :-1], tokens[:, 1:])).tolist() == tokens.tolist()
    with pytest.raises(RuntimeError, match="moved by one token"):
        windows_of((tokens[:, :-1], tokens[:, :-1]))
