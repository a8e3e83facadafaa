import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from residency.journal.events import Draft, EventType
from residency.statemachine.deaths import EARLY


@pytest.fixture(autouse=True)
def in_utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC0")
        time.tzset()
        yield
    time.tzset()


def facts(done: Any) -> dict[str, str]:
    """The lines above the table, by name."""
    lines = done.out.split("\n\n")[0].splitlines()
    return {line[:10].strip(): line[12:] for line in lines}


def why(done: Any) -> list[str]:
    _, _, rest = done.out.partition("\nwhy\n")
    return [line.strip() for line in rest.split("\n\n")[0].splitlines()]


def test_a_committed_worker_says_where_its_weights_are_and_why(committed: Any, run: Callable[..., Any]) -> None:
    done = run("at", "--journal", "journal.db")

    assert done.code == 0
    assert facts(done)["worker"].startswith("worker, epoch epoch-1, process ")
    assert facts(done)["then"] == "serving, committed in round 1"
    assert facts(done)["later"] == (
        "committed in round 1, serving since 2026-11-30T12:00:09+00:00; alive, or it died: then the next start says so"
    )
    assert facts(done)["last event"].startswith("9 at 2026-11-30T12:00:09.000+00:00 (")
    assert facts(done)["next event"] == "none yet"
    assert why(done)[:3] == [
        "round 1 was committed at 2026-11-30T12:00:08+00:00: faster: 2.50 s to 1.90 s",
        "its plan came from calibration",
        "a faster placement would not fit in phase 'use:transformer'",
    ]
    assert done.out.endswith("more: residency explain 1; residency show 1; residency log --after 0\n")


def test_between_two_events_both_are_named(committed: Any, run: Callable[..., Any]) -> None:
    done = run("at", "2026-11-30T12:00:04.5Z", "--journal", "journal.db")

    assert facts(done)["at"] == "2026-11-30T12:00:04.500+00:00"
    assert facts(done)["then"] == "moving weights, planned in round 1"
    assert facts(done)["last event"].startswith("4 at 2026-11-30T12:00:04.000+00:00 (500.0 ms before): effect.intent")
    assert facts(done)["next event"].startswith("5 at 2026-11-30T12:00:05.000+00:00 (500.0 ms after): effect.outcome")
    assert "in doubt: component-offload (pinned) or layerwise-offload" in done.out


def test_a_time_of_day_is_the_last_one(
    committed: Any, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: committed.now_ns + 3600 * 10**9)

    by_clock = run("at", "12:00:03", "--json", "--journal", "journal.db").json()
    by_position = run("at", "3", "--json", "--journal", "journal.db").json()

    assert by_clock[0].pop("asked_for") == "2026-11-30T12:00:03.000000000Z"
    assert by_position[0].pop("asked_for") is None
    assert by_clock == by_position


def test_json_holds_what_the_page_says(committed: Any, run: Callable[..., Any]) -> None:
    (plain,) = run("at", "4", "--json", "--journal", "journal.db").json()

    assert (plain["stream"], plain["position"], plain["moving"], plain["in_doubt"]) == (
        "worker",
        4,
        True,
        ["transformer"],
    )
    assert plain["components"]["transformer"]["mode"] == "component-offload"
    assert (plain["last_event"]["type"], plain["next_event"]["type"]) == ("effect.intent", "effect.outcome")


def test_a_start_that_found_a_death_says_so(crashed: Any, died: Callable[[], None], run: Callable[..., Any]) -> None:
    died()
    crashed.start(epoch="epoch-3")

    done = run("at", "--journal", "journal.db")

    blame = "it died between the first effect and the commit, in round 2, planned"
    assert why(done) == [f"its start found epoch epoch-2 dead: that blames plan: {blame}"]
    assert facts(done)["then"] == "starting, measuring"


