"""A budget of seconds for every area, told at the end of a run; and a PostgreSQL server, where one can be had."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# On two idle cores; together well under the half hour that a run may take on a busy machine.
BUDGET_S = {
    "benchmarks": 100,
    "crash": 220,
    "effects": 10,
    "gpu": 60,
    "journal": 240,
    "pipelines": 60,
    "ranks": 320,
    "replicas": 80,
    "residency": 150,
    "statemachine": 60,
    "worker": 220,
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


@pytest.fixture(scope="session")
def postgresql() -> Any:
    """The module with servers and databases; skips where the driver is not installed."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    return pytest.importorskip("tests.postgresql")


@pytest.fixture(scope="session")
def own_server(postgresql: Any) -> Iterator[Any]:
    """A server that a test may stop and kill, and must start again; skips where none can be had."""
    yield from _running(postgresql)


@pytest.fixture(scope="session")
def database(postgresql: Any) -> Iterator[Any]:
    """A database on the server of RESIDENCY_TEST_POSTGRESQL (the URL of a superuser), else on one made for it."""
    url = os.environ.get("RESIDENCY_TEST_POSTGRESQL")
    # Not the one that tests kill.
    servers = _running(postgresql) if url is None else None
    made = postgresql.Database(url if servers is None else next(servers).url())
    yield made
    made.close()
    if servers is not None:
        servers.close()


def _running(postgresql: Any) -> Generator[Any]:
    try:
        server = postgresql.Server()
    except postgresql.NoServer as error:
        pytest.skip(str(error))
    try:
        server.start()
        yield server
    finally:
        server.close()
