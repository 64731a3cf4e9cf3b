"""Fail a run that lost a process, and say how many of its tests did not run.

pytest-xdist reports the test that was running when a process ended. It says nothing of the tests that the
process had not begun, and nothing at all if the process ended between two tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


class Completeness:
    """Compare what was collected with what was reported; a plugin of the process that leads the others."""

    def __init__(self) -> None:
        self._collected: set[str] = set()
        self._reported: set[str] = set()
        self._lost: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Note the tests of the run."""
        self._collected.update(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """Note a process that ended before it was told to."""
        if error is not None:
            self._lost.append(node.gateway.id)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that ran, or during which its process ended."""
        self._reported.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Let a lost process be the run's failure."""
        if self._lost and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what is missing, where it cannot be overlooked: before the last line."""
        missing = self._collected - self._reported
        if not missing and not self._lost:
            return
        line = f"{len(missing):,} of {len(self._collected):,} tests did not run"
        if self._lost:
            line = f"lost processes: {', '.join(self._lost)}; {line}"
        terminalreporter.write_sep("=", line, red=True, bold=True)
