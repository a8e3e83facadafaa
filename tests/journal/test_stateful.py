"""Appends, lives, prunes, migrations, second writers and crashes by turns, against a list that stands for all of it."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from residency.errors import JournalError
from residency.journal import migrations
from residency.journal.events import Draft, Event, EventType
from residency.journal.hashing import blob_digest
from residency.journal.prune import prune
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from residency.journal.verify import verify


class JournalMachine(RuleBasedStateMachine):
    # None for a journal in a file.
    database: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.schema = None if self.database is None else self.database.new_schema()
        self.folder = Path(tempfile.mkdtemp(prefix="residency-test-"))
        self.written: list[Event] = []
        self.writers: list[Journal] = []
        self.number = self.lives = 0

    @property
    def path(self) -> Path:
        return self.folder / f"{self.number}" / "journal.db"

    @property
    def url(self) -> str:
        return str(self.path) if self.database is None else str(self.database.url(self.schema))

    def open(self) -> Journal:
        return Journal.open(self.url, state_folder=self.folder)

    @initialize()
    def begin(self) -> None:
        self.writers.append(self.open())

    @precondition(lambda self: len(self.writers) < 3)
    @rule()
    def open_another_writer(self) -> None:
        self.writers.append(self.open())

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0, 2))
    def close_a_writer(self, which: int) -> None:
        self.writers.pop(which % len(self.writers)).close()

    @precondition(lambda self: self.writers)
    @rule(
        which=st.integers(0, 2),
        stream=st.sampled_from(["a", "b", "ü \x00 '"]),
        payloads=st.lists(
            st.dictionaries(st.text(max_size=5), st.one_of(st.integers(-(2**63), 2**63), st.text())), max_size=3
        ),
        blobs=st.lists(st.binary(max_size=8), max_size=2),
        witness=st.booleans(),
    )
    def append(
        self, which: int, stream: str, payloads: list[dict[str, int | str]], blobs: list[bytes], witness: bool
    ) -> None:
        drafts = [
            Draft(type=EventType.MEASURED, round=1, payload=dict(payload), blobs=tuple(blobs)) for payload in payloads
        ]
        writer = self.writers[which % len(self.writers)]
        self.written += writer.append(drafts, stream=stream, epoch="e", witness=witness)

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0, 2))
    def append_what_cannot_be_written(self, which: int) -> None:
        good, bad = Draft(type=EventType.MEASURED, round=1), Draft(type=EventType.MEASURED, round=-1)
        try:
            self.writers[which % len(self.writers)].append([good, bad], stream="a", epoch="e")
        except JournalError:
            return
        raise AssertionError("a round below zero was written")

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0, 2), stream=st.sampled_from(["a", "b"]), blob=st.binary(max_size=2))
    def live(self, which: int, stream: str, blob: bytes) -> None:
        """One life of a worker, from its start to its end."""
        self.lives += 1
        started = {"fingerprint_digest": "f", "initial_placement": blob_digest(blob)}
        drafts = [
            Draft(type=EventType.EPOCH_STARTED, round=0, payload=started, blobs=(blob,)),
            Draft(type=EventType.STOPPED, round=0, payload={"reason": "detach", "signal": None}),
        ]
        writer = self.writers[which % len(self.writers)]
        self.written += writer.append(drafts, stream=stream, epoch=f"life-{self.lives}", witness=True)

    @precondition(lambda self: self.writers and self.database is None)
    @rule(which=st.integers(0, 2))
    def prune(self, which: int) -> None:
        """Old lives go, whole; everything else stays as it was written, and what says so comes last."""
        removals = prune(self.writers[which % len(self.writers)], keep_epochs=1, now_ns=time.time_ns())
        with JournalReader.open(self.url) as reader:
            found = list(reader.events())
        kept = [event for event in self.written if event in found]
        gone = [event for event in self.written if event not in found]
        said = found[len(kept) :]
        assert found[: len(kept)] == kept
        assert [event.type for event in said] == [EventType.PRUNED.value] * len(removals)
        assert sum(one.num_events for one in removals) == len(gone)
        assert all(event.epoch.startswith("life-") for event in gone)
        assert not {event.epoch for event in gone} & {event.epoch for event in kept}
        last = {event.stream: event.epoch for event in self.written if event.epoch.startswith("life-")}
        assert not {event.epoch for event in gone} & set(last.values())
        self.written = found

    @precondition(lambda self: self.database is None and migrations.known_format() == 1)
    @rule()
    def become_a_later_program(self) -> None:
        """Whoever opens the journal next brings it to a format that this program does not know yet."""
        later = ("CREATE TABLE later (name TEXT NOT NULL PRIMARY KEY) STRICT",)
        migrations.MIGRATIONS = (*migrations.MIGRATIONS, later)

    @rule()
    def crash(self) -> None:
        """What is on disk now is what a killed process leaves: it becomes the journal. A server ends the sessions."""
        if self.database is not None:
            self.database.end_sessions()
        else:
            before = self.path.parent
            self.number += 1
            shutil.copytree(before, self.path.parent, ignore=shutil.ignore_patterns("*-shm"))
        for writer in self.writers:
            writer.close()
        self.writers = []

    @invariant()
    def reads_as_written(self) -> None:
        if self.database is None and not self.path.exists():
            return
        with JournalReader.open(self.url, state_folder=self.folder) as reader:
            assert list(reader.events()) == self.written
            assert [finding for finding in verify(reader) if not finding.is_note] == []

    def teardown(self) -> None:
        migrations.MIGRATIONS = migrations.MIGRATIONS[:1]
        for writer in self.writers:
            writer.close()
        if self.database is not None:
            self.database.drop_schema(self.schema)
        shutil.rmtree(self.folder)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_journal_reads_as_it_was_written_whatever_comes_between(kind: str, request: pytest.FixtureRequest) -> None:
    machine, max_examples = JournalMachine, 15
    if kind == "postgresql":
        found = {"database": request.getfixturevalue("database")}
        max_examples = 6
        machine = type("ServerMachine", (JournalMachine,), found)  # type: ignore[assignment]
    bounds = settings(
        max_examples=max_examples, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(machine, settings=bounds)
