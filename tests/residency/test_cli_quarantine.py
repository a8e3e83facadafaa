import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from residency.journal.events import Draft, EventType
from residency.journal.fold import fold_stream


def die(story: Any, number: int, *, by_epoch: str, fingerprint: dict[str, Any] | None = None) -> None:
    """A life that restores and dies moving, and what the next start writes about that."""
    epoch = f"dead-{number}"
    story.start(epoch=epoch, fingerprint=fingerprint)
    story.restore(number, from_round=1, epoch=epoch)
    intent = story.intend(number, epoch=epoch)
    story.recover(number, epoch=epoch, by_epoch=by_epoch, intent=intent)


@pytest.fixture
def quarantined(committed: Any) -> Any:
    """A committed placement that then killed two lives; the third life is over."""
    die(committed, 2, by_epoch="dead-3")
    die(committed, 3, by_epoch="epoch-4")
    committed.start(epoch="epoch-4")
    committed.write(Draft(type=EventType.STOPPED, round=0, payload={"reason": "exit"}), epoch="epoch-4")
    return committed


def decision(run: Callable[..., Any]) -> dict[str, Any]:
    (stream,) = run("replay", "--dry-run", "--json", "--journal", "journal.db").json()
    found: dict[str, Any] = stream["recovery"]["decision"]
    return found


def listed(run: Callable[..., Any]) -> list[Any]:
    found: list[Any] = run("quarantine", "list", "--json", "--journal", "journal.db").json()
    return found


def clear(run: Callable[..., Any], *options: str, reason: str = "a fixed driver") -> Any:
    return run("quarantine", "clear", *options, "--reason", reason, "--journal", "journal.db")


def test_list_names_the_deaths_and_since_when(quarantined: Any, run: Callable[..., Any]) -> None:
    (one,) = listed(run)
    lines = run("quarantine", "list", "--utc", "--journal", "journal.db").out.splitlines()

    assert (one["standing"], one["current"], one["stream"]) == ("quarantined", True, "worker")
    assert [strike["epoch"] for strike in one["strikes"]] == ["dead-2", "dead-3"]
    assert one["since"] == one["strikes"][1]["at"]
    assert lines[0].split() == ["STREAM", "PLACEMENT", "STANDING", "SINCE", "FINGERPRINT", "BY"]
    assert lines[1].split()[:3] == ["worker", one["placement"][:12], "quarantined"]
    assert "epoch dead-2, round 2, 2026-11-30T12:00:" in lines[1]
    assert lines[2].split()[:2] == ["epoch", "dead-3,"]


def test_list_says_that_nothing_is_held(committed: Any, run: Callable[..., Any]) -> None:
    done = run("quarantine", "list", "--journal", "journal.db")

    assert (done.code, done.out) == (0, "")
    assert done.err.splitlines()[-1] == "nothing is held against any placement"
    # It may have died since: only the next start knows.
    assert done.err.startswith("epoch epoch-1 of worker runs, or died unnoticed")


def test_a_cleared_placement_is_restored_by_the_next_start(quarantined: Any, run: Callable[..., Any]) -> None:
    assert decision(run)["kind"] == "calibrate"
    (one,) = listed(run)

    done = clear(run, one["placement"][:8])

    assert (done.code, listed(run)) == (0, [])
    assert done.out.startswith(f"cleared placement {one['placement'][:12]} (quarantined, 2 things held against it)")
    assert (decision(run)["kind"], decision(run)["placement"]) == ("restore", one["placement"])
    last = run("log", "-n", "1", "--journal", "journal.db").out
    assert "quarantine.cleared" in last and "is forgiven: a fixed driver" in last
    assert run("verify", "--journal", "journal.db").code == 0


def test_all_clears_every_fingerprint(quarantined: Any, run: Callable[..., Any]) -> None:
    die(quarantined, 4, by_epoch="epoch-5", fingerprint={"torch": "2.14.0"})
    assert [(one["current"], one["standing"]) for one in listed(run)] == [
        (False, "quarantined"),
        (True, "blamed"),
    ]

    done = clear(run, "--all", "--json")

    assert [event["type"] for event in done.json()] == ["quarantine.cleared"] * 2
    assert listed(run) == []


def test_a_second_clear_finds_nothing_and_writes_nothing(quarantined: Any, run: Callable[..., Any]) -> None:
    clear(run, "--all")
    events = run("log", "--json", "--journal", "journal.db").json()

    done = clear(run, "--all")

    assert (done.code, done.err) == (1, "nothing is held against any placement\n")
    assert run("log", "--json", "--journal", "journal.db").json() == events


def test_clearing_moves_nothing_else(quarantined: Any, run: Callable[..., Any]) -> None:
    before = fold_stream(quarantined.journal.events(stream="worker"), "worker").epochs
    clear(run, "--all")
    after = fold_stream(quarantined.journal.events(stream="worker"), "worker").epochs

    assert after[:-1] == before[:-1]
    assert after[-1].last_at == before[-1].last_at
    assert [one.reason for one in after[-1].clearings] == ["a fixed driver"]


@pytest.mark.parametrize(
    "options", [(), ("--all", "abcd"), ("0000",), ("ab",), ("--all", "--reason", " "), ("--all", "--stream", "nobody")]
)
def test_unclear_wishes_are_refused(options: tuple[str, ...], quarantined: Any, run: Callable[..., Any]) -> None:
    done = run("quarantine", "clear", "--reason", "x", *options, "--journal", "journal.db")

    assert done.code == (1 if options == ("0000",) else 2)
    assert (done.out, done.err.count("\n"), len(listed(run))) == ("", 1, 1)


def test_a_reason_must_be_given(quarantined: Any, run: Callable[..., Any]) -> None:
    done = run("quarantine", "clear", "--all", "--journal", "journal.db")

    assert (done.code, "--reason" in done.err) == (2, True)


def test_a_journal_that_is_not_there_is_not_made(run: Callable[..., Any], tmp_path: Any) -> None:
    assert clear(run, "--all").code == 3
    assert not list(tmp_path.iterdir())


def test_a_worker_that_runs_keeps_its_stream(quarantined: Any, run: Callable[..., Any]) -> None:
    with quarantined.journal.hold("worker"):
        done = clear(run, "--all")

    assert (done.code, len(listed(run))) == (3, 1)
    assert "stream-in-use: stream 'worker' is held by process" in done.err
    assert "give --wait SECONDS and restart it" in done.err


def test_it_waits_for_a_worker_to_be_restarted(quarantined: Any, run: Callable[..., Any]) -> None:
    held = quarantined.journal.hold("worker")
    timer = threading.Timer(0.3, held.release)
    timer.start()
    try:
        done = clear(run, "--all", "--wait", "20")
    finally:
        timer.join()

    assert (done.code, listed(run)) == (0, [])


def test_listing_loads_no_sqlalchemy(quarantined: Any, clean_environment: dict[str, str]) -> None:
    code = (
        "import sys; from residency.cli import main\n"
        f"code = main(['quarantine', 'list', '--journal', {str(quarantined.path)!r}])\n"
        "print(code, 'sqlalchemy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean_environment
    )

    assert done.stdout.splitlines()[-1] == "0 False"
