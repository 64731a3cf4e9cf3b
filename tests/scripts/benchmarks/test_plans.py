"""The smoke form of the axis of what a plan costs."""

from pathlib import Path

from scripts.benchmarks.axes import plans
from scripts.benchmarks.report import Options


def test_plans_measures_every_step_and_judges_the_slowest(tmp_path: Path) -> None:
    report = plans.measure(Options(cache=tmp_path, smoke=True))
    measured = report.data["measured"]
    assert [row["at_step"] for row in measured] == list(plans.STEPS)
    for target, name in zip(report.targets, plans.TARGETS_MS, strict=True):
        assert target.reached == max(row[name]["median"] for row in measured) > 0
    for row in report.tables[0].rows:
        assert len(row) == len(report.tables[0].columns)
