"""The machine: its table, and every sharp edge of the library closed."""

from __future__ import annotations

import gc
import logging
import pickle
import weakref
from itertools import product

import pytest

from residency.errors import TransitionRefused
from residency.statemachine.diagram import mermaid
from residency.statemachine.machine import RoundMachine
from residency.statemachine.states import ALLOWED_WHEN_PINNED, INITIAL, SETTLED, TRANSITIONS, State, Trigger

LEGAL = {(source, trigger): target for trigger, source, target in TRANSITIONS}


@pytest.mark.parametrize(("state", "trigger"), [*product(State, Trigger)])
def test_exactly_the_rows_of_the_table_are_accepted(state: State, trigger: Trigger) -> None:
    machine = RoundMachine(3, state)
    assert machine.may(trigger) is ((state, trigger) in LEGAL)
    if machine.may(trigger):
        assert machine.check(trigger) is LEGAL[state, trigger]
        assert machine.fire(trigger) is LEGAL[state, trigger]
        assert machine.state is LEGAL[state, trigger]
    else:
        with pytest.raises(TransitionRefused):
            machine.fire(trigger)
        assert machine.state is state


@pytest.mark.parametrize(("state", "trigger"), sorted(LEGAL, key=str))
def test_the_kill_switch_leaves_only_the_way_back_to_measuring(state: State, trigger: Trigger) -> None:
    machine = RoundMachine(1, state)
    allowed = trigger in ALLOWED_WHEN_PINNED
    assert machine.may(trigger, pinned=True) is allowed
    if allowed:
        assert machine.fire(trigger, pinned=True) is LEGAL[state, trigger]
    else:
        # A guard that says no makes the library return False; ours must raise.
        with pytest.raises(TransitionRefused, match="kill switch"):
            machine.fire(trigger, pinned=True)
        assert machine.state is state


@pytest.mark.parametrize("state", State)
def test_a_pinned_machine_can_always_reach_measuring(state: State) -> None:
    machine = RoundMachine(1, state)
    if machine.state not in SETTLED and machine.state is not INITIAL:
        machine.fire(Trigger.ROLL_BACK, pinned=True)
    if machine.state is not INITIAL:
        machine.fire(Trigger.MEASURE, pinned=True)
    assert machine.state is INITIAL


def test_the_six_states_and_seven_triggers_are_all_reachable() -> None:
    assert (len(State), len(Trigger)) == (6, 7)
    reached, fresh = {INITIAL}, [INITIAL]
    while fresh:
        source = fresh.pop()
        targets = {target for (state, _), target in LEGAL.items() if state is source} - reached
        reached |= targets
        fresh += targets
    assert reached == set(State)
    assert {trigger for trigger, _, _ in TRANSITIONS} == set(Trigger)


def test_a_refusal_names_round_state_trigger_and_what_is_allowed() -> None:
    with pytest.raises(TransitionRefused) as caught:
        RoundMachine(7, State.COMMITTED).fire(Trigger.APPLY)
    assert caught.value.fields == {
        "round_number": 7,
        "state": "committed",
        "trigger": "apply",
        "reason": "only 'measure' can follow",
    }
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_no_automatic_transition_jumps_past_the_table() -> None:
    machine = RoundMachine(1)
    assert set(machine._machine.events) == {trigger.value for trigger in Trigger}
    assert not [name for name in dir(machine._model) if name.startswith("to_")]


def test_the_model_gets_no_trigger_methods_that_would_bypass_fire() -> None:
    model = RoundMachine(1)._model
    assert not {trigger.value for trigger in Trigger} & set(dir(model))
    assert not [name for name in dir(model) if name.startswith(("may_", "is_", "trigger"))]


def test_the_state_cannot_be_assigned() -> None:
    machine = RoundMachine(1)
    with pytest.raises(AttributeError):
        machine.state = State.COMMITTED  # type: ignore[misc]
    assert machine.state is INITIAL


def test_no_callback_runs_product_work_and_no_exception_is_swallowed() -> None:
    # The library keeps a new state although an on_enter or after callback raised, and its on_exception swallows.
    library = RoundMachine(1)._machine
    assert not any(
        (
            library.before_state_change,
            library.after_state_change,
            library.finalize_event,
            library.on_exception,
            library.prepare_event,
            library.on_final,
        )
    )
    assert not any(state.on_enter or state.on_exit for state in library.states.values())
    transitions = [one for event in library.events.values() for many in event.transitions.values() for one in many]
    assert len(transitions) == len(TRANSITIONS)
    assert not any(one.before or one.after or one.prepare for one in transitions)


def test_triggers_are_not_queued() -> None:
    # A queued trigger returns True whatever its guard said.
    assert RoundMachine(1)._machine.has_queue is False


def test_a_trigger_within_a_trigger_is_refused() -> None:
    machine = RoundMachine(1)
    with machine._firing, pytest.raises(TransitionRefused, match="one at a time"):
        machine.fire(Trigger.PLAN)
    assert machine.fire(Trigger.PLAN) is State.PLANNED


def test_a_refused_trigger_leaves_the_machine_usable() -> None:
    machine = RoundMachine(1)
    with pytest.raises(TransitionRefused):
        machine.fire(Trigger.COMMIT)
    assert machine.fire(Trigger.PLAN) is State.PLANNED


@pytest.mark.parametrize("state", State)
def test_a_machine_built_at_a_state_is_there_and_says_its_journal_spelling(state: State) -> None:
    assert RoundMachine(1, state).state is state
    assert RoundMachine(1, State(state.value)).state.value == state.value


def test_machines_are_independent_and_not_kept_alive() -> None:
    first, second = RoundMachine(1), RoundMachine(1)
    first.fire(Trigger.PLAN)
    assert second.state is INITIAL
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_the_library_logs_nothing_into_a_worker_that_logs_at_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        RoundMachine(1).fire(Trigger.PLAN)
    assert not caplog.records


def test_the_diagram_has_an_arrow_for_every_row_and_no_other() -> None:
    arrows = [line.strip() for line in mermaid().splitlines() if "-->" in line]
    wanted = {
        f"{source.value.replace('-', '_')} --> {target.value.replace('-', '_')}: {trigger.value}"
        for trigger, source, target in TRANSITIONS
    }
    assert arrows[0] == "[*] --> measuring"
    assert set(arrows[1:]) == wanted
    assert len(arrows) == len(TRANSITIONS) + 1


def test_the_diagram_shows_states_as_the_journal_spells_them() -> None:
    assert 'state "rolled-back" as rolled_back' in mermaid()
    assert mermaid().startswith("stateDiagram-v2\n") and mermaid().endswith("\n")
