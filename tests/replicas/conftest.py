"""Servers on loopback; and the checkout on the path, last, for the replicas without weights that the benchmark has."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
# The benchmarks are no part of the package. At the end, so that the folders at the root shadow nothing.
sys.path.append(str(ROOT))
TOKEN = "a token of the tests, 0123456789".replace(" ", "-")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RESIDENCY_")]:
        monkeypatch.delenv(name)
    # A repetition is shown to come, not how long it waits.
    monkeypatch.setattr("residency.fleet_replica.PAUSE_S", 0.02)


@pytest.fixture(scope="module")
def servers() -> Iterator[Any]:
    """Ended all at once: each takes a tenth of a second to notice."""
    pytest.importorskip("uvicorn")
    from benchmarks.fleet_replicas import Servers

    made = Servers()
    yield made
    made.close()


@pytest.fixture
def token() -> str:
    return TOKEN
