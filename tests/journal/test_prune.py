"""Pruning: what goes, what a start must still find, and that what is left proves itself."""

from __future__ import annotations

import errno
import io
import itertools
import json
import logging
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from residency.errors import JournalCorrupt, JournalError
from residency.journal.backup import backup
from residency.journal.events import Draft, EventType
from residency.journal.export import export
from residency.journal.fold import fold_stream
from residency.journal.hashing import blob_digest, hash_event
from residency.journal.head import read_head
from residency.journal.host import boot_id
from residency.journal.importing import import_lines
from residency.journal.prune import EPOCHS_MIN_AT_START, prune, retain
from residency.journal.reader import JournalReader
from residency.journal.retention import DAY_NS, FINGERPRINTS_KEPT, Retention
from residency.journal.schema import TRIGGERS
from residency.journal.sqlite import connect, driver
from residency.journal.store import Journal
from residency.journal.verify import Finding, FindingKind, verify
from residency.statemachine.history import History
from residency.statemachine.policy import Policy
from residency.statemachine.recovery import closing, decide

if TYPE_CHECKING:
    from collections.abc import Callable

    from residency.journal.views import StreamView

STREAM = "worker"
POLICY = Policy()


def digest(name: str) -> str:
    """Of the placement by that name."""
    return blob_digest(name.encode())


@dataclass
class Past:
    """Writes lives of a worker as a worker does: each start closes what the one before it left open."""

    path: Path
    now_ns: int = 1_700_000_000 * 10**9
    stream: str = STREAM
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    # The last round of all, and of the life that is written.
    last_round: int = 0
    round: int = 0

    def live(self, *steps: str, fingerprint: str = "f", days: float = 1) -> str:
        """Live one life, then let days pass.

        steps: 'commit p', 'restore p', 'fail p', 'refuse p', 'move p', 'die p', 'serve p', 'clear f', 'stop'.
        """
        epoch = f"{self.stream}-{next(self.numbers)}"
        with Journal.open(self.path, clock_ns=lambda: self.now_ns) as journal:
            self.close(journal, by_epoch=epoch)
            started = {"fingerprint": {"part": fingerprint}, "fingerprint_digest": fingerprint}
            self.round = 0
            self._write(journal, epoch, EventType.EPOCH_STARTED, started | {"initial_placement": digest("initial")})
            for step in steps:
                self._take(journal, epoch, *step.split())
        self.now_ns += int(days * DAY_NS)
        return epoch

    def close(self, journal: Journal, *, by_epoch: str) -> None:
        view = fold_stream(journal.events(stream=self.stream), self.stream)
        for one in closing(view, boot_id=boot_id(), now_ns=self.now_ns, by_epoch=by_epoch):
            journal.append(one.drafts, stream=self.stream, epoch=one.epoch, rank=one.rank, witness=True)

    def _take(self, journal: Journal, epoch: str, what: str, name: str = "") -> None:
        if what == "serve":
            self._write(journal, epoch, EventType.SERVING, {"placement": digest(name), "decision": "restored"})
        elif what == "stop":
            self._write(journal, epoch, EventType.STOPPED, {"reason": "detach", "signal": None})
        elif what == "clear":
            payload = {"fingerprint": name, "placement": None, "reason": "mended"}
            self._write(journal, epoch, EventType.QUARANTINE_CLEARED, payload)
        else:
            self._round(journal, epoch, what, name)

    def _round(self, journal: Journal, epoch: str, what: str, name: str) -> None:
        self.round = self.last_round = self.last_round + 1
        source = "journal" if what == "restore" else "calibration"
        inputs = {"records": [name]} if source == "calibration" else None
        plan = {"placement": digest(name), "previous": digest("initial"), "source": source, "inputs": inputs}
        verdict = {"blames": "plan", "reason": "slower", "detail": name}
        steps: dict[str, tuple[str, str, dict[str, Any]]] = {
            "commit": ("commit", "committed", {"placement": digest(name), "output_digest": name}),
            "restore": ("commit", "committed", {"placement": digest(name), "output_digest": name}),
            "fail": ("roll_back", "rolled-back", {"placement": digest("initial"), "verdict": verdict}),
            "refuse": (
                "roll_back",
                "rolled-back",
                {"placement": digest("initial"), "verdict": verdict | {"blames": "request"}},
            ),
        }
        self._transition(journal, epoch, "plan", "planned", plan, name)
        self._write(journal, epoch, EventType.EFFECT_INTENT, {"index": 0, "component": "vae"}, witness=True)
        if what in steps or what == "move":
            intent = list(journal.events(stream=self.stream))[-1].event_id
            outcome = {"index": 0, "component": "vae", "result": "applied"}
            self._write(journal, epoch, EventType.EFFECT_OUTCOME, outcome, causation=intent)
        if what in steps:
            self._transition(journal, epoch, *steps[what])

    def _transition(
        self, journal: Journal, epoch: str, trigger: str, to: str, payload: dict[str, Any], name: str = ""
    ) -> None:
        blobs = (name.encode(), b"initial") if name else ()
        self._write(
            journal, epoch, EventType.TRANSITION, payload, trigger=trigger, to_state=to, blobs=blobs,
            witness=trigger != "plan",
        )  # fmt: skip

    def _write(
        self,
        journal: Journal,
        epoch: str,
        kind: EventType,
        payload: dict[str, Any],
        *,
        witness: bool = False,
        **more: Any,
    ) -> None:
        self.now_ns += 10**9
        blobs = more.pop("blobs", (b"initial",) if kind is EventType.EPOCH_STARTED else ())
        draft = Draft(type=kind, round=self.round, payload=payload, blobs=blobs, **more)
        journal.append([draft], stream=self.stream, epoch=epoch, witness=witness)

    def view(self) -> StreamView:
        with JournalReader.open(self.path) as reader:
            return fold_stream(reader.events(self.stream), self.stream)

    def prune(self, **options: Any) -> Any:
        with Journal.open(self.path, clock_ns=lambda: self.now_ns) as journal:
            return prune(journal, **{"keep_epochs": 2, "now_ns": self.now_ns, **options})


