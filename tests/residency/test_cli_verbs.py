import json
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from residency.statemachine.diagram import mermaid

# The names of an event's fields in JSON, which scripts rely on.
EVENT_FIELDS = [
    "position", "stream", "stream_version", "event_id", "epoch", "round", "rank", "type", "schema_version",
    "from_state", "to_state", "trigger", "recorded_at", "boot_id", "pid", "causation", "payload", "previous_hash",
    "hash",
]  # fmt: skip


def test_log_in_json_names_every_field_of_an_event(committed: Any, run: Callable[..., Any]) -> None:
    done = run("log", "--json", "--journal", "journal.db")

    events = done.json()
    assert [list(event) for event in events] == [EVENT_FIELDS] * 9
    assert [event["position"] for event in events] == list(range(1, 10))
    assert events[0]["recorded_at"] == "2026-11-30T12:00:01.000000000Z"
    assert events[2] | {"from_state": "measuring", "to_state": "planned", "trigger": "plan"} == events[2]
    assert events[4]["causation"] == events[3]["event_id"]
    assert events[1]["previous_hash"] == events[0]["hash"]
    assert (done.code, done.err) == (0, "")


def test_log_shows_people_one_line_an_event(committed: Any, run: Callable[..., Any]) -> None:
    lines = run("log", "--journal", "journal.db").out.splitlines()

    assert len(lines) == 10
    assert lines[0].split() == ["POSITION", "TIME", "ROUND", "EVENT", "WHAT"]
    assert "measuring -> planned" in lines[3] and "from calibration" in lines[3]
    assert "component-offload (pinned) -> layerwise-offload (pageable, 2 slots, blocks: 2 resident)" in lines[4]
    assert "transformer applied" in lines[5]


@pytest.mark.parametrize(
    ("options", "positions"),
    [
        (("-n", "2"), [8, 9]),
        (("-n", "0"), []),
        (("-n", "50"), list(range(1, 10))),
        (("--since", "2026-11-30T12:00:08Z"), [8, 9]),
        (("--since", "2026-11-30T12:00:03Z", "-n", "1"), [9]),
    ],
)
def test_log_shows_only_what_is_asked_for(
    options: tuple[str, ...], positions: list[int], committed: Any, run: Callable[..., Any]
) -> None:
    done = run("log", "--json", "--journal", "journal.db", *options)

    assert [event["position"] for event in done.json()] == positions
    assert done.code == 0


def test_log_says_that_there_is_nothing_since(committed: Any, run: Callable[..., Any]) -> None:
    done = run("log", "--since", "2030-01-01", "--journal", "journal.db", "--json", "--utc")

    assert (done.code, done.out, done.err) == (0, "", "no events since 2030-01-01T00:00:00Z\n")


def test_rounds_lists_the_newest_first(crashed: Any, run: Callable[..., Any]) -> None:
    lines = run("rounds", "--journal", "journal.db").out.splitlines()

    assert lines[0].split()[:2] == ["ROUND", "STATE"]
    assert lines[1].split()[:3] == ["2", "planned", "calibration"]
    assert "1 (1 in doubt)" in lines[1] and "in flight or died" in lines[1]
    assert lines[2].split()[:3] == ["1", "committed", "calibration"]
    assert lines[2].endswith("faster: 2.50 s to 1.90 s")


def test_rounds_says_who_died_of_what_and_not_how_long_the_next_start_took_to_come(
    crashed: Any, died: Callable[[], None], run: Callable[..., Any]
) -> None:
    crashed.now_ns += 3600 * 10**9
    died()

    line = run("rounds", "--journal", "journal.db").out.splitlines()[1]
    (second, first) = run("rounds", "--json", "--journal", "journal.db").json()

    assert "2.00 s" in line and "in flight" not in line
    assert line.endswith("died: blames plan: it died between the first effect and the commit, in round 2, planned")
    assert (second["death"]["blames"], first["death"]) == ("plan", None)


def test_rounds_in_json_keeps_outcomes_and_leaves_the_inputs_of_plans_out(
    crashed: Any, run: Callable[..., Any]
) -> None:
    second, first = run("rounds", "--json", "--journal", "journal.db").json()

    assert (second["number"], second["ended_at"], len(second["open_intents"])) == (2, None, 1)
    assert (first["state"], first["started_at"]) == ("committed", "2026-11-30T12:00:02.000000000Z")
    assert first["outcome"]["verdict"]["reason"] == "faster"
    assert "plan" not in first


