import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from residency.cli.watch import INTERRUPTED
from residency.journal.events import Draft, EventType
from residency.statemachine.validation import Reason

COMMAND = [sys.executable, "-m", "residency", "log", "--json", "--journal"]
NOON_NS = 1_796_040_000_000_000_000  # 2026-11-30T12:00:00Z; the events of a story are a second apart from there on
DAY_NS = 86_400 * 10**9


@pytest.fixture
def at_three(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is three in the afternoon of that day, an hour east of Greenwich, where clocks show four."""
    monkeypatch.setattr(time, "time_ns", lambda: NOON_NS + 3 * 3600 * 10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "CET-1")
        time.tzset()
        yield
    time.tzset()


def positions(done: Any) -> list[int]:
    return [event["position"] for event in done.json() if "position" in event]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--since", "13:00:08"), [8, 9]),
        (("--since", "12:00:08", "--utc"), [8, 9]),
        (("--since", "2026-11-30T13:00:08"), [8, 9]),
        (("--since", "3h ago", "--until", "13:00:02"), [1, 2]),
        (("--until", "2026-11-30T12:00:03Z"), [1, 2, 3]),
        (("--since", "2026-11-30T12:00:03Z", "--until", "2026-11-30T12:00:04.5Z"), [3, 4]),
        (("--since", "16:30"), []),
        (("--until", "2026-11-30T12:00:05Z", "-n", "2"), [4, 5]),
        (("--after", "7"), [8, 9]),
        (("--after", "7", "-n", "1"), [9]),
        (("--after", "9"), []),
        (("--after", "99"), []),
    ],
)
def test_log_between_times_and_after_positions(
    options: tuple[str, ...], expected: list[int], committed: Any, run: Callable[..., Any], at_three: None
) -> None:
    # Half past four has not come yet: yesterday's is meant, so that everything came since.
    wanted = expected or (list(range(1, 10)) if "16:30" in options else [])

    assert positions(run("log", "--json", *options, "--journal", "journal.db")) == wanted


def test_times_are_shown_as_on_the_wall_or_in_utc(committed: Any, run: Callable[..., Any], at_three: None) -> None:
    local = run("log", "-n", "1", "--journal", "journal.db").out
    utc = run("log", "-n", "1", "--utc", "--journal", "journal.db").out
    (plain,) = run("log", "-n", "1", "--json", "--journal", "journal.db").json()

    assert " 2026-11-30T13:00:09.000+01:00 " in local
    assert " 2026-11-30T12:00:09.000Z " in utc
    assert plain["recorded_at"] == "2026-11-30T12:00:09.000000000Z"


def test_nothing_in_between_is_said_with_its_bounds(committed: Any, run: Callable[..., Any], at_three: None) -> None:
    done = run("log", "--after", "9", "--since", "13:00", "--journal", "journal.db")

    assert (done.code, done.err) == (0, "no events after 9 since 2026-11-30T13:00:00+01:00\n")


@pytest.mark.parametrize(
    ("options", "cursor"),
    [
        (("--after", "0"), 9),
        (("--after", "0", "-n", "0"), 9),
        (("--after", "4", "-n", "2"), 9),
        (("--after", "12"), 12),
        # What came after that time is still to be read.
        (("--after", "0", "--until", "2026-11-30T12:00:04Z"), 4),
        (("--after", "6", "--until", "2026-11-30T12:00:04Z"), 6),
    ],
)
def test_a_script_gets_a_cursor_to_go_on_from(
    options: tuple[str, ...], cursor: int, committed: Any, run: Callable[..., Any]
) -> None:
    assert run("log", "--json", *options, "--journal", "journal.db").json()[-1] == {"cursor": cursor}


def test_without_after_every_line_is_an_event(committed: Any, run: Callable[..., Any]) -> None:
    assert all("type" in line for line in run("log", "--json", "--journal", "journal.db").json())


def test_a_script_that_goes_on_sees_every_event_once_beside_a_busy_writer(
    committed: Any, run: Callable[..., Any]
) -> None:
    note = Draft(type=EventType.GATED, round=0, payload={"reason": "busy", "detail": "-"})
    ended = threading.Event()

    def write() -> None:
        for _ in range(60):
            committed.journal.append([note] * 20, stream="worker", epoch="epoch-1")
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    cursor, seen, is_over = 0, [], False
    try:
        while not is_over:
            # Looked at before reading: what is read after the last write is everything.
            is_over = ended.is_set()
            *events, last = run("log", "--json", "--after", str(cursor), "--journal", "journal.db").json()
            cursor = last["cursor"]
            seen += [event["position"] for event in events]
    finally:
        writer.join()

    assert seen == list(range(1, 9 + 60 * 20 + 1))


def test_following_sees_every_event_once_beside_a_busy_writer(
    committed: Any, clean_environment: dict[str, str]
) -> None:
    note = Draft(type=EventType.GATED, round=0, payload={"reason": "busy", "detail": "-"})
    options = ["--follow", "--after", "0", "--until-state", "measuring", "--timeout", "60"]
    command = [*COMMAND, str(committed.path), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment) as process:
        for _ in range(100):
            committed.journal.append([note] * 7, stream="worker", epoch="epoch-1")
        measure = Draft(
            type=EventType.TRANSITION, round=2, from_state="committed", to_state="measuring", trigger="measure"
        )
        committed.journal.append([measure, note], stream="worker", epoch="epoch-1")
        out, _ = process.communicate(timeout=60)

    *events, last = [msgspec.json.decode(line) for line in out.splitlines()]
    assert [event["position"] for event in events] == list(range(1, 9 + 700 + 2))
    # Up to the event that was waited for, not up to the end.
    assert (process.returncode, last) == (0, {"cursor": 9 + 700 + 1})


def until(state: str, *options: str, run: Callable[..., Any]) -> Any:
    return run("log", "--until-state", state, *options, "--timeout", "0.3", "--journal", "journal.db")


def test_a_state_that_comes_is_reached(committed: Any, run: Callable[..., Any]) -> None:
    done = until("committed", "--after", "0", run=run)

    assert done.code == 0
    assert done.err.startswith("reached committed: event 8, transition validating -> committed")
    # Only what led to it is shown.
    assert done.out.splitlines()[-1].split()[0] == "8"


def test_a_state_that_is_there_already_does_not_count_without_after(committed: Any, run: Callable[..., Any]) -> None:
    done = until("committed", run=run)

    assert done.code == 124
    assert "it is committed already; waiting for the next time" in done.err
    assert done.err.endswith("timed out after 0.3 s: not committed\n")


def transition(target: str, *, number: int = 1, source: str = "validating", **payload: Any) -> Draft:
    trigger = {"rolled-back": "roll_back", "committed": "commit", "measuring": "measure"}.get(target, "apply")
    return Draft(
        type=EventType.TRANSITION, round=number, payload=payload, from_state=source, to_state=target, trigger=trigger
    )


ROLLED_BACK = transition("rolled-back", verdict={"ok": False, "blames": "plan", "reason": "memory", "detail": "x"})
SIGNALLED = transition("rolled-back", verdict={"ok": False, "reason": INTERRUPTED, "detail": "SIGTERM"})
COMMITTED = transition("committed")


def noted(kind: EventType, **payload: Any) -> Draft:
    return Draft(type=kind, round=0, payload=payload)


SERVING = noted(EventType.SERVING, decision="rolled-back")
GATED = noted(EventType.SERVING, decision="gated")
STOPPED = noted(EventType.STOPPED, reason="exit", signal=None)


@pytest.mark.parametrize(
    ("drafts", "code", "said"),
    [
        ([ROLLED_BACK], 124, "timed out"),  # its start may still calibrate
        ([ROLLED_BACK, SERVING], 1, "not committed: event 2, transition validating -> rolled-back  (plan: memory"),
        ([ROLLED_BACK, COMMITTED], 0, "reached committed: event 3"),
        ([GATED], 1, "not committed: event 2, serving gated"),
        ([noted(EventType.SERVING, decision="kept")], 0, "reached committed: event 2"),
        ([STOPPED], 1, "not committed: event 2, stopped exit"),
        ([noted(EventType.PINNED, by="RESIDENCY_DISABLE")], 1, "not committed: event 2, pinned"),
        ([noted(EventType.POISONED, problem="CUDA error")], 1, "not committed: event 2, poisoned"),
        ([noted(EventType.ROLLBACK_FAILED, problems=["x"])], 1, "not committed: event 2, rollback.failed"),
    ],
)
def test_what_ends_the_waiting_for_a_commit(
    drafts: list[Draft], code: int, said: str, story: Any, run: Callable[..., Any]
) -> None:
    story.start()
    story.write(*drafts)

    done = until("committed", "--after", "1", run=run)

    assert done.code == code
    assert said in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("drafts", "code", "said"),
    [
        ([ROLLED_BACK], 1, "not committed: event 3"),  # somebody asked for that round
        ([SIGNALLED], 124, "timed out"),  # a rollout: its next life goes on
        ([SIGNALLED, STOPPED], 124, "timed out"),
    ],
)
def test_what_ends_the_waiting_on_a_worker_that_serves(
    drafts: list[Draft], code: int, said: str, story: Any, run: Callable[..., Any]
) -> None:
    story.start()
    story.write(SERVING, *drafts)

    done = until("committed", "--after", "2", run=run)

    assert done.code == code
    assert said in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("state", "drafts", "code"),
    [
        ("rolled-back", [ROLLED_BACK], 0),
        ("rolled-back", [COMMITTED], 1),
        ("applied", [COMMITTED], 1),
        ("applied", [transition("applied", source="planned")], 0),
        ("measuring", [COMMITTED, SERVING], 124),
        ("measuring", [COMMITTED, transition("measuring", number=2, source="committed")], 0),
    ],
)
def test_other_states_can_be_waited_for(
    state: str, drafts: list[Draft], code: int, story: Any, run: Callable[..., Any]
) -> None:
    story.start()
    story.write(*drafts)

    assert until(state, "--after", "1", run=run).code == code


def test_a_restart_is_waited_through(committed: Any, run: Callable[..., Any]) -> None:
    committed.write(STOPPED)
    committed.start(epoch="epoch-2")
    committed.commit(2, epoch="epoch-2")

    done = until("committed", "--after", "9", run=run)

    assert (done.code, "reached committed: event 18" in done.err) == (0, True)


def test_whether_it_served_before_is_known_from_what_came_before(committed: Any, run: Callable[..., Any]) -> None:
    committed.write(transition("measuring", number=2, source="committed"), ROLLED_BACK)

    assert until("committed", "--after", "9", run=run).code == 1


def test_the_reason_that_is_spelt_twice_is_the_same() -> None:
    assert INTERRUPTED == Reason.INTERRUPTED.value


def test_a_timeout_without_a_state_ends_the_following_well(committed: Any, run: Callable[..., Any]) -> None:
    done = run("log", "--follow", "--timeout", "0.1", "-n", "1", "--json", "--journal", "journal.db")

    assert (done.code, positions(done)) == (0, [9])


@pytest.mark.parametrize(
    "options",
    [
        ("--follow", "--until", "now"),
        ("--timeout", "3"),
        ("--until-state", "lost"),
        ("--follow", "--timeout", "nan"),
        ("--after", "9" * 20),
    ],
)
def test_options_that_contradict_each_other_are_usage(
    options: tuple[str, ...], committed: Any, run: Callable[..., Any]
) -> None:
    done = run("log", *options, "--journal", "journal.db")

    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


def test_ctrl_c_leaves_the_cursor(committed: Any, clean_environment: dict[str, str]) -> None:
    command = [*COMMAND, str(committed.path), "--follow", "--after", "7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment) as process:
        assert process.stdout is not None
        first = [process.stdout.readline() for _ in range(2)]
        process.send_signal(2)
        out, _ = process.communicate(timeout=20)

    assert [msgspec.json.decode(line)["position"] for line in first] == [8, 9]
    assert (process.returncode, msgspec.json.decode(out)) == (130, {"cursor": 9})


def test_log_does_not_wait_for_what_folds(committed: Any, clean_environment: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys; from residency.cli import main; main(['log', '--journal', 'journal.db'])\n"
        "print(sorted({'residency.journal.fold', 'residency.gpu.records', 'sqlalchemy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=clean_environment
    )

    assert done.stdout.splitlines()[-1] == "[]"