@pytest.fixture
def past(path: Path) -> Past:
    return Past(path)


def serious(path: Path) -> tuple[Finding, ...]:
    with JournalReader.open(path) as reader:
        return tuple(finding for finding in verify(reader) if not finding.is_note)


def kinds(path: Path) -> set[FindingKind]:
    return {finding.kind for finding in serious(path)}


def epochs(past: Past) -> list[str]:
    return [epoch.epoch for epoch in past.view().epochs]


def stated(past: Past) -> list[dict[str, Any]]:
    """What the last event `pruned` says was removed."""
    with JournalReader.open(past.path) as reader:
        events = [event for event in reader.events(past.stream) if event.type == "pruned"]
    found: list[dict[str, Any]] = json.loads(events[-1].payload)["removed"]
    return found


def test_old_epochs_go_whole_and_what_is_left_verifies(past: Past) -> None:
    past.live("commit p", "serve p", "stop")
    for _ in range(5):
        past.live("restore p", "serve p", "stop")
    before = past.view()
    (removal,) = past.prune()
    # The first one holds the measurements that p rests on.
    assert epochs(past) == ["worker-1", "worker-5", "worker-6"]
    assert (removal.num_epochs, removal.num_rounds, removal.kept_epochs) == (3, 3, 3)
    assert removal.num_events == sum(epoch.num_events for epoch in before.epochs[1:4])
    assert serious(past.path) == ()
    after = past.view()
    assert [replaced_positions(one) for one in after.epochs] == [
        replaced_positions(before.epochs[index]) for index in (0, 4, 5)
    ]
    assert after.pruned is not None and after.pruned.num_events == removal.num_events


def replaced_positions(epoch: Any) -> tuple[Any, ...]:
    """An epoch but for what the event about the pruning itself changes."""
    return epoch.epoch, epoch.state, epoch.rounds, epoch.serving, epoch.stopped, epoch.last_at


