"""Ranks whose journal is on a server: they calibrate, commit, are restarted and restore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from residency.journal.fold import fold_stream
from residency.journal.reader import JournalReader
from residency.journal.verify import verify

Live = Callable[[list[list[dict[str, Any]]]], list[Any]]


def test_two_ranks_commit_in_a_journal_on_a_server_and_restore_from_it(live: Live, database: Any) -> None:
    url = database.url(database.new_schema())
    (case,) = live([[{"ranks": 2, "server": url}, {"ranks": 2, "server": url}]])
    first, second = case

    assert [one.get("decision") for one in first] == ["committed"] * 2, first
    assert [one.get("decision") for one in second] == ["restored"] * 2, second
    assert [one["placement_digest"] for one in second] == [one["placement_digest"] for one in first]
    assert not list(Path(first[0]["folder"]).glob("*.db"))
    with JournalReader.open(url) as reader:
        assert [found for found in verify(reader) if not found.is_note] == []
        for rank in range(2):
            name = f"tiny.rank{rank}"
            rounds = fold_stream(reader.events(name), name).rounds
            assert [(one.number, one.state) for one in rounds] == [(1, "committed"), (2, "committed")]
