"""A budget of seconds for every area, told at the end of a run so that nobody has to guess what became slow."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

# On two idle cores; together well under the half hour that a run may take on a busy machine.
BUDGET_S = {
    "benchmarks": 60,
    "crash": 180,
    "effects": 10,
    "gpu": 60,
    "journal": 90,
    "pipelines": 60,
    "residency": 150,
    "statemachine": 40,
    "worker": 120,
    "": 60,
}
_spent_s: defaultdict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Book a test's time, with its set-up, on its area."""
    parts = Path(report.nodeid.split("::")[0]).parts
    _spent_s[parts[1] if len(parts) > 2 else ""] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what every area took, and mark those over their budget. A busy machine is no failure."""
    if not _spent_s:
        return
    terminalreporter.section("seconds per area")
    for area, spent_s in sorted(_spent_s.items()):
        budget_s = BUDGET_S.get(area, 0)
        mark = "  over budget" if spent_s > budget_s else ""
        terminalreporter.line(f"{area or 'tests':<14} {spent_s:6.1f} of {budget_s:4}{mark}")