def test_a_second_prune_joins_what_went_before_and_a_third_has_nothing_to_do(past: Past) -> None:
    for _ in range(3):
        past.live("serve initial", "stop")
    past.prune(keep_epochs=1)
    for _ in range(3):
        past.live("serve initial", "stop")
    past.prune(keep_epochs=1)
    (one,) = stated(past)
    assert (one["first_version"], one["previous_hash"]) == (1, "00" * 32)
    assert epochs(past) == ["worker-6"]
    assert serious(past.path) == ()
    with JournalReader.open(past.path) as reader:
        content = [event.hash for event in reader.events()]
    assert past.prune(keep_epochs=1) == ()
    with JournalReader.open(past.path) as reader:
        assert [event.hash for event in reader.events()] == content


def test_age_and_number_must_both_allow_it(past: Past) -> None:
    for _ in range(6):
        past.live("serve initial", "stop", days=10)
    assert past.prune(keep_epochs=6, keep_since_ns=past.now_ns) == ()
    assert past.prune(keep_epochs=2, keep_since_ns=0) == ()
    past.prune(keep_epochs=2, keep_since_ns=past.now_ns - 35 * DAY_NS)
    assert epochs(past) == ["worker-4", "worker-5", "worker-6"]


@pytest.mark.parametrize("bounds", [{"keep_epochs": 0}, {"keep_since_ns": 10**30}])
def test_bounds_that_would_keep_nothing_are_refused(bounds: dict[str, int], past: Past) -> None:
    past.live("stop")
    with pytest.raises(ValueError, match="keep something"):
        past.prune(**bounds)


def test_a_dry_run_says_what_would_go_and_removes_nothing(past: Past) -> None:
    for _ in range(4):
        past.live("serve initial", "stop")
    content = past.path.read_bytes()
    planned = past.prune(dry_run=True)
    assert past.path.read_bytes() == content
    assert past.prune() == planned


def test_a_live_epoch_and_one_that_nobody_has_closed_yet_stay(past: Past) -> None:
    past.live("commit p", "serve p")
    with Journal.open(past.path, clock_ns=lambda: past.now_ns) as journal:
        for number in range(5):
            draft = Draft(type=EventType.EPOCH_STARTED, round=0, payload={"initial_placement": digest("initial")})
            journal.append([draft], stream=STREAM, epoch=f"open-{number}")
    assert past.prune(keep_epochs=1) == ()
    assert len(epochs(past)) == 6


def test_round_numbers_are_never_given_twice(past: Past) -> None:
    past.live("fail a", "fail b", "stop", fingerprint="old")
    for _ in range(2):
        for number in range(FINGERPRINTS_KEPT + 3):
            past.live("stop", fingerprint=f"{number}")
        assert past.view().highest_round == 2
        past.prune(keep_epochs=1)
        assert len(epochs(past)) == 1
        assert past.view().highest_round == 2


def test_blobs_that_nothing_names_any_more_go_and_all_others_stay(past: Past) -> None:
    past.live("commit p", "stop", fingerprint="old")
    past.live("commit q", "stop", fingerprint="older")
    for number in range(FINGERPRINTS_KEPT + 1):
        past.live("commit q", "stop", fingerprint=f"{number}")
    (removal,) = past.prune(keep_epochs=1)
    assert removal.num_blobs == 1
    with JournalReader.open(past.path) as reader:
        assert {name for name, _ in reader.blobs()} == {digest("q"), digest("initial")}
    assert serious(past.path) == ()


def test_other_streams_are_left_alone_and_may_be_pruned_too(past: Past) -> None:
    other = Past(past.path, stream="other")
    for _ in range(4):
        past.live("serve initial", "stop")
        other.live("serve initial", "stop")
    past.prune(stream=STREAM, keep_epochs=1)
    assert (len(epochs(past)), len(epochs(other))) == (1, 4)
    assert serious(past.path) == ()
    assert {one.stream for one in past.prune(keep_epochs=1)} == {"other"}
    assert (len(epochs(past)), len(epochs(other))) == (1, 1)
    assert serious(past.path) == ()


