"""Starts of a worker in processes of their own, and what their journal says afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from residency.journal.fold import fold_stream
from residency.journal.reader import JournalReader
from residency.journal.verify import verify

if TYPE_CHECKING:
    from residency.journal.views import StreamView

Start = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a worker in a forked child: start(journal=..., append=n, before=False) dies at its n-th append."""
    script = Path(__file__).with_name("preloaded.py")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path_factory.mktemp("state"))}
    server = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdin is not None and server.stdout is not None

    def ask(**request: Any) -> dict[str, Any]:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps({**request, "journal": str(request["journal"])}) + "\n")
        server.stdin.flush()
        answer: dict[str, Any] = json.loads(server.stdout.readline())
        return answer

    yield ask
    server.stdin.close()
    server.wait(timeout=60)
    server.stdout.close()


@pytest.fixture
def inspect() -> Callable[[Path | str], StreamView]:
    """Verify a journal and return its stream, folded."""

    def look(journal: Path | str) -> StreamView:
        reader = JournalReader.open(journal)
        try:
            findings = [one for one in verify(reader) if not one.is_note]
            assert findings == []
            events = list(reader.events("tiny"))
            intents = [e.event_id for e in events if e.type == "effect.intent"]
            outcomes = [e.causation for e in events if e.type == "effect.outcome"]
            assert len(outcomes) == len(set(outcomes)), "an intent has two outcomes"
            assert set(outcomes) <= set(intents), "an outcome has no intent"
            return fold_stream(events, "tiny")
        finally:
            reader.close()

    return look