def test_a_life_that_died_later_is_told_with_what_is_known_today(
    crashed: Any, died: Callable[[], None], run: Callable[..., Any]
) -> None:
    crashed.now_ns += 3600 * 10**9
    died()
    crashed.start(epoch="epoch-3")

    while_alive = run("at", "13", "--journal", "journal.db")
    later = run("at", "2026-11-30T12:30:00Z", "--journal", "journal.db")

    assert facts(while_alive)["then"] == "moving weights, planned in round 2"
    assert facts(while_alive)["later"].startswith("it died (it died between the first effect and the commit")
    assert "in doubt" not in facts(while_alive)
    # Half an hour after its last word nobody knows.
    assert facts(later)["in doubt"].startswith("whether it was still alive")
    assert run("at", "2026-11-30T12:30:00Z", "--json", "--journal", "journal.db").json()[0]["maybe_dead"] is True


def test_after_its_end_nothing_is_left_of_a_worker(committed: Any, run: Callable[..., Any]) -> None:
    committed.write(Draft(type=EventType.STOPPED, round=1, payload={"reason": "signal", "signal": "SIGTERM"}))

    done = run("at", "--journal", "journal.db")

    assert facts(done)["then"].startswith("over, with nothing of it left on the device")
    assert facts(done)["later"] == "it stopped (SIGTERM)"


def test_a_gate_is_a_reason(story: Any, run: Callable[..., Any], gate: Callable[..., None]) -> None:
    story.start()
    gate(story, reason="no-warmup", detail="there is no warmup to measure with")

    assert why(run("at", "--journal", "journal.db")) == [
        "it did nothing beyond its initial placement: no-warmup: there is no warmup to measure with"
    ]


def test_without_any_reason_it_is_what_was_configured(story: Any, run: Callable[..., Any]) -> None:
    story.start()

    assert why(run("at", "--journal", "journal.db")) == [
        "no round had begun: it is the placement that the worker was configured with"
    ]


def test_a_rolled_back_round_leaves_the_one_before_it(committed: Any, run: Callable[..., Any]) -> None:
    committed.plan(2)
    verdict = {"ok": False, "blames": "plan", "reason": "memory", "detail": "too much"}
    committed.write(
        Draft(
            type=EventType.TRANSITION,
            round=2,
            payload={"verdict": verdict},
            from_state="planned",
            to_state="rolled-back",
            trigger="roll_back",
        )
    )

    lines = why(run("at", "--journal", "journal.db"))

    assert lines[0].startswith("round 1 was committed at ")
    assert any(line.startswith("round 2 was rolled-back at ") and "plan: memory" in line for line in lines)
    assert lines[-1] == "so the placement before that round was in force again"


def test_every_worker_of_a_journal_is_told_of(committed: Any, run: Callable[..., Any]) -> None:
    committed.start(stream="other", epoch="epoch-9")

    both = run("at", "--json", "--journal", "journal.db").json()
    one = run("at", "--json", "--stream", "other", "--journal", "journal.db").json()
    early = run("at", "3", "--json", "--journal", "journal.db").json()

    assert [plain["stream"] for plain in both] == ["other", "worker"]
    assert [plain["stream"] for plain in one] == ["other"]
    # There was no other worker yet.
    assert [plain["stream"] for plain in early] == ["worker"]


def test_nothing_before_the_first_event(committed: Any, run: Callable[..., Any]) -> None:
    done = run("at", "2020-01-01", "--journal", "journal.db")

    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("the journal has no events up to 2020-01-01T00:00:00.000")
    assert "; its first is of 20" in done.err


def test_deaths_while_serving_name_the_life_they_ended(committed: Any, run: Callable[..., Any]) -> None:
    death = {"blames": "infrastructure", "kind": EARLY, "why": "it died within 4 s", "placement": None}
    committed.write(Draft(type=EventType.RECOVERED, round=1, payload={"by_epoch": "epoch-2", "death": death}))
    committed.start(epoch="epoch-2")

    assert facts(run("at", "9", "--journal", "journal.db"))["later"] == (
        "it died (it died within 4 s; that blames infrastructure)"
    )