def test_the_triggers_are_back_afterwards(past: Past) -> None:
    for _ in range(4):
        past.live("stop")
    past.prune(keep_epochs=1)
    connection = connect(past.path, mode="rw", wait_s=1)
    found = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'")}
    assert found == set(TRIGGERS)
    with pytest.raises(driver.IntegrityError, match="append-only"):
        connection.execute("DELETE FROM events")
    connection.close()


def test_the_witness_names_what_is_there_even_if_it_lagged(past: Past) -> None:
    past.live("commit p", "stop", fingerprint="old")
    # None of these writes a witness.
    for number in range(FINGERPRINTS_KEPT + 3):
        past.live("stop", fingerprint=f"{number}")
    past.prune(keep_epochs=1)
    head = read_head(past.path)
    assert head is not None
    with JournalReader.open(past.path) as reader:
        last = list(reader.events())[-1]
    assert (last.type, last.hash.hex()) == ("pruned", head.streams[STREAM].hash)
    assert serious(past.path) == ()


def test_a_witness_that_cannot_be_moved_on_keeps_everything(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    past.live("commit p", "stop", fingerprint="old")
    for number in range(FINGERPRINTS_KEPT + 3):
        past.live("stop", fingerprint=f"{number}")
    before = past.view()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(JournalError, match=r"journal\.db\.head: no space left"):
        past.prune(keep_epochs=1)
    assert past.view() == before
    assert serious(past.path) == ()


def test_what_is_damaged_is_not_removed(past: Past, tamper: Callable[..., None]) -> None:
    for _ in range(4):
        past.live("stop")
    tamper("UPDATE events SET pid = 7 WHERE position = 2")
    with pytest.raises(JournalCorrupt, match="event 2 is not what was written"):
        past.prune(keep_epochs=1)
    assert len(epochs(past)) == 4


def test_a_journal_without_its_triggers_is_not_pruned(past: Past, tamper: Callable[..., None]) -> None:
    for _ in range(4):
        past.live("stop")
    tamper("SELECT 1", restore=False)
    with pytest.raises(JournalCorrupt, match="triggers are not as they were made"):
        past.prune(keep_epochs=1)
    assert len(epochs(past)) == 4


# Removed at one place, and at two: the epoch between them is needed.
PRUNED = {
    "at the beginning": lambda past: [past.live("serve initial", "stop") for _ in range(5)],
    "around a needed epoch": lambda past: [
        past.live("stop"),
        past.live("commit p", "stop"),
        *(past.live("stop") for _ in range(4)),
    ],
}


@pytest.mark.parametrize("where", PRUNED)
def test_more_that_is_missing_than_was_pruned_is_found(where: str, past: Past, tamper: Callable[..., None]) -> None:
    PRUNED[where](past)
    past.prune()
    assert serious(past.path) == ()
    with JournalReader.open(past.path) as reader:
        there = [event.position for event in reader.events()]
    for position in there:
        content = past.path.read_bytes()
        tamper("DELETE FROM events WHERE position = ?", (position,))
        assert kinds(past.path), position
        past.path.write_bytes(content)
    assert serious(past.path) == ()


@pytest.mark.parametrize("where", PRUNED)
def test_a_forged_statement_of_what_was_pruned_is_found(where: str, past: Past, tamper: Callable[..., None]) -> None:
    """Written by someone who can hash: the chain is right again, and only the statement is wrong."""
    PRUNED[where](past)
    past.prune()
    content = past.path.read_bytes()
    for change in (
        lambda removed: removed[-1].update(last_version=removed[-1]["last_version"] + 1),
        lambda removed: removed[0].update(previous_hash="11" * 32),
        lambda removed: removed[-1].update(hash="11" * 32),
        lambda removed: removed.clear(),
        lambda removed: removed[0].update(first_position=9, last_position=90),
    ):
        _forge(past, change, tamper)
        assert kinds(past.path) - {FindingKind.HEAD}, change
        past.path.write_bytes(content)


def _forge(past: Past, change: Callable[[list[dict[str, Any]]], object], tamper: Callable[..., None]) -> None:
    with JournalReader.open(past.path) as reader:
        last = list(reader.events())[-1]
    stated = json.loads(last.payload)
    change(stated["removed"])
    payload = json.dumps(stated, sort_keys=True, separators=(",", ":")).encode()
    forged = hash_event(last._replace(payload=payload))
    tamper("UPDATE events SET payload = ?, hash = ? WHERE position = ?", (payload, forged, last.position))


def test_a_pruned_journal_is_exported_imported_copied_and_continued(past: Past, tmp_path: Path) -> None:
    PRUNED["around a needed epoch"](past)
    past.prune()
    out = io.BytesIO()
    with JournalReader.open(past.path) as reader:
        export(reader, out)
    with Journal.open(tmp_path / "imported.db") as journal:
        import_lines(out.getvalue().splitlines(), journal)
    again = io.BytesIO()
    with JournalReader.open(tmp_path / "imported.db") as reader:
        export(reader, again)
    assert again.getvalue() == out.getvalue()
    backup(past.path, tmp_path / "copy.db")
    for path in (tmp_path / "imported.db", tmp_path / "copy.db", past.path):
        other = Past(path, now_ns=past.now_ns, numbers=itertools.count(100))
        other.live("restore p", "stop")
        other.prune(keep_epochs=1)
        assert serious(path) == ()


def test_an_export_of_a_journal_that_lacks_more_than_was_pruned_is_refused(
    past: Past, tmp_path: Path, tamper: Callable[..., None]
) -> None:
    PRUNED["at the beginning"](past)
    past.prune()
    with JournalReader.open(past.path) as reader:
        first = next(iter(reader.events())).position
    tamper("DELETE FROM events WHERE position = ?", (first,))
    out = io.BytesIO()
    with JournalReader.open(past.path) as reader:
        export(reader, out)
    with Journal.open(tmp_path / "imported.db") as journal, pytest.raises(JournalCorrupt, match=r"line 3: position"):
        import_lines(out.getvalue().splitlines(), journal)


def test_an_export_during_which_the_journal_is_pruned_says_so(past: Past) -> None:
    PRUNED["at the beginning"](past)
    with JournalReader.open(past.path) as reader:
        plain = reader.blobs

        def pruning() -> Any:
            past.prune()
            yield from plain()

        reader.blobs = pruning  # type: ignore[method-assign]
        with pytest.raises(JournalError, match="pruned while it was exported"):
            export(reader, io.BytesIO())


def test_a_stream_that_is_gone_among_what_was_pruned_is_found(past: Past, tamper: Callable[..., None]) -> None:
    past.live("stop")
    with Journal.open(past.path) as journal:
        journal.append([Draft(type=EventType.GATED, round=0)], stream="other", epoch="e")
    for _ in range(3):
        past.live("stop")
    past.prune(stream=STREAM, keep_epochs=1)
    assert serious(past.path) == ()
    tamper("DELETE FROM events WHERE stream = 'other'")
    (finding,) = serious(past.path)
    assert finding.kind is FindingKind.GAP and "7 positions are missing, and 6 were pruned" in finding.text


# What a start decides.

# Histories whose last decision hangs on one old epoch.
NEEDED: dict[str, list[tuple[str, ...]]] = {
    "the last commit": [("commit p", "stop"), ("stop",)],
    "the last commit of another placement": [("commit p", "stop"), ("commit q", "stop"), ("stop",)],
    "a rollback that blames the plan": [("fail p", "stop"), ("commit q", "stop"), ("stop",)],
    "a death in a round": [("die p",), ("commit q", "stop"), ("stop",)],
    "the second death of a plan that was never committed": [("die p",), ("die p",), ("stop",)],
    "the last plan, which nobody blames": [("refuse p", "stop"), ("stop",), ("stop",), ("stop",)],
    "a restore that was committed": [("restore p", "stop"), ("stop",)],
    "what an operator cleared": [("die p",), ("die p",), ("clear f", "stop"), ("stop",)],
    "a life that forgives early deaths": [
        *[("restore p", "serve p")] * 3,
        ("serve p", "stop"),
        ("stop",),
    ],
    "early deaths in a row": [("commit p", "serve p"), ("serve p",), ("serve p",)],
}


@pytest.mark.parametrize("what", NEEDED)
def test_a_start_still_finds(what: str, past: Past) -> None:
    for steps in NEEDED[what]:
        past.live(*steps, days=0.001 if steps[-1].startswith("serve") else 1)
    if "row" not in what and "last plan" not in what:
        for _ in range(4):
            past.live("stop", fingerprint="g")
    before = _decided(past)
    past.prune(keep_epochs=1)
    assert _decided(past) == before
    assert serious(past.path) == ()


@pytest.mark.parametrize("step", ["die p", "move p"])
def test_an_orderly_end_in_mid_move_stays_until_a_start_has_blamed_it(step: str, past: Past) -> None:
    past.live(step, "stop")
    with Journal.open(past.path) as journal:
        for number in range(4):
            drafts = [Draft(type=kind, round=0) for kind in (EventType.EPOCH_STARTED, EventType.STOPPED)]
            journal.append(drafts, stream=STREAM, epoch=f"later-{number}")
    past.prune(keep_epochs=1)
    assert "worker-1" in epochs(past)


def test_the_last_life_that_is_over_stays_for_its_fingerprint(past: Past) -> None:
    past.live("stop", fingerprint="g")
    past.live("stop", fingerprint="h")
    with Journal.open(past.path) as journal:
        draft = Draft(type=EventType.EPOCH_STARTED, round=0, payload={"initial_placement": digest("initial")})
        journal.append([draft], stream=STREAM, epoch="living")
    before = _decided(past)
    past.prune(keep_epochs=1)
    assert epochs(past) == ["worker-2", "living"]
    assert _decided(past) == before


STEPS = st.lists(
    st.builds(
        lambda what, name: f"{what} {name}",
        st.sampled_from(["commit", "restore", "fail", "refuse", "die"]),
        st.sampled_from("pq"),
    )
    | st.sampled_from(["serve p", "serve q", "serve initial", "stop", "clear f"]),
    max_size=4,
)
LIVES = st.lists(
    st.tuples(STEPS, st.sampled_from("fg"), st.sampled_from([0.0, 0.001, 1.0, 5.0])), min_size=3, max_size=14
)


@given(LIVES, st.integers(1, 4))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_start_decides_the_same_as_if_nothing_had_been_removed(
    lives: list[tuple[list[str], str, float]], keep_epochs: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="residency-test-") as folder:
        past = Past(Path(folder) / "journal.db")
        for number, (steps, fingerprint, days) in enumerate(lives):
            # A worker cannot write after it has ended.
            end = steps.index("stop") + 1 if "stop" in steps else len(steps)
            past.live(*steps[:end], fingerprint=fingerprint, days=days)
            if number % 5 == 4:
                before = _decided(past)
                past.prune(keep_epochs=keep_epochs)
                assert _decided(past) == before
                assert serious(past.path) == ()


def _decided(past: Past) -> list[Any]:
    """What the next start would close with, and decide, under each fingerprint; and what it holds against whom."""
    view = past.view()
    closed = closing(view, boot_id=boot_id(), now_ns=past.now_ns, by_epoch="next")
    found: list[Any] = [[(one.epoch, one.drafts) for one in closed], view.highest_round]
    for fingerprint in "fg":
        decision = decide(
            view, fingerprint={"part": fingerprint}, fingerprint_digest=fingerprint, initial=digest("initial")
        )
        held = History.of(view, fingerprint_digest=fingerprint).held(POLICY)
        round_ = decision.round
        rests_on = None if round_ is None else (round_.number, round_.epoch, round_.plan, round_.outcome)
        found.append(
            (decision.kind, decision.reason, decision.placement, decision.excluded, decision.expected_output, rests_on)
        )
        found.append([(one.placement, one.standing, [strike.epoch for strike in one.strikes]) for one in held])
    return found


# At a start.


def test_a_start_prunes_once_there_is_enough_to_prune(past: Past, caplog: pytest.LogCaptureFixture) -> None:
    retention = Retention(days=30, epochs=3)
    removal = None
    for number in range(EPOCHS_MIN_AT_START + 4):
        past.live("serve initial", "stop", days=40)
        with Journal.open(past.path, clock_ns=lambda: past.now_ns) as journal:
            removal = retain(journal, past.view(), now_ns=past.now_ns, retention=retention)
        # Some epochs that may go are not worth a transaction; the last one that ended stays besides.
        assert (removal is not None) == (number + 1 - 3 >= EPOCHS_MIN_AT_START), number
        if removal is not None:
            break
    assert removal is not None and removal.num_epochs == EPOCHS_MIN_AT_START
    assert len(epochs(past)) == 3
    assert serious(past.path) == ()
    assert not caplog.records


def test_a_retention_that_is_off_keeps_everything(past: Past) -> None:
    for _ in range(EPOCHS_MIN_AT_START + 2):
        past.live("stop", days=400)
    with Journal.open(past.path) as journal:
        assert retain(journal, past.view(), now_ns=past.now_ns, retention=None) is None
        assert retain(journal, past.view(), now_ns=past.now_ns, retention=Retention(epochs=50)) is None


def test_a_retention_that_fails_is_a_warning_and_no_error(
    past: Past, tamper: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(EPOCHS_MIN_AT_START + 2):
        past.live("stop", days=400)
    tamper("UPDATE events SET pid = 7 WHERE position = 2")
    with caplog.at_level(logging.WARNING), Journal.open(past.path) as journal:
        found = retain(journal, past.view(), now_ns=past.now_ns, retention=Retention(days=1, epochs=1))
    assert found is None
    assert "old epochs of stream 'worker' stay: journal" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90d", (90, 50)), ("7d, 5", (7, 5)), ("0d,1", (0, 1)), (" 30D ", (30, 50)), ("off", None), ("OFF", None)],
)
def test_a_retention_is_written_as(text: str, expected: tuple[int, int] | None) -> None:
    found = Retention.parse(text)
    assert (None if found is None else (found.days, found.epochs)) == expected


@pytest.mark.parametrize("text", ["", "90", "-1d", "90d,0", "5 weeks", "d", "90d,50,1"])
def test_what_is_no_retention_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="retention"):
        Retention.parse(text)