def test_show_tells_one_round_with_its_changes_and_events(committed: Any, run: Callable[..., Any]) -> None:
    done = run("show", "1", "--journal", "journal.db")

    assert done.code == 0
    assert "state      committed" in done.out
    assert (
        "transformer  component-offload (pinned)  layerwise-offload (pageable, 2 slots, blocks: 2 resident)" in done.out
    )
    assert "validating -> committed" in done.out


def test_show_in_json_is_one_object_with_events(committed: Any, run: Callable[..., Any]) -> None:
    (shown,) = run("show", "1", "--json", "--journal", "journal.db").json()

    assert [event["position"] for event in shown["events"]] == list(range(2, 10))
    assert shown["plan"]["bound_by"] == "device memory in phase 'use:transformer'"


@pytest.mark.parametrize("verb", ["show", "explain"])
def test_a_round_that_does_not_exist_is_a_finding(verb: str, committed: Any, run: Callable[..., Any]) -> None:
    done = run(verb, "7", "--journal", "journal.db")

    assert (done.code, done.out) == (1, "")
    assert done.err == "stream 'worker' has no round 7; its rounds are 1 to 1\n"


def test_placement_shows_where_every_component_lives(committed: Any, run: Callable[..., Any]) -> None:
    done = run("placement", "--journal", "journal.db")

    assert [line.split() for line in done.out.splitlines()[2:]] == [
        ["text_encoder", "component-offload", "pinned", "-", "-"],
        ["transformer", "layerwise-offload", "pageable", "2", "blocks", "2"],
        ["vae", "resident", "-", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("at", "transformer", "position"),
    [
        ("1", "component-offload", 1),
        ("3", "component-offload", 3),
        ("4", "component-offload", 4),
        ("5", "layerwise-offload", 5),
        ("7", "layerwise-offload", 7),
        ("8", "layerwise-offload", 8),
        ("2026-11-30T12:00:04.999Z", "component-offload", 4),
        ("2026-11-30T12:00:08Z", "layerwise-offload", 8),
        ("now", "layerwise-offload", 9),
    ],
)
def test_placement_can_be_asked_for_any_moment(
    at: str, transformer: str, position: int, committed: Any, run: Callable[..., Any]
) -> None:
    (shown,) = run("placement", "--at", at, "--json", "--journal", "journal.db").json()

    assert shown["components"]["transformer"]["mode"] == transformer
    assert shown["position"] == position


def test_placement_warns_while_a_round_moves_weights(crashed: Any, run: Callable[..., Any]) -> None:
    done = run("placement", "--json", "--journal", "journal.db")

    (shown,) = done.json()
    assert (shown["moving"], shown["in_doubt"], shown["ended"]) == (True, ["transformer"], False)
    assert done.err == ("round 2 had moved weights and had not settled: this is what the journal knows of the device\n")


@pytest.mark.parametrize(
    ("position", "transformer", "in_doubt"),
    [
        ("4", "in doubt: component-offload (pinned) or layerwise-offload", True),
        ("5", "moved it, from component-offload (pinned)", False),
        ("7", "moved it, from component-offload (pinned)", False),
    ],
)
def test_placement_in_mid_round_says_what_was_on_the_device(
    position: str, transformer: str, in_doubt: bool, committed: Any, run: Callable[..., Any]
) -> None:
    lines = run("placement", "--at", position, "--journal", "journal.db").out.splitlines()
    (shown,) = run("placement", "--at", position, "--json", "--journal", "journal.db").json()

    assert lines[0].startswith("before it: placement ") and lines[0].endswith("in round 1 of worker")
    assert lines[1].endswith("THE ROUND")
    assert "has not touched it" in lines[2]
    assert transformer in lines[3]
    assert shown["in_doubt"] == (["transformer"] if in_doubt else [])


def test_an_effect_that_was_taken_back_is_shown_as_before_it(
    crashed: Any, settle: Callable[..., None], run: Callable[..., Any]
) -> None:
    settle("applied")
    applied = run("placement", "--json", "--journal", "journal.db").json()[0]
    undo = crashed.intend(2, epoch="epoch-2", undo=True)
    undoing = run("placement", "--json", "--journal", "journal.db").json()[0]
    settle("undone", intent=undo)
    undone = run("placement", "--json", "--journal", "journal.db").json()[0]

    modes = [one["components"]["transformer"]["mode"] for one in (applied, undoing, undone)]
    assert modes == ["layerwise-offload", "layerwise-offload", "component-offload"]
    assert [one["in_doubt"] for one in (applied, undoing, undone)] == [[], ["transformer"], []]


def test_placement_after_a_recovery_is_in_doubt_until_the_next_life_begins(
    crashed: Any, died: Callable[[], None], run: Callable[..., Any]
) -> None:
    died()
    position = run("log", "--json", "--journal", "journal.db").json()[-1]["position"]
    crashed.start(epoch="epoch-3")

    recovered = run("placement", "--at", str(position), "--journal", "journal.db")
    now = run("placement", "--journal", "journal.db")

    assert "in doubt" in recovered.out and "the effect's outcome is lost" in recovered.out
    assert "epoch epoch-2 was over by then" in recovered.err
    assert (now.err, "in doubt" in now.out) == ("", False)


def test_placement_before_the_first_event_is_a_finding(committed: Any, run: Callable[..., Any]) -> None:
    done = run("placement", "--at", "2020-01-01", "--journal", "journal.db")

    assert (done.code, done.err) == (1, "the journal has no events up to there\n")


@pytest.mark.parametrize("position", ["0", "10"])
def test_a_position_outside_the_journal_is_a_usage_error(
    position: str, committed: Any, run: Callable[..., Any]
) -> None:
    done = run("placement", "--at", position, "--journal", "journal.db")

    assert done.code == 2
    assert f"--at {position} is outside the journal; its positions are 1 to 9" in done.err


def test_replay_folds_every_epoch(crashed: Any, run: Callable[..., Any]) -> None:
    (stream,) = run("replay", "--json", "--journal", "journal.db").json()
    lines = run("replay", "--journal", "journal.db").out.splitlines()

    assert [(epoch["state"], epoch["round"], epoch["moving"]) for epoch in stream["epochs"]] == [
        ("committed", 1, False),
        ("planned", 2, True),
    ]
    assert "recovery" not in stream
    assert lines[0] == "stream worker; epochs: 2, rounds: 2"


def test_replay_in_a_dry_run_says_what_recovery_would_do_and_writes_nothing(
    crashed: Any, run: Callable[..., Any]
) -> None:
    before = crashed.path.read_bytes()

    (stream,) = run("replay", "--dry-run", "--json", "--journal", "journal.db").json()
    shown = run("replay", "--dry-run", "--journal", "journal.db")

    assert [one["epoch"] for one in stream["recovery"]["closing"]] == ["epoch-1", "epoch-2"]
    assert stream["recovery"]["closing"][1]["types"] == ["effect.outcome", "recovered"]
    assert stream["recovery"]["decision"]["kind"] == "replan"
    assert "the next start closes epoch epoch-2 with effect.outcome, recovered" in shown.out
    assert "it then decides, if the worker has not changed: replan of placement" in shown.out
    assert crashed.path.read_bytes() == before


def test_verify_finds_nothing_in_a_sound_journal(committed: Any, run: Callable[..., Any]) -> None:
    done = run("verify", "--json", "--journal", "journal.db")

    assert (done.code, done.out, done.err) == (0, "", "ok\n")


def test_verify_finds_a_changed_event_and_says_where(committed: Any, run: Callable[..., Any]) -> None:
    committed.journal.close()
    with sqlite3.connect(committed.path) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f'DROP TRIGGER "{name}"')
        connection.execute("UPDATE events SET round = 3 WHERE position = 4")
        for _, sql in triggers:
            connection.execute(sql)
    connection.close()

    done = run("verify", "--json", "--journal", "journal.db")

    assert done.code == 1
    assert ("chain", 4) in [(one["kind"], one["position"]) for one in done.json()]
    assert run("verify", "--journal", "journal.db").out.splitlines()[0].split() == [
        "KIND",
        "POSITION",
        "STREAM",
        "WHAT",
    ]


def test_graph_prints_the_generated_diagram(run: Callable[..., Any]) -> None:
    assert run("graph").out == mermaid()


def test_log_in_json_is_valid_for_a_payload_of_any_text(
    story: Any, run: Callable[..., Any], gate: Callable[..., None]
) -> None:
    story.start()
    gate(story, reason="warmup-failed", detail='line\none "two" \x1b[31m ünï')

    lines = run("log", "--json", "--journal", "journal.db").out.splitlines()
    shown = run("log", "--journal", "journal.db").out

    assert json.loads(lines[1])["payload"]["detail"] == 'line\none "two" \x1b[31m ünï'
    # What a worker wrote must neither break a row nor steer the terminal.
    assert len(shown.splitlines()) == 3
    assert "\x1b" not in shown