# Killed in the middle.

PRUNER = """
import os, sys
from residency.journal.prune import prune
from residency.journal.rewrite import Rewrite
from residency.journal.store import Journal
from residency.journal import prune as module

left = int(sys.argv[2])

def dying(plain):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        return plain(*args, **kwargs)
    return call

for name in ("newest", "events", "delete_events", "delete_blobs", "append", "_check_triggers"):
    setattr(Rewrite, name, dying(getattr(Rewrite, name)))
module.write_head = dying(module.write_head)
from residency.journal.head import HeadFile
HeadFile.advance = dying(HeadFile.advance)
with Journal.open(sys.argv[1]) as journal:
    prune(journal, keep_epochs=1, now_ns=4 * 10**18)
print("done", left)
"""


def test_a_prune_that_is_killed_anywhere_is_done_or_not_begun(past: Past, start: Callable[..., Any]) -> None:
    past.live("commit p", "stop", fingerprint="old")
    for number in range(FINGERPRINTS_KEPT + 3):
        past.live("stop", fingerprint=f"{number}")
    files = {suffix: Path(f"{past.path}{suffix}").read_bytes() for suffix in ("", ".head")}
    before = past.view()
    outcomes, left = set(), 0
    for left in range(30):
        for suffix, content in files.items():
            Path(f"{past.path}{suffix}").write_bytes(content)
        for suffix in ("-wal", "-shm"):
            Path(f"{past.path}{suffix}").unlink(missing_ok=True)
        process = start(PRUNER, past.path, left)
        output, errors = process.communicate(timeout=60)
        assert serious(past.path) == (), left
        found = past.view()
        outcomes.add(found.pruned is not None)
        assert found == before or (found.pruned is not None and len(found.epochs) == 1), left
        if process.returncode == 0:
            assert output.startswith("done"), errors
            break
    assert outcomes == {True, False} and left > 6
